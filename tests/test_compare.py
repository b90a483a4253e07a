"""python -m kilogpt.compare on logs that are written here."""
import json
import random
import re
import sys

import pytest

from kilogpt.compare import __main__ as compare
from kilogpt.compare import candidates, noise

pytestmark = pytest.mark.quick

CONFIG = dict(dataset='data/books', learning_rate=1e-3, max_iters=40, lr_decay_iters=0, decay_lr=True)


def evaluation(iteration, loss, **more):
    return dict(iter=iteration, tokens=100 * iteration, seconds=2.0 * iteration, params=50,
                flops=30_000 * iteration, train_loss=loss, val_loss=loss) | more


@pytest.fixture
def write_run(tmp_path, monkeypatch):
    """Function that writes a run with losses at iterations 0, 10, 20, ... Tests are in the folder of runs."""
    monkeypatch.chdir(tmp_path)

    def write_run(name, losses=(4.0, 3.0, 2.5, 2.2, 2.0), *, tasks=(), config=CONFIG, **keys):
        (tmp_path / name).mkdir()
        lines = [evaluation(10 * i, loss) for i, loss in enumerate(losses)] + [*tasks]
        (tmp_path / name / 'metrics.jsonl').write_text(''.join(json.dumps(line) + '\n' for line in lines))
        if config is not None:
            (tmp_path / name / 'config.json').write_text(json.dumps(config | dict(out_dir=name) | keys))
    return write_run


@pytest.fixture
def write_seeds(write_run):
    """Function that writes runs NAME-s0, NAME-s1, ... with these last losses."""
    def write_seeds(name, last, **keys):
        for seed, loss in enumerate(last):
            write_run(f'{name}-s{seed}', (4.0, 3.0, 2.5, 2.2, loss), **dict(seed=seed) | keys)
    return write_seeds


@pytest.fixture
def report(monkeypatch, capsys):
    """Function that runs the command without drawing; returns what it prints."""
    def report(*arguments):
        monkeypatch.setattr(compare, 'draw_candidates', lambda *_: None)
        monkeypatch.setattr(sys, 'argv', ['compare', *arguments])
        compare.main()
        return capsys.readouterr().out
    return report


def row(text, label):
    """The cells of a table's row."""
    line, = re.findall(rf'^\| {re.escape(label)} +\|(.*)\|$', text, re.M)
    return [cell.strip() for cell in line.split('|')]


def drawn(mean, count, seed):
    generator = random.Random(seed)
    return [generator.gauss(mean, 0.01) for _ in range(count)]


# --- statistics ---------------------------------------------------------------------------------------------

A = [3.21, 3.25, 3.19, 3.24, 3.22]
B = [3.18, 3.235, 3.16, 3.20, 3.21]


def test_t_tests_are_those_of_scipy():
    """scipy 1.18: ttest_ind(equal_var=False) and ttest_rel, with their confidence_interval."""
    fields = 'low', 'high', 'p'
    found = noise.welch(A, [3.30, 3.12, 3.29])
    assert [getattr(found, field) for field in fields] == pytest.approx(
        [-0.22594882222455392, 0.2552821555578876, 0.8266324080234942], rel=1e-9)
    assert noise.welch(A, B).p == pytest.approx(0.1733586306601391, rel=1e-9)
    found = noise.paired(A, B)
    assert [getattr(found, field) for field in fields] == pytest.approx(
        [-0.040207216137916196, -0.009792783862083803, 0.010304763615627266], rel=1e-9)
    assert noise.z_test(0.30, 0.02, 0.35, 0.015).p == pytest.approx(0.04550026389635839, rel=1e-9)


def test_runs_without_any_variance_differ_or_do_not():
    assert noise.welch([2.0, 2.0], [2.0, 2.0]).p == 1 and noise.welch([2.0, 2.0], [1.9, 1.9]).p == 0
    assert noise.paired([2.0, 2.1], [2.0, 2.1]) == (0, 0, 0, 1)


def test_planted_difference_is_found_and_noise_is_not(write_seeds, report):
    write_seeds('a', drawn(2.0, 5, seed=1))
    write_seeds('b', drawn(1.96, 4, seed=2))
    write_seeds('c', drawn(2.0, 4, seed=3))
    text = report('a=a-s*', 'b=b-s*', 'c=c-s*')
    assert re.search(r'^- val_loss of b is 0\.0\d+ lower than that of a \(95% interval 0\.0\d+ to 0\.0\d+, '
                     r"p = 0\.\d+, 4 and 5 seeds, Welch's t-test\)\.$", text, re.M)
    assert re.search(r'^- val_loss of c differs from .*, which is not larger than the noise', text, re.M)
    assert 'p < 0.025 is safe for all of them together' in text


