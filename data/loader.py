"""Token loader: the batch of a step is a pure function of the data, the seed and the step.

Nothing is carried from batch to batch, so a run resumes from one integer, and neither the number of processes nor evaluation
changes what a step trains on.
"""
import functools
import glob
import json
import os
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch

HEADER_MAGIC, HEADER_VERSION, HEADER_INTS = 20240520, 1, 256  # llm.c's shards; the header: magic, version, token count
SCAN_TOKENS = 2 ** 26  # a file up to this size is searched for bad ids at start (a fraction of a second); all are, as read
AHEAD = 4096  # sequences that are shuffled in one go: numpy's overhead is per call, and a step asks for a few


def read_meta(folder):
    """meta.json of a dataset's folder; GPT-2's vocabulary where there is none, as in nanoGPT. ValueError if unusable."""
    path = os.path.join(folder, 'meta.json')
    if not os.path.exists(path):
        if os.path.exists(os.path.join(folder, 'meta.pkl')):
            raise ValueError(f'{folder} has a meta.pkl but no meta.json; a pickle can run code, so it is never read: '
                             'prepare the dataset again')
        return dict(vocab_size=50257, dtype='uint16', tokenizer='gpt2')
    with open(path, encoding='utf-8') as file:
        try:
            meta = json.load(file)
        except ValueError as error:
            raise ValueError(f'{path} is not JSON ({error}): prepare the dataset again') from None
    if not isinstance(meta, dict):
        raise ValueError(f'{path} is not a JSON object: prepare the dataset again')
    if meta.get('dtype') not in ('uint16', 'uint32') or not isinstance(meta.get('vocab_size'), int):
        raise ValueError(f'{path} needs an integer vocab_size and a dtype of uint16 or uint32; it holds '
                         f'vocab_size={meta.get("vocab_size")!r}, dtype={meta.get("dtype")!r}')
    return meta


