"""The keys, values and states of texts so far, so that each new token is read alone. Imports torch alone.

A cache has rows, and each row holds a text of a length of its own. Its tensors never grow or move.
Shapes in comments: R rows of the cache, B rows of a step, T new positions, S positions that a query may see,
G key/value heads, D head width, F features of queries, keys and values together.
"""
import copy
from typing import NamedTuple

import torch


class LayerCache(NamedTuple):
    """What one layer keeps. Position p of a row's text is in slot p % size."""
    keys: torch.Tensor  # (R, G, size, D)
    values: torch.Tensor  # (R, G, size, D)
    # (R, F, n): what the convolutions in attention and before the MLP read of the text; n = 0 without one
    last: torch.Tensor
    last_of_mlp: torch.Tensor
    states: torch.Tensor  # (R, H, K, V), of a recurrence, with its head counts and widths; elsewhere (R, 0, 0, 0)


class Plan(NamedTuple):
    """Where the layers that have one window write and read in a step."""
    mask: torch.Tensor | None  # (B, 1, T, S), what each new token sees; None = all up to itself, with S = T
    source: tuple | None  # (row of the step, new position) of each key that is written, or None: all of T = 1
    target: tuple  # (row of the cache, slot) of each of them
    n_read: int | None  # slots to read with the new tokens in them; 0 = new tokens alone, None = after the old


class CacheView(NamedTuple):
    """One layer of a Cache in one step."""
    layer: LayerCache
    plan: Plan
    rows: slice | torch.Tensor  # of the cache
    counts: torch.Tensor | None  # as in Cache.part

    def extend(self, k, v):
        """Write new k, v (B, G, T, D); returns what queries may see (B, G, S, D)."""
        keys, values, seen = self.layer.keys, self.layer.values, (k, v)
        _, source, target, n_read = self.plan
        if n_read is None:
            seen = torch.cat((keys[self.rows], k), dim=2), torch.cat((values[self.rows], v), dim=2)
        row, slot = target
        for kept, new in ((keys, k), (values, v)):
            new = new[:, :, 0] if source is None else new[source[0], :, source[1]]  # (written, G, D)
            kept[row, :, slot] = new.type_as(kept)
        if n_read:
            seen = keys[self.rows, :, :n_read], values[self.rows, :, :n_read]
        return seen

    def states(self):
        """The states (B, H, K, V) of a recurrence."""
        return self.layer.states[self.rows]

    def keep_states(self, states):
        """Replace the states by those (B, H, K, V) after the step."""
        self.layer.states[self.rows] = states.type_as(self.layer.states)

    def is_token(self, T):
        """(B, T): which of T new positions are tokens and not padding; None = all."""
        return None if self.counts is None else torch.arange(T, device=self.counts.device) < self.counts[:, None]

    def exchange(self, x, is_of_mlp=False):
        """Keep the last n of the new positions x (B, T, F) for a convolution; returns the n before x (B, n, F)."""
        last = self.layer.last_of_mlp if is_of_mlp else self.layer.last
        before = last[self.rows].mT.type_as(x).clone()
        n, extended = before.size(1), torch.cat((before, x), dim=1)
        if self.counts is None:
            kept = extended[:, x.size(1):]
        else:
            places = self.counts[:, None] + torch.arange(n, device=x.device)  # (B, n)
            kept = extended.gather(1, places[..., None].expand(-1, -1, x.size(2)))
        last[self.rows] = kept.mT.type_as(last)
        return before


