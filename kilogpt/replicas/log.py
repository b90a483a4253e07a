"""The log of a run of replicas, and their signals: each line is written once, and all act on a signal together."""
import json
import os

from kilogpt.run.metrics import Metrics
from kilogpt.run.signals import SIGNALS, Signals

TAIL_BYTES = 2 ** 20  # of the end of metrics.jsonl, in which a new leader looks for lines


class ReplicaLog(Metrics):
    """Every replica keeps the lines since the last update on which all agreed, and the one that leads writes them.

    So a line is neither lost nor written twice when the replica that leads is lost.
    """

    def __init__(self, out_dir, is_main, config={}, wandb_id=None, iteration=0, island=0, prints=True):
        super().__init__(out_dir, is_main=False, prints=True)
        self.is_main, self.config, self.iteration = is_main, config, iteration
        self.pending = []  # [(line, text)]
        self.begin = None  # the length of metrics.jsonl when the replicas started
        self._n_written = 0  # how many of the pending lines the leader has written
        self._is_checked = False  # whether none of the pending lines can have been written by a leader before

    def write(self, line, text):
        if self.is_main:
            self.pending.append((line, text))

    def lead(self):
        """Write the pending lines that the leader before has not written."""
        if self.file is None:
            self._open()
        written = set() if self._is_checked else self._find_written()
        for line, text in self.pending:
            if _key(line) not in written:
                super().write(line, text)
        self.follow()

    def follow(self):
        """Another replica leads, and has the same pending lines."""
        self._n_written, self._is_checked = len(self.pending), False

    def agreed(self):
        """Forget what was written before an update on which all have agreed."""
        del self.pending[:self._n_written]
        self._n_written, self._is_checked = 0, self.file is not None

    @property
    def is_unwritten(self):
        """Whether lines of this leader wait in its memory for room on the disk."""
        return self.file is not None and self.disk_is_full

    def _open(self):
        Metrics.__init__(self, self.out_dir, True, self.config, None, self.iteration, prints=True)
        if self.begin is None:
            self.begin = os.path.getsize(self.file.name)

    def _find_written(self):
        self.file.flush()
        with open(self.file.name, 'rb') as file:
            begin = max(self.begin, os.path.getsize(self.file.name) - TAIL_BYTES)
            file.seek(begin)
            lines = file.read().splitlines()
        if begin > self.begin:
            del lines[0]  # probably a part of a line
        return {_key(json.loads(line)) for line in lines}


def _key(line):
    """What tells a line of the log from others: its iteration and its kind."""
    return line['iter'], tuple(sorted(line))


class ReplicaSignals(Signals):
    """Signals on which all replicas have agreed with an update, so that all stop or save at the same iteration.

    agreed: for each of SIGNALS, then for a request to save: whether any process has it.
    """
    agreed = (0.0,) * (len(SIGNALS) + 1)

    def __init__(self, processes, stop_request, watchdog, wants_save, write_line):
        super().__init__(processes, stop_request, watchdog, lambda: self.agreed[-1] > 0, write_line)

    def here(self, wants_save):
        """The signals of this process, to be summed over the replicas."""
        return [*super()._signals_here().values(), float(wants_save)]

    def poll(self):
        self.watchdog.beat()
        self._steps += 1
        return self.stop

    def _signals_here(self):
        return dict(zip(SIGNALS, self.agreed))
