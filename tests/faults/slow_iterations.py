"""Each iteration takes 50 ms longer, so that tests can interrupt a run."""
import time

from kilogpt import learning_rate

scheduled_lr = learning_rate.scheduled_lr


def slow_scheduled_lr(*args):  # train.py calls it once an iteration
    time.sleep(0.05)
    return scheduled_lr(*args)


learning_rate.scheduled_lr = slow_scheduled_lr
