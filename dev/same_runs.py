"""Prove that a change of the code changes no result: train with two revisions, and compare to the bit.

    python dev/same_runs.py                          # HEAD and the working tree
    python dev/same_runs.py v1.0                     # a revision and the working tree
    python dev/same_runs.py v1.0 my-branch           # two revisions
    python dev/same_runs.py v1.0 --only=dp2,kill --cache=FOLDER
    python dev/same_runs.py --list

Each scenario runs train.py of both revisions with the same arguments, and prints one line: `same`, and what
was compared, or what differs first. The exit code is 1 if anything differs. Compared are

- the exit codes of all runs,
- metrics.jsonl, but for times and what else depends on the machine (MACHINE),
- each checkpoint: its tensors, byte for byte, and the entries STATE of state.json.

Where a run is stopped at a moment that differs from time to time, which checkpoints it leaves on the way does
too. Such a scenario compares the last line for each iteration, and the newest checkpoint.

Nothing is imported from either revision, so that modules may be moved and renamed: the command line of
train.py, the files that a run leaves, and what dev/same_disturb.py names must stay.
"""
import argparse
import contextlib
import hashlib
import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
import tempfile
import time
import warnings
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
import torch.distributed.checkpoint as dcp

from same_scenarios import SCENARIOS, TINY

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parent

# Entries of a line of metrics.jsonl that differ from run to run.
MACHINE = {'dt_ms', 'data_ms', 'optimizer_ms', 'comm_ms', 'lag_ms', 'slowest_rank', 'wait_s', 'tokens_per_sec', 'mfu',
           'mem_gb', 'seconds', 'ckpt_stall_ms'}
# Entries of state.json that are compared.
STATE = 'iteration', 'tokens', 'val_loss', 'best_val_loss', 'skipped', 'spikes', 'scaler'
TIME_LIMIT = 180  # seconds for a run


# --- running ------------------------------------------------------------------------------------------------

def write_dataset(folder):
    """20,000 training and 3,000 validation tokens of 65 kinds, each with three likely successors."""
    folder.mkdir()
    generator = np.random.default_rng(0)
    successors = generator.integers(0, 65, size=(65, 3))
    for split, count in (('train', 20_000), ('val', 3_000)):
        tokens = [0]
        for choice in generator.integers(0, 3, size=count - 1):
            tokens.append(successors[tokens[-1], choice])
        np.array(tokens, dtype='<u2').tofile(folder / f'{split}.bin')
    (folder / 'meta.json').write_text(json.dumps(dict(vocab_size=65, dtype='uint16')))


@contextlib.contextmanager
def checked_out(revision, folder):
    """A folder with the files of a revision; the working tree itself for None."""
    if revision is None:
        yield ROOT
        return
    subprocess.run(['git', 'worktree', 'add', '--quiet', '--detach', folder, revision], cwd=ROOT, check=True)
    try:
        yield folder
    finally:
        subprocess.run(['git', 'worktree', 'remove', '--force', folder], cwd=ROOT, check=True)


def start(tree, run, folder, dataset, *arguments):
    """Start a run of the revision in `tree`, which writes to folder/out and folder/log.txt."""
    command = [sys.executable]
    if run.processes > 1:
        command += ['-m', 'torch.distributed.run', '--standalone', '--monitor-interval=0.1',
                    f'--nproc_per_node={run.processes}']
    command += ['train.py', *TINY.split(), f'--dataset={dataset}', f'--out_dir={folder / "out"}']
    command += [*run.arguments.split(), *arguments]
    if run.disturb:
        command.append(str(HERE / 'same_disturb.py'))
    return start_logged(command, tree, folder, DISTURB=json.dumps(run.disturb))


def start_logged(command, tree, folder, **environment):
    """Start a command in a tree, with its output at the end of folder/log.txt."""
    # The order of sums, and so their last bits, depends on the number of threads.
    environment = dict(os.environ, OMP_NUM_THREADS='1', KILOGPT_SECRET='not a secret at all', **environment)
    with open(folder / 'log.txt', 'a') as log:
        return subprocess.Popen(command, cwd=tree, env=environment, stdout=log, stderr=log)


def kill(process):
    """End a process and its children, as a loss of power would. Linux alone tells which those are."""
    with contextlib.suppress(OSError):
        children = pathlib.Path(f'/proc/{process.pid}/task/{process.pid}/children').read_text().split()
        for pid in (process.pid, *map(int, children)):
            os.kill(pid, signal.SIGKILL)
    process.kill()


def wait(process, run, out_dir):
    """Wait until a run ends, or kill it where that is part of it; returns the exit code."""
    deadline = time.monotonic() + TIME_LIMIT
    while process.poll() is None:
        is_reached = run.kill_at and any(line['iter'] >= run.kill_at for line in read_lines(out_dir))
        if is_reached or time.monotonic() > deadline:
            kill(process)
        time.sleep(0.02)
    return process.returncode


