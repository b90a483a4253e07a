"""python -m kilogpt.plot as a user runs it, and what it reads from runs."""
import json
import pathlib
import sys

import pytest
from helpers import run_script

from kilogpt.plot import __main__ as plot
from kilogpt.plot import curves, sources

NANOGPT = """\
tokens per iteration will be: 16,384
step 0: train loss 4.2874, val loss 4.2823
iter 0: loss 4.2654, time 900.00ms, mfu -100.00%
iter 10: loss 3.2438, time 20.00ms, mfu 15.45%
step 20: train loss 2.4293, val loss 2.4447
saving checkpoint to out
iter 20: loss 2.4512, time 320.00ms, mfu 15.45%
iter 30: loss nan, time 30.00ms, mfu 15.45%
"""


def evaluation(iteration, loss):
    return dict(iter=iteration, train_loss=loss, val_loss=loss)


def training(iteration, loss=3.0, **more):
    return dict(iter=iteration, loss=loss, dt_ms=500.0, tokens_per_sec=200.0, tokens=100 * iteration) | more


@pytest.fixture
def folder(tmp_path):
    """Function that writes a run's folder with these lines; returns its path."""
    def folder(*lines, name='out-a'):
        (tmp_path / name).mkdir()
        (tmp_path / name / 'metrics.jsonl').write_text(''.join(json.dumps(line) + '\n' for line in lines))
        return str(tmp_path / name)
    return folder


def seconds_of(lines):
    return {line['iter']: pytest.approx(line['seconds']) for line in lines}


def test_picture_of_folders_and_a_text(folder, tmp_path):
    first = folder(evaluation(0, 4.1), training(1, seconds=7.0), training(2, seconds=8.0), evaluation(2, 3.6))
    second = folder(evaluation(0, 4.1), training(1), name='out-b')
    (tmp_path / 'nanogpt.log').write_text(NANOGPT)
    picture = tmp_path / 'runs.png'
    run_script('kilogpt.plot', first, second, f'nanoGPT={tmp_path}/nanogpt.log', '--x=seconds',
               f'--out={picture}')
    assert picture.read_bytes().startswith(b'\x89PNG')


@pytest.mark.parametrize('arguments, message', [
    (['c'], 'c has no metrics.jsonl'),
    (['OTHER', '--x=tokens'], 'other.log does not say how many tokens it has trained on'),
    (['OTHER', '--x=flops'], 'other.log does not say how many FLOPs it has cost: choose --x=seconds'),
    (['EMPTY'], 'has no line such as "step 250'),
    (['NOTHING'], 'there is nothing to draw: give folders of runs that have trained'),
])
def test_wrong_sources_are_one_sentence(folder, tmp_path, monkeypatch, arguments, message):
    (tmp_path / 'other.log').write_text(NANOGPT.partition('\n')[2])
    (tmp_path / 'empty').write_text('')
    paths = dict(OTHER=f'{tmp_path}/other.log', EMPTY=f'{tmp_path}/empty', NOTHING=folder())
    monkeypatch.setattr(sys, 'argv', ['plot.py', *(paths.get(argument, argument) for argument in arguments)])
    with pytest.raises(SystemExit, match=message):
        plot.main()


def test_missing_matplotlib_is_one_sentence(folder, monkeypatch):
    monkeypatch.setitem(sys.modules, 'matplotlib', None)
    with pytest.raises(SystemExit, match='pip install matplotlib'):
        curves.draw([sources.read_run(folder(training(1)))], ['iterations'], 'none.png')


def test_curve_is_named_after_its_path_or_by_the_user(folder):
    path = folder(training(1))
    assert sources.read_run(path).name == sources.read_run(f'{path}/').name == 'out-a'
    assert sources.read_run(f'quick start={path}').name == 'quick start'
    assert sources.read_run(folder(training(1), name='lr=1e-3')).name == 'lr=1e-3'


def test_evaluation_of_an_older_version_gets_the_time_of_the_latest_training_line(folder):
    run = sources.read_run(folder(evaluation(0, 4.0), training(2, seconds=6.0), evaluation(3, 3.0),
                                  training(4, seconds=9.0), evaluation(4, 2.0)))
    assert seconds_of(run.evals) == {0: 0, 3: 6, 4: 9}
    assert [line['tokens'] for line in run.evals] == [0, 200, 400]


