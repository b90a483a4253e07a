"""Run scripts in processes forked from this one, which has imported torch: that takes longer than a tiny run.

Started by helpers.run_forked. Each line of standard input is a run, the JSON of the arguments of
`be_process`; the answer on standard output is a line with the exit codes of the run's processes.
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


def be_process(rank, nproc, script, arguments, env, cwd, faults, timeout, folder):
    """Be process `rank` of nproc that run a script; the folder has its stdin, stdout.RANK and stderr.RANK."""
    for descriptor, name in enumerate(('stdin', f'stdout.{rank}', f'stderr.{rank}')):
        os.dup2(os.open(os.path.join(folder, name), os.O_RDWR | os.O_CREAT), descriptor)
    sys.stdin = open(0)
    signal.alarm(timeout)  # SIGALRM ends the process
    os.environ.clear()
    os.environ.update(env)
    if nproc > 1:  # as torchrun does
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
        os.environ.update(WORLD_SIZE=str(nproc), LOCAL_WORLD_SIZE=str(nproc))
    os.chdir(cwd)
    sys.argv = [script, *arguments]
    is_file = script.endswith('.py')
    sys.path[0] = os.path.dirname(script) if is_file else cwd
    for path in faults:
        runpy.run_path(path)
    if is_file:
        runpy.run_path(script, run_name='__main__')
    else:
        runpy.run_module(script, run_name='__main__', alter_sys=True)


sys.dont_write_bytecode = False  # wherever it is set: each run would compile this repository's modules anew
torch.set_num_threads(1)  # before the fork, which a pool of threads would not survive
gc.disable()  # a tiny run leaves too little garbage to look for
forking = multiprocessing.get_context('fork')
requests = os.fdopen(os.dup(0))  # descriptor 0 becomes the stdin of a run
for line in requests:
    request = json.loads(line)
    processes = []
    for rank in range(request['nproc']):
        processes.append(forking.Process(target=be_process, args=(rank,), kwargs=request))
        processes[-1].start()
    for process in processes:
        process.join()
    print(json.dumps([process.exitcode for process in processes]), flush=True)
