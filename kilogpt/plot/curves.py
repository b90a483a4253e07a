"""Draw the losses of runs in one picture, and their throughput beside it."""
import itertools
import math
import statistics
import sys
from typing import NamedTuple

KEYS = dict(iterations='iter', tokens='tokens', seconds='seconds')  # {value of --x: key in a run's lines}
COLORS = ('#0072b2', '#d55e00', '#009e73', '#cc79a7', '#e69f00', '#56b4e9', '#000000')  # Okabe and Ito


class Curve(NamedTuple):
    name: str
    color: str
    x: list
    y: list


def curve_of(lines, x, y, name, color):
    """The Curve of key y over key x, of the lines with a finite y."""
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
    """(bottom, top) of the curves without their first tenths, whose high losses would flatten the rest."""
    settled = []
    for curve in curves:
        settled += [y for x, y in zip(curve.x, curve.y) if x >= curve.x[-1] / 10]
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
        first = min(min(filter(None, curve.x)) for curve in curves)  # 0 cannot be on a logarithmic axis
        axes.set_xlim(left=first / 2)
    axes.xaxis.set_major_formatter(ticker.EngFormatter(sep='') if x == 'tokens' else '{x:,.10g}')
    axes.set(xlabel=x, ylim=y_limits)
    axes.grid(alpha=0.25)
    axes.spines[['top', 'right']].set_visible(False)
    axes.figure.draw_without_rendering()  # computes the final limits and sizes
    label_ends(axes, curves, labels)


def label_ends(axes, curves, labels):
    """Write each label beside the axes, at the height of its curve's end or just above the label below."""
    bottom, top = axes.get_ylim()
    points = axes.get_window_extent().height / axes.figure.dpi * 72
    free = 0.0  # the lowest free height, as a share of the axes' height
    for curve, label in sorted(zip(curves, labels), key=lambda pair: pair[0].y[-1]):
        end = curve.x[-1], curve.y[-1]
        height = max(free, (end[1] - bottom) / (top - bottom))
        free = height + 16 / points
        leader = dict(arrowstyle='-', linestyle=':', color=curve.color, alpha=0.6, relpos=(0, 0.5))
        axes.annotate(label, end, (1.02, height), textcoords='axes fraction', va='center', color=curve.color,
                      fontweight='bold', arrowprops=leader)
