"""Island 1 has a loss of NaN in the sixth iteration."""
import os

from kilogpt.parallel import apply

forward_backward = apply.Parallel.forward_backward
calls = 0


def forward_backward_with_nan(self, x, y, n_tokens=0, last=True, scale=lambda loss: loss):
    global calls
    calls += last
    is_bad = os.environ['RANK'] == '1' and calls == 6
    return forward_backward(self, x, y, n_tokens, last, lambda loss: scale(loss) * (float('nan') if is_bad else 1))


apply.Parallel.forward_backward = forward_backward_with_nan
