"""Islands that are separate jobs: killed, stopped, without a server, and compared with one torchrun."""
import contextlib
import json
import os
import pathlib
import random
import shutil
import signal
import subprocess
import sys
import time
from functools import partial

import numpy as np
import pytest
from test_server import Server

from helpers import (FAULTS, ROOT, TINY, assert_same_tensors, kill_node, newest_tensors, newest_weights,
                     read_run, side_by_side)

SECRET = 'a secret of the tests'
TIMEOUT = 300  # seconds that a step may take on a loaded machine
# An iteration of TINY has 12 sequences, which divide over 2 and 3 islands.
JOBS = ['--outer_interval=4', '--eval_interval=100', '--max_iters=12', '--keep_checkpoints=1']


@pytest.fixture(autouse=True)
def secret(monkeypatch):
    monkeypatch.setenv('KILOGPT_SECRET', SECRET)


@pytest.fixture
def server(tmp_path):
    server = Server(tmp_path)
    yield server
    server.kill()
    assert 'Traceback' not in server.log.read_text(), server.log.read_text()


class Job:
    """An island that is a separate job, launched as a user does. Its updates are slow until `end`."""

    def __init__(self, folder, dataset, address, island, *arguments, nproc=1):
        self.out_dir = folder / f'island_{island}' if island else folder
        self.log = folder.with_suffix(f'.{island}.log')
        self.hurry_file = folder.with_suffix('.hurry')
        launcher = ['-m', 'torch.distributed.run', '--standalone', f'--nproc_per_node={nproc}']
        self.command = [sys.executable, *(launcher if nproc > 1 else ()), 'train.py',
                        str(FAULTS / 'paced_updates.py'), *TINY, *JOBS, *arguments,
                        f'--dataset={dataset}', f'--out_dir={folder}', f'--outer_store={address}',
                        f'--island={island}', '--init_from=auto']
        self.start()

    def start(self):
        with open(self.log, 'a') as file:
            self.process = subprocess.Popen(self.command, cwd=ROOT, stdout=file, stderr=file,
                                            env=dict(os.environ, OMP_NUM_THREADS='1',
                                                     HURRY=str(self.hurry_file)))

    def kill(self):
        kill_node(self.process)

    def exchanges(self):
        """{number: line} of the exchanges that this island has taken part in, the last line of each."""
        path = self.out_dir / 'metrics.jsonl'
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        lines = [json.loads(line) for line in lines if line.endswith('\n')]
        return {line['exchange']: line for line in lines if 'exchange' in line}

    def newest(self):
        return max(self.exchanges(), default=-1)

    def wait_for(self, condition, seconds=TIMEOUT):
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline and self.process.poll() in (None, 0), self.log.read_text()
            time.sleep(0.05)

    def pass_exchanges(self, count):
        """Wait until this island has finished `count` more exchanges."""
        wanted = self.newest() + count
        self.wait_for(lambda: self.newest() >= wanted)

    def end(self, hurry=True):
        """Wait until the run is over; returns its exit code. hurry: let the updates be fast from now on."""
        if hurry:
            self.hurry_file.touch()
        return self.process.wait(TIMEOUT)


@contextlib.contextmanager
def jobs(folder, dataset, server, *arguments, islands=3):
    """One job for each island, all with the same out_dir. The end of the context kills them."""
    started = [Job(folder, dataset, server.address, island, f'--islands={islands}', *arguments)
               for island in range(islands)]
    try:
        yield started
    finally:
        for job in started:
            job.kill()


def all_exchanges(started):
    """{number: facts} of the exchanges of all islands, which must say the same of each exchange."""
    found = {}
    for job in started:
        for number, line in job.exchanges().items():
            facts = {key: line[key] for key in ('iter', 'islands', 'sequences')}
            assert found.setdefault(number, facts) == facts
    return found


def count_sequences(exchanges):
    """(sequences trained on, those trained on twice, those skipped before the last one)."""
    numbers = []
    for line in exchanges.values():
        for begin, end in line['sequences']:
            numbers += range(begin, end)
    return len(numbers), len(numbers) - len(set(numbers)), max(numbers) + 1 - len(set(numbers))


# --- jobs and one torchrun --------------------------------------------------------------------------------

