"""A run that was killed, stopped or hung, or had a full disk, continues as if nothing had happened."""
import json
import os
import re
import resource
import signal
import subprocess
import sys
import time

import pytest
import torch

from helpers import (FAULTS, ROOT, TESTS, TINY, curve, free_port, kill_node, read_metrics, read_run,
                     read_tensors, run_script, saved_iterations, side_by_side, torchrun, wait_until,
                     worker_pids)
from kilogpt.run import checkpoint
from kilogpt.run.metrics import Metrics

OPTIONS = ['--dropout=0.1', '--eval_interval=20', '--lr_decay_iters=100']
WITH_FAULT = TESTS / 'with_fault.py'


def logged(out_dir):
    """How many iterations a run has logged."""
    return len(read_metrics(out_dir)[0]) if os.path.exists(out_dir / 'metrics.jsonl') else 0


def assert_same_run(run, other, iterations):
    """Assert that two runs made the same iterations, with the same results to the last bit."""
    assert list(run.lines) == list(other.lines) == list(range(1, iterations + 1))
    assert curve(run) == curve(other) and run.evals == other.evals


# --- killed ---------------------------------------------------------------------------------------------

@pytest.mark.parametrize('seed, kills, iterations', [
    (1, 1, 20), pytest.param(9, 20, 120, marks=pytest.mark.slow)])
def test_kills_change_nothing(train, dataset, tmp_path, seed, kills, iterations):
    """Runs are killed at any moment, also in saves. The last attempt ends on the curve of an unbroken run."""
    out_dir, log = tmp_path / 'out', tmp_path / 'log'
    options = [*OPTIONS, f'--max_iters={iterations}', '--save_interval=3']

    def run_with_kills():
        command = [sys.executable, os.path.join(ROOT, 'dev', 'kills.py'), seed, kills, log, *TINY, *options,
                   '--init_from=auto', f'--dataset={dataset}', f'--out_dir={out_dir}']
        return subprocess.run([*map(str, command)], capture_output=True, text=True, timeout=500,
                              env=dict(os.environ, OMP_NUM_THREADS='1'))

    unbroken, done = side_by_side(lambda: train(*options), run_with_kills)
    assert done.returncode == 0, done.stderr + log.read_text()[-3000:]
    found = json.loads(done.stdout)  # {how it was killed: how often}
    assert sum(found.values()) == kills, found
    if kills == 20:  # at any moment, and before and after syncing, renaming and removing
        assert len(found) == 7, found
    assert_same_run(read_run(out_dir), unbroken, iterations)
    assert saved_iterations(out_dir) == saved_iterations(unbroken.out_dir)  # without unfinished folders


def kill_worker(process, out_dir, rank):
    """Kill a process of a torchrun once 10 more iterations are logged and a checkpoint is complete."""
    wanted = logged(out_dir) + 10
    wait_until(lambda: logged(out_dir) >= wanted and checkpoint.find(out_dir), process)
    os.kill(worker_pids(process)[rank], signal.SIGKILL)


@pytest.mark.slow
def test_killed_process_is_named_and_torchrun_restarts_the_run(train, dataset, tmp_path):
    """After two kills and one restart, torchrun ends and names the process. Then the run resumes alone."""
    out_dir = tmp_path / 'out'
    options = [*OPTIONS, '--save_interval=4', '--comm_timeout=30']
    endless = [*TINY, *options, '--max_iters=100000', f'--dataset={dataset}', f'--out_dir={out_dir}']
    restarting = '--standalone', '--nproc_per_node=2', '--max-restarts=1'
    with torchrun(restarting, tmp_path, 'train.py', *endless, '--init_from=auto') as process:
        kill_worker(process, out_dir, rank=1)
        wait_until(lambda: 'resuming' in process.output(), process)
        kill_worker(process, out_dir, rank=0)
        assert process.wait(60) == 1
        output = process.output()
    assert output.count('resuming') == 1 and output.count('lost its connection') == 2, output
    cause = output[output.index('Root Cause'):]
    assert re.search(r'rank\s*: 0 ', cause) and 'Signal 9 (SIGKILL)' in cause, output
    last = logged(out_dir) + 5
    resumed = train(*options, f'--max_iters={last}', '--init_from=auto', out_dir=out_dir, nproc=2)
    unbroken = train(*options, f'--max_iters={last}', nproc=2)
    assert 'resuming' in resumed.stdout
    assert_same_run(resumed, unbroken, last)


