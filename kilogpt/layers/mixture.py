"""A mixture of experts: the MLP of a block in which each token goes to some of many experts.

`model.py` builds one in each block that `GPTConfig.has_experts` names, and
`kilogpt/parallel/expert.py` spreads the experts over processes.

Shapes in comments: B batch, T positions, C n_embd, N tokens (B * T), E experts, K experts that a token goes
to, M = N * K.
"""
import torch
import torch.nn as nn
from torch.nn import functional as F

from kilogpt.layers.precision import at_least_float32, cast_for_linears

class MixtureOfExperts(nn.Module):
    """Each token goes to K of E experts (Shazeer et al. 2017), and to shared experts (Dai et al. 2024).

    An expert takes all tokens that are sent to it, so that no token is dropped.
    MLP: the class of the shared experts. activate: the activation of the others. Both are model.py's.
    """

    def __init__(self, config, MLP, activate):
        super().__init__()
        self.routed = RoutedExperts(config, activate)
        self.shared = None
        if config.n_shared_experts:  # side by side, the shared experts are one wide MLP
            self.shared = MLP(config, config.n_shared_experts * config.expert_hidden)
        self.shared_gate = nn.Linear(config.n_embd, 1, bias=False) if config.shared_gate else None
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x, is_counted=None):
        """x (B, T, C) -> (B, T, C). is_counted: as in Router."""
        x = cast_for_linears(x)
        y, shared = self.routed(x, is_counted, meanwhile=lambda: self.apply_shared(x))
        return self.dropout(y) + shared

    def apply_shared(self, x):
        """What the shared experts add to x (B, T, C)."""
        if self.shared is None:
            return 0
        y = self.shared(x)
        return y if self.shared_gate is None else y * self.shared_gate(x).sigmoid()


class RoutedExperts(nn.Module):
    """A router and the experts that it chooses from."""

    def __init__(self, config, activate):
        super().__init__()
        self.router = Router(config)
        self.experts = Experts(config, activate)
        self.dispatch = dispatch_locally

    def forward(self, x, is_counted, meanwhile):
        """x (B, T, C) -> the weighted sum of its experts' outputs (B, T, C), and the result of `meanwhile`.

        `meanwhile` is a function that is called while tokens travel to experts on other processes.
        """
        tokens = x.flatten(0, 1)  # (N, C)
        chosen, weights = self.router(tokens, is_counted)  # (N, K)
        # Rows are sorted by expert, and the rows of an expert by token, which fixes the order of all sums.
        experts, order = chosen.flatten().sort(stable=True)  # (M,)
        places = order.scatter(0, order, torch.arange(len(order), device=x.device))  # the inverse of order
        ends = torch.searchsorted(experts, torch.arange(self.router.n_experts, device=x.device), right=True)
        rows = TakeRows.apply(tokens, order, places, chosen.size(1))  # (M, C)
        rows, ends, combine = self.dispatch(rows, ends)
        result = meanwhile()
        y = combine(self.experts(rows, ends))  # (M, C)
        weights = Permute.apply(weights.flatten(), order, places)  # (M,)
        y = SumRows.apply(y * weights[:, None].type_as(y), order, places, chosen.size(1))  # (N, C)
        return y.view_as(x), result


def dispatch_locally(rows, ends):
    """Send rows (M, C) to their experts, all of which are on this process.

    ends (E,): as in Experts. Returns the rows and ends that arrive, and a function that sends the experts'
    results back.
    """
    return rows, ends, lambda rows: rows


