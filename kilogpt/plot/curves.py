"""Draw runs in one picture: validation loss, with the training loss faint behind it.

    python -m kilogpt.plot out-a out-b --out=runs.png
    python -m kilogpt.plot "nanoGPT=nanogpt.log" "quick start=out-quickstart" --x=seconds

A source is the folder of a run, or a text with the console lines of a nanoGPT run. NAME=SOURCE names a curve.
Over iterations, throughput stands beside the loss. Runs of very different lengths get a logarithmic axis.

Seconds are by the clock. A folder's count from the start of the process, evaluations and saves included, and
add up where a run was resumed. A text's are the sum of its iterations' times, evaluations included, without
the time until the first iteration: exact with nanoGPT's log_interval=1; otherwise each iteration between two
lines is taken to last as long as the latest one that was logged without an evaluation.
"""
import argparse
import bisect
import itertools
import json
import math
import os
import re
import statistics
import sys
from typing import NamedTuple

KEYS = dict(iterations='iter', tokens='tokens', seconds='seconds')  # of --x, in a run's lines
COLORS = ('#0072b2', '#d55e00', '#009e73', '#cc79a7', '#e69f00', '#56b4e9', '#000000')  # Okabe and Ito's


class Run(NamedTuple):
    """Lines as in metrics.jsonl, sorted by iteration, each with its seconds; nanoGPT's have no tokens."""
    name: str
    train: list
    evals: list


class Curve(NamedTuple):
    name: str
    color: str
    x: list
    y: list


def read_run(source):
    """The Run of an argument: PATH or NAME=PATH."""
    name, equals, path = source.partition('=')
    if not equals or os.path.exists(source):
        path = source
        name = os.path.basename(os.path.normpath(path))
    lines = read_text(path) if os.path.isfile(path) else read_folder(path)
    # a resumed run repeats the iterations since its checkpoint: the last line of each counts
    train = {line['iter']: line for line in lines if 'loss' in line}
    evals = {line['iter']: line for line in lines if 'val_loss' in line}
    iterations = sorted(train)
    for iteration, line in evals.items():  # an evaluation has the clock of the latest training line
        logged = bisect.bisect_right(iterations, iteration)
        latest = train[iterations[logged - 1]] if logged else dict(seconds=0.0, tokens=0)
        line |= {key: latest[key] for key in ('seconds', 'tokens') if key in latest}
    return Run(name, [train[i] for i in iterations], [evals[i] for i in sorted(evals)])


def read_folder(folder):
    """The lines of a run's metrics.jsonl, training lines with the seconds since the run first started."""
    try:
        with open(os.path.join(folder, 'metrics.jsonl'), encoding='utf-8') as file:
            lines = [json.loads(line) for line in file]
    except OSError:
        sys.exit(f'error: {folder} has no metrics.jsonl: '
                 'give folders that train.py wrote, or texts that nanoGPT printed')
    train = [line for line in lines if 'loss' in line]
    for line, seconds in zip(train, total_seconds(train)):
        line['seconds'] = seconds
    return lines


def total_seconds(train):
    """[seconds since the run first started] of training lines, whose own start again with each process."""
    totals = []
    total, iterations = 0.0, 1
    previous = dict(iter=0, seconds=0.0)
    for line in train:
        is_repeated = line['iter'] <= previous['iter']
        if not is_repeated:
            iterations = line['iter'] - previous['iter']
        if 'seconds' not in line:  # an older run
            total += iterations * line['dt_ms'] / 1000
        elif is_repeated or line['seconds'] < previous.get('seconds', math.inf):
            total += line['seconds']  # of a new process
        else:
            total += line['seconds'] - previous['seconds']
        totals.append(total)
        previous = line
    return totals


def read_text(path):
    """What nanoGPT printed, as lines of metrics.jsonl. Its iteration n makes update n + 1."""
    lines = []
    total_ms, plain_ms = 0.0, None
    previous = evaluated = None  # iterations
    with open(path, encoding='utf-8') as file:
        for text in file:
            step = re.match(r'step (\d+): train loss \S+, val loss (\S+)', text)
            iteration = re.match(r'iter (\d+): loss (\S+), time (\S+)ms', text)
            if step:
                evaluated = int(step[1])
                lines.append(dict(iter=evaluated, val_loss=float(step[2])))
            elif iteration:
                number, ms = int(iteration[1]), float(iteration[3])
                if number != evaluated or plain_ms is None:  # an iteration's time includes its evaluation
                    plain_ms = ms
                not_logged = 0 if previous is None else max(0, number - previous - 1)
                total_ms += not_logged * plain_ms + ms
                previous = number
                lines.append(dict(iter=number + 1, loss=float(iteration[2]), seconds=total_ms / 1000))
    if not lines:
        sys.exit(f'error: {path} has no line such as "step 250: train loss 2.4293, val loss 2.4447"')
    return lines


def curve_of(lines, x, y, name, color):
    """Key y over key x of those lines that have a finite y."""
    found = [(line[x], line[y]) for line in lines if line.get(y) is not None and math.isfinite(line[y])]
    return Curve(name, color, [x for x, _ in found], [y for _, y in found])


