"""The edits in docs/edit.md, applied as printed: they resume to the bit, and follow one process in layouts."""
import functools
import json
import math
import os
import pathlib
import re
import runpy
import shutil

import pytest
import torch
from helpers import (FAULTS, ROOT, assert_near, assert_same_tensors, curve, newest_tensors, read_metrics,
                     read_tensors, run_forked)

PAGE = pathlib.Path(ROOT, 'docs', 'edit.md').read_text('utf-8')
EDITS = {section.split('\n')[0]: section.split('```diff\n')[1].split('```')[0]  # {heading: diff}
         for section in re.split(r'^### ', PAGE, flags=re.M) if '```diff\n' in section}
AVERAGE, SGD = 'An average of the weights, used for evaluation', 'SGD, or any other optimizer'
GROWING, FROZEN, MEASURED = 'A batch that grows', 'Some layers frozen', 'A measurement that may stop the run'
ALIBI, MLP, LOSS = 'A bias for each head (ALiBi)', "An MLP of one's own", "A loss of one's own"
KEYS = {ALIBI: ['--pos=alibi'], MLP: ['--mlp=reglu']}


def apply_diff(diff, folder):
    """Apply a diff without line numbers: each part between lines of @@ must occur once in its file."""
    _, name, text = re.split(r'^--- (\S+)\n', diff, flags=re.M)
    path = pathlib.Path(folder, name)
    content = path.read_text('utf-8')
    for part in re.split(r'^@@\n', text, flags=re.M):
        lines = part.splitlines(keepends=True)
        old = ''.join(line[1:] for line in lines if line[0] in ' -')
        new = ''.join(line[1:] for line in lines if line[0] in ' +')
        assert content.count(old) == 1, old
        content = content.replace(old, new)
    path.write_text(content, 'utf-8')


@pytest.fixture
def edit(train, tmp_path):
    """Function that applies edits, by their headings in docs/edit.md, and returns `train` for the result."""
    def edit(*titles):
        folder = tmp_path / f'copy-{len(list(tmp_path.iterdir()))}'
        folder.mkdir()
        for name in ('kilogpt', 'data', 'config'):
            os.symlink(os.path.join(ROOT, name), folder / name)
        for name in ('train.py', 'model.py'):
            shutil.copy(os.path.join(ROOT, name), folder)
        for title in titles:
            apply_diff(EDITS[title], folder)

        def run_edited(script, *arguments, **options):
            return run_forked(str(folder / script), *arguments, **options)

        keys = [key for title in titles for key in KEYS.get(title, [])]
        return functools.partial(train, *keys, runner=run_edited)
    return edit


def resume_at_6(train, run, folder, *arguments, **options):
    """The run that continues from a copy of another run's checkpoint of iteration 6."""
    shutil.copytree(run.out_dir / 'ckpt' / 'iter_00000006', folder / 'ckpt' / 'iter_00000006')
    return train(*arguments, '--init_from=resume', out_dir=folder, **options)


def test_page_has_eleven_edits():
    assert len(EDITS) == 11 and {AVERAGE, MEASURED, SGD, GROWING, FROZEN, ALIBI, MLP, LOSS} <= EDITS.keys()


def test_average_takes_twenty_lines_of_one_file_and_sgd_one():
    def added(title):
        return sum(line.startswith('+') for line in EDITS[title].splitlines())
    assert added(AVERAGE) <= 20 and added('A second loss, logged and added') <= 5 and added(SGD) == 1


@pytest.mark.drawn(3)
@pytest.mark.parametrize('title', [
    pytest.param(title, marks=() if title == AVERAGE else pytest.mark.slow) for title in EDITS])
def test_edited_run_resumes_to_the_bit(edit, tmp_path, title):
    train = edit(title)
    whole = train('--dropout=0.1')
    resumed = resume_at_6(train, whole, tmp_path / 'resumed', '--dropout=0.1')
    assert curve(resumed) == {i: value for i, value in curve(whole).items() if i > 6}
    assert resumed.evals[12] == whole.evals[12]
    assert_same_tensors(newest_tensors(resumed.out_dir), newest_tensors(whole.out_dir))


LAYOUTS = {'zero3': '--zero_stage=3', 'tp2': '--tp=2', 'pp2': '--pp=2', 'tp2 cp2': '--tp=2 --cp=2'}


