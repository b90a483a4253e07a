"""Dtypes within the model, and its first values. Imports torch alone.

Losses, softmaxes and norms are computed in float32 although their inputs may have 16 bits. A model in float64,
with which layouts are compared (kilogpt.prove), stays in float64.
"""
import hashlib
import math

import torch


def at_least_float32(x):
    """x in float32, or as it is in float64."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def cast_for_linears(x):
    """x in autocast's dtype. Without this cast, each of the linears that read x would cast x again."""
    # Autocast has a state for each type of device, and PyTorch wants to be told which one is meant.
    if not torch.is_autocast_enabled(x.device.type):
        return x
    return x.to(torch.get_autocast_dtype(x.device.type))


def draw_normal(std, name, seed, shape, rows):
    """The `rows` (a slice) of a tensor of that shape with normal values: float32, on the CPU.

    Values come in blocks of rows, each from a generator seeded by (seed, name, block). A process draws the blocks
    that contain its rows, and gets the values that one process has there.
    """
    start, stop, _ = rows.indices(shape[0])
    size = max(1, 2 ** 16 // math.prod(shape[1:]))  # rows; a new generator takes 7% of a block's time
    first, last = start // size * size, min(-(-stop // size) * size, shape[0])  # rows of whole blocks
    # In another dtype the same generator draws other numbers.
    value = torch.empty(last - first, *shape[1:], dtype=torch.float32, device='cpu')
    for number, block in enumerate(value.split(size), first // size):
        digest = hashlib.blake2b(f'{seed} {name} {number}'.encode(), digest_size=8).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest, 'little') >> 1)
        block.normal_(0.0, std, generator=generator)
    return value[start - first:stop - first]
