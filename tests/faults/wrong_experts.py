"""Plant a mistake of experts that `kilogpt.prove` does not look for. FAULT names the mistake.

loads: each rank balances by its own tokens. choice: the second forward pass of a checkpoint chooses again,
and differs.
"""
import contextlib
import os

import torch

from kilogpt.parallel import expert

fault = os.environ['FAULT']

if fault == 'loads':
    all_reduce = torch.distributed.all_reduce
    torch.distributed.all_reduce = lambda tensor, *args, **options: (
        None if tensor.dtype == torch.int64 else all_reduce(tensor, *args, **options))


def choose_again(router):
    choose = router.choose

    @contextlib.contextmanager
    def other_choice():
        router.choose = lambda ranking: choose(-ranking)
        yield
        router.choose = choose

    return lambda: (contextlib.nullcontext(), other_choice())


if fault == 'choice':
    expert.remember_choice = choose_again
