"""Optimizers and learning-rate schedules."""
import inspect
import math

import torch


def build_optimizer(kind, named_parameters, learning_rate, weight_decay, betas, momentum, blocks, dtype,
                    apply_to_whole_matrices):
    """Build the optimizer of a run.

    kind: 'adamw', or 'muon', which is Muon for the matrices of `blocks` and AdamW for the rest.
    dtype: the dtype of training, a string. Muon orthogonalizes in this dtype, but for float16
    in float32.
    momentum, blocks, apply_to_whole_matrices: as in Muon.
    """
    if kind == 'adamw':
        return build_adamw(named_parameters, learning_rate, weight_decay, betas)
    muon_dtype = torch.float32 if dtype == 'float16' else getattr(torch, dtype)
    return Muon(named_parameters, learning_rate, weight_decay, betas, blocks, dtype=muon_dtype,
                momentum=momentum, apply_to_whole_matrices=apply_to_whole_matrices)


def build_adamw(named_parameters, learning_rate, weight_decay, betas):
    """Build AdamW (Loshchilov and Hutter 2019) with weight decay on matrices and embeddings only."""
    matrices, vectors = [], []
    for name, parameter in named_parameters:
        (matrices if parameter.dim() >= 2 else vectors).append((name, parameter))
    groups = [dict(params=matrices, weight_decay=weight_decay), dict(params=vectors, weight_decay=0.0)]
    groups = [group for group in groups if group['params']]  # a stage of a pipeline may have no vectors
    return LocalAdamW(groups, lr=learning_rate, betas=betas, fused=True)


class LocalAdamW(torch.optim.AdamW):
    """AdamW on the parts of DTensors that this process holds.

    AdamW works element by element and so does not need the whole tensors. An operation on a DTensor first
    works out its layout, which takes longer than the update of a small parameter.
    """
    skips_on_device = True  # a tensor of 1 in `found_inf` skips an update (see torch.amp.GradScaler)
    # PyTorch wraps these two methods to keep torch.compile out of them. The wrappers import the whole
    # compiler, which takes half a second at the start of a run, although runs never compile an optimizer.
    add_param_group = inspect.unwrap(torch.optim.Optimizer.add_param_group)
    step = torch.no_grad()(inspect.unwrap(torch.optim.AdamW.step))

    def _init_group(self, group, *lists):
        has_complex = super()._init_group(group, *lists)
        for tensors in lists:
            tensors[:] = [local_part(tensor) for tensor in tensors]
        return has_complex


