"""Print how much of a checkpoint changes between two saves of a run, and what storing the change would take.

    python dev/checkpoint_changes.py out/ckpt/iter_00000100 out/ckpt/iter_00000150

A row is a kind of tensor: weights, or a state of the optimizer. Its columns are megabytes, the shares of elements and
of bytes that differ from those of the first checkpoint, and the size after zstd, in percent: of the tensors as they
are, of their planes of bytes (the first byte of each element, then the second...), and of the planes of their XOR with
the first checkpoint's tensors.
"""
import pathlib
import sys

import numpy as np
import pyarrow
import torch

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from kilogpt.run import checkpoint

CODEC = pyarrow.Codec('zstd', compression_level=3)  # the zstd command's default


def main(first, second):
    kinds = {}
    before, after = read_tensors(first), read_tensors(second)
    if not before or before.keys() != after.keys():
        sys.exit(f'error: {first} and {second} do not hold the same tensors')
    for key in after:
        kinds.setdefault(kind_of(key, after[key]), []).append(key)
    print('| | MB | elements that changed | bytes that changed | zstd | planes, zstd | XOR, planes, zstd |')
    print('| --- | --- | --- | --- | --- | --- | --- |')
    rows = {kind: row(before, after, keys) for kind, keys in sorted(kinds.items())}
    for kind, figures in [*rows.items(), ('all', sum(rows.values()))]:
        size, elements, changed_elements, *parts = figures
        shares = [changed_elements / elements, *(part / size for part in parts)]
        print(f'| {kind} | {size / 1e6:.2f} | ' + ' | '.join(f'{share:.1%}' for share in shares) + ' |')


def read_tensors(path):
    """{key: tensor} of a checkpoint."""
    stored = checkpoint.stored_tensors(path)
    tensors = {key: torch.empty(found.size, dtype=found.properties.dtype) for key, found in stored.items()}
    checkpoint.load_tensors(path, tensors.items())
    return tensors


def kind_of(key, tensor):
    """'weights, float32', 'exp_avg, float32'..."""
    dtype = str(tensor.dtype).removeprefix('torch.')
    return f'{key.rpartition(".")[2]}, {dtype}' if key.startswith('optimizer.') else f'weights, {dtype}'


def row(before, after, keys):
    """Sums over tensors: bytes, elements, elements and bytes that changed, bytes of the three ways to store."""
    total = np.zeros(7)
    for key in keys:
        was, now = (tensors[key].reshape(-1, 1).view(torch.uint8).numpy() for tensors in (before, after))
        stored = now, now.T, (was ^ now).T
        total += [now.size, len(now), (was != now).any(axis=1).sum(), (was != now).sum(),
                  *(len(CODEC.compress(np.ascontiguousarray(part), asbytes=True)) for part in stored)]
    return total


if __name__ == '__main__':
    main(*sys.argv[1:])
