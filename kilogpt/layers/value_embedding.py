"""Value embeddings: vectors of the tokens themselves in attention's values. Imports torch alone."""
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
        self.n_features = min(config.n_embd, 32)  # of x, which the gate reads
        self.gate = nn.Linear(self.n_features, config.n_kv_head, bias=False)

    def forward(self, v, x, tokens):
        """v (B, T, G, D), x (B, T, C): the input of attention, tokens (B, T) -> v (B, T, G, D)."""
        strength = 2 * torch.sigmoid(self.gate(x[..., :self.n_features]))  # (B, T, G), 1 at the start
        return v + strength[..., None] * self.table(tokens).view_as(v).type_as(v)


def build_embedding(rows, width):
    """An nn.Embedding with undefined values. Its constructor would draw some, which imports the compiler."""
    return nn.Embedding.from_pretrained(torch.empty(rows, width), freeze=False)
