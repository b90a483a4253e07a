"""Optimizers."""
import inspect
import math

import torch

from kilogpt.learning_rate import parse_lr_factors


def build_optimizer(config, named_parameters, split_plan, dtype, apply_to_whole_matrices):
    """The optimizer of a run: 'adamw', or 'muon' for the matrices of the blocks and AdamW for the rest.

    config: the keys of train.py. split_plan, apply_to_whole_matrices: those of Muon. dtype: that of training, a
    string. Muon computes in bfloat16 if training does, and else in the parameters' dtype.
    """
    factors = parse_lr_factors(config['lr_factors'])
    learning_rate, weight_decay, betas = (
        config['learning_rate'], config['weight_decay'], (config['beta1'], config['beta2']))

    def factor_of(name, parameter):
        return factors.get(kind_of_parameter(name, parameter, split_plan), 1.0)

    if config['optimizer'] == 'adamw':
        return build_adamw(named_parameters, learning_rate, weight_decay, betas, factor_of)
    muon_dtype = torch.bfloat16 if dtype == 'bfloat16' else torch.get_default_dtype()
    return Muon(named_parameters, learning_rate, weight_decay, betas, split_plan, dtype=muon_dtype,
                momentum=config['muon_momentum'], apply_to_whole_matrices=apply_to_whole_matrices, factor_of=factor_of)


def kind_of_parameter(name, parameter, split_plan):
    """Which of KINDS a parameter is. A tied head is the embedding, and a position's vector is embedded too."""
    module = name.removesuffix('.weight')
    if module in split_plan['embedding'] + split_plan['positions'] or module.endswith(split_plan['tables']):
        return 'embedding'
    if module in split_plan['head']:
        return 'head'
    return 'vector' if is_vector(name, parameter) else 'matrix'


def is_vector(name, parameter):
    """Whether a parameter is a vector, or, as the biases of experts are, one for each expert."""
    return parameter.dim() < 2 or name.endswith('_bias')


def build_adamw(named_parameters, learning_rate, weight_decay, betas, factor_of=lambda name, parameter: 1.0):
    """AdamW (Loshchilov and Hutter 2019), with weight decay only on matrices and embeddings.

    factor_of(name, parameter): the factor of a parameter's learning rate, which does not change its decay.
    """
    alike = {}  # {(whether they are vectors, their factor): [(name, parameter)]}
    for name, parameter in named_parameters:
        alike.setdefault((is_vector(name, parameter), factor_of(name, parameter)), []).append((name, parameter))
    groups = [dict(params=params, **settings_of_group(learning_rate, factor, 0.0 if are_vectors else weight_decay))
              for (are_vectors, factor), params in sorted(alike.items(), key=lambda item: item[0])]
    if not groups:  # a pipeline stage with adapters may train nothing
        groups = [dict(params=[], param_names=[], **settings_of_group(learning_rate, 1.0, weight_decay))]
    return LocalAdamW(groups, betas=betas, fused=True)


def settings_of_group(learning_rate, factor, weight_decay):
    """The settings of a group of parameters. An optimizer multiplies the decay by the group's learning rate.

    A rare token's embedding is updated rarely, but decays in each iteration: with a rate of 0.04 and a decay of
    0.1 it would halve every 170 of them.
    """
    return dict(lr=learning_rate * factor, lr_factor=factor, weight_decay=weight_decay / factor if factor else 0.0)


class LocalAdamW(torch.optim.AdamW):
    """AdamW on the parts of DTensors that this process holds, which is enough for elementwise updates.

    An operation on DTensors first works out their layout, which takes longer than the update of a small
    tensor.
    """
    skips_on_device = True  # if the tensor `found_inf` is 1, the update is skipped (see torch.amp.GradScaler)
    # PyTorch wraps these two methods to keep torch.compile out of them. The wrappers import the whole
    # compiler, which takes half a second at the start of a run. No run compiles its optimizer, so they are
    # unwrapped.
    add_param_group = inspect.unwrap(torch.optim.Optimizer.add_param_group)
    step = torch.no_grad()(inspect.unwrap(torch.optim.AdamW.step))

    def _init_group(self, group, *lists):
        has_complex = super()._init_group(group, *lists)
        for tensors in lists:
            tensors[:] = [local_part(tensor) for tensor in tensors]
        return has_complex


