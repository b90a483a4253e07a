"""Rank 1 hangs while it initializes or loads the parameters."""
import os
import time

from kilogpt.parallel import dtensor
from kilogpt.run import checkpoint


def hang_on_rank_1(function):
    def hanging(*args):
        if os.environ['RANK'] == '1':
            time.sleep(1000)
        return function(*args)
    return hanging


checkpoint.load = hang_on_rank_1(checkpoint.load)
dtensor.fill = hang_on_rank_1(dtensor.fill)