def test_p_values_of_noise_alone_are_uniform():
    """A fifth of them is below 0.2."""
    values = drawn(2.0, 800, seed=0)
    found = [noise.welch(values[i:i + 4], values[i + 4:i + 8]).p for i in range(0, 800, 8)]
    assert 10 <= sum(p < 0.2 for p in found) <= 30


def test_candidates_with_the_same_seeds_are_compared_seed_by_seed(write_seeds, report):
    """The seeds differ more than the candidates do. The order of folders does not matter."""
    write_seeds('a', A)
    for seed in reversed(range(5)):
        write_seeds(f'b-{4 - seed}', [B[seed]], seed=seed)
    text = report('a=a-s*', 'b=b-*')
    assert ('val_loss of b is 0.0250 lower than that of a (95% interval 0.0098 to 0.0402, p = 0.01, '
            '5 seeds each, paired t-test).') in text


def test_one_seed_says_nothing_about_noise(write_seeds, report):
    write_seeds('a', [2.0, 2.01])
    write_seeds('b', [1.9])
    text = report('a=a-s*', 'b=b-s0')
    assert 'is not known: one seed says nothing about noise.' in text and "such as 'b=out-b-s*'." in text
    assert 'p = ' not in text and 'comparisons' not in text
    assert "such as 'out-b=out-b-s*'." in report('a=a-s*', 'out-b=b-s0')


def test_runs_of_different_lengths_are_compared_at_the_tokens_of_the_shortest(write_run, report):
    for seed in range(2):
        write_run(f'a-s{seed}', (4.0, 3.0, 2.0), seed=seed, max_iters=20)
        write_run(f'b-s{seed}', (4.0, 3.0, 1.9 + seed / 100, 1.0), seed=seed, max_iters=30)
    text = report('a=a-s*', 'b=b-s*')
    assert 'val_loss of b is 0.0950 lower than that of a' in text
    assert 'The runs have 2,000 to 3,000 tokens, and are compared at 2,000' in text


# --- what runs reached --------------------------------------------------------------------------------------

def test_costs_to_a_loss_are_linear_between_evaluations(write_run, report):
    write_run('a', (4.0, 3.0, 2.0))
    write_run('b', (4.0, 2.0, 2.5, 1.0))
    text = report('a', 'b', '--loss=2.25')
    assert row(text, 'tokens to val_loss 2.2500') == ['1,750', '875']  # b rises above the loss again
    assert row(text, 'seconds to val_loss 2.2500') == ['35', '18']
    assert row(text, 'FLOPs to val_loss 2.2500') == ['5.25e+05', '2.62e+05']
    assert row(report('a', 'b'), 'tokens to val_loss 2.0000') == ['2,000', '1,000']  # what all reach
    assert row(report('a', 'b', '--loss=1.5'), 'tokens to val_loss 1.5000') == ['not reached', '2,667']


def test_values_between_evaluations_are_linear(write_run):
    write_run('a', (4.0, 3.0, 2.0))
    run, = candidates.read_candidate('a').runs
    found = [candidates.value_at(run, 'loss', tokens) for tokens in (0, 500, 1000, 1250)]
    assert found == [4.0, 3.5, 3.0, 2.75]


def test_means_have_the_standard_error_over_seeds(write_run, report):
    write_run('a-s0', (4.0, 3.0, 2.0), seed=0)
    write_run('a-s1', (4.0, 3.0, 2.1, 2.2), seed=1)
    text = report('a=a-s*')
    assert row(text, 'seeds') == ['2'] and row(text, 'parameters') == ['50']
    assert row(text, 'last val_loss') == ['2.1000 ± 0.1000']
    assert row(text, 'best val_loss') == ['2.0500 ± 0.0500']
    assert row(text, 'tokens') == ['2,500 ± 500'] and row(text, 'seconds') == ['50 ± 10']
    assert 'a-s0 was last evaluated after 20 of 40 iterations.' in text