@pytest.mark.slow
@pytest.mark.drawn(5)
@pytest.mark.parametrize('title, layout', [
    *((title, layout) for title, layout in zip([title for title in EDITS if title not in (ALIBI, MLP, LOSS)], 3 * list(LAYOUTS))),
    *((title, layout) for title in (ALIBI, MLP, LOSS) for layout in ('tp2 cp2', 'pp2'))])
def test_edited_run_follows_one_process_in_a_layout(edit, tmp_path, title, layout):
    train, arguments = edit(title), LAYOUTS[layout].split()
    nproc = 2 ** len(layout.split())
    run = train(*arguments, nproc=nproc)
    assert_near(run, train())
    resumed = resume_at_6(train, run, tmp_path / 'resumed', *arguments, nproc=nproc)
    assert_same_tensors(newest_tensors(resumed.out_dir), newest_tensors(run.out_dir))


def test_average_is_what_the_run_is_evaluated_with(edit, train):
    averaged, plain = edit(AVERAGE)(), train()
    assert curve(averaged) == curve(plain)
    assert averaged.evals[0] == plain.evals[0]
    # The average is still near the weights of the start.
    assert averaged.evals[12]['val_loss'] > plain.evals[12]['val_loss'] + 0.3
    tensors = newest_tensors(averaged.out_dir)
    name = 'transformer.h.0.attn.c_q.weight'
    assert (tensors[f'average.{name}'] != tensors[f'model.{name}']).all()


@pytest.mark.slow
def test_checkpoint_without_the_hook_and_with_a_hook_that_is_gone_resumes(edit, train, tmp_path):
    averaged, plain = edit(AVERAGE), train()
    resumed = resume_at_6(averaged, plain, tmp_path / 'with')
    assert resumed.stdout.count('was saved without Average, which starts as in a new run') == 1
    without = resume_at_6(train, averaged(), tmp_path / 'without')
    for run in (resumed, without):
        assert curve(run) == {i: value for i, value in curve(plain).items() if i > 6}


def largest_activations(run):
    lines = map(json.loads, (run.out_dir / 'metrics.jsonl').read_text('utf-8').splitlines())
    return {line['iter']: line['largest_activation'] for line in lines if 'largest_activation' in line}


@pytest.mark.slow
def test_measurement_stops_the_run_after_a_last_checkpoint(edit, monkeypatch):
    whole = largest_activations(edit(MEASURED)())
    assert list(whole) == [0, 5, 10] and 0 < whole[0] < whole[10]
    bound = (whole[5] + whole[10]) / 2
    monkeypatch.setitem(EDITS, MEASURED, EDITS[MEASURED].replace('bound=1e3', f'bound={bound}'))
    run = edit(MEASURED)(check=False)
    assert run.returncode == 1 and 'error: an activation of the last block has the norm' in run.stderr
    assert largest_activations(run) == whole and (run.out_dir / 'ckpt' / 'iter_00000010').exists()


@pytest.mark.slow
@pytest.mark.parametrize('layout, nproc', [('--tp=2', 2), ('--pp=2', 2), ('--zero_stage=3 --cp=2', 4),
                                           ('--compile=True', 1)])
def test_measurement_is_that_of_one_process(edit, layout, nproc):
    measured = edit(MEASURED)
    found = largest_activations(measured(*layout.split(), nproc=nproc))
    assert found == pytest.approx(largest_activations(measured()), rel=1e-3)


def test_second_loss_is_logged_as_a_mean_and_part_of_the_loss(edit, train):
    run, plain = edit('A second loss, logged and added')(), train()
    # After a norm whose weights are 1, an activation's mean square is 1, or a little less by the norm's eps.
    assert run.lines[1]['penalty'] == pytest.approx(1e-3, rel=0.02)
    assert run.lines[1]['loss'] == pytest.approx(plain.lines[1]['loss'] + run.lines[1]['penalty'], abs=1e-5)


def test_growing_batch_counts_its_tokens(edit):
    lines = edit(GROWING)().lines
    tokens = 12 * 32  # of an iteration in TINY
    assert lines[6]['tokens'] == 6 * tokens and lines[12]['tokens'] == 6 * tokens + 6 * 2 * tokens


def test_loss_is_smoothed_in_training_alone(edit, train):
    smoothed, plain = edit(LOSS)(), train()
    assert smoothed.evals[0] == plain.evals[0]
    assert smoothed.lines[12]['loss'] > plain.lines[12]['loss'] + 0.02
    assert smoothed.evals[12]['val_loss'] == pytest.approx(plain.evals[12]['val_loss'], rel=0.05)