def assert_jobs_equal_one_torchrun(train, server, folder, *arguments, islands=2, nproc=1):
    arguments = [*JOBS, f'--islands={islands}', *arguments]
    calls = [partial(train, *arguments, f'--outer_store={server.address}', f'--island={island}',
                     out_dir=folder / 'jobs', nproc=nproc, timeout=TIMEOUT) for island in range(islands)]
    side_by_side(*calls)
    train(*arguments, out_dir=folder / 'torchrun', nproc=islands * nproc, timeout=TIMEOUT)
    exchanges = {}
    for name in ('', *(f'island_{island}' for island in range(1, islands))):
        run, other = read_run(folder / 'jobs' / name), read_run(folder / 'torchrun' / name)
        losses = [{i: line['loss'] for i, line in one.lines.items()} for one in (run, other)]
        assert losses[0] == losses[1] and len(losses[0]) == 12
        assert [line['val_loss'] for line in run.evals.values()] == [
            line['val_loss'] for line in other.evals.values()]
        assert_same_tensors(newest_tensors(run.out_dir), newest_tensors(other.out_dir))
        lines = map(json.loads, (run.out_dir / 'metrics.jsonl').read_text().splitlines())
        exchanges |= {line['exchange']: line for line in lines if 'exchange' in line}
        assert {line['islands'] == list(range(islands)) for line in exchanges.values()} == {True}
    return exchanges


@pytest.mark.slow  # three scripts that import torch
def test_jobs_equal_islands_of_one_torchrun_to_the_bit(train, server, tmp_path):
    exchanges = assert_jobs_equal_one_torchrun(train, server, tmp_path)
    assert list(exchanges) == [0, 1, 2] and count_sequences(exchanges) == (12 * 12, 0, 0)


@pytest.mark.slow
@pytest.mark.drawn(1)
@pytest.mark.parametrize('nproc, layout', [
    (1, '--outer_fragments=2 --outer_compress=int8 --outer_delay=1'), (2, '--zero_stage=3 --outer_mix=0.5'),
    (2, '--pp=2')])
def test_jobs_of_other_layouts_equal_islands_of_one_torchrun(train, server, tmp_path, nproc, layout):
    assert_jobs_equal_one_torchrun(train, server, tmp_path, *layout.split(), nproc=nproc)


# --- kills, stops, restarts -------------------------------------------------------------------------------

def run_with_kills(folder, dataset, server, kills, iterations, timeout=10.0, seed=0):
    """Kill and restart islands at random moments; returns (jobs, longest waits of the others in seconds)."""
    generator, longest_waits = random.Random(seed), []
    with jobs(folder, dataset, server, f'--max_iters={iterations}', f'--lr_decay_iters={iterations}',
              '--save_interval=10', f'--outer_timeout={timeout}') as started:
        for job in started:
            job.wait_for(lambda: job.newest() >= 1)
        for _ in range(kills):
            time.sleep(generator.uniform(0, 1.5))
            lost = generator.choice(started)
            others = [job for job in started if job is not lost]
            number = min(job.newest() for job in others)
            lost.kill()
            for job in others:
                job.pass_exchanges(2)
            waits = [0.0]
            for job in others:
                waits += [line['wait_s'] for other, line in job.exchanges().items() if other > number]
            longest_waits.append(max(waits))
            lost.start()
            since = max(job.newest() for job in others)
            lost.wait_for(lambda: lost.newest() > since
                          and len(lost.exchanges()[lost.newest()]['islands']) == 3)
        assert [job.end() for job in started] == [0, 0, 0]
    return started, longest_waits


@pytest.mark.slow
def test_killed_islands_return_and_no_sequence_is_trained_on_twice(dataset, server, tmp_path):
    started, _ = run_with_kills(tmp_path / 'run', dataset, server, kills=2, iterations=600)
    found = all_exchanges(started)
    assert [] != [line for line in found.values() if len(line['islands']) == 2]
    assert found[max(found)]['islands'] == [0, 1, 2]
    count, twice, never = count_sequences(found)
    assert count > 5000 and twice == 0 and never == 0
    shared = [newest_weights(job.out_dir) for job in started]
    assert_same_tensors(shared[0], shared[1])
    assert_same_tensors(shared[0], shared[2])