def lines_of_processes(stderr):
    """The lines of stderr that a run's processes have printed, without those of torchrun."""
    own, _, _ = stderr.partition('] failed (exitcode: ')
    return [line for line in own.splitlines() if line.strip() and not re.match(r'[EIW]\d{4} ', line)]


def run_with_end_of_rank(train, nproc, place, kind, rank, *arguments):
    """The lines that the processes of a run print to stderr where a rank ends, as end_rank.py says."""
    def run_with_fault(script, *options, **others):
        return run_script('tests/with_fault.py', FAULTS / 'end_rank.py', *options, **others)

    run = train('--gradient_accumulation_steps=8', '--comm_timeout=60', *arguments, nproc=nproc, check=False,
                runner=run_with_fault, env=dict(FAULT_PLACE=place, FAULT_KIND=kind, FAULT_RANK=rank))
    assert run.returncode == 1, run.stderr
    return lines_of_processes(run.stderr)


@pytest.mark.slow
@pytest.mark.parametrize('nproc, place, kind, arguments', [
    (4, 'forward', 'RuntimeError', '--zero_stage=2'),
    (2, 'backward', 'ValueError', '--pp=2 --pp_schedule=zbv --activation_checkpoint=selective'),
    (2, 'backward', 'RuntimeError', '--zero_stage=3'),
    (2, 'evaluation', 'RuntimeError', '--cp=2')])
def test_only_the_process_that_failed_prints_its_error(train, nproc, place, kind, arguments):
    lines = run_with_end_of_rank(train, nproc, place, kind, '1', *arguments.split())
    printed = '\n'.join(lines)
    assert printed.count(f'{kind}: planted on rank 1') == 1, printed
    assert 'lost its connection' not in printed and 'gloo' not in printed, printed
    if '--pp' not in arguments:  # a pipeline adds which micro-batch it was
        assert lines[-1] == f'{kind}: planted on rank 1', printed


@pytest.mark.slow
def test_one_process_speaks_for_one_that_ended_in_silence(train):
    (line,) = run_with_end_of_rank(train, 4, 'forward', 'SIGKILL', '2')
    assert re.fullmatch(r'error: rank \d lost its connection to another process: '
                        'the launcher names the one that ended first', line)


@pytest.mark.slow
def test_processes_that_fail_together_print_an_error_each(train):
    lines = run_with_end_of_rank(train, 4, 'forward', 'ValueError', '1,2')
    errors = [line for line in lines if not line.startswith(('  ', 'Traceback'))]
    assert sorted(errors) == ['ValueError: planted on rank 1', 'ValueError: planted on rank 2'], lines


@pytest.mark.slow
def test_closed_pipe_ends_two_processes_without_a_traceback(dataset, tmp_path):
    command = [sys.executable, '-m', 'torch.distributed.run', '--standalone', '--nproc_per_node=2',
               'train.py', *TINY, '--max_iters=1000', '--lr_decay_iters=0', '--eval_iters=0',
               f'--dataset={dataset}', f'--out_dir={tmp_path}/out']
    with subprocess.Popen(command, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                          env=dict(os.environ, OMP_NUM_THREADS='1')) as process:
        assert '2 process(es) on cpu' in process.stdout.readline()
        process.stdout.close()  # as `head` does
        assert lines_of_processes(process.stderr.read()) == []
    assert process.returncode == 1


