"""The guard sees the norm FAULT_NORM when it first comes to each of FAULT_ITERATIONS, counted from 1, and else 1."""
import os
from types import SimpleNamespace

from kilogpt.run.guard import Guard

faulty = [int(number) for number in os.environ['FAULT_ITERATIONS'].split()]
settle = Guard.settle


def settle_with_norm(self):
    update = self.last_update
    if update:
        norm = 1.0
        if update.iteration + 1 in faulty:
            faulty.remove(update.iteration + 1)
            norm = float(os.environ['FAULT_NORM'])
        self.last_update = update._replace(grad_norm=SimpleNamespace(item=lambda: norm))
    return settle(self)


Guard.settle = settle_with_norm
