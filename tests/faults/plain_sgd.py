"""Train with SGD without momentum instead of AdamW."""
import torch

from kilogpt import optim


def build_sgd(kind, named_parameters, learning_rate, *_):
    return torch.optim.SGD(named_parameters, learning_rate)


optim.build_optimizer = build_sgd
