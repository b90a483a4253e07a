"""Measure the memory that a process takes from here on, up to the end of `fill`, or of a script without it.

PEAK_MEMORY.RANK gets the number of bytes. The kernel's high-water mark begins again at its present value,
since a process that is forked inherits that of its parent. The process ends after `fill`.
"""
import atexit
import os
import pathlib

import kilogpt.convert.__main__  # noqa: F401  (what is imported here does not count)
import torch.distributed.checkpoint.state_dict_saver  # noqa: F401
from kilogpt.parallel import dtensor

path = f'{os.environ["PEAK_MEMORY"]}.{os.environ.get("RANK", "0")}'
fill, end = dtensor.fill, os._exit


def resident(name):
    """VmHWM (the peak) or VmRSS (now), in bytes."""
    text = pathlib.Path('/proc/self/status').read_text()
    return int(text.split(f'{name}:')[1].split()[0]) * 1024


def note():
    pathlib.Path(path).write_text(str(resident('VmHWM') - before))


def note_and_end(code):
    note()
    end(code)


def measured_fill(*arguments):
    fill(*arguments)
    note_and_end(0)


dtensor.fill = measured_fill
atexit.register(note)
os._exit = note_and_end
pathlib.Path('/proc/self/clear_refs').write_text('5')
before = resident('VmRSS')
