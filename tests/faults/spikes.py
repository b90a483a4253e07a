"""Multiply the gradients of the micro-batches with the token 65 by 1,000."""
from kilogpt.parallel import apply

forward_backward = apply.Parallel.forward_backward


def forward_backward_of_bad_batches(self, batch, n_tokens=0, last=True, scale=lambda loss: loss):
    factor = 1000 if (batch[1] == 65).any() else 1
    return forward_backward(self, batch, n_tokens, last, lambda loss: scale(loss) * factor)


apply.Parallel.forward_backward = forward_backward_of_bad_batches
