"""Kill train.py with SIGKILL and start it again, COUNT times, then let it end by itself.

    python dev/kills.py SEED COUNT RUN.log [train.py's arguments]

About half of the kills come at a random moment. The others are planted: before or after the n-th call of a
function with which a save writes its files. Each run is forked from this process, which has imported torch.
Prints {how a run was killed: number of times}.
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

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path[0] = ROOT
from data import storage

# (module, function, largest n of the n-th call at which a kill is planted). A save syncs four files and a
# folder, renames the folder and syncs again; old checkpoints are renamed and removed.
PLACES = [(os, 'fsync', 18), (os, 'rename', 5), (shutil, 'rmtree', 3)]
# The same for a run whose out_dir is a URL: a save writes one file of tensors, four others and two logs.
REMOTE_PLACES = [(storage, 'write_with', 9), (storage, 'write', 12), (storage, 'delete', 3)]


def count_lines(path):
    return open(path).read().count('\n') if os.path.exists(path) else 0


def plant_kill(module, name, call, after):
    """Make this process kill itself before or after the n-th call of a function. call: n."""
    function = getattr(module, name)
    calls = 0

    def call_or_kill(*args, **options):
        nonlocal calls
        calls += 1
        if calls != call:
            return function(*args, **options)
        if after:
            function(*args, **options)
        os.kill(os.getpid(), signal.SIGKILL)

    setattr(module, name, call_or_kill)


def fork_run(arguments, log, planted):
    """Fork a run of train.py that appends to a log; returns its pid. planted: arguments of plant_kill."""
    pid = os.fork()
    if pid:
        return pid
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    if planted:
        plant_kill(*planted)
    sys.argv = ['train.py', *arguments]
    runpy.run_path(os.path.join(ROOT, 'train.py'), run_name='__main__')
    threading._shutdown()
    os._exit(0)


def kill_at_random_moment(pid, metrics):
    """Kill a run after up to 12 more lines of metrics.jsonl, or after 20 seconds."""
    wanted = count_lines(metrics) + random.randint(0, 12)
    deadline = time.monotonic() + 20
    while count_lines(metrics) < wanted and time.monotonic() < deadline:
        time.sleep(0.005)
    time.sleep(random.uniform(0, 0.1))
    os.kill(pid, signal.SIGKILL)


def main(seed, count, log, *arguments):
    """Kill and restart the run; returns the exit code of the last run, which ends by itself."""
    random.seed(int(seed))
    out_dir = next(a for a in arguments if a.startswith('--out_dir=')).partition('=')[2]
    metrics = os.path.join(storage.local_folder(out_dir), 'metrics.jsonl')
    places = REMOTE_PLACES if storage.is_url(out_dir) else PLACES
    kills = collections.Counter()
    while True:
        wants_kill, planted = sum(kills.values()) < int(count), None
        if wants_kill and random.random() < 0.5:
            module, name, last = random.choice(places)
            planted = module, name, random.randint(1, last), random.random() < 0.5
        pid = fork_run(arguments, log, planted)
        if wants_kill and not planted:
            kill_at_random_moment(pid, metrics)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        if code != -signal.SIGKILL:
            print(json.dumps(kills))
            return code
        if planted:
            kills[f'{planted[1]}, {"after" if planted[3] else "before"}'] += 1
        else:
            kills['at a random moment'] += 1


torch.set_num_threads(1)  # a pool of threads would not survive the fork
sys.exit(main(*sys.argv[1:]))
