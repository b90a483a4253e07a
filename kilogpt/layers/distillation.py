"""The loss of a student that learns a teacher's probabilities (Hinton et al. 2015). Imports torch alone."""
import math

import torch
from torch.nn import functional as F

from kilogpt.layers.precision import at_least_float32


def teacher_numbers(logits, top_k, temperature):
    """The numbers that Distillation takes of a teacher's logits (..., V): int32 (..., 2 k + 1).

    They are the ids of its k likeliest tokens, the bits of their log-probabilities in float32, and those of the log
    of all that is left, which is -inf if k is V.
    """
    log_p = (at_least_float32(logits) / temperature).log_softmax(dim=-1)
    values, ids = log_p.topk(min(top_k, log_p.size(-1)))
    rest = log_p.scatter(-1, ids, -math.inf).logsumexp(dim=-1, keepdim=True)
    return torch.cat((ids.int(), torch.cat((values, rest), dim=-1).float().view(torch.int32)), dim=-1)


class Distillation:
    """(1 - share) * cross-entropy + share * temperature² * divergence, summed over the targets.

    With the factor temperature², both parts keep their relation at any temperature (Hinton et al. 2015, section 2).
    divergence: of the teacher's probabilities p and the student's q, both at the temperature: 'forward', Σ p log(p/q);
    'reverse', Σ q log(q/p); or 'js', that of Jensen and Shannon, the mean of what p and q have to their mean. The sum
    is over the teacher's k likeliest tokens, and all others together. loss: a Loss, which has the cross-entropy.
    """

    def __init__(self, loss, divergence, temperature, share):
        self.loss, self.divergence, self.temperature, self.share = loss, divergence, temperature, share

    def __call__(self, logits, targets, vocab_size):
        """logits (N, V), of which columns from vocab_size on are padding.

        targets (N, 2 k + 2), int32: a target, or -1, and teacher_numbers.
        """
        labels, (ids, bits) = targets[:, 0].long(), targets[:, 1:].tensor_split([(targets.size(1) - 1) // 2], dim=1)
        ids, log_p = ids.long(), bits.contiguous().view(torch.float32)
        log_q = (at_least_float32(logits[:, :vocab_size]) / self.temperature).log_softmax(dim=-1)
        chosen = log_q.gather(1, ids)
        if ids.size(1) < vocab_size:
            rest = log_q.scatter(1, ids, -math.inf).logsumexp(dim=1, keepdim=True)
            chosen = torch.cat((chosen, rest), dim=1)
        log_p = log_p[:, :chosen.size(1)].to(chosen.dtype)
        divergences = self._divergence(log_p, chosen).sum(dim=1).masked_fill(labels < 0, 0.0)
        total = self.share * self.temperature ** 2 * divergences.sum()
        if self.share < 1:
            total = total + (1 - self.share) * self.loss.cross_entropy(logits, labels, vocab_size)
        return total

    def _divergence(self, log_p, log_q):
        """What each token adds, (N, k)."""
        if self.divergence == 'forward':
            return F.kl_div(log_q, log_p, reduction='none', log_target=True)
        if self.divergence == 'reverse':
            return F.kl_div(log_p, log_q, reduction='none', log_target=True)
        log_mean = torch.logaddexp(log_p, log_q) - math.log(2)
        return (F.kl_div(log_mean, log_p, reduction='none', log_target=True)
                + F.kl_div(log_mean, log_q, reduction='none', log_target=True)) / 2
