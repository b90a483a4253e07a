"""Start the gradient scaler of float16 at a scale that allows large gradients."""
import functools

import torch

torch.amp.GradScaler = functools.partial(torch.amp.GradScaler, init_scale=1.0)
