"""What a process settles with its machine: freed memory, threads, and cores that other processes use."""
import ctypes
import os
import sys
import threading
import time

import torch

from kilogpt.devices.cpus import available_cpus, read_text

BUSY = 0.2  # share of the time for which the main thread waits for a core, above which threads should sleep
CALM = 0.05  # and below which they can spin again
COSTLY = 1 / 3  # share above which this is worth a line


def prepare(say):
    """Prepare this process for computing on CPUs that other processes may use too. say: prints a line."""
    keep_freed_memory()
    if 'OMP_NUM_THREADS' not in os.environ and torch.get_num_threads() > available_cpus():
        torch.set_num_threads(available_cpus())
    if torch.get_num_threads() > 1 and scheduled_time() and loaded_openmp():
        threading.Thread(target=share_cores, args=(say,), daemon=True).start()


def keep_freed_memory():
    """Let glibc keep large blocks of freed memory for the next iteration.

    By default glibc returns a large block to the system at once, and the system zeroes each new block page by
    page, which takes half of an iteration's time.
    """
    if sys.platform == 'linux':
        M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
        mallopt = getattr(ctypes.CDLL(None), 'mallopt', None)  # absent from other C libraries, such as musl
        if mallopt:
            mallopt(M_MMAP_THRESHOLD, 2 ** 31 - 1)
            mallopt(M_TRIM_THRESHOLD, 2 ** 31 - 1)


def share_cores(say):
    """Watch for contention, and let threads sleep at barriers while other processes want the same cores.

    A thread that reaches a barrier early spins for milliseconds, which is fastest on an idle machine. On a
    busy one it takes time from the very threads for which it waits, and an iteration takes up to 40 times as
    long. The number of threads stays the same, so results do not depend on the load.
    """
    before, team, has_said_so = (0, 0), None, False
    calm_seconds, needed_seconds = 0, 2
    while True:
        now = scheduled_time()
        ran, waited = now[0] - before[0], now[1] - before[1]
        before = now
        share = waited / max(1, ran + waited)
        calm_seconds = calm_seconds + 1 if share < CALM else 0
        if not team and share > BUSY:
            team = IdleTeam()
        elif team and calm_seconds >= needed_seconds:
            team.end()
            team = None
            needed_seconds = min(2 * needed_seconds, 60)  # a load that comes and goes costs less each time
        if share > COSTLY and not has_said_so:
            say(f'  the machine is busy: this process waits for a core {share:.0%} of the time, '
                'so its threads sleep at barriers instead of spinning')
            has_said_so = True
        time.sleep(1)


class IdleTeam:
    """A second OpenMP team, which sleeps. While it exists, no thread of the process spins for long.

    libgomp spins 300,000 rounds at a barrier, but only 100 as soon as it manages more threads than there are
    CPUs (`do_spin` in libgomp/config/linux/wait.h). Unlike OMP_WAIT_POLICY, this can change at any time.
    """

    def __init__(self):
        self.ended = threading.Event()
        ready = threading.Event()
        self.thread = threading.Thread(target=self.hold, args=(ready,), daemon=True)
        self.thread.start()
        ready.wait()

    def hold(self, ready):
        n_threads = len(os.sched_getaffinity(0)) - torch.get_num_threads() + 2
        do_nothing = ctypes.cast(ctypes.CDLL(None).abs, ctypes.c_void_p)
        for library in loaded_openmp():
            library.GOMP_parallel(do_nothing, None, max(2, n_threads), 0)
        ready.set()
        self.ended.wait()

    def end(self):
        """End the team's threads, which a pool does together with the thread that started them."""
        self.ended.set()
        self.thread.join()


def loaded_openmp():
    """The copies of libgomp in this process: PyTorch brings its own, compiled code uses the system's."""
    paths = {line.split()[-1] for line in read_text('/proc/self/maps').splitlines() if 'libgomp' in line}
    return [ctypes.CDLL(path) for path in sorted(paths)]


def scheduled_time():
    """Nanoseconds that the main thread ran and waited for a core, so far; None where Linux does not tell."""
    fields = read_text('/proc/self/schedstat').split()
    return (int(fields[0]), int(fields[1])) if len(fields) == 3 else None
