"""The parts of Unix are missing, as on Windows: the modules fcntl and resource, and the signal SIGUSR1."""
import signal
import sys

sys.modules['fcntl'] = None
sys.modules['resource'] = None
del signal.SIGUSR1
