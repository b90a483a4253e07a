"""Each iteration takes 50 ms longer, so that tests can interrupt a run."""
import time

from kilogpt import optim

scheduled_lr = optim.scheduled_lr


def slow_scheduled_lr(*args):  # train.py calls it once an iteration
    time.sleep(0.05)
    return scheduled_lr(*args)


optim.scheduled_lr = slow_scheduled_lr
