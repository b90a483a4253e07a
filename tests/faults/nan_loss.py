"""The loss of one micro-batch is NaN, at call FAULT_CALL of cross-entropy in training, on rank FAULT_RANK."""
import os

from torch.nn import functional as F

cross_entropy = F.cross_entropy
calls = 0


def faulty_cross_entropy(*args, **options):
    global calls
    loss = cross_entropy(*args, **options)
    if not loss.requires_grad:  # in an evaluation, or where the loss is compared with others before the run
        return loss
    calls += 1
    is_faulty_call = calls == int(os.environ['FAULT_CALL'])
    if is_faulty_call and os.environ['RANK'] == os.environ['FAULT_RANK']:
        loss = loss * float('nan')
    return loss


F.cross_entropy = faulty_cross_entropy
