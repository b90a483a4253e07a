"""python -m kilogpt.scaling on logs that are written here, with losses of a law that is known."""
import itertools
import json
import math
import re
import sys

import numpy as np
import pytest

from kilogpt.scaling import __main__ as scaling
from kilogpt.scaling import fit, law

pytestmark = pytest.mark.quick

# Hoffmann et al. 2022, equation 10
PLANTED = dict(E=1.69, A=406.4, alpha=0.34, B=410.7, beta=0.28)
SIZES, RATIOS = (1e6, 3e6, 1e7, 3e7, 1e8), (5, 20, 80, 320)


def loss_of(n, d):
    return (PLANTED['E'] + PLANTED['A'] / n ** PLANTED['alpha'] + PLANTED['B'] / d ** PLANTED['beta'])


def simulate(sizes=SIZES, ratios=RATIOS, noise=0.0, seed=0):
    """Points with the planted law's losses times the exponential of some noise."""
    rng = np.random.default_rng(seed)
    return [law.Point(f'n{n:.0e}-r{ratio}', n, n * ratio, 6 * n * n * ratio,
                      loss_of(n, n * ratio) * math.exp(noise * rng.standard_normal()))
            for n, ratio in itertools.product(sizes, ratios)]


@pytest.fixture
def write_runs(tmp_path, monkeypatch):
    """Function that writes runs with the losses of Points; tests are in the folder of runs."""
    monkeypatch.chdir(tmp_path)

    def write_runs(points, **keys):
        for point in points:
            (tmp_path / point.name).mkdir()
            lines = [dict(iter=iteration, tokens=share * point.d, seconds=1.0, params=point.n,
                          flops=share * point.c, train_loss=loss, val_loss=loss, val_bpb=loss / 3)
                     for iteration, share, loss in [(0, 0, 9), (50, 0.5, point.loss + 1), (100, 1, point.loss)]]
            with open(tmp_path / point.name / 'metrics.jsonl', 'w') as file:
                file.writelines(json.dumps(line) + '\n' for line in lines)
            config = dict(dataset='web', max_iters=100, lr_decay_iters=0, decay_lr=True) | keys
            (tmp_path / point.name / 'config.json').write_text(json.dumps(config))
        return [point.name for point in points]
    return write_runs


@pytest.fixture
def report(monkeypatch, capsys):
    """Function that runs the command; returns what it prints."""
    def report(*arguments):
        monkeypatch.setattr(sys, 'argv', ['scaling', *arguments])
        scaling.main()
        return capsys.readouterr().out
    return report


# --- the fit ------------------------------------------------------------------------------------------------

def test_losses_without_noise_give_the_planted_coefficients():
    found = {name: value for name, value, _ in law.Law(simulate()).described()}
    exponents = dict(a=0.28 / 0.62, b=0.34 / 0.62)
    assert found == pytest.approx(PLANTED | exponents, rel=1e-3)


def test_intervals_of_noisy_losses_hold_the_planted_coefficients():
    """docs/log has how often they do in many such sets."""
    fitted = law.Law(simulate(noise=0.003, seed=3), samples=100)
    for name, value, samples in fitted.described()[:5]:
        low, high = np.percentile(samples, [2.5, 97.5])
        assert low <= PLANTED[name] <= high and low <= value <= high, name
        assert high - low < PLANTED[name] / 2, name
    larger = [law.Point('', 1e9, 2e10, 1.2e20)]
    predicted, samples = fitted.loss_at(larger)
    low, high = np.percentile(samples, [2.5, 97.5])
    assert low <= loss_of(1e9, 2e10) <= high and high - low < 0.1 and low <= predicted[0] <= high


def test_one_bad_run_hardly_moves_the_fit():
    """By least squares instead of Huber's loss, the prediction would be 0.09 away."""
    points = simulate()
    points[7] = points[7]._replace(loss=1.3 * points[7].loss)
    predicted, _ = law.Law(points).loss_at([law.Point('', 2e8, 4e9, 5e18)])
    assert predicted[0] == pytest.approx(loss_of(2e8, 4e9), abs=2e-3)


