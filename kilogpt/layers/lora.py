"""Adapters of low rank beside frozen linears (LoRA, Hu et al. 2021).

An adapted linear computes y = x Wᵀ + b + scale · dropout(x) Aᵀ Bᵀ. Of the whole model only the matrices A
(rank, inputs) and B (outputs, rank) are trained. B starts at zero, so that training begins with the model as
it was. Frozen linears may be kept in 16 or 8 bits, as QLoRA (Dettmers et al. 2023) keeps them in 4.
"""
import math

import torch
from torch import nn
from torch.nn import functional as F

from kilogpt.layers.options import GROUPS, find_targets
from kilogpt.layers.precision import cast_for_linears

class FrozenLinear(nn.Linear):
    """A linear that is not trained, whose weight is kept in lora_base_dtype. It has a plain linear's names.

    In int8 each output has a scale, which makes its largest weight 127 (absmax quantization, Dettmers et al.
    2022, 2.1).
    """

    def __init__(self, linear, config):
        super().__init__(linear.in_features, linear.out_features, bias=linear.bias is not None)
        self.requires_grad_(False)
        scale, dtype = None, self.weight.dtype
        if config.lora_base_dtype != 'float32':
            dtype = getattr(torch, config.lora_base_dtype)
        self.weight = nn.Parameter(torch.empty_like(self.weight, dtype=dtype), requires_grad=False)
        if dtype == torch.int8:
            scale = nn.Parameter(torch.empty(linear.out_features), requires_grad=False)
        self.weight_scale = scale
        self.input_gradient = input_gradient

    def matrix(self):
        """The weight (outputs, inputs) in the default dtype."""
        return widened(self.weight, self.weight_scale, torch.get_default_dtype())

    def forward(self, x):
        """x (..., inputs) -> (..., outputs)."""
        x = cast_for_linears(x)
        if self.weight_scale is None and self.weight.dtype == x.dtype:
            return super().forward(x)
        y = FrozenProduct.apply(x, self.weight, self.weight_scale, self.input_gradient)
        return y if self.bias is None else y + self.bias.type_as(y)


class FrozenProduct(torch.autograd.Function):
    """x Wᵀ of a W in another dtype. Autograd would keep W in x's dtype; here each pass makes a copy of its own."""

    @staticmethod
    def forward(ctx, x, weight, scale, input_gradient):
        ctx.save_for_backward(weight, scale)
        ctx.input_gradient = input_gradient
        return F.linear(x, widened(weight, scale, x.dtype))

    @staticmethod
    def backward(ctx, grad):
        return ctx.input_gradient(grad, *ctx.saved_tensors), None, None, None


def input_gradient(grad, weight, scale):
    """The gradient of x in FrozenProduct, from that of its result."""
    return grad @ widened(weight, scale, grad.dtype)


def widened(weight, scale, dtype):
    """A weight (outputs, inputs) in another dtype. scale: (outputs,), or None for a weight without."""
    return weight.to(dtype) if scale is None else weight * scale[:, None].to(dtype)


def quantize(weight):
    """(int8 weight, scale) of a float32 weight (outputs, inputs)."""
    # A scale of 8 significant bits is the same in bfloat16, so that an element is rounded once in any dtype.
    scale = (weight.abs().amax(dim=1).clamp(min=1e-30) / 127).bfloat16().type_as(weight)
    return (weight / scale[:, None]).round().clamp(-127, 127).to(torch.int8), scale


class LoraLinear(FrozenLinear):
    """A frozen linear with an adapter."""

    def __init__(self, linear, config):
        super().__init__(linear, config)
        self.lora_A = nn.Parameter(torch.empty(config.lora_rank, linear.in_features))
        self.lora_B = nn.Parameter(torch.empty(linear.out_features, config.lora_rank))
        self.p, self.scale = config.lora_dropout, scale_of(config)
        self.dropout = F.dropout  # not a module: tensor parallelism takes modules in a linear for linears

    def matrix(self):
        """The weight with the adapter's product (outputs, inputs)."""
        return super().matrix() + self.scale * self.lora_B @ self.lora_A

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
        modules, targets = dict(block.named_modules()), find_targets(config.lora_targets)
        for path in modules.keys() & {*GROUPS['all']}:
            owner, _, name = path.rpartition('.')
            kind = LoraLinear if path in targets else FrozenLinear
            setattr(modules[owner], name, kind(modules[path], config))
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ValueError(f'lora_targets is {config.lora_targets!r}, but the blocks of this model do not have '
                         'such linears: set lora_targets to all')


def initial_std(name, shape):
    """The standard deviation of an adapter's first values: 0 for B, and for A that of PEFT's first values."""
    return 0.0 if name.endswith('lora_B') else 1 / math.sqrt(3 * shape[1])
