"""Compare runs: what they reached, at which cost, and which differences are larger than the noise.

    python -m kilogpt.compare out-a out-b
    python -m kilogpt.compare 'base=out-base-s*' 'wide=out-wide-s*' --table=compare.md --loss=3.2

A source is the folder of a run, or a text with the console output of nanoGPT. A pattern in quotes is one
candidate with several seeds, one for each match. NAME=SOURCE names a candidate. The first candidate is the
baseline, with which the others are compared.

The report is Markdown. The picture has the losses against tokens, seconds and FLOPs: points are means over
the seeds, and bars are their standard deviation. docs/measuring.md says what each number means.
"""
import argparse
import sys

from kilogpt.compare.candidates import best_value, easiest_value, mean_run, read_candidates
from kilogpt.compare.report import describe
from kilogpt.plot.curves import draw
from kilogpt.plot.sources import X, Y


def main():
    parser = argparse.ArgumentParser('python -m kilogpt.compare', description=__doc__, allow_abbrev=False,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('sources', nargs='+', metavar='[NAME=]SOURCE',
                        help='the folder of a run, a pattern for several seeds, or a text printed by nanoGPT')
    parser.add_argument('--y', choices=Y, default='loss', help='loss per token, or bits per byte (loss)')
    parser.add_argument('--loss', type=float, help='report the cost to reach this value of --y '
                        '(default: the lowest that all runs reach)')
    parser.add_argument('--table', help='file for the report (default: it is only printed)')
    parser.add_argument('--out', default='compare.png', help='file for the picture (compare.png)')
    options = parser.parse_args()
    candidates = read_candidates(options.sources, options.y)
    reachable = min(best_value(run, options.y) for candidate in candidates for run in candidate.runs)
    if options.loss is not None and options.loss < reachable:
        sys.exit(f'error: no run reaches --loss={options.loss:g}: '
                 f'the lowest is {reachable:.4f}, choose that or more')
    target = easiest_value(candidates, options.y) if options.loss is None else options.loss
    report = describe(candidates, options.y, target)
    print(report)
    if options.table:
        try:
            with open(options.table, 'w', encoding='utf-8') as file:
                file.write(report + '\n')
        except OSError as error:
            sys.exit(f'error: --table={options.table} cannot be written: {error}')
        print(f'wrote {options.table}')
    draw_candidates(candidates, options.y, options.out)


def draw_candidates(candidates, y, path):
    """Draw the candidates against tokens, seconds and FLOPs, as far as every log says these."""
    drawn = []
    for run in [mean_run(candidate, y) for candidate in candidates]:
        if run.has_losses(y):
            drawn.append(run)
        else:
            print(f'{run.name} is not drawn: its runs have no evaluation at the same iteration')
    axes = ['tokens', 'seconds', 'flops']
    for x in X:
        without = [run.name for run in drawn if not run.has(x)]
        if without:
            print(f'{", ".join(without)} does not say {X[x]}: not drawn against {x}')
            axes.remove(x)
    if drawn:
        draw(drawn, axes, path, y)


if __name__ == '__main__':
    main()
