"""Nothing is lost: killed, stopped, hung, out of disk, on other processes, a run goes on as if nothing had been."""
import contextlib
import json
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import time

import pytest
import torch

from kilogpt import checkpoint
from conftest import ROOT, TINY, curve, read_metrics, side_by_side, tensors, workers
from test_parallel import launch as launch_several
from kilogpt.health import culprits

RUN = [*TINY, '--dropout=0.1', '--eval_interval=20', '--lr_decay_iters=100']


@contextlib.contextmanager
def torchrun(launcher, folder, *command, **env):
    """A torchrun under way (its options, the folder it logs into, script and arguments), with `said()`; its processes end with it."""
    log = folder / f'said-{time.monotonic_ns()}'
    with open(log, 'w') as file:
        process = subprocess.Popen([sys.executable, '-m', 'torch.distributed.run', '--monitor-interval=0.1', *launcher, *map(str, command)],
                                   stdout=file, stderr=file, cwd=ROOT, env=dict(os.environ, OMP_NUM_THREADS='1', **env))
    process.said = log.read_text
    try:
        yield process
    finally:
        kill(process)


def wait_for(condition, process, seconds=120):
    """Until condition() holds, which the process brings about."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None and time.monotonic() < deadline, process.said()
        time.sleep(0.02)


def logged(out_dir):
    """Iterations that a run has logged."""
    return len(read_metrics(out_dir)[0]) if os.path.exists(out_dir / 'metrics.jsonl') else 0


def kill(launcher):
    """A node loses power: torchrun, and what it has started."""
    for pid in (*workers(launcher).values(), launcher.pid):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    launcher.wait()


def curve_of(out_dir):
    return {i: (line['loss'], line['grad_norm']) for i, line in read_metrics(out_dir)[0].items()}


# killed

def test_fifty_kills_change_nothing(train, dataset, tmp_path):
    """At any moment and within saves. The last attempt ends by itself, with the curve of a run that was never killed."""
    options = [*RUN, '--max_iters=300', '--save_interval=3']
    killing = [sys.executable, os.path.join(ROOT, 'tests', 'kills.py'), '1', '50', str(tmp_path / 'log'), *options, '--init_from=auto',
               f'--dataset={dataset}', f'--out_dir={tmp_path}/out']
    unbroken, done = side_by_side(lambda: train(*options), lambda: subprocess.run(
        killing, capture_output=True, text=True, timeout=500, env=dict(os.environ, OMP_NUM_THREADS='1')))
    assert done.returncode == 0, done.stderr + (tmp_path / 'log').read_text()[-3000:]
    kills = json.loads(done.stdout)
    assert sum(kills.values()) == 50 and len(kills) == 7, kills  # at any moment; before and after syncing, renaming, removing
    assert curve_of(tmp_path / 'out') == curve(unbroken) and len(curve(unbroken)) == 300
    assert read_metrics(tmp_path / 'out')[1] == unbroken.evals
    assert sorted(os.listdir(tmp_path / 'out' / 'ckpt')) == sorted(os.listdir(unbroken.out_dir / 'ckpt'))  # nothing half written


def test_torchrun_starts_a_run_again_whose_process_was_killed(dataset, tmp_path):
    options = [*RUN, '--max_iters=120', '--save_interval=4', f'--dataset={dataset}']
    command = ['--standalone', '--nproc_per_node=2', '--max-restarts=3'], tmp_path, 'train.py', *options
    with torchrun(*command, '--init_from=auto', f'--out_dir={tmp_path}/out') as run:
        for kill in range(3):
            wanted = logged(tmp_path / 'out') + 10
            wait_for(lambda: logged(tmp_path / 'out') >= wanted, run)
            os.kill(workers(run)[1 - kill % 2], signal.SIGKILL)
            wait_for(lambda: run.said().count('resuming') == kill + 1, run)
        assert run.wait(120) == 0, run.said()
    assert run.said().count('resuming') == 3 and run.said().count('lost its connection') == 3
    with torchrun(*command, f'--out_dir={tmp_path}/unbroken') as run:
        assert run.wait(120) == 0, run.said()
    assert curve_of(tmp_path / 'out') == curve_of(tmp_path / 'unbroken') and logged(tmp_path / 'out') == 120
    assert read_metrics(tmp_path / 'out')[1] == read_metrics(tmp_path / 'unbroken')[1]


SLOW = """
import os, time
from kilogpt import optim
fast = optim.scheduled_lr
optim.scheduled_lr = lambda *args: time.sleep(0.05) or fast(*args)  # once an iteration
"""


def test_nodes_come_and_go(train, dataset, tmp_path):
    """--nnodes=1:4: the second of two nodes is lost, the first goes on alone, a third joins. The curve is that of one process.

    Within 1e-3: sums in another order, 1e-7 of a loss, grow over some hundred updates.
    """
    with socket.socket() as free:
        free.bind(('localhost', 0))
        port = free.getsockname()[1]
    (tmp_path / 'slow.py').write_text(SLOW)
    options = [*TINY, '--learning_rate=1e-3', '--eval_interval=100', '--lr_decay_iters=1000', f'--dataset={dataset}']
    node = (['--nnodes=1:4', '--nproc_per_node=1', '--max-restarts=3', '--rdzv-backend=c10d', f'--rdzv-endpoint=localhost:{port}',
             '--rdzv-conf=last_call_timeout=1,keep_alive_interval=2'], tmp_path, os.path.join(ROOT, 'tests', 'planted.py'),
            tmp_path / 'slow.py', *options, f'--out_dir={tmp_path}/out', '--init_from=auto', '--save_interval=10', '--max_iters=1000')
    env = dict(TORCH_DISABLE_SHARE_RDZV_TCP_STORE='1')  # without, torchrun 2.13 leaves a node that joins waiting for an address
    with torchrun(*node, **env) as first:
        wait_for(lambda: logged(tmp_path / 'out') > 0, first)  # it keeps the rendezvous
        with torchrun(*node, **env) as second:
            wait_for(lambda: first.said().count('dp 2 (1 × 2)') + second.said().count('dp 2 (1 × 2)') == 1, first)
            wanted = logged(tmp_path / 'out') + 20
            wait_for(lambda: logged(tmp_path / 'out') > wanted, first)
            kill(second)
        wait_for(lambda: first.said().count('dp 1 (1 × 1)') == 2, first)
        with torchrun(*node, **env) as third:
            wait_for(lambda: (first.said() + second.said() + third.said()).count('dp 2 (1 × 2)') == 2, first)
            wanted = logged(tmp_path / 'out') + 10
            wait_for(lambda: logged(tmp_path / 'out') > wanted, first)
            for launcher in (first, third):
                launcher.terminate()
            for launcher in (first, third):
                launcher.wait(40)
    said = first.said() + second.said() + third.said()
    assert said.count('stopped by SIGTERM') >= 3, said  # as a node joined, twice, and at the end
    lines, evals = read_metrics(tmp_path / 'out')
    one = train(*options[len(TINY):], f'--max_iters={max(lines)}')
    assert list(lines) == list(one.lines)
    assert max(abs(lines[i]['loss'] - one.lines[i]['loss']) for i in lines) < 1e-3


# stopped

PHASES = """
import builtins, os, time
from kilogpt import optim
rank, phase, folder = os.environ['RANK'], {phase!r}, {folder!r}
mark = lambda: open(f'{{folder}}/{{phase}}.here', 'w').close()
if phase == 'training':  # in the second of three micro-steps of the ninth iteration
    from kilogpt import parallel
    forward_backward, calls = parallel.Parallel.forward_backward, [0]
    def slow(*args, **options):
        calls[0] += 1
        if calls[0] == 1 + 8 * 3 + 2:
            mark(); time.sleep(1)
        return forward_backward(*args, **options)
    parallel.Parallel.forward_backward = slow