def run_scenario(scenario, tree, folder, dataset):
    """Make the runs of a scenario, and return what they leave as an object of JSON."""
    folder.mkdir(parents=True)
    if scenario.are_jobs:
        codes = run_jobs(scenario, tree, folder, dataset)
    else:
        codes = [wait(start(tree, run, folder, dataset), run, folder / 'out') for run in scenario.runs]
    return {'exit codes': codes, **what_is_left(folder / 'out', scenario.depends_on_timing)}


def run_jobs(scenario, tree, folder, dataset):
    """Make the runs of a scenario at the same time, with the server where they meet; their exit codes."""
    with socket.create_server(('127.0.0.1', 0)) as free:
        port = free.getsockname()[1]
    server = start_logged([sys.executable, '-m', 'kilogpt.islands', f'--port={port}'], tree, folder)
    try:
        wait_for_server(server, port)
        store = f'--outer_store=127.0.0.1:{port}'
        processes = [start(tree, run, folder, dataset, store) for run in scenario.runs]
        return [wait(process, run, folder / 'out') for process, run in zip(processes, scenario.runs)]
    finally:
        kill(server)
        server.wait()


def wait_for_server(server, port):
    while server.poll() is None:
        with contextlib.suppress(ConnectionRefusedError):
            socket.create_connection(('127.0.0.1', port)).close()
            return
        time.sleep(0.05)


# --- what runs leave ----------------------------------------------------------------------------------------

def read_lines(out_dir):
    """The complete lines of metrics.jsonl, without what differs from run to run."""
    path = out_dir / 'metrics.jsonl'
    text = path.read_text() if path.exists() else ''
    lines = [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith('\n')]
    # The line of a save comes when the save is complete, which may be an iteration earlier or later.
    return [{key: value for key, value in line.items() if key not in MACHINE}
            for line in lines if 'ckpt_stall_ms' not in line]


def what_is_left(out_dir, depends_on_timing):
    """{path in out_dir: content} of the logs and checkpoints of a run, and of its other islands."""
    found = {}
    for log in sorted(out_dir.rglob('metrics.jsonl')):
        lines = read_lines(log.parent)
        if depends_on_timing:
            last = {(line['iter'], 'loss' in line): line for line in lines}
            lines = [last[key] for key in sorted(last)]
        found[log.relative_to(out_dir).as_posix()] = lines
    paths = sorted(out_dir.rglob('ckpt/iter_' + '[0-9]' * 8))
    for path in paths[-1:] if depends_on_timing else paths:
        found[path.relative_to(out_dir).as_posix()] = read_checkpoint(path)
    return found


def read_checkpoint(path):
    """What is compared of a checkpoint; a tensor is told by its dtype, its shape and a hash of its bytes."""
    state = json.loads((path / 'state.json').read_text())
    reader = dcp.FileSystemReader(path)
    tensors = {name: torch.empty(stored.size, dtype=stored.properties.dtype)
               for name, stored in reader.read_metadata().state_dict_metadata.items()}
    dcp.load(tensors, storage_reader=reader)
    told = {}
    for name, tensor in sorted(tensors.items()):
        content = tensor.reshape(-1).view(torch.uint8).numpy().tobytes()
        told[name] = f'{tensor.dtype} {list(tensor.shape)} {hashlib.sha256(content).hexdigest()[:16]}'
    return {'state.json': {key: state[key] for key in STATE if key in state}, 'tensors': told}


# --- comparing ----------------------------------------------------------------------------------------------

def first_difference(base, other, where=''):
    """The first difference between two objects of JSON, in words, or ''."""
    if isinstance(base, list) and isinstance(other, list):
        base, other = ({f'#{number}': value for number, value in enumerate(values, 1)}
                       for values in (base, other))
    if not (isinstance(base, dict) and isinstance(other, dict)):
        # As text, a NaN equals a NaN, and 0.0 is not -0.0.
        is_same = json.dumps(base) == json.dumps(other)
        return '' if is_same else f'{where}: {json.dumps(base)} became {json.dumps(other)}'
    for key in [*base, *(key for key in other if key not in base)]:
        place = f'{where} {key}'.strip()
        if key not in other:
            return f'{place} is missing'
        if key not in base:
            return f'{place} is new'
        found = first_difference(base[key], other[key], place)
        if found:
            return found
    return ''


def judge(scenario, base, other):
    """(whether two results are the same and as they are meant to be, a line that says so)."""
    difference = first_difference(base, other)
    if difference:
        return False, f'DIFFERENT  {difference}'
    expected = scenario.exit_codes()
    lines = [line for path, log in base.items() if path.endswith('metrics.jsonl') for line in log]
    checkpoints = [content for content in base.values() if 'tensors' in content]
    # Two runs that fail alike prove nothing.
    if base['exit codes'] != expected:
        return False, f'FAILED     on both sides: exit codes {base["exit codes"]}, expected {expected}'
    if not any(scenario.shows.items() <= line.items() for line in lines):
        return False, f'FAILED     on both sides: no line of metrics.jsonl has {scenario.shows}'
    tensors = sum(len(checkpoint['tensors']) for checkpoint in checkpoints)
    return True, (f'same       {len(lines)} lines, {len(checkpoints)} checkpoint(s), {tensors} tensors, '
                  f'exit code(s) {", ".join(map(str, expected))}')


