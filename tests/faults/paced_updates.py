"""Each update takes 300 ms longer (PACE seconds) until the file HURRY exists. This file also works as a config file."""
import os
import time

from kilogpt.run.signals import Signals

_exchange = Signals.exchange


def _paced_exchange(*args, **options):  # train.py calls it once an iteration
    if not os.path.exists(os.environ['HURRY']):
        time.sleep(float(os.environ.get('PACE', 0.3)))
    return _exchange(*args, **options)


Signals.exchange = _paced_exchange
