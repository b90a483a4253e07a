"""Gated DeltaNet on GPUs: the recurrence by the Triton kernels of flash-linear-attention, if it is installed.

Those are for training in 16 bits. They round corrections and the states between chunks to 16 bits, which
kilogpt/layers/delta.py keeps in float32.
"""
import torch
from torch.nn import functional as F

from kilogpt.devices.parts import find_parts, replace_parts
from kilogpt.layers.delta import DeltaRule

INPUTS = 'queries', 'keys', 'values', 'decays', 'writes'
TOLERANCE = 0.02  # of a result's norm: products of bfloat16 differ by 0.002 to 0.008 from those of float32


def use_delta_kernels(model, device, dtype):
    """Compute the recurrences of a model by flash-linear-attention, in place; returns a note, or None.

    dtype: of training, 'float32', 'bfloat16' or 'float16'. The note says why the kernels are not used. Hooks on
    recurrences must be registered afterwards.
    """
    if dtype == 'float32':
        return None
    rule, *_ = (getattr(*part) for part in find_parts(model, 'recurrence'))
    try:
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule as kernel
        problem = find_difference(rule, KernelDeltaRule(kernel), model.config, device)
    except ImportError:
        problem = 'they are not installed (pip install "flash-linear-attention[cuda]")'
    except Exception as error:  # of Triton, for this GPU or this version
        problem = f'they fail here ({type(error).__name__}: {str(error).splitlines()[0] if str(error) else ""})'
    if problem:
        return f'Gated DeltaNet does not use the kernels of flash-linear-attention: {problem}'
    replace_parts(model, 'recurrence', lambda rule: KernelDeltaRule(kernel))
    return None


class KernelDeltaRule(DeltaRule):
    """The recurrence by `kernel`. For text, and for values in float32, it is DeltaRule's."""

    def __init__(self, kernel):
        super().__init__()
        self.kernel = kernel

    def forward(self, q, k, v, decay, write, begins=None, cache=None):
        if cache is not None or v.dtype == torch.float32:
            return super().forward(q, k, v, decay, write, begins, cache)
        return self.by_kernel(q, k, v, decay, write, begins)

    @torch.compiler.disable  # the number of documents depends on the batch
    def by_kernel(self, q, k, v, decay, write, begins):
        """The kernel takes positions before heads, and documents as one row, with their bounds."""
        inputs = [x.transpose(1, 2) for x in (q.type_as(v), k.type_as(v), v, decay, write)]
        B, T, H, V = inputs[2].shape
        bounds = None
        if begins is not None:
            begins = begins.expand(B, T).clone()
            begins[:, 0] = True
            bounds = F.pad(begins.flatten().nonzero()[:, 0], (0, 1), value=B * T)
            inputs = [x.flatten(0, 1)[None] for x in inputs]
        y, _ = self.kernel(*inputs, scale=k.size(-1) ** -0.5, cu_seqlens=bounds, use_qk_l2norm_in_kernel=True)
        return y.view(B, T, H, V).transpose(1, 2)


@torch.enable_grad()
def find_difference(rule, other, config, device):
    """In words, whether two recurrences differ in a result or a gradient, for two rows of documents; None if not.

    delta.py may have been edited, and kernels of other versions of Triton have been wrong.
    """
    generator, T = torch.Generator().manual_seed(0), 80
    heads = (config.delta_key_heads, config.delta_key_width), (config.delta_heads, config.delta_value_width)
    shapes = [(2, n, T, width) for n, width in (heads[0], *heads)] + [(2, config.delta_heads, T)] * 2
    q, k, v, decay, write = (torch.randn(shape, generator=generator) for shape in shapes)
    inputs = [x.bfloat16() for x in (q, k, v)] + [-decay.abs(), write.sigmoid()]
    inputs = [x.to(device).requires_grad_() for x in inputs]
    begins = (torch.arange(T, device=device) % 33 == 7)[None]
    results = []
    for part in (rule, other):
        y = part(*inputs, begins=begins)
        results.append([y, *torch.autograd.grad(y.float().square().sum(), inputs)])
    for name, ours, theirs in zip(('results', *(f'gradients of {name}' for name in INPUTS)), *results):
        difference = ((ours - theirs).float().norm() / ours.float().norm()).item()
        if not difference <= TOLERANCE:
            return f'their {name} differ by {difference:.0%} of what kilogpt/layers/delta.py gives'
    return None
