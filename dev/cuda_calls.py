"""Print what an iteration asks of CUDA, under dev/cuda_without_gpu, and the kernels that were compiled for it.

    bash dev/cuda_without_gpu/run.sh dev/cuda_calls.py --gradient_accumulation_steps=8 --batch_size=12

Arguments are those of train.py. The run has random tokens and six iterations, of which the fifth is shown: it neither
logs nor saves. A place is the innermost line of ours. PyTorch computes in stream 0 unless it is told otherwise. Of a
kernel that Triton compiled for the H100, the table has the registers of a thread, the bytes of its local memory
(spilled registers), and the shared memory of a block.
"""
import collections
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile

import triton

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, ROOT)
from data.make.prepare import write_random_tokens

QUIET = '--max_iters=6 --log_interval=6 --eval_iters=0 --keep_checkpoints=0 --device=cuda'.split()
CUOBJDUMP = pathlib.Path(triton.__file__).parent / 'backends/nvidia/bin/cuobjdump'


def main():
    with tempfile.TemporaryDirectory() as folder:
        write_random_tokens(folder, 50257, 2 ** 18)
        out_dir, cache = os.path.join(folder, 'out'), os.path.join(folder, 'cache')
        subprocess.run([sys.executable, 'tests/with_fault.py', 'tests/faults/record_cuda.py', f'--dataset={folder}',
                        f'--out_dir={out_dir}', *QUIET, *sys.argv[1:]], cwd=ROOT, check=True,
                       env=os.environ | dict(TORCHINDUCTOR_CACHE_DIR=cache, TRITON_CACHE_DIR=f'{cache}/triton'))
        with open(f'{out_dir}.cuda.0', encoding='utf-8') as file:
            print_calls(json.load(file)['5'])
        with open(f'{out_dir}.streams.0', encoding='utf-8') as file:
            print_streams(json.load(file)['5'])
        print_kernels(pathlib.Path(cache))


def print_calls(calls):
    """calls: [(call, place, how often)]."""
    totals = collections.Counter()
    for call, _, count in calls:
        totals[call] += count
    for call, total in totals.most_common():
        print(f'{total:6} {call}')
        for other, place, count in sorted(calls, key=lambda entry: -entry[2]):
            if other == call:
                print(f'       {count:6} {place}')


def print_streams(calls):
    """calls: [(call, number of a stream, how often)]."""
    for stream in sorted({stream for _, stream, _ in calls}):
        print(f'stream {stream}: ' + ', '.join(f'{count} {call}' for call, other, count in calls if other == stream))


def print_kernels(cache):
    """A line for each kernel in a cache, those with most registers first."""
    rows = []
    for path in cache.rglob('*.cubin'):
        usage = subprocess.run([CUOBJDUMP, '-res-usage', path], capture_output=True, text=True, check=True).stdout
        figures = {name: int(value) for name, value in re.findall(r'(REG|LOCAL|STACK):(\d+)', usage)}
        shared = json.loads(path.with_suffix('.json').read_text())['shared']
        rows.append((figures['REG'], figures['LOCAL'] + figures['STACK'], shared, path.stem))
    print(f'{len(rows)} kernels\n registers   local  shared')
    for registers, local, shared, name in sorted(rows, reverse=True):
        print(f'{registers:10}{local:8}{shared:8}  {name}')


if __name__ == '__main__':
    main()
