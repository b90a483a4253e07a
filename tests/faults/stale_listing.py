"""Rank 1 does not see the newest checkpoint until it has tried FAULT_OPENS times to open one of its files.

An outdated cache of NFS has this effect.
"""
import builtins
import glob
import os
import sys

from kilogpt.run import checkpoint_files

checkpoint_files.PATIENCE = 3
failures_left = int(os.environ['FAULT_OPENS'])
out_dir = next(argument for argument in sys.argv if argument.startswith('--out_dir=')).partition('=')[2]
newest = max(glob.glob(os.path.join(out_dir, 'ckpt', 'iter_*')))
real_open, real_listdir = builtins.open, os.listdir


def outdated_listdir(*args):
    names = real_listdir(*args)
    return [name for name in names if name != os.path.basename(newest)] if failures_left else names


def outdated_open(file, *args, **options):
    global failures_left
    if str(file).startswith(newest + os.sep) and failures_left:
        failures_left -= 1
        raise FileNotFoundError(2, os.strerror(2), file)
    return real_open(file, *args, **options)


if os.environ['RANK'] == '1':
    builtins.open, os.listdir = outdated_open, outdated_listdir
