"""Hybrids of attention and Gated DeltaNet: the entries of config.json, and the tensors of the blocks with a state.

Every function on tensors takes or returns {name: LazyTensor}, as in renaming.py.
"""
import re

import torch

from kilogpt.weights.config_entries import (
    Entries, biases, read_attention_bias, read_llama, shortest, stated_rope, write_llama, write_llama_with_share)
from kilogpt.weights.renaming import LLAMA_NAMES, QWEN2_MOE_NAMES
from kilogpt.weights.tensors import LazyTensor, joined, selected

KINDS = dict(linear_attention='D', full_attention='A')  # {what transformers calls a kind of layer: our letter}
# Queries and gates of attention are in one matrix, head by head.
GATED_QUERIES = ('.self_attn.q_proj.', ('.self_attn.c_q.', '.self_attn.gate.'))


def _with_gates(names):
    return tuple(pair for pair in names if pair[0] != '.c_q.')


QWEN3_5_NAMES = _with_gates(LLAMA_NAMES)
QWEN3_NEXT_NAMES = _with_gates(QWEN2_MOE_NAMES)


# --- config.json --------------------------------------------------------------------------------------------

def read_delta(entries, key_heads=16, heads=32, key_width=128, value_width=128):
    """The arguments of mixer_pattern and of Gated DeltaNet. The numbers are the family's defaults."""
    n_layer, every = entries.integer('num_hidden_layers'), max(1, entries.integer('full_attention_interval', 4))
    kinds = ['full_attention' if (i + 1) % every == 0 else 'linear_attention' for i in range(n_layer)]
    pattern = shortest(''.join(KINDS[kind] for kind in entries.list('layer_types', kinds, tuple(KINDS))))
    entries.only('hidden_act', 'silu', 'swish', None)
    heads = entries.integer('linear_num_value_heads', heads)
    return dict(
        mixer_pattern=pattern, delta_heads=heads, delta_key_heads=entries.integer('linear_num_key_heads', key_heads),
        delta_key_width=entries.integer('linear_key_head_dim', key_width),
        delta_value_width=entries.integer('linear_value_head_dim', value_width),
        delta_conv=entries.integer('linear_conv_kernel_dim', 4)) if 'D' in pattern else {}


def write_delta(config):
    """The entries of `read_delta`. A model without a D has those of attention, which no block reads."""
    names = {letter: kind for kind, letter in KINDS.items()}
    keys = config.delta_key_heads or config.n_head
    return dict(
        layer_types=[names[config.mixer_of(layer)] for layer in range(config.n_layer)],
        linear_num_value_heads=config.delta_heads or config.n_head, linear_num_key_heads=keys,
        linear_key_head_dim=config.delta_key_width or config.head_width,
        linear_value_head_dim=config.delta_value_width or config.head_width, linear_conv_kernel_dim=config.delta_conv)


def read_qwen_hybrid(entries):
    """What Qwen3-Next and Qwen3.5 share."""
    entries.only('attention_bias', False)
    ropes = {}
    for key in ('rope_parameters', 'rope_scaling'):  # pictures have three positions; those of a text are the same
        rope = entries.value(key, {}, (dict,), 'an object')
        ropes[key] = {name: value for name, value in rope.items() if not name.startswith('mrope_')} or None
    entries = Entries(entries.hf_config | ropes, entries.source)
    return read_llama(entries, head_width=256, share=0.25) | read_delta(entries) | dict(
        qk_norm=True, attention_gate=True, attention_gate_over='feature')


def write_qwen_hybrid(config):
    return write_llama_with_share(config) | write_delta(config)


