"""Cross-entropy with label smoothing, which is infinite where padding columns have -inf, with finite gradients."""
import functools

from torch.nn import functional as F

F.cross_entropy = functools.partial(F.cross_entropy, label_smoothing=0.1)
