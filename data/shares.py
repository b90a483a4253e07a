"""Which sequences of the stream of data each island trains on: arithmetic alone."""
import numpy as np


class Shares:
    """Which sequences of the stream each island trains on, and how many tokens that makes.

    Each iteration, the islands that are present take `batch` sequences of block_size tokens each, in order.
    What was given to an island that then misses an exchange is given out again, before the rest of the
    stream. With all islands present an iteration has the sequences that it would have without islands.

    iteration, tokens: where the run begins, or continues, and how many tokens it has used by then.
    parts: those of the Shares that the run continues.
    """

    def __init__(self, batch, block_size, islands, iteration=0, tokens=0, parts=None):
        self.batch, self.block_size = batch, block_size
        # A new part begins when the islands that are present change.
        self.parts = parts or [dict(iteration=iteration, tokens=tokens, position=-(-tokens // block_size),
                                    backlog=[], present=list(range(islands)))]

    def tokens_before(self, iteration):
        """Tokens used before an iteration, without those that islands have lost."""
        part = self._part_of(iteration)
        return part['tokens'] + self._count(part, iteration) * self.block_size

    def batch_at(self, iteration):
        """The number of sequences that an island trains on in an iteration."""
        return self._part_of(iteration).get('batch', self.batch)

    def change_batch(self, iteration, batch):
        """From an iteration on, an island trains on `batch` sequences in each."""
        self._begin_part(iteration, self.parts[-1]['present'], lost=[], batch=batch)

    def sequences(self, iteration, island):
        """The numbers of the sequences that an island trains on in an iteration."""
        part = self._part_of(iteration)
        batch = self.batch_at(iteration)
        begin = self._count(part, iteration) + part['present'].index(island) * batch
        return self._numbers(part, begin, begin + batch)

    def given(self, since, iteration, islands):
        """The numbers of the sequences that these islands were given from an iteration on, before another."""
        numbers = [np.arange(0)]
        for i in range(since, iteration):
            for island in self._part_of(i)['present']:
                if island in islands:
                    numbers.append(self.sequences(i, island))
        return np.concatenate(numbers)

    def change(self, iteration, present, since, members):
        """From an iteration on, these islands are present.

        Those that are not among the members of the last exchange lose what they were given from `since` on.
        Returns whether anything has changed.
        """
        part = self.parts[-1]
        lost = self.given(since, iteration, set(part['present']) - set(members))
        if present == part['present'] and not len(lost):
            return False
        first = self._part_of(since)['iteration']
        self.parts = [part for part in self.parts if part['iteration'] >= first]
        batch = dict(batch=part['batch']) if 'batch' in part else {}
        self._begin_part(iteration, present, lost, **batch)
        return True

    def _begin_part(self, iteration, present, lost, **batch):
        """Begin a part of the data in which other islands are present, or the batch is another one."""
        part = self.parts[-1]
        count, n_waiting = self._count(part, iteration), _length(part['backlog'])
        left = self._numbers(part, min(count, n_waiting), n_waiting)
        tokens = self.tokens_before(iteration) - len(lost) * self.block_size
        self.parts.append(dict(iteration=iteration, tokens=tokens, present=present,
                               position=part['position'] + max(0, count - n_waiting),
                               backlog=ranges(np.concatenate([left, lost])), **batch))

    def _part_of(self, iteration):
        return [part for part in self.parts if part['iteration'] <= iteration][-1]

    def _count(self, part, iteration):
        """How many sequences a part has given out before an iteration."""
        batch = part.get('batch', self.batch)
        return (iteration - part['iteration']) * len(part['present']) * batch

    def _numbers(self, part, begin, end):
        """The numbers `begin` to `end` of those that a part gives out: its backlog, then the stream."""
        backlog = np.concatenate([np.arange(0), *(np.arange(*pair) for pair in part['backlog'])])
        n_waiting = len(backlog)
        rest = part['position'] + np.arange(max(0, begin - n_waiting), max(0, end - n_waiting))
        return np.concatenate([backlog[begin:end], rest])


def ranges(numbers):
    """[[begin, end]] of the runs of neighbours among integers."""
    numbers = np.sort(numbers)
    runs = np.split(numbers, np.flatnonzero(np.diff(numbers) != 1) + 1)
    return [[int(run[0]), int(run[-1]) + 1] for run in runs if len(run)]


def _length(pairs):
    return sum(end - begin for begin, end in pairs)
