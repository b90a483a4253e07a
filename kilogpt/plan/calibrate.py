"""Measure this machine for the planner: matrix products by size, attention, memory, operators and links.

`python -m kilogpt.plan --calibrate` starts one process for each GPU (without GPUs: for each core) under
torchrun. All processes measure at the same time, because they compute at the same time in training. Without
GPUs, the links are measured again with two processes on each core. `launch/bandwidth.py --save` calls `measure` for
the nodes of a job.
"""
import json
import os
import statistics
import subprocess
import sys
import time

import torch
import torch.distributed as dist

from kilogpt.configurator import announced
from kilogpt.launch_train import ROOT, last_error
from kilogpt.machines import Machine, read_machine, write_machine
from kilogpt.parallel.layout import Layout
from kilogpt.parallel.processes import Processes, resolve_dtype
from kilogpt.parallel.whole_matrices import all_gather
from kilogpt.run.metrics import peak_flops, synchronize

ROUNDS = 5  # the fastest round counts
SIZES = (32, 64, 128, 256, 512, 1024, 2048)  # sizes of matrix products
LARGE_SIZES = (4096, 8192)  # further sizes, on a GPU only
# Products (rows, inner, columns) whose fastest is a CPU's peak. Caches and vector units decide which: with AMX,
# bfloat16 reaches three times as many FLOP/s with the last two as with the first.
TIMED_PRODUCTS = ((512, 512, 512), (4096, 768, 768), (16384, 384, 384))


def best_flops(dtype):
    """The FLOP/s of the fastest of TIMED_PRODUCTS on the CPU, in dtype, with the threads of this process."""
    # CPUs do not multiply fast in float16, which stands for float32 here.
    dtype = torch.bfloat16 if dtype == 'bfloat16' else torch.float32
    return max(measured_flops(*shape, dtype) for shape in TIMED_PRODUCTS)


def measured_flops(rows, inner, columns, dtype, seconds=0.03):
    """The FLOP/s of a matrix product on the CPU: the fastest of as many runs as take `seconds`."""
    x, weight = torch.ones(rows, inner, dtype=dtype), torch.ones(columns, inner, dtype=dtype)
    times = []
    while sum(times) < seconds:
        start = time.perf_counter()
        torch.nn.functional.linear(x, weight)
        times.append(time.perf_counter() - start)
    return 2 * rows * inner * columns / min(times)


def check_path(key, path):
    """ValueError unless write_machine can write a file at a path, and find_machine knows it as one."""
    if not path.endswith('.json'):
        raise ValueError(f'--{key} is {path!r}, but --gpu takes a file whose name ends in .json: --{key}={path}.json')
    if not os.path.isdir(os.path.dirname(path) or '.'):
        raise ValueError(f'--{key}={path}: there is no folder {os.path.dirname(path)}')


def measure_into(path):
    """Measure this machine, write a JSON file for find_machine, and print the results."""
    check_path('calibrate', path)
    n_processes = torch.cuda.device_count() or len(os.sched_getaffinity(0))
    print(f'measuring {n_processes} process(es), about half a minute ...', flush=True)
    _run(n_processes, path)
    if not torch.cuda.is_available():
        print(f'measuring links between {2 * n_processes} processes ...', flush=True)
        _run(2 * n_processes, path, '--shared')
    with open(path, encoding='utf-8') as file:
        machine = json.load(file)
    for dtype in ('float32', 'bfloat16'):  # the rates of other dtypes are copies
        rates = ', '.join(f'{size}: {rate / 1e12:.3g}' for size, rate in machine['products'][dtype])
        print(f'{dtype:<9} products, TFLOP/s by smallest size: {rates}')
    print(f'memory {machine["bandwidth"] / 1e9:.1f} GB/s, links {machine["node_link"] / 1e9:.2f} GB/s and '
          f'{machine["latency"] * 1e6:.0f} µs\nwrote {path}: use it with --gpu={path}')


