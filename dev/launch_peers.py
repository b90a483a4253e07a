"""What dev/cuda_launches.py counts of repositories that have no train.py for one GPU: their models and updates.

A peer is built with GPT-2's width, heads, context and vocabulary, and gets its batches from pinned memory, as nanoGPT
does. Its weights are those that PyTorch's modules begin with, or undefined: no kernel computes with them.
"""
import os
import sys
from types import SimpleNamespace

import peer_recipes
import torch

WIDTH, HEADS, BLOCK, VOCABULARY = 768, 12, 1024, 50304
BATCH, MICRO_BATCHES, ITERATIONS = 4, 2, 6


def nanochat(folder, n_layer, compiles):
    """The loop of scripts/base_train.py, set up by dev/peer_recipes.py. Its optimizer is compiled in any case.

    FlashAttention 3, which it would download, is not here; it then takes PyTorch's attention.
    """
    shape = SimpleNamespace(layers=n_layer, width=WIDTH, heads=HEADS, block_size=BLOCK, vocab_size=VOCABULARY,
                            warmup=1, iters=ITERATIONS, tokens=BATCH * MICRO_BATCHES * BLOCK)
    with torch.device('cuda'):
        recipe = peer_recipes.nanochat(folder, shape, 1.0)
    model, updates = recipe.loss if compiles else recipe.model, iter(range(ITERATIONS))

    def loss(x, y):
        return model(x, y) / MICRO_BATCHES

    def update():
        recipe.update(next(updates))

    return SimpleNamespace(loss=loss, update=update, finish=lambda: None)


def torchtitan(folder, n_layer, compiles):
    """models/llama3 and train.py of version 0.2.2 on one GPU: autocast, and blocks and loss compiled one by one."""
    sys.path.append(folder)
    from torchtitan.components.loss import cross_entropy_loss
    from torchtitan.components.optimizer import OptimizersContainer
    from torchtitan.config.job_config import Compile
    from torchtitan.distributed.utils import clip_grad_norm_
    from torchtitan.models.llama3.infra.parallelize import apply_compile
    from torchtitan.models.llama3.model.args import TransformerModelArgs
    from torchtitan.models.llama3.model.model import Transformer
    with torch.device('cuda'):
        model = Transformer(TransformerModelArgs(dim=WIDTH, n_layers=n_layer, n_heads=HEADS, vocab_size=VOCABULARY,
                                                 max_seq_len=BLOCK))
        n_tokens = torch.tensor(float(BATCH * MICRO_BATCHES * BLOCK))
    if compiles:
        apply_compile(model, Compile())
        cross_entropy_loss = torch.compile(cross_entropy_loss)
    optimizers = OptimizersContainer([model], torch.optim.AdamW, dict(lr=8e-4, weight_decay=0.1, fused=True))

    def loss(x, y):
        with torch.autocast('cuda', torch.bfloat16):
            return cross_entropy_loss(model(x), y) / n_tokens

    def update():
        clip_grad_norm_(list(model.parameters()), 1.0, foreach=True)
        optimizers.step()
        optimizers.zero_grad()

    return SimpleNamespace(loss=loss, update=update, finish=lambda: None)


# {what a peer's folder has: how it is built}
PEERS = {'scripts/base_train.py': nanochat, 'torchtitan/models/llama3': torchtitan}


def builder(folder):
    """The function that builds the peer in a folder; None if the folder has a train.py of its own."""
    return next((build for path, build in PEERS.items() if os.path.exists(os.path.join(folder, path))), None)


def train(peer):
    """Train on random tokens.

    peer: has loss(tokens, targets), whose gradients are added up, update(), and finish(), called after each iteration.
    """
    for _ in range(ITERATIONS):
        for _ in range(MICRO_BATCHES):
            x, y = (torch.randint(50257, (BATCH, BLOCK)).pin_memory().to('cuda', non_blocking=True) for _ in 'xy')
            peer.loss(x, y).backward()
        peer.update()
        peer.finish()
