"""Optimizers and learning-rate schedules."""
import math

import torch


def build_adamw(named_parameters, learning_rate, weight_decay, betas):
    """AdamW (Loshchilov and Hutter 2019); weight decay on matrices and embeddings only, not on biases and norms."""
    named = list(named_parameters)
    groups = [dict(params=[(name, p) for name, p in named if p.dim() >= 2], weight_decay=weight_decay),
              dict(params=[(name, p) for name, p in named if p.dim() < 2], weight_decay=0.0)]
    groups = [group for group in groups if group['params']]  # a pipeline's stage may have no vectors
    fused = all(p.device.type in ('cuda', 'cpu') for _, p in named)
    return torch.optim.AdamW(groups, lr=learning_rate, betas=betas, fused=fused)


def scheduled_lr(iteration, schedule, peak, floor, warmup_iters, decay_iters):
    """Learning rate of the update that follows `iteration` finished ones.

    Linear warm-up to peak, then to floor at decay_iters: 'cosine' (nanoGPT's), 'linear', or 'wsd' (warm-up, stable, decay),
    which stays at peak and falls linearly over the last fifth (Hägele et al. 2024). Beyond decay_iters it is floor.
    """
    if iteration < warmup_iters:
        return peak * (iteration + 1) / (warmup_iters + 1)
    if iteration >= decay_iters:
        return floor
    if schedule == 'wsd':
        start = max(warmup_iters, 0.8 * decay_iters)
        remaining = min(1.0, (decay_iters - iteration) / (decay_iters - start))
    else:
        remaining = 1 - (iteration - warmup_iters) / (decay_iters - warmup_iters)
        if schedule == 'cosine':
            remaining = 0.5 * (1.0 - math.cos(math.pi * remaining))
    return floor + remaining * (peak - floor)
