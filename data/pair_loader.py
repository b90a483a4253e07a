"""Batches of pairs of answers, with the log-probabilities that the reference gives their tokens."""
import copy

import numpy as np

from data.datasets import REFERENCE
from data.documents import PackedLoader, document_starts
from data.flags import REJECTED, ids_of, pair_begins_of, targets_of
from data.shards import open_shards


class PairLoader(PackedLoader):
    """A PackedLoader that takes pairs for documents, in evaluation too. A pair counts if it is whole in its row.

    A batch has five arrays: inputs, targets, at which position a token's document begins, and the `pairs` and
    the `reference` of PreferenceLoss. A chosen and a rejected answer do not see each other.
    """

    def __init__(self, *arguments):
        super().__init__(*arguments, None)
        files = open_shards([path + REFERENCE for path in self.paths], dict(dtype='float32'))
        self.reference = copy.copy(self)
        self.reference.shards = [file[:] for file in files]  # those in object storage are downloaded

    def begins_in(self, tokens):
        return pair_begins_of(tokens)

    def eval_starts(self, count):
        """The numbers of up to `count` evaluation sequences, those of the first epoch."""
        return np.arange(min(count, self.per_epoch))

    def batch(self, starts):
        return self.train_batch(starts)

    def train_batch(self, sequences):
        inputs, following, starts = self.train_tokens(sequences)
        pairs = number_pairs(inputs, following, starts)
        y = np.where(pairs != 0, ids_of(following).astype(np.int64), -1)
        starts = np.maximum(starts, document_starts(inputs, None))
        return ids_of(inputs).astype(np.int64), y, starts, pairs, self.read_reference(sequences)

    def read_reference(self, sequences):
        """The log-probabilities (B, block_size) of the tokens that follow the inputs of training sequences."""
        reference = np.zeros((len(sequences), self.block_size), np.float32)
        for row in np.flatnonzero(sequences >= 0):
            begin, _, pieces = self._row(int(sequences[row]))
            reference[row] = np.concatenate(
                [self.reference.read(begin + place + 1, length) for place, length in pieces])
        return reference

    def count_targets(self, read, numbers):
        """How many pairs count in the batch read(numbers), of `batch` or `train_batch`."""
        return sum(len(np.unique(row[row > 0])) for row in read(numbers)[3])

    def document_lengths(self):
        return [length / 2 for length in self.sample[0] for _ in range(2)]

    def describe(self):
        lengths, whole = self.sample
        return [f'pairs       {np.mean(lengths):,.0f} tokens each within a sequence, {whole or 0:.1%} of them whole; '
                'others do not count']


def number_pairs(inputs, following, starts):
    """The `pairs` (B, T) of PreferenceLoss, of inputs and the tokens that follow them, as in the file.

    starts (B, T): at which position of its row a token's piece begins, a pair or a part of one.
    """
    is_begin = starts == np.arange(starts.shape[1])
    begins = np.flatnonzero(is_begin)
    ends = np.append(begins[1:], starts.size)
    is_target, is_rejected = targets_of(following) >= 0, (following & REJECTED) > 0
    is_whole = pair_begins_of(inputs.ravel()[begins]) & pair_begins_of(following.ravel()[ends - 1])
    for of_answer in (is_target & ~is_rejected, is_target & is_rejected):
        is_whole &= np.maximum.reduceat(of_answer.ravel(), begins)
    is_counted = np.repeat(is_whole, ends - begins).reshape(starts.shape) & is_target
    return is_counted * np.where(is_rejected, -1, 1) * is_begin.cumsum(axis=1)
