"""What a run of train.py computes, written down on every process: for kilogpt.prove and the tests.

`install` is called in a process before train.py starts there. A run has no key for this.
"""
import os
from typing import NamedTuple

import torch

from kilogpt.optim import local_part
from kilogpt.parallel.apply import Parallel


class Testimony(NamedTuple):
    """What one process saw in one iteration."""
    gradients: list  # [(parameter's name, whole gradient before clipping)]; a tied pair may be there twice
    weights: list  # [(parameter's name, whole parameter before the update)]
    activations: dict  # {'the input/output of MODULE': (sum of squares, number of elements)}, in order
    random: list  # names of the innermost modules that drew random numbers in this iteration


def path_of(folder, iteration, rank):
    return os.path.join(folder, f'{iteration}.{rank}.pt')


def read(folder, iteration, processes):
    """[Testimony] of each process for an iteration, the first of which is 1."""
    testimonies = []
    for rank in range(processes):
        testimonies.append(Testimony(**torch.load(path_of(folder, iteration, rank))))
    return testimonies


def install(folder, in_float64=False):
    """Make the train.py that will run in this process write a Testimony for each iteration into a folder.

    in_float64: compute in float64, where no rounding is large enough to send a token to another expert.
    """
    if in_float64:
        torch.set_default_dtype(torch.float64)
    lay_out, warm_up, clip_gradients = Parallel.lay_out, Parallel.warm_up, Parallel.clip_gradients
    observer = Observer()
    iteration = 0

    def observed_lay_out(self, model, **options):
        lay_out(self, model, **options)
        if not self.compiles:  # hooks would be compiled too
            for stage in self.stages.values():
                observer.watch(stage)

    def forgotten_warm_up(self, read_batch):
        warm_up(self, read_batch)
        observer.forget()

    def written_gradients(self, max_norm, limit):
        nonlocal iteration
        iteration += 1
        gradients = []
        for name, parameter in self.optimizer_parameters():
            if parameter.grad is not None:
                gradients.append((name, whole(parameter.grad)))
        weights = [(name, whole(parameter)) for name, parameter in self.named_parameters()]
        testimony = Testimony(gradients, weights, observer.activations, sorted(observer.random))
        torch.save(testimony._asdict(), path_of(folder, iteration, self.processes.rank))
        observer.forget()
        return clip_gradients(self, max_norm, limit)

    Parallel.lay_out, Parallel.warm_up = observed_lay_out, forgotten_warm_up
    Parallel.clip_gradients = written_gradients


def whole(tensor):
    """A copy of a parameter or gradient, gathered where it is sharded; a collective."""
    tensor = tensor.detach()
    return (tensor.full_tensor() if hasattr(tensor, 'full_tensor') else tensor).cpu().clone()


class Observer:
    """Hooks that add up squares of what each module returns, and notice who draws random numbers."""

    def __init__(self):
        self.forget()

    def forget(self):
        self.activations, self.random, self._states = {}, set(), []

    def watch(self, model):
        experts = f'.{model.split_plan["experts"]}.'
        for name, module in model.named_modules():
            # Within a part that cpu.py replaces; and with tp, an expert's output here is a part of a sum.
            is_hidden = name.endswith('.fused') or experts in name
            if name and not is_hidden and module is not getattr(model, 'loss', None):
                module.register_forward_pre_hook(
                    lambda module, inputs, name=name: self._begin(name, module, inputs))
                module.register_forward_hook(
                    lambda module, inputs, output, name=name: self._end(name, module, output))

    def _begin(self, name, module, inputs):
        if not is_second_pass():
            self._states.append(random_state())
            self._add(f'the input of {name}', module, inputs)

    def _end(self, name, module, output):
        if is_second_pass():
            return
        before = self._states.pop()
        if before and before != random_state():
            self.random.add(name)
            self._states = [None] * len(self._states)  # the modules around this one need not be named
        self._add(f'the output of {name}', module, output)

    @torch.no_grad()
    def _add(self, what, module, value):
        value = value[0] if isinstance(value, tuple) and value else value
        if module.training and torch.is_tensor(value) and value.is_floating_point():
            value = local_part(value.detach())
            squares, count = self.activations.get(what, (0.0, 0))
            self.activations[what] = squares + value.double().square().sum().item(), count + value.numel()


def is_second_pass():
    """Whether this is a forward pass within the backward pass, for a checkpoint of activations."""
    return torch._C._current_graph_task_id() >= 0


def random_state():
    return torch.get_rng_state().numpy().tobytes()