def test_evaluation_has_its_own_seconds_which_add_up_over_processes(folder):
    """The second process resumes at 2 and evaluates again; the third repeats no line."""
    run = sources.read_run(folder(
        evaluation(0, 4.0) | dict(seconds=2.0, tokens=0), training(1, seconds=5.0), training(2, seconds=6.0),
        evaluation(2, 3.5) | dict(seconds=8.0, tokens=200), training(3, seconds=9.0),
        evaluation(2, 3.5) | dict(seconds=4.0, tokens=200), training(3, seconds=5.0),
        training(4, seconds=3.0), evaluation(4, 3.0) | dict(seconds=4.0, tokens=400)))
    assert seconds_of(run.evals) == {0: 2, 2: 13, 4: 18}
    assert seconds_of(run.train) == {1: 5, 2: 6, 3: 14, 4: 17}


def test_resumed_run_adds_up_the_seconds_of_its_processes(folder):
    """The second process repeats an iteration, whose last line counts; the third repeats none."""
    run = sources.read_run(folder(
        training(1, seconds=5.0), training(2, seconds=6.0), training(3, seconds=7.0),
        training(3, loss=2.9, seconds=9.0), training(4, seconds=10.0),
        training(5, seconds=3.0), training(6, seconds=4.0)))
    assert seconds_of(run.train) == {1: 5, 2: 6, 3: 16, 4: 17, 5: 20, 6: 21}
    assert run.train[2]['loss'] == 2.9


def test_older_run_sums_the_times_of_its_iterations(folder):
    """The last line is from a newer version, which logs its seconds."""
    run = sources.read_run(folder(
        training(10), training(20), training(20), training(30), training(40, seconds=8.0)))
    assert seconds_of(run.train) == {10: 5, 20: 15, 30: 20, 40: 28}


def test_iterations_between_nanogpts_lines_take_as_long_as_a_logged_one(tmp_path):
    """The time of an evaluation is part of one iteration's time and counts only once."""
    (tmp_path / 'nanogpt.log').write_text(NANOGPT)
    run = sources.read_run(f'{tmp_path}/nanogpt.log')
    at_10 = 0.9 + 10 * 0.02
    at_20 = at_10 + 9 * 0.02 + 0.32
    assert seconds_of(run.train) == {1: 0.9, 11: at_10, 21: at_20, 31: at_20 + 10 * 0.03}
    assert seconds_of(run.evals) == {0: 0, 20: at_10}
    assert [line['val_loss'] for line in run.evals] == [4.2823, 2.4447]
    assert [line['tokens'] for line in run.evals] == [0, 20 * 16384] and run.train[1]['tokens'] == 11 * 16384


def axes_of(runs, x, tmp_path):
    """The panels of a picture of runs over x."""
    return figure_of(runs, [x], tmp_path).axes


def figure_of(runs, axes, tmp_path):
    from matplotlib import pyplot
    curves.draw(runs, axes, tmp_path / 'curves.png')
    figure = pyplot.gcf()
    pyplot.close()
    return figure


def test_throughput_is_drawn_beside_losses_only_over_iterations(folder, tmp_path):
    runs = [sources.read_run(folder(training(1), training(2, tokens_per_sec=400.0), evaluation(2, 3.0)))]
    loss, speed = axes_of(runs, 'iterations', tmp_path)
    assert [text.get_text() for text in loss.texts] == ['out-a  last 3.00']
    label, = speed.texts
    assert label.get_text() == 'out-a  median 300' and label.xy == (2, 300)
    assert len(axes_of(runs, 'tokens', tmp_path)) == 1
    (tmp_path / 'nanogpt.log').write_text(NANOGPT)
    assert len(axes_of([sources.read_run(f'{tmp_path}/nanogpt.log')], 'iterations', tmp_path)) == 1


def test_axis_is_logarithmic_if_runs_have_very_different_lengths(folder, tmp_path):
    def run_of(n):
        return sources.read_run(folder(evaluation(0, 4.0), training(n), evaluation(n, 3.0), name=f'{n}'))
    short, middle, long = run_of(10), run_of(90), run_of(100)
    assert axes_of([middle, long], 'tokens', tmp_path)[0].get_xscale() == 'linear'
    axes = axes_of([short, long], 'tokens', tmp_path)[0]
    assert axes.get_xscale() == 'log' and axes.get_xlim()[0] == 500  # half of the first evaluation after 0


