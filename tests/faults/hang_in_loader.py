"""Rank 1 hangs in the loader at its 30th batch."""
import os
import time

from data.loader import TokenLoader

batch = TokenLoader.batch
calls = 0


def hanging_batch(self, starts):
    global calls
    calls += 1
    if calls == 30 and os.environ['RANK'] == '1':
        time.sleep(1000)
    return batch(self, starts)


TokenLoader.batch = hanging_batch
