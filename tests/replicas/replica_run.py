"""Runs of `python -m kilogpt.replicas` that tests watch, kill and compare with one process."""
import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest

from helpers import FAULTS, ROOT, TINY, children_of, newest_weights, read_run

needs_torchft = pytest.mark.skipif(importlib.util.find_spec('torchft') is None,
                                   reason='torchft is not installed (pip install torchft==0.2.0)')
DOUBLE = str(FAULTS / 'double.py')  # float64, so that the order of additions does not show
PACED = str(FAULTS / 'paced_updates.py')
MORTAL = str(FAULTS / 'killed_in_phase.py')
NEAR = 1e-9  # float64 rounds at 1e-16, and Adam divides by roots of gradients that may be small


class ReplicaRun:
    """A run of `python -m kilogpt.replicas`, as a user starts it. Its updates are slow until `hurry` is called.

    pace: seconds by which an update is slower. kills: the folder in which a test says who dies in which phase.
    """

    def __init__(self, folder, dataset, *arguments, replicas=2, nproc=1, restarts=100, pace=0.3,
                 faults=(DOUBLE, PACED, MORTAL)):
        self.out_dir, self.log, self.hurry_file = folder / 'out', folder / 'log', folder / 'hurry'
        self.kills = folder / 'kills'
        self.kills.mkdir(exist_ok=True)
        command = [sys.executable, '-m', 'kilogpt.replicas', f'--replicas={replicas}', f'--nproc_per_replica={nproc}',
                   f'--max_restarts={restarts}', 'train.py', *faults, *TINY, f'--dataset={dataset}',
                   f'--out_dir={self.out_dir}', *arguments]
        environment = dict(os.environ, OMP_NUM_THREADS='1', HURRY=str(self.hurry_file), PACE=str(pace),
                           KILLS=str(self.kills))
        self.process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE,
                                        stderr=subprocess.STDOUT)
        with open(self.log, 'w') as file:  # written by another process, since a test may limit the files of these
            self.copying = subprocess.Popen(['cat'], stdin=self.process.stdout, stdout=file)
        self.process.stdout.close()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for pid in [*self.workers().values(), self.process.pid]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()
        self.copying.wait()

    def workers(self):
        """{(replica, rank): pid}."""
        return {(int(environment['REPLICA_GROUP_ID']), int(environment['RANK'])): pid
                for pid, environment in children_of(self.process).items() if 'REPLICA_GROUP_ID' in environment}

    def kill(self, *workers):
        for worker in workers:
            os.kill(self.workers()[worker], signal.SIGKILL)

    def lighthouse(self):
        """(pid, arguments) of the lighthouse; None before it is started."""
        for pid in children_of(self.process):
            with contextlib.suppress(OSError), open(f'/proc/{pid}/cmdline') as file:
                arguments = file.read().split('\0')[:-1]
                if 'LighthouseServer' in ' '.join(arguments):
                    return pid, arguments
        return None

    def updates(self):
        return read_updates(self.out_dir)

    def wait_for(self, condition, seconds=200):
        wait_for(lambda: condition() or self.process.poll() is not None, self.log.read_text, seconds)
        assert self.process.poll() is None, self.log.read_text()

    def wait_for_members(self, count):
        self.wait_for(lambda: self.updates() and self.updates()[-1]['members'] == count)

    def hurry(self):
        self.hurry_file.touch()

    def end(self, code=0):
        """Let the run end by itself; returns it as `read_run` does, with `updates`."""
        self.hurry()
        assert self.process.wait(timeout=500) == code, self.log.read_text()
        self.copying.wait()
        return SimpleNamespace(**vars(read_run(self.out_dir)), updates=self.updates(), text=self.log.read_text())


def read_updates(out_dir):
    """The lines of a run's updates so far."""
    path = out_dir / 'metrics.jsonl'
    lines = path.read_text().splitlines(True) if path.exists() else []
    return [line for line in map(json.loads, (text for text in lines if text.endswith('\n'))) if 'loss' in line]


def wait_for(condition, text, seconds=200):
    """Wait until condition() is true. text(): what to say if it is not in time."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, text()
        time.sleep(0.02)


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
