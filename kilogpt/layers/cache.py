"""The keys and values of a text so far, so that each new token is read alone.

Imports torch alone. Shapes in comments: B batch, T new positions, S positions so far, G key/value heads,
D head width.
"""
from typing import NamedTuple

import torch


class CacheView(NamedTuple):
    """One layer of a Cache in one step."""
    keys: torch.Tensor  # (rows, G, size, D)
    values: torch.Tensor  # (rows, G, size, D)
    positions: torch.Tensor  # (T,), positions of the new tokens
    mask: torch.Tensor | None  # (T, S): which positions each new token sees; None if the cache was empty

    def extend(self, k, v):
        """Write new k, v (B, G, T, D), one row into all; returns the keys and values so far (B, G, S, D)."""
        self.keys[:, :, self.positions] = k.type_as(self.keys)
        self.values[:, :, self.positions] = v.type_as(self.values)
        if self.mask is None:
            return k, v
        B, S = k.size(0), self.mask.size(1)
        return self.keys[:B, :, :S], self.values[:B, :, :S]


class Cache:
    """The keys and values that attention has seen, per layer two tensors (rows, G, size, D).

    The first `length` positions are filled. No tensor grows or moves, and length is a tensor too, so that the
    step of each token is compiled once and captured in one CUDA graph.
    """

    def __init__(self, n_layer, shape, like):
        # Zeros, since positions that a mask excludes are multiplied by 0 and must not be NaN.
        self.layers = [(like.new_zeros(shape), like.new_zeros(shape)) for _ in range(n_layer)]
        self.length = torch.zeros((), dtype=torch.long, device=like.device)

    def next_views(self, T, config):
        """{block's name: CacheView} for a step that adds T tokens."""
        positions = self.length + torch.arange(T, device=self.length.device)
        if torch.compiler.is_compiling():  # reads all positions, so that every step has one shape
            S = self.layers[0][0].size(2)
        else:
            S = int(self.length) + T
            config.check_length(S)
        mask = torch.arange(S, device=positions.device) <= positions[:, None] if S > T else None
        return {str(i): CacheView(*layer, positions, mask) for i, layer in enumerate(self.layers)}
