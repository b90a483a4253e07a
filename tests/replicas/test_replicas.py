"""Replicas are killed at any moment, and the run is that of one process: no iteration is lost, doubled or different."""
import contextlib
import importlib.util
import json
import os
import random
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest

from helpers import FAULTS, ROOT, TINY, newest_weights, read_run

needs_torchft = pytest.mark.skipif(importlib.util.find_spec('torchft') is None,
                                   reason='torchft is not installed (pip install torchft==0.2.0)')
DOUBLE = str(FAULTS / 'double.py')  # float64, so that the order of additions does not show
PACED = str(FAULTS / 'paced_updates.py')
NEAR = 1e-9  # float64 rounds at 1e-16, and Adam divides by roots of gradients that may be small


class ReplicaRun:
    """A run of `python -m kilogpt.replicas`, as a user starts it. Its updates are slow until `hurry` is called."""

    def __init__(self, folder, dataset, *arguments, replicas=2, nproc=1, restarts=100):
        self.out_dir, self.log, self.hurry_file = folder / 'out', folder / 'log', folder / 'hurry'
        command = [sys.executable, '-m', 'kilogpt.replicas', f'--replicas={replicas}', f'--nproc_per_replica={nproc}',
                   f'--max_restarts={restarts}', 'train.py', DOUBLE, PACED, *TINY, f'--dataset={dataset}',
                   f'--out_dir={self.out_dir}', *arguments]
        with open(self.log, 'w') as file:
            self.process = subprocess.Popen(command, cwd=ROOT, stdout=file, stderr=file, env=dict(
                os.environ, OMP_NUM_THREADS='1', HURRY=str(self.hurry_file)))

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for pid in [*self.workers().values(), self.process.pid]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()

    def children(self):
        """{pid: environment} of the processes that the launcher has started."""
        found = {}
        for pid in filter(str.isdigit, os.listdir('/proc')):
            with contextlib.suppress(OSError):
                with open(f'/proc/{pid}/stat') as file:
                    parent = int(file.read().rpartition(')')[2].split()[1])
                if parent == self.process.pid:
                    with open(f'/proc/{pid}/environ') as file:
                        found[int(pid)] = dict(line.partition('=')[::2] for line in file.read().split('\0'))
        return found

    def workers(self):
        """{(replica, rank): pid}."""
        return {(int(environment['REPLICA_GROUP_ID']), int(environment['RANK'])): pid
                for pid, environment in self.children().items() if 'REPLICA_GROUP_ID' in environment}

    def kill(self, *workers):
        for worker in workers:
            os.kill(self.workers()[worker], signal.SIGKILL)

    def lines(self):
        path = self.out_dir / 'metrics.jsonl'
        return [json.loads(line) for line in path.read_text().splitlines(True) if line.endswith('\n')] \
            if path.exists() else []

    def updates(self):
        return [line for line in self.lines() if 'loss' in line]

    def wait_for(self, condition, seconds=200):
        deadline = time.monotonic() + seconds
        while not condition():
            assert self.process.poll() is None and time.monotonic() < deadline, self.log.read_text()
            time.sleep(0.02)

    def wait_for_members(self, count):
        self.wait_for(lambda: self.updates() and self.updates()[-1]['members'] == count)

    def hurry(self):
        self.hurry_file.touch()

    def end(self, code=0):
        """Let the run end by itself; returns it as `read_run` does, with `updates`."""
        self.hurry()
        assert self.process.wait(timeout=500) == code, self.log.read_text()
        return SimpleNamespace(**vars(read_run(self.out_dir)), updates=self.updates(), text=self.log.read_text())


@pytest.fixture(scope='module')
def alone(train):
    """A function that trains in one process without faults."""
    return lambda *arguments: train(DOUBLE, *arguments)


def assert_same_run(run, alone):
    """Assert that no iteration is missing, doubled or different, nor an evaluation, nor a parameter at the end."""
    assert [line['iter'] for line in run.updates] == list(alone.lines)
    for lines, others, key in ((run.lines, alone.lines, 'loss'), (run.lines, alone.lines, 'grad_norm'),
                               (run.evals, alone.evals, 'val_loss')):
        assert list(lines) == list(others)
        assert max(abs(lines[i][key] - others[i][key]) for i in others) < NEAR
    weights, others = newest_weights(run.out_dir), newest_weights(alone.out_dir)
    assert weights.keys() == others.keys()
    assert max((weights[name] - others[name]).abs().max() for name in others) < NEAR


