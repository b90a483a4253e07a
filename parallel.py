"""Process group, device, and how a model is laid out on them. Only this file knows how many processes there are."""
import contextlib
import inspect
import os
import sys

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


class Parallel:
    """This process among all: `rank`, `local_rank`, `world_size`, `device`, `is_main`. Joins the group torchrun announces.

    device: 'auto' (CUDA, else Apple's MPS, else CPU), 'cpu', 'cuda', 'cuda:1', 'mps'. Under torchrun with CUDA each process
    takes the GPU of its local rank. backend: 'auto' is NCCL for CUDA tensors and gloo for CPU tensors.
    Raises ValueError for a device that is not there.
    """

    def __init__(self, device='auto', backend='auto'):
        self.rank, self.local_rank = int(os.environ.get('RANK', 0)), int(os.environ.get('LOCAL_RANK', 0))
        self.world_size = int(os.environ.get('WORLD_SIZE', 1))
        self.is_main = self.rank == 0
        if device == 'auto':
            device = 'cuda' if torch.cuda.is_available() else 'mps' if torch.backends.mps.is_available() else 'cpu'
        if device == 'cuda' or (device.startswith('cuda:') and self.world_size > 1):
            device = f'cuda:{self.local_rank}'
        try:
            self.device = torch.device(device)
        except RuntimeError:
            raise ValueError(f'device is {device!r}: use auto, cpu, cuda, cuda:N or mps') from None
        if self.device.type == 'cuda':
            if not torch.cuda.is_available():
                raise ValueError(f'device={device}, but PyTorch {torch.__version__} finds no CUDA GPU here: '
                                 'use --device=auto or --device=cpu')
            if self.device.index >= torch.cuda.device_count():
                raise ValueError(f'device={device}, but there are {torch.cuda.device_count()} GPUs here: start at most that '
                                 'many processes on this node (--nproc_per_node) or name another device')
            torch.cuda.set_device(self.device)
        elif self.device.type == 'mps' and not torch.backends.mps.is_available():
            raise ValueError('device=mps, but PyTorch finds no Apple GPU here: use --device=auto or --device=cpu')
        if self.world_size > 1:
            if backend == 'auto':
                backend = 'cpu:gloo,cuda:nccl' if self.device.type == 'cuda' else 'gloo'
            elif backend == 'nccl':
                if self.device.type != 'cuda':
                    raise ValueError(f'backend=nccl needs CUDA GPUs, but the device is {self.device}: use --backend=gloo')
                backend = 'cpu:gloo,cuda:nccl'  # flags and sums of single numbers travel over gloo, without a device sync
            dist.init_process_group(backend)

    def wrap(self, model):
        """The model with gradients averaged over the processes (DDP)."""
        if self.world_size == 1:
            return model
        # buffers are constants; how DDP is told to leave them alone changed its name in torch 2.13
        names = inspect.signature(DistributedDataParallel.__init__).parameters
        leave_buffers = {'forward_sync_buffers' if 'forward_sync_buffers' in names else 'broadcast_buffers': False}
        return DistributedDataParallel(model, device_ids=[self.device] if self.device.type == 'cuda' else None,
                                       gradient_as_bucket_view=True, **leave_buffers)

    def split_batch(self, global_batch, batch_size):
        """(micro_batch, micro_steps) by which every process takes its part of global_batch sequences.

        micro_batch is the largest up to batch_size that comes out whole. Where the processes do not divide global_batch, no
        micro-batch does: the last ones are then padded with sequences that count for nothing.
        """
        share = -(-global_batch // self.world_size)
        if global_batch % self.world_size:
            micro_steps = -(-share // batch_size)
            return -(-share // micro_steps), micro_steps
        micro_batch = max(b for b in range(1, min(batch_size, share) + 1) if share % b == 0)
        return micro_batch, share // micro_batch

    def my_rows(self, total, micro_batch, micro_step):
        """Which of `total` sequences are this process's micro-batch: an integer array (micro_batch,); -1 is padding."""
        rows = (micro_step * self.world_size + self.rank) * micro_batch + np.arange(micro_batch)
        return np.where(rows < total, rows, -1)

    def sum(self, *values):
        """Sums of numbers over all processes, in float64."""
        values = torch.tensor(values, dtype=torch.float64)
        if self.world_size > 1:
            dist.all_reduce(values)
        return values.tolist()

    def any(self, flag):
        """True on every process if the flag is set on one."""
        return bool(flag) if self.world_size == 1 else self.sum(bool(flag))[0] > 0

    def barrier(self):
        self.any(False)

    def leave(self, exit_code):
        """End this process, once all have come here."""
        if self.world_size > 1:
            self.barrier()  # none leaves while the main process still writes: torchrun ends the rest when one has failed
            dist.destroy_process_group()
            sys.stdout.flush()
            os._exit(exit_code)  # a thread of gloo's may still want the interpreter, and would abort it as it shuts down
        sys.exit(exit_code)


def resolve_dtype(dtype, device):
    """'auto' is bfloat16 on GPUs that have it, float16 on those that do not, float32 elsewhere."""
    if dtype == 'auto':
        return 'float32' if device.type != 'cuda' else 'bfloat16' if torch.cuda.is_bf16_supported() else 'float16'
    if dtype not in ('float32', 'bfloat16', 'float16'):
        raise ValueError(f'dtype is {dtype!r}: use auto, float32, bfloat16 or float16')
    return dtype


def autocast(dtype, device):
    """The context a forward pass runs in."""
    return contextlib.nullcontext() if dtype == 'float32' else torch.autocast(device.type, getattr(torch, dtype))
