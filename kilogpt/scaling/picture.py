"""Draw runs and the law fitted to them: losses against FLOPs, and predicted against measured losses."""
import numpy as np

from kilogpt.plot.curves import import_pyplot, save
from kilogpt.plot.sources import Y
from kilogpt.scaling.law import Point, flops_factor, largest

MOST_SIZES = 6  # in the legend
SAID = dict(N='parameters', D='tokens', C='FLOPs')


def draw(law, predictions, y, path):
    """Write the picture. predictions: Points with their predicted losses."""
    pyplot = import_pyplot()
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(14, 4.8), layout='constrained')
    sizes = sorted({point.n for point in law.points})
    colors = dict(zip(sizes, pyplot.get_cmap('viridis')(np.linspace(0, 0.9, len(sizes)))))
    shown = sizes if len(sizes) <= MOST_SIZES else [
        sizes[round(i * (len(sizes) - 1) / (MOST_SIZES - 1))] for i in range(MOST_SIZES)]
    for n in sizes:
        runs = [point for point in law.points if point.n == n]
        left.plot([run.c for run in runs], [run.loss for run in runs], 'o', color=colors[n],
                  label=f'{n:.3g} parameters' if n in shown else None)
        if 'D' in law.variables:
            draw_curve(left, law, same_size(runs), color=colors[n], linewidth=1)
    if len(law.variables) == 1 and 'D' not in law.variables:
        draw_curve(left, law, same_shape(law), color='black', linewidth=1)
    if law.has_optimum():
        flops = between(min(point.c for point in law.points), 10 * largest(law.points).c)
        draw_curve(left, law, [law.optimum(c) for c in flops], color='black', linestyle='--',
                   label='compute-optimal')
    left.plot([point.c for point in predictions], [point.loss for point in predictions], '*', color='black',
              markersize=10, label='predicted')
    letters = ', '.join(f'{letter}: {SAID[letter]}' for letter in law.variables)
    figure.suptitle(f'Validation loss of {len(law.points)} runs of {len(sizes)} size(s), and the law fitted to them:\n'
                    f'{law} ({letters})', fontsize='medium')
    left.set(xscale='log', xlabel='training cost in FLOPs (floating-point operations)', ylabel=f'last loss, {Y[y]}')
    left.legend(fontsize='small', frameon=False)
    predicted, _ = law.loss_at(law.points)
    for point, loss in zip(law.points, predicted):
        right.plot(point.loss, loss, 'o', color=colors[point.n])
    right.axline((point.loss, point.loss), slope=1, color='black', linewidth=0.5)
    right.set(xlabel=f'measured loss, {Y[y]}', ylabel=f'loss by the law, {Y[y]}')
    for panel in (left, right):
        panel.grid(alpha=0.25)
        panel.spines[['top', 'right']].set_visible(False)
    save(figure, path)
    pyplot.close(figure)


def draw_curve(panel, law, points, **style):
    panel.plot([point.c for point in points], law.loss_at(points)[0], **style)


def between(low, high):
    return np.geomspace(low, high, 100)


def same_size(runs):
    """Points of one size, from a third of its runs' tokens to three times these."""
    n, k = runs[0].n, flops_factor(runs[0])
    tokens = between(min(run.d for run in runs) / 3, max(run.d for run in runs) * 3)
    return [Point('', n, d, k * n * d) for d in tokens]


def same_shape(law):
    """Points up to ten times the FLOPs of the largest run, which grow as the runs do: in N, or in N and D."""
    last = largest(law.points)
    flops = between(min(point.c for point in law.points), 10 * last.c)
    share = 0.5 if law.variables == ('C',) else 1
    return [Point('', last.n * (c / last.c) ** share, last.d * (c / last.c) ** (1 - share), c) for c in flops]
