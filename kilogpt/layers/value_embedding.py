"""Vectors of the tokens themselves in attention's values, and gates of heads. Imports torch alone."""
import torch
from torch import nn


class ValueEmbedding(nn.Module):
    """Adds a learned vector of each token to its values, times a gate for each key/value head.

    Value embeddings come from modded-nanogpt, the gate from nanochat. The table costs memory, but its rows are
    looked up: no product reads it.
    """

    def __init__(self, config):
        super().__init__()
        self.table = build_embedding(config.padded_vocab_size, config.n_kv_head * config.head_width)
        self.gate = build_gate(config, config.n_kv_head)

    def forward(self, v, x, tokens):
        """v (B, T, G, D), x (B, T, C): the input of attention, tokens (B, T) -> v (B, T, G, D)."""
        return v + head_strengths(self.gate, x) * self.table(tokens).view_as(v).type_as(v)


GATE_FEATURES = 32  # of x, which a gate reads


def build_gate(config, n_heads, width=0):
    """The linear of `head_strengths`."""
    if width:
        return nn.Linear(config.n_embd, n_heads * width, bias=config.has_bias('qkv'))
    return nn.Linear(min(config.n_embd, GATE_FEATURES), n_heads, bias=False)


def head_strengths(gate, x, width=0):
    """What each head's vectors are multiplied by: (B, T, heads, 1), from 0 to 2, and 1 if the gate is all zeros.

    With a width, (B, T, heads, width): each feature by a number from 0 to 1, which the whole of x decides.
    """
    if width:
        return torch.sigmoid(gate(x)).unflatten(-1, (-1, width))
    return 2 * torch.sigmoid(gate(x[..., :GATE_FEATURES]))[..., None]


def build_embedding(rows, width):
    """An nn.Embedding with undefined values. Its constructor would draw some, which imports the compiler."""
    return nn.Embedding.from_pretrained(torch.empty(rows, width), freeze=False)
