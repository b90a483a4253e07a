"""Updates that are skipped because of their gradient norm: runs with planted bad batches."""
import json
import re
import shutil

import numpy as np
import pytest
import torch
from helpers import FAULTS, assert_near, assert_same_tensors, curve, newest_state, newest_tensors, run_script

from data.datasets import read_meta
from data.loader import TokenLoader
from kilogpt.run import checkpoint
from kilogpt.run.guard import NO_LIMIT, Spikes, Update

SEQUENCES = 12  # sequences in an iteration of helpers.TINY
LONG = '--max_iters=34 --lr_decay_iters=34 --eval_iters=0 --save_interval=20'.split()
SPIKES = [FAULTS / 'small_scale.py', FAULTS / 'spikes.py']
SKIPPED = [FAULTS / 'small_scale.py', FAULTS / 'leave_out.py']


def plant(dataset, folder, iterations):
    """A copy of a dataset in which the sequences of some iterations, counted from 1, contain the token 65."""
    shutil.copytree(dataset, folder)
    meta = read_meta(dataset) | dict(vocab_size=66)
    meta['chars'].append('~')
    (folder / 'meta.json').write_text(json.dumps(meta))
    loader = TokenLoader(str(folder), 'train', 32, 66, meta, seed=1337)
    tokens = np.fromfile(folder / 'train.bin', '<u2')
    for iteration in iterations:
        for start in loader.train_starts((iteration - 1) * SEQUENCES + np.arange(SEQUENCES)):
            tokens[(start + 5) % len(tokens)] = 65
    tokens.tofile(folder / 'train.bin')
    return folder


def tensors_of(run):
    return newest_tensors(run.out_dir)


@pytest.mark.parametrize('nproc, layout', [
    (1, ''),
    pytest.param(1, '--dtype=float16 --optimizer=muon', marks=pytest.mark.slow),
    pytest.param(2, '--tp=2 --optimizer=muon', marks=pytest.mark.slow)])
def test_skipped_spikes_leave_the_run_that_never_made_these_updates(train, dataset, tmp_path, nproc, layout):
    data = f'--dataset={plant(dataset, tmp_path / "data", [22, 25, 26])}'
    options = [*LONG, *layout.split(), data]
    run = train(*options, '--on_spike=skip', nproc=nproc, faults=SPIKES)
    assert run.stdout.count('update skipped') == 3
    assert [run.lines[i]['spikes'] for i in (21, 22, 24, 25, 26, 34)] == [0, 1, 1, 2, 3, 3]
    assert run.lines[22]['grad_norm'] > 10 * run.lines[21]['grad_norm']
    assert len(json.loads((run.out_dir / 'spike_00000025.json').read_text())['sequences']) == SEQUENCES
    without = train(*options, '--on_nonfinite=skip', nproc=nproc, faults=SKIPPED,
                    env=dict(FAULT_ITERATIONS='22 25 26'))
    assert [line['loss'] for line in run.lines.values()] == [line['loss'] for line in without.lines.values()]
    assert_same_tensors(tensors_of(run), tensors_of(without))


@pytest.mark.slow
def test_spikes_are_the_same_after_a_resume(train, dataset, tmp_path):
    options = [*LONG, f'--dataset={plant(dataset, tmp_path / "data", [22, 25, 26])}', '--on_spike=skip',
               '--dropout=0.1']
    unbroken = train(*options, faults=SPIKES)
    begun = train(*options, '--max_iters=23', faults=SPIKES)
    resumed = train(*options, '--init_from=resume', out_dir=begun.out_dir, faults=SPIKES)
    assert curve(resumed) == curve(unbroken)
    assert newest_state(resumed.out_dir)['spikes'] == newest_state(unbroken.out_dir)['spikes']


@pytest.mark.parametrize('nproc, layout', [
    (1, ''), pytest.param(2, '--zero_stage=3', marks=pytest.mark.slow)])
def test_run_that_goes_back_is_the_one_that_never_saw_these_batches(train, dataset, tmp_path, nproc, layout):
    """After spikes in iterations 23 to 26, the run goes back to 20 and continues with the later batches."""
    data = f'--dataset={plant(dataset, tmp_path / "data", [23, 24, 25, 26])}'
    options = [*LONG, *layout.split(), data]
    run = train(*options, '--on_spike=rollback', '--events=True', nproc=nproc, faults=SPIKES)
    events = (run.out_dir / 'events' / 'rank_00000.jsonl').read_text()
    assert re.findall('"rollback".*"iter": (\\d+), "what": "back from iteration (\\d+)"', events) == [('20', '26')]
    assert run.stdout.count('4 spikes in a row: going back to') == 1 and run.lines[34]['spikes'] == 4
    assert run.lines[34]['tokens'] == (34 + 6) * SEQUENCES * 32

    other = train(*options, '--max_iters=20', nproc=nproc)
    move_position(checkpoint.find(other.out_dir)[0], 26 * SEQUENCES * 32)
    other = train(*options, '--init_from=resume', nproc=nproc, out_dir=other.out_dir)
    assert curve(run) == curve(other)
    assert_same_tensors(tensors_of(run), tensors_of(other))
    if nproc > 1:
        assert_near(run, train(*LONG, data, '--on_spike=rollback', faults=SPIKES))


