"""Plant a mistake that another project has made with experts on several processes. FAULT names the mistake.

router: its gradient is not added up over tensor-parallel ranks. sum: the parts that tensor-parallel ranks
compute of an expert's output are not added up. factor: experts' gradients are ep times too large. loads: each
rank balances by its own tokens. choice: the second forward pass of a checkpoint chooses again, and differs.
"""
import contextlib
import os

import torch

from kilogpt.devices.parts import find_experts
from kilogpt.parallel import expert

fault = os.environ['FAULT']


def split_experts(model, mesh, ep, tp):
    split(model, mesh, ep, tp)
    for routed in find_experts(model).values() if fault == 'sum' else ():
        routed._forward_hooks.clear()
        rank = mesh['tp'].get_local_rank()
        routed.register_forward_hook(
            lambda module, inputs, outputs: (outputs[0].chunk(tp, dim=1)[rank], outputs[1]))


split, expert.split_experts = expert.split_experts, split_experts
if fault == 'router':
    expert.router_matrix_of_rank = lambda matrix: lambda: matrix().to_local()
if fault == 'factor':
    expert.local_matrix = lambda matrix, ep: matrix.to_local()
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
