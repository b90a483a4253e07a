"""Every process fails soon after iteration 15 at each attempt. This file also works as a config file."""
from kilogpt.run.signals import Signals

_exchange = Signals.exchange


def _failing_exchange(self, line=None):  # train.py calls it once an iteration
    assert not line or line['iter'] < 15, 'planted'
    return _exchange(self, line)


Signals.exchange = _failing_exchange
