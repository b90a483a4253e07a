"""Faster forms of the model's parts on a CPU, for training and for sampling."""
import math

import numpy as np
import torch
import torch.nn as nn
from torch.nn import functional as F

from kilogpt.devices.parts import find_parts, is_same_attention, replace_all, replace_parts
from kilogpt.layers.attention import ScoredAttention, build_mask
from kilogpt.layers.precision import at_least_float32

# Elements of logits at a time. With 100 million at once, an iteration of SmolLM2-135M on 2,048 tokens takes 12%
# longer, since the system provides new pages for them each time.
MAX_LOGITS = 2 ** 25


def use_faster_parts(model, use_kernels=False):
    """Put faster forms in the place of the model's parts, and of its dropout, in place.

    A part that someone has edited in model.py stays as it is.
    use_kernels: take attention and activations from `cpu_kernels`, which must be usable.
    """
    def attention_for(attention):
        return PlainAttention(attention, use_kernels) if is_plain(attention, model.config) else attention

    replace_parts(model, 'attention', attention_for)
    is_edited = any(getattr(*part) is not build_mask for part in find_parts(model, 'mask'))
    if not is_edited and all(isinstance(getattr(*part), PlainAttention)
                             for part in find_parts(model, 'attention')):
        replace_parts(model, 'mask', lambda build_mask: lambda first: first)  # PlainAttention takes it as it is
    if use_kernels:
        for mlp, name in find_parts(model, 'activation'):
            setattr(mlp, name, faster_activation(getattr(mlp, name), getattr(mlp, 'form', None)))
    replace_parts(model, 'cross_entropy', faster_cross_entropy)
    for owner, name in find_parts(model, 'loss'):
        getattr(owner, name).max_logits = MAX_LOGITS
    replace_all(model, nn.Dropout, lambda dropout: FastDropout(dropout.p))
    if model.config.lora_rank:
        from kilogpt.layers.lora import LoraLinear
        for module in model.modules():
            if isinstance(module, LoraLinear):
                module.dropout = fast_dropout
    if model.config.mlp == 'moe':
        from kilogpt.devices.grouped_products import group_products
        group_products(model, [torch.float32, torch.bfloat16])


def is_plain(attention, config):
    """Whether an attention module gives the same result as PlainAttention, for one sequence.

    The sequence has the model's length and heads. An attention that was edited in model.py may differ.
    """
    if isinstance(attention, ScoredAttention):
        return False
    settings = {key: value for key, value in vars(attention).items() if isinstance(value, (int, float, str))}
    key = type(attention), str(settings), config.n_head, config.n_kv_head, config.block_size
    if key not in ARE_PLAIN:
        length = min(config.block_size, PlainAttention.MAX_LENGTH)
        ARE_PLAIN[key] = is_same_attention(
            attention, lambda q, k, v, mask: PlainAttention(attention).eval().attend(q, k, v), config, length)
    return ARE_PLAIN[key]


ARE_PLAIN = {}  # the results of `is_plain`


class FastDropout(nn.Dropout):
    """PyTorch's dropout with the masks of `dropout_mask`."""

    def forward(self, x):
        return fast_dropout(x, self.p, self.training)


def fast_dropout(x, p, training):
    """F.dropout with the masks of `dropout_mask`."""
    if not training or p == 0 or hasattr(x, 'placements'):
        return F.dropout(x, p, training)
    # A tensor is passed rather than a shape, since the compiler merges calls with equal arguments.
    return x * dropout_mask(x.detach(), p).type_as(x) * (1 / (1 - p))