class Muon(torch.optim.Optimizer):
    """Muon (Jordan et al. 2024) for the matrices of the blocks, AdamW for the rest.

    Both use the same learning rate and weight decay. The update of a matrix is its Nesterov momentum, made
    orthogonal and multiplied by 0.2 √(longer side). This gives the update the root mean square of an update
    of AdamW (Liu et al. 2025, section 2.2), so that a learning rate for AdamW suits Muon too.

    named_parameters: [(name, parameter)]. Muon takes the matrices whose names begin with `blocks`. A
    parameter of experts, (E, rows, columns), is E matrices, each of which is orthogonalized on its own.
    apply_to_whole_matrices(function, parameter, parts): applies a function of whole matrices (n, rows,
    columns) where each process holds parts of them, as Parallel.apply_to_whole_matrices does.
    dtype: the dtype of the orthogonalization.

    torch.optim.Muon makes the same updates, but on one process, in bfloat16 and one matrix at a time.
    """
    add_param_group = LocalAdamW.add_param_group
    skips_on_device = True

    def __init__(self, named_parameters, learning_rate, weight_decay, betas, blocks, dtype=torch.bfloat16,
                 momentum=0.95, apply_to_whole_matrices=lambda function, parameter, parts: function(parts)):
        matrices, others = [], []
        for name, parameter in named_parameters:
            is_for_muon = name.startswith(f'{blocks}.') and parameter.dim() >= 2
            (matrices if is_for_muon else others).append((name, parameter))
        self.adamw = build_adamw(others, learning_rate, weight_decay, betas)
        self.dtype, self.apply_to_whole_matrices = dtype, apply_to_whole_matrices
        groups = list(self.adamw.param_groups)
        if matrices:  # a stage of a pipeline may have no blocks
            groups.insert(0, dict(params=matrices, weight_decay=weight_decay, momentum=momentum))
        super().__init__(groups, self.adamw.defaults)
        self.adamw.state = self.state
        self.found_inf = None  # a tensor of 1 skips an update, as in AdamW (see torch.amp.GradScaler)

    @torch.no_grad()
    def step(self):
        self.adamw.found_inf = self.found_inf
        self.adamw.step()
        # 1.0, or a tensor of 1 (make the update) or 0 (skip the update), without waiting for the device.
        is_applied = 1.0 if self.found_inf is None else 1 - self.found_inf
        for group in self.param_groups:
            if 'momentum' in group:
                for parameters in muon_groups(group['params']):
                    self._step_muon(parameters, group, is_applied)

    def _step_muon(self, parameters, group, is_applied):
        """Update parameters of one shape and layout together."""
        for parameter in parameters:
            if not self.state[parameter]:
                self.state[parameter]['momentum_buffer'] = torch.zeros_like(parameter.detach())
        weights = [local_part(parameter) for parameter in parameters]
        gradients = [local_part(parameter.grad) for parameter in parameters]
        momenta = [local_part(self.state[parameter]['momentum_buffer']) for parameter in parameters]
        if self.found_inf is not None:
            # With the momentum in place of the gradient, a skipped update does not change the momentum.
            gradients = [torch.where(is_applied > 0, g, m) for g, m in zip(gradients, momenta)]
        torch._foreach_lerp_(momenta, gradients, 1 - group['momentum'])
        directions = torch.stack(torch._foreach_lerp(gradients, momenta, group['momentum'])).to(self.dtype)
        matrices = directions.flatten(0, -3)  # (n, rows, columns); n counts the matrices of experts too
        updates = self.apply_to_whole_matrices(orthogonalize, parameters[0], matrices).view_as(directions)
        updates = [update.to(weight) * is_applied for update, weight in zip(updates, weights)]
        torch._foreach_mul_(weights, 1 - is_applied * group['lr'] * group['weight_decay'])
        scale = 0.2 * math.sqrt(max(parameters[0].shape[-2:]))
        torch._foreach_add_(weights, updates, alpha=-group['lr'] * scale)


def orthogonalize(matrices, steps=5):
    """Approximate U Vᵀ of matrices U S Vᵀ (n, rows, columns) by a Newton-Schulz iteration.

    In 5 steps, the quintic polynomial of Jordan et al. 2024 moves all singular values to between 0.7 and 1.2:
    it is fast rather than exact.
    """
    is_tall = matrices.size(-2) > matrices.size(-1)
    x = matrices.mT if is_tall else matrices
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=1e-7)
    for _ in range(steps):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=-4.7750, alpha=2.0315), x, beta=3.4445)
    return x.mT if is_tall else x


def muon_groups(parameters, max_elements=2 ** 26):
    """Yield lists of parameters of one shape and layout, which can be updated together.

    A list has at most max_elements elements on this process, unless a single parameter has more.
    """
    by_layout = {}
    for parameter in parameters:
        key = parameter.shape, getattr(parameter, 'placements', None)
        by_layout.setdefault(key, []).append(parameter)
    for group in by_layout.values():
        size = max(1, max_elements // max(1, local_part(group[0]).numel()))
        for start in range(0, len(group), size):
            yield group[start:start + size]


def local_part(tensor):
    """The part of a tensor that this process holds: of a DTensor its local tensor, else the whole tensor."""
    return tensor.to_local() if hasattr(tensor, 'to_local') else tensor


def set_lr(optimizer, lr):
    """Set the learning rate of the next update."""
    for group in optimizer.param_groups:
        group['lr'] = lr


def scheduled_lr(iteration, schedule, peak, floor, warmup_iters, decay_iters):
    """The learning rate of the update that follows `iteration` finished updates.

    The rate rises linearly to `peak` over warmup_iters, falls to `floor` until decay_iters, and stays there.
    schedule: 'cosine' (as in nanoGPT), 'linear', or 'wsd' (warm-up, stable, decay), which stays at `peak` and
    falls linearly over the last fifth (Hägele et al. 2024).
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
