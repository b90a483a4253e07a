"""A mistake in what runs on GPUs, by FAULT: item, cpu_tensor, pageable, bfloat16 or order."""
import os

import torch

import model
from kilogpt.parallel import apply
from kilogpt.run import checkpoint

forward, clip_gradients = model.GPT.forward, apply.Parallel.clip_gradients


def hidden_item(self, *args):
    loss = forward(self, *args)
    if self.training:
        loss.item()
    return loss


def with_cpu_tensor(self, *args):
    return forward(self, *args) + torch.ones(1)


def pageable_copies(self, parts):
    self.host_copies = {key: torch.empty_like(part, device='cpu') for key, part in parts.items()}


def bfloat16_for_all(dtype, device):
    return torch.autocast('cuda', torch.bfloat16)


def in_another_order(self, *args):
    if self.processes.rank == 1:
        torch.distributed.all_reduce(torch.zeros(3, device=self.device))
    return clip_gradients(self, *args)


match os.environ['FAULT']:
    case 'item':
        model.GPT.forward = hidden_item
    case 'cpu_tensor':
        model.GPT.forward = with_cpu_tensor
    case 'pageable':
        checkpoint.Saver._allocate = pageable_copies
    case 'bfloat16':
        apply.autocast = bfloat16_for_all
    case 'order':
        apply.Parallel.clip_gradients = in_another_order