elif phase == 'evaluation':  # the one after six iterations
    from kilogpt import parallel
    evaluate, calls = parallel.Parallel.evaluate, [0]
    def slow(*args, **options):
        calls[0] += 1
        if calls[0] == 10:
            mark(); time.sleep(1)
        return evaluate(*args, **options)
    parallel.Parallel.evaluate = slow
else:  # of the checkpoint after six
    fsync = os.fsync
    def slow(*args):
        mark(); time.sleep(0.5)
        return fsync(*args)
    os.fsync = slow
leave = os._exit
def exit(code):
    open(f'{{folder}}/{{phase}}.exit.{{rank}}', 'w').write(str(code))
    leave(code)
os._exit = exit
"""


def test_sigterm_while_training_evaluating_and_saving(dataset, tmp_path):
    """Of four processes under torchrun: exit code 143 of each within 30 seconds, and the run goes on to the bit."""
    options = [*TINY, '--dropout=0.1', '--batch_size=4', '--gradient_accumulation_steps=12', '--eval_iters=12', f'--dataset={dataset}']

    def stop(phase):
        (tmp_path / f'{phase}.py').write_text(PHASES.format(phase=phase, folder=str(tmp_path)))
        with torchrun(['--standalone', '--nproc_per_node=4'], tmp_path, os.path.join(ROOT, 'tests', 'planted.py'), tmp_path / f'{phase}.py',
                      *options, '--max_iters=100000', f'--out_dir={tmp_path}/{phase}') as run:
            wait_for((tmp_path / f'{phase}.here').exists, run)
            run.terminate()
            assert run.wait(30) != 0
        codes = [(tmp_path / f'{phase}.exit.{rank}').read_text() for rank in range(4)]
        assert codes == ['143'] * 4 and run.said().count('stopped by SIGTERM') == 1, run.said()
        return int(checkpoint.find(tmp_path / phase)[0][-8:])

    last = {phase: stop(phase) for phase in ('training', 'evaluation', 'saving')}
    assert last['training'] == 8 and last['evaluation'] == 6 and 6 <= last['saving'] < 12, last
    several = lambda name, *more: (name, [*options, f'--out_dir={tmp_path}/{name}', '--max_iters=16', *more])
    launch_several(4, [several('unbroken'), *(several(phase, '--init_from=resume') for phase in last)])
    expected, evals = curve_of(tmp_path / 'unbroken'), read_metrics(tmp_path / 'unbroken')[1]
    assert len(expected) == 16
    for phase in last:
        assert curve_of(tmp_path / phase) == expected and read_metrics(tmp_path / phase)[1] == evals, phase


# hung, slow

HANG = """
import os, time
from data.loader import TokenLoader
batch, calls = TokenLoader.batch, [0]
def hanging(self, starts):
    calls[0] += 1
    if calls[0] == 30 and os.environ['RANK'] == '1':
        time.sleep(1000)
    return batch(self, starts)
