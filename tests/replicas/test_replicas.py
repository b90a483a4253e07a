"""Replicas are killed at any moment, and the run is that of one process: no iteration is lost, doubled or different."""
import os
import signal

import pytest
import torch

from replica_run import DOUBLE, ReplicaRun, assert_same_run, needs_torchft

from kilogpt.replicas import replicas


@pytest.fixture(scope='module')
def alone(train):
    """A function that trains in one process without faults."""
    return lambda *arguments: train(DOUBLE, *arguments)


@needs_torchft
@pytest.mark.slow
def test_lost_replica_changes_nothing_for_the_others(dataset, tmp_path, alone):
    """The one that leads is killed, and not started again."""
    keys = ['--max_iters=60', '--lr_decay_iters=60', '--eval_interval=20']
    with ReplicaRun(tmp_path, dataset, *keys, restarts=0) as run:
        run.wait_for_members(2)  # one of them may have started alone
        survivor = run.workers()[1, 0]
        run.kill((0, 0))
        run.wait_for(lambda: run.updates()[-1]['members'] == 1)
        assert run.workers() == {(1, 0): survivor}
        ended = run.end()
    assert_same_run(ended, alone(*keys))
    assert {line['members'] for line in ended.updates} == {1, 2}
    recovered = [line['recovered_ms'] for line in ended.updates if line['recovered_ms']]
    assert len(recovered) == 1 and recovered[0] > 0


def test_large_gradients_are_summed_where_they_are_and_others_in_buckets_of_one_dtype(monkeypatch):
    monkeypatch.setattr(replicas, 'BUCKET_BYTES', 100)
    empty, small, large = torch.zeros(0), torch.zeros(20), torch.zeros(replicas.ALONE_BYTES // 4)
    double = small.double()[:2]
    sizes = [[len(gradient) for gradient in bucket]
             for bucket in replicas.buckets([empty, small, large, small[:5], small, double])]
    assert sizes == [[len(large)], [0, 20, 5], [20], [2]]


def test_change_of_members_names_replicas():
    before = ['0-0000-a@host-1:3', '0-0001-b@host-2:3', '9-0002-c@host-3:3']
    assert replicas.describe_change(before, before[:1]) == 'lost: replica 1, 2'
    after = ['0-0000-a@host-1:3', '10-0001-d@host-2:4', '9-0002-c@host-3:3']
    assert replicas.describe_change(before, after) == 'lost: replica 1; joined: replica 1'


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
def test_all_but_one_are_killed_then_the_lighthouse_one_hangs_and_a_signal_stops_all(dataset, tmp_path, alone):
    keys = ['--max_iters=300', '--lr_decay_iters=300', '--eval_interval=20', '--replica_timeout=5']
    with ReplicaRun(tmp_path, dataset, *keys, replicas=3) as run:
        run.wait_for_members(3)
        run.kill((0, 0), (2, 0))
        run.wait_for_members(1)
        run.wait_for_members(3)
        os.kill(run.lighthouse()[0], signal.SIGKILL)
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