def _run(n_processes, path, *options):
    command = [sys.executable, '-m', 'torch.distributed.run', '--standalone',
               f'--nproc_per_node={n_processes}', '-m', 'kilogpt.plan.calibrate', os.path.abspath(path),
               *options]
    with announced('measuring this machine'):
        done = subprocess.run(command, cwd=ROOT, env=dict(os.environ, OMP_NUM_THREADS='1'), text=True,
                              capture_output=True)
    if done.returncode:
        raise ValueError(f'the measurement failed: {last_error(done.stderr)}')


def seconds_of(function, device, budget=0.1):
    """Seconds of the fastest call within a budget of seconds: other programs only make calls slower."""
    function()
    synchronize(device)
    times = []
    while sum(times) < budget and len(times) < 200:
        start = time.perf_counter()
        function()
        synchronize(device)
        times.append(time.perf_counter() - start)
    return min(times)


def median_seconds(function, device, calls=20):
    """Median seconds of a call with collectives, which always waits for the slowest process."""
    times = []
    for _ in range(calls):
        start = time.perf_counter()
        function()
        synchronize(device)
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def product_rates(device, dtype):
    """{size: FLOP/s} of forward and backward matrix products whose smallest size is `size`."""
    sizes = SIZES if device.type == 'cpu' else (*SIZES, *LARGE_SIZES)
    rates = {}
    for size in sizes:
        x = torch.randn(max(512, size), size, device=device, dtype=dtype, requires_grad=True)
        weight = torch.randn(2 * size, size, device=device, dtype=dtype, requires_grad=True)
        gradient = torch.randn(len(x), 2 * size, device=device, dtype=dtype)
        seconds = seconds_of(lambda: torch.nn.functional.linear(x, weight).backward(gradient), device)
        rates[size] = 6 * len(x) * size * 2 * size / seconds
        if seconds > 0.2:  # larger products do not reach a higher rate
            break
    return rates


def attention_rate(device, dtype, length=512, heads=4, width=64):
    """FLOP/s of causal attention, forward and backward; operations are counted as in time_model.py."""
    q, k, v = (torch.randn(2, heads, length, width, device=device, dtype=dtype, requires_grad=True)
               for _ in range(3))
    gradient = torch.randn_like(q)

    def attend():
        torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).backward(gradient)

    return 3.5 * 2 * 2 * heads * length ** 2 * width / seconds_of(attend, device)


