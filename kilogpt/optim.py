"""Optimizers and learning-rate schedules."""
import math

import torch


def build_adamw(named_parameters, learning_rate, weight_decay, betas):
    """AdamW (Loshchilov and Hutter 2019); weight decay on matrices and embeddings only, not on biases and norms."""
    named = list(named_parameters)
    groups = [dict(params=[(name, p) for name, p in named if p.dim() >= 2], weight_decay=weight_decay),
              dict(params=[(name, p) for name, p in named if p.dim() < 2], weight_decay=0.0)]
    groups = [group for group in groups if group['params']]  # a pipeline's stage may have no vectors
    return torch.optim.AdamW(groups, lr=learning_rate, betas=betas, fused=True)


class Muon(torch.optim.Optimizer):
    """Muon (Jordan et al. 2024) for the matrices of the blocks, AdamW for the rest; one learning rate and weight decay for both.

    A matrix's update is its momentum (Nesterov's), made orthogonal, times 0.2 √(the longer side): the root mean square of AdamW's
    updates (Liu et al. 2025, 2.2), so that a learning rate for AdamW is one for Muon.

    named_parameters: [(name, parameter)]; those in `blocks` (a prefix of names) of two dimensions are Muon's.
    on_whole: calls a function of whole matrices (n, rows, columns) with what processes hold parts of: parallel.Parallel.on_whole.
    dtype: of the orthogonalisation. torch.optim.Muon does the same on one process, in bfloat16 alone and one matrix at a time.
    """

    def __init__(self, named_parameters, learning_rate, weight_decay, betas, blocks, dtype=torch.bfloat16, momentum=0.95,
                 on_whole=lambda function, like, stack: function(stack)):
        named = list(named_parameters)
        matrices = [(name, p) for name, p in named if name.startswith(f'{blocks}.') and p.dim() == 2]
        names = {name for name, _ in matrices}
        self.adamw = build_adamw([(name, p) for name, p in named if name not in names], learning_rate, weight_decay, betas)
        self.dtype, self.on_whole = dtype, on_whole
        own = [dict(params=matrices, weight_decay=weight_decay, momentum=momentum)] if matrices else []  # a pipeline's stage may have none
        super().__init__(own + self.adamw.param_groups, self.adamw.defaults)
        self.found_inf = None  # a tensor of 1 leaves the update out, as in AdamW (see torch.amp.GradScaler)
        self.own, self.adamw.state = self.param_groups[:len(own)], self.state

    @torch.no_grad()
    def step(self):
        self.adamw.found_inf = self.found_inf
        self.adamw.step()
        made = 1.0 if self.found_inf is None else 1 - self.found_inf
        for group in self.own:
            for alike in _alike(group['params']):
                local = [local_part(p) for p in alike]
                gradients = [local_part(p.grad) for p in alike]
                for p in alike:
                    if not self.state[p]:
                        self.state[p]['momentum_buffer'] = torch.zeros_like(p.detach())
                momenta = [local_part(self.state[p]['momentum_buffer']) for p in alike]
                if self.found_inf is not None:
                    gradients = [torch.where(made > 0, g, m) for g, m in zip(gradients, momenta)]
                torch._foreach_lerp_(momenta, gradients, 1 - group['momentum'])
                updates = torch.stack(torch._foreach_lerp(gradients, momenta, group['momentum'])).to(self.dtype)
                updates = self.on_whole(orthogonalized, alike[0], updates)
                torch._foreach_mul_(local, 1 - made * group['lr'] * group['weight_decay'])
                torch._foreach_add_(local, [u.to(p) * made for u, p in zip(updates, local)],
                                    alpha=-group['lr'] * 0.2 * math.sqrt(max(alike[0].shape)))


def orthogonalized(matrices, steps=5):
    """U Vᵀ, roughly, of matrices U S Vᵀ (n, rows, columns), by Newton and Schulz's iteration.

    The quintic of Jordan et al. 2024 takes all singular values to between 0.7 and 1.2 in 5 steps, fast rather than near to 1.
    """
    x = matrices.mT if matrices.size(-2) > matrices.size(-1) else matrices
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=1e-7)
    for _ in range(steps):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=-4.7750, alpha=2.0315), x, beta=3.4445)
    return x.mT if matrices.size(-2) > matrices.size(-1) else x


def _alike(parameters, most=2 ** 26):
    """The parameters in lists of one shape and layout, of at most so many elements here: what is worked on at once."""
    lists = {}
    for p in parameters:
        lists.setdefault((p.shape, getattr(p, 'placements', None)), []).append(p)
    for alike in lists.values():
        size = max(1, most // max(1, local_part(alike[0]).numel()))
        yield from (alike[i:i + size] for i in range(0, len(alike), size))


def local_part(tensor):
    """What this process holds of a tensor that may be shared out."""
    return tensor.to_local() if hasattr(tensor, 'to_local') else tensor


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
