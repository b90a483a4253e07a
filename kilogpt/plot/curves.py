"""Draw the losses of runs in one picture, and their throughput beside it."""
import itertools
import math
import statistics
import sys
from typing import NamedTuple

from kilogpt.plot.sources import Y, is_finite

KEYS = dict(iterations='iter', tokens='tokens', seconds='seconds', flops='flops')  # {--x: key of a line}
COLORS = ('#0072b2', '#d55e00', '#009e73', '#cc79a7', '#e69f00', '#56b4e9', '#000000')  # Okabe and Ito
MOST_MEANS = 100  # a line of more values is drawn as this many means


class Curve(NamedTuple):
    """Values y over x. label: its text beside the axes, at the height `end`.

    spread: the standard deviation at each value, if y has means of several runs.
    """
    color: str
    x: list
    y: list
    label: str = ''
    end: float = 0.0
    spread: tuple = ()


def curve_of(lines, x, y, color):
    """The Curve of key y over key x, of the lines with a finite y."""
    found = [line for line in lines if is_finite(line.get(y))]
    spread = tuple(line[f'{y}_spread'] for line in found if f'{y}_spread' in line)
    return Curve(color, [line[x] for line in found], [line[y] for line in found], spread=spread)


def averaged(curve):
    """The curve, or if it has many values the means of consecutive ones: noise would fill an area."""
    size = math.ceil(len(curve.x) / MOST_MEANS)
    starts = range(0, len(curve.x), max(1, size))
    return curve._replace(x=[statistics.mean(curve.x[start:start + size]) for start in starts],
                          y=[statistics.mean(curve.y[start:start + size]) for start in starts])


def import_pyplot():
    """matplotlib.pyplot, which draws into files."""
    try:
        import matplotlib
    except ImportError:
        sys.exit('error: plots need matplotlib: pip install matplotlib')
    matplotlib.use('Agg')
    from matplotlib import pyplot
    return pyplot


def draw(runs, axes, path, y='loss'):
    """Write a picture of the runs' losses, with a panel for each of `axes`, which are names in KEYS.

    Iterations alone have a panel of the throughput too. y: 'loss', or 'bpb' for bits per byte.
    """
    pyplot = import_pyplot()
    colored = list(zip(runs, itertools.cycle(COLORS)))
    speeds = []
    if axes == ['iterations']:
        speeds = [speed_curve(run, color) for run, color in colored]
        speeds = [speed for speed in speeds if speed.x]
    panels = len(axes) + bool(speeds)
    figure, (row,) = pyplot.subplots(1, panels, figsize=(2 + 6 * panels, 4.8), squeeze=False,
                                     layout='constrained')
    figure.suptitle(describe_runs(runs), fontsize='medium')
    lines = ';\nlines: training, means of a hundredth of the run' if y == 'loss' else ''
    row[0].set_ylabel(f'loss in {Y[y]}. Points: validation{lines}')
    for panel, x in zip(row, axes):
        draw_losses(panel, colored, x, y)
    if speeds:
        row[-1].set_ylabel('tokens per second')
        row[-1].yaxis.set_major_formatter('{x:,.0f}')
        for speed in speeds:
            row[-1].plot(speed.x, speed.y, color=speed.color, linewidth=1)
        finish_panel(row[-1], speeds, 'iterations', (0, None))
    save(figure, path)


def save(figure, path):
    """Write a figure to a file, whose name says its format."""
    try:
        figure.savefig(path, dpi=150)
    except (OSError, ValueError) as error:
        sys.exit(f'error: --out={path} cannot be written: {error}')
    print(f'wrote {path}')


def describe_runs(runs):
    """The data and the machine of all runs in one line, or in a line for each run that tells them."""
    known = [run for run in runs if run.about]
    if len({run.about for run in known}) == 1:
        return known[0].about
    return '\n'.join(f'{run.name}: {run.about}' for run in known)


def speed_curve(run, color):
    """The Curve of a run's tokens per second, with their median as its label."""
    curve = curve_of(run.train, 'iter', 'tokens_per_sec', color)
    median = statistics.median(curve.y) if curve.y else 0.0
    return averaged(curve)._replace(label=f'{run.name}  median {median:,.0f}', end=median)


def draw_losses(panel, colored, x, y):
    """Draw validation losses as points and training losses as lines. colored: [(run, color)]."""
    drawn, labelled = [], []
    for run, color in colored:
        training = averaged(curve_of(run.train, KEYS[x], y, color))
        validation = curve_of(run.evals, KEYS[x], f'val_{y}', color)
        panel.plot(training.x, training.y, color=color, linewidth=1, alpha=0.4 if validation.x else 1.0)
        size = 5 if len(validation.x) < 50 else 2
        panel.plot(validation.x, validation.y, 'o', color=color, markersize=size)
        if validation.spread:
            panel.errorbar(validation.x, validation.y, validation.spread, fmt='none', ecolor=color, capsize=2)
        shown, kind = (validation, 'last') if validation.x else (training, 'last training mean')
        drawn.append([curve for curve in (training, validation) if curve.x])
        labelled.append(shown._replace(label=f'{run.name}  {kind} {shown.y[-1]:.2f}', end=shown.y[-1]))
    finish_panel(panel, labelled, x, loss_limits(drawn))


def loss_limits(runs):
    """(bottom, top) of runs without their first tenths, whose high losses would flatten the rest.

    runs: the curves of each.
    """
    settled = []
    for curves in runs:
        start = min(curve.x[0] for curve in curves)  # in seconds, training begins later than at 0
        for curve in curves:
            begin = start + (curve.x[-1] - start) / 10
            settled += [y for x, y in zip(curve.x, curve.y) if x >= begin]
    margin = 0.05 * (max(settled) - min(settled)) or 0.1
    return min(settled) - margin, max(settled) + margin


def finish_panel(panel, curves, x, y_limits):
    """Scale the axes of a panel to its curves over x, and write their labels."""
    from matplotlib import ticker
    ends = [curve.x[-1] for curve in curves]
    if max(ends) >= 10 * min(ends) > 0:
        panel.set_xscale('log', nonpositive='mask')
        panel.xaxis.set_major_locator(ticker.LogLocator(subs=(1, 3)))
        first = min(min(filter(None, curve.x)) for curve in curves)  # 0 cannot be on a logarithmic axis
        panel.set_xlim(left=first / 2)
    formats = dict(tokens=ticker.EngFormatter(sep=''), flops='{x:.3g}')
    panel.xaxis.set_major_formatter(formats.get(x, '{x:,.10g}'))
    panel.set(xlabel=x, ylim=y_limits)
    panel.grid(alpha=0.25)
    panel.spines[['top', 'right']].set_visible(False)
    panel.figure.draw_without_rendering()  # computes the final limits and sizes
    label_ends(panel, curves)


def label_ends(panel, curves):
    """Write each label beside the axes, at the height of its curve's end or just above the label below."""
    bottom, top = panel.get_ylim()
    points = panel.get_window_extent().height / panel.figure.dpi * 72
    free = 0.0  # the lowest free height, as a share of the axes' height
    for curve in sorted(curves, key=lambda curve: curve.end):
        height = max(free, (curve.end - bottom) / (top - bottom))
        free = height + 16 / points
        leader = dict(arrowstyle='-', linestyle=':', color=curve.color, alpha=0.6, relpos=(0, 0.5))
        panel.annotate(curve.label, (curve.x[-1], curve.end), (1.02, height), textcoords='axes fraction',
                       va='center', color=curve.color, fontweight='bold', arrowprops=leader)
