"""Measure the bandwidth of an all-reduce, data parallelism's collective, between the GPUs of a job.

    torchrun --standalone --nproc_per_node=8 launch/bandwidth.py      # within a node
    sbatch launch/slurm.sh launch/bandwidth.py                        # between the nodes of a job
    bash launch/ssh.sh hosts.txt launch/bandwidth.py

Prints for each size the time of an all-reduce, its bytes per second, and the bus bandwidth: for n processes,
2 (n - 1) / n times the bytes per second. The bus bandwidth is what each link carries, so compare it with the
hardware's (NVIDIA's nccl-tests, doc/PERFORMANCE.md). Without GPUs the same command measures gloo.
"""
import os
import sys
import time

sys.path[0] = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
import torch
import torch.distributed as dist

from kilogpt.configurator import configure, exit_on_error
from kilogpt.parallel.layout import Layout
from kilogpt.metrics import synchronize
from kilogpt.parallel.processes import Processes

device = 'auto'  # 'cpu' or 'cuda'; 'auto' = CUDA if available
backend = 'auto'  # 'nccl' or 'gloo'; 'auto' follows the device
max_mb = 1024.0  # MB of the largest all-reduce; the other sizes are a quarter, a sixteenth, ... of it
repeats = 20  # timed repeats for each size, after 5 that are not timed
configure(globals())


def seconds_of(data, count):
    """Mean seconds of `count` all-reduces of a tensor, on the slowest process."""
    processes.barrier()
    begin = time.perf_counter()
    for _ in range(count):
        dist.all_reduce(data)
    synchronize(processes.device)
    return processes.max((time.perf_counter() - begin) / count)


with exit_on_error():
    processes = Processes(device)
    if processes.world_size == 1:
        raise ValueError('an all-reduce needs several processes: torchrun --standalone --nproc_per_node=2 '
                         'launch/bandwidth.py')
    processes.join(Layout(processes.world_size), backend)
n = processes.world_size
where = torch.cuda.get_device_name() if processes.device.type == 'cuda' else 'CPU'
processes.say(f'all-reduce over {n} processes ({where}, torch {torch.__version__})')
processes.say(f'{"MB":>10} {"ms":>10} {"GB/s":>10} {"bus GB/s":>10}')
sizes = [max_mb * 1e6]
while sizes[-1] > 4e3:
    sizes.append(sizes[-1] / 4)
for size in reversed(sizes):
    data = torch.zeros(int(size) // 4, device=processes.device)
    seconds_of(data, 5)  # the first calls connect and choose an algorithm
    seconds = seconds_of(data, repeats)
    speed = data.nbytes / seconds / 1e9
    bus_speed = speed * 2 * (n - 1) / n
    processes.say(f'{data.nbytes / 1e6:>10.3f} {1000 * seconds:>10.3f} {speed:>10.3f} {bus_speed:>10.3f}')
processes.leave(0)
