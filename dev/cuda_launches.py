"""Count the kernels that an iteration launches, ours and those of other repositories, under dev/cuda_without_gpu.

    bash dev/cuda_without_gpu/run.sh dev/cuda_launches.py ../nanoGPT ../nanochat ../torchtitan --compile=False

All have GPT-2's width and train on two micro-batches, once with 2 blocks and once with 4: half of the difference is a
block's. Kernels, products, copies and fills count, as what a GPU has to start one by one. The fifth of six iterations
is counted, which neither logs nor saves. Other keys than --compile are for train.py, ours and nanoGPT's. nanochat is a
checkout; for torchtitan, write a folder by

    pip install --no-deps --target=../torchtitan torchtitan==0.2.2 torchdata tyro docstring_parser typeguard \
        tensorboard protobuf absl-py
"""
import collections
import ctypes
import functools
import json
import os
import runpy
import subprocess
import sys
import tempfile

import launch_peers
import numpy as np

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
COMMON = ('--dtype=bfloat16 --device=cuda --batch_size=4 --gradient_accumulation_steps=2 --max_iters=6 '
          '--log_interval=100 --eval_interval=100 --warmup_iters=1').split()
OURS = '--eval_iters=0 --keep_checkpoints=0 --cuda_graph=False --on_nonfinite=skip'.split()
NANOGPT = '--eval_iters=1 --always_save_checkpoint=False'.split()
PHASES = 'forward', 'backward', 'update'


def count(folder, arguments):
    """Train in this process, and print [(phase, call, launches)] of the fifth iteration as JSON."""
    import torch
    phases, counts, finished = ['forward'], collections.Counter(), []

    def record(call, n_bytes, stream):
        if call.startswith((b'kernel', b'product', b'copy', b'memset')):
            counts[phases[-1], call.decode().partition(' ')[0]] += 1

    def in_phase(owner, name, phase):
        function = getattr(owner, name)

        @functools.wraps(function)
        def noted(*args, **kwargs):
            phases.append(phase)
            try:
                return function(*args, **kwargs)
            finally:
                phases.pop()
        setattr(owner, name, noted)

    def ends_iteration(owner, name):
        function = getattr(owner, name)

        def noted(*args, **kwargs):
            finished.append([[*key, n] for key, n in counts.items()])
            counts.clear()
            return function(*args, **kwargs)
        setattr(owner, name, noted)

    in_phase(torch.Tensor, 'backward', 'backward')
    sys.path.insert(0, folder)
    build = launch_peers.builder(folder)
    if build:
        peer = build(folder, *json.loads(arguments[0]))
        in_phase(peer, 'update', 'update')
        ends_iteration(peer, 'finish')
    elif folder == ROOT:
        from kilogpt.run import guard, state
        in_phase(guard.Guard, 'step', 'update')
        ends_iteration(state.Progress, 'count_update')
    else:
        in_phase(torch.nn.utils, 'clip_grad_norm_', 'update')
        in_phase(torch.optim.AdamW, 'step', 'update')
        ends_iteration(torch.optim.AdamW, 'zero_grad')
    torch.cuda.init()
    callback = ctypes.CFUNCTYPE(None, ctypes.c_char_p, ctypes.c_size_t, ctypes.c_void_p)(record)
    ctypes.c_void_p.in_dll(ctypes.CDLL(None), 'on_cuda_call').value = ctypes.cast(callback, ctypes.c_void_p).value
    end = os._exit

    def report(code=0):
        print(json.dumps(finished[4]), flush=True)
        end(code)

    os._exit = report  # our train.py ends so
    if build:
        launch_peers.train(peer)
    else:
        sys.argv = ['train.py', *arguments]
        runpy.run_path(os.path.join(folder, 'train.py'), run_name='__main__')
    report()


def launches(folder, n_layer, data, keys):
    """[(phase, call, launches)] of an iteration of what a folder has."""
    if launch_peers.builder(folder):
        arguments = [json.dumps([n_layer, '--compile=False' not in keys])]
    else:
        arguments = [*COMMON, *(OURS if folder == ROOT else NANOGPT), f'--n_layer={n_layer}', f'--dataset={data}',
                     f'--out_dir={data}/out-{n_layer}', *keys]
    run = subprocess.run([sys.executable, os.path.abspath(__file__), '--count', folder, *arguments],
                         cwd=folder, capture_output=True, text=True)
    if run.returncode:
        sys.exit(run.stdout + run.stderr)
    return json.loads(run.stdout.splitlines()[-1])


def total(found, index):
    """Counter of launches by phase (index 0) or by call (index 1)."""
    sums = collections.Counter()
    for entry in found:
        sums[entry[index]] += entry[2]
    return sums


def main():
    folders = [os.path.abspath(argument) for argument in sys.argv[1:] if not argument.startswith('-')]
    keys = [argument for argument in sys.argv[1:] if argument.startswith('-')]
    print(f'{"":44}' + ''.join(f'{phase:>10}' for phase in PHASES))
    with tempfile.TemporaryDirectory() as data:
        for split in ('train', 'val'):  # nanoGPT's form, which ours reads too
            np.random.default_rng(0).integers(50257, size=2 ** 18, dtype=np.uint16).tofile(f'{data}/{split}.bin')
        for folder in (ROOT, *folders):
            found = launches(folder, 4, data, keys)
            few, many = total(launches(folder, 2, data, keys), 0), total(found, 0)
            name = 'ours' if folder == ROOT else os.path.basename(folder)
            of_block = {phase: (many[phase] - few[phase]) / 4 for phase in PHASES[:2]}
            rows = {'a block, in a micro-batch': of_block,
                    'all else, in a micro-batch': {phase: many[phase] / 2 - 4 * of_block[phase] for phase in of_block},
                    'an iteration of 4 blocks': many}
            for row, figures in rows.items():
                print(f'{name + ": " + row:44}' + ''.join(f'{figures.get(phase, 0):10g}' for phase in PHASES))
            print(f'{name}: {many.total()}, of which '
                  + ', '.join(f'{n} {call}' for call, n in total(found, 1).most_common()), flush=True)


if __name__ == '__main__':
    if sys.argv[1:2] == ['--count']:
        count(sys.argv[2], sys.argv[3:])
    else:
        main()
