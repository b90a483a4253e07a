"""What tests share besides fixtures: launching scripts, and reading what runs leave."""
import contextlib
import json
import os
import pathlib
import shutil
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

from kilogpt.prove.compare import GRAD_NORM, LOSS, compare_curves
from kilogpt.prove.forked import free_ports
from kilogpt.run import checkpoint
from kilogpt.run.metrics import read_metrics

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
TESTS = pathlib.Path(ROOT, 'tests')
FAULTS = TESTS / 'faults'  # programs that a run executes before train.py

# A model and a batch that train in milliseconds. The 12 sequences divide over 1, 2 and 3 processes.
TINY = ('--device=cpu --compile=False --dtype=float32 --n_layer=2 --n_head=4 --n_embd=32 --block_size=32 '
        '--batch_size=4 --gradient_accumulation_steps=3 --eval_iters=4 --eval_interval=6 --log_interval=1 '
        '--max_iters=12 --lr_decay_iters=12 --warmup_iters=2 --learning_rate=1e-2 --min_lr=1e-3').split()


# --- copies of the repository ---------------------------------------------------------------------------

def copy_repository(folder, *more, root=ROOT):
    """Copy what a run needs of the repository, and `more` names from its top, into a folder; returns that.

    What .gitignore names stays behind, such as data and runs. git is not asked: it may not be installed, and
    it knows nothing of an archive that was unpacked.
    """
    folder, root = pathlib.Path(folder), pathlib.Path(root)
    names, ignored = ('config', 'data', 'kilogpt', 'model.py', 'train.py', *more), set()
    for pattern in (root / '.gitignore').read_text().split():
        if '/' in pattern.rstrip('/'):
            ignored.update(root.glob(pattern.lstrip('/')))
        else:  # holds in every folder
            ignored.update(path for name in names for path in (root / name).glob(f'**/{pattern}'))
    folder.mkdir(parents=True, exist_ok=True)

    def leave_out(parent, children):
        return [child for child in children if pathlib.Path(parent, child) in ignored]

    for name in names:
        if (root / name).is_dir():
            shutil.copytree(root / name, folder / name, ignore=leave_out, symlinks=True)
        else:
            shutil.copy(root / name, folder)
    return folder


# --- launching scripts ----------------------------------------------------------------------------------

