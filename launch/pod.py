"""Run torchrun as the first process of a container, and exit with code 143 if a stop signal ended the run.

    python launch/pod.py train.py config/train_gpt2.py --init_from=auto

torchrun itself exits with code 1 in that case, and Kubernetes would count an eviction as a failure of the
run. Arguments and PET_ environment variables are torchrun's.
"""
import os
import signal
import socket
import sys
import threading

STOPPED = 128 + signal.SIGTERM  # 143, the exit code of train.py after SIGTERM and a save


def exit_at_sigterm():
    """Make SIGTERM end this process until torchrun handles the signal, that is, until train.py has started.

    The kernel does not deliver SIGTERM to the first process of a container unless it has a handler. While
    torchrun waits for other pods, Python cannot run a handler; therefore a thread waits for the signal.
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
except ValueError as error:  # for example, PET_NPROC_PER_NODE is `gpu` and there is no GPU
    sys.exit(f'error: {error} (pod {socket.gethostname()})')
