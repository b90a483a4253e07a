"""Compare the memory of iterations, under dev/cuda_without_gpu, with what the planner predicts.

    bash dev/cuda_without_gpu/run.sh dev/cuda_memory.py                              # all CASES
    bash dev/cuda_without_gpu/run.sh dev/cuda_memory.py 124M '8B --zero_stage=3'     # those that begin so
    bash dev/cuda_without_gpu/run.sh dev/cuda_memory.py --places '1.5B --optimizer=muon'

A case is a model of SHAPES and keys of train.py; 'x2' before the keys means two processes, '1/256' the first of 256, of
which the others do not exist. PyTorch's allocator is the real one, and so is its peak: GB of tensors in the third
iteration, as predicted and as measured, and the allocator's reserve on top. --places adds the lines that allocated
what was there at the peak. The device has 200 GB, so that 8B fits on one.
"""
import json
import os
import subprocess
import sys
import tempfile

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, ROOT)
from data.make.prepare import write_random_tokens

LLAMA = '--pos=rope --norm=rmsnorm --mlp=swiglu --tie_weights=False --n_kv_head=8'
SHAPES = {
    '124M': '', '350M': '--n_layer=24 --n_head=16 --n_embd=1024',
    '1.5B': '--n_layer=48 --n_head=25 --n_embd=1600 --batch_size=8',
    '8B': f'{LLAMA} --n_layer=32 --n_head=32 --n_embd=4096 --n_hidden=14336 --block_size=4096 --batch_size=1',
    '70B': f'{LLAMA} --n_layer=80 --n_head=64 --n_embd=8192 --n_hidden=28672 --block_size=8192 --batch_size=4'}
VOCABULARIES = {'8B': 128256, '70B': 128256}
COMPILED = '--compile=True --cuda_graph=False'  # a graph has the same tensors, in a pool that is not counted
FULL, SELECTIVE = '--activation_checkpoint=full', '--activation_checkpoint=selective'
EXPERTS = '--mlp=moe --n_experts=8 --n_active_experts=2'
CASES = [
    '124M', f'124M {SELECTIVE}', f'124M {FULL}', '124M --optimizer=muon', '124M --zero_stage=3',
    f'124M {COMPILED}', f'124M {COMPILED} {SELECTIVE}', f'124M {COMPILED} {FULL}',
    f'350M {COMPILED}', '1.5B', '1.5B --optimizer=muon', f'1.5B {COMPILED} {SELECTIVE}',
    '8B', f'8B --zero_stage=3 {COMPILED} {SELECTIVE}',
    '124M x2', '124M x2 --zero_stage=1', '1.5B x2 --zero_stage=3 --optimizer=muon', '8B x2 --tp=2',
    '124M x2 --cp=2', '124M x2 --pp=2', f'124M {EXPERTS}', f'124M x2 {EXPERTS} --ep=2',
    f'70B 1/256 --zero_stage=3 --tp=8 {FULL} --gradient_accumulation_steps=64', f'70B 1/256 --zero_stage=3 {FULL}']
RUN = ('--device=cuda --dtype=bfloat16 --compile=False --max_iters=3 --eval_iters=0 --keep_checkpoints=0 '
       '--on_nonfinite=skip --log_interval=9').split()


def measure(case, folder, finds_places=False):
    """What tests/faults/cuda_memory.py has found out about the fullest process of a case."""
    shape, *keys = case.split()
    world_size, process_count, launcher = 1, 1, [sys.executable]
    if keys and keys[0].startswith('x'):
        world_size = process_count = int(keys.pop(0)[1:])
        launcher += ['-m', 'torch.distributed.run', '--standalone', f'--nproc_per_node={process_count}']
    elif keys and '/' in keys[0]:
        world_size = int(keys.pop(0).partition('/')[2])
    dataset, out_dir = os.path.join(folder, f'tokens-{shape}'), os.path.join(folder, 'out')
    if not os.path.exists(dataset):
        os.mkdir(dataset)
        write_random_tokens(dataset, VOCABULARIES.get(shape, 50257), 2 ** 18)
    environment = os.environ | dict(CUDA_WITHOUT_GPU_MIB='200000', MEMORY_PLACES=str(int(finds_places)))
    if world_size > process_count:
        environment['ONE_OF_MANY'] = str(world_size)
    command = [*launcher, 'tests/with_fault.py', 'tests/faults/cuda_memory.py', *RUN,
               f'--gradient_accumulation_steps={2 * world_size}', f'--dataset={dataset}', f'--out_dir={out_dir}',
               *SHAPES[shape].split(), *keys]
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    if run.returncode:
        sys.exit(f'error: {case}: exit code {run.returncode}\n{run.stdout}{run.stderr}')
    found = []
    for rank in range(process_count):
        with open(f'{out_dir}.memory.{rank}', encoding='utf-8') as file:
            found.append(json.load(file))
    return max(found, key=lambda process: process['allocated'])


def main():
    names = [argument for argument in sys.argv[1:] if argument != '--places']
    cases = [case for case in map(str.strip, CASES) if not names or case.startswith(tuple(names))]
    cases += [name for name in names if not any(case.startswith(name) for case in cases)]
    print(f'{"":84}predicted  measured   ratio  reserved')
    with tempfile.TemporaryDirectory() as folder:
        for case in cases:
            found = measure(case, folder, '--places' in sys.argv)
            predicted, allocated = sum(found['predicted'].values()), found['allocated']
            print(f'{case:84}{predicted / 1e9:9.2f} {allocated / 1e9:9.2f}{predicted / allocated:8.3f}'
                  f'{found["reserved"] / allocated - 1:10.1%}', flush=True)
            if 'places' in found:
                print({part: round(count / 1e9, 3) for part, count in found['predicted'].items() if count})
            for count, tensors, place in found.get('places', [])[:25]:
                print(f'    {count / 1e9:9.3f} GB {tensors:5} tensors  {place}')


if __name__ == '__main__':
    main()
