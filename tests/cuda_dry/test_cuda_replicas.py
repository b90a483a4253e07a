"""Replicas on pretended GPUs: what an update asks of NCCL between them, and what they do without one of them."""
import json
import re

import pytest

from helpers import FAULTS
from replica_run import MORTAL, PACED, ReplicaRun, needs_torchft

pytestmark = needs_torchft
ORDER = str(FAULTS / 'record_order.py')
KEYS = '--device=cuda --on_nonfinite=skip --eval_interval=1000 --gradient_accumulation_steps=4'.split()
SHORT = '--n_embd=256 --n_layer=1 --max_iters=3 --lr_decay_iters=3'.split()  # 828,160 parameters
# {layout: (processes of a replica, the sums of an update)}. The first sum is of the loss and of other numbers. Then
# come gradients of 1 MiB or more by themselves, and others in buckets. With tp, the vocabulary is padded.
NUMBERS = '8 of float64'
UPDATES = {
    '': (1, [NUMBERS, '262144 of float32', '262144 of float32', '303872 of float32']),
    '--zero_stage=2': (2, [NUMBERS, '414080 of float32']),
    '--tp=2': (2, [NUMBERS, '418560 of float32'])}


def read_order(run, worker):
    """{iteration: [entry]} of a process, as faults/record_order.py writes them, from its begin to its votes."""
    found, entries = {}, None
    with open('{}.order.{}.{}'.format(run.out_dir, *worker)) as file:
        for entry in map(json.loads, file):
            if entry[0] == 'iteration':
                entries = found.setdefault(entry[1], [])
            elif entries is not None:
                entries.append(entry)
                if entry[0] == 'vote':
                    entries = None
    return found


@pytest.mark.parametrize('layout', UPDATES)
def test_update_adds_up_in_one_order_and_waits_after_the_last_sum_alone(dataset, tmp_path, layout):
    nproc, expected = UPDATES[layout]
    with ReplicaRun(tmp_path, dataset, *KEYS, *SHORT, *layout.split(), nproc=nproc, faults=[ORDER]) as run:
        ended = run.end()
    assert [line['members'] for line in ended.updates] == [2, 2, 2]
    for rank in range(nproc):
        entries, *others = [read_order(run, (replica, rank))[3] for replica in range(2)]
        assert others == [entries]
        quorum, *passes = entries[:-len(expected) - 2]
        sums, end = entries[len(passes) + 1:-2], entries[-2:]
        assert quorum == ['quorum', 2]
        assert [(name, what) for name, _, _, what in sums] == [('ncclAllReduce', what) for what in expected]
        streams = {stream for _, _, stream, _ in sums}
        assert len(streams) == 1 and not streams & {0, *(stream for _, _, stream, _ in passes)}
        assert all(what == '' for _, _, _, what in passes) and bool(passes) == (nproc > 1)
        assert end == [['wait', 'kilogpt/replicas/membership.py vote'], ['vote', True]]


@pytest.mark.parametrize('mistake, sizes', [('swapped', {262144, 303872}), ('left_out', {303872, 303616})])
def test_different_sums_are_found_by_both_sizes(dataset, tmp_path, monkeypatch, mistake, sizes):
    """Replica 1 adds up gradients in another order, or leaves out the last one, of 256 elements."""
    monkeypatch.setenv('ORDER', mistake)
    with ReplicaRun(tmp_path, dataset, *KEYS, *SHORT, faults=[ORDER]) as run:
        run.wait_for(lambda: 'collectives differ' in run.log.read_text())
    found = re.search('collectives differ: rank . of 2 calls (.*), another rank (.*)', run.log.read_text())
    assert set(found.groups()) == {f'ncclAllReduce of {size} elements of type 7' for size in sizes}


def test_others_go_on_without_a_replica_whose_sums_hang_on_the_device(dataset, tmp_path):
    keys = '--max_iters=200', '--lr_decay_iters=200', '--zero_stage=2'
    with ReplicaRun(tmp_path, dataset, *KEYS, *keys, nproc=2, faults=[ORDER, PACED, MORTAL]) as run:
        run.wait_for_members(2)
        survivors = {worker: pid for worker, pid in run.workers().items() if worker[0] == 0}
        (run.kills / '1.1.backward').write_text('0')
        run.wait_for_members(1)
        run.wait_for_members(2)
        assert survivors.items() <= run.workers().items()
        ended = run.end()
    assert [line['iter'] for line in ended.updates] == list(range(1, 201))
    recovered, = [line for line in ended.updates if line['recovered_ms']]
    assert recovered['members'] == 1 and recovered['recovered_ms'] < 30_000  # replica_timeout is twice that
    for worker in survivors:
        entries = read_order(run, worker)[recovered['iter']]
        votes = [entry for entry in entries if entry[0] in ('quorum', 'vote')]
        assert votes == [['quorum', 2], ['vote', False], ['quorum', 1], ['vote', True]]