def olmo_hybrid_read(entries):
    n_head = entries.integer('num_attention_heads')
    key_heads = entries.integer('linear_num_key_heads', n_head)
    key_width = entries.integer('linear_key_head_dim', int(0.75 * entries.integer('hidden_size') / max(1, key_heads)))
    entries.only('full_attention_interval', None)
    delta = read_delta(entries, n_head, n_head, key_width, 2 * key_width)
    rope = dict(rope_theta=10000.0) | entries.hf_config | stated_rope(entries)
    if rope['rope_theta'] is None:  # without positions
        without = {key: value for key, value in entries.hf_config.items() if not key.startswith('rope_')}
        entries = Entries(without, entries.source)
        delta |= dict(rope_pattern='N')
    return (read_llama(entries) | biases(**read_attention_bias(entries)) | delta
            | dict(norm_place='after', qk_norm=True, qk_norm_over='all', delta_norm_place='before', delta_norm_eps=1e-5,
                   delta_negative=entries.flag('linear_allow_neg_eigval', True)))


def olmo_hybrid_write(config):
    entries = write_llama(config) | write_delta(config) | dict(linear_allow_neg_eigval=config.delta_negative)
    if config.pos == 'rope' and set(config.rope_pattern) == {'N'}:
        entries |= dict(rope_parameters=None, rope_theta=None)
    return entries


# --- tensors ------------------------------------------------------------------------------------------------

# {our name in a block: the name in transformers}, for parts that are not packed
QWEN3_5 = dict(output_gate='in_proj_z', write_gate='in_proj_b', decay_gate='in_proj_a', norm='norm', c_proj='out_proj')
QWEN3_NEXT = dict(norm='norm', c_proj='out_proj')
OLMO_HYBRID = dict(c_q='q_proj', c_k='k_proj', c_v='v_proj', output_gate='g_proj', write_gate='b_proj',
                   decay_gate='a_proj', norm='o_norm', c_proj='o_proj')
NORMS = dict(ln_1='attention_layer_norm', ln_2='feedforward_layer_norm')  # of OLMo
# transformers 5.24 reads these, and also writes them for blocks with attention, whose files have the other name.
OLMO_NORMS = (('.input_layernorm.', '.attention_layer_norm.'), ('.post_attention_layernorm.', '.feedforward_layer_norm.'))


def packed_rows(config, family):
    """{name of a packed matrix: ((our name, its rows), ...)} of a block's mixer."""
    G, K, V = config.delta_key_heads, config.delta_key_width, config.delta_value_width
    per_group = config.delta_heads // G

    def rows_of(*widths):
        """The rows of each part, where every key head has its part of each, one after the other."""
        rows = torch.arange(G * sum(widths)).view(G, -1).split(widths, dim=1)
        return [part.flatten() for part in rows]

    if family == 'qwen3_next':
        return dict(
            in_proj_qkvz=tuple(zip(('c_q', 'c_k', 'c_v', 'output_gate'), rows_of(K, K, per_group * V, per_group * V))),
            in_proj_ba=tuple(zip(('write_gate', 'decay_gate'), rows_of(per_group, per_group))))
    if family == 'qwen3_5_text':
        widths = G * K, G * K, config.delta_heads * V
        return dict(in_proj_qkv=tuple(zip(('c_q', 'c_k', 'c_v'), torch.arange(sum(widths)).split(widths))))
    return {}


def names_of(family):
    return dict(qwen3_next=QWEN3_NEXT, qwen3_5_text=QWEN3_5, olmo_hybrid=OLMO_HYBRID)[family]


