"""Attention on GPUs that skips the keys of other documents and those outside of a window.

FlexAttention (Dong et al. 2024) compiles a kernel for a description of a mask. The kernel skips blocks of 128
queries and 128 keys in which the mask is empty. Here query i of a row sees keys first[i] to i, and `first`
does not fall along a row. The blocks follow from `first` at their edges, without a tensor of T × T.

Shapes in comments: B batch, T positions, H heads, G key/value heads, D head width, N blocks (T / 128).
"""
import functools
from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from kilogpt.devices.parts import find_parts, is_same_attention, replace_parts
from kilogpt.layers.attention import build_mask as dense_mask, of_heads

BLOCK = 128  # queries, and keys, of a block: the default of FlexAttention, which its kernels are tuned for
MIN_HEAD_WIDTH = 16  # the smallest matrix product in Triton
MAX_COMPARED = 1024  # positions in the comparisons that find out whether someone has edited model.py


def use_flex_attention(model, device):
    """Let attention skip keys of other documents and outside of windows, in place; returns a note, or None.

    Replaces `build_mask` and all attention modules, or nothing. The note is a sentence that says why nothing
    was replaced. Hooks on attention modules must be registered afterwards: they stay with the old modules.
    """
    problem = why_no_flex(model, device)
    if problem:
        return f'documents and windows take a mask of T × T elements: {problem}'
    length = model.config.block_size
    causal_blocks = find_blocks(torch.zeros(1, length, dtype=torch.int64, device=device))

    def attention_for(original):
        return FlexAttention(original, causal_blocks if length > BLOCK else None)

    replace_parts(model, 'mask', lambda original: build_mask)
    replace_parts(model, 'attention', attention_for)
    return None


def why_no_flex(model, device):
    """Why FlexAttention cannot compute a model's attention on a GPU, in words; None if it can."""
    capability = torch.cuda.get_device_capability(device)
    if capability < (8, 0):
        version = '.'.join(map(str, capability))
        return f'FlexAttention needs a GPU of compute capability 8.0 or above, and this one has {version}'
    if not has_triton():
        return 'FlexAttention needs Triton, which is not installed'
    if model.config.head_width < MIN_HEAD_WIDTH:
        return (f'FlexAttention needs heads of width {MIN_HEAD_WIDTH} or above, and head_width is '
                f'{model.config.head_width}')
    parts = [getattr(owner, name) for owner, name in find_parts(model, 'attention')]
    if not all(is_unedited_attention(part, model.config) for part in parts):
        return 'attention in model.py was edited, and FlexAttention would not compute the same'
    if any(getattr(*part) is not dense_mask for part in find_parts(model, 'mask')):
        return 'build_mask in model.py was edited, and FlexAttention would not compute the same'
    return None


def has_triton():
    """Whether Triton, which compiles FlexAttention's kernels, can be imported."""
    from torch.utils._triton import has_triton_package
    return has_triton_package()


# --- the mask -----------------------------------------------------------------------------------------------

class AttentionBlocks(NamedTuple):
    """The keys that queries see, in the form in which attention takes them as `mask`.

    A block of keys is whole for a block of queries if each of these queries sees each of its keys, and a part
    if some do. For parts the kernel reads `first`. The fields after `first` are BlockMask's, in its order.
    They are tensors alone, which a compiled block takes as inputs whatever the batch; a BlockMask also has a
    function, whose identity the compiler would check.
    """
    first: torch.Tensor  # (B, T) or (1, T), int64: the first key that each query sees
    n_kv_parts: torch.Tensor  # (B, 1, N), int32: for each block of queries, how many blocks of keys are parts
    kv_parts: torch.Tensor  # (B, 1, N, N), int32: the numbers of these blocks, then numbers without a meaning
    n_kv_wholes: torch.Tensor
    kv_wholes: torch.Tensor
    n_q_parts: torch.Tensor  # (B, 1, N), int32: for each block of keys, for how many of queries it is a part
    q_parts: torch.Tensor
    n_q_wholes: torch.Tensor
    q_wholes: torch.Tensor


def build_mask(first):
    """The `mask` of FlexAttention for queries that see keys first[i] to i: AttentionBlocks.

    first (B, T), int64, does not fall along a row. In rows of a single block nothing can be skipped, and the
    mask is bool.
    """
    return find_blocks(first) if first.size(1) > BLOCK else dense_mask(first)


