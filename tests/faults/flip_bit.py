"""Flip one bit in iteration FAULT_ITERATION: of a 'gradient' before clipping, or of an updated 'weight'."""
import os

import torch

from kilogpt import optim
from kilogpt.parallel import apply

iteration, what = int(os.environ['FAULT_ITERATION']), os.environ['FAULT_WHAT']
clip_gradients, step = apply.Parallel.clip_gradients, optim.LocalAdamW.step
count = 0


def flip(tensor):
    tensor.view(torch.int32).view(-1)[7] ^= 1 << 22


def clip_gradients_with_fault(self, *limits):
    global count
    count += 1
    if count == iteration and what == 'gradient':
        flip(self.optimizer_parameters()[0][1].grad)
    return clip_gradients(self, *limits)


def step_with_fault(self):
    step(self)
    if count == iteration and what == 'weight':
        flip(self.param_groups[0]['params'][0].detach())


apply.Parallel.clip_gradients = clip_gradients_with_fault
optim.LocalAdamW.step = step_with_fault
