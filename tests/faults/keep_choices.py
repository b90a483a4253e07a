"""Write which experts each router chose in training, call after call, to CHOICES/<rank>.pt at the end.

CHOICES_IN=float64 computes in float64.
"""
import os

import torch

from kilogpt.mixture import Router
from kilogpt.parallel.processes import Processes

torch.set_default_dtype(getattr(torch, os.environ['CHOICES_IN']))
choices = []
choose, leave = Router.choose, Processes.leave


def kept_choose(self, ranking):
    chosen = choose(self, ranking)
    if self.training:
        choices.append(chosen.sort(dim=-1).values)
    return chosen


def written_leave(self, exit_code):
    torch.save(choices, os.path.join(os.environ['CHOICES'], f'{self.rank}.pt'))
    leave(self, exit_code)


Router.choose, Processes.leave = kept_choose, written_leave
