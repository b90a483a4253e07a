"""What is not a death: a process that hangs, a full disk, a lighthouse or a network that is away for a while."""
import contextlib
import os
import resource
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


def process_hangs(dataset, folder, train, request):
    """Other threads of the process that hangs go on, such as the one that tells the lighthouse that it lives."""
    (folder / 'impatient.py').write_text('replica_timeout, comm_timeout = 2.0, 12\n')
    keys = ['--max_iters=90', '--lr_decay_iters=90', '--eval_interval=40']
    with ReplicaRun(folder, dataset, str(folder / 'impatient.py'), *keys, replicas=3) as run:
        run.wait_for_members(3)
        others = {worker: pid for worker, pid in run.workers().items() if worker[0] != 1}
        (run.kills / '1.0.forward').write_text('hang')
        run.wait_for_members(2)  # the lighthouse and the others wait for 2 seconds each, and not for 60
        assert 'no progress' not in run.log.read_text()
        run.wait_for_members(3)
        assert others.items() <= run.workers().items()
        ended = run.end()
    assert '3 -> 2 (lost: replica 1)\n' in ended.text and '2 -> 3 (joined: replica 1)\n' in ended.text
    assert 'error: no progress for 12 seconds (comm_timeout). Hung: rank 0 (host ' in ended.text
    assert_same_run(ended, train(DOUBLE, *keys))


def disk_is_full_until_another_leads(dataset, folder, train, request):
    """The files of replica 0 cannot grow. Then it is killed, and comes back with room again."""
    keys = ['--max_iters=60', '--lr_decay_iters=60', '--eval_interval=6']
    with ReplicaRun(folder, dataset, *keys) as run:
        run.wait_for_members(2)
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


def last_checkpoint_finds_no_room(dataset, folder, train, request):
    with ReplicaRun(folder, dataset) as run:
        run.wait_for_members(2)
        resource.prlimit(run.workers()[0, 0], resource.RLIMIT_FSIZE, (20_000, resource.RLIM_INFINITY))
        ended = run.end(1)
    sentence = 'error: the run ended at iteration 12, but its last checkpoint could not be saved ('
    assert ended.text.count(sentence) == 1 and 'Traceback' not in ended.text


def network_is_cut(dataset, folder, train, request):
    """Two nodes with a replica each. The lighthouse is on the first, which goes on alone meanwhile."""
    two_nodes = request.getfixturevalue('two_nodes')
    keys = ['--max_iters=90', '--lr_decay_iters=90', '--eval_interval=20']
    command = [sys.executable, 'train.py', DOUBLE, PACED, *TINY, *keys, f'--dataset={dataset}',
               f'--out_dir={folder / "out"}', '--fault_tolerance=replicas', '--replica_timeout=2']
    environment = dict(os.environ, OMP_NUM_THREADS='1', HURRY=str(folder / 'hurry'), PACE='0.7',
                       NUM_REPLICA_GROUPS='2', TORCHFT_LIGHTHOUSE='http://node0:29510', RUST_LOG='error')

    def start(node, command, **more):
        with open(folder / f'log{node}', 'a') as file:
            process = subprocess.Popen(two_nodes(node, command), cwd=ROOT, stdin=subprocess.PIPE, stdout=file,
                                       stderr=file, env=environment | more)
        stack.callback(process.kill)
        return process

    def set_link(state):
        namespace = two_nodes(1, [])[3]
        subprocess.run(['ip', '-n', namespace, 'link', 'set', 'veth1', state], check=True)

    def wait_for_members(count):
        def is_reached():
            found = read_updates(folder / 'out')
            return found and found[-1]['members'] == count

        wait_for(is_reached, lambda: [log.read_text() for log in folder.glob('log?')])

    with contextlib.ExitStack() as stack:
        start(0, [sys.executable, '-c', LIGHTHOUSE, '0.0.0.0:29510', '2000'])
        replicas = [start(node, command, REPLICA_GROUP_ID=str(node)) for node in range(2)]
        wait_for_members(2)
        set_link('down')
        wait_for_members(1)
        time.sleep(20)
        set_link('up')
        wait_for_members(2)
        (folder / 'hurry').touch()
        assert [replica.wait(timeout=200) for replica in replicas] == [0, 0]
    text = (folder / 'log1').read_text()
    assert text.count('the lighthouse at http://node0:29510 does not answer (') == 1
    updates = read_updates(folder / 'out')
    assert_same_run(SimpleNamespace(**vars(read_run(folder / 'out')), updates=updates), train(DOUBLE, *keys))


@needs_torchft
@pytest.mark.slow
@pytest.mark.drawn(2)
@pytest.mark.parametrize('outage', [
    process_hangs, disk_is_full_until_another_leads, last_checkpoint_finds_no_room,
    pytest.param(network_is_cut, marks=pytest.mark.skipif(os.getuid() != 0, reason='only root can cut a network'))],
    ids=lambda outage: outage.__name__)
def test_outage(dataset, tmp_path, train, request, outage):
    outage(dataset, tmp_path, train, request)
