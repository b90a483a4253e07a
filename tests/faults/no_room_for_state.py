"""The disk has no room for state.json of a checkpoint, which only the first process writes."""
import builtins
import os

real_open = open


def failing_open(file, mode='r', *args, **options):
    if str(file).endswith('state.json') and 'w' in mode:
        raise OSError(28, os.strerror(28))
    return real_open(file, mode, *args, **options)


builtins.open = failing_open
