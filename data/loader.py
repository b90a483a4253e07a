"""Token loader: the batch of a step is a pure function of the data, the seed and the step.

No state is carried from batch to batch, so a run resumes from one integer, and neither the number of
processes nor evaluation changes what a step trains on.
"""
import functools
import glob
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch

# llm.c's shards have a header of 256 integers, which begins with magic, version and token count.
HEADER_MAGIC, HEADER_VERSION, HEADER_INTS = 20240520, 1, 256
# Tokens of a split that each process searches for bad ids at start. Every token is checked as it is read.
SCAN_TOKENS = 2 ** 26
# Sequences shuffled in one call, since a step asks for few of them and numpy's overhead is per call.
SHUFFLE_BLOCK = 4096

DATA = os.path.dirname(os.path.abspath(__file__))
SMALL_DATASETS = ('shakespeare_char', 'shakespeare')  # prepared when they are missing


def prepare_small_dataset(dataset):
    """Run the prepare.py of a small dataset that is missing; ValueError if it fails."""
    folder = os.path.join(DATA, dataset)
    if dataset in SMALL_DATASETS and not os.path.exists(os.path.join(folder, 'val.bin')):
        print(f'{dataset} is not there yet: running data/{dataset}/prepare.py', flush=True)
        if subprocess.run([sys.executable, os.path.join(folder, 'prepare.py')]).returncode:
            raise ValueError(f'dataset {dataset!r} could not be prepared')


def open_dataset(dataset, processes):
    """(folder, meta.json) of a dataset, prepared if it is a small one. All processes of a run call this.

    ValueError if the dataset does not exist or cannot be used.
    """
    # The first process of all prepares while the others wait. Then the first process of each node does, since
    # nodes may not share their files.
    for is_preparer in (processes.is_first, processes.local_rank == 0):
        if is_preparer:
            prepare_small_dataset(dataset)
        processes.barrier()
    folder = find_dataset(dataset)
    return folder, read_meta(folder)


def find_dataset(dataset):
    """The folder of a dataset, a name in data/ or any path; ValueError if it has no token files."""
    folder = os.path.join(DATA, dataset)
    if os.path.isdir(folder) and any(name.endswith('.bin') for name in os.listdir(folder)):
        return folder
    advice = f'make it from text with python data/text/prepare.py --input=FILES --out={dataset}'
    if os.path.exists(os.path.join(folder, 'prepare.py')):
        advice = f'run python data/{dataset}/prepare.py'
    raise ValueError(f'dataset {dataset!r} has no data in {folder}: {advice}')


def read_meta(folder):
    """meta.json of a dataset, or GPT-2's vocabulary without one, as in nanoGPT. ValueError if unusable."""
    path = os.path.join(folder, 'meta.json')
    if not os.path.exists(path):
        if os.path.exists(os.path.join(folder, 'meta.pkl')):
            raise ValueError(f'{folder} has a meta.pkl but no meta.json; a pickle can run code, '
                             'so it is never read: prepare the dataset again')
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
    """The images of positions (an integer array) under a pseudo-random permutation of range(n).

    Takes O(1) memory at any n: a Feistel network over the next power of four, applied again to whatever falls
    outside range(n) (cycle walking: Black and Rogaway 2002, section 4).
    key: a sequence of integers that names the permutation.
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

    An epoch closes the stream to a circle, starts at a random place, and cuts n_tokens // block_size
    sequences from there, which are read in a shuffled order. Each token is an input once, except for
    n_tokens % block_size tokens that are left over, which differ from epoch to epoch.

    folder: the dataset's, with {split}.bin or shards {split}_*.bin, raw or with llm.c's header.
    ValueError if there are no data, too few tokens, a truncated file, or a token id of vocab_size or above.
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
            raise ValueError(
                f'{folder} has {self.n_tokens} tokens in its {split} split, but a sequence of block_size='
                f'{block_size} needs {block_size + 1}: set block_size to {self.n_tokens - 1} or less')
        for path, shard in zip(self.paths, self.shards):
            # Not through the memory map, where each first access reads megabytes ahead.
            first_tokens = np.fromfile(path, shard.dtype, max(1, SCAN_TOKENS // len(self.shards)),
                                       offset=os.path.getsize(path) - shard.nbytes)
            self._check(first_tokens, path)
        self._starts = functools.lru_cache(2)(self._starts)

    def _check(self, tokens, source):
        if tokens.max() >= self.vocab_size:
            raise ValueError(
                f'{source} holds the token {tokens.max()}, but vocab_size is {self.vocab_size}: it was '
                'prepared with another tokenizer than its meta.json (GPT-2 where there is none) names')

    def _places(self, positions):
        """[(shard, position in the shard)] of an array of positions in the stream, which is a circle."""
        positions = positions % self.n_tokens
        i = np.searchsorted(self.ends, positions, side='right')
        return list(zip(i.tolist(), (positions - self.ends[i] + self.sizes[i]).tolist()))

    def read(self, start, length):
        """`length` tokens from position `start` of the stream, across shards."""
        pieces = []
        while length > 0:
            (i, local), = self._places(np.array([start]))
            pieces.append(self.shards[i][local:local + length])
            start, length = start + len(pieces[-1]), length - len(pieces[-1])
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)

    def train_starts(self, sequences):
        """Stream positions where training sequences begin, given their numbers (integers); -1 stays -1."""
        epochs, places = np.divmod(sequences, self.n_tokens // self.block_size)
        blocks, places = np.divmod(places, SHUFFLE_BLOCK)
        starts = np.full(len(sequences), -1, dtype=np.int64)
        is_sequence = sequences >= 0
        for epoch, block in set(zip(epochs[is_sequence].tolist(), blocks[is_sequence].tolist())):
            in_block = (epochs == epoch) & (blocks == block)
            starts[in_block] = self._starts(epoch, block)[places[in_block]]
        return starts

    def _starts(self, epoch, block):
        """Stream positions of a block of an epoch's sequences. Cached, since steps ask for them in order."""
        key = [self.seed, epoch]
        per_epoch = self.n_tokens // self.block_size
        rotation = int(np.random.SeedSequence(key).generate_state(1, np.uint64)[0]) % self.n_tokens
        places = np.arange(block * SHUFFLE_BLOCK, min((block + 1) * SHUFFLE_BLOCK, per_epoch))
        return rotation + self.block_size * shuffled(places, per_epoch, key)

    def where(self, starts):
        """[(file, position in the file)] of these stream positions."""
        return [(self.paths[i], token) for i, token in self._places(starts)]

    def eval_starts(self, count):
        """Starts of the evaluation set: up to count sequences, without overlap, evenly over the split."""
        available = (self.n_tokens - 1) // self.block_size
        count = min(count, available)
        return np.arange(count) * available // max(count, 1) * self.block_size

    def batch(self, starts):
        """Inputs and targets (B, block_size), int64, of the sequences at starts.

        A start of -1 is padding, whose targets are -1.
        """
        length = self.block_size + 1
        # The file's narrow type takes less time to copy and to check.
        tokens = np.zeros((len(starts), length), dtype=self.shards[0].dtype)
        for row, start, (i, local) in zip(tokens, starts.tolist(), self._places(starts)):
            if start >= 0:
                piece = self.shards[i][local:local + length]
                if len(piece) < length:  # the sequence continues in the next shard
                    piece = self.read(start, length)
                row[:] = piece
        self._check(tokens, os.path.dirname(self.paths[0]))
        # Cast by numpy: torch would cast in parallel, and wait for the threads that compute the model.
        x, y = tokens[:, :-1].astype(np.int64), tokens[:, 1:].astype(np.int64)
        y[starts < 0] = -1
        return torch.from_numpy(x), torch.from_numpy(y)