def test_mean_curve_has_the_iterations_that_all_seeds_have(write_run, monkeypatch):
    write_run('a-s0', (4.0, 3.0, None, 2.0))
    write_run('a-s1', (4.2, 3.1, 2.0))
    mean = candidates.mean_run(candidates.read_candidate('a=a-s*'), 'loss')
    assert mean.name == 'a' and [line['iter'] for line in mean.evals] == [0, 10]
    assert [line['val_loss'] for line in mean.evals] == pytest.approx([4.1, 3.05])
    assert mean.evals[1]['val_loss_spread'] == pytest.approx(0.1 / 2 ** 0.5)
    figures = []
    monkeypatch.setattr('kilogpt.plot.curves.save', lambda figure, path: figures.append(figure))
    both = [candidates.read_candidate(source) for source in ('a=a-s*', 'a-s0')]
    compare.draw_candidates(both, 'loss', '')
    assert [panel.get_xlabel() for panel in figures[0].axes] == [
        'tokens trained on', 'seconds since the start', 'FLOPs (floating-point operations)']
    assert [len(panel.containers) for panel in figures[0].axes] == [1, 1, 1]  # the first candidate has bars


def test_diverged_run_is_named_and_left_out_of_means(write_run, report):
    write_run('a-s0', (4.0, 3.0, 2.0), seed=0)
    write_run('a-s1', (4.0, 3.5, None, None), seed=1)
    text = report('a=a-s*')
    assert 'a-s1 has diverged: its last evaluation has no finite val_loss.' in text
    assert row(text, 'last val_loss') == ['2.0000']
    assert row(text, 'tokens to val_loss 2.0000') == ['2,000 (1 of 2 runs)']


def test_resumed_and_running_runs_are_read(write_run, report, tmp_path):
    """The last line of a repeated iteration counts. A line that is still being written does not."""
    write_run('a', (4.0, 3.0))
    with open(tmp_path / 'a' / 'metrics.jsonl', 'a') as file:
        file.write(json.dumps(evaluation(10, 2.5)) + '\n{"iter": 20, "val_l')
    text = report('a')
    assert row(text, 'last val_loss') == ['2.5000'] and row(text, 'tokens') == ['1,000']


def test_bits_per_byte_can_be_compared(write_run, report, tmp_path):
    for name, bpb in (('a', 1.5), ('b', 1.2)):
        write_run(name, (4.0,), dataset=name)
        with open(tmp_path / name / 'metrics.jsonl', 'a') as file:
            file.write(json.dumps(evaluation(10, 3.0, val_bpb=bpb)) + '\n')
    text = report('a', 'b', '--y=bpb')
    assert row(text, 'tokens to val_bpb 1.5000') == ['1,000', '1,000']
    assert 'The datasets differ (a, b). Bits per byte are comparable if the validation text is' in text
    assert 'choose --y=bpb.' in report('a', 'b')


def test_text_of_nanogpt_is_compared(write_run, report, tmp_path):
    write_run('a')
    (tmp_path / 'n.log').write_text(
        'step 0: train loss 4.0, val loss 4.0\niter 0: loss 4.0, time 900.00ms, mfu 1%\n'
        'step 1: train loss 3.0, val loss 3.0\n')
    text = report('a', 'nanoGPT=n.log')
    assert row(text, 'last val_loss') == ['2.0000', '3.0000'] and row(text, 'tokens') == ['4,000', '—']
    assert 'n.log has no config.json: its settings are not known.' in text


# --- tasks and configs --------------------------------------------------------------------------------------

def scores(iteration, accuracy, **more):
    return {'iter': iteration, 'tokens': 100 * iteration, 'task/arc/accuracy': accuracy,
            'task/arc/accuracy_stderr': 0.02} | more


def test_last_scores_of_tasks_are_compared_by_their_standard_errors(write_run, report, tmp_path):
    write_run('a', tasks=[scores(20, 0.1), scores(40, 0.31)])
    write_run('b', tasks=[scores(40, 0.4, **{'task/CORE/score': 0.12})])
    (tmp_path / 'a' / 'tasks.jsonl').write_text(
        ''.join(json.dumps(line) + '\n' for line in (scores(40, 0.3), scores(10, 0.9))))
    text = report('a', 'b')
    assert row(text, 'arc/accuracy') == ['0.3000 ± 0.0200', '0.4000 ± 0.0200']
    assert row(text, 'CORE/score') == ['—', '0.1200']
    assert ('arc/accuracy of b is 0.1000 higher than that of a (95% interval 0.0446 to 0.1554, p = 0.00041, '
            'z-test).') in text
    assert 'CORE/score of b' not in text


def test_error_of_a_score_has_a_part_of_the_questions_and_one_of_the_seeds(write_run, report):
    write_run('a-s0', tasks=[scores(40, 0.30, **{'task/CORE/score': 0.1})])
    write_run('a-s1', tasks=[scores(40, 0.36, **{'task/CORE/score': 0.2})])
    text = report('a=a-s*')
    assert row(text, 'arc/accuracy') == ['0.3300 ± 0.0361']  # the root of 0.02² + 0.03²
    assert row(text, 'CORE/score') == ['0.1500 ± 0.0500']


