"""Which sequences of the data each island trains on. Plain arithmetic, without torch."""
import numpy as np


class DataSchedule:
    """Assigns the sequences of the data to islands, and counts the tokens that they have used.

    In each iteration, every island that is present takes the next `batch` sequences of block_size tokens. If
    an island then misses an exchange, its sequences since the previous exchange are lost, and are assigned
    again before the rest of the data. With all islands present, an iteration has the same sequences as
    without islands.

    iteration, tokens: where the run begins or continues, and how many tokens it has used by then.
    parts: the `parts` of the DataSchedule that the run continues.
    """

    def __init__(self, batch, block_size, islands, iteration=0, tokens=0, parts=None):
        self.batch, self.block_size = batch, block_size
        # A new part begins whenever the islands or the batch change. `backlog` are the lost sequences
        # that the part assigns first, as [begin, end] pairs; `position` is the next sequence of the data
        # after them.
        self.parts = parts or [dict(iteration=iteration, tokens=tokens, position=-(-tokens // block_size),
                                    backlog=[], present=list(range(islands)))]

    def tokens_before(self, iteration):
        """The number of tokens used before an iteration, except those that were lost."""
        part = self._part_of(iteration)
        return part['tokens'] + self._count(part, iteration) * self.block_size

    def batch_at(self, iteration):
        """The number of sequences that an island trains on in an iteration."""
        return self._part_of(iteration).get('batch', self.batch)

    def change_batch(self, iteration, batch):
        """Let every island train on `batch` sequences an iteration, from an iteration on."""
        self._begin_part(iteration, self.parts[-1]['present'], lost=[], batch=batch)

    def sequences(self, iteration, island):
        """The numbers of the sequences that an island trains on in an iteration."""
        part = self._part_of(iteration)
        batch = self.batch_at(iteration)
        begin = self._count(part, iteration) + part['present'].index(island) * batch
        return self._numbers(part, begin, begin + batch)

    def assigned(self, begin, end, islands):
        """The numbers of the sequences that these islands train on in iterations `begin` to `end`."""
        numbers = [np.arange(0)]
        for i in range(begin, end):
            for island in self._part_of(i)['present']:
                if island in islands:
                    numbers.append(self.sequences(i, island))
        return np.concatenate(numbers)

    def change_islands(self, iteration, present, since, members):
        """Let the islands in `present` take part from an iteration on.

        The sequences of islands that are not among the members of the last exchange are lost from the
        iteration `since` on.
        """
        part = self.parts[-1]
        lost = self.assigned(since, iteration, set(part['present']) - set(members))
        if present == part['present'] and not len(lost):
            return
        first = self._part_of(since)['iteration']
        self.parts = [part for part in self.parts if part['iteration'] >= first]
        batch = dict(batch=part['batch']) if 'batch' in part else {}
        self._begin_part(iteration, present, lost, **batch)

    def _begin_part(self, iteration, present, lost, **batch):
        """Begin a part with other islands, other lost sequences, or another `batch`."""
        part = self.parts[-1]
        count, n_backlog = self._count(part, iteration), _length(part['backlog'])
        rest_of_backlog = self._numbers(part, min(count, n_backlog), n_backlog)
        tokens = self.tokens_before(iteration) - len(lost) * self.block_size
        self.parts.append(dict(iteration=iteration, tokens=tokens, present=present,
                               position=part['position'] + max(0, count - n_backlog),
                               backlog=ranges(np.concatenate([rest_of_backlog, lost])), **batch))

    def _part_of(self, iteration):
        return [part for part in self.parts if part['iteration'] <= iteration][-1]

    def _count(self, part, iteration):
        """How many sequences a part has assigned before an iteration."""
        batch = part.get('batch', self.batch)
        return (iteration - part['iteration']) * len(part['present']) * batch

    def _numbers(self, part, begin, end):
        """The sequences at places `begin` to `end` in the order of a part: its backlog, then the data."""
        backlog = np.concatenate([np.arange(0), *(np.arange(*pair) for pair in part['backlog'])])
        n_backlog = len(backlog)
        rest = part['position'] + np.arange(max(0, begin - n_backlog), max(0, end - n_backlog))
        return np.concatenate([backlog[begin:end], rest])


def ranges(numbers):
    """Integers as sorted ranges of consecutive ones, [[begin, end], ...]."""
    numbers = np.sort(numbers)
    groups = np.split(numbers, np.flatnonzero(np.diff(numbers) != 1) + 1)
    return [[int(group[0]), int(group[-1]) + 1] for group in groups if len(group)]


def _length(pairs):
    return sum(end - begin for begin, end in pairs)
