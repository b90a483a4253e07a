"""SIGTERM reaches the process at the end of iteration FAULT_ITERATION."""
import os
import signal

from kilogpt.run.state import Run

advance = Run.advance


def advance_and_stop(self):
    advance(self)
    if self.iteration == int(os.environ['FAULT_ITERATION']):
        os.kill(os.getpid(), signal.SIGTERM)


Run.advance = advance_and_stop
