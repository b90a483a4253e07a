"""Draw runs in one picture: validation loss, with the training loss faint behind it.

    python -m kilogpt.plot out-a out-b --out=runs.png
    python -m kilogpt.plot "nanoGPT=nanogpt.log" "quick start=out-quickstart" --x=seconds

A source is the folder of a run, or a text with the console output of nanoGPT. NAME=SOURCE names a curve. If
the x axis is iterations, throughput is drawn beside the loss. The x axis is logarithmic if runs have very
different lengths.

Seconds are wall-clock time. For a folder they include start-up, evaluations and saves, and add up over
resumed runs. For a text they are the sum of the logged times (kilogpt/plot/sources.py).
"""
import argparse
import sys

from kilogpt.plot.curves import KEYS, draw
from kilogpt.plot.sources import read_run


def main():
    parser = argparse.ArgumentParser('python -m kilogpt.plot', description=__doc__, allow_abbrev=False,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('sources', nargs='+', metavar='[NAME=]SOURCE',
                        help='the folder of a run, or a text printed by nanoGPT')
    parser.add_argument('--x', default='iterations', choices=KEYS, help='the x axis (iterations)')
    parser.add_argument('--out', default='plot.png', help='file for the picture (plot.png)')
    options = parser.parse_args()
    runs = [read_run(source) for source in options.sources]
    for run in runs:
        if any(KEYS[options.x] not in line for line in run.train):
            sys.exit(f'error: {run.name} does not say how many {options.x} it has trained on: '
                     'choose --x=seconds or --x=iterations')
    draw(runs, options.x, options.out)


if __name__ == '__main__':
    main()
