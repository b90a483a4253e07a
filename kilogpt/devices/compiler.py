"""Whether torch.compile works on a device."""
import torch


def compile_failure(device):
    """Why torch.compile does not work here (no compiler, no Triton), in one line; None if it works."""
    try:
        torch.compile(lambda x: x.sin() + 1)(torch.ones(8, device=device))
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # TorchInductor and the compiler that it calls raise errors of many classes
        return in_one_line(type(error).__name__, error)
    torch._dynamo.config.suppress_errors = True  # code that the compiler cannot follow runs as it is
    # Blocks are compiled one by one, so that DDP's buckets do not need further graph breaks (pytorch#104674).
    torch._dynamo.config.optimize_ddp = False
    return None


def in_one_line(kind, message):
    """A kind of error and its message, which may begin with a line such as "backend='inductor' raised:"."""
    lines = str(message).strip().splitlines() or ['']
    while len(lines) > 1 and lines[0].endswith(':'):
        lines[:2] = [f'{lines[0]} {lines[1]}']
    return f'{kind}: {lines[0]}'
