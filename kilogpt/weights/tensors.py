"""Tensors that are read when they are needed, and how one is made of others. Nothing here knows a format.

A model that is larger than memory is converted tensor by tensor: each conversion is a LazyTensor whose `read`
calls the `read` of others.
"""
import functools
import math
from typing import Callable, NamedTuple

import torch

from kilogpt.run.checkpoint_files import check_finite, count_nonfinite

BLOCK_BYTES = 2 ** 25  # of rows that are read at a time where a whole tensor is not needed


class LazyTensor(NamedTuple):
    """A tensor in a file. `stored[start:stop]` and `read(slice)` return these rows, in the file's dtype."""
    shape: tuple
    dtype: torch.dtype
    read: Callable  # slice of rows with a step of 1 -> tensor

    def __getitem__(self, rows):
        return self.read(rows)

    def whole(self):
        return self.read(slice(None))


def in_memory(tensor):
    """The LazyTensor of a tensor that is in memory."""
    return LazyTensor(tuple(tensor.shape), tensor.dtype, lambda rows: tensor[rows])


def blocks(stored, rows=slice(None)):
    """Slices of at most BLOCK_BYTES, and of at least one row, that together are the slice `rows`."""
    start, stop, _ = rows.indices(stored.shape[0])
    step = max(1, BLOCK_BYTES // max(1, math.prod(stored.shape[1:]) * stored.dtype.itemsize))
    for first in range(start, stop, step):
        yield slice(first, min(first + step, stop))


def checked(stored, path, name, advice):
    """The same tensor, but whoever reads NaN or infinity from it gets the ValueError of `check_finite`.

    The error counts such values in the whole tensor.
    """

    def read(rows):
        found = stored[rows]
        if count_nonfinite(found):
            check_finite(path, [(name, stored.whole())], advice)
        return found

    return LazyTensor(stored.shape, stored.dtype, read)


def pad_rows(stored, shape, rows=slice(None)):
    """A float32 copy of a tensor's rows, with rows of zeros up to the model's shape."""
    start, stop, _ = rows.indices(shape[0])
    padded = torch.zeros(max(stop - start, 0), *shape[1:])
    for block in blocks(stored, slice(start, stop)):
        padded[block.start - start:block.stop - start] = stored[block]
    return padded


def have_same_values(stored, other):
    """Whether two tensors are equal."""
    return stored.shape == other.shape and all(
        stored[rows].float().equal(other[rows].float()) for rows in blocks(stored))


def narrowed(stored, start, stop):
    """The rows from `start` to `stop`, one part of a packed tensor for example."""

    def read(rows):
        first, last, _ = rows.indices(stop - start)
        return stored[start + first:start + last]

    return LazyTensor((stop - start, *stored.shape[1:]), stored.dtype, read)


def transposed(stored):
    """The transpose of a matrix, which is read whole."""
    return LazyTensor(stored.shape[::-1], stored.dtype, lambda rows: stored.whole().t()[rows])


def selected(stored, indices):
    """The rows with these indices (a LongTensor), in this order: one part of a packed tensor, for example."""

    def read(rows):
        wanted = indices[rows]
        if not len(wanted):
            return stored[0:0]
        first, last = int(wanted.min()), int(wanted.max())
        return stored[first:last + 1][wanted - first]

    return LazyTensor((len(indices), *stored.shape[1:]), stored.dtype, read)


def _common_dtype(parts, shapes):
    """The dtype that holds all values of several tensors. ValueError unless `shapes` of them are the same."""
    if len(set(shapes)) > 1:
        raise ValueError(f'tensors of the shapes {sorted({part.shape for part in parts})} belong together, '
                         'but do not fit: copy or download the weights again')
    return functools.reduce(torch.promote_types, [part.dtype for part in parts])


def joined(parts):
    """Several tensors one below the other, as a packed tensor has them."""
    dtype = _common_dtype(parts, [part.shape[1:] for part in parts])
    shape = (sum(part.shape[0] for part in parts), *parts[0].shape[1:])

    def read(rows):
        start, stop, _ = rows.indices(shape[0])
        found = torch.empty(max(stop - start, 0), *shape[1:], dtype=dtype)
        first = 0  # the part's first row in the joined tensor
        for part in parts:
            below, above = max(start, first), min(stop, first + part.shape[0])
            if below < above:
                found[below - start:above - start] = part[below - first:above - first]
            first += part.shape[0]
        return found

    return LazyTensor(shape, dtype, read)


def stacked(parts):
    """Tensors of one shape along a new first dimension, as ours has the matrices of all experts."""
    dtype = _common_dtype(parts, [part.shape for part in parts])

    def read(rows):
        chosen = parts[rows]
        found = torch.empty(len(chosen), *parts[0].shape, dtype=dtype)
        for row, part in zip(found, chosen):
            row.copy_(part.whole())
        return found

    return LazyTensor((len(parts), *parts[0].shape), dtype, read)


def unstacked(stored):
    """The inverse of `stacked`: a list."""

    def element(number):
        return LazyTensor(stored.shape[1:], stored.dtype,
                      lambda rows: stored[number:number + 1][0][rows])

    return [element(number) for number in range(stored.shape[0])]


def mapped(stored, function):
    """function(tensor), which changes elements but neither shape nor dtype."""
    return LazyTensor(stored.shape, stored.dtype, lambda rows: function(stored[rows]))


def with_rows(stored, shape, function):
    """function(rows), which changes the other dimensions alone, so that the tensor has that shape."""
    return LazyTensor(tuple(shape), stored.dtype, lambda rows: function(stored[rows]))


def zeros(shape, dtype=torch.float32):
    """A tensor of zeros that no file holds."""

    def read(rows):
        count = len(range(*rows.indices(shape[0])))
        return torch.zeros(count, *shape[1:], dtype=dtype)

    return LazyTensor(tuple(shape), dtype, read)
