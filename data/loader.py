"""Token loader: the batch of a step is a pure function of the data, the seed and the step.

No state is carried from one batch to the next. A run therefore resumes from one integer, and neither the
number of processes nor an evaluation changes what a step trains on.
"""
import functools
import os

import numpy as np

from data.datasets import find_shards
from data.flags import begins_of, ids_of, targets_of
from data.shards import RemoteTokens, first_tokens, open_shards, read_pieces
from data.storage import is_url

# Each process searches this many tokens of a split for bad ids at the start. Later, each batch is checked.
SCAN_TOKENS = 2 ** 26
# This many sequences are shuffled in one call: a step asks for few, and each call of numpy has a cost.
SHUFFLE_BLOCK = 4096
TARGET_SAMPLE = 256  # sequences in which targets and answers are counted
# Micro-batches of remote files that are read at a time: at 26 ms each, the way there may take 400 ms.
REMOTE_AHEAD = 16


def shuffled(positions, n, key):
    """Map positions (an integer array) to their images under a pseudo-random permutation of range(n).

    The permutation takes O(1) memory for any n: it is a Feistel network over the next power of four, applied
    repeatedly to images outside range(n) (cycle walking: Black and Rogaway 2002, section 4).
    key: a sequence of integers that determines the permutation.
    """
    half = np.uint64(max(1, ((n - 1).bit_length() + 1) // 2))
    mask = np.uint64((1 << int(half)) - 1)
    round_keys = np.random.SeedSequence(key).generate_state(6, np.uint64)
    x = np.array(positions, dtype=np.uint64)
    outside = np.ones(x.shape, dtype=bool)
    while outside.any():
        left, right = x[outside] >> half, x[outside] & mask
        for round_key in round_keys:
            mixed = (right + round_key) * np.uint64(0x9E3779B97F4A7C15)  # wraps modulo 2^64, as it should
            mixed = (mixed ^ (mixed >> np.uint64(29))) * np.uint64(0xBF58476D1CE4E5B9)
            left, right = right, left ^ ((mixed >> np.uint64(32)) & mask)
        x[outside] = left << half | right
        outside = x >= n
    return x.astype(np.int64)


class TokenLoader:
    """One split of a dataset as a stream of tokens, from one file or many shards, each opened once.

    An epoch treats the stream as a circle: from a random position, it cuts n_tokens // block_size sequences,
    which are read in shuffled order. In an epoch each token is an input once, except for the n_tokens %
    block_size tokens that are left over; these differ between epochs.

    folder: the folder of the dataset, with {split}.bin or shards {split}_*.bin, raw or with llm.c's header.
    ValueError if the split does not exist or has too few tokens, if a file is truncated, or if a token id is
    vocab_size or above.
    """
    packs_rows = False  # whether a training sequence consists of whole documents
    is_mixture = False  # whether the sequences come from several datasets

    def __init__(self, folder, split, block_size, vocab_size, meta, seed):
        self.block_size, self.seed = block_size, seed
        self.vocab_size, self.data_vocab_size = vocab_size, meta['vocab_size']
        way_out = ', or set eval_iters to 0 to train without evaluation' if split == 'val' else ''
        self.paths = find_shards(folder, split)
        if not self.paths:
            raise ValueError(f'{folder} has neither {split}.bin nor {split}_*.bin: '
                             f'prepare the dataset again{way_out}')
        self.shards = open_shards(self.paths, meta)
        self.dtype = self.shards[0].dtype
        self.sizes = np.array([len(shard) for shard in self.shards])
        self.ends = np.cumsum(self.sizes)
        self.n_tokens = int(self.ends[-1])
        if self.n_tokens < block_size + 1:
            raise ValueError(
                f'{folder} has {self.n_tokens} tokens in its {split} split, but a sequence of '
                f'block_size={block_size} needs {block_size + 1}: set block_size to {self.n_tokens - 1} '
                f'or less{way_out}')
        for path, shard in zip(self.paths, self.shards):
            self._check(first_tokens(path, shard, max(1, SCAN_TOKENS // len(self.shards))), path)
        self.per_epoch = self.n_tokens // block_size  # sequences
        self.has_flags = meta.get('flags', False)  # data.flags
        self._starts = functools.lru_cache(2)(self._starts)

    def _check(self, tokens, source):
        largest = ids_of(tokens).max()
        if largest >= self.vocab_size:
            advice = 'its tokenizer or dtype is not what its meta.json names (without one: GPT-2, uint16)'
            if self.data_vocab_size > self.vocab_size:
                advice = (f'the dataset has a vocabulary of {self.data_vocab_size}, another one than the '
                          "model: prepare the text with the model's tokenizer, or set --init_from=scratch")
            raise ValueError(f'{source} holds the token {largest}, but vocab_size is '
                             f'{self.vocab_size}: {advice}')

    def _locate(self, positions):
        """[(shard, position in the shard)] of an array of positions in the stream, which is a circle."""
        positions = positions % self.n_tokens
        i = np.searchsorted(self.ends, positions, side='right')
        return list(zip(i.tolist(), (positions - self.ends[i] + self.sizes[i]).tolist()))

    def read(self, start, length):
        """Read `length` tokens from position `start` of the stream, across shards."""
        pieces = []
        while length > 0:
            (i, local), = self._locate(np.array([start]))
            pieces.append(self.shards[i][local:local + length])
            start, length = start + len(pieces[-1]), length - len(pieces[-1])
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)

    def read_many(self, starts, length):
        """What `read` returns for each of `starts`, an integer array. Remote files are read side by side."""
        pieces = read_pieces(self.shards, [(i, local, local + length) for i, local in self._locate(starts)])
        return [piece if len(piece) == length else self.read(start, length)  # continued in the next shard
                for piece, start in zip(pieces, starts.tolist())]

    @property
    def read_ahead(self):
        """How many micro-batches to read ahead: those of remote files take as long as the way to the files."""
        return REMOTE_AHEAD if any(isinstance(shard, RemoteTokens) for shard in self.shards) else 1

    def train_batch(self, sequences):
        """The `batch` of the training sequences with these numbers; -1 stands for padding."""
        return self.batch(self.train_starts(sequences))

    def train_tokens(self, sequences):
        """Inputs and the tokens that follow, (B, block_size) as in the file, and `more_arrays`, of sequences."""
        tokens = self.read_rows(self.train_starts(sequences))
        return tokens[:, :-1], tokens[:, 1:], *self.more_arrays(tokens[:, :-1])

    def train_starts(self, sequences):
        """Stream positions at which training sequences begin, given their numbers; -1 stays -1."""
        epochs, places = np.divmod(sequences, self.per_epoch)
        blocks, places = np.divmod(places, SHUFFLE_BLOCK)
        starts = np.full(len(sequences), -1, dtype=np.int64)
        is_sequence = sequences >= 0
        for epoch, block in set(zip(epochs[is_sequence].tolist(), blocks[is_sequence].tolist())):
            in_block = (epochs == epoch) & (blocks == block)
            starts[in_block] = self._starts(epoch, block)[places[in_block]]
        return starts

    def _starts(self, epoch, block):
        """Stream positions of a block of an epoch's sequences. Cached: steps ask for blocks in order."""
        places = np.arange(block * SHUFFLE_BLOCK, min((block + 1) * SHUFFLE_BLOCK, self.per_epoch))
        return self.rotation(epoch) + self.block_size * shuffled(places, self.per_epoch, [self.seed, epoch])

    def rotation(self, epoch):
        """The stream position at which an epoch begins to cut."""
        return int(np.random.SeedSequence([self.seed, epoch]).generate_state(1, np.uint64)[0]) % self.n_tokens

    def where(self, starts):
        """[(file, position in the file)] of stream positions."""
        return [(self.paths[i], token) for i, token in self._locate(starts)]

    def eval_starts(self, count):
        """Stream positions of up to `count` evaluation sequences, spread evenly and without overlap."""
        available = (self.n_tokens - 1) // self.block_size
        count = min(count, available)
        return np.arange(count) * available // max(count, 1) * self.block_size

    def batch(self, starts):
        """Inputs and targets (B, block_size), int64 arrays, of the sequences at starts, and `more_arrays`.

        A start of -1 stands for padding, whose targets are -1, as are those of context (data.flags).
        """
        tokens = self.read_rows(starts)
        # numpy casts: torch would cast in parallel, and wait for the threads that compute the model.
        x, y = ids_of(tokens[:, :-1]).astype(np.int64), targets_of(tokens[:, 1:])
        y[starts < 0] = -1
        return x, y, *self.more_arrays(tokens[:, :-1])

    def read_rows(self, starts):
        """The tokens (B, block_size + 1) at stream positions, in the dtype of the file; zeros at -1."""
        length = self.block_size + 1
        # The narrow type of the file takes less time to copy and to check than int64.
        tokens = np.zeros((len(starts), length), dtype=self.dtype)
        is_sequence = starts >= 0
        for row, piece in zip(np.flatnonzero(is_sequence), self.read_many(starts[is_sequence], length)):
            tokens[row] = piece
        self._check(tokens, os.path.dirname(self.paths[0]))
        return tokens

    def more_arrays(self, tokens):
        """What else a batch of inputs, tokens (B, block_size) as in the file, has."""
        return ()

    def count_targets(self, read, numbers):
        """How many targets are in the batch read(numbers), of `batch` or `train_batch`."""
        if not self.has_flags:
            return int((numbers >= 0).sum()) * self.block_size
        return int((read(numbers)[1] >= 0).sum())

    def document_lengths(self):
        """The lengths of what attention sees as one document, in a sample of the training sequences."""
        return [self.block_size]

    def describe(self):
        """Lines about what is in training sequences."""
        if not self.has_flags:
            return []
        sample = np.arange(min(TARGET_SAMPLE, self.per_epoch))
        inputs, following, *starts = self.train_tokens(sample)
        is_target, is_begin = targets_of(following) >= 0, begins_of(following, None)
        continues = is_target & ~is_begin & (targets_of(inputs) >= 0)  # the answer in which the input is
        # Pieces of documents begin at these places, and whole documents at some of them.
        begins = (starts[0] if starts else 0) == np.arange(self.block_size)
        n_cut = (continues & begins & ~begins_of(inputs, None)).sum()
        return [f'targets     {is_target.mean():.1%} of the tokens: those of answers, of which '
                f'{(is_target & ~continues).sum():,} begin and {n_cut:,} are cut in {len(sample)} sequences']

    @property
    def place(self):
        """The folder of the dataset, relative to the current one."""
        folder = os.path.dirname(self.paths[0])
        return folder if is_url(folder) else os.path.relpath(folder)