@pytest.mark.slow
def test_others_continue_without_a_suspended_island_which_then_joins_again(dataset, server, tmp_path):
    with jobs(tmp_path / 'run', dataset, server, '--max_iters=200', '--outer_timeout=10') as started:
        for job in started:
            job.wait_for(lambda: job.newest() >= 0)
        started[1].process.send_signal(signal.SIGSTOP)
        for job in (started[0], started[2]):
            job.pass_exchanges(4)
        started[1].process.send_signal(signal.SIGCONT)
        assert [job.end() for job in started] == [0, 0, 0]
    found = all_exchanges(started)
    assert [0, 2] in [line['islands'] for line in found.values()]
    assert found[max(found)]['islands'] == [0, 1, 2] and count_sequences(found)[1:] == (0, 0)
    assert 'is behind the others' in started[1].log.read_text()


@pytest.mark.slow
def test_island_without_a_checkpoint_does_not_take_that_of_another(train, server, tmp_path):
    """Island 0 might delete the checkpoint. The island joins the others instead, or begins if it is alone."""
    arguments = [*JOBS, '--islands=2', f'--outer_store={server.address}', '--outer_timeout=0.5']
    train(*arguments, '--init_from=auto', out_dir=tmp_path / 'run')
    second = train(*arguments, '--island=1', '--init_from=auto', out_dir=tmp_path / 'run')
    assert 'resuming' not in second.stdout and 'is behind the others' in second.stdout
    assert list(read_run(tmp_path / 'run' / 'island_1').lines) == list(range(1, 13))


@pytest.mark.slow
@pytest.mark.parametrize('layout, nproc', [('--zero_stage=0', 1), ('--zero_stage=3', 2)])
def test_island_of_two_processes_that_starts_late_joins(dataset, server, tmp_path, layout, nproc):
    """With replicas, which an island of one process does not have, and with sharded parameters."""
    arguments = ['--islands=2', layout, '--max_iters=160', '--outer_timeout=10', '--outer_fragments=2',
                 '--outer_compress=bf16', f'--dataset={dataset}']
    with contextlib.ExitStack() as stack:
        first = Job(tmp_path / 'run', dataset, server.address, 0, *arguments, nproc=nproc)
        stack.callback(first.kill)
        first.wait_for(lambda: first.newest() >= 3)
        second = Job(tmp_path / 'run', dataset, server.address, 1, *arguments, nproc=2)
        stack.callback(second.kill)
        second.wait_for(lambda: second.newest() >= 0)
        assert [first.end(), second.end()] == [0, 0]
    found = all_exchanges([first, second])
    assert found[3]['islands'] == [0] and found[max(found)]['islands'] == [0, 1]
    assert count_sequences(found)[1:] == (0, 0)
    assert 'joins the others at iteration' in second.log.read_text()
    assert_same_tensors(newest_weights(first.out_dir), newest_weights(second.out_dir))


@pytest.mark.slow
def test_server_that_is_killed_and_started_again_changes_nothing(train, dataset, server, tmp_path):
    with jobs(tmp_path / 'run', dataset, server, '--max_iters=40', islands=2) as started:
        started[0].wait_for(lambda: started[0].newest() >= 1)
        for _ in range(3):
            server.kill()
            time.sleep(1)
            server.start()
            started[0].pass_exchanges(2)
        assert [job.end() for job in started] == [0, 0]
    together = train(*JOBS, '--max_iters=40', '--islands=2', out_dir=tmp_path / 'torchrun', nproc=2)
    losses = {i: line['loss'] for i, line in read_run(started[0].out_dir).lines.items()}
    assert losses == {i: line['loss'] for i, line in together.lines.items()}


@pytest.mark.slow
def test_signal_ends_the_wait_for_other_islands(train, dataset, server, tmp_path):
    """An island that was stopped while it waited continues to the bit."""
    with jobs(tmp_path / 'run', dataset, server, islands=2) as started:
        started[1].wait_for(lambda: started[1].newest() >= 0)
        started[1].process.terminate()
        assert started[1].end(hurry=False) == 143
        iteration = max(read_run(started[1].out_dir).lines)
        time.sleep(2)  # until island 0 waits at its next exchange
        started[0].process.terminate()
        assert started[0].end(hurry=False) == 143
        for job in started:
            job.start()
        assert [job.end() for job in started] == [0, 0] and iteration < 12
    together = train(*JOBS, '--islands=2', out_dir=tmp_path / 'torchrun', nproc=2)
    losses = {i: line['loss'] for i, line in read_run(started[0].out_dir).lines.items()}
    assert losses == {i: line['loss'] for i, line in together.lines.items()}


