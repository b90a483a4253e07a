"""Record the experts that routers choose in training, one item per call, and save them to CHOICES/<rank>.pt.

CHOICES_IN: the dtype to compute in, for example float64.
"""
import os

import torch

from kilogpt.layers.mixture import Router
from kilogpt.parallel.processes import Processes

torch.set_default_dtype(getattr(torch, os.environ['CHOICES_IN']))
choices = []
choose, leave = Router.choose, Processes.leave


def recording_choose(self, ranking):
    chosen = choose(self, ranking)
    if self.training:
        choices.append(chosen.sort(dim=-1).values)
    return chosen


def saving_leave(self, exit_code):
    torch.save(choices, os.path.join(os.environ['CHOICES'], f'{self.rank}.pt'))
    leave(self, exit_code)


Router.choose, Processes.leave = recording_choose, saving_leave