TokenLoader.batch = hanging
"""


def test_a_process_that_hangs_is_named(dataset, tmp_path):
    (tmp_path / 'hang.py').write_text(HANG)
    with torchrun(['--standalone', '--nproc_per_node=2'], tmp_path, os.path.join(ROOT, 'tests', 'planted.py'), tmp_path / 'hang.py', *TINY,
                  '--max_iters=1000', '--eval_iters=0', '--comm_timeout=3', f'--dataset={dataset}', f'--out_dir={tmp_path}/out') as run:
        assert run.wait(60) == 1
    sentence = re.search('^error: no progress .*', run.said(), re.M)[0]
    assert 'for 3 seconds (comm_timeout)' in sentence
    assert re.search(r'Hung: rank 1 \(host .*, pid \d+, at loader.py:\d+ __call__', sentence)
    assert re.search(r'Waiting: rank 0 in gloo:all_?reduce at (train|parallel).py', sentence)
    assert run.said().count('error: no progress') == 1
    cause = run.said()[run.said().index('Root Cause'):]
    assert re.search(r'rank\s*: 1 ', cause)
    assert 'hanging' in (tmp_path / 'out' / 'hang' / 'rank_1.txt').read_text()  # the stack that hangs
    entries = json.loads((tmp_path / 'out' / 'hang' / 'rank_0.json').read_text())['entries']  # the flight recorder
    assert [entry['process_group'][1] for entry in entries if not entry['retired']] == ['default_pg']


def test_who_holds_up_the_others():
    report = lambda waits=True, **entered: dict(waits=waits, entered=entered)
    assert culprits({0: report(), 1: report(waits=False), 2: report()}, 3) == [1]  # computes, or sleeps
    assert culprits({0: report(), 2: report()}, 3) == [1]  # says nothing
    assert culprits({0: report(a=7, b=3), 1: report(a=6, b=3), 2: report(a=7)}, 3) == [1]  # waits in an earlier collective
    assert culprits({0: report(a=7), 1: report(b=7)}, 2) == []  # each waits for the other


DELAY = """
import os, time, model
forward = model.MLP.forward
def slow(*args):
    if os.environ['RANK'] == '1':
        time.sleep(0.01)
    return forward(*args)