@torch.library.custom_op('kilogpt::dropout_mask', mutates_args=(), tags=(torch.Tag.nondeterministic_seeded,))
def dropout_mask(x: torch.Tensor, p: float) -> torch.Tensor:
    """A mask of x's shape, uint8: 0 with probability p and 1 otherwise.

    Each element takes 16 random bits from numpy, which is ten times as fast as drawing by PyTorch.
    """
    generator = np.random.Generator(np.random.SFC64(int(torch.randint(2 ** 63 - 1, ()))))
    bits = generator.integers(2 ** 64, size=-(-x.numel() // 4), dtype=np.uint64).view(np.uint16)[:x.numel()]
    return torch.from_numpy((bits >= round(p * 2 ** 16)).view(np.uint8)).view(x.shape)


@dropout_mask.register_fake
def _(x, p):
    return torch.empty(x.shape, dtype=torch.uint8)


@torch.no_grad()
def faster_activation(original, form):
    """An MLP's `activate` that takes large activations from cpu_kernels, or the original if it was edited.

    form: the form of the MLP, None if it does not have one.
    """
    from kilogpt.devices import cpu_kernels
    if form not in cpu_kernels.ACTIVATIONS:
        return original
    h, gate = torch.randn(2, 64, generator=torch.Generator().manual_seed(0))
    if form in cpu_kernels.GATED:
        expected = cpu_kernels.ACTIVATIONS[form](gate) * h
    else:
        expected, gate = cpu_kernels.ACTIVATIONS[form](h), None
    if not torch.allclose(original(form, h, gate), expected):
        return original
    values, slopes = cpu_kernels.tables(form)

    def activate(form, h, gate):
        # For fewer numbers, a call of our operation takes longer than the code that the compiler makes.
        is_faster = torch.compiler.is_compiling() and h.dtype == torch.bfloat16 and h.numel() >= 2 ** 17
        if not is_faster or h.numel() % cpu_kernels.BLOCK:
            return original(form, h, gate)
        x, factor = (h, None) if gate is None else (gate, h)
        return cpu_kernels.activation(x, factor, values, slopes)

    return activate


def faster_cross_entropy(original):
    """A cross_entropy that compiles to `CrossEntropy`, or the original if it was edited."""
    logits, targets = torch.randn(3, 8, generator=torch.Generator().manual_seed(0)), torch.tensor([4, -1, 0])
    losses = CrossEntropy.apply(logits, targets, 6)
    for is_training in (True, False):  # an edit may change one of them alone
        with torch.set_grad_enabled(is_training):
            expected = original(logits, targets, 6)
        is_summed = expected.dim() == 0
        if not torch.allclose(expected, losses.sum() if is_summed else losses):
            return original

    def cross_entropy(logits, targets, vocab_size, **options):
        if torch.compiler.is_compiling() and not options:  # an edited Loss may ask for another reduction
            losses = CrossEntropy.apply(logits, targets, vocab_size)
            return losses.sum() if is_summed else losses
        return original(logits, targets, vocab_size, **options)

    return cross_entropy


class CrossEntropy(torch.autograd.Function):
    """The model's `cross_entropy` in a form that is three times as fast when compiled.

    Compiled F.cross_entropy spends most of the time on comparisons of each column's number with the target
    and with the size of the vocabulary.
    """

    @staticmethod
    def forward(ctx, logits, targets, vocab_size):
        """The same as cross_entropy in model.py, with the reduction 'none'."""
        ctx.vocab_size = vocab_size
        padded = at_least_float32(logits) + padding_row(logits, vocab_size)
        largest = padded.amax(dim=-1, keepdim=True)
        log_sums = (padded - largest).exp().sum(dim=-1, keepdim=True).log() + largest  # (N, 1)
        ctx.save_for_backward(logits, targets, log_sums)
        of_targets = at_least_float32(logits.gather(1, targets.clamp(min=0)[:, None]))
        return torch.where(targets[:, None] >= 0, log_sums - of_targets, 0.0)[:, 0]

    @staticmethod
    def backward(ctx, grad):
        logits, targets, log_sums = ctx.saved_tensors
        columns = targets.clamp(min=0)[:, None]
        grad = torch.where(targets[:, None] >= 0, grad[:, None], 0.0)  # (N, 1)
        probabilities = (at_least_float32(logits) + padding_row(logits, ctx.vocab_size) - log_sums).exp()
        at_targets = (at_least_float32(logits.gather(1, columns)) - log_sums).exp() - 1
        grad_logits = (grad * probabilities).type_as(logits)
        return grad_logits.scatter(1, columns, (grad * at_targets).type_as(logits)), None, None


def padding_row(logits, vocab_size):
    """(V,): 0 for each token and -inf for each row of padding."""
    row = at_least_float32(logits.new_zeros(logits.size(-1)))
    row[vocab_size:] = -torch.inf
    return row


class PlainAttention(nn.Module):
    """The model's attention as two matrix products and a softmax, if these are faster than fused attention.

    They are faster in bfloat16 or with dropout, up to MAX_LENGTH positions, whose scores fit into memory.
    Without dropout cpu_kernels.attention is faster still, at any length, if the processor supports it, and
    cpu_attention.attention takes documents and windows.
    """
    MAX_LENGTH = 1024
    QUERIES = 256  # queries in one product; smaller products would cost more than they save

    def __init__(self, fused, use_kernels=False):
        """fused: the DotProductAttention to replace, which computes the other cases."""
        super().__init__()
        self.fused = fused
        self.use_kernels = use_kernels
        self.dropout = FastDropout(fused.dropout)

    def forward(self, q, k, v, mask=None):
        """The same as DotProductAttention: q (B, H, T, D), k and v (B, G, S, D) -> (B, H, T, D).

        In training, mask is `first` (B or 1, T), the first key that each query sees.
        """
        T = q.size(2)
        has_dropout = self.training and self.fused.dropout > 0
        if mask is not None and mask.dtype == torch.int64:
            if has_dropout:
                return self.fused(q, k, v, mask=build_mask(mask))
            from kilogpt.devices import cpu_attention
            return cpu_attention.attention(q, k, v, mask.expand(q.size(0), -1).contiguous(), self.use_kernels)
        if self.use_kernels and mask is None and not has_dropout:
            from kilogpt.devices import cpu_kernels
            if cpu_kernels.takes(q, k):
                return cpu_kernels.attention(q, k, v)
        is_plain_faster = q.dtype == torch.bfloat16 or has_dropout
        if mask is not None or T != k.size(2) or T > self.MAX_LENGTH or not is_plain_faster:
            return self.fused(q, k, v, mask=mask)
        return self.attend(q, k, v)

    def attend(self, q, k, v):
        """Attend in parts of QUERIES queries, each without the keys after its last query."""
        k = k.repeat_interleave(q.size(1) // k.size(1), dim=1)
        v = v.repeat_interleave(q.size(1) // v.size(1), dim=1)
        parts = []
        for start in range(0, q.size(2), self.QUERIES):
            end = min(start + self.QUERIES, q.size(2))
            parts.append(self.attend_part(q[:, :, start:end], k[:, :, :end], v[:, :, :end]))
        return torch.cat(parts, dim=2)

    def attend_part(self, q, k, v):
        """q (B, H, T, D) at the last T of S positions, k and v (B, H, S, D) -> (B, H, T, D)."""
        T, S = q.size(2), k.size(2)
        future = q.new_full((T, S), -torch.inf).triu(1 + S - T)
        scores = torch.baddbmm(future, q.flatten(0, 1), k.flatten(0, 1).mT, alpha=1 / math.sqrt(q.size(-1)))
        weights = self.dropout(scores.softmax(dim=-1))  # (B * H, T, S)
        return torch.bmm(weights, v.flatten(0, 1)).view_as(q)


class Int8Linear(nn.Module):
    """A linear that reads its weights in 8 bits if x has few rows, as for each token of a text.

    The time of such a product is the time in which the weights come from memory. Each output has a scale of
    its own, which makes its largest weight 127 (absmax quantization, Dettmers et al. 2022, 2.1), and the
    product is in bfloat16. If x has more rows, as a prompt has, the linear itself is faster.
    """
    MAX_ROWS = 4

    def __init__(self, linear):
        super().__init__()
        self.linear = linear
        from kilogpt.layers.lora import quantize
        self.quantized, scale = quantize(linear.weight.detach().float())
        self.scale = scale.bfloat16()

    def forward(self, x):
        """x (..., inputs) -> (..., outputs)."""
        rows = x.flatten(0, -2)
        if len(rows) > self.MAX_ROWS:
            return self.linear(x)
        y = torch._weight_int8pack_mm(rows.bfloat16(), self.quantized, self.scale).to(x.dtype)
        if self.linear.bias is not None:
            y = y + self.linear.bias
        return y.unflatten(0, x.shape[:-1])


class PackedLinear(nn.Module):
    """A linear for inference, with its weights in the blocks in which oneDNN reads them.

    F.linear copies the weights into these blocks in every call. For the few rows of x that each token of a
    text has, the copy takes longer than the product. Inductor packs frozen weights in the same way.
    """

    def __init__(self, linear, dtype, n_rows):
        """dtype: the dtype of the product, for x of any dtype. n_rows: rows of x in most calls."""
        super().__init__()
        self.dtype = dtype
        self.weight = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach().to(dtype), n_rows)
        self.bias = None if linear.bias is None else linear.bias.detach().to(dtype)

    def forward(self, x):
        """x (..., inputs) -> (..., outputs)."""
        y = torch.ops.mkldnn._linear_pointwise(x.to(self.dtype), self.weight, self.bias, 'none', [], '')
        return y.to(x.dtype)


def can_pack(dtype):
    """Whether PackedLinear can multiply in that dtype on this processor."""
    if dtype == torch.bfloat16:
        return torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return torch.backends.mkldnn.is_available() and dtype == torch.float32
