"""Adapters of low rank (LoRA): merged into their base, and in the files of PEFT.

A checkpoint of a run with adapters holds these alone. Its state.json has `base`: the source of the frozen
weights, and a digest by which to see whether they are still the same.
"""
import dataclasses
import hashlib
import math

import torch

from kilogpt.layers.lora import scale_of
from kilogpt.layers.options import ADAPTER_KEYS
from kilogpt.weights.tensors import LazyTensor
from model import GPTConfig

DIGEST_VALUES = 2 ** 12  # values of each tensor of which the digest is made


def digest_of(weights):
    """A hexadecimal digest of {name: LazyTensor}: of the names, the shapes, and the first values of each tensor.

    Another model has another digest, and so has a finetuned one. A change of a few values can go unnoticed.
    """
    digest = hashlib.blake2b(digest_size=8)
    for name, stored in sorted(weights.items()):
        rows = -(-DIGEST_VALUES // math.prod(stored.shape[1:]))
        digest.update(f'{name} {stored.shape}'.encode())
        digest.update(stored[:rows].float().contiguous().numpy().tobytes())
    return digest.hexdigest()


def plain_config(config):
    """The GPTConfig of a model whose adapters are merged into its linears."""
    defaults = {field.name: field.default for field in dataclasses.fields(GPTConfig)}
    return dataclasses.replace(config, **{key: defaults[key] for key in ADAPTER_KEYS})


def merged(weights, config):
    """{name: LazyTensor} without adapters: W + scale B A takes the place of each weight W that has one."""
    found = {name: stored for name, stored in weights.items() if '.lora_' not in name}
    for name in weights:
        linear, _, kind = name.rpartition('.')
        if kind == 'lora_A':
            found[f'{linear}.weight'] = _with_update(
                weights[f'{linear}.weight'], weights[name], weights[f'{linear}.lora_B'], scale_of(config))
    return found


def _with_update(weight, a, b, scale):
    """The LazyTensor of a weight (outputs, inputs) plus scale B A, in float32."""

    def read(rows):
        return torch.addmm(weight[rows].float(), b[rows].float(), a.whole().float(), alpha=scale)

    return LazyTensor(weight.shape, torch.float32, read)
