"""Measure the network of a job: an all-reduce over all processes, and the link between each two of them.

    torchrun --standalone --nproc_per_node=8 launch/bandwidth.py      # within a node
    sbatch launch/slurm.sh launch/bandwidth.py --save=cluster.json    # between the nodes of a job
    bash launch/ssh.sh hosts.txt launch/bandwidth.py

Prints for each size the time of an all-reduce, data parallelism's collective, its bytes per second, and the bus
bandwidth: for n processes, 2 (n - 1) / n times the bytes per second. The bus bandwidth is what each link carries, so
compare it with the hardware's (NVIDIA's nccl-tests, doc/PERFORMANCE.md). Then come the links, and those far slower
than the others of their kind. --save measures the rest of the machines, too, into a file for the planner's --gpu.
Without GPUs the same command measures gloo.
"""
import os
import socket
import statistics
import sys
import time

sys.path[0] = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
import torch
import torch.distributed as dist

from kilogpt.configurator import configure, exit_on_error
from kilogpt.machines import write_machine
from kilogpt.parallel.layout import Layout
from kilogpt.parallel.processes import Processes
from kilogpt.plan import calibrate
from kilogpt.run.metrics import synchronize

device = 'auto'  # 'cpu' or 'cuda'; 'auto' = CUDA if available
backend = 'auto'  # 'nccl' or 'gloo'; 'auto' follows the device
max_mb = 1024.0  # MB of the largest all-reduce; the other sizes are a quarter, a sixteenth, ... of it
repeats = 20  # timed repeats for each size, after 5 that are not timed
save = ''  # measure the machines too, and write this file for python -m kilogpt.plan --gpu=FILE
configure(globals())


def seconds_of(data, count):
    """Mean seconds of `count` all-reduces of a tensor, on the slowest process."""
    processes.barrier()
    begin = time.perf_counter()
    for _ in range(count):
        dist.all_reduce(data)
    synchronize(processes.device)
    return processes.max((time.perf_counter() - begin) / count)


def processes_of_node():
    """The number of processes on each node. ValueError unless all nodes have that many, one after another."""
    count = int(os.environ.get('LOCAL_WORLD_SIZE', processes.world_size))
    counts = processes.gather(count)
    misplaced = processes.gather(processes.rank % count != processes.local_rank)
    if len(set(counts)) > 1 or any(misplaced):
        raise ValueError('links are measured between nodes with equal numbers of processes, whose ranks follow one '
                         'another (mpirun --map-by slot, srun --distribution=block)')
    return count


def place_met(place, turn, count):
    """Which of `count` places meets `place` in a turn, itself if none. In `turns(count)` each two meet once."""
    last = turns(count)
    other = (turn - place) % last
    if place == last:
        other = turn * (last + 1) // 2 % last
    elif other == place:
        other = last
    return other if other < count else place


def turns(count):
    return count + count % 2 - 1


def rate_to(other, size, count=3):
    """Bytes/s in each direction between this process and another, `other`, which calls this at the same time."""
    sent = torch.zeros(size // 4, device=processes.device)
    received = torch.empty_like(sent)
    seconds = []
    for _ in range(count + 1):  # the first connects
        begin = time.perf_counter()
        both = [dist.P2POp(dist.isend, sent, other), dist.P2POp(dist.irecv, received, other)]
        for request in dist.batch_isend_irecv(both):
            request.wait()
        synchronize(processes.device)
        seconds.append(time.perf_counter() - begin)
    return sent.nbytes / min(seconds[1:])


def measure_pairs(size, per_node, within):
    """[(bytes/s, rank, other rank)] of each two processes of a node, or of the same place in two nodes.

    As many as possible exchange at a time: within a node half of its processes with the others, and between two nodes
    all processes of both, which share their network cards.
    """
    node, place = divmod(processes.rank, per_node)
    count = per_node if within else n // per_node
    found = []
    for turn in range(turns(count) if count > 1 else 0):
        if within:
            other = node * per_node + place_met(place, turn, count)
        else:
            other = place_met(node, turn, count) * per_node + place
        processes.barrier()
        rate = rate_to(other, size) if other != processes.rank else 0.0
        for rank, (partner, measured) in enumerate(zip(processes.gather(other), processes.gather(rate))):
            if rank < partner:
                found.append((measured, rank, int(partner)))
    return sorted(found)


def print_pairs(kind, pairs):
    """Print the usual speed of the pairs, and those that are slower than half of it."""
    usual = statistics.median(rate for rate, _, _ in pairs)
    processes.say(f'{kind}: {usual / 1e9:.3f} GB/s each way, the median of {len(pairs)} pairs; '
                  f'the slowest {pairs[0][0] / 1e9:.3f}')
    for rate, *ranks in [pair for pair in pairs if pair[0] < usual / 2][:8]:
        hosts = [processes.share(socket.gethostname(), rank) for rank in ranks]
        processes.say(f'  slow: rank {ranks[0]} on {hosts[0]} and rank {ranks[1]} on {hosts[1]}, {rate / 1e9:.3f} GB/s')


with exit_on_error():
    processes = Processes(device)
    if processes.world_size == 1:
        raise ValueError('an all-reduce needs several processes: torchrun --standalone --nproc_per_node=2 '
                         'launch/bandwidth.py')
    if save and processes.is_main:
        calibrate.check_path('save', save)
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
with exit_on_error():
    per_node = processes_of_node()
pair_bytes = int(min(max_mb, 16) * 1e6)
if per_node > 1:
    print_pairs('within a node', measure_pairs(pair_bytes, per_node, within=True))
if n > per_node:
    print_pairs('between nodes', measure_pairs(pair_bytes, per_node, within=False))
processes.say('docs/launch.md says what a low figure often means: "What is slow, and why"')
if save:
    processes.say('measuring the machines, about half a minute ...')
    machine = calibrate.measure(processes, per_node)
    if processes.is_main:
        write_machine(machine, save)
    network = f', {machine.network / 1e9:.3f} between {machine.nodes} nodes' if machine.nodes > 1 else ''
    processes.say(f'wrote {save}: each process sends {machine.node_link / 1e9:.3f} GB/s within a node of {per_node}'
                  f'{network}; use it with python -m kilogpt.plan --gpu={save}')
processes.leave(0)
