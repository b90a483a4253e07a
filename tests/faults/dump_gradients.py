"""Write the weights and the gradients of the first iteration, whole, to GRADIENTS/<rank>.pt. The run ends.

They are computed in float64, where no rounding is large enough to send a token to another expert;
GRADIENTS_IN=float32 leaves the weights of a checkpoint as they are.
"""
import os

import torch

from kilogpt.parallel import Parallel

if os.environ.get('GRADIENTS_IN') != 'float32':
    torch.set_default_dtype(torch.float64)


def whole(tensor):
    return tensor.detach().full_tensor() if hasattr(tensor, 'full_tensor') else tensor.detach()


def written_gradients(self, max_norm):
    found = dict(weights={name: whole(parameter) for name, parameter in self.named_parameters()})
    found['gradients'] = {name: whole(parameter.grad) for name, parameter in self.optimizer_parameters()
                          if parameter.grad is not None}
    torch.save(found, os.path.join(os.environ['GRADIENTS'], f'{self.processes.rank}.pt'))
    self.processes.leave(0)


Parallel.clip_gradients = written_gradients
