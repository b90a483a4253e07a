"""Write the gradients of the first iteration, whole, to GRADIENTS/<rank>.pt, computed in float64.

The run ends there. In float64 no rounding is large enough to send a token to another expert.
GRADIENTS_IN=float32 computes in float32, and the file has the choices of each router too.
"""
import os

import torch

import model
from kilogpt.parallel import Parallel

if os.environ.get('GRADIENTS_IN') != 'float32':
    torch.set_default_dtype(torch.float64)
choices = []
choose = model.Router.choose


def kept_choose(self, ranking):
    chosen = choose(self, ranking)
    if self.training:
        choices.append(chosen)
    return chosen


def written_gradients(self, max_norm):
    found = {}
    for name, parameter in self.optimizer_parameters():
        if parameter.grad is not None:
            gradient = parameter.grad
            found[name] = gradient.full_tensor() if hasattr(gradient, 'full_tensor') else gradient
    torch.save(dict(gradients=found, choices=choices[-6:]),
               os.path.join(os.environ['GRADIENTS'], f'{self.processes.rank}.pt'))
    self.processes.leave(0)


model.Router.choose = kept_choose
Parallel.clip_gradients = written_gradients