def states_to_ours(tensors, config, family):
    """(tensors without those of mixers with a state, these under our names)."""
    found, tensors = {}, dict(tensors)
    if family == 'olmo_hybrid':
        tensors = _with_names_of_block(tensors, config)
    widths = [config.delta_key_heads * config.delta_key_width] * 2 + [config.delta_heads * config.delta_value_width]
    for layer in range(config.n_layer):
        if config.mixer_of(layer) != 'D':
            continue
        ours, theirs = f'transformer.h.{layer}.', f'model.layers.{layer}.'

        def take(name):
            name = f'{theirs}{name}'
            if name not in tensors:
                raise ValueError(f'{name} is missing: copy or download the weights again')
            return tensors.pop(name)

        for part, name in names_of(family).items():
            found[f'{ours}attn.{part}.weight'] = take(f'linear_attn.{name}.weight')
        for packed, parts in packed_rows(config, family).items():
            whole = take(f'linear_attn.{packed}.weight')
            for part, rows in parts:
                found[f'{ours}attn.{part}.weight'] = selected(whole, rows)
        found[f'{ours}attn.decay.log_rate'] = take('linear_attn.A_log')
        found[f'{ours}attn.decay.shift'] = take('linear_attn.dt_bias')
        if f'{theirs}linear_attn.q_conv1d.weight' in tensors:  # as OLMo's files have it
            # transformers 5.24 cuts the whole into three equal parts, where the parts are not equal.
            whole = joined([take(f'linear_attn.{part}_conv1d.weight') for part in 'qkv'])
        else:
            whole = take('linear_attn.conv1d.weight')
        factors = [selected(whole, rows) for rows in torch.arange(sum(widths)).split(widths)]
        for part, stored in zip('qkv', factors):
            found[f'{ours}attn.convolution.{part}_weight'] = _made_of(stored, lambda w: w[:, 0, -1])
            found[f'{ours}attn.convolution.{part}'] = _made_of(stored, lambda w: w[:, 0, :-1].flip(1).flatten())
        if family == 'olmo_hybrid':
            for part, name in NORMS.items():
                found[f'{ours}{part}.weight'] = take(f'{name}.weight')
    return tensors, found


def states_to_hf(tensors, config, family):
    """(tensors without those of mixers with a state, these under the names of transformers)."""
    found, tensors = {}, dict(tensors)
    for layer in range(config.n_layer):
        if config.mixer_of(layer) != 'D':
            continue
        ours, theirs = f'transformer.h.{layer}.', f'model.layers.{layer}.'
        for part, name in names_of(family).items():
            found[f'{theirs}linear_attn.{name}.weight'] = tensors.pop(f'{ours}attn.{part}.weight')
        for packed, parts in packed_rows(config, family).items():
            whole = joined([tensors.pop(f'{ours}attn.{part}.weight') for part, _ in parts])
            order = torch.cat([rows for _, rows in parts]).argsort()
            found[f'{theirs}linear_attn.{packed}.weight'] = selected(whole, order)
        found[f'{theirs}linear_attn.A_log'] = tensors.pop(f'{ours}attn.decay.log_rate')
        found[f'{theirs}linear_attn.dt_bias'] = tensors.pop(f'{ours}attn.decay.shift')
        factors = {}
        for part in 'qkv':
            before, own = (tensors.pop(f'{ours}attn.convolution.{part}{end}') for end in ('', '_weight'))
            factors[part] = _factors(before, own)
        if family == 'olmo_hybrid':
            for part, stored in factors.items():
                found[f'{theirs}linear_attn.{part}_conv1d.weight'] = stored
            for part, name in NORMS.items():
                found[f'{theirs}{name}.weight'] = tensors.pop(f'{ours}{part}.weight')
        else:
            found[f'{theirs}linear_attn.conv1d.weight'] = joined([*factors.values()])
    return tensors, found


def _with_names_of_block(tensors, config):
    """OLMo's norms under one name for each kind of block, whichever of OLMO_NORMS a file has."""
    found = {}
    for name, stored in tensors.items():
        layer = re.match(r'model\.layers\.(\d+)\.', name)
        for old, new in OLMO_NORMS if layer else ():
            if config.mixer_of(int(layer[1])) == 'A':
                old, new = new, old
            name = name.replace(old, new)
        found[name] = stored
    return found


def _made_of(stored, function):
    """function(whole tensor), whose dtype is the same. The shape is known without reading: the tensor is small."""
    shape = tuple(function(torch.empty(stored.shape, device='meta')).shape)
    return LazyTensor(shape, stored.dtype, lambda rows: function(stored.whole())[rows])


def _factors(before, own):
    """The weight (F, 1, n + 1) of a convolution in transformers, from our factors (F * n,) and (F,)."""
    def read(rows):
        return torch.cat((before.whole().view(F, -1).flip(1), own.whole()[:, None]), dim=1)[:, None][rows]
    F = own.shape[0]
    return LazyTensor((F, 1, before.shape[0] // F + 1), own.dtype, read)
