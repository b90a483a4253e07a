"""Every method of a part of the model, within a pass, finds the part in the mode of that pass: training or not."""
import functools
import inspect

import torch

import model
from kilogpt import layers
from kilogpt.devices import cpu
from kilogpt.layers import attention, convolution, lora, mixture, preferences, value_embedding
from kilogpt.parallel.apply import Parallel

expected = None


def within(mode, function):
    @functools.wraps(function)
    def pass_of_mode(*args, **options):
        global expected
        expected = mode
        try:
            return function(*args, **options)
        finally:
            expected = None
    return pass_of_mode


def checked(name, method):
    @functools.wraps(method)
    def check(self, *args, **options):
        assert expected is None or self.training == expected, f'{name} finds training={self.training}'
        return method(self, *args, **options)
    return check


for module in (model, layers, cpu, attention, convolution, lora, mixture, preferences, value_embedding):
    for kind in vars(module).values():
        if inspect.isclass(kind) and issubclass(kind, torch.nn.Module) and kind.__module__ == module.__name__:
            for name, method in list(vars(kind).items()):
                if inspect.isfunction(method) and not name.startswith('__'):
                    setattr(kind, name, checked(f'{kind.__name__}.{name}', method))
Parallel.forward_backward = within(True, Parallel.forward_backward)
Parallel.evaluate = within(False, Parallel.evaluate)
