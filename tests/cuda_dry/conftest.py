"""Runs on a pretended GPU (dev/cuda_without_gpu), and what they ask of it."""
import collections
import ctypes
import json
import os
import pathlib

import pytest
from helpers import FAULTS

IS_PRETENDED = hasattr(ctypes.CDLL(None), 'on_cuda_call')
# The inductor reads it when it is imported, which the processes from which runs are forked may do.
os.environ['TORCHINDUCTOR_COMPILE_THREADS'] = '1'
RECORD = FAULTS / 'record_cuda.py'
# What the host does not continue from until the device, or a copy, is done.
WAITS = {'cudaStreamSynchronize', 'cudaEventSynchronize', 'cudaDeviceSynchronize', 'cudaMemcpy',
         'copy of pageable memory'}


def pytest_collection_modifyitems(items):
    for item in items:
        if pathlib.Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.cuda_dry)
            item.add_marker(pytest.mark.skipif(not IS_PRETENDED, reason=(
                'needs a CUDA build of torch: PYTHON=... bash dev/cuda_without_gpu/run.sh -m pytest -n 2 -m cuda_dry '
                'tests/cuda_dry')))


@pytest.fixture(scope='session')
def dry_run(train, tmp_path_factory):
    """`train` on pretended GPUs. The run also has the `calls` of each iteration and the `collectives` of each rank.

    calls: {iteration: Counter of (call, place)}, of rank 0. collectives: [[name, elements], ...] for each rank.
    """
    def dry_run(*arguments, nproc=1, faults=(), out_dir=None, **options):
        out_dir = out_dir or tmp_path_factory.mktemp('run') / 'out'
        run = train('--device=cuda', *arguments, out_dir=out_dir, nproc=nproc, faults=[RECORD, *faults],
                    **options)
        paths = [pathlib.Path(f'{out_dir}.cuda.{rank}') for rank in range(nproc)]
        records = [json.loads(path.read_text()) for path in paths if path.exists()]
        run.collectives = [record.pop('collectives') for record in records]
        run.calls = {}
        for iteration, entries in records[0].items() if records else ():
            run.calls[int(iteration)] = collections.Counter({(call, place): n for call, place, n in entries})
        return run
    return dry_run
