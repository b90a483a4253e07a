"""Runs scripts in processes forked from one that has imported torch, since starting that takes longer than a tiny run.

Started by conftest.forked. A line of its input is a run, as JSON of the arguments of `run`; the answer to it is a line with the
exit codes of its processes.
"""
import gc
import json
import multiprocessing
import os
import runpy
import signal
import sys

import torch
import torch.distributed.checkpoint
import torch.distributed.fsdp
import torch.distributed.pipelining
import torch.distributed.tensor.experimental
import torch.distributed.tensor.parallel


def run(rank, nproc, script, arguments, env, cwd, before, timeout, folder):
    """Be process `rank` of nproc that run a script; input is the folder's file `stdin`, output goes to stdout.RANK and stderr.RANK."""
    for descriptor, name in enumerate(('stdin', f'stdout.{rank}', f'stderr.{rank}')):
        os.dup2(os.open(os.path.join(folder, name), os.O_RDWR | os.O_CREAT), descriptor)
    sys.stdin = open(0)
    signal.alarm(timeout)  # which ends it
    os.environ.clear()
    os.environ.update(env)
    if nproc > 1:  # as torchrun does
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(nproc), LOCAL_WORLD_SIZE=str(nproc))
    os.chdir(cwd)
    sys.argv = [script, *arguments]
    sys.path[0] = os.path.dirname(script)
    for path in before:
        runpy.run_path(path)
    runpy.run_path(script, run_name='__main__')


torch.set_num_threads(1)  # before the fork: a pool of threads would not survive it
gc.disable()  # of what a tiny run leaves there is too little to look for
requests = os.fdopen(os.dup(0))  # standard input is a run's
for line in requests:
    request = json.loads(line)
    processes = [multiprocessing.get_context('fork').Process(target=run, args=(rank,), kwargs=request) for rank in range(request['nproc'])]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    print(json.dumps([process.exitcode for process in processes]), flush=True)
