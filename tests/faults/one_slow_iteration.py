"""Rank 1 takes a second longer in one iteration: in a block's MLP (FAULT_PLACE=forward) or to read data (loader)."""
import os
import time

import model
from data.loader import TokenLoader

calls = 0


def delayed(function):
    def delayed_function(*args):
        global calls
        calls += os.environ['RANK'] == '1'
        if calls == 24:  # of 2 an iteration in the MLPs of 2 blocks
            calls += 1
            time.sleep(1)
        return function(*args)
    return delayed_function


if os.environ['FAULT_PLACE'] == 'forward':
    model.MLP.forward = delayed(model.MLP.forward)
else:
    TokenLoader.batch = delayed(TokenLoader.batch)
