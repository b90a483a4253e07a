"""Helpers of the tests: launch scripts, as a user does or faster, and read what runs leave behind."""
import contextlib
import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import torch

from kilogpt import checkpoint
from kilogpt.prove.compare import GRAD_NORM, LOSS, compare_curves
from kilogpt.prove.forked import free_ports
from kilogpt.metrics import read_metrics

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
TESTS = pathlib.Path(ROOT, 'tests')
FAULTS = TESTS / 'faults'  # programs that a run executes before train.py

# A model and a batch that train in milliseconds. 12 sequences divide over 1, 2 and 3 processes.
TINY = ('--device=cpu --compile=False --dtype=float32 --n_layer=2 --n_head=4 --n_embd=32 --block_size=32 '
        '--batch_size=4 --gradient_accumulation_steps=3 --eval_iters=4 --eval_interval=6 --log_interval=1 '
        '--max_iters=12 --lr_decay_iters=12 --warmup_iters=2 --learning_rate=1e-2 --min_lr=1e-3').split()


# --- launching scripts ----------------------------------------------------------------------------------

def start_script(script, *arguments, nproc=1, env=None, cwd=None):
    """Start a script ('train.py') or a module ('kilogpt.convert') as a user does; returns its Popen.

    nproc: the number of processes; above 1, torchrun starts them.
    """
    command = [sys.executable]
    if nproc > 1:
        command += ['-m', 'torch.distributed.run', '--standalone', f'--nproc_per_node={nproc}']
    command += [os.path.join(ROOT, script)] if script.endswith('.py') else ['-m', script]
    return subprocess.Popen([*command, *map(str, arguments)], text=True, cwd=cwd or ROOT,
                            env=dict(os.environ, OMP_NUM_THREADS='1', **(env or {})),
                            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def run_script(script, *arguments, check=True, timeout=300, stdin=None, **options):
    """Run a script with the options of `start_script`; returns the finished process.

    check: whether an exit code other than 0 fails the test, with the output of the script.
    """
    with start_script(script, *arguments, **options) as process:
        try:
            stdout, stderr = process.communicate(stdin, timeout)
        except subprocess.TimeoutExpired:
            process.kill()
            raise
    assert process.returncode == 0 or not check, f'exit {process.returncode}\n{stdout}\n{stderr}'
    return subprocess.CompletedProcess(process.args, process.returncode, stdout, stderr)


# Each of pytest's two processes has its own range of ports: both could otherwise find the same port free
# before either listens on it.
PORTS = free_ports(26_000 if os.environ.get('PYTEST_XDIST_WORKER') == 'gw1' else 20_000)


def free_port():
    return next(PORTS)


IDLE_SERVERS = []  # processes of kilogpt/prove/forked.py that no run uses now
SERVERS_LOCK = threading.Lock()


def run_forked(script, *arguments, check=True, **options):
    """Run a script or module like `run_script`, but seconds faster: in forks of a process that has torch.

    options: those of `_run_in_fork_server`.
    """
    done = _run_in_fork_server(script, *arguments, **options)
    if min(done.codes) < 0:  # torch or gloo crashes in malloc in one of some hundred processes (LOG.md)
        warnings.warn(f'a signal ended this run, which is repeated: {arguments}, {done.outputs}')
        done = _run_in_fork_server(script, *arguments, **options)
    assert done.returncode == 0 or not check, '\n'.join(done.outputs)
    return done


def _run_in_fork_server(script, *arguments, nproc=1, env=None, cwd=None, stdin='', timeout=300, faults=()):
    """Run a script in a fork, or in nproc forks as torchrun starts them; returns the finished process.

    faults: Python files that each process executes before the script.
    The result also has `codes` and `outputs` (stdout, stderr and exit code) of each rank.
    """
    with SERVERS_LOCK:
        port = free_port()
        server = IDLE_SERVERS.pop() if IDLE_SERVERS else _start_fork_server()
    environment = dict(os.environ, OMP_NUM_THREADS='1', **(env or {}))
    environment |= dict(MASTER_ADDR='127.0.0.1', MASTER_PORT=port)
    with tempfile.TemporaryDirectory() as folder:
        pathlib.Path(folder, 'stdin').write_text(stdin)
        path = os.path.join(ROOT, script) if str(script).endswith('.py') else script
        request = dict(script=path, arguments=[*map(str, arguments)], nproc=nproc,
                       env=environment, cwd=str(cwd or ROOT), faults=[*map(str, faults)], timeout=timeout,
                       folder=folder)
        print(json.dumps(request), file=server.stdin, flush=True)
        codes = json.loads(server.stdout.readline())
        stdouts = [pathlib.Path(folder, f'stdout.{rank}').read_text() for rank in range(nproc)]
        stderrs = [pathlib.Path(folder, f'stderr.{rank}').read_text() for rank in range(nproc)]
    IDLE_SERVERS.append(server)
    outputs = []
    for stdout, stderr, code in zip(stdouts, stderrs, codes):
        outputs.append(f'{stdout}{stderr}\nexit code {code}\n')
    assert -signal.SIGALRM not in codes, '\n'.join([f'still running after {timeout} seconds', *outputs])
    return SimpleNamespace(returncode=next(filter(None, codes), 0), stdout=''.join(stdouts),
                           stderr=''.join(stderrs), codes=codes, outputs=outputs)


def _start_fork_server():
    return subprocess.Popen([sys.executable, '-m', 'kilogpt.prove.forked'], text=True, cwd=ROOT,
                            stdin=subprocess.PIPE, stdout=subprocess.PIPE)


def end_servers():
    for server in IDLE_SERVERS:
        server.communicate()


def side_by_side(*calls):
    """Make independent calls, two at a time; returns their results."""
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(lambda call: call(), calls))


