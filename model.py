"""The GPT, all of it. Knows nothing of devices, processes, files or config keys.

The defaults are GPT-2 (Radford et al. 2019) to the letter, under its own parameter names; the modern blocks
(RoPE, RMSNorm, ReLU², SwiGLU, grouped-query heads, QK-norm, untied head, logit softcap) are options of the
same few classes, and so is a mixture of experts. Where a layout or a device needs another form of a part,
`kilogpt/parallel/apply.py` replaces it.

Shapes in comments: B batch, T positions, C n_embd, H heads, G key/value heads, D head width, V vocabulary
rows, S positions that a query may see; in experts N tokens (B * T), E experts, K experts that a token goes
to, M = N * K.
"""
import hashlib
import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn as nn
from torch.nn import functional as F


@dataclass
class GPTConfig:
    block_size: int = 1024
    vocab_size: int = 50257    # tokens that exist; the table has padded_vocab_size rows
    n_layer: int = 12
    n_head: int = 12
    n_kv_head: int = 0         # key/value heads (grouped-query attention); 0 = n_head
    n_embd: int = 768
    head_width: int = 0        # the width of a head; 0 = n_embd / n_head
    dropout: float = 0.0
    bias: bool = True          # biases in linears and LayerNorms, as GPT-2 has them
    pos: str = 'learned'       # 'learned' or 'rope'
    norm: str = 'layernorm'    # 'layernorm' or 'rmsnorm'
    mlp: str = 'gelu'          # 'gelu', 'gelu_tanh' (GPT-2's own weights), 'relu2', 'swiglu' or 'moe'
    qk_norm: bool = False      # RMSNorm on queries and keys, per head
    tie_weights: bool = True   # the output head is the token embedding
    softcap: float = 0.0       # tanh cap on the logits; 0 = none
    zero_init: bool = False    # each block starts as the identity: projections into the residual stream are 0
    # For mlp='moe', a mixture of experts.
    n_experts: int = 8
    n_active_experts: int = 2  # experts that a token goes to
    n_shared_experts: int = 0  # experts that every token goes to as well
    expert_hidden: int = 0     # the width of an expert; 0 = that of a dense MLP
    expert_mlp: str = 'swiglu'  # the form of an expert, and of the MLP in blocks without experts
    moe_first_layer: int = 0   # the first block with experts
    moe_every: int = 1         # each of that many blocks has experts, from moe_first_layer on
    router: str = 'softmax'    # 'softmax' (Mixtral) or 'sigmoid' (DeepSeek-V3)
    router_balance: str = 'bias'  # 'bias', 'loss' or 'none': what keeps the experts equally busy
    router_balance_rate: float = 1e-3  # step of the bias in an iteration, or weight of the loss
    router_z_loss: float = 0.0  # weight of the squared log of the router's softmax denominator
    # Weights that were trained elsewhere may need these; train.py has no keys for them.
    rope_theta: float = 10000.0
    norm_eps: float = 1e-5
    n_hidden: int = 0          # a dense MLP's width; 0 = 4 * n_embd (SwiGLU: 8/3 * n_embd, up to the next 64)

    def __post_init__(self):
        choices = dict(pos=('learned', 'rope'), norm=('layernorm', 'rmsnorm'),
                       mlp=('gelu', 'gelu_tanh', 'relu2', 'swiglu', 'moe'),
                       expert_mlp=('gelu', 'gelu_tanh', 'relu2', 'swiglu'), router=('softmax', 'sigmoid'),
                       router_balance=('bias', 'loss', 'none'))
        for key, allowed in choices.items():
            if getattr(self, key) not in allowed:
                raise ValueError(f'{key} is {getattr(self, key)!r}: choose one of {", ".join(allowed)}')
        for key in ('block_size', 'vocab_size', 'n_layer', 'n_head', 'n_embd'):
            if getattr(self, key) < 1:
                raise ValueError(f'{key} is {getattr(self, key)}: it must be at least 1')
        if not self.head_width and self.n_embd % self.n_head:
            raise ValueError(f'n_embd={self.n_embd} is not divisible by n_head={self.n_head}: '
                             f'n_embd={-(-self.n_embd // self.n_head) * self.n_head} would do')
        self.n_kv_head = self.n_kv_head or self.n_head
        if self.n_kv_head < 0 or self.n_head % self.n_kv_head:
            raise ValueError(f'n_kv_head={self.n_kv_head} does not divide n_head={self.n_head}: '
                             'set n_kv_head to a divisor of n_head')
        self.head_width = self.head_width or self.n_embd // self.n_head
        if self.pos == 'rope' and self.head_width % 2:
            raise ValueError(f'pos=rope rotates pairs, but a head is {self.head_width} wide: '
                             'choose n_embd and n_head so that n_embd / n_head is even')
        if not 0 <= self.dropout < 1:
            raise ValueError(f'dropout is {self.dropout}: it must be in [0, 1)')
        if self.softcap < 0:
            raise ValueError(f'softcap is {self.softcap}: it must be positive, or 0 for none')
        if not self.n_hidden:
            self.n_hidden = 4 * self.n_embd
            if self.mlp_form == 'swiglu':  # three matrices of 8/3 are as large as two of 4 (Shazeer 2020)
                self.n_hidden = -(-8 * self.n_embd // 3 // 64) * 64
        if self.mlp == 'moe':
            self._check_experts()

    def _check_experts(self):
        for key in ('n_experts', 'n_active_experts', 'moe_every'):
            if getattr(self, key) < 1:
                raise ValueError(f'{key} is {getattr(self, key)}: it must be at least 1')
        for key in ('n_shared_experts', 'expert_hidden', 'moe_first_layer', 'router_balance_rate',
                    'router_z_loss'):
            if getattr(self, key) < 0:
                raise ValueError(f'{key} is {getattr(self, key)}: it cannot be negative')
        if self.n_active_experts > self.n_experts:
            raise ValueError(f'n_active_experts={self.n_active_experts} is more than n_experts='
                             f'{self.n_experts}: set n_active_experts to {self.n_experts} or less')
        if self.moe_first_layer >= self.n_layer:
            raise ValueError(f'moe_first_layer={self.moe_first_layer} is beyond the last block of '
                             f'n_layer={self.n_layer}: set moe_first_layer to {self.n_layer - 1} or less')
        self.expert_hidden = self.expert_hidden or self.n_hidden

    @property
    def mlp_form(self):
        """What a dense MLP, and an expert, computes: 'gelu', 'gelu_tanh', 'relu2' or 'swiglu'."""
        return self.expert_mlp if self.mlp == 'moe' else self.mlp

    def has_experts(self, layer):
        """Whether block number `layer` has experts in the place of a dense MLP."""
        after_first = layer - self.moe_first_layer
        return self.mlp == 'moe' and after_first >= 0 and after_first % self.moe_every == 0

    @property
    def padded_vocab_size(self):
        """Rows of the embedding: a multiple of 64, for fast matrix products and for tensor parallelism."""
        return -(-self.vocab_size // 64) * 64


def build_norm(width, config):
    if config.norm == 'layernorm':
        return nn.LayerNorm(width, eps=config.norm_eps, bias=config.bias)
    return nn.RMSNorm(width, eps=config.norm_eps)


def build_embedding(rows, width):
    # nn.Embedding(rows, width) would draw values; on the meta device, that imports torch.compile's machinery.
    return nn.Embedding.from_pretrained(torch.empty(rows, width), freeze=False)


def rotate(x, cos, sin):
    """Rotate pairs (i, i + D/2) of x (B, T, H, D), float32, by cos, sin (T, 1, D/2) (RoPE, Su et al. 2021)."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def cast_for_linears(x):
    """x in autocast's dtype. Without this, each of the linears that read x would cast it again."""
    if not torch.is_autocast_enabled(x.device.type):
        return x
    return x.to(torch.get_autocast_dtype(x.device.type))


class DotProductAttention(nn.Module):
    """softmax(q kᵀ / √D) v, causal. A module without parameters, so that a layout can replace or wrap it."""

    def __init__(self, dropout):
        super().__init__()
        self.dropout = dropout

    def forward(self, q, k, v, mask=None):
        """q (B, H, T, D), k, v (B, G, S, D) -> (B, H, T, D). mask (T, S); None means causal, with T = S."""
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=k.size(1) != q.size(1),
            dropout_p=self.dropout if self.training else 0.0)


class Attention(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.head_width = config.head_width
        width = config.n_head * config.head_width
        kv_width = config.n_kv_head * config.head_width
        self.c_q = nn.Linear(config.n_embd, width, bias=config.bias)
        self.c_k = nn.Linear(config.n_embd, kv_width, bias=config.bias)
        self.c_v = nn.Linear(config.n_embd, kv_width, bias=config.bias)
        self.c_proj = nn.Linear(width, config.n_embd, bias=config.bias)
        self.q_norm = nn.RMSNorm(config.head_width, eps=config.norm_eps) if config.qk_norm else nn.Identity()
        self.k_norm = nn.RMSNorm(config.head_width, eps=config.norm_eps) if config.qk_norm else nn.Identity()
        self.dot_product = DotProductAttention(config.dropout)
        self.resid_dropout = nn.Dropout(config.dropout)

    def forward(self, x, rope=None, cache=None):
        """x (B, T, C) -> (B, T, C). rope: what `GPT.rope` returns. cache: the CacheView of this layer."""
        B, T, _ = x.shape
        x = cast_for_linears(x)
        q = self.c_q(x).view(B, T, -1, self.head_width)  # (B, T, H, D)
        k = self.c_k(x).view(B, T, -1, self.head_width)  # (B, T, G, D)
        v = self.c_v(x).view(B, T, -1, self.head_width)  # (B, T, G, D)
        if rope is None:
            q, k = self.q_norm(q), self.k_norm(k)
        else:  # norms and rotation in float32
            q = rotate(self.q_norm(q.float()), *rope).type_as(v)
            k = rotate(self.k_norm(k.float()), *rope).type_as(v)
        q, k, v = (part.transpose(1, 2) for part in (q, k, v))  # (B, H, T, D) and (B, G, T, D)
        mask = None
        if cache is not None:
            mask = cache.mask  # (T, S)
            k, v = cache.extend(k, v)  # (B, G, S, D)
        y = self.dot_product(q, k, v, mask=mask)  # (B, H, T, D)
        y = y.transpose(1, 2).reshape(B, T, -1)  # (B, T, H * D)
        return self.resid_dropout(self.c_proj(y))


def activate(form, h, gate):
    """The activation of an MLP of that form. h: what c_fc gives; gate: what c_gate gives, or None.

    A device with a faster form replaces this function in the MLPs.
    """
    if form == 'swiglu':  # Shazeer 2020
        return F.silu(gate) * h
    if form == 'relu2':  # Primer (So et al. 2021)
        return F.relu(h).square()
    return F.gelu(h, approximate='tanh' if form == 'gelu_tanh' else 'none')


class MLP(nn.Module):
    def __init__(self, config, n_hidden):
        super().__init__()
        self.form = config.mlp_form
        self.c_fc = nn.Linear(config.n_embd, n_hidden, bias=config.bias)
        if self.form == 'swiglu':
            self.c_gate = nn.Linear(config.n_embd, n_hidden, bias=config.bias)
        self.c_proj = nn.Linear(n_hidden, config.n_embd, bias=config.bias)
        self.dropout = nn.Dropout(config.dropout)
        self.activate = activate

    def forward(self, x):
        x = cast_for_linears(x)
        gate = self.c_gate(x) if self.form == 'swiglu' else None
        return self.dropout(self.c_proj(self.activate(self.form, self.c_fc(x), gate)))


class Block(nn.Module):
    def __init__(self, config, layer):
        super().__init__()
        self.ln_1 = build_norm(config.n_embd, config)
        self.attn = Attention(config)
        self.ln_2 = build_norm(config.n_embd, config)
        self.has_experts = config.has_experts(layer)
        self.mlp = MixtureOfExperts(config) if self.has_experts else MLP(config, config.n_hidden)

    def forward(self, x, rope=None, cache=None, is_counted=None):
        """x (B, T, C) -> (B, T, C). rope, cache: as in Attention. is_counted: as in Router."""
        x = x + self.attn(self.ln_1(x), rope, cache)
        if self.has_experts:
            return x + self.mlp(self.ln_2(x), is_counted)
        return x + self.mlp(self.ln_2(x))


# --- experts ------------------------------------------------------------------------------------------------

class MixtureOfExperts(nn.Module):
    """Each token goes to K of E experts (Shazeer et al. 2017), and to shared ones (Dai et al. 2024).

    No expert has a limit of tokens, so that none is dropped. Experts have no biases.
    """

    def __init__(self, config):
        super().__init__()
        self.routed = RoutedExperts(config)
        self.shared = None
        if config.n_shared_experts:  # side by side, they are one wide MLP
            self.shared = MLP(config, config.n_shared_experts * config.expert_hidden)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x, is_counted=None):
        """x (B, T, C) -> (B, T, C). is_counted: as in Router."""
        x = cast_for_linears(x)
        y, shared = self.routed(x, is_counted, meanwhile=lambda: self.shared(x) if self.shared else 0)
        return self.dropout(y) + shared


class RoutedExperts(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.router = Router(config)
        self.experts = Experts(config)
        self.send = send_nowhere

    def forward(self, x, is_counted, meanwhile):
        """x (B, T, C) -> what its experts make of x (B, T, C), and the result of the function `meanwhile`.

        `meanwhile` is called while tokens travel, where the experts are on several processes.
        """
        tokens = x.flatten(0, 1)  # (N, C)
        chosen, weights = self.router(tokens, is_counted)  # (N, K)
        # Rows are sorted by expert, and among those of an expert by token: the order of all sums is fixed.
        experts, order = chosen.flatten().sort(stable=True)  # (M,)
        places = order.scatter(0, order, torch.arange(len(order), device=x.device))  # of row m in that order
        ends = torch.searchsorted(experts, torch.arange(self.router.n_experts, device=x.device), right=True)
        rows = TakeRows.apply(tokens, order, places, chosen.size(1))  # (M, C)
        rows, ends, send_back = self.send(rows, ends)
        result = meanwhile()
        y = send_back(self.experts(rows, ends))  # (M, C)
        weights = Permute.apply(weights.flatten(), order, places)  # (M,)
        y = SumRows.apply(y * weights[:, None].type_as(y), order, places, chosen.size(1))  # (N, C)
        return y.view_as(x), result


def send_nowhere(rows, ends):
    """Rows (M, C) to their experts, and a function that sends the experts' results back.

    All experts are here. A layout with experts on several processes replaces this function.
    """
    return rows, ends, lambda rows: rows


class Router(nn.Module):
    """Which experts each token goes to, and how much each counts. Computes in float32.

    'softmax': the K likeliest experts, and their probabilities divided by their sum (Mixtral, Jiang et al.
    2024). 'sigmoid': an affinity for each expert on its own, and likewise (DeepSeek-V3, 2024, 2.1.2). With
    K = 1 the affinity itself counts (Switch, Fedus et al. 2021), since divided by itself it has no gradient.

    Experts are kept equally busy by a bias, which counts in the choice alone and moves by a fixed step
    towards the experts with fewer tokens (Wang et al. 2024), or by Switch's loss. Both go by the tokens of
    the whole batch: the bias moves after each update, and the loss takes the shares of the batch before,
    since those of the present batch are known only after its last token.
    """

    def __init__(self, config):
        super().__init__()
        self.n_experts, self.n_active = config.n_experts, config.n_active_experts
        self.kind, self.balance, self.rate = config.router, config.router_balance, config.router_balance_rate
        self.z_loss = config.router_z_loss
        self.weight = nn.Parameter(torch.empty(config.n_experts, config.n_embd))
        # These two are not trained, but part of the model's state.
        if self.balance == 'bias':
            self.bias = nn.Parameter(torch.empty(config.n_experts), requires_grad=False)
        elif self.balance == 'loss':
            self.load = nn.Parameter(torch.empty(config.n_experts), requires_grad=False)  # shares of tokens
        self.loss_scale = 1.0  # what the model's loss is multiplied by before the backward pass
        self.n_tokens = None  # (E,): tokens that went to each expert since the last `rebalance`

    def forward(self, x, is_counted=None):
        """x (N, C) -> experts (N, K), the first of which counts most, and their weights (N, K), float32.

        is_counted (N,): whether a token counts in the balance, as padding does not; None: no token does.
        """
        with torch.autocast(x.device.type, enabled=False):
            precision = torch.promote_types(x.dtype, torch.float32)
            logits = F.linear(x.to(precision), self.matrix().to(precision))  # (N, E)
            affinities = logits.softmax(dim=-1) if self.kind == 'softmax' else logits.sigmoid()
            ranking = affinities.detach()
            if self.balance == 'bias':
                ranking = ranking + self.bias
            chosen = self.choose(ranking)
            weights = affinities.gather(-1, chosen)
            if self.n_active > 1:
                weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)
            if is_counted is None or not self.training:
                return chosen, weights
            self._count(chosen, is_counted)
            losses = self._losses(logits, affinities, is_counted)
            return chosen, AddLoss.apply(weights, losses, self.loss_scale)

    def choose(self, ranking):
        """The experts (N, K) that rank highest of (N, E), the highest first, and of equal ones the first."""
        # `topk` does not promise an order of equals.
        indices = ranking.sort(dim=-1, descending=True, stable=True).indices
        return indices[:, :self.n_active].contiguous()  # a view would keep those of all experts

    def matrix(self):
        """The weight (E, C). A layout that splits the model replaces this function."""
        return self.weight

    @torch.no_grad()
    def _count(self, chosen, is_counted):
        # A checkpointed block counts twice. The balance goes by shares, which does not show.
        goes_there = chosen[..., None] == torch.arange(self.n_experts, device=chosen.device)
        n_tokens = (goes_there.any(dim=1) & is_counted[:, None]).sum(dim=0)
        self.n_tokens = n_tokens if self.n_tokens is None else self.n_tokens + n_tokens

    def _losses(self, logits, affinities, is_counted):
        """The sum of the tokens' balance losses and z-losses."""
        total = logits.new_zeros(())
        if self.balance == 'loss':  # Switch, equations 4 to 6; its f is the load
            probabilities = affinities / affinities.sum(dim=-1, keepdim=True)
            total = total + self.rate * self.n_experts * (probabilities @ self.load * is_counted).sum()
        if self.z_loss:  # ST-MoE (Zoph et al. 2022), equation 5
            total = total + self.z_loss * (logits.logsumexp(dim=-1).square() * is_counted).sum()
        return total

    @torch.no_grad()
    def rebalance(self, n_tokens, is_applied):
        """Go by the tokens (E,) of the batch, float32. is_applied: 1, or 0 where the update was left out."""
        if self.balance == 'bias':
            self.bias += is_applied * self.rate * (n_tokens.mean() - n_tokens).sign()
        elif self.balance == 'loss':
            shares = n_tokens / n_tokens.sum().clamp(min=1)
            self.load.lerp_(shares.type_as(self.load), is_applied.type_as(self.load))


class Experts(nn.Module):
    """E MLPs without biases, of one form. Matrix number e of each parameter is that of expert e."""

    def __init__(self, config):
        super().__init__()
        self.form = config.mlp_form
        E, C, width = config.n_experts, config.n_embd, config.expert_hidden
        self.c_fc = nn.Parameter(torch.empty(E, width, C))
        if self.form == 'swiglu':
            self.c_gate = nn.Parameter(torch.empty(E, width, C))
        self.c_proj = nn.Parameter(torch.empty(E, C, width))
        self.products = loop_over_experts

    def forward(self, x, ends):
        """x (M, C), the rows of expert 0 first; ends (E,): the row at which each expert's end -> (M, C)."""
        product = self.products(ends)
        c_fc, c_proj, *c_gate = map(cast_for_linears, self.matrices())
        gate = product(x, c_gate[0]) if c_gate else None
        return product(activate(self.form, product(x, c_fc), gate), c_proj)

    def matrices(self):
        """c_fc, c_proj and, with SwiGLU, c_gate. A layout that splits them replaces this function."""
        return [self.c_fc, self.c_proj] + ([self.c_gate] if self.form == 'swiglu' else [])


def loop_over_experts(ends):
    """A function that multiplies rows by their experts' matrices: x (M, in), (E, out, in) -> (M, out).

    ends (E,): as in Experts. A device with a kernel for all products at once replaces this function.
    """
    sizes = ends.diff(prepend=ends.new_zeros(1)).tolist()
    return lambda x, matrices: torch.cat([F.linear(*each) for each in zip(x.split(sizes), matrices.unbind())])


class AddLoss(torch.autograd.Function):
    """x as it is. In the backward pass the gradient of scale · loss joins in, as if it were part of the sum.

    The model's loss stays the cross-entropy, and the blocks of a pipeline need not hand a second loss on.
    """

    @staticmethod
    def forward(ctx, x, loss, scale):
        ctx.scale = scale
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return grad, torch.as_tensor(ctx.scale, dtype=grad.dtype, device=grad.device), None


class TakeRows(torch.autograd.Function):
    """Rows of x (N, C), each K times, in an order (M,) -> (M, C). Gradients add up in a fixed order.

    places (M,): where in that order each row is.
    """

    @staticmethod
    def forward(ctx, x, order, places, K):
        ctx.save_for_backward(order, places)
        ctx.K = K
        return x.index_select(0, order // K)

    @staticmethod
    def backward(ctx, grad):
        return SumRows.apply(grad, *ctx.saved_tensors, ctx.K), None, None, None


class SumRows(torch.autograd.Function):
    """The reverse of TakeRows: the sum of each token's K rows of x (M, C) -> (N, C)."""

    @staticmethod
    def forward(ctx, x, order, places, K):
        ctx.save_for_backward(order, places)
        ctx.K = K
        return x.index_select(0, places).unflatten(0, (-1, K)).sum(dim=1)

    @staticmethod
    def backward(ctx, grad):
        return TakeRows.apply(grad, *ctx.saved_tensors, ctx.K), None, None, None


class Permute(torch.autograd.Function):
    """The elements of x in an order that `inverse` undoes. Indexing would add up gradients, in any order."""

    @staticmethod
    def forward(ctx, x, order, inverse):
        ctx.save_for_backward(inverse)
        return x[order]

    @staticmethod
    def backward(ctx, grad):
        inverse, = ctx.saved_tensors
        return grad[inverse], None, None


# --- the whole model ----------------------------------------------------------------------------------------

class GPT(nn.Module):
    # How the model may be split, which kilogpt/parallel/apply.py carries out. Names are paths in the model or in a block.
    split_plan = dict(
        # A pipeline cuts between blocks; the first stage has what comes before, the last what comes after.
        before_blocks=('transformer.wte', 'transformer.wpe', 'transformer.drop'),
        blocks='transformer.h',
        after_blocks=('transformer.ln_f', 'lm_head'),
        colwise=('attn.c_q', 'attn.c_k', 'attn.c_v', 'mlp.c_fc', 'mlp.c_gate',
                 'mlp.shared.c_fc', 'mlp.shared.c_gate'),  # output features over ranks
        rowwise=('attn.c_proj', 'mlp.c_proj', 'mlp.shared.c_proj'),  # input features over ranks, then a sum
        experts='mlp.routed',                          # whole experts over ranks (ep), or each expert (tp)
        # Where a block has experts, selective activation checkpointing goes around these.
        checkpointed=('attn', 'mlp.shared', 'mlp.routed.experts'),
        # Norms before linears: each rank has its part of the sequence, and the linears read all parts.
        sequence=('ln_1', 'ln_2', 'transformer.ln_f'),
        positions=('transformer.wpe',),                # each rank has the positions of its part
        # Norms of what is split and stays so: the heads here, or positions, as behind attention or an MLP.
        local=('attn.q_norm', 'attn.k_norm'),
        embedding=('transformer.wte',),                # vocabulary rows over ranks
        head=('lm_head',),                             # vocabulary rows over ranks
        attention=('attn.dot_product',),               # needs the whole sequence, of any heads
    )

    def __init__(self, config, seed=1337):
        """Built on torch's default device. seed: of the weights; None leaves them to be filled later."""
        super().__init__()
        self.config = config
        with torch.device('meta'):  # shapes only: no time is spent on values that are replaced
            self.transformer = nn.ModuleDict(dict(
                wte=build_embedding(config.padded_vocab_size, config.n_embd),
                drop=nn.Dropout(config.dropout),
                # A ModuleDict: blocks keep their names in a pipeline stage, which has only some of them.
                h=nn.ModuleDict({str(i): Block(config, i) for i in range(config.n_layer)}),
                ln_f=build_norm(config.n_embd, config),
            ))
            if config.pos == 'learned':
                self.transformer['wpe'] = build_embedding(config.block_size, config.n_embd)
            self.lm_head = nn.Linear(config.n_embd, config.padded_vocab_size, bias=False)
        self.to_empty(device=torch.get_default_device())
        self.loss = Loss(config)
        self.tied = {'lm_head.weight': 'transformer.wte.weight'} if config.tie_weights else {}
        self.first_position = 0  # the start of this rank's part of each sequence (context parallelism)
        self.tie()
        if seed is not None:
            with torch.no_grad():
                for name, parameter in self.named_parameters():
                    parameter.copy_(self.initial_value(name, parameter.shape, seed))

    def tie(self):
        """Make the head share the embedding's weight, where both are here and the config says so."""
        if self.tied and self.transformer.wte is not None and self.lm_head is not None:
            self.lm_head.weight = self.transformer.wte.weight

    def initial_value(self, name, shape, seed, rows=slice(None)):
        """The `rows` of what parameter `name` of this shape starts from, as in GPT-2: float32, on the CPU.

        Values come in blocks of rows, each from a generator seeded by (seed, name, block): a process draws
        the blocks that its rows lie in, and every layout starts from the same values.
        """
        start, stop, _ = rows.indices(shape[0])
        if len(shape) == 1:  # norms start at 1, biases at 0
            return torch.full((stop - start,), float(name.endswith('weight')))
        std = 0.02
        if 'c_proj' in name:  # scaled by residual layers (Radford et al. 2019, 2.3)
            std = 0.0 if self.config.zero_init else std / math.sqrt(2 * self.config.n_layer)
        size = max(1, 2 ** 16 // math.prod(shape[1:]))  # rows; starting a generator takes 7% of a block
        first, last = start // size * size, min(-(-stop // size) * size, shape[0])  # of whole blocks
        value = torch.empty(last - first, *shape[1:], device='cpu')
        for number, block in enumerate(value.split(size), first // size):
            digest = hashlib.blake2b(f'{seed} {name} {number}'.encode(), digest_size=8).digest()
            generator = torch.Generator().manual_seed(int.from_bytes(digest, 'little') >> 1)
            block.normal_(0.0, std, generator=generator)
        return value[start - first:stop - first]

    def forward(self, idx, targets=None, cache=None):
        """idx (B, T) token ids -> logits (B, T, vocab_size).

        With targets (B, T; -1 is left out): the cross-entropy in nats, summed over the valid targets. The
        caller divides by their number in the global batch, which only the caller knows.
        With a cache (new_cache), idx continues the text in the cache, and the logits are those of the last
        position alone, (B, 1, vocab_size).
        A pipeline stage lacks some parts. Without the embedding, idx is x (B, T, C) from the stage before;
        without the head, the result is x.
        """
        # Sequence parallelism divides x between pipeline stages, but never the targets.
        T = idx.size(1) if targets is None else targets.size(1)
        if cache is None:
            check_length(self.first_position + T, self.config)
            positions = self.first_position + torch.arange(T, device=idx.device)
            views = {name: None for name in self.transformer.h}
        else:
            views = cache.next_views(T, self.config)
            positions = views['0'].positions
        x = idx
        if self.transformer.wte is not None:
            x = self.transformer.wte(idx)  # (B, T, C)
            if self.config.pos == 'learned':
                x = x + self.transformer.wpe(positions)
            x = self.transformer.drop(x)
        rope = self.rope(positions) if self.config.pos == 'rope' else None
        is_counted = None if targets is None else targets.flatten() >= 0
        for name, block in self.transformer.h.items():
            x = block(x, rope, views[name], is_counted)
        if cache is not None:
            cache.length += T
            x = x[:, -1:]
        if self.lm_head is None:
            return x
        x = self.transformer.ln_f(x)
        if targets is not None:
            return self.loss(x, self.lm_head, targets)
        return cap(self.lm_head(x), self.config)[..., :self.config.vocab_size]

    def rope(self, positions):
        """Cosines and sines (T, 1, D/2) of the rotary angles at positions (T,), for `rotate`."""
        D = self.config.head_width
        frequency = self.config.rope_theta ** (-torch.arange(0, D, 2, device=positions.device) / D)
        angle = positions[:, None, None] * frequency
        return angle.cos(), angle.sin()

    def new_cache(self, batch_size):
        """An empty Cache for `forward`, of batch_size rows."""
        shape = batch_size, self.config.n_kv_head, self.config.block_size, self.config.head_width
        return Cache(self.config.n_layer, shape, self.transformer.wte.weight)

    def num_params(self):
        """Parameters, a tied head counted once."""
        return sum(p.numel() for p in self.parameters())

    def describe_size(self):
        """The number of parameters, in words."""
        n_parameters, n_active = self.num_params(), self.num_active_params()
        of_a_token = f' ({n_active:,} active in a token)' if n_active < n_parameters else ''
        return f'{n_parameters:,} parameters{of_a_token}'

    def num_active_params(self):
        """Parameters that take part in the computation of a token: of the experts, those that it goes to."""
        config, total = self.config, self.num_params()
        for module in self.modules():
            if isinstance(module, Experts):
                size = sum(p.numel() for p in module.parameters())
                total -= size // config.n_experts * (config.n_experts - config.n_active_experts)
        return total

    def flops_per_token(self, T):
        """Floating-point operations per token, forward and backward, in sequences of T tokens.

        Each matrix element takes one multiply and one add forward and twice that backward: 6. Attention adds,
        per layer, two products with T × H D elements, 6 each, halved because a causal token sees half of the
        sequence on average. PaLM (Chowdhery et al. 2022, appendix B) and nanoGPT do not halve, and so report
        a somewhat higher MFU.
        """
        matrices = sum(m.weight.numel() for m in self.modules() if isinstance(m, (nn.Linear, Router)))
        matrices -= self.num_params() - self.num_active_params()
        matrices += sum(p.numel() for m in self.modules() if isinstance(m, Experts) for p in m.parameters())
        return 6 * matrices + 6 * self.config.n_layer * T * self.config.n_head * self.config.head_width

    @torch.no_grad()
    def generate_tokens(self, idx, max_new_tokens, temperature=1.0, top_k=None, top_p=None, stop_token=None,
                        generator=None, cache=None):
        """Continue idx (B, T): yield the next token of each row (B,), up to max_new_tokens times.

        temperature 0 takes the likeliest token; top_k keeps the k likeliest; top_p the fewest that reach that
        probability (nucleus sampling, Holtzman et al. 2020). A row that has drawn stop_token repeats it, and
        the last row to do so ends the text. Past block_size the model sees the last block_size tokens, read
        again for each token, since their positions shift.
        cache: from new_cache; its content is replaced. An idx (1, T) is read once and continued in every row.
        """
        block_size = self.config.block_size
        cache = cache or self.new_cache(idx.size(0))
        rows = cache.layers[0][0].size(0)
        stopped = torch.zeros(rows, dtype=torch.bool, device=idx.device)
        window, token, filled = idx[:, -block_size:], None, 0
        for _ in range(max_new_tokens):
            if token is None or filled == block_size:
                cache.length.zero_()
                logits = self.forward(window, cache=cache)
                filled = window.size(1)
            else:  # called as a module: compile() compiles this step, which always has the same shape
                logits = self(token[:, None], cache=cache)
                filled += 1
            logits = logits[:, -1].float().expand(rows, -1)
            token = draw_token(logits, temperature, top_k, top_p, generator)
            if stop_token is not None:
                token = token.masked_fill(stopped, stop_token)
                stopped |= token == stop_token
            yield token
            if stop_token is not None and stopped.all():
                return
            window = torch.cat((window.expand(rows, -1), token[:, None]), dim=1)[:, -block_size:]

    def generate(self, idx, max_new_tokens, **sampling):
        """idx (B, T) with up to max_new_tokens tokens appended; the arguments of generate_tokens."""
        tokens = [token[:, None] for token in self.generate_tokens(idx, max_new_tokens, **sampling)]
        return torch.cat((idx, *tokens), dim=1)


def check_length(length, config):
    if length > config.block_size:
        raise ValueError(f'{length} positions, but block_size is {config.block_size}')


def cap(logits, config):
    """Logits within ±softcap by a tanh, where the config has one."""
    return config.softcap * torch.tanh(logits.float() / config.softcap) if config.softcap else logits


# --- the loss -----------------------------------------------------------------------------------------------

MAX_LOGITS = 2 ** 27  # elements of logits at a time: 0.5 GB in float32


class Loss(nn.Module):
    """The cross-entropy in nats, summed over the valid targets, in float32.

    More than MAX_LOGITS logits are computed in parts. The loss is a module, without parameters, so that a
    layout can replace it where logits are sharded.
    """

    def __init__(self, config):
        super().__init__()
        self.config = config
        self.cross_entropy = cross_entropy

    def forward(self, x, head, targets):
        """x (B, T, C), head: the linear that gives logits, targets (B, T; -1 is left out)."""
        x, weight, targets = x.flatten(0, 1), head.weight, targets.flatten()
        size = self.part_size(x.size(0), weight.size(0))
        if size == x.size(0):
            return self.of_hidden(x, weight, targets)
        if torch.is_grad_enabled():
            return LossInParts.apply(x, weight, targets, self.of_hidden, size)
        parts = zip(x.split(size), targets.split(size))
        return sum(self.of_hidden(part, weight, part_targets) for part, part_targets in parts)

    def part_size(self, N, V):
        """How many of N rows of V logits to compute at a time: all, or a divisor of N if one is near.

        Parts of one size are compiled once. Where no divisor is near, the last part is smaller.
        """
        parts = max(1, -(-N * V // MAX_LOGITS))
        for number in range(parts, 2 * parts):
            if N % number == 0:
                return N // number
        return -(-N // parts)

    def of_hidden(self, x, weight, targets):
        """The loss of x (N, C) through the head's weight (V, C) for targets (N,)."""
        return self.of_logits(F.linear(x, weight), targets)

    def of_logits(self, logits, targets):
        """The loss of logits (N, V) for targets (N,). V counts rows of padding too, which are not tokens."""
        return self.cross_entropy(cap(logits, self.config), targets, self.config.vocab_size)


def cross_entropy(logits, targets, vocab_size):
    """The sum of the cross-entropies of logits (N, V) for targets (N; -1 is left out), in float32.

    Logits from vocab_size on count for nothing. A device with a faster form replaces this function in Loss.
    """
    logits = logits.float()
    if logits.size(-1) > vocab_size:
        is_padding = torch.arange(logits.size(-1), device=logits.device) >= vocab_size
        logits = logits.masked_fill(is_padding, -torch.inf)
    return F.cross_entropy(logits, targets, ignore_index=-1, reduction='sum')


class LossInParts(torch.autograd.Function):
    """A sum of losses over parts of `size` rows of x, whose gradients are computed in the forward pass.

    No logits are kept for the backward pass or computed a second time.
    """

    @staticmethod
    def forward(ctx, x, weight, targets, loss, size):
        total, grad_x, grad_weight = 0, [], torch.zeros_like(weight, dtype=torch.float32)
        head_weight = cast_for_linears(weight).detach().requires_grad_()  # once, rather than for each part
        for part, part_targets in zip(x.split(size), targets.split(size)):
            inputs = part.detach().requires_grad_(), head_weight
            with torch.enable_grad():
                part_loss = loss(*inputs, part_targets)
            part_grad_x, part_grad_weight = torch.autograd.grad(part_loss, inputs)
            grad_x.append(part_grad_x)
            grad_weight += part_grad_weight
            total = total + part_loss.detach()
        ctx.save_for_backward(torch.cat(grad_x), grad_weight.type_as(weight))
        return total

    @staticmethod
    def backward(ctx, grad):
        grad_x, grad_weight = ctx.saved_tensors
        return grad * grad_x, grad * grad_weight, None, None, None


# --- sampling -----------------------------------------------------------------------------------------------

def draw_token(logits, temperature, top_k, top_p, generator):
    """Draw a token (B,) from logits (B, V)."""
    if temperature == 0:
        return logits.argmax(dim=-1)
    use_nucleus = top_p and top_p < 1
    tokens = None
    if top_k or use_nucleus:  # sorted, the likeliest first; top_k makes the steps below much shorter
        logits, tokens = logits.topk(min(top_k or logits.size(-1), logits.size(-1)))
    probabilities = (logits / temperature).softmax(dim=-1)
    if use_nucleus:
        likelier = probabilities.cumsum(dim=-1) - probabilities
        probabilities = probabilities.masked_fill(likelier >= top_p, 0.0)  # the likeliest token always stays
    drawn = torch.multinomial(probabilities, 1, generator=generator)
    return (drawn if tokens is None else tokens.gather(-1, drawn))[:, 0]


class CacheView(NamedTuple):
    """One layer of a Cache in one step."""
    keys: torch.Tensor  # (rows, G, block_size, D)
    values: torch.Tensor  # (rows, G, block_size, D)
    positions: torch.Tensor  # (T,), those of the new tokens
    mask: torch.Tensor | None  # (T, S): which positions each new token sees; None where the cache was empty

    def extend(self, k, v):
        """Write new k and v (B, G, T, D); returns the keys and values to attend to (B, G, S, D)."""
        # A prompt of one row (B = 1) goes into every row of the cache.
        self.keys[:, :, self.positions] = k.type_as(self.keys)
        self.values[:, :, self.positions] = v.type_as(self.values)
        if self.mask is None:
            return k, v
        B, S = k.size(0), self.mask.size(1)
        return self.keys[:B, :, :S], self.values[:B, :, :S]


class Cache:
    """The keys and values that attention has seen, per layer two tensors (rows, G, block_size, D).

    The first `length` positions are filled. No tensor grows or moves, and length is a tensor too, so that the
    step of each token is the same work on the same memory: it is compiled once and makes one CUDA graph.
    """

    def __init__(self, n_layer, shape, like):
        # Zeros, since positions that a mask leaves out are still multiplied by 0 and must not hold a NaN.
        self.layers = [(like.new_zeros(shape), like.new_zeros(shape)) for _ in range(n_layer)]
        self.length = torch.zeros((), dtype=torch.long, device=like.device)

    def next_views(self, T, config):
        """{block's name: CacheView} for a step that adds T tokens."""
        positions = self.length + torch.arange(T, device=self.length.device)
        if torch.compiler.is_compiling():  # reads all positions, so that every step has one shape
            S = config.block_size
        else:
            S = int(self.length) + T
            check_length(S, config)
        mask = torch.arange(S, device=positions.device) <= positions[:, None] if S > T else None
        return {str(i): CacheView(keys, values, positions, mask)
                for i, (keys, values) in enumerate(self.layers)}