def test_scores_over_seeds_are_compared_unless_all_are_the_same(write_run, report):
    for name, core in (('a', 0.1), ('b', 0.2)):
        for seed in range(2):
            task = {'iter': 40, 'task/CORE/score': core + seed / 1000, 'task/arc/chance': 0.25}
            write_run(f'{name}-s{seed}', tasks=[task], seed=seed)
    text = report('a=a-s*', 'b=b-s*')
    assert 'CORE/score of b is 0.1000 higher than that of a' in text and "Welch's t-test" in text
    assert row(text, 'arc/chance') == ['0.2500 ± 0.0000', '0.2500 ± 0.0000'] and 'chance of b' not in text


def test_configs_that_differ_are_shown(write_seeds, report):
    write_seeds('a', [2.0, 2.1])
    write_seeds('b', [2.0, 2.1], learning_rate=2e-3, new_key=True)
    text = report('a=a-s*', 'b=b-s*')
    assert text.split('What differs in config.json:')[1].strip().splitlines() == [
        '| key           | a     | b     |', '| ------------- | ----- | ----- |',
        '| learning_rate | 0.001 | 0.002 |', '| new_key       | —     | True  |']
    write_seeds('c', [2.0, 2.1])
    assert 'Nothing differs in config.json.' in report('a=a-s*', 'c=c-s*')


def test_seeds_that_differ_in_more_than_the_seed_are_named(write_run, report):
    write_run('a-s0', seed=1)
    write_run('a-s1', seed=1, learning_rate=1.0)
    write_run('b', config=None)
    text = report('a=a-s*', 'b')
    assert 'Runs of a have the same seed' in text
    assert 'Runs of a differ in learning_rate: seeds of one candidate should differ in seed alone.' in text
    assert 'b has no config.json: its settings are not known.' in text


# --- the command --------------------------------------------------------------------------------------------

@pytest.mark.parametrize('arguments, message', [
    (['gone'], 'gone does not exist, nor does a path that matches it as a pattern: check it'),
    (['x=gone-*'], 'gone-* does not exist, nor does a path that matches it as a pattern: check it'),
    (['empty'], 'empty has no metrics.jsonl'),
    (['started'], 'started has no evaluation: leave it out, or train for longer with eval_iters'),
    (['nan'], 'nan has no finite val_loss: leave it out'),
    (['a', '--y=bpb'], 'a has no finite val_bpb: leave it out (docs/evaluate.md says which datasets have it)'),
    (['a', '--loss=1.9'], 'no run reaches --loss=1.9: the lowest is 2.0000, choose that or more'),
    (['x=a', 'x=nan'], 'two candidates have the name x: give another with NAME=SOURCE'),
    (['a', 'x=./a'], './a is given twice: a run can be part of one candidate only'),
    (['broken'], 'broken/metrics.jsonl has a line that is not JSON'),
    (['a', '--table=gone/t.md'], '--table=gone/t.md cannot be written'),
])
def test_wrong_input_is_one_sentence(write_run, report, tmp_path, arguments, message):
    write_run('a')
    write_run('nan', (None, None))
    write_run('started', ())
    write_run('broken', tasks=['x'])
    (tmp_path / 'broken' / 'metrics.jsonl').write_text('{"iter": 1\n')
    (tmp_path / 'empty').mkdir()
    with pytest.raises(SystemExit, match=f'^error: {re.escape(message)}'):
        report(*arguments)


def test_runs_of_train_are_compared(train, tmp_path, monkeypatch, capsys):
    train(out_dir=tmp_path / 'a')
    train('--learning_rate=1e-4', '--min_lr=0.0', out_dir=tmp_path / 'b')
    train('--learning_rate=1e-4', '--min_lr=0.0', '--init_from=resume', out_dir=tmp_path / 'b')
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, 'argv', ['compare', 'a', 'slow=b', '--table=t.md'])
    compare.main()
    text = (tmp_path / 't.md').read_text()
    assert capsys.readouterr().out == text + 'wrote t.md\nwrote compare.png\n'
    assert (tmp_path / 'compare.png').read_bytes().startswith(b'\x89PNG')
    assert row(text, 'tokens') == ['4,608', '4,608'] and 'not reached' not in text
    assert float(row(text, 'FLOPs')[0]) > 1e6 and row(text, 'parameters')[0] == row(text, 'parameters')[1]
    assert row(text, 'learning_rate') == ['0.01', '0.0001'] and row(text, 'min_lr') == ['0.001', '0.0']
    assert 'init_from' not in text  # the second run was resumed
