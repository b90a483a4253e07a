"""Gated DeltaNet: a state of fixed size for each head takes the place of attention's keys and values.

A token first lets the state decay, then corrects what the state holds under the token's key, then reads it:

    S ← exp(decay) · S        S ← S + k ⊗ write · (v - Sᵀ k)        y = Sᵀ q

(Yang et al. 2024, "Gated Delta Networks", 2412.06464.) Imports torch and files of this folder alone.

Shapes in comments: B batch, T positions, C n_embd, H heads of values and states, G heads of queries and keys,
K and V the widths of a key and of a value, F features of queries, keys and values together, N chunks of L positions.
"""
import math

import torch
from torch import nn
from torch.nn import functional as F

from kilogpt.layers.convolution import Convolution
from kilogpt.layers.precision import at_least_float32, cast_for_linears, draw_normal

CHUNK = 64  # positions that `in_chunks` takes together


class GatedDeltaNet(nn.Module):
    """A block's mixer, in the place and under the names of attention: linears, convolution, delta rule, gated norm.

    Head h of the states reads the queries and keys of head h // (H / G). Linears do not have biases.
    """

    def __init__(self, config):
        super().__init__()
        self.key_width, self.value_width = config.delta_key_width, config.delta_value_width
        keys, values = config.delta_key_heads * self.key_width, config.delta_heads * self.value_width
        self.c_q, self.c_k, self.c_v, self.output_gate, self.write_gate, self.decay_gate = (
            nn.Linear(config.n_embd, width, bias=False)
            for width in (keys, keys, values, values, config.delta_heads, config.delta_heads))
        self.convolution = Convolution(config.delta_conv, scales_own=True, q=keys, k=keys, v=values)
        self.decay = Decay(config.delta_heads)
        self.write_limit = 2.0 if config.delta_negative else 1.0  # above 1, a correction may turn a value around
        self.delta_rule = DeltaRule()
        self.norm = nn.RMSNorm(self.value_width, eps=config.delta_norm_eps or config.norm_eps)
        self.c_proj = nn.Linear(values, config.n_embd, bias=False)
        self.resid_dropout = nn.Dropout(config.dropout)

    def forward(self, x, rope=None, mask=None, cache=None, tokens=None, positions=None):
        """x (B, T, C) -> (B, T, C).

        mask (B or 1, whole T): where documents begin; None: at the first position alone. cache: the CacheView of
        this layer. positions: as in Convolution. The others are attention's.
        """
        B, T, _ = x.shape
        x = cast_for_linears(x)
        parts = self.convolution(self.c_q(x), self.c_k(x), self.c_v(x), positions=positions, cache=cache)
        widths = self.key_width, self.key_width, self.value_width
        q, k, v = (F.silu(part).view(B, T, -1, width).transpose(1, 2) for part, width in zip(parts, widths))
        decay = self.decay(self.decay_gate(x)).transpose(1, 2)  # (B, H, T)
        write = self.write_limit * at_least_float32(self.write_gate(x)).sigmoid().transpose(1, 2)
        y = self.delta_rule(q, k, v, decay, write, begins=mask, cache=cache)  # (B, H, T, V)
        y = self.norm(y.transpose(1, 2)).reshape(B, T, -1)
        y = y * F.silu(at_least_float32(self.output_gate(x)))
        return self.resid_dropout(self.c_proj(y.type_as(x)))


class Decay(nn.Module):
    """The logarithm of what remains of each head's state: -exp(log_rate) · softplus(x + shift), as in Mamba-2."""

    def __init__(self, n_heads):
        super().__init__()
        self.log_rate = nn.Parameter(torch.empty(n_heads))
        self.shift = nn.Parameter(torch.empty(n_heads))

    def forward(self, x):
        """x (B, T, H) -> the same shape, at most 0, in float32 or more."""
        log_rate, shift = map(at_least_float32, self.factors())
        return -log_rate.exp() * F.softplus(at_least_float32(x) + shift)

    def factors(self):
        """Both vectors. Under tensor parallelism, those of this rank's heads."""
        return [self.log_rate, self.shift]