def test_losses_past_the_first_tenth_fill_the_picture(folder, tmp_path):
    run = sources.read_run(folder(evaluation(0, 10.9), training(100), evaluation(100, 4.0), training(200),
                                  evaluation(200, 3.0), training(300, loss=None)))
    assert axes_of([run], 'seconds', tmp_path)[0].get_ylim() == pytest.approx((2.95, 4.05))
    ends_alone = sources.read_run(folder(evaluation(0, 10.9), training(20, loss=6.0), training(100, loss=4.0),
                                         evaluation(100, 4.0), name='ends'))
    assert axes_of([ends_alone], 'iterations', tmp_path)[0].get_ylim() == pytest.approx((3.9, 6.1))


def test_bits_per_byte_of_training_follow_from_those_of_the_validation_text(folder, tmp_path, monkeypatch, capsys):
    with_bytes = folder(evaluation(0, 4.0), training(1, loss=3.6), training(2, loss=3.2),
                        evaluation(2, 3.0) | dict(val_bpb=1.5))
    run = sources.read_run(with_bytes)
    from matplotlib import pyplot
    curves.draw([run], ['tokens'], tmp_path / 'bpb.png', y='bpb')
    panel, = pyplot.gcf().axes
    pyplot.close()
    line, points = panel.lines
    assert list(line.get_ydata()) == pytest.approx([1.8, 1.6]) and list(points.get_ydata()) == [1.5]
    assert panel.get_ylabel() == 'loss, bits per byte'
    without = folder(evaluation(0, 4.0), name='without')
    monkeypatch.setattr(
        sys, 'argv', ['plot.py', with_bytes, without, '--y=bpb', f'--out={tmp_path}/both.png'])
    plot.main()
    assert 'without has no val_bpb: left out (docs/evaluate.md says which datasets have it)' in capsys.readouterr().out


def test_flops_of_training_lines_follow_from_those_of_evaluations(folder, tmp_path):
    run = sources.read_run(folder(evaluation(0, 4.0) | dict(flops=0, tokens=0), training(1), training(2),
                                  evaluation(2, 3.0) | dict(flops=1000, tokens=200)))
    assert [line['flops'] for line in run.train + run.evals] == [500, 1000, 0, 1000]
    assert axes_of([run], 'flops', tmp_path)[0].get_xlabel() == 'FLOPs (floating-point operations)'


def test_spread_of_means_is_drawn_as_bars(folder, tmp_path):
    run = sources.read_run(folder(evaluation(0, 4.0) | dict(val_loss_spread=0.1), training(2),
                                  evaluation(2, 3.0) | dict(val_loss_spread=0.2)))
    bars, = axes_of([run], 'tokens', tmp_path)[0].containers
    assert bars.has_yerr


def test_labels_do_not_overlap(folder, tmp_path):
    runs = [sources.read_run(folder(evaluation(0, 4.0), evaluation(9, loss), name=name))
            for name, loss in (('a', 2.0), ('b', 2.001), ('c', 2.002), ('d', 3.0))]
    heights = {text.get_text()[0]: text.xyann[1] for text in axes_of(runs, 'iterations', tmp_path)[0].texts}
    line_height = heights['b'] - heights['a']
    assert line_height > 0.04 and heights['c'] - heights['b'] == pytest.approx(line_height)
    assert heights['d'] - heights['c'] > 0.5


def test_of_many_runs_the_first_and_the_lowest_have_names_and_the_others_one(folder, tmp_path):
    runs = [sources.read_run(folder(evaluation(0, 4.0), training(9), evaluation(9, 3 - i / 100), name=f'run{i:02}'))
            for i in range(20)]
    figure = figure_of(runs, ['tokens', 'seconds'], tmp_path)
    labels = [text.get_text() for panel in figure.axes for text in panel.texts]
    names = {f'run{i:02}  last {3 - i / 100:.2f}' for i in (0, *range(14, 20))}
    assert set(labels) == names | {'13 others  last 2.87 to 2.99'} and len(labels) == 8
    assert len(figure.get_suptitle().splitlines()) == 2
    colors = [line.get_color() for line in figure.axes[0].lines[::2]]
    assert colors.count(curves.GREY) == 13 and len(set(colors)) == 8
    loss, speed = figure_of(runs, ['iterations'], tmp_path).axes
    assert len(loss.texts) == 8 and len(speed.texts) == 7