@pytest.mark.slow
def test_nodes_leave_and_join(train, dataset, tmp_path):
    """One of two nodes is lost, the other continues alone, and a third joins, on the curve of one process.

    The curves agree within 1e-3: sums in another order differ by 1e-7, which grows over hundreds of updates.
    """
    out_dir = tmp_path / 'out'
    elastic = ['--nnodes=1:4', '--nproc_per_node=1', '--max-restarts=3', '--rdzv-backend=c10d',
               f'--rdzv-endpoint=localhost:{free_port()}',
               '--rdzv-conf=last_call_timeout=1,keep_alive_interval=2']
    options = ['--learning_rate=1e-3', '--eval_interval=100', '--lr_decay_iters=1000']
    script = [WITH_FAULT, FAULTS / 'slow_iterations.py', *TINY, *options, f'--dataset={dataset}',
              f'--out_dir={out_dir}', '--init_from=auto', '--save_interval=10', '--max_iters=1000']
    nodes = []

    def node():
        # Without the variable, torchrun 2.13 lets a node that joins wait for an address.
        return torchrun(elastic, tmp_path, *script, TORCH_DISABLE_SHARE_RDZV_TCP_STORE='1')

    def output():
        return ''.join(process.output() for process in nodes)

    def wait_for_start(line, count):
        wait_until(lambda: output().count(line) == count, nodes[0])

    def wait_for_more_iterations(count):
        wanted = logged(out_dir) + count
        wait_until(lambda: logged(out_dir) > wanted, nodes[0])

    one, two = '1 process(es) on cpu', '2 process(es) on cpu'
    with node() as first:
        nodes.append(first)
        wait_for_start(one, 1)
        wait_for_more_iterations(0)  # now the first node has the rendezvous
        with node() as second:
            nodes.append(second)
            wait_for_start(two, 1)
            wait_for_more_iterations(20)
            kill_node(second)
        wait_for_start(one, 2)
        with node() as third:
            nodes.append(third)
            wait_for_start(two, 2)
            wait_for_more_iterations(10)
            for process in (first, third):
                process.terminate()
            for process in (first, third):
                process.wait(40)
    assert output().count('stopped by SIGTERM') >= 3, output()  # when a node joined, twice, and at the end
    found = read_run(out_dir)
    alone = train(*options, f'--max_iters={max(found.lines)}')
    assert list(found.lines) == list(alone.lines)
    assert max(abs(found.lines[i]['loss'] - alone.lines[i]['loss']) for i in found.lines) < 1e-3


# --- stopped --------------------------------------------------------------------------------------------