def test_fit_is_where_the_loss_is_lowest():
    """No change of a coefficient by a thousandth lowers the loss."""
    points = simulate(noise=0.01, seed=1)
    logs = np.log([[point.n for point in points], [point.d for point in points]])
    log_losses = np.log([point.loss for point in points])
    best = fit.fit(logs, log_losses, np.ones((1, len(points))))
    changed = best + 1e-3 * np.concatenate([np.eye(5), -np.eye(5)])

    def costs(coefficients):
        return fit.huber(fit.predict(coefficients, logs) - log_losses).sum(axis=1)
    assert (costs(changed) > costs(best)).all()


def test_optimum_has_the_lowest_loss_of_all_sizes():
    fitted = law.Law(simulate())
    best = fitted.optimum(1e20)
    assert 6 * best.n * best.d == pytest.approx(1e20)
    sizes = [law.Point('', factor * best.n, best.d / factor, 1e20) for factor in (0.9, 1, 1.1)]
    fewer, lowest, more = fitted.loss_at(sizes)[0]
    assert lowest < min(fewer, more)


@pytest.mark.parametrize('points, variables', [
    (simulate(), ('N', 'D')),
    (simulate(sizes=[1e7]), ('D',)),
    ([point._replace(d=1e9) for point in simulate(ratios=[20])], ('N',)),
    (simulate(ratios=[20]), ('C',)),
])
def test_law_has_the_terms_that_the_runs_can_tell_apart(points, variables):
    fitted = law.Law(points)
    assert fitted.variables == variables
    assert fitted.loss_at(points)[0] == pytest.approx([point.loss for point in points], rel=0.01)


def test_held_out_run_is_predicted_from_the_others_alone():
    points = simulate()
    points[-1] = points[-1]._replace(loss=9.9)
    last, predicted = law.held_out(points)
    assert last is points[-1] and predicted == pytest.approx(loss_of(last.n, last.d), rel=1e-4)
    six = simulate(sizes=SIZES[:3], ratios=(5, 20))
    assert law.held_out(six) is None  # five are too few for five coefficients


def test_bootstrap_samples_determine_the_coefficients():
    logs = np.log([[1, 1, 2, 2, 3, 3], [1, 2, 1, 3, 2, 3]])
    samples = law.resample(logs, 5, 50)
    assert (samples.sum(axis=1) == 6).all() and ((samples > 0).sum(axis=1) >= 5).all()


# --- the command --------------------------------------------------------------------------------------------

def test_command_prints_law_and_predictions_and_draws_them(write_runs, report, tmp_path):
    names = write_runs(simulate(noise=0.003))
    text = report(*names, '--bootstrap=20')
    assert text.startswith('L(N, D) = E + A / N^alpha + B / D^beta, fitted to 20 runs of 5 size(s)\n')
    assert re.search(r'^\| a \(optimal N grows as C\^a\) \| 0\.4\d+ \| 0\.4\d+ to 0\.4\d+ \|$', text, re.M)
    assert re.search(r'^\| larger \| 2e\+08 \| 6.4e\+10 \| 7.68e\+19 \| 2\.[67]\d+ \|', text, re.M)
    assert re.search(r'^\| compute-optimal \| \S+ \| \S+ \| 1.92e\+20 \| 2\.[45]\d+ \|', text, re.M)
    assert re.search(r'^- Fitted without n1e\+08-r320, .* predicts 2\.9\d+ for it; measured: 2\.9', text, re.M)
    assert (tmp_path / 'scaling.png').read_bytes().startswith(b'\x89PNG')