def start_script(script, *arguments, nproc=1, env=None, cwd=None):
    """Start a script of the repository ('train.py') or a module ('kilogpt.convert') as a user does.

    Returns a Popen. nproc: if above 1, the number of processes under torchrun.
    """
    command = [sys.executable]
    if nproc > 1:
        command += ['-m', 'torch.distributed.run', '--standalone', f'--nproc_per_node={nproc}']
    command += [os.path.join(ROOT, script)] if script.endswith('.py') else ['-m', script]
    return subprocess.Popen([*command, *map(str, arguments)], text=True, cwd=cwd or ROOT,
                            env=os.environ | dict(OMP_NUM_THREADS='1') | (env or {}),
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


# Processes of pytest have different ranges: they could take the same port before one listens at it.
PYTEST_PROCESS = int(os.environ.get('PYTEST_XDIST_WORKER', 'gw0').removeprefix('gw'))
PORTS = free_ports(20_000 + PYTEST_PROCESS % 3 * 4_000 + os.getpid() % 3_000)


def free_port():
    """A port that nobody listens at."""
    return next(PORTS)


IDLE_SERVERS = []  # processes of kilogpt/prove/forked.py that are not in use
SERVERS_LOCK = threading.Lock()


def run_forked(script, *arguments, check=True, **options):
    """Run a script or module like `run_script`, but in processes forked from one that has imported torch.

    This saves seconds. options: those of `_run_in_fork_server`.
    """
    done = _run_in_fork_server(script, *arguments, **options)
    if min(done.codes) < 0:  # one process in hundreds dies in malloc, in torch or gloo (docs/log)
        warnings.warn(f'a signal ended this run, which is therefore repeated: {arguments}, {done.outputs}')
        done = _run_in_fork_server(script, *arguments, **options)
    assert done.returncode == 0 or not check, '\n'.join(done.outputs)
    return done


def _run_in_fork_server(script, *arguments, nproc=1, env=None, cwd=None, stdin='', timeout=300, faults=()):
    """Run one process, or nproc processes as torchrun starts them; returns the finished process.

    faults: Python files that each process executes before the script.
    The result also has `codes`, and `outputs` (stdout, stderr and exit code), of each rank.
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
    """End the fork servers, when all tests are done."""
    for server in IDLE_SERVERS:
        server.communicate()


def side_by_side(*calls):
    """The results of independent calls, of which two run at a time."""
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(lambda call: call(), calls))


@contextlib.contextmanager
def torchrun(options, folder, script, *arguments, **env):
    """A context in which a torchrun runs: its Popen, whose `output()` is the output so far.

    options: those of torchrun. folder: where to put the log of the output. The end of the context kills all
    processes.
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


def children_of(process):
    """{pid: environment} of the processes that a process has started."""
    found = {}
    for pid in filter(str.isdigit, os.listdir('/proc')):
        with contextlib.suppress(OSError):
            with open(f'/proc/{pid}/stat') as file:
                parent = int(file.read().rpartition(')')[2].split()[1])
            if parent == process.pid:
                with open(f'/proc/{pid}/environ') as file:
                    found[int(pid)] = dict(line.partition('=')[::2] for line in file.read().split('\0'))
    return found


def worker_pids(torchrun):
    """{rank: pid} of the processes that a torchrun has started."""
    return {int(environment['RANK']): pid for pid, environment in children_of(torchrun).items() if 'RANK' in environment}


def kill_node(torchrun):
    """Kill a torchrun and its processes, like a loss of power."""
    for pid in (*worker_pids(torchrun).values(), torchrun.pid):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    torchrun.wait()


def wait_until(condition, process, seconds=120):
    """Wait until condition() holds; fail if the process ends before."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None and time.monotonic() < deadline, process.output()
        time.sleep(0.02)


# --- what runs leave ------------------------------------------------------------------------------------

def read_lines(out_dir):
    """read_metrics of a run's folder; the evaluations have only their iteration and what was evaluated."""
    lines, evals = read_metrics(out_dir)
    for line in evals.values():
        for key in ('tokens', 'seconds', 'params', 'flops'):
            del line[key]
    return lines, evals


def read_run(out_dir):
    """A run as its folder shows it now: `out_dir`, and `lines` and `evals` from read_lines."""
    lines, evals = read_lines(out_dir)
    return SimpleNamespace(out_dir=pathlib.Path(out_dir), lines=lines, evals=evals)


def curve(run):
    """{iter: (loss, gradient norm)} of a run, as logged."""
    return {i: (line['loss'], line['grad_norm']) for i, line in run.lines.items()}


def first_iterations(run, count):
    """The first `count` iterations of a run, like a result of `read_run`."""
    return SimpleNamespace(out_dir=run.out_dir,
                           lines={i: line for i, line in run.lines.items() if i <= count},
                           evals={i: line for i, line in run.evals.items() if i <= count})


def assert_near(run, other, loss=LOSS, grad_norm=GRAD_NORM):
    """Assert that two runs agree: losses within `loss`, gradient norms within `grad_norm` of their size."""
    assert list(run.lines) == list(other.lines) and list(run.evals) == list(other.evals) and run.lines
    assert compare_curves(run, other, [loss], [grad_norm]) == []


def saved_iterations(out_dir):
    """The iterations of the checkpoints in a run's folder. Fails if its ckpt holds anything else."""
    folder = pathlib.Path(out_dir, 'ckpt')
    names = sorted(path.name for path in folder.iterdir()) if folder.exists() else []
    assert names == [f'iter_{int(name[5:]):08d}' for name in names], names
    return [int(name[5:]) for name in names]


def newest_state(out_dir):
    """The content of state.json in a run's newest checkpoint."""
    return checkpoint.read_state(checkpoint.find(out_dir)[0])


def read_tensors(path):
    """Every tensor of a checkpoint, whole."""
    import torch.distributed.checkpoint as dcp  # takes a second to import, and few tests need it
    reader = dcp.FileSystemReader(path)
    tensors = {name: torch.empty(stored.size, dtype=stored.properties.dtype)
               for name, stored in reader.read_metadata().state_dict_metadata.items()}
    dcp.load(tensors, storage_reader=reader)
    return tensors


def newest_tensors(out_dir):
    """Every tensor of a run's newest checkpoint."""
    return read_tensors(checkpoint.find(out_dir)[0])


def newest_weights(out_dir):
    """The parameters of a run's newest checkpoint, under their keys there (model.NAME)."""
    return {name: tensor for name, tensor in newest_tensors(out_dir).items() if name.startswith('model.')}


def assert_same_tensors(tensors, others):
    """Assert that two dicts of tensors are equal to the bit."""
    assert tensors.keys() == others.keys() and tensors
    assert [name for name in tensors if not torch.equal(tensors[name], others[name])] == []


# --- tensors --------------------------------------------------------------------------------------------

def graph(y):
    """The names of the operations that computed a tensor."""
    names, stack = '', [y.grad_fn]
    while stack:
        node = stack.pop()
        names += f' {node.name()}'
        stack += [parent for parent, _ in node.next_functions if parent]
    return names


def continue_texts(model, idx, n_tokens, seed=0, separator=None, **sampling):
    """idx (B, T) with n_tokens tokens appended by the engine; sampling: temperature, top_k, top_p of a Request."""
    import torch
    from kilogpt.generate.engine import Engine, ModelReader, Request
    requests = [Request(ids, n_tokens, seed=(seed, row), **sampling) for row, ids in enumerate(idx.tolist())]
    Engine(ModelReader(model, len(requests)), separator).complete(requests)
    return torch.tensor([request.ids + request.tokens for request in requests])
