"""A convolution that lets queries, keys and values see the positions before theirs. Imports torch alone.

Shapes in comments: B batch, T positions, F features, n positions before.
"""
import torch
from torch import nn


class Convolution(nn.Module):
    """Adds to each query, key and value those of the positions before it, times learned factors.

    Each feature has factors of its own, as in the depthwise convolution of Primer (So et al. 2021, "MDHA"). The
    factor of the own position is 1, and the others start as 0. Nothing crosses the beginning of a document.
    """

    def __init__(self, config):
        super().__init__()
        self.n_before = config.n_before
        width, kv_width = (heads * config.head_width for heads in (config.n_head, config.n_kv_head))
        # Vectors, to which a layout and an optimizer do what they do to the biases of the linears before.
        self.q, self.k, self.v = (nn.Parameter(torch.empty(n * self.n_before)) for n in (width, kv_width, kv_width))
        self.positions_before = zeros_before

    def forward(self, q, k, v, positions, cache=None):
        """q (B, T, H * D), k and v (B, T, G * D) -> three of the same shapes.

        positions (B or 1, T): those of the tokens in their documents. cache: the CacheView of this layer.
        """
        parts = (q, k, v)
        if cache is None:
            before = [self.positions_before(part, self.n_before) for part in parts]
        else:
            before = cache.exchange_last(torch.cat(parts, dim=-1)).split([part.size(-1) for part in parts], dim=-1)
        # Whether the position that far before is in the same document.
        is_there = [(positions >= distance)[..., None] for distance in range(1, self.n_before + 1)]
        return [self.add_before(*inputs, is_there) for inputs in zip(parts, before, self.factors())]

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
        """The factors of queries, keys and values. Under tensor parallelism, those of this rank's features."""
        return self.q, self.k, self.v


def zeros_before(x, n):
    """(B, n, F): what comes before x (B, T, F), the beginning of a sequence."""
    return x.new_zeros(x.size(0), n, x.size(2))