def memory_rate(device):
    """Bytes/s of a copy: the bytes it reads plus the bytes it writes."""
    source = torch.zeros(2 ** 25, device=device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / seconds_of(lambda: target.copy_(source), device)


def operator_seconds(device):
    """Host seconds of an operator on a small tensor that requires a gradient."""
    x = torch.zeros(8, device=device, requires_grad=True)

    def run():
        y = x
        for _ in range(100):
            y = y + 1

    return seconds_of(run, device) / 100


def link(device, group):
    """(latency in seconds, bytes/s that each process of a group sends): means of an all-gather and a reduce-scatter."""
    world_size = group.size()
    if world_size == 1:
        return 0.0, memory_rate(device)
    reduce_scatter = getattr(dist, 'reduce_scatter_single', None) or dist.reduce_scatter_tensor
    seconds = []
    for size in (2 ** 8, 2 ** 20):  # float32 elements of each process
        shard = torch.zeros(size, device=device)
        whole = torch.zeros(world_size * size, device=device)

        def exchange(shard=shard, whole=whole):
            all_gather(whole, shard, group=group)
            reduce_scatter(shard, whole, group=group)

        seconds.append(median_seconds(exchange, device) / 2)
    sent = 4 * 2 ** 20 * (world_size - 1)
    return seconds[0], sent / max(seconds[1] - seconds[0], 1e-9)


def dtensor_seconds(mesh, latency):
    """Host seconds of (an operator on DTensors, a change of a DTensor's placements).

    latency: seconds of a collective, which is subtracted from the time of a change of placements.
    """
    from torch.distributed.tensor import DTensor, Replicate, Shard
    x = DTensor.from_local(torch.zeros(8, 8, device=mesh.device_type), mesh, [Shard(0)]).requires_grad_()

    def operate():
        y = x
        for _ in range(20):
            y = y + 1

    def redistribute():
        y = x
        for _ in range(20):  # a gather, then a slice, which does not communicate
            y = y.redistribute(placements=[Replicate()]).redistribute(placements=[Shard(0)])

    device = torch.device(mesh.device_type)
    redistribution = median_seconds(redistribute, device) / 20 - latency
    return seconds_of(operate, device) / 20, max(0.0, redistribution)


def links(processes, per_node):
    """(latency, bytes/s within a node, bytes/s of each process to other nodes, seconds of each further node, mesh).

    The processes of a node exchange, and then those with the same place in their nodes, all groups at a time. Those
    whose links are slowest count. mesh: that of the processes of this node.
    """
    from torch.distributed.device_mesh import init_device_mesh
    nodes = processes.world_size // per_node
    mesh = init_device_mesh(processes.device.type, (nodes, per_node), mesh_dim_names=('nodes', 'node'))
    found = []
    for name in ('node', 'nodes'):
        processes.barrier()
        latency, rate = link(processes.device, mesh[name].get_group())
        found.append((processes.max(latency), -processes.max(-rate)))
    (latency, node_link), (far_latency, network) = found
    if nodes == 1:
        return latency, node_link, node_link, 0.0, mesh['node']
    if per_node == 1:
        latency = far_latency
    return latency, node_link, network, max(0.0, far_latency - latency) / (nodes - 1), mesh['node']


def measure(processes, per_node):
    """The Machine of all processes, `per_node` of which follow one another on each node. All processes call this."""
    device, nodes = processes.device, processes.world_size // per_node
    latency, node_link, network, hop, mesh = links(processes, per_node)
    dtensor_launch, redistribute = dtensor_seconds(mesh, latency)
    dtype = resolve_dtype('auto', device)
    products, attention = dict(float32={}, bfloat16={}), {}
    for _ in range(ROUNDS):
        for name in products:
            rates = product_rates(device, getattr(torch, name))
            for size, rate in rates.items():
                products[name][size] = max(rate, products[name].get(size, 0))
            attention[name] = max(attention_rate(device, getattr(torch, name)), attention.get(name, 0))
    bandwidth, launch = memory_rate(device), operator_seconds(device)
    products = {name: sorted(rates.items()) for name, rates in products.items()}
    for table in (products, attention):
        table['float16'] = table['bfloat16']
    products['float8'] = products['bfloat16']
    on_cpu = device.type == 'cpu'
    if on_cpu:
        memory = os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / per_node
        name = 'this CPU'
    else:
        memory = torch.cuda.get_device_properties(device).total_memory
        name = torch.cuda.get_device_name(device)
    peak = best_flops(dtype) if on_cpu else peak_flops(device, dtype) or max(rate for _, rate in products[dtype])
    return Machine(
        name, device.type, memory, dtype, peak, products, attention, bandwidth, node_link, network, per_node, nodes,
        latency, hop, launch, dtensor_launch, redistribute, overlap=0.0 if on_cpu else 1.0,
        cores=per_node if on_cpu and nodes == 1 else 0)


def main():
    """Measure in one process of a torchrun; the main process writes the file."""
    processes = Processes()
    processes.join(Layout(processes.world_size, zero_stage=2))
    if '--shared' in sys.argv:
        latency, node_link, _, _, mesh = links(processes, processes.world_size)
        _, redistribute = dtensor_seconds(mesh, latency)
        if processes.is_main:
            machine = read_machine(sys.argv[1])
            machine.shared = dict(node_link=node_link, latency=latency, redistribute=redistribute)
            write_machine(machine, sys.argv[1])
        return
    machine = measure(processes, processes.world_size)
    if processes.is_main:
        write_machine(machine, sys.argv[1])


if __name__ == '__main__':
    main()