model.MLP.forward = slow
"""


def test_the_slowest_process_and_its_lag_are_logged(dataset, tmp_path):
    """Two layers, three micro-steps a process, 10 ms in each: 60 ms, which the other waits for in every iteration."""
    (tmp_path / 'delay.py').write_text(DELAY)
    said = launch_several(2, [('slow', [*TINY, '--gradient_accumulation_steps=6', '--eval_iters=0', f'--dataset={dataset}',
                                        f'--out_dir={tmp_path}/out'], str(tmp_path / 'delay.py'))])
    lines = list(read_metrics(tmp_path / 'out')[0].values())
    assert len(lines) == 12 and [line['slowest_rank'] for line in lines].count(1) >= 11, said
    assert sorted(line['lag_ms'] for line in lines)[6] == pytest.approx(60, rel=0.5)
    assert re.search(r'iter 12: .*, rank 1 last by \d+\.\dms', said['slow'][0])


# storage

def test_a_save_that_fails_ends_no_run(dataset, tmp_path):
    """A limit on the size of files stands for a full disk: checkpoints have no room, metrics.jsonl has. Then there is room again."""
    (tmp_path / 'limit.py').write_text('import resource\nresource.setrlimit(resource.RLIMIT_FSIZE, (20_000, resource.RLIM_INFINITY))')
    out, blocked = tmp_path / 'out', tmp_path / 'blocked'
    blocked.mkdir()
    (blocked / 'ckpt').write_text('a file where the folder should be')  # root may write into any folder
    several = lambda name, out, *more: (name, [*TINY, f'--dataset={dataset}', f'--out_dir={out}', *more])
    said = launch_several(1, [
        several('first', out, '--max_iters=6'),
        (*several('full', out, '--init_from=resume', '--eval_interval=3'), str(tmp_path / 'limit.py')),
        several('blocked', blocked, '--async_checkpoint=False')])
    (good,) = checkpoint.find(out)
    for name, folder, saves, problem in (('full', out, 2, r'OSError: \[Errno 27\] File too large'), ('blocked', blocked, 2, 'NotADirectoryError')):
        text = said[name][0]
        assert logged(folder) == 12, text  # to the end
        assert len(re.findall(rf'warning: .*/iter_\d+ could not be saved \({problem}.*the last good checkpoint is (.*?)\. ', text)) == saves, text
        assert 'error: the run ended at iteration 12, but its last checkpoint could not be saved' in text and text.endswith('exit code 1\n')
    assert f'the last good checkpoint is {good}.' in said['full'][0] and 'the last good checkpoint is none.' in said['blocked'][0]
    assert os.listdir(os.path.dirname(good)) == [os.path.basename(good)]  # what was written in part has made room
    assert checkpoint.damage(good) is None
    full = curve_of(out)
    launch_several(1, [several('again', out, '--init_from=resume')])
    assert curve_of(out) == full and checkpoint.find(out)[0].endswith('12')


FAULT = """
import json, os
from kilogpt import checkpoint
write = checkpoint.write_json
def failing(path, content):
    if path.endswith('state.json'):
        raise OSError(28, 'No space left on device')
    write(path, content)
