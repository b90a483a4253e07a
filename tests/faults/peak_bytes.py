"""Count the bytes that tensors hold: the peak within iterations, and what stays between them.

OUT_DIR.peak.RANK gets JSON: `peak` of the iterations after the first two, and `parameters`, `gradients` and
`moments`, the sizes of their storages at the last step. gloo's own copies do not count.
"""
import atexit
import itertools
import json
import os
import sys
import weakref

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

out_dir = next(argument for argument in sys.argv if argument.startswith('--out_dir=')).partition('=')[2]
path = f'{out_dir}.peak.{os.environ.get("RANK", "0")}'
sizes, found, steps, resize, end = {}, dict(peak=0), [0], torch.UntypedStorage.resize_, os._exit
total = 0


def count(storage):
    """Note a storage, or its new size."""
    global total
    key = storage._cdata
    if key not in sizes:
        weakref.finalize(storage, forget, key)
    total += storage.nbytes() - sizes.get(key, 0)
    sizes[key] = storage.nbytes()
    if steps[0] >= 2:
        found['peak'] = max(found['peak'], total)


def forget(key):
    global total
    total -= sizes.pop(key, 0)


class Counter(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for tensor in tree_leaves((result, args, kwargs)):
            if isinstance(tensor, torch.Tensor):
                tensor = getattr(tensor, '_local_tensor', tensor)
                tensor = getattr(tensor, 'elem', tensor)  # a collective returns a wrapper
                if tensor.device.type != 'meta':
                    count(tensor.untyped_storage())
        return result


def counted_resize(storage, size):
    result = resize(storage, size)
    if storage._cdata in sizes:
        count(storage)
    return result


def bytes_of(tensors):
    storages = {}
    for tensor in tensors:
        local = tensor.to_local() if hasattr(tensor, 'to_local') else tensor
        storages[local.untyped_storage().data_ptr()] = local.untyped_storage().nbytes()
    return sum(storages.values())


def before_step(optimizer, *_):
    if optimizer.__class__.__name__ == 'LocalAdamW' and hasattr(optimizer, 'is_inner'):
        return
    if hasattr(optimizer, 'adamw'):
        optimizer.adamw.is_inner = True
    parameters = list(itertools.chain.from_iterable(group['params'] for group in optimizer.param_groups))
    found.update(parameters=bytes_of(parameters), gradients=bytes_of(p.grad for p in parameters))


def after_step(optimizer, *_):
    if hasattr(optimizer, 'is_inner'):
        return
    state = itertools.chain.from_iterable(values.values() for values in optimizer.state.values())
    found['moments'] = sum(bytes_of([tensor]) for tensor in state if tensor.dim() > 0)
    steps[0] += 1


def write():
    with open(path, 'w') as file:
        json.dump(found, file)


def write_and_end(code):
    write()
    end(code)


torch.UntypedStorage.resize_ = counted_resize
register_optimizer_step_pre_hook(before_step)
register_optimizer_step_post_hook(after_step)
atexit.register(write)
os._exit = write_and_end
Counter().__enter__()
