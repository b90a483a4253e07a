"""Recompute iterations of a run, and compare them with its log and its checkpoints.

    python -m kilogpt.replay out-run 1200            # from the last checkpoint before iteration 1200
    python -m kilogpt.replay out-run all             # the whole run, from one checkpoint to the next
    python -m kilogpt.replay out-run 1200 --nproc_per_node=2 --tp=2 --profile=True

The run may have used another layout or another machine. With the same layout on the same kind of machine,
every loss and every weight must be equal to the bit; otherwise they are compared within bounds. The text of
iteration 1200 is written to out-run/replay_00001200/batch.txt; with --profile=True that folder also has a
trace of the iteration. All other arguments are config files and keys of train.py, which override those
of the run.

The command can also be started by torchrun or srun on several nodes; --nproc_per_node is for one node only.
"""
import argparse

from kilogpt.configurator import exit_on_error
from kilogpt.parallel import launchers
from kilogpt.prove.replay import replay


def main():
    parser = argparse.ArgumentParser('python -m kilogpt.replay', description=__doc__, allow_abbrev=False,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('out_dir', help="the run's folder")
    parser.add_argument('which', metavar='ITERATION', help="an iteration of the run, or 'all'")
    parser.add_argument('--nproc_per_node', type=int, default=0, metavar='N',
                        help="processes on this node (default: as in the run)")
    options, arguments = parser.parse_known_args()
    with exit_on_error():
        launchers.adopt()
        replay(options.out_dir, options.which, options.nproc_per_node, arguments)


if __name__ == '__main__':
    main()