def shuffled(positions, n, key):
    """Where a pseudo-random permutation of range(n) sends positions (an integer array), in O(1) memory at any n.

    A Feistel network over the next power of four, applied again to whatever falls outside range(n) (cycle walking: Black and
    Rogaway 2002, section 4). key: a sequence of integers that names the permutation.
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
    """One split of a dataset as a stream of tokens, over one file or many shards, each opened once.

    An epoch turns the stream into a circle, starts at a place of its own, and cuts n_tokens // block_size sequences from
    there, drawn in a shuffled order: each token is an input once, but for the n_tokens % block_size left over, which are
    others in the next epoch.

    folder: the dataset's, with {split}.bin or shards {split}_*.bin, raw or with llm.c's header.
    vocab_size: a token id at or above it raises ValueError, as do, at start, no data, a truncated file, too few tokens.
    """

    def __init__(self, folder, split, block_size, vocab_size, meta, seed):
        self.block_size, self.vocab_size, self.seed = block_size, vocab_size, seed
        self.paths = [path for pattern in (f'{split}.bin', f'{split}_*.bin', f'*_{split}_*.bin')
                      for path in sorted(glob.glob(os.path.join(glob.escape(folder), pattern)))]
        if not self.paths:
            raise ValueError(f'there is no {split}.bin (or {split}_*.bin) in {folder}')
        self.shards = [_open_tokens(path, meta) for path in self.paths]
        self.sizes = np.array([len(shard) for shard in self.shards])
        self.ends = np.cumsum(self.sizes)
        self.n_tokens = int(self.ends[-1])
        if self.n_tokens < block_size + 1:
            raise ValueError(f'{folder} has {self.n_tokens} tokens in its {split} split, but a sequence of '
                             f'block_size={block_size} needs {block_size + 1}: set block_size to {self.n_tokens - 1} or less')
        for path, shard in zip(self.paths, self.shards):
            if len(shard) <= SCAN_TOKENS:
                self._check(shard, path)
        self._starts = functools.lru_cache(2)(self._starts)

    def _check(self, tokens, source):
        if tokens.max() >= self.vocab_size:
            raise ValueError(f'{source} holds the token {tokens.max()}, but vocab_size is {self.vocab_size}: it was prepared '
                             'with another tokenizer than its meta.json (GPT-2 where there is none) names')

    def _places(self, positions):
        """(number of the shard, token in it) of each of an array of positions in the stream, which is a circle."""
        positions = positions % self.n_tokens
        i = np.searchsorted(self.ends, positions, side='right')
        return list(zip(i.tolist(), (positions - self.ends[i] + self.sizes[i]).tolist()))

    def read(self, start, length):
        """length tokens from position start of the stream."""
        pieces = []
        while length > 0:
            (i, local), = self._places(np.array([start]))
            pieces.append(self.shards[i][local:local + length])
            start, length = start + len(pieces[-1]), length - len(pieces[-1])
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)

    def train_starts(self, sequences):
        """Stream positions at which the training sequences of these numbers (an integer array) begin; -1 stays -1."""
        epochs, places = np.divmod(sequences, self.n_tokens // self.block_size)
        blocks, places = np.divmod(places, AHEAD)
        starts = np.full(len(sequences), -1, dtype=np.int64)
        for epoch, block in set(zip(epochs[sequences >= 0].tolist(), blocks[sequences >= 0].tolist())):
            here = (epochs == epoch) & (blocks == block)
            starts[here] = self._starts(epoch, block)[places[here]]
        return starts

    def _starts(self, epoch, block):
        """Where the sequences of a block, AHEAD of them or the rest, of an epoch begin. Cached: steps ask for them one after another."""
        key, per_epoch = [self.seed, epoch], self.n_tokens // self.block_size
        rotation = int(np.random.SeedSequence(key).generate_state(1, np.uint64)[0]) % self.n_tokens
        places = np.arange(block * AHEAD, min((block + 1) * AHEAD, per_epoch))
        return rotation + self.block_size * shuffled(places, per_epoch, key)

    def where(self, starts):
        """[(file, the token in it)] that begin at these stream positions."""
        return [(self.paths[i], token) for i, token in self._places(starts)]

    def eval_starts(self, count):
        """The fixed evaluation set: up to count sequences that do not overlap, spread evenly over the split."""
        available = (self.n_tokens - 1) // self.block_size
        count = min(count, available)
        return np.arange(count) * available // max(count, 1) * self.block_size

    def batch(self, starts):
        """Inputs and targets (B, block_size), int64, of the sequences at starts; a start of -1 is padding (targets -1)."""
        length = self.block_size + 1
        tokens = np.zeros((len(starts), length), dtype=self.shards[0].dtype)  # as narrow as they are stored, until they are checked
        for row, start, (i, local) in zip(tokens, starts.tolist(), self._places(starts)):
            if start >= 0:
                piece = self.shards[i][local:local + length]
                row[:] = piece if len(piece) == length else self.read(start, length)  # which goes on in the next shard
        self._check(tokens, os.path.dirname(self.paths[0]))
        # by numpy: what torch copies in parallel waits for threads that the model's computation has
        x, y = tokens[:, :-1].astype(np.int64), tokens[:, 1:].astype(np.int64)
        y[starts < 0] = -1
        return torch.from_numpy(x), torch.from_numpy(y)


def _open_tokens(path, meta):
    """Memory map of the token ids in a .bin file. ValueError where it does not hold as many as it should."""
    size, dtype = os.path.getsize(path), np.dtype(meta['dtype']).newbyteorder('<')
    header = np.fromfile(path, dtype='<i4', count=HEADER_INTS)
    offset = header.nbytes if len(header) == HEADER_INTS and header[0] == HEADER_MAGIC else 0
    if offset and header[1] != HEADER_VERSION:
        raise ValueError(f'{path} has a shard header of version {header[1]}, but only version {HEADER_VERSION} can be read')
    count, rest = divmod(size - offset, dtype.itemsize)
    expected = max(1, int(header[2]) if offset else meta.get('tokens', {}).get(os.path.basename(path), count))
    if rest or count != expected:
        raise ValueError(f'{path} should hold {expected} tokens of {dtype.itemsize} bytes, but is {size} bytes long: '
                         'it is truncated or damaged, prepare the dataset again')
    return np.asarray(np.memmap(path, dtype=dtype, mode='r', offset=offset, shape=(count,)))  # slices of a plain array are quicker


class Prefetcher:
    """Calls prepare(step) in a thread of its own, one step ahead of the one asked for."""

    def __init__(self, prepare):
        self.prepare, self.pool, self.pending = prepare, ThreadPoolExecutor(1), {}

    def __call__(self, step):
        future = self.pending.pop(step, None) or self.pool.submit(self.prepare, step)
        self.pending = {step + 1: self.pool.submit(self.prepare, step + 1)}
        return future.result()
