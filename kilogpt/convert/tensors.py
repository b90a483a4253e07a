"""Tensors that are read when they are needed, and how one is made of others. Nothing here knows a format.

A model that is larger than memory is converted tensor by tensor: each conversion is a Stored whose `read`
calls the `read` of others.
"""
from typing import Callable, NamedTuple

import torch


class Stored(NamedTuple):
    """A tensor in a file. `stored[start:stop]` and `read(slice)` return these rows, in the file's dtype."""
    shape: tuple
    dtype: torch.dtype
    read: Callable  # slice of rows with a step of 1 -> tensor

    def __getitem__(self, rows):
        return self.read(rows)

    def whole(self):
        return self.read(slice(None))


def in_memory(tensor):
    """The Stored of a tensor that is in memory."""
    return Stored(tuple(tensor.shape), tensor.dtype, lambda rows: tensor[rows])


def transposed(stored):
    """The transpose of a matrix, which is read whole."""
    return Stored(stored.shape[::-1], stored.dtype, lambda rows: stored.whole().t()[rows])


def selected(stored, indices):
    """The rows with these indices (a LongTensor), in this order: one part of a packed tensor, for example."""

    def read(rows):
        wanted = indices[rows]
        if not len(wanted):
            return stored[0:0]
        first, last = int(wanted.min()), int(wanted.max())
        return stored[first:last + 1][wanted - first]

    return Stored((len(indices), *stored.shape[1:]), stored.dtype, read)


def joined(parts):
    """Several tensors one below the other, as a packed tensor has them."""

    def read(rows):
        start, stop, _ = rows.indices(sum(part.shape[0] for part in parts))
        pieces, first = [], 0
        for part in parts:
            below = slice(max(start - first, 0), max(min(stop - first, part.shape[0]), 0))
            if below.start < below.stop:
                pieces.append(part[below])
            first += part.shape[0]
        return torch.cat(pieces) if pieces else parts[0][0:0]

    shape = (sum(part.shape[0] for part in parts), *parts[0].shape[1:])
    return Stored(shape, parts[0].dtype, read)


def stacked(parts):
    """Tensors of one shape along a new first dimension, as ours has the matrices of all experts."""
    return Stored((len(parts), *parts[0].shape), parts[0].dtype,
                  lambda rows: torch.stack([part.whole() for part in parts[rows]]))


def unstacked(stored):
    """The inverse of `stacked`: a list."""

    def element(number):
        return Stored(stored.shape[1:], stored.dtype,
                      lambda rows: stored[number:number + 1][0][rows])

    return [element(number) for number in range(stored.shape[0])]


def mapped(stored, function):
    """function(tensor), which changes elements but neither shape nor dtype."""
    return Stored(stored.shape, stored.dtype, lambda rows: function(stored[rows]))


def zeros(shape, dtype=torch.float32):
    """A tensor of zeros that no file holds."""
    return Stored(tuple(shape), dtype, lambda rows: torch.zeros(len(range(*rows.indices(shape[0]))), *shape[1:],
                                                                dtype=dtype))
