"""Train with SGD without momentum instead of AdamW."""
import torch

from kilogpt import optim


def build_sgd(config, named_parameters, *_):
    return torch.optim.SGD(named_parameters, config['learning_rate'])


optim.build_optimizer = build_sgd
