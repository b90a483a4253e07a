"""Each update takes 100 ms longer, so that a test can interfere with a run. Also a config file."""
import time

from kilogpt.signals import Signals

_exchange = Signals.exchange


def _slow_exchange(*args, **options):  # train.py calls it once an iteration
    time.sleep(0.1)
    return _exchange(*args, **options)


Signals.exchange = _slow_exchange
