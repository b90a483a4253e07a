"""The micro-batches of a process: which rows and positions of a global batch it takes, read ahead by threads."""
import contextlib
import itertools
import math
from concurrent.futures import ThreadPoolExecutor, wait

import numpy as np
import torch
from torch.profiler import record_function


class Batches:
    """The micro-batches that this process takes of one split, on its device.

    loader: the loader of the split. Threads read the next `read_ahead` micro-batches while one is in use.
    read(numbers): inputs, targets, and whatever else a model takes, of the sequences with these numbers, an
        integer array in which -1 is padding: arrays (B, block_size). loader.train_batch, say.
    sequences(batch): the numbers of the sequences in a global batch.
    steps(total): the number of micro-batches in which each process takes its share of `total` sequences.
    rows(total, step): which of `total` sequences form micro-batch `step`, an integer array; -1 is padding.
    share(): (index, count) if replicas divide the micro-batches: this one takes those from index on in steps of count.
    positions: the slice of each sequence's inputs and targets that this process takes.
    sum_later, copies: as in TargetCounts. end: the number of the first global batch that is never used.
    reading(): a context around all reading. waiting(): one in which this process waits for what is not read yet.
    """

    def __init__(self, loader, read, sequences, steps, rows, positions, device, sum_later=None, copies=1,
                 end=math.inf, reading=contextlib.nullcontext, waiting=contextlib.nullcontext, share=lambda: (0, 1)):
        self.loader, self.read, self.sequences, self.steps, self.rows = loader, read, sequences, steps, rows
        self.share, self.positions, self.device, self.reading = share, positions, device, reading
        self.read_ahead = Prefetcher(self._read, loader.read_ahead, waiting)
        self._counts = None
        if loader.has_flags:  # which tokens are targets is in the data
            from data.target_counts import TargetCounts
            self._counts = TargetCounts(self, sum_later, copies, end)

    def of(self, batch):
        """Yield (micro-batch, whether it is the last) of a global batch."""
        count = self._own_steps(len(self.sequences(batch)))
        for step in range(count):
            with record_function('data'), self.reading():
                micro_batch = self(batch, step)
            yield micro_batch, step == count - 1

    def count_targets(self, batch):
        """The number of targets in a global batch, on all processes."""
        if not self._counts:
            return self.loader.count_targets(self.read, self.sequences(batch))
        with record_function('data'), self.reading():
            return self._counts.of(batch)

    def __call__(self, batch, step):
        """Inputs and targets of one micro-step (micro-batch, positions), int64, and what else `read` returns.

        ValueError if a token id is too large.
        """
        tensors = self.read_ahead(self._requests_from(batch, step))
        return tuple(tensor.to(self.device, non_blocking=True) for tensor in tensors)

    def _requests_from(self, batch, step):
        """Yield what `_read` takes for each micro-batch, from one on.

        That is the numbers of the sequences, so that a micro-batch which has others by now is read again.
        """
        index, count = self.share()
        while True:
            numbers = self.sequences(batch)
            for later in range(step, self._own_steps(len(numbers))):
                rows = self.rows(len(numbers), later * count + index)
                yield np.where(rows < 0, -1, numbers[rows]).tobytes()
            batch, step = batch + 1, 0

    def _own_steps(self, total):
        return -(-self.steps(total) // self.share()[1])

    def _read(self, request):
        x, y, *others = self.read(np.frombuffer(request, np.int64))
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
        self.pool, self.pending = ThreadPoolExecutor(max(1, ahead)), {}

    def __call__(self, requests):
        """Return prepare(first of requests), and start on those that follow, which will probably come next.

        requests: an iterator.
        """
        coming = list(itertools.islice(requests, 1 + self.ahead))
        self.pending = {request: self.pending.get(request) or self.pool.submit(self.prepare, request)
                        for request in coming}
        return self.result_of(self.pending.pop(coming[0]))

    def result_of(self, future):
        """The result of `future`, in the context `waiting` while it is not there yet."""
        if not future.done():
            with self.waiting():
                wait([future])
        return future.result()