class Router(nn.Module):
    """Chooses the experts of each token and their weights, in float32.

    'softmax': the K likeliest experts, with their probabilities divided by the sum of these (Mixtral, Jiang
    et al. 2024). 'sigmoid': an affinity to each expert on its own instead of a probability (DeepSeek-V3,
    2024, 2.1.2). With K = 1 the affinity itself is the weight (Switch, Fedus et al. 2021), since an affinity
    divided by itself does not have a gradient.

    Two methods keep the experts equally busy. A bias counts in the choice alone and moves by a fixed step
    towards the experts with fewer tokens (Wang et al. 2024). Or Switch's loss is added. Both go by the tokens
    of the whole batch: the bias moves after each update, and the loss takes the shares of the previous batch,
    since the shares of the present batch are known only after its last token.
    """

    def __init__(self, config):
        super().__init__()
        self.n_experts, self.n_active = config.n_experts, config.n_active_experts
        self.kind, self.balance, self.rate = config.router, config.router_balance, config.router_balance_rate
        self.z_loss, self.scale = config.router_z_loss, config.router_scale
        self.n_groups, self.n_active_groups = config.router_groups, config.router_active_groups
        self.divides = config.router_norm and self.n_active > 1
        self.weight = nn.Parameter(torch.empty(config.n_experts, config.n_embd))
        self.logit_bias = nn.Parameter(torch.empty(config.n_experts)) if config.expert_bias else None
        # Neither the bias nor the load is trained, but both are part of the model's state.
        if self.balance == 'bias':
            self.bias = nn.Parameter(torch.empty(config.n_experts), requires_grad=False)
        elif self.balance == 'loss':
            self.load = nn.Parameter(torch.empty(config.n_experts), requires_grad=False)  # shares of tokens
        self.loss_scale = 1.0  # the factor of the model's loss before the backward pass
        self.n_tokens = None  # (E,): tokens that went to each expert since the last `rebalance`

    def forward(self, x, is_counted=None):
        """x (N, C) -> experts (N, K), by descending rank, and their weights (N, K), float32.

        is_counted (N,): whether a token counts in the balance. Padding does not. None: no token counts.
        """
        with torch.autocast(x.device.type, enabled=False):
            logits = F.linear(at_least_float32(x), at_least_float32(self.matrix()))  # (N, E)
            if self.logit_bias is not None:
                logits = logits + at_least_float32(self.logit_biases())
            affinities = logits.softmax(dim=-1) if self.kind == 'softmax' else logits.sigmoid()
            ranking = affinities.detach()
            if self.balance == 'bias':
                ranking = ranking + self.bias
            if self.n_active_groups < self.n_groups:
                ranking = self.within_groups(ranking)
            chosen = self.choose(ranking)
            weights = affinities.gather(-1, chosen)
            if self.divides:
                weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)
            if self.scale != 1:
                weights = weights * self.scale
            if is_counted is None or not self.training:
                return chosen, weights
            self._count(chosen, is_counted)
            if not self.weight.requires_grad:  # a frozen router cannot become more balanced
                return chosen, weights
            losses = self._losses(logits, affinities, is_counted)
            return chosen, AddLoss.apply(weights, losses, self.loss_scale)

    def choose(self, ranking):
        """The K experts (N, K) that rank highest in (N, E), by descending rank, equals by number."""
        # `topk` does not promise an order of equals.
        indices = ranking.sort(dim=-1, descending=True, stable=True).indices
        return indices[:, :self.n_active].contiguous()  # a view would keep the indices of all experts

    def within_groups(self, ranking):
        """ranking (N, E), but -inf for experts that are not in the best groups of neighbouring experts.

        A group is as good as its best expert (DeepSeek-V2, 2024, 2.2.2), or, with 'sigmoid', as its two best
        together (DeepSeek-V3, 2024, 2.1.2).
        """
        groups = ranking.unflatten(-1, (self.n_groups, -1))  # (N, groups, experts of a group)
        n_best = min(2 if self.kind == 'sigmoid' else 1, groups.size(-1))
        best = groups.topk(n_best, dim=-1).values.sum(dim=-1)  # (N, groups)
        order = best.sort(dim=-1, descending=True, stable=True).indices
        is_best = torch.zeros_like(best, dtype=torch.bool).scatter(-1, order[:, :self.n_active_groups], True)
        return groups.masked_fill(~is_best[..., None], -torch.inf).flatten(1)

    def matrix(self):
        """The weight (E, C)."""
        return self.weight

    def logit_biases(self):
        """The bias of the logits (E,)."""
        return self.logit_bias

    @torch.no_grad()
    def _count(self, chosen, is_counted):
        # A checkpointed block counts twice. The balance goes by shares, which stay the same.
        goes_there = chosen[..., None] == torch.arange(self.n_experts, device=chosen.device)
        n_tokens = (goes_there.any(dim=1) & is_counted[:, None]).sum(dim=0)
        self.n_tokens = n_tokens if self.n_tokens is None else self.n_tokens + n_tokens

    def _losses(self, logits, affinities, is_counted):
        """The sum of the tokens' balance losses and z-losses."""
        total = logits.new_zeros(())
        if self.balance == 'loss':  # Switch, equations 4 to 6; the load is the paper's f
            probabilities = affinities / affinities.sum(dim=-1, keepdim=True)
            total = total + self.rate * self.n_experts * (probabilities @ self.load * is_counted).sum()
        if self.z_loss:  # ST-MoE (Zoph et al. 2022), equation 5
            total = total + self.z_loss * (logits.logsumexp(dim=-1).square() * is_counted).sum()
        return total

    @torch.no_grad()
    def rebalance(self, n_tokens, is_applied):
        """Adapt to the batch's tokens of each expert (E,), float32.

        is_applied: a tensor of 1, or of 0 where the update was skipped.
        """
        if self.balance == 'bias':
            self.bias += is_applied.type_as(self.bias) * self.rate * (n_tokens.mean() - n_tokens).sign()
        elif self.balance == 'loss':
            shares = n_tokens / n_tokens.sum().clamp(min=1)
            self.load.lerp_(shares.type_as(self.load), is_applied.type_as(self.load))


