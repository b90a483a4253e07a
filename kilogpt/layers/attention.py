"""What a query sees, attention with other scores than products, and the norm of queries and keys over all heads.

Imports precision.py alone. Shapes in comments: B batch, T queries, S keys, H heads, G key/value heads, D head width.
"""
import torch
from torch import nn
from torch.nn import functional as F

from kilogpt.layers.precision import at_least_float32


def first_seen(T, window, starts, device):
    """(B, T): the first position that each query sees, or None if it sees all before it, as without limits.

    A query sees the positions of its document up to its own, and of these at most the last `window`
    (Longformer, Beltagy et al. 2020, 3.1; Mistral 7B, Jiang et al. 2023, 2).
    starts (B, T): the position at which the document of each position begins; None = the sequence is one
        document. window: 0 = all positions.
    """
    if not 0 < window < T:
        return starts
    first = (torch.arange(T, device=device) - window + 1).clamp(min=0)[None]
    return first if starts is None else torch.maximum(first, starts)


def build_mask(first):
    """(B, 1, T, T): which keys each query sees, those from first[i] to its own. first (B, T)."""
    positions = torch.arange(first.size(1), device=first.device)
    return (positions >= first[:, None, :, None]) & (positions <= positions[:, None])


def starts_of(tokens, separator):
    """(B, T): the position at which the document of each of tokens (B, T) begins; None without a separator.

    A document begins with its separator, and the first one of a row at 0.
    """
    if separator is None:
        return None
    positions = torch.arange(tokens.size(1), device=tokens.device)
    return torch.where(tokens == separator, positions, 0).cummax(dim=1).values


class ScoredAttention(nn.Module):
    """Causal attention whose scores have a tanh cap (Gemma 2, 2024, 2), or which has sinks, or both."""

    def __init__(self, dropout, softcap):
        super().__init__()
        self.dropout, self.softcap = dropout, softcap
        self.first_head = 0  # as in DotProductAttention

    def forward(self, q, k, v, mask=None, sinks=None):
        """The same as DotProductAttention: q (B, H, T, D), k and v (B, G, S, D) -> (B, H, T, D).

        sinks: as Sinks gives them.
        """
        k, v = (x.repeat_interleave(q.size(1) // x.size(1), dim=1) for x in (k, v))
        if mask is None:
            mask = torch.ones(q.size(2), k.size(2), dtype=torch.bool, device=q.device).tril()
        scores = at_least_float32(q @ k.mT) * q.size(-1) ** -0.5  # (B, H, T, S)
        if self.softcap:
            scores = self.softcap * torch.tanh(scores / self.softcap)
        scores = scores.masked_fill(~mask, -torch.inf)
        if sinks is not None:
            sinks = of_heads(sinks, self.first_head, q.size(1)).type_as(scores)
            scores = torch.cat((scores, sinks[:, None, None].expand_as(scores[..., :1])), dim=-1)
        weights = scores.softmax(dim=-1)[..., :k.size(2)].type_as(v)
        return F.dropout(weights, self.dropout if self.training else 0.0) @ v


class Sinks(nn.Module):
    """A learned score for each head, which takes part in its softmax and gives nothing (gpt-oss, 2025, 2.1).

    A head that has nothing to attend to then gives almost nothing.
    """

    def __init__(self, n_head):
        super().__init__()
        self.scores = nn.Parameter(torch.empty(n_head))

    def forward(self):
        """The argument of attention, by its name: sinks (H,), under tensor parallelism those of a rank's heads."""
        return dict(sinks=self.factors()[0])

    def factors(self):
        return [self.scores]


def of_heads(sinks, first_head, H):
    """Those (H,) of sinks that belong to H heads from first_head on. Context parallelism divides a rank's heads."""
    start = first_head % len(sinks) if H < len(sinks) else 0
    return sinks[start:start + H]


def no_sinks():
    """The arguments of attention without sinks."""
    return {}


def choose_dot_product(config, plain):
    """(the attention of queries, keys and values, Sinks or no_sinks). plain: model.py's, without cap and sinks."""
    if not config.attention_softcap and not config.attention_sinks:
        return plain, no_sinks
    sinks = Sinks(config.n_head) if config.attention_sinks else no_sinks
    return ScoredAttention(config.dropout, config.attention_softcap), sinks


class NormOverHeads(nn.Module):
    """RMSNorm (Zhang and Sennrich 2019) over the features of all heads together, before they are split.

    Written out, since under tensor parallelism a rank has some of the features, and the mean is over all.
    """

    def __init__(self, width, eps):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))
        self.eps = eps

    def forward(self, x):
        """x (B, T, H * D) -> the same shape and dtype."""
        wide = at_least_float32(x)
        mean_square = wide.square().mean(dim=-1, keepdim=True)
        return (wide * (mean_square + self.eps).rsqrt() * self.weight).type_as(x)
