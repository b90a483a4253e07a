"""The last process has too little memory for the second iteration, and says so in PyTorch's words."""
import os

import torch

from kilogpt.parallel.apply import Parallel

forward_backward, calls = Parallel.forward_backward, []


def failing_forward_backward(self, *arguments):
    calls.append(1)
    if len(calls) > 4 and self.processes.rank == int(os.environ.get('WORLD_SIZE', 1)) - 1:
        raise torch.OutOfMemoryError(
            'CUDA out of memory. Tried to allocate 2.54 GiB. GPU 0 has a total capacity of 79.65 GiB of which 1.31 GiB '
            'is free. Of the allocated memory 77.90 GiB is allocated by PyTorch, and 0 bytes is reserved')
    return forward_backward(self, *arguments)


Parallel.forward_backward = failing_forward_backward
