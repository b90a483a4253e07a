"""What the host of pretended GPUs (dev/cuda_without_gpu) must know, although no kernel has computed it.

Each expert, and each process in an exchange of rows, gets as many rows as the others. The stages of a pipeline do not
vote whether they know their shapes: each goes by its own vote, which must be the same. The distance between islands is
relative to the size of their parameters, which is 1 here.
"""
import torch
from torch.distributed.pipelining.stage import InferenceMode, PipelineStage

from kilogpt.islands.outer_optimizer import OuterOptimizer
from kilogpt.layers import mixture
from kilogpt.parallel import expert

tolist, compute, exchange_tokens = torch.Tensor.tolist, mixture.Experts.forward, expert.exchange_tokens
mean = OuterOptimizer.mean
n_rows = []  # rows that are being divided


def even_counts(self):
    counts = tolist(self)
    if not n_rows:
        return counts
    share = n_rows[-1] // len(counts)
    return [share] * (len(counts) - 1) + [n_rows[-1] - share * (len(counts) - 1)]


def divides(function, rows_of):
    """The function, in which counts are even shares of the rows that `rows_of` finds among its arguments."""
    def divide(*args):
        n_rows.append(rows_of(*args).size(0))
        try:
            return function(*args)
        finally:
            n_rows.pop()
    return divide


def own_vote(self, has_backward, received_acc=None):
    return torch.tensor([not InferenceMode.needs_dynamic(self._user_meta, has_backward)])


def mean_with_size(self, number, payloads):
    means, distance, _ = mean(self, number, payloads)
    return means, distance, 1.0


torch.Tensor.tolist = even_counts
mixture.Experts.forward = divides(compute, lambda experts, x, ends: x)
expert.exchange_tokens = lambda group, ep: divides(exchange_tokens(group, ep), lambda rows, ends: rows)
PipelineStage._warmup_forward_vote = own_vote
PipelineStage._warmup_backward_result = lambda self, received_result=None: received_result
OuterOptimizer.mean = mean_with_size
