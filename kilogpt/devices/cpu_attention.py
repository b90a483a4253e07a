"""Causal attention on a CPU in which each query sees the keys from a first one on: documents and windows.

The time grows with the number of keys that queries see. PyTorch's flash attention (Dao 2023) computes slices
of q, k and v: a run of queries that all see from the beginning of the run, such as a document, is one causal
call. Other queries, those of windows and of short documents, are in blocks of QUERIES queries with a mask.

torch.compile does not look into the operation. The shapes in compiled code therefore do not depend on the
documents of a batch.

Shapes in comments: B batch, T positions, H heads, G key/value heads, D head width, N blocks in one call,
Q queries of a block, K keys of a block.
"""
import bisect
import functools
import typing

import numpy as np
import torch


QUERIES = 64  # of a block with a mask; larger blocks compute more scores that the mask then hides
MIN_RUN = 48  # queries of a run that is a causal call of its own; shorter ones share a block with a mask
STEP = 32  # keys before a block come in multiples of STEP, so that neighbouring blocks have equal shapes
MAX_KEYS = 2 ** 13  # of blocks with masks in one call: of each, a call has a mask and gradients of its own
flash_attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
flash_attention_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward

torch.library.define('kilogpt::visible_attention',
                     '(Tensor q, Tensor k, Tensor v, Tensor first) -> (Tensor, Tensor)')
torch.library.define('kilogpt::visible_attention_backward', '(Tensor grad_y, Tensor q, Tensor k, Tensor v, '
                     'Tensor first, Tensor y, Tensor log_sums) -> (Tensor, Tensor, Tensor)')


def attention(q, k, v, first, use_kernels=False):
    """Causal attention in which query i of a row sees the keys first[i] to i.

    q (B, H, T, D), k and v (B, G, T, D) -> (B, H, T, D), in one dtype, or in the dtype of autocast.
    first (B, T), int64, on the CPU: first[i] <= i, and first does not fall along a row. For documents,
    first[i] is the start of i's document; for a window, max(0, i - window + 1); for both, the later one.
    If the strides of first change, compiled code is compiled again.
    use_kernels: compute bfloat16 by cpu_kernels, which must be usable, where it takes such shapes.

    A row's result does not depend on the other rows. Sums are in float32, or in float64 for float64.
    """
    if torch.is_autocast_enabled('cpu'):
        q, k, v = (x.to(torch.get_autocast_dtype('cpu')) for x in (q, k, v))
    if use_kernels:
        from kilogpt.devices import cpu_kernels
        if cpu_kernels.takes(q, k):
            return cpu_kernels.attention(q, k, v, first)
    return VisibleAttention.apply(q, k, v, first)


class VisibleAttention(torch.autograd.Function):
    """`attention` in one dtype."""

    @staticmethod
    def forward(ctx, q, k, v, first):
        y, log_sums = torch.ops.kilogpt.visible_attention(q, k, v, first)
        ctx.save_for_backward(q, k, v, first, y, log_sums)
        return y

    @staticmethod
    def backward(ctx, grad_y):
        return *torch.ops.kilogpt.visible_attention_backward(grad_y, *ctx.saved_tensors), None


# --- blocks -------------------------------------------------------------------------------------------------

class Blocks(typing.NamedTuple):
    """Neighbouring blocks of queries that are one call, since their shapes are equal.

    Positions count along all rows of a batch, one after the other.
    """
    start: int  # the position of the first query
    length: int  # the queries of a block
    count: int
    before: int  # the keys of a block that come before its first query
    # Of each block, an array (Q,): the first key that each query sees, minus the block's start; () if causal.
    firsts: tuple

    @property
    def keys(self):
        """The number of keys of a block."""
        return self.before + self.length


def find_blocks(first):
    """All Blocks of first (B, T), in order."""
    return _find_blocks(first.numpy().tobytes(), *first.shape)


