"""Record what each iteration asks of CUDA, and where, in OUT_DIR.cuda.RANK, under dev/cuda_without_gpu.

The file has {iteration: [[call, place, how often], ...]}. An iteration is what happens from one call of
Progress.count_update to the next; what an evaluation or a save asks for counts in the iteration that follows. A
place is the innermost line of ours. OUT_DIR.streams.RANK has the same with the number of a stream instead of a place: 0 is the stream in which
PyTorch computes unless it is told otherwise, and the others have numbers in the order of their first use.
"""
import collections
import ctypes
import json
import os
import sys
import threading

import torch

from kilogpt.run import state

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
OURS = tuple(os.path.join(ROOT, name) for name in ('train.py', 'sample.py', 'model.py', 'kilogpt/', 'data/', 'tests/'))
NOT_OURS = 'place', 'record', 'even_counts', 'divide'  # here, and in cuda_sizes.py
out_dir = next(argument for argument in sys.argv if argument.startswith('--out_dir=')).partition('=')[2]
calls, iterations = collections.Counter(), {}
calls_of_streams, iterations_of_streams, streams = collections.Counter(), {}, {None: 0}


def record(call, n_bytes, stream):
    call = call.decode()
    if call == 'copy of pageable memory' and n_bytes <= 8:
        call = 'copy of a pageable number'
    calls[call, place()] += 1
    calls_of_streams[call, streams.setdefault(stream, len(streams))] += 1


def place():
    """Where we are in our files, 'kilogpt/run/guard.py:107 settle'; 'backward' in a thread without Python."""
    frame = sys._getframe()
    while frame and not (frame.f_code.co_filename.startswith(OURS) and frame.f_code.co_name not in NOT_OURS):
        frame = frame.f_back
    if not frame:
        return 'elsewhere' if threading.current_thread() is threading.main_thread() else 'backward'
    return f'{os.path.relpath(frame.f_code.co_filename, ROOT)}:{frame.f_lineno} {frame.f_code.co_name}'


def count_and_write(self):
    count_update(self)
    for name, counts, found in (('cuda', calls, iterations),
                                ('streams', calls_of_streams, iterations_of_streams)):
        found[self.iteration] = [[*key, count] for key, count in counts.items()]
        counts.clear()
        with open(f'{out_dir}.{name}.{os.environ.get("RANK", "0")}', 'w') as file:
            json.dump(found, file)


count_update, state.Progress.count_update = state.Progress.count_update, count_and_write
torch.cuda.init()
callback = ctypes.CFUNCTYPE(None, ctypes.c_char_p, ctypes.c_size_t, ctypes.c_void_p)(record)
ctypes.c_void_p.in_dll(ctypes.CDLL(None), 'on_cuda_call').value = ctypes.cast(callback, ctypes.c_void_p).value
sys.modules['kept_alive'] = callback