def initial_decay(name, seed, shape, rows):
    """The first values of Decay: rates from 1 to 16, and steps from 0.001 to 0.1 on a logarithmic scale (Mamba-2)."""
    share = torch.special.ndtr(draw_normal(1.0, name, seed, shape, rows))  # uniform in (0, 1)
    if name.endswith('log_rate'):
        return (1 + 15 * share).log()
    step = (math.log(0.001) + share * math.log(100)).exp()
    return step + (-(-step).expm1()).log()  # the inverse of softplus


class DeltaRule(nn.Module):
    """The recurrence: in chunks for many positions, step by step for one."""

    def forward(self, q, k, v, decay, write, begins=None, cache=None):
        """q, k (B, G, T, K), v (B, H, T, V), decay, write (B, H, T) -> (B, H, T, V) in v's dtype.

        Queries and keys are scaled to length 1 here. begins (B or 1, T): where the state begins again at zero.
        cache: a CacheView, whose states (B, H, K, V) are continued.
        """
        before = None
        if cache is not None:
            before, is_token = cache.states(), cache.is_token(v.size(2))
            if is_token is not None:  # padding changes no state
                decay, write = (gate.where(is_token[:, None], 0) for gate in (decay, write))
                begins = begins & is_token
        with torch.autocast(v.device.type, enabled=False):  # a state adds up thousands of products
            q, k, values = (at_least_float32(x) for x in (q, k, v))
            q, k = (x * (x.square().sum(dim=-1, keepdim=True) + 1e-6).rsqrt() for x in (q, k))
            q = q * q.size(-1) ** -0.5
            repeats = v.size(1) // k.size(1)
            if repeats > 1:
                q, k = q.repeat_interleave(repeats, dim=1), k.repeat_interleave(repeats, dim=1)
            form = step_by_step if v.size(2) == 1 else in_chunks
            y, after = form(q, k, values, decay, write, begins, before)
        if cache is not None:
            cache.keep_states(after)
        return y.type_as(v)


def step_by_step(q, k, v, decay, write, begins=None, state=None):
    """The recurrence position by position: the definition. As `in_chunks`."""
    if state is None:
        state = v.new_zeros(*v.shape[:2], k.size(-1), v.size(-1))
    y = []
    for t in range(v.size(2)):
        kept = decay[:, :, t].exp()  # (B, H)
        if begins is not None:
            kept = kept.masked_fill(begins[:, None, t], 0)
        state = state * kept[..., None, None]
        stored = (state * k[:, :, t, :, None]).sum(dim=2)  # (B, H, V): what the state holds under the key
        change = write[:, :, t, None] * (v[:, :, t] - stored)
        state = state + k[:, :, t, :, None] * change[:, :, None]
        y.append((state * q[:, :, t, :, None]).sum(dim=2))
    return torch.stack(y, dim=2), state


def in_chunks(q, k, v, decay, write, begins=None, state=None):
    """The recurrence as matrix products within chunks, and one product for each chunk after the other.

    q, k (B, H, T, K), v (B, H, T, V), decay, write (B, H, T), begins (B or 1, T) or None, state (B, H, K, V) or None
    -> (y (B, H, T, V), the state after the last position). Within a chunk all corrections solve one triangular
    system, the WY form of the paper (3.2 and 3.3).
    """
    T = v.size(2)
    L = min(CHUNK, T)
    q, k, v = (F.pad(x, (0, 0, 0, -T % L)).unflatten(2, (-1, L)) for x in (q, k, v))  # (B, H, N, L, K or V)
    decay, write = (F.pad(x, (0, -T % L)).unflatten(2, (-1, L)) for x in (decay, write))
    total = decay.cumsum(dim=-1)  # (B, H, N, L): the decay from the beginning of the chunk
    is_before = torch.ones(L, L, dtype=torch.bool, device=v.device).tril()
    from_start, to_end = total.exp(), (total[..., -1:] - total).exp()
    if begins is not None:  # documents of a chunk have numbers; 0 continues from the chunk before
        number = F.pad(begins, (0, -T % L)).unflatten(1, (-1, L)).cumsum(dim=-1)[:, None]  # (B or 1, 1, N, L)
        is_before = is_before & (number[..., None] == number[..., None, :])
        from_start = from_start.masked_fill(number > 0, 0)
        to_end = to_end.masked_fill(number != number[..., -1:], 0)
    between = (total[..., None] - total[..., None, :]).masked_fill(~is_before, -torch.inf).exp()  # (B, H, N, L, L)
    written_keys = k * write[..., None]
    system = written_keys @ k.mT * between  # of which the solver reads what is below the diagonal
    sides = torch.cat((v * write[..., None], written_keys * from_start[..., None]), dim=-1)
    solution = solve(system, sides, False)
    # Corrections if the chunk began at a state of zero (B, H, N, L, V), and what a state takes from them (.., L, K).
    of_values, of_state = solution.split((v.size(-1), k.size(-1)), dim=-1)
    seen = q @ k.mT * between
    ends = (k * to_end[..., None]).mT  # (B, H, N, K, L)
    keeps = torch.diag_embed(from_start[..., -1:].expand(*from_start.shape[:-1], k.size(-1))) - ends @ of_state
    if state is None:
        state = torch.zeros_like(keeps[:, :, 0, :, :1]).expand(-1, -1, -1, v.size(-1))
    states = scan(keeps, ends @ of_values, state)  # (B, H, N + 1, K, V)
    y = seen @ of_values + (q * from_start[..., None] - seen @ of_state) @ states[:, :, :-1]
    return y.flatten(2, 3)[:, :, :T], states[:, :, -1]