@functools.lru_cache(maxsize=8)  # the layers of a model ask for the same blocks, in both passes
def _find_blocks(data, B, T):
    rows = np.frombuffer(data, dtype=np.int64).reshape(B, T)
    if (rows < 0).any() or (rows > np.arange(T)).any() or (np.diff(rows) < 0).any():
        raise ValueError('first must neither fall along a row nor be beyond the query, nor below 0')
    found = []
    for row, first in enumerate(rows):
        for start, end in cut_row(first):
            before, firsts = start - int(first[start]), ()
            if before or first[end - 1] > start:
                before = min(start, -(-max(1, before) // STEP) * STEP)
                firsts = (first[start:end] - start,)
            block = Blocks(row * T + start, end - start, 1, before, firsts)
            if found and can_join(found[-1], block):
                others = found.pop()
                block = others._replace(count=others.count + 1, firsts=others.firsts + firsts)
            found.append(block)
    return found


def can_join(blocks, block):
    """Whether the block that follows upon `blocks` can be in one call with them."""
    has_mask = bool(block.firsts)
    if (block.length, block.before, has_mask) != (blocks.length, blocks.before, bool(blocks.firsts)):
        return False
    return not has_mask or (blocks.count + 1) * block.keys <= MAX_KEYS


def cut_row(first):
    """Yield (start, end) of each block of queries of a row. first (T,)."""
    T = len(first)
    starts = np.flatnonzero(first == np.arange(T))  # of documents: queries that see no key before their own
    ends = np.searchsorted(first, starts, side='right')  # of the run of queries that see from that start
    is_long = ends - starts >= MIN_RUN
    starts_of_long_runs = starts[is_long].tolist()
    ends_of_long_runs = dict(zip(starts_of_long_runs, ends[is_long].tolist()))
    starts_of_long_runs.append(T)
    start = 0
    while start < T:
        end = ends_of_long_runs.get(start)
        if end is None:
            next_run = starts_of_long_runs[bisect.bisect(starts_of_long_runs, start)]
            end = min(start + QUERIES, next_run)
        yield start, end
        start = end


def mask_of(blocks, dtype):
    """What is added to the scores of blocks: (N, 1, Q, K), 0 where a query sees a key, -inf elsewhere."""
    firsts = torch.from_numpy(np.stack(blocks.firsts))[:, None, :, None]
    queries = torch.arange(blocks.length)[:, None]
    keys = torch.arange(-blocks.before, blocks.length)
    is_visible = (keys <= queries) & (keys >= firsts)
    return torch.where(is_visible, 0.0, -torch.inf).to(dtype)


# --- views of blocks ----------------------------------------------------------------------------------------

def in_one_line(x):
    """x (B, heads, T, D) -> (B * T, heads, D), a view unless x is in an unusual layout."""
    x = x.transpose(1, 2).flatten(0, 1)
    return x if x.stride(-1) == 1 else x.contiguous()


def queries_of(line, blocks):
    """(B * T, H, ...) -> a view (N, H, Q, ...)."""
    end = blocks.start + blocks.count * blocks.length
    return line[blocks.start:end].unflatten(0, (blocks.count, blocks.length)).transpose(1, 2)


def keys_of(line, blocks, offset, size):
    """Each block's keys from `offset` to `offset + size`: (B * T, G, D) -> a view (N, G, size, D)."""
    start = blocks.start - blocks.before + offset
    end = start + (blocks.count - 1) * blocks.length + size
    return line[start:end].unfold(0, size, blocks.length).mT


def put_key_gradients(line, grads, blocks):
    """Put gradients of the keys of each block, (N, H, K, D), into line (B * T, G, D).

    The block at a key's own position comes first and sets its gradient. Later blocks add to it, `length` keys
    of each block at a time, since the keys of neighbouring blocks do not overlap in that many.
    """
    groups = line.size(1)
    if groups < grads.size(1):
        grads = grads.unflatten(1, (groups, -1)).sum(2)
    queries_of(line, blocks).copy_(grads[:, :, blocks.before:])
    for offset in range(0, blocks.before, blocks.length):
        size = min(blocks.length, blocks.before - offset)
        keys_of(line, blocks, offset, size).add_(grads[:, :, offset:offset + size])


def inputs_of(q, k, v, blocks, dtype):
    """Arguments of a call on lines q, k, v: (N, H, Q, D), twice (N, H, K, D), and those with names."""
    q = queries_of(q, blocks).to(dtype)
    k, v = (keys_of(x, blocks, 0, blocks.keys).to(dtype) for x in (k, v))
    shape = -1, -1, q.size(1) // k.size(1), -1, -1
    k, v = (x[:, :, None].expand(shape).flatten(1, 2) for x in (k, v))
    mask = mask_of(blocks, dtype) if blocks.firsts else None
    return (q, k, v), dict(dropout_p=0.0, is_causal=mask is None, attn_mask=mask)


def dtype_of_sums(q):
    """The dtype of sums, in which flash attention computes.

    In bfloat16 its backward pass takes seven times as long on CPUs that do not multiply in bfloat16.
    """
    return torch.float64 if q.dtype == torch.float64 else torch.float32


# --- operations ---------------------------------------------------------------------------------------------

def empty_outputs(q):
    """y (B, T, H, D) and the logarithms of the softmax's denominators, (B, T, H)."""
    B, H, T, D = q.shape
    return q.new_empty(B, T, H, D), q.new_empty(B, T, H, dtype=dtype_of_sums(q))


@torch.library.impl('kilogpt::visible_attention', 'CPU')
def _(q, k, v, first):
    y, log_sums = empty_outputs(q)
    y_line, sums_line = y.flatten(0, 1), log_sums.flatten(0, 1)
    q, k, v = (in_one_line(x) for x in (q, k, v))
    for blocks in find_blocks(first):
        inputs, options = inputs_of(q, k, v, blocks, log_sums.dtype)
        block_y, block_sums = flash_attention(*inputs, **options)
        queries_of(y_line, blocks).copy_(block_y)
        queries_of(sums_line, blocks).copy_(block_sums)
    return y.transpose(1, 2), log_sums.transpose(1, 2)


@torch.library.impl('kilogpt::visible_attention_backward', 'CPU')
def _(grad_y, q, k, v, first, y, log_sums):
    dtype = dtype_of_sums(q)
    grads = [x.new_empty(x.transpose(1, 2).shape, dtype=dtype) for x in (q, k, v)]
    grad_q, grad_k, grad_v = (grad.flatten(0, 1) for grad in grads)
    grad_y, q, k, v, y = (in_one_line(x) for x in (grad_y, q, k, v, y))
    log_sums = log_sums.transpose(1, 2).flatten(0, 1)
    for blocks in find_blocks(first):
        inputs, options = inputs_of(q, k, v, blocks, dtype)
        block_grad_y, block_y = (queries_of(x, blocks).to(dtype) for x in (grad_y, y))
        block_grads = flash_attention_backward(block_grad_y, *inputs, block_y, queries_of(log_sums, blocks),
                                               **options)
        queries_of(grad_q, blocks).copy_(block_grads[0])
        put_key_gradients(grad_k, block_grads[1], blocks)
        put_key_gradients(grad_v, block_grads[2], blocks)
    return tuple(grad.to(q.dtype).transpose(1, 2) for grad in grads)


@torch.library.register_fake('kilogpt::visible_attention')
def _(q, k, v, first):
    return tuple(x.transpose(1, 2) for x in empty_outputs(q))


@torch.library.register_fake('kilogpt::visible_attention_backward')
def _(grad_y, q, k, v, first, y, log_sums):
    return tuple(x.new_empty(x.transpose(1, 2).shape).transpose(1, 2) for x in (q, k, v))
