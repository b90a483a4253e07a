"""Fit a scaling law to the last evaluations of runs, and predict larger runs.

    python -m kilogpt.scaling out-scaling-*
    python -m kilogpt.scaling out-scaling-* --params=1e9 --tokens=2e10 --out=scaling.png

The law is L(N, D) = E + A / N^alpha + B / D^beta, of N parameters and D tokens, fitted as by Hoffmann et al.
2022. If all runs have the same size or the same number of tokens, the law has the other term alone. If all
have the same number of tokens per parameter, the law has a term of FLOPs. Intervals are from a bootstrap over
runs. docs/measuring.md says which runs make a good fit, and what the numbers do not say.
"""
import argparse
import sys

import numpy as np

from kilogpt.configurator import exit_on_error
from kilogpt.plot.sources import Y, describe_datasets, describe_schedule, is_finite, read_run
from kilogpt.scaling.law import Law, Point, asked_run, held_out, larger_runs, largest, typical_residual
from kilogpt.scaling.picture import draw


def main():
    parser = argparse.ArgumentParser('python -m kilogpt.scaling', description=__doc__, allow_abbrev=False,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('runs', nargs='+', metavar='RUN', help='the folder of a run')
    parser.add_argument('--y', choices=Y, default='loss', help='loss per token, or bits per byte (loss)')
    parser.add_argument('--params', type=float, help='with --tokens: predict a model of that many parameters')
    parser.add_argument('--tokens', type=float, help='with --params: trained on that many tokens')
    parser.add_argument('--bootstrap', type=int, default=200, help='samples for the intervals (200)')
    parser.add_argument('--out', default='scaling.png', help='file for the picture (scaling.png)')
    options = parser.parse_args()
    asked = [value for value in (options.params, options.tokens) if value is not None]
    if len(asked) == 1 or min(asked, default=1) <= 0:
        sys.exit('error: --params and --tokens belong together: give both, as numbers above 0')
    if options.bootstrap < 20:
        sys.exit(f'error: --bootstrap={options.bootstrap} is too few samples: give 20 or more')
    np.seterr(over='ignore')  # a few noisy runs may give a scale that is too large for a float: inf
    with exit_on_error():
        points, sentences = read_points(options.runs, options.y)
        law = Law(points, options.bootstrap)
        asked = [asked_run(law, *asked)] if asked else larger_runs(law)
    predicted, samples = law.loss_at(asked)
    print(f'{law}, fitted to {len(points)} runs of {len({point.n for point in points})} size(s)\n')
    print_coefficients(law)
    print()
    print_predictions(asked, predicted, samples)
    print()
    for sentence in [*sentences, *describe_fit(law, asked)]:
        print(f'- {sentence}')
    draw(law, [point._replace(loss=loss) for point, loss in zip(asked, predicted)], options.y, options.out)


def read_points(sources, y):
    """(Points of the runs' last evaluations, sentences about runs that should not be trusted)."""
    runs, points, sentences = [], [], []
    for source in sources:
        run = read_run(source)
        last = run.evals[-1] if run.evals else {}
        loss = last.get(f'val_{y}')
        if not is_finite(loss):
            sentences.append(f'{run.name} is left out: its last evaluation has no finite val_{y}.')
        elif not (last.get('params') and last.get('flops')):
            sentences.append(f'{run.name} is left out: its log does not say its parameters and FLOPs, '
                             'or it has not trained.')
        else:
            runs.append(run)
            points.append(Point(run.name, last['params'], last['tokens'], last['flops'], loss))
    if not runs:
        raise ValueError('no run can be used: ' + ' '.join(sentences))
    for run in runs:
        if unfinished := describe_schedule(run):
            sentences.append(f'{unfinished}: its loss is above that of a finished run.')
    if differing := describe_datasets(runs, y):
        sentences.append(differing)
    return points, sentences


def interval(samples, form):
    low, high = np.percentile(samples, [2.5, 97.5])
    return f'{low:{form}} to {high:{form}}'


def print_coefficients(law):
    print('| coefficient | value | 95% interval |\n| - | - | - |')
    meanings = dict(a=' (optimal N grows as C^a)', b=' (optimal D grows as C^b)')
    for name, value, samples in law.described():
        print(f'| {name}{meanings.get(name, "")} | {value:.4g} | {interval(samples, ".4g")} |')


def print_predictions(points, losses, samples):
    print('| predicted run | parameters | tokens | FLOPs | loss | 95% interval |\n| - | - | - | - | - | - |')
    for point, loss, sampled in zip(points, losses, samples.T):
        print(f'| {point.name} | {point.n:.3g} | {point.d:.3g} | {point.c:.3g} | {loss:.4f} | '
              f'{interval(sampled, ".4f")} |')


def describe_fit(law, asked):
    """Sentences on how well the law fits, and on what it cannot say."""
    sentences = [f'Measured and predicted losses of these runs differ by {typical_residual(law):.4f} '
                 '(root mean square).']
    checked = held_out(law.points)
    if checked:
        last, loss = checked
        sentences.append(f'Fitted without {last.name}, which has the most FLOPs, the law predicts {loss:.4f} '
                         f'for it; measured: {last.loss:.4f}.')
    reasons = dict(D='All runs have the same size', N='All runs have the same number of tokens',
                   C='All runs have about the same number of tokens per parameter')
    if len(law.variables) == 1:
        reason = reasons[law.variables[0]]
        sentences.append(f'{reason}, so that the law has one term and no compute-optimal size.')
    elif not law.has_optimum():
        sentences.append('The loss of these runs does not fall with both N and D: '
                         'there is no compute-optimal size.')
    factor = max(point.c for point in asked) / largest(law.points).c
    if factor > 10.001:
        sentences.append(f'A predicted run has {factor:.0f} times the FLOPs of the largest run. '
                         'Beyond 10 times, the interval says too little about the error.')
    return sentences


if __name__ == '__main__':
    main()
