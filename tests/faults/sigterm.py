"""SIGTERM reaches the process at the end of iteration FAULT_ITERATION."""
import os
import signal

from kilogpt.run.state import Progress

count_update = Progress.count_update


def count_and_stop(self):
    count_update(self)
    if self.iteration == int(os.environ['FAULT_ITERATION']):
        os.kill(os.getpid(), signal.SIGTERM)


Progress.count_update = count_and_stop
