"""Measure iterations of DDP and of islands over a slow link between two machines. Run by hand, as root:

    python dev/thin_wire.py DATASET 1 10 100

The machines are two network namespaces on this machine. `tc` limits their link to these rates in Mbit/s.
"""
import os
import subprocess
import sys
import tempfile
import time

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, ROOT)
from kilogpt.run.metrics import read_metrics

SHAPE = ('--device=cpu --compile=False --dtype=float32 --n_layer=4 --n_head=4 --n_embd=128 --block_size=64 '
         '--batch_size=12 --gradient_accumulation_steps=2 --eval_iters=0 --keep_checkpoints=0').split()
# {exchange of the islands: (options, number of iterations to skip, number of iterations to measure)}
MODES = {
    'DDP': ('', 1, 4),
    'every 20': ('--islands=2 --outer_interval=20', 21, 20),
    'every 20, int8': ('--islands=2 --outer_interval=20 --outer_compress=int8', 21, 20),
    'every 100, int8': ('--islands=2 --outer_interval=100 --outer_compress=int8', 101, 100),
    'every 20, int8, 2 fragments, delay 8':
        ('--islands=2 --outer_interval=20 --outer_compress=int8 --outer_fragments=2 --outer_delay=8', 21, 20)}
MACHINES = ('thin0', '10.77.0.1'), ('thin1', '10.77.0.2')  # (namespace and device, address)


def run_command(text):
    subprocess.run(text.split(), check=True)


def connect_machines():
    for name, _ in MACHINES:
        run_command(f'ip netns add {name}')
    run_command('ip link add thin0 netns thin0 type veth peer name thin1 netns thin1')
    for name, address in MACHINES:
        run_command(f'ip -n {name} addr add {address}/24 dev {name}')
        run_command(f'ip -n {name} link set {name} up')
        run_command(f'ip -n {name} link set lo up')


def seconds_of_iteration(options, dataset, skipped, measured, port):
    with tempfile.TemporaryDirectory() as out_dir:
        arguments = [*SHAPE, *options.split(), f'--dataset={os.path.abspath(dataset)}',
                     f'--out_dir={out_dir}', f'--max_iters={skipped + measured}']
        nodes = []
        for rank, (name, _) in enumerate(MACHINES):
            torchrun = ['torchrun', '--nnodes=2', f'--node_rank={rank}', '--nproc_per_node=1',
                        f'--master_addr={MACHINES[0][1]}', f'--master_port={port}', 'train.py', *arguments]
            nodes.append(subprocess.Popen(
                ['ip', 'netns', 'exec', name, *torchrun], cwd=ROOT, stdout=subprocess.DEVNULL,
                env=dict(os.environ, OMP_NUM_THREADS='1')))
        assert [node.wait() for node in nodes] == [0, 0]
        lines, _ = read_metrics(out_dir)
        return (lines[skipped + measured]['seconds'] - lines[skipped]['seconds']) / measured


def main():
    dataset, *rates = sys.argv[1:]
    connect_machines()
    try:
        for rate in rates:
            for name, _ in MACHINES:
                run_command(f'ip netns exec {name} tc qdisc replace dev {name} root '
                        f'tbf rate {rate}mbit burst 32kb latency 400ms')
            for number, (mode, (options, skipped, measured)) in enumerate(MODES.items()):
                port = 29500 + int(time.time()) % 1000 + number
                seconds = seconds_of_iteration(options, dataset, skipped, measured, port)
                print(f'{rate} Mbit/s, {mode}: {seconds:.2f} s per iteration', flush=True)
    finally:
        for name, _ in MACHINES:
            run_command(f'ip netns del {name}')


if __name__ == '__main__':
    main()
