"""What a process of many prints when an error ends it: the process that failed speaks, the others do not.

The connections of a process that fails close, which ends the others with errors of their own. Each process
that prints an error notes that in the store of all, where the others look before they print.
"""
import atexit
import os
import re
import sys
import time
import traceback

import torch.distributed as dist

from kilogpt.configurator import is_of_closed_pipe, lack_of_memory

_store = None  # of all processes of this start: whether one of them has printed its error


def report_errors(store):
    """Make this process report the error that ends it, unless that error follows from another process's."""
    global _store
    _store = store
    sys.excepthook = _report_error
    # sys.exit with a sentence (exit_on_error) does not call the hook.
    atexit.register(_note_error)


def _note_error():
    """Note in the store that this process has an error to tell; returns whether it is the first one."""
    try:
        return _store.add('errors', 1) == 1
    except RuntimeError:  # the process with the store has ended, and what it has printed is unknown
        return True


def _report_error(kind, error, trace):
    """sys.excepthook: print the traceback, but nothing where another process has ended this one.

    A process that is killed prints nothing. The first process that notices then prints one line.
    """
    if follows_from_another(error):
        if _note_error():
            print(f'error: rank {os.environ["RANK"]} lost its connection to another process: '
                  'the launcher names the one that ended first', file=sys.stderr, flush=True)
        time.sleep(1)  # the launcher must see the process that ended first before this one
        os._exit(1)
    if sentence := lack_of_memory(error):
        sys.stderr.write(f'error: {sentence}\n')
    elif not is_of_closed_pipe(error):
        # In one piece, so that the tracebacks of two processes do not mix.
        sys.stderr.write(''.join(traceback.format_exception(kind, error, trace)))
        sys.stderr.flush()
    _note_error()  # before this process ends, since the others notice its end


def follows_from_another(error):
    """Whether an exception, or one that caused it, is that another process has ended."""
    while error is not None:
        # A transport error is that of the manager of replicas (kilogpt/replicas), in the main process.
        if re.search('gloo.*(peer|closure|Socket closed|Broken pipe|Timed out|Read error|Write error)|'
                     'transport error', str(error)):
            return True
        # Other errors of communication have causes of their own, unless another process has failed before.
        if isinstance(error, dist.DistError) and not _is_first_error():
            return True
        error = error.__cause__ or error.__context__
    return False


def _is_first_error():
    try:
        return not _store.check(['errors'])
    except RuntimeError:
        return True
