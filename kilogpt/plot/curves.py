"""Draw the losses of runs in one picture, and their throughput beside it."""
import math
import statistics
import sys
from typing import NamedTuple

from kilogpt.plot.sources import Y, is_finite

KEYS = dict(iterations='iter', tokens='tokens', seconds='seconds', flops='flops')  # {--x: key of a line}
COLORS = ('#0072b2', '#d55e00', '#009e73', '#cc79a7', '#e69f00', '#56b4e9', '#000000')  # Okabe and Ito
MOST_MEANS = 100  # a line of more values is drawn as this many means
MOST_NAMES = len(COLORS)  # runs with a colour and a label of their own; more are grey, with one label
GREY = '#999999'
UNITS = dict(iterations='iterations', tokens='tokens trained on', seconds='seconds since the start',
             flops='FLOPs (floating-point operations)')


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


def draw(runs, axes, path, y='loss', title=''):
    """Write a picture of the runs' losses, with a panel for each of `axes`, which are names in KEYS.

    Iterations alone have a panel of the throughput too. y: 'loss', or 'bpb' for bits per byte. title: its first
    line; '' = the number of runs and their data.
    """
    pyplot = import_pyplot()
    colored = color(runs, y)
    speeds = []
    if axes == ['iterations']:
        speeds = [speed_curve(run, color) for run, color in colored]
        speeds = [speed for speed in speeds if speed.x]
    panels = len(axes) + bool(speeds)
    figure, (row,) = pyplot.subplots(1, panels, figsize=(2 + 5.5 * panels, 4.8), squeeze=False,
                                     layout='constrained')
    figure.suptitle(describe_runs(runs, y, title), fontsize='medium')
    row[0].set_ylabel(f'loss, {Y[y]}')
    for panel, x in zip(row, axes):
        draw_losses(panel, colored, x, y, is_labelled=x == axes[-1])
    if speeds:
        row[-1].set_ylabel('tokens per second')
        row[-1].yaxis.set_major_formatter('{x:,.0f}')
        for speed in speeds:
            row[-1].plot(speed.x, speed.y, color=speed.color, linewidth=1)
        finish_panel(row[-1], speeds, 'iterations', (0, None))
        label_ends(row[-1], [speed for speed in speeds if speed.color != GREY])
    save(figure, path)


def save(figure, path):
    """Write a figure to a file, whose name says its format."""
    try:
        figure.savefig(path, dpi=150)
    except (OSError, ValueError) as error:
        sys.exit(f'error: --out={path} cannot be written: {error}')
    print(f'wrote {path}')


def color(runs, y):
    """[(run, color)]: all but the first and those with the lowest last values are grey if there are many."""
    def last(run):
        values = [line[f'val_{y}'] for line in run.evaluations(y)]
        return (values or [line[y] for line in run.train if is_finite(line.get(y))])[-1]

    named = runs
    if len(runs) > MOST_NAMES:
        named = runs[:1] + sorted(runs[1:], key=last)[:MOST_NAMES - 1]
    colors = iter(COLORS)
    colored = [(run, next(colors) if any(run is other for other in named) else GREY) for run in runs]
    return sorted(colored, key=lambda pair: pair[1] != GREY)  # grey ones are drawn first


def describe_runs(runs, y, title=''):
    """Two lines: which losses of which runs, and what points and lines are, with the machine if it is one.

    title: as in `draw`.
    """
    datasets, machines = ({getattr(run, key) for run in runs} - {''} for key in ('dataset', 'machine'))
    if not title:
        *first, last = [run.name for run in runs]
        which = f'{", ".join(first)} and {last}' if len(first) in (1, 2) else f'{len(runs)} runs' if first else last
        names = ' and '.join(sorted(datasets)) if len(datasets) < 3 else f'{len(datasets)} datasets'
        title = f'Loss of {which}' + (f' on {names}' if names else '')
    facts = ['points: validation', 'lines: training, means over a hundredth of the run']
    if any(f'val_{y}_spread' in line for run in runs for line in run.evals):
        facts[0] += ', mean and standard deviation over seeds'
    if y == 'bpb':
        facts[1] += ', with the bytes per token of the validation text'
    if len(machines) == 1:
        facts += machines
    return f'{title}\n{"; ".join(facts)}'


def speed_curve(run, color):
    """The Curve of a run's tokens per second, with their median as its label."""
    curve = curve_of(run.train, 'iter', 'tokens_per_sec', color)
    median = statistics.median(curve.y) if curve.y else 0.0
    return averaged(curve)._replace(label=f'{run.name}  median {median:,.0f}', end=median)


def draw_losses(panel, colored, x, y, is_labelled):
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
    if is_labelled:
        label_ends(panel, with_one_label_for_grey(labelled))


def with_one_label_for_grey(curves):
    """The curves, of which the lowest grey one has a label for all grey ones, and the others are left out."""
    grey = sorted((curve for curve in curves if curve.color == GREY), key=lambda curve: curve.end)
    if len(grey) > 1:
        grey = [grey[0]._replace(label=f'{len(grey)} others  last {grey[0].end:.2f} to {grey[-1].end:.2f}')]
    return [curve for curve in curves if curve.color != GREY] + grey


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
    """Scale the axes of a panel to its curves over x, and name them."""
    from matplotlib import ticker
    ends = [curve.x[-1] for curve in curves]
    if max(ends) >= 10 * min(ends) > 0:
        panel.set_xscale('log', nonpositive='mask')
        panel.xaxis.set_major_locator(ticker.LogLocator(subs=(1, 3)))
        first = min(min(filter(None, curve.x)) for curve in curves)  # 0 cannot be on a logarithmic axis
        panel.set_xlim(left=first / 2)
    formats = dict(tokens=ticker.EngFormatter(sep=''), flops='{x:.3g}')
    panel.xaxis.set_major_formatter(formats.get(x, '{x:,.10g}'))
    panel.set(xlabel=UNITS[x], ylim=y_limits)
    panel.grid(alpha=0.25)
    panel.spines[['top', 'right']].set_visible(False)


def label_ends(panel, curves):
    """Write each label beside the axes, at the height of its curve's end or just above the label below."""
    panel.figure.draw_without_rendering()  # computes the final limits and sizes
    bottom, top = panel.get_ylim()
    points = panel.get_window_extent().height / panel.figure.dpi * 72
    free = 0.0  # the lowest free height, as a share of the axes' height
    for curve in sorted(curves, key=lambda curve: curve.end):
        height = max(free, (curve.end - bottom) / (top - bottom))
        free = height + 16 / points
        leader = dict(arrowstyle='-', linestyle=':', color=curve.color, alpha=0.6, relpos=(0, 0.5))
        panel.annotate(curve.label, (curve.x[-1], curve.end), (1.02, height), textcoords='axes fraction',
                       va='center', color=curve.color, fontweight='bold', arrowprops=leader)
