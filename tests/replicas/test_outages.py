"""What is not a death: a process that hangs, a full disk, a lighthouse or a network that is away for a while."""
import contextlib
import os
import resource
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest

from helpers import ROOT, TINY, read_run
from replica_run import (
    DOUBLE, PACED, ReplicaRun, assert_same_run, needs_torchft, read_updates, wait_for)

from kilogpt.replicas.launcher import LIGHTHOUSE


@needs_torchft
def test_launcher_reads_replica_timeout_from_a_config_file(dataset, tmp_path):
    """It is how long the lighthouse waits for a replica that does not answer."""
    (tmp_path / 'patient.py').write_text('replica_timeout = 7.5\n')
    with ReplicaRun(tmp_path, dataset, str(tmp_path / 'patient.py'), faults=()) as run:
        run.wait_for(run.lighthouse)
        assert run.lighthouse()[1][-1] == '7500'


@needs_torchft
@pytest.mark.slow
def test_hung_process_is_left_out_then_named_and_its_replica_comes_back(dataset, tmp_path, train):
    """The other process of the replica waits for the one that hangs, and its server still answers."""
    (tmp_path / 'impatient.py').write_text('replica_timeout, comm_timeout = 2.0, 6\n')
    keys = ['--max_iters=120', '--lr_decay_iters=120', '--eval_interval=40', '--zero_stage=2']
    with ReplicaRun(tmp_path, dataset, str(tmp_path / 'impatient.py'), *keys, nproc=2) as run:
        run.wait_for(lambda: len(run.updates()) > 3 and run.updates()[-1]['members'] == 2)
        survivors = {worker: pid for worker, pid in run.workers().items() if worker[0] == 0}
        began = time.monotonic()
        os.kill(run.workers()[1, 1], signal.SIGSTOP)
        run.wait_for_members(1)
        assert time.monotonic() - began < 20  # the lighthouse and the others wait 2 seconds, not 60
        run.wait_for_members(2)
        assert survivors.items() <= run.workers().items()
        ended = run.end()
    assert ' -> 1 (lost: replica 1)\n' in ended.text and ' -> 2 (joined: replica 1)\n' in ended.text
    assert 'error: no progress for 6 seconds (comm_timeout). Hung: rank 1' in ended.text
    assert_same_run(ended, train(DOUBLE, *keys[:3]))


@needs_torchft
@pytest.mark.slow
def test_what_a_full_disk_keeps_from_the_log_is_written_by_the_next_leader(dataset, tmp_path, train):
    """The files of replica 0 cannot grow. Then it is killed, and comes back with room again."""
    keys = ['--max_iters=60', '--lr_decay_iters=60', '--eval_interval=6']
    with ReplicaRun(tmp_path, dataset, *keys) as run:
        run.wait_for(lambda: len(run.updates()) > 3 and run.updates()[-1]['members'] == 2)
        resource.prlimit(run.workers()[0, 0], resource.RLIMIT_FSIZE, (1, resource.RLIM_INFINITY))
        run.wait_for(lambda: 'could not be saved (' in run.log.read_text())
        n_updates = len(run.updates())
        time.sleep(2)
        assert len(run.updates()) == n_updates
        run.kill((0, 0))
        run.wait_for_members(1)
        run.wait_for_members(2)
        ended = run.end()
    assert ended.text.count('warning: metrics.jsonl could not be written ([Errno 27] File too large)') == 1
    assert_same_run(ended, train(DOUBLE, *keys))


@needs_torchft
@pytest.mark.slow
def test_run_whose_last_checkpoint_finds_no_room_fails(dataset, tmp_path):
    with ReplicaRun(tmp_path, dataset) as run:
        run.wait_for_members(2)
        resource.prlimit(run.workers()[0, 0], resource.RLIMIT_FSIZE, (20_000, resource.RLIM_INFINITY))
        ended = run.end(1)
    sentence = 'error: the run ended at iteration 12, but its last checkpoint could not be saved ('
    assert ended.text.count(sentence) == 1 and 'Traceback' not in ended.text


@needs_torchft
@pytest.mark.slow
@pytest.mark.skipif(os.name != 'posix' or os.getuid() != 0, reason='only root can make network namespaces')
def test_replica_that_the_network_cuts_off_catches_up(dataset, tmp_path, train, two_nodes):
    """Two nodes with a replica each. The lighthouse is on the first, which goes on alone meanwhile."""
    keys = ['--max_iters=60', '--lr_decay_iters=60', '--eval_interval=20']
    command = [sys.executable, 'train.py', DOUBLE, PACED, *TINY, *keys, f'--dataset={dataset}',
               f'--out_dir={tmp_path / "out"}', '--fault_tolerance=replicas', '--replica_timeout=2']
    environment = dict(os.environ, OMP_NUM_THREADS='1', HURRY=str(tmp_path / 'hurry'), NUM_REPLICA_GROUPS='2',
                       TORCHFT_LIGHTHOUSE='http://node0:29510')

    def start(node, command, **more):
        with open(tmp_path / f'log{node}', 'a') as file:
            process = subprocess.Popen(two_nodes(node, command), cwd=ROOT, stdin=subprocess.PIPE, stdout=file,
                                       stderr=file, env=environment | more)
        stack.callback(process.kill)
        return process

    def set_link(state):
        namespace = two_nodes(1, [])[3]
        subprocess.run(['ip', '-n', namespace, 'link', 'set', 'veth1', state], check=True)

    def wait_for_members(count):
        def is_reached():
            found = read_updates(tmp_path / 'out')
            return found and found[-1]['members'] == count

        wait_for(is_reached, lambda: [log.read_text() for log in tmp_path.glob('log?')])

    with contextlib.ExitStack() as stack:
        start(0, [sys.executable, '-c', LIGHTHOUSE, '0.0.0.0:29510', '2000'])
        replicas = [start(node, command, REPLICA_GROUP_ID=str(node)) for node in range(2)]
        wait_for_members(2)
        set_link('down')
        wait_for_members(1)
        time.sleep(8)
        set_link('up')
        wait_for_members(2)
        (tmp_path / 'hurry').touch()
        assert [replica.wait(timeout=200) for replica in replicas] == [0, 0]
    text = (tmp_path / 'log1').read_text()
    assert text.count('the lighthouse at http://node0:29510 does not answer (') == 1
    updates = read_updates(tmp_path / 'out')
    assert_same_run(SimpleNamespace(**vars(read_run(tmp_path / 'out')), updates=updates), train(DOUBLE, *keys))
