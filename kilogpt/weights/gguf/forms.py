"""Tensors of a block that llama.cpp has in other parts than transformers, or in another order.

Latent attention, gpt-oss's experts and Gated DeltaNet. The functions take and return {name: LazyTensor}; names
are those of transformers, or similar ones for parts that only llama.cpp has (`k_b_proj`, `dt_proj`), which
tensors.py turns into those of llama.cpp. The source is conversion/ of llama.cpp (deepseek, gpt_oss, qwen).
"""
import re
from types import SimpleNamespace

import torch

from kilogpt.weights import hybrids, renaming
from kilogpt.weights.config_entries import Entries
from kilogpt.weights.tensors import LazyTensor, joined, mapped, selected, with_rows


SHARED_GATE = '.shared_expert_gate.weight'  # of a shared expert: a row in transformers, a vector in llama.cpp


def to_parts(theirs, tensors):
    """The parts that llama.cpp has of tensors of transformers."""
    if theirs['model_type'] in FORMS:
        tensors = FORMS[theirs['model_type']][0](theirs, tensors)
    return _with_shared_gates(tensors, _as_vector)


def from_parts(theirs, tensors):
    """The inverse of `to_parts`."""
    tensors = _with_shared_gates(tensors, _as_row)
    return FORMS[theirs['model_type']][1](theirs, tensors) if theirs['model_type'] in FORMS else tensors


def _with_shared_gates(tensors, function):
    return {name: function(stored) if name.endswith(SHARED_GATE) else stored for name, stored in tensors.items()}


def _as_vector(stored):
    """(1, C) -> (C,)."""
    return LazyTensor(stored.shape[1:], stored.dtype, lambda rows: stored.whole()[0][rows])


def _as_row(stored):
    return LazyTensor((1, *stored.shape), stored.dtype, lambda rows: stored.whole()[None][rows])


# --- latent attention ---------------------------------------------------------------------------------------

def split_latent(theirs, tensors):
    """Each head's keys and values apart: k_b (H, L, N) and v_b (H, V, L), from kv_b (H * (N + V), L)."""
    H, N, V = (theirs[key] for key in ('num_attention_heads', 'qk_nope_head_dim', 'v_head_dim'))
    found = {}
    for name, stored in tensors.items():
        if '.kv_b_proj.' not in name:
            found[name] = stored
            continue
        L, heads = stored.shape[1], _by_heads(stored, H)
        found[name.replace('kv_b', 'k_b')] = with_rows(heads, (H, L, N), lambda part: part[:, :N].mT)
        found[name.replace('kv_b', 'v_b')] = with_rows(heads, (H, V, L), lambda part: part[:, N:])
    return found


def join_latent(theirs, tensors):
    """The inverse of `split_latent`. Older files have kv_b as it is in transformers."""
    found = {name: stored for name, stored in tensors.items() if not re.search(r'\.[kv]_b_proj\.', name)}
    for name, k in tensors.items():
        if '.k_b_proj.' not in name:
            continue
        v = tensors.get(name.replace('k_b', 'v_b'))
        if v is None:
            raise ValueError(f'it has {name}, but no {name.replace("k_b", "v_b")}')
        shape = k.shape[0] * (k.shape[2] + v.shape[1]), k.shape[1]
        found[name.replace('k_b', 'kv_b')] = LazyTensor(
            shape, torch.promote_types(k.dtype, v.dtype),
            lambda rows, k=k, v=v: torch.cat((k.whole().mT, v.whole()), dim=1).flatten(0, 1)[rows])
    return found


def _by_heads(stored, H):
    """(H * n, ...) -> (H, n, ...)."""
    n = stored.shape[0] // H

    def read(rows):
        start, stop, _ = rows.indices(H)
        return stored[start * n:stop * n].unflatten(0, (-1, n))

    return LazyTensor((H, n, *stored.shape[1:]), stored.dtype, read)


# --- gpt-oss ------------------------------------------------------------------------------------------------

OSS_NAMES = ('.sinks', '.sinks.weight'), *(
    (f'.experts.{ours}{end}', f'.experts.{theirs}{new_end}')
    for ours, theirs in (('c_gate', 'gate_proj'), ('c_fc', 'up_proj'), ('c_proj', 'down_proj'))
    for end, new_end in (('_bias', '.bias'), ('', '.weight')))  # in the order of replacement


def split_oss(theirs, tensors):
    """Experts with gates apart from the rest, rows for outputs, and names that end with weight or bias."""
    return renaming.rename(renaming.unpack_oss(tensors), OSS_NAMES)


def join_oss(theirs, tensors):
    """The inverse of `split_oss`."""
    return renaming.pack_oss(renaming.rename_back(tensors, OSS_NAMES))


# --- Gated DeltaNet -----------------------------------------------------------------------------------------