checkpoint.write_json = failing
"""


def test_all_processes_learn_that_the_first_could_not_finish_a_save(dataset, tmp_path):
    """It alone writes the last files; the others have to know, since a save that fails at the end is tried once more, together."""
    (tmp_path / 'fault.py').write_text(FAULT)
    said = launch_several(2, [('full', [*TINY, f'--dataset={dataset}', f'--out_dir={tmp_path}/out'], str(tmp_path / 'fault.py'))])['full']
    assert logged(tmp_path / 'out') == 12 and not checkpoint.find(tmp_path / 'out')
    assert said[0].count('could not be saved ([Errno 28] No space left on device)') == 3, said  # of iterations 6 and 12, and why it ended
    assert all(text.endswith('exit code 1\n') for text in said.values()), said


def test_metrics_wait_for_room(tmp_path, capsys, monkeypatch):
    from kilogpt.metrics import Metrics
    (tmp_path / 'metrics.jsonl').write_text('{"iter": 1}\n{"it')  # the machine went down in the middle of a line
    log = Metrics(str(tmp_path), True)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (40, hard))
    try:
        for i in range(2, 6):
            log.eval(dict(iter=i, train_loss=1.0, val_loss=1.0))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert capsys.readouterr().err.count('metrics.jsonl could not be written') == 1
    log.eval(dict(iter=6, train_loss=1.0, val_loss=float('nan')))
    log.close()
    assert [json.loads(line)['iter'] for line in (tmp_path / 'metrics.jsonl').read_text().splitlines()] == [1, 2, 3, 4, 5, 6]


def test_saves_by_the_clock_and_in_the_background(train):
    run = train('--eval_iters=0', '--save_minutes=0.0001', '--keep_checkpoints=99', '--max_iters=20')
    with open(run.out_dir / 'metrics.jsonl') as file:
        stalls = [line for line in map(json.loads, file) if 'ckpt_stall_ms' in line]
    assert [line['iter'] for line in stalls] == [int(path[-8:]) for path in reversed(checkpoint.find(run.out_dir))]
    assert len(stalls) > 5 and all(line.keys() == {'iter', 'ckpt_stall_ms'} and line['ckpt_stall_ms'] > 0 for line in stalls)
    for path in checkpoint.find(run.out_dir):  # each is of its own iteration, though training went on
        state = checkpoint.read_state(path)
        assert state['iteration'] == int(path[-8:]) and checkpoint.damage(path) is None


def test_a_checkpoint_in_the_background_is_the_one_that_blocks(dataset, tmp_path):
    """Training changes the tensors while they are written: what is written is what they were, whole or sharded, on each process."""
    layouts = {'ddp': [], 'zero1': ['--zero_stage=1'], 'zero3': ['--zero_stage=3'], 'pp2': ['--pp=2']}
    launch_several(2, [(f'{name}-{background}', [*TINY, '--eval_iters=0', '--save_interval=1', '--keep_checkpoints=99', '--max_iters=6', *layout,
                                                 f'--async_checkpoint={background}', f'--dataset={dataset}', f'--out_dir={tmp_path}/{name}-{background}'])
                       for name, layout in layouts.items() for background in (True, False)], abreast=True)
    for name in layouts:
        pairs = list(zip(*(checkpoint.find(tmp_path / f'{name}-{background}') for background in (True, False)), strict=True))
        assert len(pairs) == 6
        for path, other in pairs:
            a, b = tensors(path), tensors(other)
            assert a.keys() == b.keys() and len(a) > 40 and all(torch.equal(a[key], b[key]) for key in a), (name, path)
