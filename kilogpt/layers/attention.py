"""Attention that sees a window or has capped scores, and the norm of queries and keys over all heads.

Imports torch alone. Shapes in comments: B batch, T queries, S keys, H heads, G key/value heads, D head width.
"""
import torch
from torch import nn
from torch.nn import functional as F


class LimitedAttention(nn.Module):
    """Causal attention in which a query sees `window` positions, its own included, or scores have a tanh cap.

    Sliding windows: Longformer (Beltagy et al. 2020, 3.1), Mistral 7B (Jiang et al. 2023, 2).
    window: 0 = all positions before. softcap: 0 = none (Gemma 2, 2024, 2).
    """

    def __init__(self, dropout, window, softcap):
        super().__init__()
        self.dropout, self.window, self.softcap = dropout, window, softcap
        self.first_head = 0  # as in DotProductAttention

    def forward(self, q, k, v, mask=None):
        """q (B, H, T, D), k, v (B, G, S, D) -> (B, H, T, D). mask (T, S); None means causal, with T = S."""
        T, S = q.size(2), k.size(2)
        dropout = self.dropout if self.training else 0.0
        if self.window and S > self.window:
            mask = causal_mask(T, S, q.device) if mask is None else mask
            last = mask.sum(dim=1, keepdim=True) - 1  # (T, 1): the position of each query
            mask = mask & (torch.arange(S, device=q.device) > last - self.window)
        # With a mask, no kernel that stores less than all scores lets heads share keys and values.
        k, v = (x.repeat_interleave(q.size(1) // x.size(1), dim=1) for x in (k, v))
        if not self.softcap:
            return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None,
                                                  dropout_p=dropout)
        mask = causal_mask(T, S, q.device) if mask is None else mask
        scores = (q @ k.mT).float() * q.size(-1) ** -0.5  # (B, H, T, S)
        scores = self.softcap * torch.tanh(scores / self.softcap)
        weights = scores.masked_fill(~mask, -torch.inf).softmax(dim=-1).type_as(v)
        return F.dropout(weights, dropout) @ v


def causal_mask(T, S, device):
    """(T, S): which of S positions each of the last T sees."""
    return torch.ones(T, S, dtype=torch.bool, device=device).tril(S - T)


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
        wide = x.float()
        mean_square = wide.square().mean(dim=-1, keepdim=True)
        return (wide * (mean_square + self.eps).rsqrt() * self.weight).type_as(x)