def widths_of(theirs):
    """delta_heads, delta_key_heads, delta_key_width, delta_value_width of config.json's entries."""
    return SimpleNamespace(**hybrids.read_delta(Entries(theirs, 'it')))


def value_order(theirs, width):
    """The rows (heads * width,) of values in llama.cpp's order.

    transformers has the heads of values that share a head of keys side by side. In qwen35 of llama.cpp, the
    first of each of these groups come first, then the second ones, ...
    """
    sizes = widths_of(theirs)
    groups = torch.arange(sizes.delta_heads).view(sizes.delta_key_heads, -1)
    return (groups.t().reshape(-1, 1) * width + torch.arange(width)).flatten()


def split_states(theirs, tensors):
    """Gated DeltaNet's tensors as llama.cpp has them, with -exp(A_log) in the place of A_log."""
    if not any('.linear_attn.' in name for name in tensors):
        return tensors
    if theirs['model_type'] == 'qwen3_next':
        packed = dict(hybrids.packed_rows(widths_of(theirs), 'qwen3_next')['in_proj_qkvz'])
        gate = packed.pop('output_gate')
        found = {}
        for name, stored in tensors.items():
            if '.in_proj_qkvz.' in name:
                found[name.replace('qkvz', 'qkv')] = selected(stored, torch.cat([*packed.values()]))
                found[name.replace('qkvz', 'z')] = selected(stored, gate)
            else:
                found[name] = stored
    else:
        found = _with_heads_in_order(theirs, tensors, lambda order: order)
    return {name.replace('.dt_bias', '.dt_proj.bias'): _of_llama_cpp(name, stored)
            for name, stored in found.items()}


def join_states(theirs, tensors):
    """The inverse of `split_states`."""
    if not any('.linear_attn.' in name for name in tensors):
        return tensors
    tensors = {name.replace('.dt_proj.bias', '.dt_bias'): _of_transformers(name, stored)
               for name, stored in tensors.items()}
    if theirs['model_type'] == 'qwen3_5_text':
        return _with_heads_in_order(theirs, tensors, lambda order: order.argsort())
    packed = hybrids.packed_rows(widths_of(theirs), 'qwen3_next')['in_proj_qkvz']
    rows = torch.cat([rows for _, rows in packed])
    found = {name: stored for name, stored in tensors.items() if not re.search(r'\.in_proj_(qkv|z)\.', name)}
    for name, stored in tensors.items():
        if '.in_proj_qkv.' in name:
            gate = tensors.get(name.replace('qkv', 'z'))
            if gate is None:
                raise ValueError(f'it has {name}, but no {name.replace("qkv", "z")}')
            found[name.replace('qkv', 'qkvz')] = selected(joined([stored, gate]), rows.argsort())
    return found


def _with_heads_in_order(theirs, tensors, direction):
    """With rows, or columns, of values in another order. direction(order): that order."""
    sizes = widths_of(theirs)
    of_values, of_heads = (direction(value_order(theirs, width)) for width in (sizes.delta_value_width, 1))
    n_before = 2 * sizes.delta_key_heads * sizes.delta_key_width  # rows of queries and keys
    after_keys = torch.cat((torch.arange(n_before), n_before + of_values))
    orders = dict.fromkeys(('in_proj_qkv.weight', 'conv1d.weight'), after_keys) | {'in_proj_z.weight': of_values}
    orders |= dict.fromkeys(('in_proj_a.weight', 'in_proj_b.weight', 'A_log', 'dt_bias'), of_heads)
    found = {}
    for name, stored in tensors.items():
        kind = name.partition('.linear_attn.')[2]
        if kind == 'out_proj.weight':
            stored = mapped(stored, lambda rows: rows[:, of_values])
        elif kind in orders:
            stored = selected(stored, orders[kind])
        found[name] = stored
    return found


def _of_llama_cpp(name, stored):
    if name.endswith('.A_log'):
        return mapped(stored, lambda rows: -rows.float().exp())._replace(dtype=torch.float32)
    if name.endswith('.linear_attn.conv1d.weight'):
        return with_rows(stored, (stored.shape[0], stored.shape[2]), lambda rows: rows[:, 0])
    return stored


def _of_transformers(name, stored):
    if name.endswith('.A_log'):
        return mapped(stored, lambda rows: (-rows.float()).log())._replace(dtype=torch.float32)
    if name.endswith('.linear_attn.conv1d.weight'):
        return with_rows(stored, (stored.shape[0], 1, stored.shape[1]), lambda rows: rows[:, None])
    return stored


FORMS = dict(
    deepseek_v2=(split_latent, join_latent), deepseek_v3=(split_latent, join_latent),
    gpt_oss=(split_oss, join_oss),
    qwen3_next=(split_states, join_states), qwen3_5_text=(split_states, join_states))
