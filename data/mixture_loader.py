"""The loader of a mixture of datasets."""
import functools

import numpy as np

from data.flags import BEGIN, begins_of
from data.loader import TokenLoader

BLOCK = 4096  # sequences whose places are found in one call
DOCUMENTS = 512  # documents in a sample of their lengths


class MixtureLoader(TokenLoader):
    """The training or validation splits of several sources as one.

    loaders: {name: TokenLoader of one split}. Their streams follow one another, so that a stream position
    names a source too. schedule: the Schedule of the training sequences.
    """
    is_mixture = True

    def __init__(self, loaders, schedule):
        self.loaders, self.schedule = loaders, schedule
        self.parts = parts = list(loaders.values())
        self.block_size = parts[0].block_size
        self.vocab_size, self.data_vocab_size = parts[0].vocab_size, parts[0].data_vocab_size
        self.paths, self.shards = (sum((getattr(part, name) for part in parts), [])
                                   for name in ('paths', 'shards'))
        self.dtype = np.result_type(*(part.dtype for part in parts))
        self.has_flags = any(part.has_flags for part in parts)
        self.sizes = np.concatenate([part.sizes for part in parts])
        self.ends = np.cumsum(self.sizes)
        self.n_tokens = int(self.ends[-1])
        self.begins = np.cumsum([0, *(part.n_tokens for part in parts)])  # of the sources' streams
        self._starts_in = functools.lru_cache(4)(self._starts_in)

    def train_batch(self, sequences):
        if not self.parts[0].packs_rows:
            return super().train_batch(sequences)
        sources, within = self.schedule.locate(np.maximum(sequences, 0))
        within[sequences < 0] = -1
        rows_of = {source: np.flatnonzero(sources == source) for source in np.unique(sources).tolist()}
        batches = [self.parts[source].train_batch(within[rows]) for source, rows in rows_of.items()]
        order = np.argsort(np.concatenate(list(rows_of.values())))
        return tuple(np.concatenate(arrays)[order] for arrays in zip(*batches))

    def train_starts(self, sequences):
        starts = np.full(len(sequences), -1, dtype=np.int64)
        blocks = np.where(sequences < 0, -1, sequences // BLOCK)
        for block in set(blocks.tolist()) - {-1}:
            rows = blocks == block
            starts[rows] = self._starts_in(block)[sequences[rows] % BLOCK]
        return starts

    def _starts_in(self, block):
        """Stream positions of a block of training sequences. Cached: steps ask for blocks in order."""
        sources, within = self.schedule.locate(block * BLOCK + np.arange(BLOCK))
        starts = np.zeros(BLOCK, np.int64)
        for source, part in enumerate(self.parts):
            rows = sources == source
            # A stream is a circle.
            starts[rows] = self.begins[source] + part.train_starts(within[rows]) % part.n_tokens
        return starts

    def read(self, start, length):
        """Read from a stream position on, within the circle of its source."""
        source = int(np.searchsorted(self.begins, start, side='right')) - 1
        return self.parts[source].read(start - int(self.begins[source]), length)

    def read_rows(self, starts):
        """As TokenLoader's. Beside conversations, documents of a text have the flag with which those begin."""
        tokens = super().read_rows(starts)
        sources = np.searchsorted(self.begins, starts, side='right') - 1
        for source, part in enumerate(self.parts if self.has_flags else ()):
            if getattr(part, 'separator', None) is not None:
                rows = sources == source
                tokens[rows] |= np.where(begins_of(tokens[rows], part.separator), BEGIN, np.uint32(0))
        return tokens

    def more_arrays(self, tokens):
        return max(self.parts, key=lambda part: part.has_flags).more_arrays(tokens)

    def eval_starts(self, count):
        """Stream positions of up to `count` evaluation sequences, of each source its share in training."""
        return np.concatenate([begin + part.eval_starts(int(n)) for part, begin, n in zip(
            self.parts, self.begins, self.schedule.counts(count))])

    def document_lengths(self):
        """The lengths of documents in a sample, in which each source has about its share."""
        lengths = []
        for part, n in zip(self.parts, self.schedule.counts(DOCUMENTS).tolist()):
            lengths += part.document_lengths()[:n]
        return lengths

    def describe(self):
        lines = []
        for begin, weights, _ in self.schedule.phases:
            place = f'from sequence {begin:,} on, ' if begin else ''
            shares = [f'{name} {weight / sum(weights):.4g}' for name, weight in zip(self.loaders, weights)]
            lines.append(f'mixture     {place}{", ".join(shares)}')
        sizes = [f'{name} {part.n_tokens:,}' for name, part in self.loaders.items()]
        lines.append(f'tokens      {", ".join(sizes)}')
        for name, part in self.loaders.items():
            lines += [f'{line}, in {name}' for line in part.describe()]
        return lines

    @property
    def place(self):
        return ', '.join(part.place for part in self.parts)