# --- the command --------------------------------------------------------------------------------------------

def read_arguments():
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('base', nargs='?', default='HEAD', help='revision that is right (HEAD)')
    parser.add_argument('other', nargs='?', help='revision to compare with it (the working tree)')
    parser.add_argument('--only', default=','.join(SCENARIOS), help='names of scenarios, with commas between')
    parser.add_argument('--list', action='store_true', help='print the scenarios, and run none')
    parser.add_argument('--keep', type=pathlib.Path, help='new folder for the runs, which stays')
    parser.add_argument('--cache', type=pathlib.Path, help='folder that keeps the results of base')
    options = parser.parse_args()
    options.base = commit_of(options.base, parser)
    options.other = options.other and commit_of(options.other, parser)
    options.only = options.only.split(',')
    unknown = set(options.only) - SCENARIOS.keys()
    if unknown:
        parser.error(f'there is no scenario {", ".join(sorted(unknown))}: see --list')
    if options.keep and options.keep.exists():
        parser.error(f'{options.keep} exists already')
    return options


def commit_of(revision, parser):
    found = subprocess.run(['git', 'rev-parse', '--verify', '--quiet', f'{revision}^{{commit}}'], cwd=ROOT,
                           text=True, stdout=subprocess.PIPE)
    return found.stdout.strip() or parser.error(f'there is no revision {revision}')


def cache_path(cache, commit, name):
    """The file for a result of a commit. It belongs to these scripts, to torch, and to the machine too."""
    scripts = [path.read_text() for path in sorted(HERE.glob('same_*.py'))]
    key = hashlib.sha256(''.join([*scripts, torch.__version__, socket.gethostname()]).encode()).hexdigest()
    return cache / f'{commit[:12]}-{name}-{key[:12]}.json'


def run_or_remember(path, scenario, *arguments):
    """run_scenario, whose result the file at `path` holds from then on. path: None keeps nothing."""
    if path and path.exists():
        return json.loads(path.read_text())
    result = run_scenario(scenario, *arguments)
    if path and result['exit codes'] == scenario.exit_codes():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(result))
    return result


def compare(names, workers, options, trees, runs, dataset):
    """Run scenarios in both trees, so many at a time: print a line for each, and yield whether it is good."""
    with contextlib.ExitStack() as stack:
        pool = ThreadPoolExecutor(workers)
        stack.callback(pool.shutdown, cancel_futures=True)  # at Ctrl-C, what has not begun does not begin
        pairs = []
        for name in names:
            scenario = SCENARIOS[name]
            path = options.cache and cache_path(options.cache, options.base, name)
            pairs.append((
                pool.submit(run_or_remember, path, scenario, trees[0], runs / 'base' / name, dataset),
                pool.submit(run_scenario, scenario, trees[1], runs / 'other' / name, dataset)))
        for name, (base, other) in zip(names, pairs):
            is_good, line = judge(SCENARIOS[name], base.result(), other.result())
            print(f'{name:16} {line}', flush=True)
            yield is_good


def main():
    options = read_arguments()
    if options.list:
        for name, scenario in SCENARIOS.items():
            note = ' (timing: last lines, newest checkpoint)' if scenario.depends_on_timing else ''
            print(f'{name:16} {scenario.about}{note}')
        return 0
    warnings.filterwarnings('ignore', 'torch.distributed is disabled')  # checkpoints are read by one process
    began = time.monotonic()
    with contextlib.ExitStack() as stack:
        folder = pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory()))
        runs = options.keep.resolve() if options.keep else folder / 'runs'
        dataset = folder / 'data'
        write_dataset(dataset)
        trees = [stack.enter_context(checked_out(options.base, folder / 'base')),
                 stack.enter_context(checked_out(options.other, folder / 'other'))]
        # Two runs of one process each have a core each. Those of two processes come one after the other.
        small = [name for name in options.only if SCENARIOS[name].processes() == 1]
        large = [name for name in options.only if name not in small]
        are_good = [*compare(small, 2, options, trees, runs, dataset),
                    *compare(large, 1, options, trees, runs, dataset)]
    seconds = time.monotonic() - began
    print(f'{sum(are_good)} of {len(are_good)} scenarios are the same ({seconds:.0f} seconds)')
    if not all(are_good) and not options.keep:
        print('--only=NAME --keep=FOLDER keeps the files and the output (log.txt) of a scenario')
    return 0 if all(are_good) else 1


if __name__ == '__main__':
    sys.exit(main())