@pytest.mark.parametrize('nproc', [2, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize('phase, iterations', [
    ('saving', range(6, 12)), pytest.param('training', [8], marks=pytest.mark.slow),
    # One earlier if a process is still to send its numbers of the iteration before.
    pytest.param('iteration', [9, 10], marks=pytest.mark.slow),
    pytest.param('evaluation', [6], marks=pytest.mark.slow)])
def test_sigterm_in_any_phase_saves_and_the_run_resumes_to_the_bit(train, tmp_path, phase, iterations, nproc):
    """Every process ends with exit code 143 within 30 seconds, and one of them says why."""
    # Each process has 5 micro-steps in an iteration, and 3 in the evaluation of a split.
    options = ['--dropout=0.1', f'--gradient_accumulation_steps={5 * nproc}', f'--eval_iters={3 * nproc}']
    stopped = train(*options, '--max_iters=100000', nproc=nproc, check=False,
                    faults=[FAULTS / 'sigterm_in_phase.py'],
                    env=dict(FAULT_PHASE=phase, FAULT_FOLDER=str(tmp_path)))
    assert stopped.codes == [143] * nproc and stopped.stdout.count('stopped by SIGTERM') == 1, stopped.outputs
    assert time.time() - (tmp_path / 'sent').stat().st_mtime < 30
    last = saved_iterations(stopped.out_dir)[-1]
    assert last in iterations and f'stopped by SIGTERM at iteration {last};' in stopped.stdout
    assert phase != 'evaluation' or list(stopped.evals) == [0]  # the evaluation was not finished
    resumed = train(*options, '--max_iters=16', '--init_from=resume', out_dir=stopped.out_dir, nproc=nproc)
    assert_same_run(resumed, train(*options, '--max_iters=16', nproc=nproc), 16)


# --- slow -----------------------------------------------------------------------------------------------

def test_slowest_process_and_its_lag_are_logged(train):
    """With 30 ms in each of 2 layers and 3 micro-steps, the other process waits 180 ms in every iteration."""
    run = train('--gradient_accumulation_steps=6', '--eval_iters=0', '--max_iters=7', nproc=2,
                faults=[FAULTS / 'slow_rank.py'])
    lines = list(run.lines.values())
    assert len(lines) == 7 and [line['slowest_rank'] for line in lines].count(1) >= 5, run.stdout
    assert sorted(line['lag_ms'] for line in lines)[3] == pytest.approx(180, rel=0.5)
    assert re.search(r'iter 7: .*, rank 1 last by \d+\.\dms', run.stdout)


# --- storage --------------------------------------------------------------------------------------------

def assert_ended_unsaved(run, problem, last_good):
    """Assert that a run made 12 iterations, that two saves failed, and that its error says so of the last."""
    output = run.outputs[0]
    warning = rf'warning: .*/iter_\d+ could not be saved \({problem}.*the last good checkpoint is (.*?)\. '
    warnings = re.findall(warning, output)
    assert warnings == [str(last_good)] * 2 and 'training waited' not in output, output
    assert list(run.lines) == list(range(1, 13)) and run.codes == [1], output
    assert 'error: the run ended at iteration 12, but its last checkpoint could not be saved' in run.stderr


def test_full_disk_does_not_end_the_run(train):
    """When there is room again, the run resumes."""
    out_dir = train('--max_iters=6').out_dir
    (good,) = checkpoint.find(out_dir)
    full = train('--init_from=resume', '--eval_interval=3', out_dir=out_dir, check=False,
                 faults=[FAULTS / 'full_disk.py'])
    assert_ended_unsaved(full, r'OSError: \[Errno 27\] File too large', good)
    assert saved_iterations(out_dir) == [6]  # unfinished folders are deleted
    assert checkpoint.damage(good) is None
    later = train('--init_from=resume', out_dir=out_dir)
    assert curve(later) == curve(full) and saved_iterations(out_dir) == [6, 12]


@pytest.mark.quick
def test_failed_save_does_not_end_the_run(train, tmp_path):
    (tmp_path / 'ckpt').write_text('a file where the folder should be')  # root may write into any folder
    blocked = train('--async_checkpoint=False', out_dir=tmp_path, check=False)
    assert_ended_unsaved(blocked, 'NotADirectoryError', 'none')


def test_all_processes_learn_that_the_first_could_not_finish_a_save(train):
    """The first process alone writes the last files. All must know, to try again together at the end."""
    run = train(nproc=2, check=False, faults=[FAULTS / 'no_room_for_state.py'])
    assert len(run.lines) == 12 and saved_iterations(run.out_dir) == []
    # At iterations 6 and 12, and as the reason for the end of the run.
    problem = 'could not be saved (OSError: [Errno 28] No space left on device)'
    assert run.outputs[0].count(problem) == 3, run.outputs
    assert run.codes == [1, 1], run.outputs


def test_metrics_are_written_when_there_is_room_again(tmp_path, capsys):
    # The machine crashed in the middle of a line.
    (tmp_path / 'metrics.jsonl').write_text('{"iter": 1}\n{"it')
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
    lines = (tmp_path / 'metrics.jsonl').read_text().splitlines()
    assert [json.loads(line)['iter'] for line in lines] == [1, 2, 3, 4, 5, 6]


def test_saves_by_the_clock_in_the_background_hold_their_own_iteration(train):
    run = train('--eval_iters=0', '--save_minutes=0.0001', '--keep_checkpoints=99', '--max_iters=20')
    lines = [json.loads(line) for line in open(run.out_dir / 'metrics.jsonl')]
    stalls = [line for line in lines if 'ckpt_stall_ms' in line]
    assert [line['iter'] for line in stalls] == saved_iterations(run.out_dir)
    assert len(stalls) > 5
    for line in stalls:
        assert line.keys() == {'iter', 'ckpt_stall_ms'} and line['ckpt_stall_ms'] > 0
    for path in checkpoint.find(run.out_dir):
        assert checkpoint.read_state(path)['iteration'] == int(path[-8:]) and checkpoint.damage(path) is None


@pytest.mark.slow
@pytest.mark.parametrize('layout', ['--zero_stage=0', '--zero_stage=1', '--zero_stage=3', '--pp=2'])
def test_checkpoint_in_the_background_equals_a_blocking_one(train_all, layout):
    """Training changes the tensors while they are written, but the checkpoint holds their former values."""
    options = [layout, '--eval_iters=0', '--save_interval=1', '--keep_checkpoints=99', '--max_iters=6']
    variants = {background: [*options, f'--async_checkpoint={background}'] for background in (True, False)}
    runs = train_all(variants, nproc=2)
    pairs = list(zip(checkpoint.find(runs[True].out_dir), checkpoint.find(runs[False].out_dir), strict=True))
    assert len(pairs) == 6
    for in_background, blocking in pairs:
        found, expected = read_tensors(in_background), read_tensors(blocking)
        assert found.keys() == expected.keys() and len(found) > 40
        assert [key for key in found if not torch.equal(found[key], expected[key])] == [], in_background
