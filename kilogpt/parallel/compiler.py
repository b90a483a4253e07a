"""torch.compile on many processes, which all run compiled code or none do."""
import os
import warnings

import torch
import torch.distributed as dist

from kilogpt.configurator import announced
from kilogpt.devices.compiler import compile_failure, in_one_line
from kilogpt.parallel.layout import SPLIT_BACKWARD


def set_up_compiler(processes, layout, notes):
    """Whether a run under a Layout can be compiled on all processes. notes: gets the reason if not."""
    if layout.pp > 1 and layout.pp_schedule in SPLIT_BACKWARD:
        notes.append('compile=False: a compiled backward pass cannot be split as '
                     f'pp_schedule={layout.pp_schedule} does')
        return False
    with announced('trying torch.compile'):
        failure = processes.first_problem(compile_failure(processes.device))
    if failure:
        notes.append(f'compile=False: torch.compile does not work here (rank {failure[0]}: {failure[1]})')
    return not failure


def agree_on_fallbacks(processes, notes):
    """Let all processes run eagerly if the compiler failed on some of them alone. notes: gets the reason.

    PyTorch runs a function eagerly if the compiler fails (torch._dynamo.config.suppress_errors). A process
    that fails alone would round differently from the others, and be slower. A function that the compiler
    cannot follow is the same on all processes, and the rest stays compiled.
    """
    frames = torch._dynamo.utils.counters['frames']
    failures = processes.gather(frames['total'] - frames['ok'])
    if max(failures) == min(failures):
        return
    rank = failures.index(max(failures))
    reason = processes.share(_last_failure(), rank)
    torch.compiler.set_stance('force_eager')
    notes.append(f'compile=False on all processes: the compiler failed on rank {rank} ({reason})')


def _last_failure():
    """Why the compiler failed on a function in this process, in one line."""
    for found in reversed(torch._dynamo.utils.get_compilation_metrics()):
        if found.fail_type:
            return in_one_line(found.fail_type, found.fail_reason)
    return 'for a reason that it did not give'


def set_up_async_tp(processes, compiles, group, notes):
    """Run tensor parallelism's collectives beside matrix products, or add to notes why that is impossible.

    group: the process group of tensor parallelism.
    """
    problem = 'it needs compile=True and CUDA GPUs'
    if compiles and processes.device.type == 'cuda':
        problem = enable_async_tp(processes, group)
    if problem:
        notes.append(f'async_tp=False: {problem}')


def enable_async_tp(processes, group):
    """Let the compiler run tensor parallelism's collectives beside products; returns why it cannot, or None.

    Each process must be able to write to the GPU memory of the others in its group (symmetric memory). All
    processes try, and the compiler uses symmetric memory only if all succeed.
    """
    problem = memory = None
    processes_of_node = int(os.environ.get('LOCAL_WORLD_SIZE', 1))
    if len({rank // processes_of_node for rank in dist.get_process_group_ranks(group)}) > 1:
        problem = 'its tensor-parallel group spans nodes'
    else:
        try:
            from torch.distributed import _symmetric_memory as symmetric_memory
            with warnings.catch_warnings():
                # The call is deprecated as unnecessary, but torch 2.13's compiler still reads what it sets.
                warnings.simplefilter('ignore', FutureWarning)
                symmetric_memory.enable_symm_mem_for_group(group.group_name)
            memory = symmetric_memory.empty(1024, dtype=torch.uint8, device=processes.device)
        except Exception as error:  # the driver or this build of PyTorch may lack any of several features
            problem = in_one_line(type(error).__name__, error)
    found = processes.first_problem(problem)
    if not found:  # either all processes come to the rendezvous, or none
        try:
            symmetric_memory.rendezvous(memory, group.group_name)
        except Exception as error:
            problem = in_one_line(type(error).__name__, error)
        found = processes.first_problem(problem)
    if found:
        return f'rank {found[0]}: {found[1]}'
    torch._inductor.config._micro_pipeline_tp = True
    return None
