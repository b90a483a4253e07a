"""Rank 1 does not see the newest checkpoint until it has tried FAULT_OPENS times to open one of its files.

An outdated cache of NFS has this effect.
"""
import builtins
import glob
import os
import sys

from kilogpt import checkpoint_files

checkpoint_files.PATIENCE = 3
failures_left = int(os.environ['FAULT_OPENS'])
out_dir = next(argument for argument in sys.argv if argument.startswith('--out_dir=')).partition('=')[2]
newest = max(glob.glob(os.path.join(out_dir, 'ckpt', 'iter_*')))
real_open, real_glob = builtins.open, glob.glob


def outdated_glob(pattern, *args, **options):
    paths = real_glob(pattern, *args, **options)
    return [path for path in paths if path != newest] if failures_left else paths


def outdated_open(file, *args, **options):
    global failures_left
    if str(file).startswith(newest + os.sep) and failures_left:
        failures_left -= 1
        raise FileNotFoundError(2, os.strerror(2), file)
    return real_open(file, *args, **options)


if os.environ['RANK'] == '1':
    builtins.open, glob.glob = outdated_open, outdated_glob
