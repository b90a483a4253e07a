"""torchrun as the first process of a container: exits with code 143 where a stop signal ended the run.

    python launch/pod.py train.py config/train_gpt2.py --init_from=auto

torchrun itself exits with code 1 in that case, and Kubernetes would count an eviction as a failure of the
run. The arguments and the PET_ environment variables are those of torchrun.
"""
import os
import signal
import socket
import sys
import threading

STOPPED = 128 + signal.SIGTERM  # 143, which train.py exits with once it has saved


def exit_at_sigterm():
    """Exit at SIGTERM until torchrun handles the signal, which it does once it has started train.py.

    The kernel would not deliver SIGTERM to the first process of a container, which has to handle it. While
    torchrun waits for other pods, Python does not run handlers, hence a thread that waits for the signal.
    """
    def handler(*_):
        pass

    def wait():
        os.read(reader, 1)
        if signal.getsignal(signal.SIGTERM) is handler:
            os._exit(STOPPED)

    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer)
    signal.signal(signal.SIGTERM, handler)
    threading.Thread(target=wait, daemon=True).start()


exit_at_sigterm()
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import main

try:
    main()
except SignalException as stop:  # this pod was told to stop
    sys.exit(128 + stop.sigval)
except ChildFailedError as error:  # another pod was told to stop, and train.py stopped on all of them
    failures = error.failures.values()
    sys.exit(STOPPED if any(failure.exitcode == STOPPED for failure in failures) else 1)
except ValueError as error:  # no GPU where PET_NPROC_PER_NODE is `gpu`, for example
    sys.exit(f'error: {error} (pod {socket.gethostname()})')
