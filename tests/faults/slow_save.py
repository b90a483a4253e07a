"""Storage takes 35 seconds to complete a checkpoint."""
import time

from kilogpt.run.checkpoint import Saver

commit = Saver._commit


def slow_commit(*args):
    time.sleep(35)
    commit(*args)


Saver._commit = slow_commit
