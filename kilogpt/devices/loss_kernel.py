"""The loss on GPUs: one kernel turns the logits into their gradients where they are. Needs Triton.

The kernel reads a row of logits twice, the second time from the GPU's cache, and writes it once. The compiler
makes two kernels of the same formula, one for each pass (docs/log). The idea is Liger Kernel's (Hsu et al.
2024).
"""
import torch
import triton
import triton.language as tl
from torch.nn import functional as F

from kilogpt.layers.precision import cast_for_linears

MAX_BLOCK = 32768  # elements of a row at a time


class FusedLoss:
    """of_hidden(x, weight, targets) of a Loss, with the gradients computed by the forward pass.

    original: the form that evaluation takes, which has no gradients.
    """

    def __init__(self, original, vocab_size):
        self.original, self.vocab_size = original, vocab_size

    def __call__(self, x, weight, targets):
        if not torch.is_grad_enabled():
            return self.original(x, weight, targets)
        x, weight = cast_for_linears(x), cast_for_linears(weight)
        return LossWithGradients.apply(x, weight, targets, self.vocab_size)


class LossWithGradients(torch.autograd.Function):
    """The sum of the cross-entropies of x (N, C) with weight (V, C) for targets (N; -1 is ignored)."""

    @staticmethod
    def forward(ctx, x, weight, targets, vocab_size):
        logits = F.linear(x, weight)
        losses = gradients_in_place(logits, targets, vocab_size)
        ctx.save_for_backward(x, weight, logits)
        return losses.sum()

    @staticmethod
    def backward(ctx, grad):
        x, weight, gradients = ctx.saved_tensors
        _, weight_is_trained, *_ = ctx.needs_input_grad
        # x is much smaller than the gradient of the weight.
        weight_gradient = gradients.T @ (grad * x) if weight_is_trained else None
        return grad * (gradients @ weight), weight_gradient, None, None


def gradients_in_place(logits, targets, vocab_size):
    """Cross-entropies (N,), float32, of logits (N, V), which become the gradients of their sum."""
    N, V = logits.shape
    losses = torch.empty(N, dtype=torch.float32, device=logits.device)
    block = min(MAX_BLOCK, triton.next_power_of_2(V))
    loss_kernel[(N,)](logits, targets, losses, logits.stride(0), vocab_size, V, block,
                      num_warps=max(1, min(32, block // 1024)))
    return losses


@triton.jit
def loss_kernel(logits, targets, losses, stride, vocab_size: tl.constexpr, V: tl.constexpr,
                BLOCK: tl.constexpr):
    """One row: the log of the sum of exponentials as in online softmax (Milakov and Gimelshein 2018)."""
    row = tl.program_id(0).to(tl.int64)
    logits += row * stride
    target = tl.load(targets + row)
    largest, total = -float('inf'), 0.0
    for start in range(0, V, BLOCK):
        x = load_logits(logits, start + tl.arange(0, BLOCK), vocab_size, V)
        larger = tl.maximum(largest, tl.max(x, axis=0))
        total = total * tl.exp(largest - larger) + tl.sum(tl.exp(x - larger), axis=0)
        largest = larger
    log_total = largest + tl.log(total)
    counts = target >= 0
    chosen = tl.load(logits + tl.where(counts, target, 0)).to(tl.float32)
    tl.store(losses + row, tl.where(counts, log_total - chosen, 0.0))
    tl.debug_barrier()  # the logit of the target is read before any thread overwrites it
    for start in range(0, V, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        x = load_logits(logits, columns, vocab_size, V)
        gradient = tl.exp(x - log_total) - tl.where(columns == target, 1.0, 0.0)
        gradient = tl.where(counts, gradient, 0.0)
        tl.store(logits + columns, gradient.to(logits.dtype.element_ty), mask=columns < V)


@triton.jit
def load_logits(logits, columns, vocab_size: tl.constexpr, V: tl.constexpr):
    """Logits in float32, -inf in columns of padding. With a mask by vocab_size, loads would be of 2 bytes."""
    x = tl.load(logits + columns, mask=columns < V, other=-float('inf')).to(tl.float32)
    return tl.where(columns < vocab_size, x, -float('inf'))
