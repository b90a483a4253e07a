"""Draw the losses of runs in one picture, against tokens and against seconds.

    python -m kilogpt.plot out-a out-b --out=runs.png
    python -m kilogpt.plot "nanoGPT=nanogpt.log" "quick start=out-quickstart" --x=seconds
    python -m kilogpt.plot out-a out-b --y=bpb

A source is the folder of a run, or a text with the console output of nanoGPT. NAME=SOURCE names a curve.
Points are evaluations, and a curve's label has the last of them. Nothing is drawn between points, since
nobody knows the validation loss there. The faint line is the training loss, in means over a hundredth of the
run. --y=bpb draws bits per byte of text; those of training take a token to have as many bytes as in the
validation text. --x=iterations has throughput beside the losses. The x axis is logarithmic if runs have very
different lengths. Of more than seven runs, the first and the six that end lowest have a colour and a name. The
title names the data and the machine, as far as the runs' folders say.

Seconds are wall-clock time. For a folder they include start-up, evaluations and saves, and add up over
resumed runs. For a text they are the sum of the logged times (kilogpt/plot/sources.py).
"""
import argparse
import sys

from kilogpt.plot.curves import KEYS, draw
from kilogpt.plot.sources import X, Y, read_run


def main():
    parser = argparse.ArgumentParser('python -m kilogpt.plot', description=__doc__, allow_abbrev=False,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('sources', nargs='+', metavar='[NAME=]SOURCE',
                        help='the folder of a run, or a text printed by nanoGPT')
    parser.add_argument('--x', choices=KEYS, help='the only x axis (default: tokens and seconds)')
    parser.add_argument('--y', choices=Y, default='loss', help='loss per token, or bits per byte (loss)')
    parser.add_argument('--title', default='', help='first line above the picture (default: the runs and their data)')
    parser.add_argument('--out', default='plot.png', help='file for the picture (plot.png)')
    options = parser.parse_args()
    runs = []
    for run in map(read_run, options.sources):
        if run.has_losses(options.y):
            runs.append(run)
        elif options.y == 'bpb':
            print(f'{run.name} has no val_bpb: left out (docs/evaluate.md says which datasets have it)')
        else:
            print(f'{run.name} has no loss to draw: left out (train for longer, or with eval_iters)')
    if not runs:
        sys.exit('error: there is nothing to draw: give folders of runs that have trained or evaluated')
    axes = [options.x] if options.x else ['tokens', 'seconds']
    for run in runs:
        for x in set(axes) & set(X):
            if not run.has(x):
                if options.x:
                    sys.exit(f'error: {run.name} does not say {X[x]}: choose --x=seconds or --x=iterations')
                print(f'{run.name} does not say {X[x]}: drawn against seconds alone')
                axes.remove(x)
    draw(runs, axes, options.out, options.y, options.title)


if __name__ == '__main__':
    main()