class Muon(torch.optim.Optimizer):
    """Muon (Jordan et al. 2024) for the matrices of the blocks, AdamW for the rest.

    Both have the same learning rate and weight decay. The update of a matrix is its Nesterov momentum, made
    orthogonal, times 0.2 √(longer side). Its root mean square is then that of an AdamW update (Liu et al.
    2025, section 2.2), so that a learning rate for AdamW suits Muon too.

    named_parameters: [(name, parameter)]. Muon takes the matrices in split_plan's `blocks` but for its
    `tables`, and experts' matrices (E, rows, columns), each of which is orthogonalised on its own.
    apply_to_whole_matrices(function, parameter, parts): applies a function of whole matrices (n, rows,
    columns) when each process holds parts of them, as Parallel.apply_to_whole_matrices does.
    dtype: the dtype of the orthogonalisation. factor_of: as in build_adamw.
    On one process, torch.optim.Muon gives the same updates, but only in bfloat16 and one matrix at a time.
    """
    add_param_group = LocalAdamW.add_param_group
    skips_on_device = True

    def __init__(self, named_parameters, learning_rate, weight_decay, betas, split_plan, dtype=torch.bfloat16,
                 momentum=0.95, apply_to_whole_matrices=lambda function, parameter, parts: function(parts),
                 factor_of=lambda name, parameter: 1.0):
        matrices, others = [], []
        for name, parameter in named_parameters:
            is_in_block = name.startswith(f'{split_plan["blocks"]}.')
            is_of_muon = is_in_block and kind_of_parameter(name, parameter, split_plan) == 'matrix'
            (matrices if is_of_muon else others).append((name, parameter))
        self.adamw = build_adamw(others, learning_rate, weight_decay, betas, factor_of)
        self.dtype, self.apply_to_whole_matrices = dtype, apply_to_whole_matrices
        groups = list(self.adamw.param_groups)
        if matrices:  # a pipeline stage may have none
            groups.insert(0, dict(params=matrices, momentum=momentum,
                                  **settings_of_group(learning_rate, factor_of(*matrices[0]), weight_decay)))
        super().__init__(groups, self.adamw.defaults)
        self.adamw.state = self.state
        self.found_inf = None  # if this tensor is 1, the update is skipped, as in AdamW

    @torch.no_grad()
    def step(self):
        """Update all parameters, or none if `found_inf` is 1."""
        self.adamw.found_inf = self.found_inf
        self.adamw.step()
        # 1.0, or a tensor that is 0 if the update is skipped and 1 otherwise.
        is_applied = 1.0 if self.found_inf is None else 1 - self.found_inf.to(torch.get_default_dtype())
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
        if self.found_inf is not None:  # a momentum that moves towards itself does not change
            gradients = [torch.where(is_applied > 0, g, m) for g, m in zip(gradients, momenta)]
        torch._foreach_lerp_(momenta, gradients, 1 - group['momentum'])
        directions = torch.stack(torch._foreach_lerp(gradients, momenta, group['momentum'])).to(self.dtype)
        matrices = directions.flatten(0, -3)  # (n, rows, columns), where n includes the experts' matrices
        updates = self.apply_to_whole_matrices(orthogonalize, parameters[0], matrices).view_as(directions)
        updates = [update.to(weight) * is_applied for update, weight in zip(updates, weights)]
        torch._foreach_mul_(weights, 1 - is_applied * group['lr'] * group['weight_decay'])
        scale = 0.2 * math.sqrt(max(parameters[0].shape[-2:]))
        torch._foreach_add_(weights, updates, alpha=-group['lr'] * scale)


def orthogonalize(matrices, steps=5):
    """Approximate U Vᵀ for matrices U S Vᵀ (n, rows, columns) by the Newton-Schulz iteration.

    The quintic of Jordan et al. 2024 moves all singular values to between 0.7 and 1.2 in 5 steps: it trades
    accuracy for speed.
    """
    is_tall = matrices.size(-2) > matrices.size(-1)
    x = matrices.mT if is_tall else matrices
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=1e-7)
    for _ in range(steps):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=-4.7750, alpha=2.0315), x, beta=3.4445)
    return x.mT if is_tall else x


def muon_groups(parameters, max_elements=2 ** 26):
    """Yield lists of parameters of one shape and layout, to be updated together.

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
    """The part of a DTensor that this process holds; any other tensor itself."""
    return tensor.to_local() if hasattr(tensor, 'to_local') else tensor


def set_lr(optimizer, lr):
    """Set the learning rate of the next update: in each group, times its lr_factor."""
    for group in optimizer.param_groups:
        group['lr'] = lr * group.get('lr_factor', 1.0)