@pytest.mark.slow
def test_run_without_a_server_ends_with_a_checkpoint(dataset, server, tmp_path):
    with jobs(tmp_path / 'run', dataset, server, '--comm_timeout=10', '--max_iters=40', islands=2) as started:
        started[0].wait_for(lambda: started[0].newest() >= 1)
        server.kill()
        assert [job.end(hurry=False) for job in started] == [1, 1]
        for job in started:
            text = job.log.read_text()
            assert text.count('does not answer') == 1 and 'did not answer for 1' in text
            assert 'Traceback' not in text
            job.out_dir.joinpath('stopped').write_text(str(max(read_run(job.out_dir).lines)))
        server.start()
        for job in started:
            job.start()
        assert [job.end() for job in started] == [0, 0]
        for job in started:
            assert f'at iteration {job.out_dir.joinpath("stopped").read_text()}' in job.log.read_text()


# --- bad input --------------------------------------------------------------------------------------------

@pytest.mark.parametrize('arguments, message', [
    ('--outer_store=nowhere --islands=2', "outer_store is 'nowhere': use HOST:PORT"),
    ('--outer_store=127.0.0.1:1 --islands=2 --island=2',
     'island is 2: it must be at least 0 and below islands=2'),
    ('--island=1 --islands=2', 'island says which island a job is: set outer_store too'),
    ('--outer_store=127.0.0.1:1 --islands=2 --outer_timeout=0', 'outer_timeout is 0.0: it must be above 0')])
def test_bad_settings_of_jobs_end_the_run_in_one_sentence(train, arguments, message):
    run = train(*arguments.split(), check=False)
    assert run.returncode == 1 and message in run.stderr and run.stderr.count('\n') == 1


@pytest.mark.slow
def test_island_with_other_data_is_refused_in_one_sentence(dataset, server, tmp_path):
    other = pathlib.Path(shutil.copytree(dataset, tmp_path / 'other'))
    np.fromfile(dataset / 'train.bin', '<u2')[:19_000].tofile(other / 'train.bin')
    first = Job(tmp_path / 'run', dataset, server.address, 0, '--islands=2')
    with contextlib.ExitStack() as stack:
        stack.callback(first.kill)
        first.wait_for((tmp_path / 'run' / 'metrics.jsonl').exists)
        second = Job(tmp_path / 'run', other, server.address, 1, '--islands=2')
        stack.callback(second.kill)
        assert second.end(hurry=False) == 1
        sentence = 'training_tokens is 19000 here and 20000 on the island that came first'
        assert sentence in second.log.read_text() and 'Traceback' not in second.log.read_text()
        assert first.process.poll() is None


@pytest.mark.slow
def test_missing_server_ends_the_run_in_one_sentence(train):
    run = train('--islands=2', '--outer_store=127.0.0.1:1', check=False)
    assert run.returncode == 1 and 'outer_store=127.0.0.1:1 cannot be reached' in run.stderr
    assert run.stderr.count('\n') == 1


def test_jobs_need_a_secret(train):
    run = train('--islands=2', '--outer_store=127.0.0.1:1', check=False, env=dict(KILOGPT_SECRET=''))
    assert run.returncode == 1 and 'KILOGPT_SECRET is not set' in run.stderr and run.stderr.count('\n') == 1


if __name__ == '__main__':  # python tests/islands/test_jobs.py DATASET FOLDER KILLS ITERATIONS SEED
    os.environ['KILOGPT_SECRET'] = SECRET
    _, data, folder_name, kill_count, last, first_seed = sys.argv
    output = pathlib.Path(folder_name)
    output.mkdir()
    running = Server(output)
    islands_of_run, waits = run_with_kills(output / 'run', data, running, int(kill_count), int(last),
                                           seed=int(first_seed))
    running.kill()
    print('seconds of waiting:', [round(seconds, 1) for seconds in waits])
    print('sequences, twice, never:', count_sequences(all_exchanges(islands_of_run)))
    for one in islands_of_run:
        print(one.out_dir, list(read_run(one.out_dir).evals.values())[-1])
