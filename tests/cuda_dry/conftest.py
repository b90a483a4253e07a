"""Runs on a pretended GPU (dev/cuda_without_gpu), and what they ask of it."""
import ctypes
import os
import pathlib

import pytest
from cuda_helpers import SHORT, SMALL, read_calls
from gpu_checks import BLOCKS, write_data
from helpers import FAULTS, run_forked

IS_PRETENDED = hasattr(ctypes.CDLL(None), 'on_cuda_call')
if IS_PRETENDED:  # Inductor reads it when it is imported, which the processes from which runs are forked may do
    os.environ['TORCHINDUCTOR_COMPILE_THREADS'] = '1'
ALWAYS = FAULTS / 'record_cuda.py', FAULTS / 'cuda_sizes.py'


def pytest_collection_modifyitems(items):
    for item in items:
        if pathlib.Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.cuda_dry)
            item.add_marker(pytest.mark.skipif(not IS_PRETENDED, reason=(
                'needs a CUDA build of torch: PYTHON=... bash dev/cuda_without_gpu/run.sh -m pytest -n 2 --dist load -m '
                'cuda_dry tests/cuda_dry')))


@pytest.fixture(scope='session')
def dry_run(train, tmp_path_factory):
    """`train` on pretended GPUs. The run also has what rank 0 asked: `calls`, {iteration: Counter of (call, place)}.

    `streams` is the same with the number of a stream instead of a place.
    """
    def dry_run(*arguments, faults=(), out_dir=None, **options):
        out_dir = out_dir or tmp_path_factory.mktemp('run') / 'out'
        run = train('--device=cuda', *arguments, out_dir=out_dir, faults=[*ALWAYS, *faults], **options)
        run.calls, run.streams = read_calls(f'{out_dir}.cuda.0'), read_calls(f'{out_dir}.streams.0')
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
