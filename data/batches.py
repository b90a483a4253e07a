"""The micro-batches of a process: which rows and positions of a global batch it takes, read ahead by threads."""
import contextlib
import itertools
from concurrent.futures import ThreadPoolExecutor, wait

import numpy as np
import torch


class Batches:
    """The micro-batches that this process takes of one split, on its device.

    Threads read the next `ahead` micro-batches while one is in use.
    read(numbers): inputs, targets, and whatever else a model takes, of the sequences with these numbers, an
        integer array in which -1 is padding: arrays (B, block_size).
    sequences(batch): the numbers of the sequences in a global batch.
    steps(total): the number of micro-batches in which each process takes its share of `total` sequences.
    rows(total, step): which of `total` sequences form micro-batch `step`, an integer array; -1 is padding.
    positions: the slice of each sequence's inputs and targets that this process takes.
    waiting(): a context in which this process waits for a micro-batch that is not read yet.
    """

    def __init__(self, read, sequences, steps, rows, positions, device, ahead=1, waiting=contextlib.nullcontext):
        self.read, self.sequences, self.steps, self.rows = read, sequences, steps, rows
        self.positions, self.device = positions, device
        self._read_ahead = Prefetcher(self._read, ahead, waiting)

    def count(self, batch):
        """The number of micro-batches of a global batch on each process."""
        return self.steps(len(self.sequences(batch)))

    def __call__(self, batch, step):
        """Inputs and targets of one micro-step (micro-batch, positions), int64, and what else `read` returns.

        ValueError if a token id is too large.
        """
        tensors = self._read_ahead(self._requests_from(batch, step))
        return tuple(tensor.to(self.device, non_blocking=True) for tensor in tensors)

    def _requests_from(self, batch, step):
        """Yield what `_read` takes for each micro-batch, from one on.

        It has the numbers of the sequences, so that a batch whose sequences have changed is read again.
        """
        while True:
            sequences = self.sequences(batch)
            numbers = sequences.tobytes()
            for later in range(step, self.steps(len(sequences))):
                yield numbers, later
            batch, step = batch + 1, 0

    def _read(self, request):
        numbers, step = np.frombuffer(request[0], np.int64), request[1]
        rows = self.rows(len(numbers), step)
        x, y, *others = self.read(np.where(rows < 0, -1, numbers[rows]))
        tensors = [torch.from_numpy(array) for array in (x[:, self.positions], y[:, self.positions], *others)]
        if self.device.type == 'cuda':
            # A thread that has not chosen a device would open a context on GPU 0 to pin memory.
            torch.cuda.set_device(self.device)
            # Parts of sequences (cp) would go through memory that is not pinned, and the host would wait.
            tensors = [tensor.contiguous().pin_memory() for tensor in tensors]
        return tensors


class Prefetcher:
    """Calls prepare(request) in background threads, for up to `ahead` requests before they are needed.

    waiting(): a context in which the caller waits for a request that is not prepared yet.
    """

    def __init__(self, prepare, ahead=1, waiting=contextlib.nullcontext):
        self.prepare, self.ahead, self.waiting = prepare, ahead, waiting
        self.pool, self.pending = ThreadPoolExecutor(ahead), {}

    def __call__(self, requests):
        """Return prepare(first of requests), and start on those that follow, which will probably come next.

        requests: an iterator.
        """
        coming = list(itertools.islice(requests, 1 + self.ahead))
        self.pending = {request: self.pending.get(request) or self.pool.submit(self.prepare, request)
                        for request in coming}
        first = self.pending.pop(coming[0])
        if not first.done():
            with self.waiting():
                wait([first])
        return first.result()
