"""Read and write safetensors files tensor by tensor, of models that are larger than memory.

A file is the length of its header (8 bytes, little-endian), a header in JSON, and the bytes of the tensors.
The header says of each tensor its dtype, its shape, and where its bytes are. The library safetensors maps a
file into memory to read it, and writes only tensors that are all in memory.
"""
import json
import math
import os

import torch

from kilogpt.run.checkpoint_files import write_json
from kilogpt.weights.tensors import LazyTensor

DTYPES = dict(F64=torch.float64, F32=torch.float32, F16=torch.float16, BF16=torch.bfloat16, I64=torch.int64,
              I32=torch.int32, I16=torch.int16, I8=torch.int8, U8=torch.uint8, BOOL=torch.bool,
              F8_E4M3=torch.float8_e4m3fn, F8_E5M2=torch.float8_e5m2)
NAMES_OF_DTYPES = {dtype: name for name, dtype in DTYPES.items()}
SHARD_BYTES = 5 * 10 ** 9  # the largest file of a folder, as transformers splits a model
ADVICE = 'copy or download it again'


# --- reading ------------------------------------------------------------------------------------------------

def open_safetensors(path):
    """{name: LazyTensor} of a safetensors file. ValueError if the file is damaged."""
    size = os.path.getsize(path)
    with open(path, 'rb') as file:
        start = 8 + int.from_bytes(file.read(8), 'little')
        if start > size:
            raise ValueError(f'{path} is damaged (its header ends at byte {start:,}, but the file has '
                             f'{size:,} bytes): {ADVICE}')
        header = file.read(start - 8)
    try:
        entries = json.loads(header)
        entries.pop('__metadata__', None)
        others = {entry['dtype']: name for name, entry in entries.items() if entry['dtype'] not in DTYPES}
        tensors = {name: _open_tensor(path, start, **entry) for name, entry in entries.items() if not others}
        end = 0
        for first, stop in sorted(entry['data_offsets'] for entry in entries.values()):
            if first != end:
                raise ValueError('two tensors overlap, or bytes belong to none')
            end = stop
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        reason = f'{type(error).__name__}: {error}'.splitlines()[0]
        raise ValueError(f'{path} is damaged (its header is not of safetensors: {reason}): '
                         f'{ADVICE}') from None
    for dtype, name in others.items():
        raise ValueError(f'{path} has {name} in {dtype}, as quantized weights have, but only {", ".join(DTYPES)} are '
                         'read: use the weights in one of these')
    if start + end != size:
        raise ValueError(f'{path} is damaged (its tensors end at byte {start + end:,}, but the file has '
                         f'{size:,} bytes): {ADVICE}')
    return tensors


def _open_tensor(path, start, dtype, shape, data_offsets):
    """The LazyTensor of an entry of a header. start: where the first tensor is in the file."""
    dtype, shape = DTYPES[dtype], tuple(shape)
    first, end = data_offsets
    if any(type(number) is not int or number < 0 for number in (*shape, first)):
        raise ValueError('sizes must be whole numbers')
    if end - first != math.prod(shape) * dtype.itemsize:
        raise ValueError('a tensor has another size than its shape')

    def read(rows):
        top, bottom, _ = rows.indices(shape[0])
        tensor = torch.empty(max(bottom - top, 0), *shape[1:], dtype=dtype)
        with open(path, 'rb') as file:
            file.seek(start + first + top * math.prod(shape[1:]) * dtype.itemsize)
            found = file.readinto(_bytes_of(tensor))
        if found != tensor.nbytes:
            raise ValueError(f'{path} has become shorter while it was read: {ADVICE}')
        return tensor

    return LazyTensor(shape, dtype, read)


def _bytes_of(tensor):
    """The memory of a contiguous tensor, as a buffer of bytes."""
    return tensor.flatten().view(torch.uint8).numpy()


# --- writing ------------------------------------------------------------------------------------------------

def write_safetensors(folder, tensors, dtype):
    """Write {name: LazyTensor} in a dtype into files of at most SHARD_BYTES in a folder, one tensor at a time.

    One file is model.safetensors. Several have numbers, and model.safetensors.index.json says which tensor is
    in which file, as transformers writes it. A tensor larger than SHARD_BYTES has a file to itself.
    """
    shards, room = [], 0
    for name, stored in tensors.items():
        size = math.prod(stored.shape) * dtype.itemsize
        if size > room or not shards:
            shards.append({})
            room = SHARD_BYTES
        shards[-1][name] = stored
        room -= size
    if len(shards) == 1:
        write_tensors(os.path.join(folder, 'model.safetensors'), tensors, dtype)
        return
    weight_map = {}
    for number, shard in enumerate(shards, 1):
        file_name = f'model-{number:05d}-of-{len(shards):05d}.safetensors'
        write_tensors(os.path.join(folder, file_name), shard, dtype)
        weight_map |= dict.fromkeys(shard, file_name)
    elements = sum(math.prod(stored.shape) for stored in tensors.values())
    metadata = dict(total_parameters=elements, total_size=elements * dtype.itemsize)
    write_json(os.path.join(folder, 'model.safetensors.index.json'),
               dict(metadata=metadata, weight_map=dict(sorted(weight_map.items()))))


def write_tensors(path, tensors, dtype):
    """Write {name: LazyTensor} in a dtype into one file."""
    header, end = {'__metadata__': dict(format='pt')}, 0
    for name, stored in tensors.items():
        start, end = end, end + math.prod(stored.shape) * dtype.itemsize
        header[name] = dict(dtype=NAMES_OF_DTYPES[dtype], shape=list(stored.shape), data_offsets=[start, end])
    text = json.dumps(header).encode()
    text += b' ' * (-len(text) % 8)  # the tensors begin at a multiple of 8 bytes
    with open(path, 'wb') as file:
        file.write(len(text).to_bytes(8, 'little') + text)
        for stored in tensors.values():
            file.write(_bytes_of(stored.whole().to(dtype).contiguous()))
