"""kilogpt.replay: recomputed iterations agree with the log, and differences are found."""
import shutil
from types import SimpleNamespace

import numpy as np
import pytest
from helpers import FAULTS, run_script

from kilogpt.prove.recorded import Comparison

RUN = '--max_iters=12 --eval_interval=100 --save_interval=4 --eval_iters=0 --keep_checkpoints=9'.split()


def replayed(run, which, *options, nproc=1):
    return run_script('kilogpt.replay', run.out_dir, which, f'--nproc_per_node={nproc}', *options,
                      check=False)


def contents(folder):
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob('*') if path.is_file()}


@pytest.mark.slow
def test_run_agrees_with_its_log_to_the_bit_and_is_left_as_it_was(train):
    # lr_decay_iters follows the run's max_iters, not the replay's.
    run = train(*RUN, '--save_interval=6', '--dropout=0.1', '--lr_decay_iters=0')
    before = contents(run.out_dir)
    whole = replayed(run, 'all')
    assert whole.returncode == 0 and 'replay: 12 iterations agree with' in whole.stdout, whole.stderr
    assert 'metrics.jsonl to the bit' in whole.stdout and contents(run.out_dir) == before
    one = replayed(run, '8')
    assert 'iter 6:' not in one.stdout and 'replay: 2 iterations agree with' in one.stdout, one.stderr
    assert 'to the bit' in one.stdout
    text = (run.out_dir / 'replay_00000008' / 'batch.txt').read_text()
    assert text.count('--- token ') == 12
    other = replayed(run, '8', nproc=2)
    assert 'error: dropout=0.1 draws other random numbers in another layout' in other.stderr


ONE_PROCESS = ('--zero_stage=0 --dp_replicate=1 --tp=1 --cp=1 --pp=1 --ep=1 --cpu_offload=False '
               '--activation_checkpoint=none').split()


@pytest.mark.slow
@pytest.mark.drawn(1)
@pytest.mark.parametrize('layout', [
    '--zero_stage=3', '--pp=2 --pp_schedule=zbv', '--mlp=moe --ep=2', '--grad_compress=bf16'])
def test_layout_agrees_with_itself_to_the_bit_and_with_one_process_within_bounds(train, layout):
    nproc = 2
    run = train(*RUN, *layout.split(), nproc=nproc)
    same = replayed(run, 'all', nproc=nproc)
    assert same.returncode == 0 and 'to the bit' in same.stdout, same.stderr
    if 'grad_compress' not in layout:  # one process does not compress gradients
        one = replayed(run, 'all', *ONE_PROCESS)
        assert one.returncode == 0 and 'losses within' in one.stdout, one.stderr


@pytest.mark.slow
@pytest.mark.parametrize('what', ['gradient', 'weight'])
def test_flipped_bit_is_found_at_its_iteration(train, what):
    run = train(*RUN, faults=[FAULTS / 'flip_bit.py'], env=dict(FAULT_WHAT=what, FAULT_ITERATION='6'))
    found = replayed(run, 'all')
    assert found.returncode == 1, found.stderr
    iteration = dict(gradient=6, weight=7)[what]
    assert f'error: iteration {iteration} is the first that differs' in found.stderr, found.stderr


@pytest.mark.slow
def test_changed_batch_is_found_at_its_iteration(train, dataset, tmp_path):
    shutil.copytree(dataset, tmp_path / 'data')
    run = train(*RUN, f'--dataset={tmp_path}/data')
    tokens = np.fromfile(tmp_path / 'data' / 'train.bin', '<u2')
    first = replayed(run, '9', f'--dataset={tmp_path}/data')
    header = (run.out_dir / 'replay_00000009' / 'batch.txt').read_text().split('\n')[0]
    assert 'agree' in first.stdout
    tokens[int(header.split()[2]) + 3] ^= 1
    tokens.tofile(tmp_path / 'data' / 'train.bin')
    found = replayed(run, 'all', f'--dataset={tmp_path}/data')
    assert 'error: iteration 9 is the first that differs: loss is' in found.stderr, found.stderr


@pytest.mark.slow
def test_weights_that_changed_between_iterations_are_found_in_the_next_checkpoint(train):
    run = train(*RUN, faults=[FAULTS / 'flip_bit.py'], env=dict(FAULT_WHAT='weight', FAULT_ITERATION='12'))
    found = replayed(run, 'all')
    assert 'error: the weights after iteration 12 differ' in found.stderr, found.stderr


@pytest.mark.slow
def test_one_iteration_is_profiled(train):
    run = train(*RUN)
    for iteration in (9, 12):  # the first after a checkpoint, and the last
        profiled = replayed(run, iteration, '--profile=True')
        assert 'profile of 1 iteration(s)' in profiled.stdout, profiled.stderr
        assert (run.out_dir / f'replay_{iteration:08d}' / 'trace.json').exists()


@pytest.mark.parametrize('which, message', [
    ('13', "the iteration to replay is '13': choose 'all', or one that"),
    pytest.param('first', "replay is 'first'", marks=pytest.mark.slow)])
def test_iteration_that_was_not_logged_is_refused(train, which, message):
    run = train(*RUN, '--max_iters=1')
    assert message in replayed(run, which).stderr


def test_replay_that_compared_nothing_does_not_say_that_it_agrees():
    """As after a rollback, when the log has other batches at these iterations."""
    run = SimpleNamespace(out_dir='out-run', lines={5: dict(iter=5, tokens=10)})
    comparison = Comparison(run, dict(dtype='float32', device='cpu'))
    comparison._compare_line(dict(iter=5, tokens=20), is_exact=True)
    with pytest.raises(ValueError, match='out-run/metrics.jsonl .* nothing was compared: replay another'):
        comparison.summary()