def draw(runs, x, path):
    """Write a picture of the runs' losses over x: iterations, tokens or seconds."""
    try:
        import matplotlib
    except ImportError:
        sys.exit('error: plots need matplotlib: pip install matplotlib')
    matplotlib.use('Agg')
    from matplotlib import pyplot
    faint, losses, speeds = [], [], []
    for run, color in zip(runs, itertools.cycle(COLORS)):
        training = curve_of(run.train, KEYS[x], 'loss', run.name, color)
        validation = curve_of(run.evals, KEYS[x], 'val_loss', run.name, color)
        faint.append(training)
        losses.append(validation if validation.x else training._replace(name=f'{run.name} (training)'))
        speeds.append(curve_of(run.train, KEYS[x], 'tokens_per_sec', run.name, color))
    losses = [curve for curve in losses if curve.x]
    speeds = [curve for curve in speeds if curve.x and x == 'iterations']
    if not losses:
        sys.exit('error: the runs have no loss to draw: train for longer, or with eval_iters')
    panels = 2 if speeds else 1
    figure, axes = pyplot.subplots(1, panels, figsize=(2 + 6 * panels, 4.5), squeeze=False,
                                   layout='constrained')
    loss_axes = axes[0, 0]
    for curve in faint:
        loss_axes.plot(curve.x, curve.y, color=curve.color, alpha=0.25, linewidth=0.7)
    loss_axes.set_ylabel('validation loss, faint: training (nats per token)')
    labels = [f'{curve.name}  {curve.y[-1]:.2f}' for curve in losses]
    draw_panel(loss_axes, losses, x, loss_limits([*losses, *faint]), labels)
    if speeds:
        axes[0, 1].set_ylabel('tokens per second')
        labels = [f'{curve.name}  {statistics.median(curve.y):,.0f}' for curve in speeds]
        draw_panel(axes[0, 1], speeds, x, (0, None), labels)
    figure.savefig(path, dpi=150)
    print(f'wrote {path}')


def loss_limits(curves):
    """(bottom, top) that show curves but for their first tenths: initial losses would flatten the ends."""
    settled = [y for curve in curves for x, y in zip(curve.x, curve.y) if x >= curve.x[-1] / 10]
    margin = 0.05 * (max(settled) - min(settled)) or 0.1
    return min(settled) - margin, max(settled) + margin


def draw_panel(axes, curves, x, y_limits, labels):
    """Draw curves over x, each with its label to the right of the axes."""
    from matplotlib import ticker
    for curve in curves:
        if len(curve.x) <= 100:
            axes.plot(curve.x, curve.y, color=curve.color, linewidth=1.8, marker='o', markersize=3.5)
        else:
            axes.plot(curve.x, curve.y, color=curve.color, linewidth=0.8)
    ends = [curve.x[-1] for curve in curves]
    if max(ends) >= 10 * min(ends) > 0:
        axes.set_xscale('log', nonpositive='mask')
        axes.xaxis.set_major_locator(ticker.LogLocator(subs=(1, 3)))
        first = min(min(filter(None, curve.x)) for curve in curves)  # 0 has no place on such an axis
        axes.set_xlim(left=first / 2)
    axes.xaxis.set_major_formatter(ticker.EngFormatter(sep='') if x == 'tokens' else '{x:,.10g}')
    axes.set(xlabel=x, ylim=y_limits)
    axes.grid(alpha=0.25)
    axes.spines[['top', 'right']].set_visible(False)
    axes.figure.draw_without_rendering()  # settles limits and sizes
    label_ends(axes, curves, labels)


def label_ends(axes, curves, labels):
    """Write each label beside the axes, at the height of its curve's end or just above the label below."""
    bottom, top = axes.get_ylim()
    points = axes.get_window_extent().height / axes.figure.dpi * 72
    free = 0.0  # heights are shares of the axes
    for curve, label in sorted(zip(curves, labels), key=lambda pair: pair[0].y[-1]):
        end = curve.x[-1], curve.y[-1]
        height = max(free, (end[1] - bottom) / (top - bottom))
        free = height + 16 / points
        leader = dict(arrowstyle='-', linestyle=':', color=curve.color, alpha=0.6, relpos=(0, 0.5))
        axes.annotate(label, end, (1.02, height), textcoords='axes fraction', va='center', color=curve.color,
                      fontweight='bold', arrowprops=leader)


def main():
    parser = argparse.ArgumentParser('python -m kilogpt.plot', description=__doc__, allow_abbrev=False,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('sources', nargs='+', metavar='[NAME=]SOURCE',
                        help='the folder of a run, or a text that nanoGPT printed')
    parser.add_argument('--x', default='iterations', choices=KEYS, help='what is drawn over (iterations)')
    parser.add_argument('--out', default='plot.png', help='the file of the picture (plot.png)')
    options = parser.parse_args()
    runs = [read_run(source) for source in options.sources]
    for run in runs:
        if any(KEYS[options.x] not in line for line in run.train):
            sys.exit(f'error: {run.name} does not say how many {options.x} it has trained on: '
                     'choose --x=seconds or --x=iterations')
    draw(runs, options.x, options.out)
