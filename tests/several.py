"""Runs train.py several times in the processes of one launch, since starting them takes longer than a tiny run.

    torchrun --nproc_per_node=4 tests/several.py RUNS.json

RUNS.json: [[name, port, [argument, ...]], ...]. Each run is forked from a process that has imported everything, and meets at a
port of its own; what rank r says goes to RUNS.json.name.r, its exit code into the last line there. Further elements are paths of
Python files that are executed first (to put a fault into a run, or to look at its memory).
"""
import json
import os
import runpy
import sys

import torch
import torch.distributed.checkpoint
import torch.distributed.fsdp
import torch.distributed.pipelining
import torch.distributed.tensor.experimental
import torch.distributed.tensor.parallel

torch.set_num_threads(1)  # before the fork: a pool of threads would not survive it
root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path[0] = root
with open(sys.argv[1]) as file:
    runs = json.load(file)
for name, port, arguments, *before in runs:
    log = f'{sys.argv[1]}.{name}.{os.environ.get("RANK", 0)}'
    child = os.fork()
    if child == 0:
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.environ.update(MASTER_PORT=str(port), TORCHELASTIC_USE_AGENT_STORE='False')
        sys.argv = ['train.py', *arguments]
        for path in before:
            runpy.run_path(path)
        runpy.run_path(os.path.join(root, 'train.py'), run_name='__main__')
        sys.stdout.flush()
        os._exit(0)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    with open(log, 'a') as file:
        file.write(f'\nexit code {code}\n')
