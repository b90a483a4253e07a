"""The loss of pairs of answers, of which one is preferred (DPO, Rafailov et al. 2023). Imports torch alone."""
import functools

import torch
from torch import nn
from torch.nn import functional as F


def use_preferences(model, beta):
    """Let a model compute the PreferenceLoss of pairs, and add up what is logged beside it, in place."""
    model.loss.is_summed = False
    model.loss.cross_entropy = functools.partial(model.loss.cross_entropy, reduction='none')
    model.sums.update(reward_margin=0.0, reward_accuracy=0.0)
    model.preferences = PreferenceLoss(beta, model.sums)


class PreferenceLoss(nn.Module):
    """The sum over pairs of -log sigmoid(beta * margin), the paper's equation 7.

    The margin of a pair is Σ log(p / p_ref) over the targets of the chosen answer, less that of the rejected
    one. beta * margin is the difference between the rewards that the model gives the two answers. `sums` gets
    these differences, and how many are positive.
    """

    def __init__(self, beta, sums):
        super().__init__()
        self.beta, self.sums = beta, sums
        self.whole_rows = lambda nats: nats  # context parallelism gathers them

    def forward(self, nats, pairs=None, reference=None):
        """nats (N,): the losses of tokens, of this process's part of each row.

        pairs (B, T): k for the targets of the chosen answer of a row's pair number k, from 1 on, -k for those
        of its rejected answer, and 0 for all other tokens.
        reference (B, T): log p_ref of each target. Without pairs, the result is the sum of the losses.
        """
        if pairs is None:
            return nats.sum()
        n_parts = pairs.numel() // nats.numel()
        nats = self.whole_rows(nats.view(pairs.size(0), -1))  # (B, T)
        gains = -(nats + reference) * pairs.sign()
        zeros, numbers = torch.zeros_like(gains), pairs.abs()
        rewards = self.beta * zeros.scatter_add(1, numbers, gains)  # of pair k in column k
        is_pair = zeros.scatter(1, numbers, 1.0)
        is_pair[:, 0] = 0.0
        margins = rewards.detach() * is_pair
        # Each of the processes that share a row computes the same loss, and returns its part of it.
        self.sums['reward_margin'] += margins.sum() / n_parts
        self.sums['reward_accuracy'] += (margins > 0).sum() / n_parts
        return -(F.logsigmoid(rewards) * is_pair).sum() / n_parts
