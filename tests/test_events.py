"""The events of every process of a run, and the page that merges them."""
import json
import os
import random
import re
import time

import pytest

from helpers import FAULTS, run_forked, run_script
from kilogpt.training.cluster import set_aside

PARTS = '--events=True', '--gradient_accumulation_steps=2', '--eval_iters=0', '--save_interval=6'


def page_of(out_dir, *options):
    """{event: the rest of its lines, without the time}, and the first line, of the page about a run."""
    first, *lines = run_forked('kilogpt.report', 'events', out_dir, *options).stdout.splitlines()
    found = {}
    for line in lines:
        kind, rest = re.fullmatch(r'\d{4}-\d\d-\d\d \d\d:\d\d:\d\d  (\S+(?: \S+)?) {2,}(.*)', line).groups()
        found.setdefault(kind, []).append(rest)
    return first, found


def run_with_fault(fault):
    """A runner of `train` that starts a run with a fault as a user does, so that Python's hooks are called."""
    return lambda script, *options, **others: run_script('tests/with_fault.py', fault, *options, **others)


def test_resumed_run_with_a_line_that_was_cut_off(train):
    run = train(*PARTS, '--max_iters=6', nproc=2)
    with open(run.out_dir / 'events' / 'rank_00001.jsonl', 'a') as file:
        file.write('{"event": "sl')
    train(*PARTS, '--init_from=resume', out_dir=run.out_dir, nproc=2)
    first, page = page_of(run.out_dir)
    assert first.startswith('2 ranks on 1 host, 2 starts, ') and first.endswith(' (1 unfinished line left out)')
    assert page['save'] == ['2 ranks, iteration 6', '2 ranks, iteration 12']
    assert page['end'] == ['2 ranks, iteration 6: finished', '2 ranks, iteration 12: finished']
    assert len(page['start']) == len(page['first step']) == 2 and 'silent' not in page
    assert len(os.listdir(os.path.join(set_aside(run.out_dir), 'events'))) == 2  # as a new run does
    assert not (run.out_dir / 'events').exists()


@pytest.mark.slow
@pytest.mark.parametrize('kind', ['RuntimeError', 'ValueError'])
def test_error_on_one_rank(train, kind):
    run = train(*PARTS, '--batch_size=6', nproc=3, check=False, runner=run_with_fault(FAULTS / 'end_rank.py'),
                env=dict(FAULT_PLACE='forward', FAULT_KIND=kind, FAULT_RANK='1'))
    _, page = page_of(run.out_dir)
    error, = page['error']
    assert re.fullmatch(rf'rank 1 \(.*\), iteration \d+: {kind}: planted on rank 1', error)
    lost, = page['lost']
    assert lost.startswith('rank ') and 'rank 0' in lost and 'rank 2' in lost and 'Connection closed' in lost
    assert 'end' not in page and 'silent' not in page


@pytest.mark.slow
def test_sentence_that_ends_a_run(train, tmp_path):
    """An error in the data of one process, which ends it by sys.exit."""
    fault = tmp_path / 'fault.py'
    fault.write_text('from data.loader import TokenLoader\n\n'
                     'def fail(self, starts):\n    raise ValueError("token 70 is too large")\n\n'
                     'TokenLoader.batch = fail\n')
    run = train('--events=True', '--eval_iters=0', check=False, runner=run_with_fault(fault))
    assert page_of(run.out_dir)[1]['error'] == ['1 rank, iteration 0: token 70 is too large']


def test_run_that_fails_says_why(train):
    run = train('--events=True', check=False, faults=[FAULTS / 'nan_loss.py'],
                env=dict(FAULT_CALL='4', FAULT_RANK='0', RANK='0'))
    page = page_of(run.out_dir)[1]
    assert page['error'][0].startswith('1 rank, iteration 1: the loss of iteration 2 is nan')
    assert page['end'] == ['1 rank, iteration 1: failed'] and run.returncode == 1


@pytest.mark.parametrize('place', ['forward', 'loader'])
def test_slow_iteration_names_the_rank_for_which_the_others_wait(train, place):
    run = train(*PARTS, '--max_iters=30', nproc=2, faults=[FAULTS / 'one_slow_iteration.py'],
                env=dict(FAULT_PLACE=place))
    slow = page_of(run.out_dir)[1]['slow']
    found = [line for line in slow if re.search(r'up to [12]\.\ds, usually 0\.\ds; slowest rank 1 \(', line)]
    assert len(found) == 1, slow
    assert ('s for data' in found[0]) == (place == 'loader')


