"""Show what happened in a run on one page: `events` of all its processes.

    python train.py config/quickstart.py --events=True
    python -m kilogpt.report events out-quickstart

Equal events of many ranks are one line, with their number, the time of the first, and the ranks that stand out. Times
are those of the machines' own clocks.
"""
import argparse

from kilogpt.configurator import exit_on_error
from kilogpt.report.events import page


def main():
    parser = argparse.ArgumentParser('python -m kilogpt.report', description=__doc__, allow_abbrev=False,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('what', choices=['events'], help='what to show')
    parser.add_argument('out_dir', help="the run's folder")
    parser.add_argument('--all', action='store_true', help='a line for each event and iteration, however many')
    options = parser.parse_args()
    with exit_on_error():
        print(page(options.out_dir, shows_all=options.all))


if __name__ == '__main__':
    main()
