"""Convolutions that let a position see the ones before it. Imports torch alone.

Shapes in comments: B batch, T positions, F features, n positions before.
"""
import torch
from torch import nn


class Convolution(nn.Module):
    """Adds the n positions before each, every feature times learned factors: a depthwise convolution.

    The factor of the own position is 1, and the others start as 0. Nothing crosses the beginning of a document.
    In attention it takes queries, keys and values (Primer, So et al. 2021, "MDHA"), before an MLP the MLP's input
    (Canon layers, Allen-Zhu 2025, "Canon-C").
    """

    def __init__(self, size, **widths):
        """size: positions that it reads, the own one included. widths: the features of each tensor, by name."""
        super().__init__()
        self.n_before = size - 1
        # Vectors, to which a layout and an optimizer do what they do to norms and biases.
        for name, width in widths.items():
            self.register_parameter(name, nn.Parameter(torch.empty(width * self.n_before)))
        self.positions_before = zeros_before

    def forward(self, *parts, positions, last=None):
        """Tensors (B, T, F), each with its own F -> tensors of the same shapes, or one for one.

        positions (B or 1, T): those of the tokens in their documents. last (rows, F of all, n): what a cache keeps
        of the text so far. It is replaced by the end of the new tokens; one row of these goes into all.
        """
        if last is None:
            before = [self.positions_before(part, self.n_before) for part in parts]
        else:
            before = exchange(last, torch.cat(parts, dim=-1)).split([part.size(-1) for part in parts], dim=-1)
        # Whether the position that far before is in the same document.
        is_there = [(positions >= distance)[..., None] for distance in range(1, self.n_before + 1)]
        parts = tuple(self.add_before(*inputs, is_there) for inputs in zip(parts, before, self.factors()))
        return parts if len(parts) > 1 else parts[0]

    def add_before(self, x, before, factors, is_there):
        """x (B, T, F), before (B, n, F): what comes before x, factors (F * n,) -> (B, T, F).

        is_there: for each distance, nearest first, whether the position before exists, (B or 1, T, 1).
        """
        T, n = x.size(1), self.n_before
        extended = torch.cat((before, x), dim=1)
        factors = factors.view(-1, n).type_as(x)
        for distance in range(1, n + 1):
            earlier = extended[:, n - distance:n - distance + T] * factors[:, distance - 1]
            x = x + earlier.where(is_there[distance - 1], 0)
        return x

    def factors(self):
        """The factors of each tensor. Under tensor parallelism, those of this rank's features."""
        return list(self.parameters(recurse=False))


def zeros_before(x, n):
    """(B, n, F): what comes before x (B, T, F), the beginning of a sequence."""
    return x.new_zeros(x.size(0), n, x.size(2))


def exchange(last, x):
    """Keep the last n of x (B, T, F) in `last` (rows, F, n); returns the n before x (B, n, F)."""
    before = last[:x.size(0)].mT.type_as(x).clone()
    last.copy_(torch.cat((before, x), dim=1)[:, x.size(1):].mT)
    return before