@pytest.mark.slow
def test_killed_rank_leaves_no_end(train):
    run = train(*PARTS, '--batch_size=6', nproc=3, check=False, runner=run_with_fault(FAULTS / 'end_rank.py'),
                env=dict(FAULT_PLACE='forward', FAULT_KIND='SIGKILL', FAULT_RANK='1'))
    page = page_of(run.out_dir)[1]
    assert any('rank 1' in line and 'without an end' in line for line in page['silent']), page
    assert 'end' not in page


def test_events_do_not_end_a_run_that_cannot_write_them(train, tmp_path):
    fault = tmp_path / 'fault.py'
    fault.write_text('import os\nos.makedirs(os.environ["FOLDER"])\n'
                     'open(os.environ["FOLDER"] + "/events", "w").close()\n')
    run = train('--events=True', out_dir=tmp_path / 'out', faults=[fault], env=dict(FOLDER=str(tmp_path / 'out')))
    assert run.stderr.count('rank_00000.jsonl could not be written') == 1 and len(run.lines) == 12


# --- a thousand ranks -----------------------------------------------------------------------------------

def write_thousand(folder, iterations=0):
    """Events of 1,000 ranks on 125 hosts: a start, two saves, a slow iteration for rank 17, and its death.

    iterations: of further slow iterations, each on another rank.
    """
    draw, begin = random.Random(0), time.time() - 5000
    (folder / 'events').mkdir()
    for rank in range(1000):
        host = f'node-{rank // 8:03d}'

        def line(event, after, iteration, **values):
            at = begin + after + draw.random()
            return json.dumps(dict(event=event, time=at, rank=rank, host=host, iter=iteration, **values)) + '\n'

        lines = [line('start', 5 * (rank == 813), 0, pid=rank, ranks=1000), line('first_step', 40, 1, seconds=40.0)]
        lines += [line('save', 100 * number, 1000 * number) for number in (1, 2)]
        own = 5.0 if rank == 17 else 0.0
        lines.append(line('slow', 250, 2345, seconds=6.0, usual=1.0, waited_for_others=5.0 - own, waited_for_data=own))
        for number in range(iterations):
            is_slow = rank == number
            lines.append(line('slow', 260 + number, 2400 + number, seconds=4.0, usual=1.0,
                              waited_for_others=0.0 if is_slow else 3.0, waited_for_data=0.0))
        if rank != 17:
            port = draw.randrange(1024, 65536)
            what = f'RuntimeError: Connection closed by peer [10.0.{rank % 256}.7]:{port}'
            lines.append(line('lost', 400, 2500, what=what))
        path = folder / 'events' / f'rank_{rank:05d}.jsonl'
        path.write_text(''.join(lines))
        os.utime(path, (begin + 399, begin + 399))


def test_thousand_ranks_on_one_page(tmp_path):
    write_thousand(tmp_path)
    first, page = page_of(tmp_path)
    assert first == '1,000 ranks on 125 hosts, 1 start, 5,999 events'
    assert re.fullmatch(r'1,000 ranks within 5\.\ds, the last rank 813 \(node-101\)', page['start'][0])
    assert page['save'] == ['1,000 ranks, iteration 1000', '1,000 ranks, iteration 2000']
    assert page['slow'] == ['1,000 ranks, iteration 2345: up to 6.0s, usually 1.0s; slowest rank 17 (node-002); '
                            'rank 17 waited 5.0s for data']
    assert page['silent'] == ['rank 17 (node-002) without an end: killed, or still at work; '
                              'last event at iteration 2345']
    assert len(page['lost']) == 1 and page['lost'][0].startswith('999 ranks, iteration 2500: RuntimeError: Connection')


def test_many_slow_iterations_are_one_line(tmp_path):
    write_thousand(tmp_path, iterations=40)
    _, page = page_of(tmp_path)
    slow, = page['slow']
    assert slow.startswith('1,000 ranks, 41 iterations from 2345 to 2439: up to 6.0s, usually 1.0s')
    assert page['save'] == ['1,000 ranks, 2 iterations from 1000 to 2000']
    assert len(page_of(tmp_path, '--all')[1]['slow']) == 41


def test_folder_without_events_is_an_error(tmp_path):
    done = run_forked('kilogpt.report', 'events', tmp_path, check=False)
    assert done.returncode == 1
    assert done.stderr == f'error: {tmp_path}/events has no events: a run writes them with --events=True\n'
