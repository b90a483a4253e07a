"""How many targets the global batches of conversations and pairs have, counted by all processes ahead of their use."""
from concurrent.futures import ThreadPoolExecutor

import numpy as np


class TargetCounts:
    """Counts the targets of global batches. All processes make the same calls.

    Each process counts its own rows, in a thread, two batches ahead; the sum over the processes is under way while
    the batch before is in use. So nobody reads the whole batch, and nobody waits for the sum.

    batches: the Batches of this process. sum_later: as in Processes. copies: how many processes have the same rows.
    end: the number of the first global batch that is never used.
    """

    def __init__(self, batches, sum_later, copies, end):
        self.batches, self.sum_later, self.copies, self.end = batches, sum_later, copies, end
        self.pool = ThreadPoolExecutor(1)
        self.here = {}  # {numbers of a global batch's sequences, as bytes: future of the count of this process's rows}
        self.sums = {}  # {the same: function that waits for the sum over all processes}

    def of(self, batch):
        """The number of targets in a global batch, on all processes."""
        numbers = [self.batches.sequences(each).tobytes() for each in range(batch, min(batch + 3, self.end))]
        self.here = {each: self.here.get(each) or self.pool.submit(self._count, each) for each in numbers}
        for left in self.sums.keys() - {*numbers}:  # used, or of a run that has moved
            self.sums.pop(left)()
        for each in dict.fromkeys(numbers[:2]):
            if each not in self.sums:
                here = self.batches.read_ahead.result_of(self.here[each])
                self.sums[each] = self.sum_later(dict(targets=float(here)))
        sums, _ = self.sums[numbers[0]]()
        return round(sums['targets'] / self.copies)

    def _count(self, data):
        numbers, batches = np.frombuffer(data, np.int64), self.batches
        count = 0
        for step in range(batches.steps(len(numbers))):
            rows = batches.rows(len(numbers), step)
            count += batches.loader.count_targets(batches.read, np.where(rows < 0, -1, numbers[rows]))
        return count