def test_run_without_evaluations_is_drawn_with_its_training_loss(folder, tmp_path):
    run = sources.read_run(folder(training(1), training(2, loss=2.5)))
    axes, = axes_of([run], 'seconds', tmp_path)
    assert [text.get_text() for text in axes.texts] == ['out-a  last training mean 2.50']


def test_evaluations_are_points_and_training_losses_a_line_of_means(folder, tmp_path):
    """Nobody knows the validation loss between evaluations, and the noise of 1,000 losses fills an area."""
    noisy = [training(i, loss=3.0 + i % 2) for i in range(1, 1001)]
    run = sources.read_run(folder(evaluation(0, 4.0), *noisy, evaluation(1000, 2.0)))
    line, points = axes_of([run], 'tokens', tmp_path)[0].lines
    assert points.get_linestyle() == 'None' and points.get_marker() == 'o'
    assert list(points.get_xdata()) == [0, 100_000] and list(points.get_ydata()) == [4.0, 2.0]
    assert list(line.get_ydata()) == [3.5] * 100 and line.get_xdata()[0] == 550


def test_picture_has_tokens_and_seconds_and_names_data_and_machine(folder, tmp_path, monkeypatch, capsys):
    def run(name, dataset, processor='model name\t: AMD EPYC'):
        path = pathlib.Path(folder(evaluation(0, 4.0), training(2), evaluation(2, 3.0), name=name))
        (path / 'config.json').write_text(json.dumps(dict(dataset=dataset)))
        (path / 'ckpt' / 'iter_00000002').mkdir(parents=True)
        (path / 'ckpt' / 'iter_00000002' / 'state.json').write_text(
            json.dumps(dict(machine=[2, processor, 1, '2.13'])))
        return sources.read_run(str(path))
    a, b, c = run('a', 'shakespeare_char'), run('b', 'data/shakespeare_char/'), run('c', 'owt', 'NVIDIA H100')
    figure = figure_of([a, b], ['tokens', 'seconds'], tmp_path)
    assert [panel.get_xlabel() for panel in figure.axes] == ['tokens trained on', 'seconds since the start']
    assert [len(panel.texts) for panel in figure.axes] == [0, 2]  # each label once
    legend = 'points: validation; lines: training, means over a hundredth of the run'
    assert figure.get_suptitle() == f'Loss of a and b on shakespeare_char\n{legend}; AMD EPYC, 2 processes of 1 thread'
    assert figure_of([a, c], ['seconds'], tmp_path).get_suptitle() == (
        f'Loss of a and c on owt and shakespeare_char\n{legend}')
    assert figure_of([a, b, c, a], ['seconds'], tmp_path).get_suptitle().startswith('Loss of 4 runs on owt and ')
    curves.draw([a], ['seconds'], tmp_path / 'named.png', title='Mine')
    from matplotlib import pyplot
    assert pyplot.gcf().get_suptitle().splitlines()[0] == 'Mine'
    pyplot.close()
    # Without --x there are both panels. A run that has nothing to draw, or no tokens, is not passed over.
    (tmp_path / 'n.log').write_text(NANOGPT.partition('\n')[2])
    drawn = []
    monkeypatch.setattr(
        plot, 'draw', lambda runs, axes, out, y, title: drawn.append(([run.name for run in runs], axes)))
    for arguments in (['a', 'b'], ['a', folder(name='nothing')], ['a', f'n={tmp_path}/n.log']):
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, 'argv', ['plot.py', *arguments])
        plot.main()
    assert drawn == [(['a', 'b'], ['tokens', 'seconds']), (['a'], ['tokens', 'seconds']),
                     (['a', 'n'], ['seconds'])]
    assert capsys.readouterr().out.splitlines()[-2:] == [
        'nothing has no loss to draw: left out (train for longer, or with eval_iters)',
        'n does not say how many tokens it has trained on: drawn against seconds alone']