class Cache:
    """The keys and values that attention has seen, and what convolutions read; LayerCache has the shapes.

    lengths (R,): how many positions of each row's text are read. To begin a row again, set its length to 0.
    A layer with a window keeps as many positions as the window has, in a ring.
    """

    def __init__(self, config, rows, length, like, tp=1, layers=None):
        """config: a GPTConfig. length: of the longest text. like: a tensor of the dtype and on the device.

        tp: between how many processes the heads are divided. layers: the numbers of those that are here; None = all.
        """
        windows = [config.window_of(layer) for layer in range(config.n_layer)]
        self.windows = [window if 0 < window < length else 0 for window in windows]
        self.size = length
        heads = config.n_head // tp, config.n_kv_head // tp
        last = (heads[0] + 2 * heads[1]) * config.head_width, config.n_before('attention_conv')
        last_of_mlp = rows, config.n_embd, config.n_before('mlp_conv')
        # Whether a text may continue after fewer of its tokens than were read.
        self.can_go_back = not any(self.windows) and not any(map(config.n_before, config.CONVOLUTIONS))
        # Zeros, since positions that a mask excludes are multiplied by 0 and must not be NaN.
        self.layers = {}
        for layer in range(config.n_layer) if layers is None else layers:
            n_heads, last_of_layer, states = heads[1], last, (0, 0, 0)
            widths = config.head_width, config.head_width
            if config.mixer_of(layer) == 'D':
                n_heads, (last_of_layer, states) = 0, config.delta_shapes(tp)
            elif config.kv_latent:  # keys and values of all heads come from one vector (latent.py)
                n_heads, widths = 1, (config.rope_width + config.kv_latent, 0)
            keys, values = ((rows, n_heads, self.windows[layer] or length, width) for width in widths)
            states = torch.zeros(rows, *states, dtype=torch.promote_types(like.dtype, torch.float32), device=like.device)
            self.layers[layer] = LayerCache(
                *map(like.new_zeros, (keys, values, (rows, *last_of_layer), last_of_mlp)), states)
        self.lengths = torch.zeros(rows, dtype=torch.long, device=like.device)
        self.rows = self.counts = self.ends = None

    def part(self, rows, counts=None, ends=None):
        """The same cache, of which the next step continues only some rows.

        rows: a slice, whose keys are read where they are, or numbers (B,), whose keys are copied to be read.
        counts (B,): how many of the T new positions of each row are tokens; the others, at the end, are padding.
            A row with none should have room for one, since a step with T = 1 writes without asking.
        ends: (longest row before, longest row after the step), if the host knows; else the device is asked.
        """
        part = copy.copy(self)
        part.rows, part.counts, part.ends = rows, counts, ends
        return part

    def take_rows(self, rows):
        """Continue with these of the present rows, by their numbers, in that order; one may come repeatedly."""
        self.layers = {number: LayerCache(*(tensor[rows] for tensor in layer)) for number, layer in self.layers.items()}
        self.lengths = self.lengths[rows]

    def copy_row(self, source, target, length, cache=None):
        """Let row `target` begin with the first `length` positions of row `source` (of another cache)."""
        for number, new in self.layers.items():
            old = (cache or self).layers[number]
            n = min(old.keys.size(2), new.keys.size(2)) if self.windows[number] else length
            new.keys[target, :, :n] = old.keys[source, :, :n]
            new.values[target, :, :n] = old.values[source, :, :n]
            new.last[target] = old.last[source]
            new.last_of_mlp[target] = old.last_of_mlp[source]
            new.states[target] = old.states[source]
        self.lengths[target] = length

    def next_step(self, B, T, config, starts=None):
        """What the model needs for a step that adds T positions to B rows.

        (positions (B, T), lengths after the step (B,), {window: mask}, {block's name: CacheView}).
        starts (B, T): the position at which the document of each new token begins; None = the text is one.
        """
        rows, lengths, after = self.extent(B, T)
        if torch.compiler.is_compiling():  # reads all slots, so that every step has one shape
            ends = 1, self.size
        else:
            ends = self.ends or (int(lengths.max()), int(after.max()))
            config.check_length(ends[1])
        positions = lengths[:, None] + torch.arange(T, device=lengths.device)
        plans = {window: self._plan(window, rows, lengths, positions, ends, starts) for window in set(self.windows)}
        views = {}
        for number, layer in self.layers.items():
            views[str(number)] = CacheView(layer, plans[self.windows[number]], rows, self.counts)
        masks = {config.window_of(i): plans[window].mask for i, window in enumerate(self.windows)}
        if self.counts is not None:  # embeddings have no rows for padding past the end
            positions = positions.clamp(max=config.block_size - 1)
        return positions, after, masks, views

    def extent(self, B, T):
        """(rows, their lengths before, their lengths after (B,)) of a step that adds T positions to B rows."""
        rows = slice(0, B) if self.rows is None else self.rows
        lengths = self.lengths[rows]
        return rows, lengths, lengths + (T if self.counts is None else self.counts)

    def advance(self, after):
        """Note that the rows of the step now have these lengths (B,)."""
        self.lengths[slice(0, len(after)) if self.rows is None else self.rows] = after

    def last_of(self, x):
        """The last position of each row's new tokens (B, 1, C) of x (B, T, C)."""
        if self.counts is None or x.size(1) == 1:
            return x[:, -1:]
        return x[torch.arange(len(x), device=x.device), self.counts - 1][:, None]

    def _plan(self, window, rows, lengths, positions, ends, starts):
        """The Plan of the layers with a window."""
        (_, T), device, size = positions.shape, positions.device, window or self.size
        numbers = torch.arange(rows.start, rows.stop, device=device) if isinstance(rows, slice) else rows
        if T == 1:
            source, target = None, (numbers, positions[:, 0] % size)
        else:  # of padding nothing is written, and of many tokens those that a ring keeps
            place = torch.arange(T, device=device)
            n_new = torch.full_like(numbers, T) if self.counts is None else self.counts
            is_written = (place < n_new[:, None]) & (place >= n_new[:, None] - size)
            source = is_written.nonzero(as_tuple=True)
            target = numbers[source[0]], positions[source] % size
        if ends[0] == 0:  # all texts begin: the new tokens see each other
            keys, n_read = torch.arange(T, device=device), 0
            if starts is None and not 0 < window < T:
                return Plan(None, source, target, n_read)
        elif not window:
            keys, n_read = torch.arange(ends[1], device=device), ends[1]
        else:
            newest = positions if T == 1 else lengths[:, None] - 1  # (B, 1)
            keys = newest - (newest - torch.arange(window, device=device)) % window  # below 0: an empty slot
            n_read = window
            if T > 1:
                keys, n_read = torch.cat((keys, positions), dim=1), None
        mask = keys[..., None, :] <= positions[..., None]  # (B, T, S)
        if window or starts is not None:
            first = torch.zeros_like(positions) if starts is None else starts  # (B, T)
            if window:
                first = torch.maximum(first, positions - window + 1)
            mask = mask & (keys[..., None, :] >= first[..., None])
        return Plan(mask[:, None], source, target, n_read)