def test_run_does_not_go_back_to_a_checkpoint_with_nan(train, dataset, tmp_path):
    data = f'--dataset={plant(dataset, tmp_path / "data", [23, 24, 25, 26])}'
    run = train(*LONG, data, '--on_spike=rollback', '--async_checkpoint=False', check=False,
                faults=[*SPIKES, FAULTS / 'nan_in_checkpoint.py'])
    assert run.returncode == 1
    assert 'iter_00000020 has NaN or infinity in model.transformer.ln_f.weight' in '\n'.join(run.outputs)


def move_position(path, tokens):
    """Make a checkpoint resume at another place in the data."""
    state = checkpoint.read_state(path)
    checkpoint.write_json(f'{path}/state.json', state | dict(tokens=tokens))
    with open(f'{path}/checksums.json') as file:
        checksums = json.load(file)
    checkpoint.write_json(f'{path}/checksums.json',
                          checksums | {'state.json': checkpoint.checksum(f'{path}/state.json')})


@pytest.mark.slow
def test_run_that_went_back_resumes_to_the_bit(train, dataset, tmp_path):
    options = [*LONG, '--dropout=0.1', '--keep_checkpoints=9', '--on_spike=rollback',
               f'--dataset={plant(dataset, tmp_path / "data", [21, 22, 23, 24])}']
    unbroken = train(*options, faults=SPIKES)
    begun = train(*options, '--max_iters=22', '--save_interval=1', faults=SPIKES)
    assert 'going back' not in begun.stdout
    again = train(*options, '--max_iters=30', '--init_from=resume', out_dir=begun.out_dir, faults=SPIKES)
    assert again.stdout.count('going back') == 1
    resumed = train(*options, '--init_from=resume', out_dir=begun.out_dir, faults=SPIKES)
    assert curve(resumed) == curve(unbroken)
    again = run_script('kilogpt.replay', resumed.out_dir, 'all', *SPIKES)
    assert 'iterations agree with' in again.stdout and 'to the bit' in again.stdout


@pytest.mark.parametrize('nproc, arguments', [
    (1, ''),
    pytest.param(2, '', marks=pytest.mark.slow),
    pytest.param(2, '--pp=2', marks=pytest.mark.slow),
    pytest.param(2, '--cp=2 --zero_stage=3', marks=pytest.mark.slow),
    pytest.param(1, '--dtype=float16', marks=pytest.mark.slow)])
def test_infinite_loss_with_finite_gradients_ends_the_run_before_the_update(train, nproc, arguments):
    """Label smoothing takes the mean over padding columns too, whose logits are -inf."""
    arguments, fault = arguments.split(), dict(faults=[FAULTS / 'smoothed_loss.py'], nproc=nproc, check=False)
    run = train('--eval_iters=0', '--save_interval=1', *arguments, **fault)
    loss = 'nan' if '--pp=2' in arguments else 'inf'
    assert run.returncode == 1 and f'error: the loss of iteration 1 is {loss}' in run.stderr
    assert 'logits of -inf, such as those of padding' in run.stderr
    assert run.lines == {} and checkpoint.find(str(run.out_dir)) == []
    skipping = train('--eval_iters=0', '--on_nonfinite=skip', '--max_iters=40', *arguments, **fault)
    assert skipping.stdout.count('update skipped') == 9 and skipping.returncode == 1


def test_infinite_loss_of_an_evaluation_ends_the_run(train):
    fault = dict(faults=[FAULTS / 'smoothed_loss.py'], check=False)
    run = train(**fault)
    assert run.returncode == 1 and 'error: the train_loss of iteration 0 is inf' in run.stderr
    assert run.evals[0]['val_loss'] is None and run.lines == {}
    evaluated = train('--on_nonfinite=skip', '--eval_only', **fault)
    assert evaluated.returncode == 0 and 'warning: the val_loss of iteration 0 is inf' in evaluated.stdout


def spike(iteration, norm, limit):
    return Update(iteration, 0.0, torch.zeros(()), torch.tensor(norm), limit)


def test_median_follows_norms_that_rise_for_good():
    spikes = Spikes('skip', 5.0)
    for iteration in range(200):
        assert not spikes.check(spike(iteration, 1.0, spikes.limit()))
    assert spikes.limit() == 5 and len(spikes.norms) == Spikes.WINDOW
    for iteration in range(Spikes.WINDOW):
        spikes.check(spike(iteration, 10.0, spikes.limit()))
        assert not spikes.wants_rollback
    assert spikes.limit() == 50 and 60 < spikes.skipped < 70


def test_there_are_no_spikes_without_a_policy_or_a_history():
    for on_spike, n_norms, limit in (('none', 99, NO_LIMIT), ('skip', 15, NO_LIMIT), ('skip', 16, 5)):
        spikes = Spikes(on_spike, 5.0)
        spikes.load_state(dict(norms=[1.0] * n_norms))
        assert spikes.limit() == limit


def test_fourth_return_to_one_checkpoint_ends_the_run():
    spikes, said = Spikes('rollback', 5.0), []
    for _ in range(4):
        said.append(spikes.go_back(dict(iteration=20)))
    assert said[:3] == [None] * 3 and 'returns to iteration 20' in said[3]
