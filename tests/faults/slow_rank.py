"""Rank 1 takes 30 ms longer in the MLP of each block."""
import os
import time

import model

forward = model.MLP.forward


def slow_forward(*args):
    if os.environ['RANK'] == '1':
        time.sleep(0.03)
    return forward(*args)


model.MLP.forward = slow_forward