@pytest.mark.slow
def test_log_says_how_tp_computes_another_loss(edit, train):
    note = 'note        the loss in model.py is not the cross-entropy alone: with tp=2 each rank computes it for 1/2'
    assert edit(LOSS)('--tp=2', '--max_iters=1', nproc=2).stdout.count(note) == 1
    assert 'note        the loss' not in train('--tp=2', '--max_iters=1', nproc=2).stdout


def test_frozen_layer_keeps_its_weights_and_others_do_not(edit):
    run = edit(FROZEN)('--save_interval=1', '--keep_checkpoints=99')
    first, last = (read_tensors(run.out_dir / 'ckpt' / f'iter_{iteration:08d}') for iteration in (1, 12))
    for name in first:
        if name.startswith('model.transformer.h.'):
            assert (first[name] == last[name]).all() == name.startswith('model.transformer.h.0.'), name
    assert not any(name.startswith('optimizer.transformer.h.0.') for name in last)


def test_norms_of_layers_are_logged(edit):
    run = edit("The norm of each layer's gradient, logged")()
    lines, _ = read_metrics(run.out_dir)
    for line in lines.values():
        assert 0 < line['grad_norm_0'] < line['grad_norm'] and 0 < line['grad_norm_1'] < line['grad_norm']


@pytest.mark.parametrize('optimizer, nproc, arguments', [
    ('SGD(parameters, learning_rate)', 1, ''),
    *(pytest.param(*variant, marks=pytest.mark.slow) for variant in (
        ('SGD(parameters, learning_rate, momentum=0.9)', 2, '--zero_stage=3'),
        ('SGD(parameters, learning_rate, momentum=0.9)', 2, '--tp=2'),
        ('Adagrad(parameters, learning_rate)', 2, '--zero_stage=3'),
        ('RMSprop(parameters, learning_rate)', 2, '--zero_stage=1'),
        ('NAdam(parameters, learning_rate)', 2, '--tp=2'),
        ('Adamax(parameters, learning_rate)', 2, '--pp=2'),
        ('AdamW(parameters, learning_rate, fused=True)', 2, '--zero_stage=3')))])
def test_optimizers_of_torch_train_resume_and_skip(edit, tmp_path, optimizer, nproc, arguments):
    """The second micro-batch has a loss of NaN, whose update is skipped."""
    replaced = EDITS[SGD].replace('SGD(parallel.optimizer_parameters(), learning_rate, momentum=0.9)',
                                  optimizer.replace('parameters', 'parallel.optimizer_parameters()'))
    EDITS['another optimizer'] = replaced
    train = edit('another optimizer')
    del EDITS['another optimizer']
    arguments = [*arguments.split(), '--on_nonfinite=skip']
    fault = dict(faults=[FAULTS / 'nan_loss.py'],
                 env=dict(FAULT_CALL='8', FAULT_RANK=str(nproc - 1), RANK='0'))
    run = train(*arguments, nproc=nproc, **fault)
    assert run.stdout.count('update skipped') == 1
    assert run.lines[12]['loss'] < run.lines[1]['loss']
    resumed = resume_at_6(train, run, tmp_path / 'resumed', *arguments, nproc=nproc)
    assert_same_tensors(newest_tensors(resumed.out_dir), newest_tensors(run.out_dir))


def test_alibi_is_the_same_for_some_of_the_heads_and_when_text_is_generated(tmp_path):
    shutil.copy(os.path.join(ROOT, 'model.py'), tmp_path)
    apply_diff(EDITS[ALIBI], tmp_path)
    edited = runpy.run_path(tmp_path / 'model.py')
    attention, values = edited['DotProductAttention'](0.0, 4), torch.eye(8).expand(1, 4, 8, 8)
    weights = attention(torch.zeros(1, 4, 8, 8), values, values)
    for head in range(4):
        weight_ratio = (weights[0, head, 7, 6] / weights[0, head, 7, 7]).item()
        assert weight_ratio == pytest.approx(math.exp(-2.0 ** (-2 * (head + 1))))
    attention.first_head = 2
    assert torch.equal(attention(torch.zeros(1, 2, 8, 8), values[:, :2], values[:, :2]), weights[:, 2:])

    model = edited['GPT'](edited['GPTConfig'](8, 65, n_layer=2, n_head=4, n_embd=32, pos='alibi'))
    tokens, cache = torch.arange(8)[None], model.new_cache(1)
    one_by_one = torch.cat([model(token, cache=cache) for token in tokens.split(1, dim=1)], dim=1)
    torch.testing.assert_close(one_by_one, model(tokens))
