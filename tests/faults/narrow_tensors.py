"""Compute in float64, and print each operation whose result has fewer bits, except for those in EXACT.

The line reads `narrower than float64: FILE:LINE in FUNCTION, OPERATION`, for the innermost code of this
repository on the stack.
"""
import os
import sys

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
NARROW = torch.float32, torch.bfloat16, torch.float16
# {(file, function): why its narrow tensors do not change what a run computes}
EXACT = {
    ('kilogpt/layers/precision.py', 'draw_normal'): 'draws in float32 in any dtype',
    ('kilogpt/parallel/dtensor.py', 'fill'): 'copies initial values',
    ('kilogpt/optim.py', '_init_group'): 'counts the steps of AdamW, in float32 for its fused kernel',
    ('kilogpt/run/guard.py', 'step'): 'is 0 or 1: whether an update is made',
    ('kilogpt/run/guard.py', '<lambda>'): 'is 1 or 0: whether an update is skipped',
    ('kilogpt/run/checkpoint.py', '_copy_to_host'): 'copies, among the parameters, the steps of AdamW',
}


class NarrowTensors(TorchDispatchMode):
    """Prints each operation once."""

    def __init__(self):
        super().__init__()
        self.printed = set()

    def __torch_dispatch__(self, operation, types, arguments=(), keywords=None):
        result = operation(*arguments, **(keywords or {}))
        if any(isinstance(each, torch.Tensor) and each.dtype in NARROW for each in tree_leaves(result)):
            path, function, line = find_caller()
            text = f'narrower than float64: {path}:{line} in {function}, {operation}'
            if (path, function) not in EXACT and text not in self.printed:
                self.printed.add(text)
                print(text, file=sys.stderr, flush=True)
        return result


def find_caller():
    """(file, function, line) of the innermost code of this repository that is on the stack."""
    frame = sys._getframe(2)
    while frame.f_back and not is_ours(frame.f_code.co_filename):
        frame = frame.f_back
    return os.path.relpath(frame.f_code.co_filename, ROOT), frame.f_code.co_name, frame.f_lineno


def is_ours(path):
    """Whether a file is this repository's: CI has its libraries in a folder of the repository."""
    return path.startswith(ROOT + os.sep) and 'site-packages' not in path


torch.set_default_dtype(torch.float64)
NarrowTensors().__enter__()  # for the whole run
