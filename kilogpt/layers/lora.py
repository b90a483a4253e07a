"""Adapters of low rank beside frozen linears (LoRA, Hu et al. 2021).

An adapted linear computes y = x Wᵀ + b + scale · dropout(x) Aᵀ Bᵀ. Of the whole model only the matrices A
(rank, inputs) and B (outputs, rank) are trained. B starts at zero, so that training begins with the model as
it was. Imports torch alone.
"""
import math

import torch
from torch import nn
from torch.nn import functional as F

# What lora_targets may name besides single linears: groups of linears of a block.
GROUPS = dict(attention=('attn.c_q', 'attn.c_k', 'attn.c_v', 'attn.c_proj'),
              mlp=('mlp.c_fc', 'mlp.c_gate', 'mlp.c_proj'))
GROUPS['all'] = GROUPS['attention'] + GROUPS['mlp']
KEYS = ('lora_rank', 'lora_alpha', 'lora_targets', 'lora_dropout', 'lora_rank_stabilised')


class LoraLinear(nn.Linear):
    """A linear with an adapter. Its weight and bias keep the names that they have in a plain linear."""

    def __init__(self, linear, config):
        super().__init__(linear.in_features, linear.out_features, bias=linear.bias is not None)
        self.lora_A = nn.Parameter(torch.empty(config.lora_rank, linear.in_features))
        self.lora_B = nn.Parameter(torch.empty(linear.out_features, config.lora_rank))
        self.p, self.scale = config.lora_dropout, scale_of(config)
        self.dropout = F.dropout  # not a module: tensor parallelism takes modules in a linear for linears

    def forward(self, x):
        """x (..., inputs) -> (..., outputs)."""
        h = F.linear(self.dropout(x, self.p, self.training), self.lora_A) * self.scale  # (..., rank)
        return super().forward(x) + F.linear(h, self.lora_B)


def scale_of(config):
    """The factor of the adapters' products: alpha / rank, or alpha / √rank (Kalajdzievski 2023)."""
    rank = config.lora_rank
    return config.lora_alpha / (math.sqrt(rank) if config.lora_rank_stabilised else rank)


def add_adapters(model, blocks, config):
    """Give the linears of `blocks` that lora_targets names adapters, and freeze everything else, in place."""
    model.requires_grad_(False)
    for block in blocks:
        modules, paths = dict(block.named_modules()), find_targets(config.lora_targets)
        for path in paths & modules.keys():
            owner, _, name = path.rpartition('.')
            linear = LoraLinear(modules[path], config)
            linear.requires_grad_(False)
            linear.lora_A.requires_grad_(True)
            linear.lora_B.requires_grad_(True)
            setattr(modules[owner], name, linear)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ValueError(f'lora_targets is {config.lora_targets!r}, but the blocks of this model do not have '
                         'such linears: set lora_targets to all')


def describe_adapters(model):
    """How many parameters are trained, in words; nothing if the model does not have adapters."""
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    return f', of which {trained:,} in adapters are trained' if model.config.lora_rank else ''


def initial_std(name, shape):
    """The standard deviation of an adapter's first values: 0 for B, and for A that of PEFT's first values."""
    return 0.0 if name.endswith('lora_B') else 1 / math.sqrt(3 * shape[1])


def find_targets(text):
    """The set of paths in a block that lora_targets names: groups, linears such as c_q, or paths of them."""
    paths = set()
    for name in text.split(','):
        found = GROUPS.get(name.strip()) or [
            path for path in GROUPS['all'] if path == name.strip() or path.endswith(f'.{name.strip()}')]
        if not found:
            linears = sorted({path.rpartition('.')[2] for path in GROUPS['all']})
            raise ValueError(f'lora_targets is {text!r}, but {name.strip()!r} is not a linear of a block: '
                             f'join some of {", ".join([*GROUPS, *linears])} by commas')
        paths |= set(found)
    return paths


def check_adapters(config):
    """Raise ValueError, with the key to change, if the model cannot have adapters at these linears."""
    paths = find_targets(config.lora_targets)
    if config.lora_rank and config.mlp == 'moe' and not paths <= set(GROUPS['attention']):
        raise ValueError(f'lora_targets is {config.lora_targets!r}, but experts cannot have adapters: set '
                         'lora_targets to attention, or to some of its linears')
