"""Products with frozen weights (kilogpt/layers/lora.py), compiled so that no copy of a weight is kept."""
import torch

from kilogpt.layers.lora import FrozenLinear, input_gradient


def keep_no_copies(block):
    """Let the backward pass of a block widen frozen weights again, in place.

    The compiler sees that both passes widen the same weight, and would keep the copy of the first. Weights that
    tensor parallelism splits stay as they are.
    """
    for module in block.modules():
        if isinstance(module, FrozenLinear) and not hasattr(module.weight, 'placements'):
            module.input_gradient = opaque_input_gradient


@torch.library.custom_op('kilogpt::input_gradient', mutates_args=())
def opaque_input_gradient(grad: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
    """input_gradient as one operation."""
    return input_gradient(grad, weight, scale)


@opaque_input_gradient.register_fake
def _(grad, weight, scale):
    return grad.new_empty(*grad.shape[:-1], weight.size(1))
