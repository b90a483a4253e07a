"""The products of all experts of a block in one kernel, PyTorch's grouped_mm (2.10 and later)."""
import functools

import torch
from torch.nn import functional as F

from kilogpt.devices.parts import replace_parts


def group_products(model, dtypes):
    """Compute the products of a block's experts at once where PyTorch can, in place.

    dtypes: those that the device's kernel takes. Rows must be multiples of 16 bytes.
    """
    if hasattr(F, 'grouped_mm'):
        replace_parts(model, 'products', lambda loop: functools.partial(grouped_products, loop, dtypes))


def grouped_products(loop, dtypes, ends):
    """As `loop`, which is loop_over_experts of mixture.py, but on a GPU the host does not wait for sizes."""
    offsets = ends.to(torch.int32)

    def product(x, matrices):
        is_aligned = matrices.size(-1) % 8 == 0 and matrices.size(-2) % 8 == 0
        if x.dtype in dtypes and is_aligned and x.size(0):  # a process may receive no tokens
            return F.grouped_mm(x, matrices.mT, offs=offsets)
        return loop(ends)(x, matrices)

    return product