def _open_tokens(path, meta):
    """The token ids of a .bin file, mapped into memory. ValueError if their number is not as it should be."""
    size = os.path.getsize(path)
    dtype = np.dtype(meta['dtype']).newbyteorder('<')
    header = np.fromfile(path, dtype='<i4', count=HEADER_INTS)
    offset = header.nbytes if len(header) == HEADER_INTS and header[0] == HEADER_MAGIC else 0
    if offset and header[1] != HEADER_VERSION:
        raise ValueError(f'{path} has a shard header of version {header[1]}, '
                         f'but only version {HEADER_VERSION} can be read')
    count, rest = divmod(size - offset, dtype.itemsize)
    expected = max(1, int(header[2]) if offset else meta.get('tokens', {}).get(os.path.basename(path), count))
    if rest or count != expected:
        raise ValueError(f'{path} should hold {expected} tokens of {dtype.itemsize} bytes, but is {size} '
                         'bytes long: it is truncated or damaged, prepare the dataset again')
    tokens = np.memmap(path, dtype=dtype, mode='r', offset=offset, shape=(count,))
    return np.asarray(tokens)  # slices of a plain array take less time than those of a memmap


class Batches:
    """This process's micro-batches of one split, on its device.

    A thread reads each micro-batch while the one before is in use.
    sequences(batch): the numbers of a global batch's sequences, an integer array.
    starts(numbers): the stream positions at which these sequences begin.
    steps(total): the number of micro-batches in which each process takes its share of `total` sequences.
    rows(total, step): which of `total` sequences are micro-batch `step`, an integer array; -1 is padding.
    positions: the slice of each sequence that this process takes.
    """

    def __init__(self, loader, sequences, starts, steps, rows, positions, device):
        self.loader, self.sequences, self.steps, self.rows = loader, sequences, steps, rows
        self.starts = functools.lru_cache(2)(lambda numbers: starts(np.frombuffer(numbers, np.int64)))
        self.positions, self.device = positions, device
        self._read_ahead = Prefetcher(self._read)

    def count(self, batch):
        """The number of micro-batches of a global batch on each process."""
        return self.steps(len(self.sequences(batch)))

    def __call__(self, batch, step):
        """Inputs and targets, int64 (micro-batch, positions), of a step of a global batch.

        ValueError if a token is too large.
        """
        following = (batch, step + 1) if step + 1 < self.count(batch) else (batch + 1, 0)
        x, y = self._read_ahead(self._content(batch, step), self._content(*following))
        return x.to(self.device, non_blocking=True), y.to(self.device, non_blocking=True)

    def _content(self, batch, step):
        """What a micro-batch consists of: it is read again if a batch gets other sequences meanwhile."""
        return self.sequences(batch).tobytes(), step

    def _read(self, content):
        numbers, step = content
        starts = self.starts(numbers)
        rows = self.rows(len(starts), step)
        x, y = self.loader.batch(np.where(rows < 0, -1, starts[rows]))
        x, y = x[:, self.positions], y[:, self.positions]
        if self.device.type == 'cuda':
            # Without a device of its own, this thread would open a context on GPU 0 to pin memory.
            torch.cuda.set_device(self.device)
            x, y = x.pin_memory(), y.pin_memory()
        return x, y


class Prefetcher:
    """Calls prepare(what) in a thread of its own, for the next request while the present one is in use."""

    def __init__(self, prepare):
        self.prepare, self.pool, self.pending = prepare, ThreadPoolExecutor(1), {}

    def __call__(self, what, following):
        """What prepare(what) returns. following: what the next call will probably ask for."""
        future = self.pending.pop(what, None) or self.pool.submit(self.prepare, what)
        self.pending = {following: self.pool.submit(self.prepare, following)}
        return future.result()
