"""Count what one process allocates and sends: bytes of live tensors by part, collectives by kind and group.

Works on real and on fake tensors: with fake ones, `dry_run.py` counts what a process of a cluster would do.
"""
import itertools
import weakref

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from kilogpt.run.profiler import COLLECTIVES

# In the order of the printed table. 'gradients' are sharded gradients and gradients that are still whole.
# 'gathered' are the whole parameters of FSDP2 and the tensors that collectives exchange. 'buffers' are the
# tensors into which a pipeline receives.
PARTS = ('parameters', 'gradients', 'moments', 'gathered', 'buffers', 'activations', 'logits', 'other')
DEVICE_OF = torch.ops.prim.device.default  # the operator behind `tensor.device` of a fake tensor


class Segment:
    """A piece of memory: its bytes, its part, and the ByteCounter's clock at allocation and release."""
    __slots__ = ('bytes', 'part', 'born', 'died')

    def __init__(self, bytes, part, born):
        self.bytes, self.part, self.born, self.died = bytes, part, born, float('inf')


class ByteCounter(TorchDispatchMode):
    """A context that records every allocation of tensor memory and every collective.

    fake_mode: the FakeTensorMode of the tensors to count; None counts real tensors.
    phase: the part to which new memory belongs, unless `label`, a collective or the shape says otherwise.
    logits_width: size of the last dimension of the tensors that count as logits; 0 = none.
    group_names: {name of a process group: its name in `collectives`}.
    repeats: how many times each collective counts from now on.
    Two kinds of memory are not counted: what an operator allocates and frees within its own call, and what
    libraries (NCCL, cuBLAS, the allocator) keep for themselves.
    """

    def __init__(self, fake_mode=None):
        super().__init__()
        self.fake_mode = fake_mode
        self.phase, self.logits_width, self.group_names, self.repeats = 'other', 0, {}, 1
        self._clock = 0
        self._alive = {}  # {id of a storage: Segment}
        self._references = {}  # {id of a storage: weak reference, whose callback ends the Segment}
        self._segments = []  # Segments that have been freed since the last `start`
        self._collectives = {}

    def start(self):
        """Start counting: the peak and the collectives up to now are discarded."""
        self._segments.clear()
        self._collectives.clear()

    def __enter__(self):
        # FSDP2 frees and allocates whole parameters by resizing their memory, which is not an operator.
        counter, resize = self, torch.UntypedStorage.resize_

        def noted_resize(storage, size):
            resize(storage, size)
            counter._note_storage(storage, counter.phase)

        self._resize = resize
        torch.UntypedStorage.resize_ = noted_resize
        return super().__enter__()

    def __exit__(self, *error):
        torch.UntypedStorage.resize_ = self._resize
        return super().__exit__(*error)

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        if any(hasattr(kind, '__tensor_flatten__') for kind in types):
            return NotImplemented  # a DTensor: its operations on local tensors are dispatched here later
        if operator is DEVICE_OF and self.fake_mode:  # a shortcut, since these are half of all calls
            return args[0].fake_device
        result = operator(*args, **(kwargs or {}))
        for tensor in _tensors_in(result):
            if getattr(tensor, 'fake_mode', None) is not self.fake_mode:
                continue  # DTensor is computing the shape of a result in another fake mode
            if self.fake_mode is None and (tensor.is_meta or hasattr(tensor, '__tensor_flatten__')):
                continue  # no memory of its own: the result of a collective wraps another tensor
            is_logits = tensor.dim() > 1 and tensor.size(-1) == self.logits_width
            self._note_storage(tensor.untyped_storage(), 'logits' if is_logits else self.phase)
        namespace = operator.namespace
        if namespace in ('c10d', '_c10d_functional', '_dtensor'):
            self._note_collective(operator, args, result)
        elif namespace == 'fsdp':
            self._note_fsdp(operator, args, kwargs)
        return result

    # --- memory ---------------------------------------------------------------------------------------------

    def _note_storage(self, storage, part):
        """Record a storage that is new, or whose size has changed."""
        key, size = storage._cdata, storage.nbytes()
        segment = self._alive.get(key)
        if segment is None:
            self._references[key] = weakref.ref(storage, lambda _, key=key: self._end(key))
        elif segment.bytes == size:
            return
        else:
            part = segment.part
            self._close(segment)
        self._clock += 1
        self._alive[key] = Segment(size, part, self._clock)

    def _end(self, key):
        del self._references[key]
        self._close(self._alive.pop(key))

    def _close(self, segment):
        self._clock += 1
        segment.died = self._clock
        if segment.bytes:
            self._segments.append(segment)

    def label(self, tensors, part):
        """Assign the memory of tensors (of a DTensor, its local part) to a part, from the allocation on."""
        for tensor in tensors:
            local = tensor.to_local() if hasattr(tensor, 'to_local') else tensor
            storage = local.untyped_storage()
            self._note_storage(storage, part)
            self._alive[storage._cdata].part = part

    def bytes_alive(self):
        """{part: bytes} of the memory that is allocated now."""
        return _sum_by_part(self._alive.values())

    def peak(self, left_out=()):
        """{part: bytes} at the moment since `start` when their sum was largest.

        left_out: parts to ignore, such as parts in host memory.
        """
        segments = [s for s in (*self._segments, *self._alive.values()) if s.part not in left_out]
        changes = [(segment.born, segment.bytes) for segment in segments]
        changes += [(segment.died, -segment.bytes) for segment in segments if segment.died != float('inf')]
        total = highest = moment = 0
        for clock, change in sorted(changes):
            total += change
            if total > highest:
                highest, moment = total, clock
        return _sum_by_part(s for s in segments if s.born <= moment < s.died)

    # --- collectives ----------------------------------------------------------------------------------------

    def _note_collective(self, operator, args, result):
        name = operator.name().partition('::')[2].replace('_', '')
        kind = next((ours for key, ours in COLLECTIVES.items() if key.replace('_', '') in name), None)
        if kind is None:  # an operator that sends no tensor: wait_tensor, barrier
            return
        tensors = [found for found in map(_tensors_in, [*args, result]) if found]
        # DTensor's collectives return activations, and have other namespaces.
        if operator.namespace == 'c10d' and kind != 'send':
            if kind == 'reduce_scatter':  # the output becomes a gradient, or is added to one
                self._label_new(tensors[:1], 'gradients')
            self._label_new(tensors, 'buffers' if kind == 'recv' else 'gathered')
        group = _group_of(operator, args)
        key = kind, self.group_names.get(group, group), str(tensors[0][0].dtype).removeprefix('torch.')
        calls, total = self._collectives.get(key, (0, 0))
        size = max(sum(tensor.nbytes for tensor in found) for found in tensors)
        self._collectives[key] = calls + self.repeats, total + self.repeats * size

    def _label_new(self, tensors, part):
        """Assign a collective's memory to a part, unless it was already assigned to another part."""
        for found in tensors:
            for tensor in found:
                segment = self._alive.get(tensor.untyped_storage()._cdata)
                if segment and segment.part == self.phase:
                    segment.part = part

    def _note_fsdp(self, operator, args, kwargs):
        """Label the memory of FSDP2's own operators, which copy between buffers and whole parameters."""
        if 'chunk_cat' in operator.name():  # copies whole gradients into the buffer of a reduce-scatter
            self.label(_tensors_in(args[0]), 'gradients')
        elif 'split_with_sizes_copy' in operator.name():  # copies from the buffer of an all-gather
            self.label(_tensors_in(kwargs['out']), 'gathered')

    def collectives(self):
        """[{kind, group, dtype, calls, bytes}] since `start`; bytes as in profiler.bytes_moved."""
        return [dict(kind=kind, group=group, dtype=dtype, calls=calls, bytes=size)
                for (kind, group, dtype), (calls, size) in sorted(self._collectives.items())]


def _sum_by_part(segments):
    sums = dict.fromkeys(PARTS, 0)
    for segment in segments:
        sums[segment.part] += segment.bytes
    return sums


def _group_of(operator, args):
    """The name of the process group of a collective's operator."""
    names = [argument.name for argument in operator._schema.arguments]
    group = args[names.index('process_group' if 'process_group' in names else 'group_name')]
    if isinstance(group, torch.ScriptObject):
        group = dist.ProcessGroup.unbox(group)
    return getattr(group, 'group_name', group)


def _tensors_in(value):
    """[tensor] of a tensor, or of a nested list of tensors."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, (list, tuple)):
        return list(itertools.chain.from_iterable(map(_tensors_in, value)))
    return []
