"""Count the bytes that tensors hold at the start of each backward pass and at each optimizer step.

OUT_DIR.bytes.RANK gets a line [moment, bytes] each time. At the start of a backward pass it gets a second
line, ['gradient storages', number], the number of storages that hold gradients.
"""
import gc
import json
import os
import sys

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

out_dir = next(argument for argument in sys.argv if argument.startswith('--out_dir=')).partition('=')[2]
path = f'{out_dir}.bytes.{os.environ.get("RANK", "0")}'
backward = torch.Tensor.backward


def count(moment):
    storages = {}  # tensors that share memory count once
    gradient_storages = set()
    for tensor in [found for found in gc.get_objects() if isinstance(found, torch.Tensor)]:
        for part in (tensor, tensor.grad if tensor.is_leaf else None):
            if part is not None and not part.is_meta:
                local = part.to_local() if hasattr(part, 'to_local') else part
                storages[local.untyped_storage().data_ptr()] = local.untyped_storage().nbytes()
                if part is not tensor:
                    gradient_storages.add(local.untyped_storage().data_ptr())
    with open(path, 'a') as file:
        print(json.dumps([moment, sum(storages.values())]), file=file)
        if moment == 'backward':
            print(json.dumps(['gradient storages', len(gradient_storages)]), file=file)


def counting_backward(self, *args, **options):
    count('backward')
    backward(self, *args, **options)


torch.Tensor.backward = counting_backward
register_optimizer_step_pre_hook(lambda *_: count('step'))
