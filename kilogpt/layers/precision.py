"""Dtypes within the model. Imports torch alone.

Losses, softmaxes and norms are computed in float32 although their inputs may have 16 bits. A model in float64,
with which layouts are compared (kilogpt.prove), stays in float64.
"""
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
