"""The loss of island 1 is NaN in the sixth iteration."""
import os

from kilogpt.parallel import apply

forward_backward = apply.Parallel.forward_backward
calls = 0


def forward_backward_with_nan(self, batch, n_tokens=0, last=True, scale=lambda loss: loss):
    global calls
    calls += last
    factor = float('nan') if os.environ['RANK'] == '1' and calls == 6 else 1
    return forward_backward(self, batch, n_tokens, last, lambda loss: scale(loss) * factor)


apply.Parallel.forward_backward = forward_backward_with_nan
