"""torchrun as the first process of a container: exits with code 143 where a stop signal ended the run.

    python launch/pod.py train.py config/train_gpt2.py --init_from=auto

torchrun itself exits with code 1 in that case, and Kubernetes would count an eviction as a failure of the
run. The arguments and the PET_ environment variables are those of torchrun.
"""
import signal
import sys

STOPPED = 128 + signal.SIGTERM  # 143, which train.py exits with once it has saved
# To the first process of a container the kernel delivers only the signals that the process handles. torchrun
# handles them too, but only once train.py has started.
signal.signal(signal.SIGTERM, lambda *_: sys.exit(STOPPED))

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