def find_blocks(first):
    """The AttentionBlocks of first (B, T), by arithmetic on N × N elements for each row."""
    B, T = first.shape
    N = -(-T // BLOCK)
    number = torch.arange(N, device=first.device)  # of a block, or of an entry in a list of blocks
    # The first query of a block sees the earliest keys. The last query sees the fewest keys of the past.
    start = first[:, ::BLOCK] // BLOCK  # (B, N): the first block of keys of which a query sees anything
    # The padding leaves a last block of fewer than 128 queries without whole blocks, as BlockMask wants it.
    seen_by_last = F.pad(first, (0, N * BLOCK - T), value=T)[:, BLOCK - 1::BLOCK]
    whole_start = (-(-seen_by_last // BLOCK)).minimum(number)  # (B, N): the first whole block of keys
    # Both rise along a row, so that the queries of a block of keys come to an end.
    end = (start[:, :, None] <= number).sum(dim=1)  # (B, N)
    whole_end = (whole_start[:, :, None] <= number).sum(dim=1)

    # A block of keys is a part for the queries at its own positions, since each does not see later keys.
    kv_parts = start[:, :, None] + number
    kv_parts = torch.where(kv_parts < whole_start[:, :, None], kv_parts, number[:, None])
    kv_wholes = whole_start[:, :, None] + number
    q_parts = torch.where(number == 0, number[:, None], whole_end[:, :, None] + number - 1)
    q_wholes = (number[:, None] + 1 + number).expand(B, N, N)
    lists = []
    for counts, numbers in ((whole_start - start + 1, kv_parts), (number - whole_start, kv_wholes),
                            (end - whole_end + 1, q_parts), (whole_end - number - 1, q_wholes)):
        # The kernels assume contiguous tensors, and may read a number that has no meaning ahead of time.
        lists += [counts.int().contiguous()[:, None], numbers.clamp(max=N - 1).int().contiguous()[:, None]]
    return AttentionBlocks(first, *lists)


# --- attention ----------------------------------------------------------------------------------------------

class FlexAttention(nn.Module):
    """Attention for a mask of AttentionBlocks. Other masks, and dropout in training, go to the original."""

    def __init__(self, original, causal_blocks=None):
        """original: the attention module to replace.

        causal_blocks: the AttentionBlocks of causal attention. They are for capped scores and for sinks alone,
        which PyTorch's flash attention does not have.
        """
        super().__init__()
        self.original = original
        self.softcap = getattr(original, 'softcap', 0.0)
        self.causal_blocks = causal_blocks

    def forward(self, q, k, v, mask=None, **sinks):
        """q (B, H, T, D), k, v (B, G, T, D) -> (B, H, T, D). mask: from build_mask; None means causal.

        sinks: as a Sinks gives them, or nothing.
        """
        has_dropout = self.training and self.original.dropout > 0  # FlexAttention does not have dropout
        is_special = self.softcap or sinks
        if mask is None and is_special and self.causal_blocks is not None and not has_dropout:
            is_whole_sequence = q.size(2) == k.size(2) == self.causal_blocks.first.size(1)
            mask = self.causal_blocks if is_whole_sequence else None
        if isinstance(mask, AttentionBlocks) and has_dropout:
            mask = dense_mask(mask.first)
        if not isinstance(mask, AttentionBlocks):
            return self.original(q, k, v, mask=mask, **sinks)
        if sinks:
            sinks = dict(sinks=of_heads(sinks['sinks'], self.original.first_head, q.size(1)))
        attend = attend_to_blocks if torch.compiler.is_compiling() else compiled_attend_to_blocks()
        return attend(q, k, v, mask, self.softcap, **sinks)


def attend_to_blocks(q, k, v, blocks, softcap, sinks=None):
    """Attention for AttentionBlocks, to be compiled. softcap: as in ScoredAttention, 0 = none. sinks: (H,)."""
    T = q.size(2)
    first = blocks.first.expand(q.size(0), T)

    def is_seen(b, h, query, key):
        return (key >= first[b, query]) & (key <= query)

    def cap_score(score, b, h, query, key):
        return softcap * torch.tanh(score / softcap)

    block_mask = BlockMask((T, T), *blocks[1:], BLOCK_SIZE=(BLOCK, BLOCK), mask_mod=is_seen)
    # Under autocast, a norm of queries and keys may give float32 beside values in bfloat16.
    y = flex_attention(q.type_as(v), k.type_as(v), v, score_mod=cap_score if softcap else None,
                       block_mask=block_mask, enable_gqa=k.size(1) != q.size(1), return_lse=sinks is not None)
    if sinks is None:
        return y
    y, log_sums = y  # (B, H, T, D), (B, H, T): a sink enlarges the sums by which the weights are divided
    return y * torch.sigmoid(log_sums - sinks[:, None].type_as(log_sums))[..., None].type_as(y)


@functools.cache
def compiled_attend_to_blocks():
    """attend_to_blocks for blocks of the model that are not compiled: eager code would store all scores."""
    # Compiled on the first call, since torch.compile takes seconds to import.
    return torch.compile(attend_to_blocks, dynamic=False)


# --- comparisons with model.py ------------------------------------------------------------------------------

def is_unedited_attention(attention, config):
    """Whether an attention module of model.py computes what FlexAttention does, with a mask and without."""
    softcap = getattr(attention, 'softcap', 0.0)
    settings = {key: value for key, value in vars(attention).items() if isinstance(value, (int, float, str))}
    key = type(attention), str(settings), config.n_head, config.n_kv_head, config.block_size
    if key not in ARE_UNEDITED:
        length = min(config.block_size, MAX_COMPARED)
        mask = dense_mask(first_of_example(length))
        ARE_UNEDITED[key] = hasattr(attention, 'dropout') and is_same_attention(
            attention, functools.partial(attend_to_dense, softcap=softcap), config, length, [None, mask])
    return ARE_UNEDITED[key]


ARE_UNEDITED = {}  # the results of `is_unedited_attention`


def attend_to_dense(q, k, v, mask, softcap):
    """Attention by its formula: q (1, H, T, D), k, v (1, G, T, D), mask (1, 1, T, T) -> (1, H, T, D)."""
    if mask is None:
        mask = dense_mask(torch.zeros(1, q.size(2), dtype=torch.int64))
    k, v = (x.repeat_interleave(q.size(1) // x.size(1), dim=1) for x in (k, v))
    scores = (q @ k.mT) * q.size(-1) ** -0.5
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    return scores.masked_fill(~mask, -torch.inf).softmax(dim=-1) @ v


def first_of_example(length):
    """first (1, length) of three documents and a window."""
    positions = torch.arange(length)
    start_of_document = (positions * 3 // length * length + 2) // 3
    return torch.maximum(start_of_document, positions - length // 4)[None]