def test_asked_run_is_predicted_and_a_far_one_is_doubted(write_runs, report):
    names = write_runs(simulate())
    text = report(*names, '--bootstrap=20', '--params=1e9', '--tokens=2e11')
    assert f'| asked for | 1e+09 | 2e+11 | 1.2e+21 | {loss_of(1e9, 2e11):.3f}' in text
    assert 'A predicted run has 62 times the FLOPs of the largest run.' in text


@pytest.mark.parametrize('sizes, ratios, name', [([1e7], RATIOS, 'D'), (SIZES, [20], 'C')])
def test_law_of_one_term_is_drawn_and_says_why(write_runs, report, sizes, ratios, name):
    names = write_runs(simulate(sizes, ratios))
    text = report(*names, '--bootstrap=20')
    assert text.startswith(f'L({name}) = ') and 'the law has one term and no compute-optimal size.' in text
    with pytest.raises(SystemExit, match='do not tell the loss at'):
        report(*names, '--params=2e9', '--tokens=1e10')


def test_bits_per_byte_can_be_fitted(write_runs, report):
    names = write_runs(simulate())
    write_runs([law.Point('other', 1e7, 1e9, 6e16, loss_of(1e7, 1e9))], dataset='books')
    text = report(*names, 'other', '--y=bpb', '--bootstrap=20')
    assert re.search(r'^\| E \| 0\.563', text, re.M)  # a third of 1.69
    assert 'The datasets differ (books, web). Bits per byte are comparable if' in text


def test_runs_that_cannot_be_trusted_are_named(write_runs, report):
    names = write_runs(simulate())
    write_runs([law.Point('nan', 1e7, 1e9, 6e16, 3.0)])
    with open('nan/metrics.jsonl', 'a') as file:
        file.write(json.dumps(dict(iter=100, tokens=1, seconds=1, train_loss=None, val_loss=None)) + '\n')
    write_runs([law.Point('early', 1e7, 1e9, 6e16, loss_of(1e7, 1e9))], max_iters=200)
    write_runs([law.Point('slow', 1e7, 1e9, 6e16, loss_of(1e7, 1e9))], lr_decay_iters=300)
    text = report(*names, 'nan', 'early', 'slow', '--bootstrap=20')
    assert 'nan is left out: its last evaluation has no finite val_loss.' in text
    assert 'early was last evaluated after 100 of 200 iterations: its loss is above that of a finish' in text
    assert 'slow ended at iteration 100, and its learning rate falls until 300' in text
    assert 'fitted to 22 runs' in text


@pytest.mark.parametrize('arguments, message', [
    (['gone'], 'gone has no metrics.jsonl'),
    (['--y=bpb', 'a-log'], 'no run can be used: a-log is left out: its last evaluation has no finite'),
    (['a-log'], 'no run can be used: a-log is left out: its log does not say its parameters and FLOPs'),
    (['n1e+06-r5', 'n1e+06-r5'], 'all runs have the same size and the same number of tokens: vary'),
    (['n1e+06-r5', 'n1e+06-r20', 'n3e+06-r5', 'n1e+07-r5', 'n1e+07-r20'],
     '5 run(s) are too few for the 5 coefficients E, A, alpha, B, beta: give 6 or more'),
    (['n1e+06-r5', 'n1e+06-r20', 'n1e+06-r80'],
     '3 run(s) are too few for the 3 coefficients E, B, beta: give 4 or more'),
    ([f'n{size}-r{ratio}' for size in ('1e+06', '3e+06') for ratio in RATIOS],
     'the runs have 2 different sizes of models: give 3 or more'),
    (['n1e+06-r5', '--params=1e9'], '--params and --tokens belong together: give both'),
    (['n1e+06-r5', '--bootstrap=2'], '--bootstrap=2 is too few samples: give 20 or more'),
])
def test_wrong_input_is_one_sentence(write_runs, report, tmp_path, arguments, message):
    write_runs(simulate())
    (tmp_path / 'a-log').write_text('step 0: train loss 4.0, val loss 4.0\n')
    with pytest.raises(SystemExit, match=f'^error: {re.escape(message)}'):
        report(*arguments)
