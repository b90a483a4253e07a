"""Other forms of the model's parts on GPUs, put in place when a model is laid out on them."""
import torch
from torch.nn import functional as F

from kilogpt.devices.flex import has_triton
from kilogpt.devices.grouped_products import group_products
from kilogpt.devices.parts import find_parts


def use_fused_attention(model, device, dtype):
    """Give each query head a key/value head of its own if no fused kernel lets heads share them, in place.

    dtype: the dtype of attention, 'float32', 'bfloat16' or 'float16'. Attention without a fused kernel would
    store all scores, T² for each head.
    """
    has_flash = torch.backends.cuda.is_flash_attention_available()
    if has_flash and flash_attention_runs(dtype, torch.cuda.get_device_capability(device)):
        return
    for module, name in find_parts(model, 'attention'):
        attention = getattr(module, name)
        # FlexAttention lets heads share keys and values itself.
        getattr(attention, 'original', attention).register_forward_pre_hook(repeat_grouped_heads)


def flash_attention_runs(dtype, capability):
    """Whether a GPU of that compute capability has flash attention in dtype.

    Of PyTorch's kernels that do not store scores, only flash attention takes fewer key/value heads than query
    heads (torch 2.13). The memory-efficient kernel, for float32 and older GPUs, needs as many.
    """
    return dtype in ('bfloat16', 'float16') and capability >= (8, 0)


def repeat_grouped_heads(attention, inputs):
    """A forward pre-hook: q (B, H, T, D), k and v (B, G, S, D) -> k and v (B, H, S, D)."""
    q, k, v = inputs
    repeats = q.size(1) // k.size(1)
    return (q, k, v) if repeats == 1 else (q, *(x.repeat_interleave(repeats, dim=1) for x in (k, v)))


def use_grouped_products(model, device):
    """Compute the products of a block's experts in one kernel if the GPU has it, in place."""
    if torch.cuda.get_device_capability(device) >= (8, 0):
        group_products(model, [torch.bfloat16])


def fuse_loss(of_hidden, config):
    """of_hidden of a model's Loss, compiled, and with Triton in one kernel in training.

    If someone has edited the loss in model.py, or its logits are capped or scaled, it is only compiled.
    """
    compiled = torch.compile(of_hidden)
    if not has_triton() or not is_cross_entropy(of_hidden, config):
        return compiled
    from kilogpt.devices.loss_kernel import FusedLoss
    return FusedLoss(compiled, config.vocab_size)


@torch.enable_grad()
def is_cross_entropy(of_hidden, config):
    """Whether of_hidden(x, weight, targets) is the sum of cross-entropies in training, by a comparison on the CPU."""
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(rows, 4, generator=generator) for rows in (8, config.padded_vocab_size))
    targets = torch.randint(config.vocab_size, (8,), generator=generator)
    targets[0] = -1
    logits = F.linear(x, weight)[:, :config.vocab_size]
    expected = F.cross_entropy(logits, targets, ignore_index=-1, reduction='sum')
    return torch.allclose(of_hidden(x, weight, targets), expected, rtol=1e-5)
