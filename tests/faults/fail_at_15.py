"""Every process fails soon after iteration 15, however often it is started. Also a config file."""
from kilogpt.signals import Agreement

_exchange = Agreement.exchange


def _failing_exchange(self, request_save=False, line=None):  # train.py calls it once an iteration
    assert not line or line['iter'] < 15, 'planted'
    return _exchange(self, request_save, line)


Agreement.exchange = _failing_exchange
