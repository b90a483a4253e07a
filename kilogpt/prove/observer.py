"""Record what every process of a run of train.py computes, for kilogpt.prove and the tests.

There is no key of train.py for this: call `install` in a process before train.py starts there.
"""
import functools
import inspect
import os
from typing import NamedTuple

import torch

from kilogpt.optim import local_part
from kilogpt.parallel.apply import Parallel
from kilogpt.run.state import Progress


class Observation(NamedTuple):
    """What one process computed in one iteration."""
    gradients: list  # [(name of a parameter, whole gradient before clipping)]; may have a tied pair twice
    weights: list  # [(name of a parameter, whole parameter before the update)]
    # {'the input/output of MODULE', 'the ARGUMENT of BLOCK': (sum of squares, number of elements)}, in order
    activations: dict
    random: list  # names of the innermost modules that drew random numbers
    unused: list  # names of trained parameters without a gradient


def path_of(folder, iteration, rank):
    return os.path.join(folder, f'{iteration}.{rank}.pt')


def read(folder, iteration, ranks):
    """[Observation] of some processes in an iteration. The first iteration is 1."""
    observations = []
    for rank in ranks:
        observations.append(Observation(**torch.load(path_of(folder, iteration, rank))))
    return observations


def install(folder, in_float64=False, traces_forward=False, is_brief=False, stop_after=None):
    """Make train.py, when it runs in this process, write an Observation of each iteration into a folder.

    in_float64: compute in float64, where rounding is too small to send a token to another expert.
    traces_forward: after an error in the backward pass, print where the forward pass computed the tensor.
    is_brief: record only the gradients, and the weights at the start, which takes half of the time.
    stop_after: the iteration at which the run finishes; max_iters, which an edit may read, is that of all runs.
    """
    if traces_forward:
        torch.autograd.set_detect_anomaly(True, check_nan=False)
    if in_float64:
        torch.set_default_dtype(torch.float64)
    parallelize, warm_up, clip_gradients = Parallel.parallelize, Parallel.warm_up, Parallel.clip_gradients
    end_if_finished = Progress.end_if_finished
    hooks = ModuleHooks()
    iteration = 0

    def observed_parallelize(self, model, config, dtype):
        parallelize(self, model, config, dtype)
        if not self.compiles and not is_brief:  # otherwise the hooks would be compiled, too
            for stage in self.stages.values():
                hooks.register(stage)

    def unobserved_warm_up(self, read_batch):
        warm_up(self, read_batch)
        hooks.reset()

    def observed_clip_gradients(self, max_norm, limit):
        nonlocal iteration
        iteration += 1
        gradients, unused = [], []
        for name, parameter in self.optimizer_parameters():
            if parameter.grad is None:
                unused.append(name)
            else:
                gradients.append((name, whole(parameter.grad)))
        weights = []
        if iteration == 1 or not is_brief:
            weights = [(name, whole(parameter)) for name, parameter in self.named_parameters()]
        observation = Observation(gradients, weights, hooks.activations, sorted(hooks.random), unused)
        torch.save(observation._asdict(), path_of(folder, iteration, os.environ.get('RANK', 0)))
        hooks.reset()
        return clip_gradients(self, max_norm, limit)

    def finish_early(self):
        if self.iteration == stop_after:
            self.end('finished')
        end_if_finished(self)

    Progress.end_if_finished = finish_early
    Parallel.parallelize, Parallel.warm_up = observed_parallelize, unobserved_warm_up
    Parallel.clip_gradients = observed_clip_gradients


def whole(tensor):
    """A copy of a parameter or gradient on the CPU. Gathers it if it is sharded: a collective."""
    tensor = tensor.detach()
    return wide((tensor.full_tensor() if hasattr(tensor, 'full_tensor') else tensor).cpu().clone())


def wide(tensor):
    """A tensor of integers or of 16 bits in float64, to compute differences."""
    return tensor if tensor.dtype in (torch.float32, torch.float64) else tensor.double()


class ModuleHooks:
    """Hooks that sum the squares of each module's input and output, and detect draws of random numbers.

    Of a block, they also record the other arguments: its mask and the tables by which it rotates.
    """

    def __init__(self):
        self.reset()

    def reset(self):
        self.activations, self.random, self._states = {}, set(), []

    def register(self, model):
        experts = f'.{model.split_plan["experts"]}.'
        for name, module in model.named_modules():
            # Some modules cannot be compared: the inside of a part that cpu.py replaces, and experts, whose
            # output is only one term of a sum with tp.
            is_hidden = name.endswith('.fused') or experts in name
            if name and not is_hidden and module is not getattr(model, 'loss', None):
                module.register_forward_pre_hook(
                    lambda module, inputs, name=name: self._begin(name, module, inputs))
                module.register_forward_hook(
                    lambda module, inputs, output, name=name: self._end(name, module, output))
        for name, block in model.get_submodule(model.split_plan['blocks']).items():
            name = f'{model.split_plan["blocks"]}.{name}'
            block.register_forward_pre_hook(functools.partial(self._add_arguments, name), with_kwargs=True)

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
            self._states = [None] * len(self._states)  # names only this module, not the modules around it
        self._add(f'the output of {name}', module, output)

    def _add_arguments(self, name, block, inputs, keywords):
        if is_second_pass():
            return
        # The forward method of the instance may be wrapped, for a checkpoint.
        arguments = inspect.signature(type(block).forward).bind(block, *inputs, **keywords).arguments
        for argument, value in list(arguments.items())[2:]:
            value = value[0] if isinstance(value, tuple) and value else value
            if torch.is_tensor(value):
                self._add(f'the {argument} of {name}', block, value.double())

    @torch.no_grad()
    def _add(self, what, module, value):
        value = value[0] if isinstance(value, tuple) and value else value
        if module.training and torch.is_tensor(value) and value.is_floating_point():
            value = local_part(value.detach())
            squares, count = self.activations.get(what, (0.0, 0))
            self.activations[what] = squares + value.double().square().sum().item(), count + value.numel()


def is_second_pass():
    """Whether this forward pass is a recomputation for activation checkpointing, in the backward pass."""
    return torch._C._current_graph_task_id() >= 0


def random_state():
    return torch.get_rng_state().numpy().tobytes()
