"""Skip the updates of FAULT_ITERATIONS, counted from 1, whatever their gradients are."""
import os

from kilogpt.parallel import apply

clip_gradients = apply.Parallel.clip_gradients
iterations = [int(iteration) for iteration in os.environ['FAULT_ITERATIONS'].split()]


def clip_gradients_or_spoil(self, max_norm, limit):
    self.n_updates = getattr(self, 'n_updates', 0) + 1
    norm = clip_gradients(self, max_norm, limit)
    return norm * float('nan') if self.n_updates in iterations else norm


apply.Parallel.clip_gradients = clip_gradients_or_spoil
