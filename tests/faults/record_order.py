"""Record in order what a process of a replica asks of NCCL, and where it waits, under dev/cuda_without_gpu.

OUT_DIR.order.REPLICA.RANK has a line of JSON for each: ['iteration', N] when it begins, ['quorum', members],
['vote', whether the update is made], [name, bytes, stream, 'COUNT of DTYPE'] of a call of NCCL between
replicas, [name, bytes, stream, ''] of one within a replica, and ['wait', place] where the host waits for the
device. Stream 0 is the one in which PyTorch computes; the others have numbers in the order of their first
use.

No kernel has added up what other replicas ask for (their signals, say), so that it is 0 here. ORDER=swapped
adds up gradients in another order on replica 1, and ORDER=left_out leaves one out. This file also works as a
config file.
"""
import ctypes
import json
import os
import pathlib
import sys
import threading

import torch

from kilogpt.replicas import replicas
from kilogpt.replicas.membership import Membership
from kilogpt.replicas.replicas import Replicas

_ROOT = f'{pathlib.Path(__file__).resolve().parents[2]}/'
_WAITS = {'cudaStreamSynchronize', 'cudaEventSynchronize', 'cudaDeviceSynchronize', 'cudaMemcpy',
          'wait for earlier work', 'copy of pageable memory'}
_begin, _meet, _add_up, _vote = Replicas.begin, Membership.meet, Membership.add_up, Membership.vote
_tolist, _buckets = torch.Tensor.tolist, replicas.buckets
_sums = []  # what is being summed over the replicas
_streams = {None: 0}


def _write(*entry):
    _file.write(json.dumps(entry) + '\n')


def _place():
    """Where we are in our files, 'kilogpt/run/guard.py settle'."""
    frame = sys._getframe()
    while frame:
        path, code = frame.f_code.co_filename, frame.f_code
        if path.startswith(_ROOT) and 'tests/' not in path:
            return f'{path.removeprefix(_ROOT)} {code.co_name}'
        frame = frame.f_back
    return 'elsewhere'


def _record(call, n_bytes, stream):
    call = call.decode()
    if call.startswith('nccl'):
        _write(call, n_bytes, _streams.setdefault(stream, len(_streams)), _sums[-1] if _sums else '')
    elif call in _WAITS and threading.current_thread() is threading.main_thread():
        _write('wait', _place())


def _recorded_begin(self):
    _write('iteration', self.run.iteration + 1)
    return _begin(self)


def _recorded_meet(self, state, load):
    has_loaded = _meet(self, state, load)
    _write('quorum', self.count)
    return has_loaded


def _recorded_add_up(self, tensors):
    tensor, = tensors
    _sums.append(f'{tensor.numel()} of {str(tensor.dtype).removeprefix("torch.")}')
    try:
        return _add_up(self, tensors)
    finally:
        _sums.pop()


def _recorded_vote(self):
    is_agreed = _vote(self)
    _write('vote', is_agreed)
    return is_agreed


def _zeros(self):
    numbers = _tolist(self)
    return [0] * len(numbers) if self.device.type == 'cuda' else numbers


def _changed_buckets(gradients):
    found = list(_buckets(gradients))
    match os.environ.get('ORDER'):
        case 'swapped':
            found[0], found[-1] = found[-1], found[0]
        case 'left_out':
            del found[-1][-1]
    return found


def _start():
    global _file
    out_dir = next(argument for argument in sys.argv if argument.startswith('--out_dir=')).partition('=')[2]
    _file = open(f'{out_dir}.order.{os.environ["REPLICA_GROUP_ID"]}.{os.environ["RANK"]}', 'a', buffering=1)
    Replicas.begin, Membership.meet, Membership.add_up, Membership.vote, torch.Tensor.tolist = (
        _recorded_begin, _recorded_meet, _recorded_add_up, _recorded_vote, _zeros)
    if os.environ['REPLICA_GROUP_ID'] == '1':
        replicas.buckets = _changed_buckets
    torch.cuda.init()
    on_cuda_call = ctypes.c_void_p.in_dll(ctypes.CDLL(None), 'on_cuda_call')
    on_cuda_call.value = ctypes.cast(_callback, ctypes.c_void_p).value


_callback = ctypes.CFUNCTYPE(None, ctypes.c_char_p, ctypes.c_size_t, ctypes.c_void_p)(_record)
if 'REPLICA_GROUP_ID' in os.environ:  # the launcher reads config files, too
    _start()
