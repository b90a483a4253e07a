"""A loss whose logits are never there all at once. Imports precision.py alone."""
import torch

from kilogpt.layers.precision import cast_for_linears


class LossInParts(torch.autograd.Function):
    """A sum of losses over parts of `size` rows of x. The forward pass computes the gradients too."""

    @staticmethod
    def forward(ctx, x, weight, targets, loss, size):
        dtype = torch.promote_types(weight.dtype, torch.float32)
        total, grad_x, is_trained = 0, [], weight.requires_grad
        grad_weight = torch.zeros_like(weight, dtype=dtype) if is_trained else None
        head_weight = cast_for_linears(weight).detach().requires_grad_(is_trained)  # cast once for all parts
        for part, part_targets in zip(x.split(size), targets.split(size)):
            inputs = part.detach().requires_grad_(), head_weight
            with torch.enable_grad():
                part_loss = loss(*inputs, part_targets)
            part_grad_x, *part_grad_weight = torch.autograd.grad(part_loss, inputs[:1 + is_trained])
            grad_x.append(part_grad_x)
            if is_trained:
                grad_weight += part_grad_weight.pop()  # no longer held while the next part is computed
            total = total + part_loss.detach()
        ctx.save_for_backward(torch.cat(grad_x), grad_weight.type_as(weight) if is_trained else None)
        return total

    @staticmethod
    def backward(ctx, grad):
        grad_x, grad_weight = ctx.saved_tensors
        return grad * grad_x, None if grad_weight is None else grad * grad_weight, None, None, None
