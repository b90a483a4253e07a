"""The disk is full when the first process, and only that one, writes the state.json of a checkpoint."""
import builtins
import os

real_open = open


def failing_open(file, mode='r', *args, **options):
    if str(file).endswith('state.json') and 'w' in mode:
        raise OSError(28, os.strerror(28))
    return real_open(file, mode, *args, **options)


builtins.open = failing_open
