"""Read weights in MXFP4, in which gpt-oss's experts come.

A block of 32 weights has a scale of 8 bits, which is a power of 2, and 4 bits for each weight: sign, two bits of
exponent, one of mantissa (OCP Microscaling Formats 1.0, 2023, 5.3.3 and 6.3). 16 bits hold any product of the two.
"""
import torch

from kilogpt.weights.tensors import LazyTensor

VALUES = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
SCALE_OF_ONE = 127


def is_mxfp4(hf_config):
    """Whether a config.json says that a gpt-oss is in MXFP4."""
    found = hf_config.get('quantization_config')
    is_of_family = hf_config.get('model_type') == 'gpt_oss'
    return is_of_family and isinstance(found, dict) and found.get('quant_method') == 'mxfp4'


def decoded(blocks, scales):
    """The LazyTensor (E, rows, columns) in bfloat16 of those of blocks (E, rows, columns / 32, 16) and of their scales.

    blocks: uint8, each of two weights, the first in the lower half. scales (E, rows, columns / 32): uint8.
    ValueError if the shapes do not fit.
    """
    if len(blocks.shape) != 4 or blocks.shape[3] != 16 or scales.shape != blocks.shape[:3]:
        raise ValueError(f'blocks of the shape {blocks.shape} and scales of the shape {scales.shape} are not of MXFP4')
    if blocks.dtype != torch.uint8 or scales.dtype != torch.uint8:
        raise ValueError(f'blocks in {blocks.dtype} and scales in {scales.dtype} are not of MXFP4')

    def read(rows):
        exponents = scales[rows].int()[..., None] - SCALE_OF_ONE
        return torch.ldexp(values_of(blocks[rows]), exponents).flatten(2).bfloat16()

    return LazyTensor((*blocks.shape[:2], 32 * blocks.shape[2]), torch.bfloat16, read)


def values_of(codes):
    """(..., 16) bytes -> (..., 32) float32, without their scale."""
    codes = torch.stack((codes & 15, codes >> 4), dim=-1).flatten(-2).int()
    return VALUES[codes & 7] * (1 - 2 * (codes >> 3))