# An operator of its own, since the compiler expects another order of the elements than LAPACK's.
@torch.library.custom_op('kilogpt::solve_unit_lower', mutates_args=())
def solve(system: torch.Tensor, sides: torch.Tensor, is_transposed: bool) -> torch.Tensor:
    """x with (1 + what is below the diagonal of system (.., L, L)) @ x = sides (.., L, M), or with its transpose."""
    matrix = system.mT if is_transposed else system
    return torch.linalg.solve_triangular(matrix, sides, upper=is_transposed, unitriangular=True).contiguous()


@solve.register_fake
def _(system, sides, is_transposed):
    return torch.empty_like(sides, memory_format=torch.contiguous_format)


def _keep_solution(ctx, inputs, output):
    ctx.save_for_backward(inputs[0], output)


def _solve_backward(ctx, gradient):
    system, solution = ctx.saved_tensors
    of_sides = solve(system, gradient, True)
    return -(of_sides @ solution.mT).tril(-1), of_sides, None


solve.register_autograd(_solve_backward, setup_context=_keep_solution)


# Operators of their own, since a compiler would unroll the loops over chunks.
@torch.library.custom_op('kilogpt::scan_states', mutates_args=())
def scan(keeps: torch.Tensor, adds: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
    """states[n + 1] = keeps[n] @ states[n] + adds[n]: all states (B, H, N + 1, K, V), from state (B, H, K, V) on.

    keeps (B, H, N, K, K), adds (B, H, N, K, V).
    """
    B, H, N, K, V = adds.shape
    states = adds.new_empty(B, H, N + 1, K, V)
    states[:, :, 0] = state
    keeps, adds, rows = keeps.flatten(0, 1), adds.flatten(0, 1), states.view(B * H, N + 1, K, V)
    for n in range(N):
        rows[:, n + 1] = torch.baddbmm(adds[:, n], keeps[:, n], rows[:, n])
    return states


@torch.library.custom_op('kilogpt::scan_gradients', mutates_args=())
def scan_back(keeps: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    """g[N] = gradient[N], g[n] = gradient[n] + keeps[n]ᵀ @ g[n + 1]: gradients of all states, as `gradient`."""
    found = gradient.clone(memory_format=torch.contiguous_format)  # (B, H, N + 1, K, V)
    keeps, rows = keeps.flatten(0, 1), found.flatten(0, 1)
    for n in reversed(range(keeps.size(1))):
        rows[:, n].baddbmm_(keeps[:, n].mT, rows[:, n + 1])
    return found


@scan.register_fake
def _(keeps, adds, state):
    B, H, N, K, V = adds.shape
    return adds.new_empty(B, H, N + 1, K, V)


@scan_back.register_fake
def _(keeps, gradient):
    return torch.empty_like(gradient, memory_format=torch.contiguous_format)


def _keep_inputs(ctx, inputs, output):
    ctx.save_for_backward(inputs[0], output)


def _scan_backward(ctx, gradient):
    keeps, states = ctx.saved_tensors
    gradients = scan_back(keeps, gradient)
    return gradients[:, :, 1:] @ states[:, :, :-1].mT, gradients[:, :, 1:], gradients[:, :, 0]


scan.register_autograd(_scan_backward, setup_context=_keep_inputs)
