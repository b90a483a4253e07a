"""torch.compile: whether it works here, and what it does on one process and not on another."""
import os
import warnings

import torch
import torch.distributed as dist

from kilogpt.parallel.layout import SPLIT_BACKWARD


def compile_failure(device):
    """Why torch.compile does not work here (no compiler, no Triton), in one line; None if it works."""
    try:
        torch.compile(lambda x: x.sin() + 1)(torch.ones(8, device=device))
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # whatever TorchInductor and the compiler that it calls raise
        return in_one_line(type(error).__name__, error)
    torch._dynamo.config.suppress_errors = True  # code that the compiler cannot follow runs as it is
    # Blocks are compiled one by one, so that DDP's buckets need no more graph breaks (pytorch#104674).
    torch._dynamo.config.optimize_ddp = False
    return None


def in_one_line(kind, message):
    """A kind of error and its message, which may begin with a line such as "backend='inductor' raised:"."""
    lines = str(message).strip().splitlines() or ['']
    while len(lines) > 1 and lines[0].endswith(':'):
        lines[:2] = [f'{lines[0]} {lines[1]}']
    return f'{kind}: {lines[0]}'


def set_up_compiler(processes, layout, notes):
    """Whether a run under a Layout can be compiled, on all processes. notes: gets the reason if not."""
    if layout.pp > 1 and layout.pp_schedule in SPLIT_BACKWARD:
        notes.append('compile=False: a compiled backward pass cannot be split as '
                     f'pp_schedule={layout.pp_schedule} does')
        return False
    failure = processes.first_problem(compile_failure(processes.device))
    if failure:
        notes.append(f'compile=False: torch.compile does not work here (rank {failure[0]}: {failure[1]})')
    return not failure


def agree_on_fallbacks(processes):
    """Let all processes run eagerly if the compiler failed on some of them alone; returns a note, or None.

    Where the compiler fails, PyTorch runs a function as it is (torch._dynamo.config.suppress_errors). Alone,
    such a process would compute with other roundings than the others, and more slowly. A function that the
    compiler cannot follow is the same on all processes, and the rest stays compiled.
    """
    frames = torch._dynamo.utils.counters['frames']
    failures = processes.gather(frames['total'] - frames['ok'])
    if max(failures) == min(failures):
        return None
    rank = failures.index(max(failures))
    reason = processes.share(_last_failure(), rank)
    torch.compiler.set_stance('force_eager')
    return f'compile=False on all processes: the compiler failed on rank {rank} ({reason})'


def _last_failure():
    """Why the compiler gave up a function of this process, in one line."""
    for found in reversed(torch._dynamo.utils.get_compilation_metrics()):
        if found.fail_type:
            return in_one_line(found.fail_type, found.fail_reason)
    return 'for a reason that it did not give'


def set_up_async_tp(processes, compiles, group, notes):
    """Run tensor parallelism's collectives beside matrix products, or say in notes why that is not possible.

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
    processes try, and none uses it unless it works on all.
    """
    problem = memory = None
    processes_of_node = int(os.environ.get('LOCAL_WORLD_SIZE', 1))
    if len({rank // processes_of_node for rank in dist.get_process_group_ranks(group)}) > 1:
        problem = 'its tensor-parallel group spans nodes'
    else:
        try:
            from torch.distributed import _symmetric_memory as symmetric_memory
            with warnings.catch_warnings():
                # Deprecated as unnecessary, but in torch 2.13 the compiler still looks for what this sets.
                warnings.simplefilter('ignore', FutureWarning)
                symmetric_memory.enable_symm_mem_for_group(group.group_name)
            memory = symmetric_memory.empty(1024, dtype=torch.uint8, device=processes.device)
        except Exception as error:  # whatever the driver or this build of PyTorch lacks
            problem = in_one_line(type(error).__name__, error)
    found = processes.first_problem(problem)
    if not found:  # every process comes to the rendezvous, or none
        try:
            symmetric_memory.rendezvous(memory, group.group_name)
        except Exception as error:
            problem = in_one_line(type(error).__name__, error)
        found = processes.first_problem(problem)
    if found:
        return f'rank {found[0]}: {found[1]}'
    torch._inductor.config._micro_pipeline_tp = True
    return None