@needs_torchft
@pytest.mark.slow
def test_lost_replica_changes_nothing_for_the_others(dataset, tmp_path, alone):
    """The one that leads is killed, and not started again."""
    with ReplicaRun(tmp_path, dataset, '--max_iters=8', '--eval_interval=8', replicas=2, restarts=0) as run:
        run.wait_for(lambda: len(run.updates()) >= 2)
        survivor = run.workers()[1, 0]
        run.kill((0, 0))
        run.wait_for(lambda: run.updates()[-1]['members'] == 1)
        assert run.workers() == {(1, 0): survivor}
        ended = run.end()
    assert_same_run(ended, alone('--max_iters=8', '--eval_interval=8'))
    assert {line['members'] for line in ended.updates} == {1, 2}
    recovered = [line['recovered_ms'] for line in ended.updates if line['recovered_ms']]
    assert len(recovered) == 1 and recovered[0] > 0


def test_what_does_not_go_together_is_said(train):
    def error(*arguments):
        return train('--fault_tolerance=replicas', *arguments, check=False).stderr

    assert error() == ('error: fault_tolerance is replicas, but REPLICA_GROUP_ID, NUM_REPLICA_GROUPS, '
                       'TORCHFT_LIGHTHOUSE are not set: start the run with python -m kilogpt.replicas, or set them for '
                       'each replica (docs/faults.md)\n')
    assert error('--on_spike=rollback').startswith('error: on_spike=rollback goes back to a checkpoint')
    assert error('--events=True').startswith('error: events=True does not go with fault_tolerance=replicas')
    assert error('--replica_timeout=0').startswith('error: replica_timeout is 0.0: it must be above 0')


@needs_torchft
@pytest.mark.slow
@pytest.mark.parametrize('layout', [['--zero_stage=3'], ['--tp=2']], ids=' '.join)
def test_killed_at_random(dataset, tmp_path, alone, layout):
    """Processes of 3 replicas of 2 are killed at random moments, sometimes of two replicas at once."""
    seed = random.SystemRandom().randrange(1000)
    print(f'seed {seed}')
    rng, keys = random.Random(seed), ['--max_iters=120', '--lr_decay_iters=120', '--eval_interval=8']
    with ReplicaRun(tmp_path, dataset, *keys, *layout, replicas=3, nproc=2) as run:
        for count in (1, 2):
            run.wait_for_members(3)
            time.sleep(rng.uniform(0, 0.6))
            replicas = rng.sample(range(3), count)
            others = {worker: pid for worker, pid in run.workers().items() if worker[0] not in replicas}
            run.kill(*((replica, rng.randrange(2)) for replica in replicas))
            run.wait_for_members(3 - count)
            assert others.items() <= run.workers().items()
        ended = run.end()
    assert_same_run(ended, alone(*keys))


@needs_torchft
@pytest.mark.slow
def test_all_but_one_are_killed_then_the_lighthouse_one_hangs_and_a_signal_stops_all(dataset, tmp_path, alone):
    keys = ['--max_iters=300', '--lr_decay_iters=300', '--eval_interval=20', '--replica_timeout=5']
    with ReplicaRun(tmp_path, dataset, *keys, replicas=3) as run:
        run.wait_for_members(3)
        run.kill((0, 0), (2, 0))
        run.wait_for_members(1)
        run.wait_for_members(3)
        lighthouse, = run.children().keys() - run.workers().values()
        os.kill(lighthouse, signal.SIGKILL)
        run.wait_for(lambda: 'lighthouse has ended' in run.log.read_text())
        count = len(run.updates())
        run.wait_for(lambda: len(run.updates()) > count + 3)
        hung = run.workers()[1, 0]
        os.kill(hung, signal.SIGSTOP)
        run.wait_for_members(2)
        os.kill(hung, signal.SIGCONT)
        run.wait_for_members(3)
        assert run.workers()[1, 0] == hung
        run.process.send_signal(signal.SIGTERM)
        run.end(143)
        stopped = run.updates()[-1]['iter']
        run.hurry_file.unlink()
    run = ReplicaRun(tmp_path, dataset, *keys, '--init_from=auto', replicas=3)
    with run:
        ended = run.end()
    assert stopped < 300
    assert_same_run(ended, alone(*keys))
