"""Count the kernels that an iteration launches, ours and nanoGPT's, under dev/cuda_without_gpu.

    bash dev/cuda_without_gpu/run.sh dev/cuda_launches.py ../nanoGPT --compile=False

Both train.py run with GPT-2's width, two micro-batches and the keys on the command line, once with 2 blocks and once
with 4: half of the difference is a block's. Kernels, products, copies and fills within the device count, as what a
GPU has to start one by one. The fifth of six iterations is counted, which neither logs nor saves.
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

import numpy as np

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
COMMON = ('--dtype=bfloat16 --device=cuda --batch_size=4 --gradient_accumulation_steps=2 --max_iters=6 '
          '--log_interval=100 --eval_interval=100 --warmup_iters=1').split()
OURS = '--eval_iters=0 --keep_checkpoints=0 --cuda_graph=False --on_nonfinite=skip'.split()
NANOGPT = '--eval_iters=1 --always_save_checkpoint=False'.split()
PHASES = 'forward', 'backward', 'update'


def count(script, arguments):
    """Run a train.py in this process and print {phase: launches} of its fifth iteration as JSON."""
    import torch
    phases, counts, finished = ['forward'], collections.Counter(), []

    def record(call, n_bytes, stream):
        if call.startswith((b'kernel', b'product', b'copy', b'memset')):
            counts[phases[-1]] += 1

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
            finished.append(dict(counts))
            counts.clear()
            return function(*args, **kwargs)
        setattr(owner, name, noted)

    in_phase(torch.Tensor, 'backward', 'backward')
    sys.path.insert(0, os.path.dirname(script))
    if os.path.dirname(script) == ROOT:
        from kilogpt import guard, run
        in_phase(guard.Guard, 'step', 'update')
        ends_iteration(run.Run, 'advance')
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
    sys.argv = [script, *arguments]
    runpy.run_path(script, run_name='__main__')
    report()


def launches(folder, n_layer, data, keys):
    """{phase: launches} of the train.py in a folder."""
    arguments = [*COMMON, *(OURS if folder == ROOT else NANOGPT), f'--n_layer={n_layer}', f'--dataset={data}',
                 f'--out_dir={data}/out-{n_layer}', *keys]
    run = subprocess.run([sys.executable, os.path.abspath(__file__), '--count', f'{folder}/train.py', *arguments],
                         cwd=folder, capture_output=True, text=True)
    if run.returncode:
        sys.exit(run.stdout + run.stderr)
    return json.loads(run.stdout.splitlines()[-1])


def main():
    folders = [os.path.abspath(argument) for argument in sys.argv[1:] if not argument.startswith('-')]
    keys = [argument for argument in sys.argv[1:] if argument.startswith('-')]
    print(f'{"":40}' + ''.join(f'{phase:>10}' for phase in PHASES))
    with tempfile.TemporaryDirectory() as data:
        for split in ('train', 'val'):  # nanoGPT's form, which ours reads too
            np.random.default_rng(0).integers(50257, size=2 ** 18, dtype=np.uint16).tofile(f'{data}/{split}.bin')
        for folder in (ROOT, *folders):
            few, many = (launches(folder, n_layer, data, keys) for n_layer in (2, 4))
            name = 'ours' if folder == ROOT else os.path.basename(folder)
            of_block = {phase: (many[phase] - few[phase]) / 4 for phase in PHASES[:2]}
            rows = {'a block, in a micro-batch': of_block,
                    'all else, in a micro-batch': {phase: many[phase] / 2 - 4 * of_block[phase] for phase in of_block},
                    'an iteration of 4 blocks': many}
            for row, figures in rows.items():
                print(f'{name + ": " + row:40}' + ''.join(f'{figures.get(phase, 0):10g}' for phase in PHASES))


if __name__ == '__main__':
    if sys.argv[1:2] == ['--count']:
        count(sys.argv[2], sys.argv[3:])
    else:
        main()
