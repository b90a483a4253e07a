"""The loss under tensor parallelism, where each rank has the logits of some vocabulary rows."""
import copy

import torch
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.nn import functional as F

from kilogpt.devices.parts import replace_parts
from kilogpt.parallel.dtensor import take_whole_logits


def split_loss(model, mesh, notes):
    """Let the cross-entropy take split logits as they are, and any other loss a part of the tokens, in place.

    notes: gets a sentence about another loss, once.
    """
    if model.loss.distillation is None and is_cross_entropy(model.loss):
        replace_parts(model, 'loss', take_whole_logits)
        return
    replace_parts(model, 'loss', lambda loss: take_some_tokens(loss, mesh))
    note = (f'the loss in model.py is not the cross-entropy alone: with tp={mesh.size()} each rank computes it for '
            f'1/{mesh.size()} of the tokens, and the ranks exchange logits')
    if note not in notes:
        notes.append(note)


def is_cross_entropy(loss):
    """Whether a model's Loss gives cross-entropies, or their sum, if logits are not capped or scaled, on the CPU.

    A loss that was edited in model.py may differ, even if only in training or only in evaluation.
    """
    probe = copy.deepcopy(loss)
    probe.config.vocab_size, probe.config.softcap, probe.config.logit_scale = 6, 0.0, 1.0
    logits, targets = 4 * torch.randn(3, 8, generator=torch.Generator().manual_seed(0)), torch.tensor([4, -1, 0])
    expected = F.cross_entropy(logits[:, :6], targets, ignore_index=-1, reduction='none')
    for is_training in (True, False):
        probe.train(is_training)
        with torch.set_grad_enabled(is_training):
            found = probe.of_logits(logits, targets)
        if not torch.allclose(found, expected if found.dim() else expected.sum()):
            return False
    return True


def take_some_tokens(loss, mesh):
    """Let a loss compute this rank's part of the tokens, with all of their logits. It stays the same module."""
    def forward(x, head, targets):
        logits = head(x).flatten(0, 1).redistribute(placements=[Shard(0)]).to_local()
        targets = targets.flatten(0, 1).tensor_split(mesh.size())[mesh.get_local_rank()]
        losses = loss.of_logits(logits, targets)
        placement = Shard(0) if losses.dim() else Partial()  # each target's, or the sum of a part
        return DTensor.from_local(losses, mesh, [placement]).redistribute(placements=[Replicate()])

    loss.forward = forward
    return loss