@contextlib.contextmanager
def torchrun(options, folder, script, *arguments, **env):
    """A context with a running torchrun: a Popen, whose `output()` is what it has printed so far.

    options: those of torchrun. folder: where its log is written. The end of the context kills all processes.
    """
    log = folder / f'torchrun-{time.monotonic_ns()}.log'
    command = [sys.executable, '-m', 'torch.distributed.run', '--monitor-interval=0.1', *options, script]
    with open(log, 'w') as file:
        process = subprocess.Popen([*command, *map(str, arguments)], stdout=file, stderr=file, cwd=ROOT,
                                   env=dict(os.environ, OMP_NUM_THREADS='1', **env))
    process.output = log.read_text
    try:
        yield process
    finally:
        kill_node(process)


def worker_pids(torchrun):
    """{rank: pid} of the processes that a torchrun has started."""
    found = {}
    for pid in filter(str.isdigit, os.listdir('/proc')):
        with contextlib.suppress(OSError):
            with open(f'/proc/{pid}/stat') as file:
                parent = int(file.read().rpartition(')')[2].split()[1])
            with open(f'/proc/{pid}/environ') as file:
                environment = dict(line.partition('=')[::2] for line in file.read().split('\0'))
            if parent == torchrun.pid and 'RANK' in environment:
                found[int(environment['RANK'])] = int(pid)
    return found


def kill_node(torchrun):
    """Kill a torchrun and its processes, as a power failure would."""
    for pid in (*worker_pids(torchrun).values(), torchrun.pid):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    torchrun.wait()


def wait_until(condition, process, seconds=120):
    """Wait until condition() holds, while the torchrun `process` runs."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None and time.monotonic() < deadline, process.output()
        time.sleep(0.02)


# --- reading runs ---------------------------------------------------------------------------------------

def read_run(out_dir):
    """A run as its folder shows it now: `out_dir`, and `lines` and `evals` as from read_metrics."""
    lines, evals = read_metrics(out_dir)
    return SimpleNamespace(out_dir=pathlib.Path(out_dir), lines=lines, evals=evals)


def curve(run):
    """{iter: (loss, gradient norm)} of a run, as logged."""
    return {i: (line['loss'], line['grad_norm']) for i, line in run.lines.items()}


def first_iterations(run, count):
    """A run as it was after `count` iterations."""
    return SimpleNamespace(out_dir=run.out_dir,
                           lines={i: line for i, line in run.lines.items() if i <= count},
                           evals={i: line for i, line in run.evals.items() if i <= count})


def assert_near(run, other, loss=LOSS, grad_norm=GRAD_NORM):
    """Assert that two runs agree: losses within `loss`, gradient norms within `grad_norm` (relative)."""
    assert list(run.lines) == list(other.lines) and list(run.evals) == list(other.evals) and run.lines
    assert compare_curves(run, other, loss, grad_norm) == []


def saved_iterations(out_dir):
    """The iterations of the checkpoints in a run's folder ckpt/, which must not hold anything else."""
    folder = pathlib.Path(out_dir, 'ckpt')
    names = sorted(path.name for path in folder.iterdir()) if folder.exists() else []
    assert names == [f'iter_{int(name[5:]):08d}' for name in names], names
    return [int(name[5:]) for name in names]


def newest_state(out_dir):
    """state.json of a run's newest checkpoint."""
    return checkpoint.read_state(checkpoint.find(out_dir)[0])


def read_tensors(path):
    """{key: whole tensor} of a checkpoint."""
    import torch.distributed.checkpoint as dcp  # takes a second, which most tests can save
    reader = dcp.FileSystemReader(path)
    tensors = {name: torch.empty(stored.size, dtype=stored.properties.dtype)
               for name, stored in reader.read_metadata().state_dict_metadata.items()}
    dcp.load(tensors, storage_reader=reader)
    return tensors


def newest_tensors(out_dir):
    """{key: whole tensor} of a run's newest checkpoint."""
    return read_tensors(checkpoint.find(out_dir)[0])


def newest_weights(out_dir):
    """{model.NAME: parameter} of a run's newest checkpoint."""
    return {name: tensor for name, tensor in newest_tensors(out_dir).items() if name.startswith('model.')}


def assert_same_tensors(tensors, others):
    """Assert that two dicts of tensors are equal to the bit."""
    assert tensors.keys() == others.keys() and tensors
    assert [name for name in tensors if not torch.equal(tensors[name], others[name])] == []


# --- tensors --------------------------------------------------------------------------------------------

def graph(y):
    """Names of the operations in the graph of a tensor."""
    names, stack = '', [y.grad_fn]
    while stack:
        node = stack.pop()
        names += f' {node.name()}'
        stack += [parent for parent, _ in node.next_functions if parent]
    return names
