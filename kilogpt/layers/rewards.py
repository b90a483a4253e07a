"""The loss of texts that a model has drawn itself, by their rewards (GRPO, Shao et al. 2024). Imports torch alone."""
import functools

import torch
from torch import nn


def use_rewards(model, kl, clip):
    """Let a model compute the RewardLoss of texts, and add up what is logged beside it, in place."""
    model.loss.is_summed = False
    model.loss.cross_entropy = functools.partial(model.loss.cross_entropy, reduction='none')
    model.sums.update(entropy=0.0, **dict(kl=0.0) if kl else {})
    model.preferences = RewardLoss(kl, clip, model.sums)


class RewardLoss(nn.Module):
    """The sum over tokens of -advantage * p / p_old, where p_old is the probability with which a token was drawn.

    With one update for each batch of texts p_old is p, and the gradient that of -advantage * log p. With several,
    clip > 0 limits the ratio as in PPO (Schulman et al. 2017, equation 7). kl: the weight of the divergence from the
    reference, of which each token takes kl * log(p / p_ref) from its advantage.
    `sums` gets -log p of what was drawn, whose mean is an estimate of the entropy, and log(p / p_ref).
    """

    def __init__(self, kl, clip, sums):
        super().__init__()
        self.kl, self.clip, self.sums = kl, clip, sums
        self.whole_rows = lambda nats: nats  # context parallelism gathers them

    def forward(self, nats, advantages=None, known=None):
        """nats (N,): the losses of tokens, of this process's part of each row; 0 for those that do not count.

        advantages (B, T). known (B, T, 2): log p_old, and log p_ref, each 0 if it is not needed. Without advantages,
        the result is the sum of the losses.
        """
        if advantages is None:
            return nats.sum()
        n_parts = advantages.numel() // nats.numel()
        log_p = -self.whole_rows(nats.view(advantages.size(0), -1))  # (B, T)
        old, reference = known.unbind(-1)
        self.sums['entropy'] -= log_p.detach().sum() / n_parts
        if self.kl:
            distance = log_p.detach() - reference
            advantages = advantages - self.kl * distance
            self.sums['kl'] += distance.sum() / n_parts
        ratio = (log_p - (old if self.clip else log_p.detach())).exp()
        gain = ratio * advantages
        if self.clip:
            gain = torch.minimum(gain, ratio.clamp(1 - self.clip, 1 + self.clip) * advantages)
        # Each of the processes that share a row computes the same loss, and returns its part of it.
        return -gain.sum() / n_parts
