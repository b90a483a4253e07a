"""What the host of several pretended GPUs (dev/cuda_without_gpu) must know, although no kernel has computed it.

Each process gets as many rows of an exchange of experts as the others. The stages of a pipeline do not vote whether
they know their shapes: each goes by its own vote, which must be the same.
"""
import torch
from torch.distributed.pipelining.stage import InferenceMode, PipelineStage

from kilogpt.parallel import expert

exchange_tokens, tolist = expert.exchange_tokens, torch.Tensor.tolist
n_rows = None  # rows of the exchange under way


def exchange_evenly(group, ep):
    dispatch = exchange_tokens(group, ep)

    def dispatch_evenly(rows, ends):
        global n_rows
        n_rows = rows.size(0)
        try:
            return dispatch(rows, ends)
        finally:
            n_rows = None

    return dispatch_evenly


def even_counts(self):
    counts = tolist(self)
    return counts if n_rows is None else [n_rows // len(counts)] * len(counts)


expert.exchange_tokens, torch.Tensor.tolist = exchange_evenly, even_counts



def own_vote(self, has_backward, received_acc=None):
    return torch.tensor([not InferenceMode.needs_dynamic(self._user_meta, has_backward)])


PipelineStage._warmup_forward_vote = own_vote
PipelineStage._warmup_backward_result = lambda self, received_result=None: received_result
