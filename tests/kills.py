"""Runs train.py again and again, killed each time with SIGKILL, until it has been killed so often and then ends by itself.

    python tests/kills.py SEED COUNT RUN.log [train.py's arguments]

Half of the kills come some time after the start, half are planted: before or after the n-th call of a function by which a save
makes its files. Each run is forked from this process, which has imported everything. Prints {how it was killed: how often}.
"""
import collections
import json
import os
import random
import runpy
import shutil
import signal
import sys
import threading
import time

import torch
import torch.distributed.checkpoint
import torch.distributed.checkpoint.staging

torch.set_num_threads(1)  # before the fork: a pool of threads would not survive it
root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path[0] = root
seed, count, log, *arguments = sys.argv[1:]
random.seed(int(seed))
metrics = os.path.join(next(a for a in arguments if a.startswith('--out_dir=')).split('=')[1], 'metrics.jsonl')


def lines():
    return open(metrics).read().count('\n') if os.path.exists(metrics) else 0


def plant(module, name, call, after):
    """Kill this process at a call of a function."""
    function, calls = getattr(module, name), [0]

    def killing(*args, **options):
        calls[0] += 1
        if calls[0] != call:
            return function(*args, **options)
        if after:
            function(*args, **options)
        os.kill(os.getpid(), signal.SIGKILL)

    setattr(module, name, killing)


kills = collections.Counter()
while True:
    fault = None
    if sum(kills.values()) < int(count) and random.random() < 0.5:
        # a save syncs four files and a folder, renames the folder and syncs again; old ones are renamed and removed
        module, name, last = random.choice([(os, 'fsync', 18), (os, 'rename', 5), (shutil, 'rmtree', 3)])
        fault = module, name, random.randint(1, last), random.random() < 0.5
    child = os.fork()
    if child == 0:
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(output, 1)
        os.dup2(output, 2)
        if fault:
            plant(*fault)
        sys.argv = ['train.py', *arguments]
        runpy.run_path(os.path.join(root, 'train.py'), run_name='__main__')
        threading._shutdown()
        os._exit(0)
    if not fault and sum(kills.values()) < int(count):
        wanted, latest = lines() + random.randint(0, 12), time.monotonic() + 20
        while lines() < wanted and time.monotonic() < latest:
            time.sleep(0.005)
        time.sleep(random.uniform(0, 0.1))
        os.kill(child, signal.SIGKILL)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if code != -signal.SIGKILL:
        break
    kills['at any moment' if not fault else f'{fault[1]}, {"after" if fault[3] else "before"}'] += 1
print(json.dumps(kills))
sys.exit(code)
