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

CHUNK = 64  # positions that `in_chunks` takes together; half as many with narrow keys
NARROW = 64  # keys up to this width take a fifth less time in shorter chunks on a CPU


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
    """The recurrence as matrix products within chunks, and two products for each chunk after the other.

    q, k (B, H, T, K), v (B, H, T, V), decay, write (B, H, T), begins (B or 1, T) or None, state (B, H, K, V) or None
    -> (y (B, H, T, V), the state after the last position). Within a chunk all corrections solve one triangular
    system, the WY form of the paper (3.2 and 3.3).
    """
    T = v.size(2)
    L = min(CHUNK // 2 if k.size(-1) <= NARROW else CHUNK, T)
    # Products read heads, chunks and positions in this order. Other strides would be copied for each product.
    q, k, v = (F.pad(x, (0, 0, 0, -T % L)).contiguous().unflatten(2, (-1, L)) for x in (q, k, v))  # (B, H, N, L, ..)
    decay, write = (F.pad(x, (0, -T % L)).contiguous().unflatten(2, (-1, L)) for x in (decay, write))
    total = decay.cumsum(dim=-1)  # (B, H, N, L): the decay from the beginning of the chunk
    is_before = torch.ones(L, L, dtype=torch.bool, device=v.device).tril()
    from_start, to_end = total.exp(), (total[..., -1:] - total).exp()
    if begins is not None:  # documents of a chunk have numbers; 0 continues from the chunk before
        number = F.pad(begins, (0, -T % L)).unflatten(1, (-1, L)).cumsum(dim=-1)[:, None]  # (B or 1, 1, N, L)
        is_before = is_before & (number[..., None] == number[..., None, :])
        from_start = from_start.masked_fill(number > 0, 0)
        to_end = to_end.masked_fill(number != number[..., -1:], 0)
    between = (total[..., None] - total[..., None, :]).masked_fill(~is_before, -torch.inf).exp()  # (B, H, N, L, L)
    inverse = invert(k @ k.mT * (between * write[..., None])) * write[..., None, :]
    # Corrections if the chunk began at a state of zero (B, H, N, L, V), and what reads the state there (.., L, K).
    of_values, of_state = inverse @ v, inverse @ (k * from_start[..., None])
    if state is None:
        state = v.new_zeros(*v.shape[:2], k.size(-1), v.size(-1))
    states, corrections = scan(from_start[..., -1], k * to_end[..., None], of_values, of_state, state)
    y = (q @ k.mT * between) @ corrections + q @ states[:, :, :-1] * from_start[..., None]
    return y.flatten(2, 3)[:, :, :T], states[:, :, -1]


# Operators of their own: the compiler expects another order of elements than LAPACK's, and would unroll the loops.
@torch.library.custom_op('kilogpt::invert_unit_lower', mutates_args=())
def invert(system: torch.Tensor) -> torch.Tensor:
    """The inverse of 1 + what is below the diagonal of system (.., L, L)."""
    one = torch.eye(system.size(-1), dtype=system.dtype, device=system.device).expand_as(system)
    # X @ system = 1 takes two thirds of the time of system @ X = 1 on a CPU, since LAPACK's matrices are transposed.
    return torch.linalg.solve_triangular(system, one, upper=False, left=False, unitriangular=True).contiguous()


@invert.register_fake
def _(system):
    return torch.empty_like(system, memory_format=torch.contiguous_format)


def _keep_inverse(ctx, inputs, output):
    ctx.save_for_backward(output)


def _invert_backward(ctx, gradient):
    inverse, = ctx.saved_tensors
    return -(inverse.mT @ gradient @ inverse.mT).tril(-1)


invert.register_autograd(_invert_backward, setup_context=_keep_inverse)


@torch.library.custom_op('kilogpt::scan_states', mutates_args=())
def scan(keep: torch.Tensor, ends: torch.Tensor, of_values: torch.Tensor, of_state: torch.Tensor,
         state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """All states (B, H, N + 1, K, V), from state (B, H, K, V) on, and the corrections (B, H, N, L, V) of each chunk.

        corrections[n] = of_values[n] - of_state[n] @ states[n]
        states[n + 1] = keep[n] · states[n] + ends[n]ᵀ @ corrections[n]

    keep (B, H, N), ends, of_state (B, H, N, L, K), of_values (B, H, N, L, V).
    """
    keep, ends, of_values, of_state = map(_split_chunks, (keep[..., None, None], ends, of_values, of_state))
    states, corrections = [state.flatten(0, 1)], []
    for n in range(len(keep)):
        corrections.append(torch.baddbmm(of_values[n], of_state[n], states[n], alpha=-1))
        states.append(torch.baddbmm(keep[n] * states[n], ends[n].mT, corrections[n]))
    return _join_chunks(states, state), _join_chunks(corrections, state)


@torch.library.custom_op('kilogpt::scan_gradients', mutates_args=())
def scan_back(keep: torch.Tensor, ends: torch.Tensor, of_state: torch.Tensor, of_states: torch.Tensor,
              of_corrections: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The gradients of all states and corrections in `scan`, from those that came from elsewhere: the same shapes."""
    keep, ends, of_state = map(_split_chunks, (keep[..., None, None], ends, of_state))
    states, corrections = _split_chunks(of_states), _split_chunks(of_corrections)
    for n in reversed(range(len(keep))):
        corrections[n] = torch.baddbmm(corrections[n], ends[n], states[n + 1])
        kept = torch.addcmul(states[n], keep[n], states[n + 1])
        states[n] = torch.baddbmm(kept, of_state[n].mT, corrections[n], alpha=-1)
    return _join_chunks(states, of_states), _join_chunks(corrections, of_states)


def _split_chunks(x):
    """(B, H, N, ..) -> N tensors (B * H, ..)."""
    return list(x.flatten(0, 1).unbind(dim=1))


def _join_chunks(chunks, like):
    """The inverse of _split_chunks, with B and H of a tensor `like`."""
    return torch.stack(chunks, dim=1).unflatten(0, like.shape[:2])


@scan.register_fake
def _(keep, ends, of_values, of_state, state):
    B, H, N, L, V = of_values.shape
    return state.new_empty(B, H, N + 1, *state.shape[2:]), of_values.new_empty(B, H, N, L, V)


@scan_back.register_fake
def _(keep, ends, of_state, of_states, of_corrections):
    return of_states.new_empty(of_states.shape), of_corrections.new_empty(of_corrections.shape)


def _keep_scan(ctx, inputs, output):
    keep, ends, _, of_state, _ = inputs
    ctx.save_for_backward(keep, ends, of_state, *output)


def _scan_backward(ctx, of_states, of_corrections):
    keep, ends, of_state, states, corrections = ctx.saved_tensors
    of_states, of_corrections = scan_back(keep, ends, of_state, of_states, of_corrections)
    before, after = states[:, :, :-1], of_states[:, :, 1:]
    of_keep = (before * after).sum(dim=(-2, -1))
    return of_keep, corrections @ after.mT, of_corrections, -of_corrections @ before.mT, of_states[:, :, 0]


scan.register_autograd(_scan_backward, setup_context=_keep_scan)
