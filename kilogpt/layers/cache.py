"""The keys and values of a text so far, so that each new token is read alone.

Imports torch and attention.py alone. Shapes in comments: B batch, T new positions, S positions that a query
may see, G key/value heads, D head width, F features of queries, keys and values together.
"""
from typing import NamedTuple

import torch


class CacheView(NamedTuple):
    """One layer of a Cache in one step. Position p of the text is in slot p % size."""
    keys: torch.Tensor  # (rows, G, size, D)
    values: torch.Tensor  # (rows, G, size, D)
    # (rows, F, n): what the convolutions in attention and before the MLP read of the text; n = 0 without one
    last: torch.Tensor
    last_of_mlp: torch.Tensor
    positions: torch.Tensor  # (T,), positions of the new tokens
    n_read: int | None  # slots to read with the new tokens in them; 0 = new tokens alone, None = after the old

    def extend(self, k, v):
        """Write new k, v (B, G, T, D), one row into all; returns what queries may see (B, G, S, D)."""
        B, seen = k.size(0), (k, v)
        if self.n_read is None:
            seen = torch.cat((self.keys[:B], k), dim=2), torch.cat((self.values[:B], v), dim=2)
        kept = min(k.size(2), self.keys.size(2))
        slots = self.positions[-kept:] % self.keys.size(2)
        self.keys[:, :, slots] = k[:, :, -kept:].type_as(self.keys)
        self.values[:, :, slots] = v[:, :, -kept:].type_as(self.values)
        if self.n_read:
            seen = self.keys[:B, :, :self.n_read], self.values[:B, :, :self.n_read]
        return seen


class Cache:
    """The keys and values that attention has seen, and what convolutions read; CacheView has the shapes.

    The first `length` positions of the text are read. A layer with a window keeps as many positions as the
    window has. No tensor grows or moves, and length is a tensor too, so that the step of each token is
    compiled once and captured in one CUDA graph.
    """

    def __init__(self, config, rows, length, like):
        """config: a GPTConfig. length: of the longest text. like: a tensor of the dtype and on the device."""
        windows = [config.window_of(layer) for layer in range(config.n_layer)]
        self.windows = [window if 0 < window < length else 0 for window in windows]
        self.size = length
        last = rows, (config.n_head + 2 * config.n_kv_head) * config.head_width, config.n_before('attention_conv')
        last_of_mlp = rows, config.n_embd, config.n_before('mlp_conv')
        # Whether a text may go on after fewer of its tokens than were read.
        self.can_go_back = not any(self.windows) and not config.attention_conv and not config.mlp_conv
        # Zeros, since positions that a mask excludes are multiplied by 0 and must not be NaN.
        self.layers = []
        heads, widths = config.n_kv_head, (config.head_width, config.head_width)
        if config.kv_latent:  # keys and values of all heads come from one vector (latent.py)
            heads, widths = 1, (config.rope_width + config.kv_latent, 0)
        for window in self.windows:
            keys, values = ((rows, heads, window or length, width) for width in widths)
            self.layers.append(tuple(map(like.new_zeros, (keys, values, last, last_of_mlp))))
        self.length = torch.zeros((), dtype=torch.long, device=like.device)

    def take_rows(self, rows):
        """Continue with these of the present rows, by their numbers, in that order; one may come repeatedly."""
        self.layers = [tuple(tensor[rows] for tensor in layer) for layer in self.layers]

    def next_step(self, T, config, starts=None):
        """(positions (T,), {window: mask}, {block's name: CacheView}) for a step that adds T tokens.

        starts (B, T): the position at which the document of each new token begins; None = the text is one.
        A mask (T, S), or with starts (B, 1, T, S), says what each new token sees; None = all up to itself.
        """
        positions = self.length + torch.arange(T, device=self.length.device)
        if torch.compiler.is_compiling():  # reads all positions, so that every step has one shape
            S = self.size
        else:
            S = int(self.length) + T
            config.check_length(S)
        plans = {window: self._plan(window, T, S, positions, starts) for window in set(self.windows)}
        views = {}
        for i, (layer, window) in enumerate(zip(self.layers, self.windows)):
            views[str(i)] = CacheView(*layer, positions, plans[window][1])
        masks = {config.window_of(i): plans[window][0] for i, window in enumerate(self.windows)}
        return positions, masks, views

    def _plan(self, window, T, S, positions, starts):
        """(mask, n_read) of the layers with a window."""
        device = positions.device
        if S == T:  # the text begins: the new tokens see each other
            keys, n_read = torch.arange(T, device=device), 0
            if starts is None and not window:
                return None, n_read
        elif not window:
            keys, n_read = torch.arange(S, device=device), S
        else:
            newest = positions[-1] if T == 1 else self.length - 1
            keys = newest - (newest - torch.arange(window, device=device)) % window  # below 0: an empty slot
            n_read = window
            if T > 1:
                keys, n_read = torch.cat((keys, positions)), None
        first = torch.zeros_like(positions) if starts is None else starts  # (T,) or (B, T)
        if window:
            first = torch.maximum(first, positions - window + 1)
        mask = (keys <= positions[:, None]) & (keys >= first[..., None])
        return mask if starts is None else mask[:, None], n_read
