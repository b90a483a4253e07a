"""Latent attention: the keys and values of all heads are computed from one short vector for each position.

Multi-head latent attention (MLA; DeepSeek-V2, 2024, 2.1). The cache holds that vector, and the one rotated key that
all heads share. Imports torch and other files of this folder.

Shapes in comments: B batch, T positions, S positions that a query may see, C n_embd, H heads, D head width, of which
R features are rotated and N are not, V width of a head's values, L width of the latent vector.
"""
import math

import torch
from torch import nn
from torch.nn import functional as F

from kilogpt.layers.attention import choose_dot_product
from kilogpt.layers.precision import at_least_float32, cast_for_linears
from kilogpt.layers.rope import rotate

EPS = 1e-6  # of the norms of latent vectors, whatever norm_eps is, as in DeepSeek's models


class LatentAttention(nn.Module):
    def __init__(self, config, plain):
        super().__init__()
        self.head_width, self.value_width = config.head_width, config.value_width
        self.widths = config.rope_width, config.kv_latent  # (R, L)
        self.c_q_latent = self.q_latent_norm = nn.Identity()
        if config.q_latent:
            self.c_q_latent = nn.Linear(config.n_embd, config.q_latent, bias=config.has_bias('qkv'))
            self.q_latent_norm = nn.RMSNorm(config.q_latent, eps=EPS)
        self.c_q = nn.Linear(config.q_latent or config.n_embd, config.n_head * config.head_width, bias=False)
        self.c_kv_latent = nn.Linear(config.n_embd, sum(self.widths), bias=config.has_bias('qkv'))
        self.kv_latent_norm = nn.RMSNorm(config.kv_latent, eps=EPS)
        self.c_k = nn.Linear(config.kv_latent, config.n_head * (config.head_width - config.rope_width), bias=False)
        self.c_v = nn.Linear(config.kv_latent, config.n_head * config.value_width, bias=False)
        self.c_proj = nn.Linear(config.n_head * config.value_width, config.n_embd, bias=config.has_bias('proj'))
        self.to_heads = pass_on
        self.scale = config.attention_scale or config.head_width ** -0.5
        self.dot_product, self.sinks = choose_dot_product(config, plain)
        self.has_adapters = config.lora_rank > 0
        self.resid_dropout = nn.Dropout(config.dropout)

    def forward(self, x, rope=None, mask=None, cache=None, tokens=None, positions=None):
        """x (B, T, C) -> (B, T, C). The arguments are those of Attention."""
        B, T, _ = x.shape
        x = cast_for_linears(x)
        q = self.c_q(self.q_latent_norm(self.c_q_latent(x))).view(B, T, -1, self.head_width)  # (B, T, H, R + N)
        k, latent = self.c_kv_latent(x).split(self.widths, dim=-1)
        k, latent = self.to_heads(k)[:, :, None], self.kv_latent_norm(latent)  # (B, T, 1, R), (B, T, L)
        if rope is not None:
            k, q = (rotate(at_least_float32(part), *rope).type_as(q) for part in (k, q))
        q = q.transpose(1, 2)  # (B, H, T, R + N)
        if cache is not None:
            latent = self.to_heads(latent)
            seen = torch.cat((k, latent[:, :, None]), dim=-1).transpose(1, 2)  # (B, 1, T, R + L)
            seen, _ = cache.extend(seen, seen[..., :0])  # (B, 1, S, R + L)
            k, latent = seen.transpose(1, 2).split(self.widths, dim=-1)
            latent = latent[:, :, 0]
        is_step = cache is not None and T == 1
        y = self.attend_to_latent(q, seen, mask) if is_step else self.attend(q, k, latent, mask)
        return self.resid_dropout(self.c_proj(y.transpose(1, 2).flatten(2)))

    def attend(self, q, k, latent, mask):
        """q (B, H, T, D), k (B, S, 1, R), latent (B, S, L) -> (B, H, T, V), by keys and values of each head."""
        B, H, _, D = q.shape
        S = k.size(1)
        k = torch.cat((k.expand(-1, -1, H, -1).type_as(q), self.c_k(latent).view(B, S, H, -1)), dim=-1)
        v = self.c_v(latent).view(B, S, H, -1)
        v = F.pad(v, (0, D - self.value_width))  # since fused attention wants values as wide as keys
        return self.weighted_sum(q, k.transpose(1, 2), v.transpose(1, 2), mask)[..., :self.value_width]

    def attend_to_latent(self, q, seen, mask):
        """q (B, H, 1, D), seen (B, 1, S, R + L) -> (B, H, 1, V), without keys and values of each head.

        q · (W_k latent) is (W_kᵀ q) · latent, and the weighted sum of W_v latent is W_v times that of the latent.
        """
        R, H = self.widths[0], q.size(1)
        matrices = [linear.matrix() if self.has_adapters else linear.weight for linear in (self.c_k, self.c_v)]
        c_k, c_v = (matrix.type_as(q).unflatten(0, (H, -1)) for matrix in matrices)
        q = torch.cat((q[..., :R], q[..., R:] @ c_k), dim=-1)  # (B, H, 1, R + L)
        seen = seen.type_as(q)
        return self.weighted_sum(q, seen, seen, mask)[..., R:] @ c_v.mT

    def weighted_sum(self, q, k, v, mask):
        q = q * (self.scale * math.sqrt(q.size(-1)))  # attention itself divides by the root
        return self.dot_product(q, k, v, mask=mask, **self.sinks())


def pass_on(x):
    """x, of which each head has the gradient of its own use."""
    return x
