"""Remove what Windows does not have: the modules fcntl and resource, and the signal SIGUSR1."""
import signal
import sys

sys.modules['fcntl'] = None
sys.modules['resource'] = None
del signal.SIGUSR1