class Experts(nn.Module):
    """E MLPs of one form. Matrix number e of each parameter, and vector number e of a bias, belong to expert e."""

    def __init__(self, config, activate):
        super().__init__()
        self.form, self.is_gated, self.activate = config.mlp_form, config.is_gated, activate
        self.n_experts, self.n_active = config.n_experts, config.n_active_experts
        E, C, width = config.n_experts, config.n_embd, config.expert_hidden
        self.c_fc = nn.Parameter(torch.empty(E, width, C))
        if self.is_gated:
            self.c_gate = nn.Parameter(torch.empty(E, width, C))
        self.c_proj = nn.Parameter(torch.empty(E, C, width))
        self.names = ['c_fc', 'c_proj'] + ['c_gate'] * self.is_gated
        self.has_bias = config.expert_bias
        if self.has_bias:
            for name in self.names:
                rows = getattr(self, name).size(1)
                self.register_parameter(f'{name}_bias', nn.Parameter(torch.empty(E, rows)))
        self.products = loop_over_experts

    def forward(self, x, ends):
        """x (M, C), sorted by expert; ends (E,): the row at which the rows of each expert end -> (M, C)."""
        product = self.products(ends)
        matrices, biases = ([cast_for_linears(part) for part in parts()] for parts in (self.matrices, self.biases))
        # The expert of each row. Indexing by it adds the gradients of biases in a fixed order.
        expert = torch.searchsorted(ends, torch.arange(len(x), device=x.device), right=True) if biases else None

        def linear(x, number):
            y = product(x, matrices[number])
            return y + biases[number][expert] if biases else y

        gate = linear(x, 2) if self.is_gated else None
        return linear(self.activate(self.form, linear(x, 0), gate), 1)

    def num_idle(self):
        """Parameters of the experts that a token does not go to."""
        size = sum(parameter.numel() for parameter in self.parameters())
        return size // self.n_experts * (self.n_experts - self.n_active)

    def matrices(self):
        """c_fc, c_proj and, if the form is gated, c_gate."""
        return [getattr(self, name) for name in self.names]

    def biases(self):
        """Those of `matrices` (E, outputs), or none."""
        return [getattr(self, f'{name}_bias') for name in self.names] if self.has_bias else []


def loop_over_experts(ends):
    """A function that multiplies rows by their experts' matrices: x (M, in), (E, out, in) -> (M, out).

    ends (E,): as in Experts.
    """
    sizes = ends.diff(prepend=ends.new_zeros(1)).tolist()
    return lambda x, matrices: torch.cat([F.linear(*each) for each in zip(x.split(sizes), matrices.unbind())])


class AddLoss(torch.autograd.Function):
    """x unchanged. The backward pass adds the gradient of scale · loss, as if the model's loss contained it.

    The model's loss stays the cross-entropy, and a pipeline does not have to pass a second loss on.
    """

    @staticmethod
    def forward(ctx, x, loss, scale):
        ctx.scale = scale
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return grad, torch.as_tensor(ctx.scale, dtype=grad.dtype, device=grad.device), None


class TakeRows(torch.autograd.Function):
    """Rows of x (N, C), each K times, in an order (M,) -> (M, C). Gradients add up in a fixed order.

    places (M,): the inverse of `order`.
    """

    @staticmethod
    def forward(ctx, x, order, places, K):
        ctx.save_for_backward(order, places)
        ctx.K = K
        return x.index_select(0, order // K)

    @staticmethod
    def backward(ctx, grad):
        return SumRows.apply(grad, *ctx.saved_tensors, ctx.K), None, None, None


class SumRows(torch.autograd.Function):
    """The reverse of TakeRows: the sum of each token's K rows of x (M, C) -> (N, C)."""

    @staticmethod
    def forward(ctx, x, order, places, K):
        ctx.save_for_backward(order, places)
        ctx.K = K
        return x.index_select(0, places).unflatten(0, (-1, K)).sum(dim=1)

    @staticmethod
    def backward(ctx, grad):
        return TakeRows.apply(grad, *ctx.saved_tensors, ctx.K), None, None, None


class Permute(torch.autograd.Function):
    """The elements of x in an order that `inverse` undoes. Indexing would add gradients in random order."""

    @staticmethod
    def forward(ctx, x, order, inverse):
        ctx.save_for_backward(inverse)
        return x[order]

    @staticmethod
    def backward(ctx, grad):
        inverse, = ctx.saved_tensors
        return grad[inverse], None, None
