"""Print what an iteration asks of CUDA, under dev/cuda_without_gpu: launches, products, copies and waits of the host.

    bash dev/cuda_without_gpu/run.sh dev/cuda_calls.py --gradient_accumulation_steps=8 --batch_size=12

Arguments are those of train.py. The run has random tokens and six iterations, of which the fifth is shown: it neither
logs nor saves. Without a graph, a launch of each kernel is counted. A place is the innermost line of ours.
"""
import collections
import json
import os
import subprocess
import sys
import tempfile

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, ROOT)
from data.prepare import write_random_tokens

QUIET = '--max_iters=6 --log_interval=6 --eval_iters=0 --keep_checkpoints=0 --device=cuda'.split()


def main():
    with tempfile.TemporaryDirectory() as folder:
        write_random_tokens(folder, 50257, 2 ** 18)
        out_dir = os.path.join(folder, 'out')
        subprocess.run([sys.executable, 'tests/with_fault.py', 'tests/faults/record_cuda.py', f'--dataset={folder}',
                        f'--out_dir={out_dir}', *QUIET, *sys.argv[1:]], cwd=ROOT, check=True)
        with open(f'{out_dir}.cuda.0', encoding='utf-8') as file:
            calls = json.load(file)['5']
    totals = collections.Counter()
    for call, _, count in calls:
        totals[call] += count
    for call, total in totals.most_common():
        print(f'{total:6} {call}')
        for other, place, count in sorted(calls, key=lambda entry: -entry[2]):
            if other == call:
                print(f'       {count:6} {place}')


if __name__ == '__main__':
    main()
