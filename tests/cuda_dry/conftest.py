"""Runs on a pretended GPU (dev/cuda_without_gpu), and what they ask of it."""
import collections
import ctypes
import json
import os
import pathlib
import re

import pytest
from gpu_checks import BLOCKS, write_data
from helpers import FAULTS, run_forked

IS_PRETENDED = hasattr(ctypes.CDLL(None), 'on_cuda_call')
# The inductor reads it when it is imported, which the processes from which runs are forked may do.
os.environ['TORCHINDUCTOR_COMPILE_THREADS'] = '1'
RECORD = FAULTS / 'record_cuda.py'
# What the host does not continue from until the device, or a copy, is done.
WAITS = {'cudaStreamSynchronize', 'cudaEventSynchronize', 'cudaDeviceSynchronize', 'cudaMemcpy',
         'copy of pageable memory', 'copy of a pageable number'}

# With cpu_offload the host computes with what the memory of gradients holds.
SHORT = '--max_iters=3 --lr_decay_iters=3 --eval_interval=3 --eval_iters=1 --on_nonfinite=skip'.split()
SMALL = ('--n_layer=2 --n_head=4 --n_kv_head=2 --n_embd=64 --block_size=64 --batch_size=4 '
         '--gradient_accumulation_steps=2 --log_interval=1 --warmup_iters=1').split()


def pytest_collection_modifyitems(items):
    for item in items:
        if pathlib.Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.cuda_dry)
            item.add_marker(pytest.mark.skipif(not IS_PRETENDED, reason=(
                'needs a CUDA build of torch: PYTHON=... bash dev/cuda_without_gpu/run.sh -m pytest -n 2 -m cuda_dry '
                'tests/cuda_dry')))


@pytest.fixture(scope='session')
def dry_run(train, tmp_path_factory):
    """`train` on pretended GPUs. The run has what rank 0 asked of CUDA, `calls`: {iteration: Counter of (call, place)}."""
    def dry_run(*arguments, faults=(), out_dir=None, **options):
        out_dir = out_dir or tmp_path_factory.mktemp('run') / 'out'
        run = train('--device=cuda', *arguments, out_dir=out_dir, faults=[RECORD, *faults], **options)
        run.calls, path = {}, pathlib.Path(f'{out_dir}.cuda.0')
        if path.exists():
            for iteration, entries in json.loads(path.read_text()).items():
                run.calls[int(iteration)] = collections.Counter({(call, place): n for call, place, n in entries})
        return run
    return dry_run


@pytest.fixture(scope='session')
def folders(tmp_path_factory):
    """Data of each kind, and in `base` a trained model, on which adapters and DPO build."""
    data = tmp_path_factory.mktemp('data')
    write_data(data)
    run_forked('train.py', '--device=cpu', '--compile=False', f'--dataset={data}', f'--out_dir={data / "base"}',
               *SMALL, *SHORT, *BLOCKS.split())
    run_forked('kilogpt.evaluate', data / 'base', f'--reference={data / "pairs"}', '--device=cpu')
    return data


# --- what a run asked of CUDA -------------------------------------------------------------------------------

def waits_of(run, iterations):
    """{place: waits} of the host for the device in some iterations."""
    found = collections.Counter()
    for iteration in iterations:
        for (call, place), n in run.calls[iteration].items():
            if call in WAITS:
                found[without_line(place)] += n
    return dict(found)


def copies_from_pageable_memory(run):
    """The places at which checkpoints copy more than a number to or from memory that is not pinned."""
    return {without_line(place) for calls in run.calls.values() for call, place in calls
            if call == 'copy of pageable memory' and place.startswith('kilogpt/checkpoint')}


def products_of(run):
    """The kinds of matrix products in an iteration."""
    return {call for call, _ in run.calls[2] if call.startswith('product')}


def without_line(place):
    """'kilogpt/guard.py:107 settle' -> 'kilogpt/guard.py settle'."""
    return re.sub(r':\d+', '', place)
