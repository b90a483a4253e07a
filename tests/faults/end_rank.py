"""The process of rank FAULT_RANK ends in FAULT_PLACE (forward, backward or evaluation).

FAULT_KIND: how it ends: RuntimeError or ValueError (raised there), SIGKILL, or exit (os._exit(7)).
FAULT_RANK: one or more ranks, as in '1,3'.
"""
import builtins
import os
import signal

import torch

import model

forward = model.MLP.forward
place, kind = os.environ['FAULT_PLACE'], os.environ['FAULT_KIND']
calls = 0


class Identity(torch.autograd.Function):
    """The identity, whose backward pass ends the process."""

    @staticmethod
    def forward(context, x):
        return x.clone()

    @staticmethod
    def backward(context, gradient):
        end()


def end():
    if kind == 'SIGKILL':
        os.kill(os.getpid(), signal.SIGKILL)
    if kind == 'exit':
        os._exit(7)
    raise getattr(builtins, kind)(f'planted on rank {os.environ["RANK"]}')


def faulty_forward(self, x):
    global calls
    is_here = self.training == (place != 'evaluation')
    calls += is_here
    if not is_here or calls < 5:
        return forward(self, x)
    if place == 'backward':
        return Identity.apply(forward(self, x))
    end()


if os.environ['RANK'] in os.environ['FAULT_RANK'].split(','):
    model.MLP.forward = faulty_forward
