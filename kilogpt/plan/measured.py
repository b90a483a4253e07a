"""What a block's mixer keeps for its backward pass, where no formula says it: measured on fake tensors.

The mixers are latent attention and Gated DeltaNet. autograd itself says what it saves.
"""
import dataclasses
import functools
import warnings
from typing import NamedTuple

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from kilogpt.layers.rope import rope_tables
from model import GPTConfig, build_mixer

LENGTHS = 128, 256  # positions of the two measurements, both of whole chunks


class MixerBytes(NamedTuple):
    """Bytes for each token on one process."""
    saved: float  # for the backward pass, without the mixer's input
    products: float  # results of its linears
    result: float  # of attention, or of the recurrence, which the last linear reads


def mixer_activations(config, layout, width, mixer, attention):
    """Bytes for each token of a block's mixer: (tp times what is kept, products, tp times the result).

    width: bytes of an element in matrix products. mixer: the letter in mixer_pattern. attention: tp times what
    ordinary attention with these heads keeps.
    """
    found = mixer_bytes(config, mixer, layout.tp, width)
    kept = layout.tp * found.saved
    if mixer == 'A':  # scores, if they are kept, and what context parallelism adds
        fused = config.n_head * (4 * width * config.head_width + 4)
        kept += max(0, attention - fused)
    elif layout.cp > 1:  # the result both before and after its exchange
        kept += layout.tp * found.result
    return kept, found.products, layout.tp * found.result


def mixer_bytes(config, mixer, tp, width):
    """The MixerBytes of a block with that letter of mixer_pattern. width: as in mixer_activations."""
    return _measured(dataclasses.astuple(config), mixer, tp, width)


@functools.cache
def _measured(arguments, mixer, tp, width):
    config = GPTConfig(*arguments)
    heads = {key: getattr(config, key) // tp for key in ('n_head', 'n_kv_head', 'delta_heads', 'delta_key_heads')}
    config = dataclasses.replace(  # head_width stays
        config, mixer_pattern=mixer, lora_rank=0, lora_base_dtype='float32', **heads)
    dtype = torch.float32 if width == 4 else torch.bfloat16
    with FakeTensorMode(), torch.autocast('cpu', dtype, enabled=width < 4), warnings.catch_warnings():
        warnings.simplefilter('ignore')  # of norms that are not fused under autocast
        layer = build_mixer(config, 0)
        if mixer == 'A':
            layer.dot_product.forward = keep_as_fused_attention
        first, second = (_saved_bytes(layer, config, length, dtype) for length in LENGTHS)
    linears = [module for module in layer.modules() if isinstance(module, nn.Linear)]
    return MixerBytes((second - first) / (LENGTHS[1] - LENGTHS[0]),
                      width * sum(linear.out_features for linear in linears), width * layer.c_proj.in_features)


def _saved_bytes(layer, config, length, dtype):
    """Bytes of the tensors that a sequence of that length lets autograd save, but for parameters and the input."""
    x = torch.empty(1, length, config.n_embd, dtype=dtype, requires_grad=True)
    positions = torch.arange(length)[None]
    rope = rope_tables(config, positions, length)['whole'] if config.pos == 'rope' else None
    passed_over = {tensor.untyped_storage()._cdata for tensor in (x, *layer.parameters())}
    passed_over |= {tensor.untyped_storage()._cdata for tensor in rope or ()}
    storages = {}

    def note(tensor):
        storage = tensor.untyped_storage()
        if storage._cdata not in passed_over:
            storages[storage._cdata] = storage  # kept alive, so that no other one gets its address
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        layer(x, rope, positions=positions)
    return sum(storage.nbytes() for storage in storages.values())


class FusedAttention(torch.autograd.Function):
    """Saves what fused attention does: queries, keys, values, the result, and a log-sum-exp for each head."""

    @staticmethod
    def forward(ctx, q, k, v):
        y = torch.empty_like(q)
        ctx.save_for_backward(q, k, v, y, q.new_empty(q.shape[:-1], dtype=torch.float32))
        return y

    @staticmethod
    def backward(ctx, gradient):
        return gradient, gradient, gradient


def keep_as_fused_attention(q, k, v, mask=None, **sinks):
    return FusedAttention.apply(q, k, v)
