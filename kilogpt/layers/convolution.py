"""Convolutions by which a position reads the positions just before it. Imports torch alone.

Shapes in comments: B batch, T positions, F features, n positions before.
"""
import torch
from torch import nn


class Convolution(nn.Module):
    """A causal depthwise convolution, added to its input: y[t] = x[t] + Σ factor[d] · x[t - d] for d = 1 to n.

    Each feature has n factors, which start at 0. A position does not read across the beginning of its document.
    Attention applies a convolution to queries, keys and values (Primer, So et al. 2021, "MDHA"), and a block
    applies one to the input of the MLP (Canon layers, Allen-Zhu 2025, "Canon-C"). In Gated DeltaNet x[t] has
    a factor too, which starts at 1.
    """

    def __init__(self, size, scales_own=False, **widths):
        """size: n + 1, the positions that are read. widths: the number of features of each tensor, by name.

        scales_own: whether x[t] has a factor.
        """
        super().__init__()
        self.n_before, self.scales_own = size - 1, scales_own
        # As vectors, the factors are laid out and optimized like norms and biases.
        for name, width in widths.items():
            self.register_parameter(name, nn.Parameter(torch.empty(width * self.n_before)))
        for name, width in widths.items():
            if scales_own:
                self.register_parameter(f'{name}_weight', nn.Parameter(torch.empty(width)))
        self.positions_before = zeros_before

    def forward(self, *parts, positions, cache=None, is_of_mlp=False):
        """Tensors (B, T, F), each with a width F of its own -> a tuple of the same shapes; one tensor -> a tensor.

        positions (B or 1, T): the positions of the tokens in their documents. cache: a CacheView, which has the
        ends of the texts so far; is_of_mlp: which of its two.
        """
        if cache is None:
            before = [self.positions_before(part, self.n_before) for part in parts]
        else:
            before = cache.exchange(torch.cat(parts, dim=-1), is_of_mlp).split([part.size(-1) for part in parts], dim=-1)
        # For each distance, whether the position that far before is in the same document.
        is_there = [(positions >= distance)[..., None] for distance in range(1, self.n_before + 1)]
        factors, count = self.factors(), len(parts)
        own = [part * factor.type_as(part) for part, factor in zip(parts, factors[count:])] or parts
        parts = tuple(self.add_before(*inputs, is_there) for inputs in zip(own, parts, before, factors))
        return parts if len(parts) > 1 else parts[0]

    def add_before(self, y, x, before, factors, is_there):
        """y, x (B, T, F), before (B, n, F): the positions before x, factors (F * n,) -> y and the terms before it.

        is_there: a mask (B or 1, T, 1) for each distance from 1 on, of positions that have one that far before.
        """
        T, n = x.size(1), self.n_before
        extended = torch.cat((before, x), dim=1)
        factors = factors.view(-1, n).type_as(x)
        for distance in range(1, n + 1):
            earlier = extended[:, n - distance:n - distance + T] * factors[:, distance - 1]
            y = y + earlier.where(is_there[distance - 1], 0)
        return y

    def factors(self):
        """The factors of each tensor. Under tensor parallelism, those of this rank's features."""
        return list(self.parameters(recurse=False))


def zeros_before(x, n):
    """Zeros (B, n, F): the positions before x (B, T, F), which is the beginning of a sequence."""
    return x.new_zeros(x.size(0), n, x.size(2))
