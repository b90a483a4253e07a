"""A process that hangs is named: at the start or in the loop, on a CPU or a GPU."""
import json
import re

import pytest

from helpers import FAULTS, TESTS, TINY, torchrun
from kilogpt.run.watchdog import culprits, report_of

WITH_FAULT = TESTS / 'with_fault.py'


# --- runs -----------------------------------------------------------------------------------------------

@pytest.mark.slow
def test_process_that_hangs_is_named(dataset, tmp_path):
    arguments = [*TINY, '--max_iters=1000', '--eval_iters=0', '--comm_timeout=3', f'--dataset={dataset}',
                 f'--out_dir={tmp_path}/out']
    script = WITH_FAULT, FAULTS / 'hang_in_loader.py'
    with torchrun(['--standalone', '--nproc_per_node=2'], tmp_path, *script, *arguments) as process:
        assert process.wait(60) == 1
        output = process.output()
    # The watchdog prints one sentence.
    assert output.count('error: no progress') == 1, output
    sentence = re.search('^error: no progress .*', output, re.M)[0]
    assert 'for 3 seconds (comm_timeout)' in sentence
    assert re.search(r'Hung: rank 1 \(host .*, pid \d+, at batches.py:\d+ result_of', sentence)
    assert re.search(r'Waiting: rank 0 in gloo:all_?reduce at (train|apply|processes).py', sentence)
    # torchrun names the same rank.
    assert re.search(r'rank\s*: 1 ', output[output.index('Root Cause'):])
    # The folder has the stack that hangs, and the flight recorder of the process that waits.
    assert 'hanging_batch' in (tmp_path / 'out' / 'hang' / 'rank_1.txt').read_text()
    entries = json.loads((tmp_path / 'out' / 'hang' / 'rank_0.json').read_text())['cpu']['entries']
    assert [entry['process_group'][1] for entry in entries if not entry['retired']] == ['default_pg']


@pytest.mark.slow
@pytest.mark.parametrize('function', ['fill', 'load'])
def test_process_that_hangs_before_the_first_iteration_is_named(train, function):
    out_dir = train('--max_iters=1').out_dir if function == 'load' else None
    run = train('--init_from=auto', '--comm_timeout=1', out_dir=out_dir, nproc=2, check=False, timeout=60,
                faults=[FAULTS / 'hang_at_start.py'])
    assert run.codes == [1, 1]
    sentence = re.search('^error: no progress .*', run.stderr, re.M)[0]
    assert 'for 3 seconds (3 × comm_timeout until the first iteration is done)' in sentence
    assert re.search(r'Hung: rank 1 .* at start.py:\d+ load > hang_at_start.py', sentence)


# --- reports --------------------------------------------------------------------------------------------

def collective(number, state, group='0', backend='nccl', **entry):
    """An entry of a flight recorder. Entries of gloo do not have a state, but are retired at their end."""
    return dict(process_group=[group, 'default_pg'], profiling_name=f'{backend}:all_reduce', state=state,
                collective_seq_id=number, p2p_seq_id=0, retired=state == 'completed',
                time_discovered_started_ns=int(backend == 'nccl' and state != 'scheduled')) | entry


def hung(*ranks, in_distributed=False):
    """The culprits among ranks. ranks: for each a list of entries, or None without a report."""
    reports = {}
    for rank, entries in enumerate(ranks):
        if entries is not None:
            report = report_of(dict(nccl=dict(entries=entries)), 'train.py:1', in_distributed)
            reports[rank] = json.loads(json.dumps(report))  # as it arrives through the store
    return culprits(reports, len(ranks))


# The main thread has run ahead and waits in .item(). The device waits in its third collective.
ENDED = [collective(5, 'completed'), collective(6, 'completed')]
WAITS = [*ENDED, collective(7, 'started'), collective(8, 'scheduled')]


@pytest.mark.quick
def test_gpu_that_waits_in_a_collective_is_not_the_culprit():
    assert hung(WAITS, WAITS, WAITS) == []
    # Rank 1 is in Python, and its device has nothing to do.
    assert hung(WAITS, ENDED, WAITS) == [1]
    # The device of rank 1 hangs in a kernel, before two collectives.
    assert hung(WAITS, [*ENDED, collective(7, 'scheduled'), collective(8, 'scheduled')], WAITS) == [1]
    # Rank 2 sent no report.
    assert hung(WAITS, WAITS, None) == [2]


@pytest.mark.quick
def test_culprit_is_the_end_of_a_chain_of_processes_that_wait():
    """Ranks (0, 1) and (2, 3) share tensors, (0, 2) and (1, 3) gradients. The device of rank 3 hangs."""
    def rank(tp, dp, tp_state, dp_state):
        return [collective(4, 'completed', tp), collective(2, 'completed', dp),
                collective(5, tp_state, tp), collective(3, dp_state, dp)]

    ranks = [rank('tp0', 'dp0', 'completed', 'started'), rank('tp0', 'dp1', 'completed', 'started'),
             rank('tp1', 'dp0', 'started', 'scheduled'), rank('tp1', 'dp1', 'scheduled', 'scheduled')]
    assert hung(*ranks) == [3]
    # The result is the same if rank 3 waits in a collective in which no other rank takes part.
    ranks[3] = [*ranks[3][:2], collective(1, 'started', 'pp')]
    assert hung(*ranks) == [3]


@pytest.mark.quick
def test_process_in_an_earlier_collective_is_the_culprit():
    def gloo(**numbers):
        return [collective(number, 'scheduled', group, 'gloo') for group, number in numbers.items()]

    assert hung(gloo(a=7, b=3), gloo(a=6, b=3), gloo(a=7, b=3)) == [1]
    # Rank 1 waits in a point-to-point operation, which gloo does not record.
    ended = [collective(6, 'scheduled', 'a', 'gloo', retired=True)]
    assert hung(gloo(a=7), ended, in_distributed=True) == [1]
    # The ranks wait for each other.
    assert hung(gloo(a=7), gloo(b=7)) == []


@pytest.mark.quick
def test_without_timing_a_process_in_python_is_the_culprit():
    """With TORCH_NCCL_ENABLE_TIMING=0, the records do not say which collectives a device has begun."""
    untimed = [entry | dict(time_discovered_started_ns=0) for entry in ENDED]
    waits = [*untimed, collective(7, 'scheduled')]
    assert hung(waits, untimed, waits) == [1]
    assert hung(waits, waits, waits) == []


@pytest.mark.quick
def test_parts_of_a_launch_and_saves_are_not_waited_for():
    """NCCL records a batch of sends and receives as parts, which never end, and then as one launch."""
    parts = [collective(6, 'scheduled', p2p_seq_id=1, profiling_name=f'nccl:{name}')
             for name in ('send 0->1', 'recv 0<-1')]
    launch = collective(6, 'completed', p2p_seq_id=1, profiling_name='nccl:coalesced')
    saving = collective(9, 'scheduled', backend='gloo', process_group=['3', 'checkpoint'])
    report = report_of(dict(nccl=dict(entries=[*ENDED, *parts, launch, saving])), 'train.py:1', False)
    assert not report['unfinished'] and not report['waits'] and report['reached'] == {'nccl:0': 6}
