"""The metadata of GGUF files as the entries of a config.json of transformers, and the inverse.

FAMILIES says for each model_type of transformers which architecture of llama.cpp the model is and how its
entries are called, for both directions. files.py reads and writes the files. The source for values that
differ between the two forms is convert_hf_to_gguf.py of llama.cpp.
"""
import math
from typing import NamedTuple

import numpy as np
import torch

# (key in the file after the architecture, entry of config.json, type)
GPT2_ENTRIES = (
    ('context_length', 'n_positions', int), ('embedding_length', 'n_embd', int),
    ('block_count', 'n_layer', int), ('feed_forward_length', 'n_inner', int),
    ('attention.head_count', 'n_head', int), ('attention.layer_norm_epsilon', 'layer_norm_epsilon', float))
NEOX_ENTRIES = (
    ('context_length', 'max_position_embeddings', int), ('embedding_length', 'hidden_size', int),
    ('block_count', 'num_hidden_layers', int), ('feed_forward_length', 'intermediate_size', int),
    ('attention.head_count', 'num_attention_heads', int),
    ('attention.layer_norm_epsilon', 'layer_norm_eps', float),
    ('use_parallel_residual', 'use_parallel_residual', bool))
LLAMA_ENTRIES = NEOX_ENTRIES[:5] + (
    ('attention.head_count_kv', 'num_key_value_heads', int), ('attention.key_length', 'head_dim', int),
    ('attention.layer_norm_rms_epsilon', 'rms_norm_eps', float))
ACTIVE_ENTRIES = (('expert_used_count', 'num_experts_per_tok', int),)
EXPERT_ENTRIES = ACTIVE_ENTRIES + (('expert_feed_forward_length', 'moe_intermediate_size', int),)
GROUP_ENTRIES = (('expert_group_count', 'n_group', int), ('expert_group_used_count', 'topk_group', int))
SLIDING_ENTRIES = (('attention.sliding_window', 'sliding_window', int),
                   ('final_logit_softcapping', 'final_logit_softcapping', float))
# Keys of files that change nothing here, or that rope_from_gguf and head_width read.
OTHER_KEYS = ('vocab_size', 'attention.value_length', 'rope.dimension_count', 'rope.freq_base',
              'rope.freq_base_swa', 'rope.scaling.type', 'rope.scaling.factor', 'rope.scaling.attn_factor',
              'rope.scaling.original_context_length', 'rope.scaling.yarn_beta_fast',
              'rope.scaling.yarn_beta_slow', 'rope.scaling.finetuned', 'tensor_data_layout',
              'expert_gating_func', 'nextn_predict_layers')

# Names of tensors without `weight` and `bias`. '*' is the number of an expert.
NORMS = ['input_layernorm', 'post_attention_layernorm', 'pre_feedforward_layernorm',
         'post_feedforward_layernorm', 'self_attn.q_norm', 'self_attn.k_norm']
ATTENTION = NORMS + ['self_attn.q_proj', 'self_attn.k_proj', 'self_attn.v_proj', 'self_attn.o_proj']
MLP = ['mlp.gate_proj', 'mlp.up_proj', 'mlp.down_proj']
EXPERTS = ['mlp.gate', 'mlp.experts.*.gate_proj', 'mlp.experts.*.up_proj', 'mlp.experts.*.down_proj']
SHARED_EXPERT = ['mlp.gate.e_score_correction', 'mlp.shared_experts.gate_proj', 'mlp.shared_experts.up_proj',
                 'mlp.shared_experts.down_proj']
MIXTRAL_EXPERTS = ['block_sparse_moe.gate', 'block_sparse_moe.experts.*.w1', 'block_sparse_moe.experts.*.w2',
                   'block_sparse_moe.experts.*.w3']

SILU = dict(hidden_act='silu')
WITHOUT_BIAS = dict(attention_bias=False)
QWEN = SILU | dict(use_sliding_window=False)
GEMMA = WITHOUT_BIAS | dict(hidden_activation='gelu_pytorch_tanh')


class Family(NamedTuple):
    """How llama.cpp represents a model_type of transformers."""
    arch: str
    entries: tuple
    parts: list  # names of the tensors of a block
    fixed: dict  # entries that llama.cpp does not read, since it knows only these values
    is_permuted: bool = False  # whether rows of queries and keys have llama.cpp's order of RoPE's pairs
    norm_offset: int = 0  # what is added to the weights of norms
    block: str = 'model.layers.{}.'
    whole: tuple = ('model.embed_tokens', 'model.norm', 'lm_head')
    partial_key: str = ''  # entry with the share of a head's width that is rotated, if not all is


LLAMA = Family('llama', LLAMA_ENTRIES, ATTENTION + MLP, SILU, is_permuted=True)
FAMILIES = dict(
    llama=LLAMA,
    mistral=LLAMA._replace(fixed=SILU | dict(sliding_window=None)),
    mixtral=LLAMA._replace(
        entries=LLAMA_ENTRIES + ACTIVE_ENTRIES + (('expert_count', 'num_local_experts', int),),
        parts=ATTENTION + MIXTRAL_EXPERTS, fixed=SILU | dict(sliding_window=None)),
    qwen2=Family('qwen2', LLAMA_ENTRIES, ATTENTION + MLP, QWEN),
    qwen3=Family('qwen3', LLAMA_ENTRIES, ATTENTION + MLP, QWEN | WITHOUT_BIAS),
    qwen3_moe=Family(
        'qwen3moe', LLAMA_ENTRIES + EXPERT_ENTRIES + (('expert_count', 'num_experts', int),),
        ATTENTION + EXPERTS,
        QWEN | WITHOUT_BIAS | dict(norm_topk_prob=True, decoder_sparse_step=1, mlp_only_layers=[])),
    glm4_moe=Family(
        'glm4moe', LLAMA_ENTRIES + EXPERT_ENTRIES + GROUP_ENTRIES + (
            ('expert_count', 'n_routed_experts', int), ('expert_shared_count', 'n_shared_experts', int),
            ('leading_dense_block_count', 'first_k_dense_replace', int),
            ('expert_weights_scale', 'routed_scaling_factor', float),
            ('expert_weights_norm', 'norm_topk_prob', bool)),
        ATTENTION + MLP + EXPERTS + SHARED_EXPERT, SILU, partial_key='partial_rotary_factor'),
    phi3=Family('phi3', LLAMA_ENTRIES + SLIDING_ENTRIES[:1],
                NORMS + ['self_attn.qkv_proj', 'self_attn.o_proj', 'mlp.gate_up_proj', 'mlp.down_proj'], SILU,
                partial_key='partial_rotary_factor'),
    gemma2=Family('gemma2', LLAMA_ENTRIES + SLIDING_ENTRIES + (
        ('attn_logit_softcapping', 'attn_logit_softcapping', float),), ATTENTION + MLP, GEMMA, norm_offset=1),
    gemma3_text=Family('gemma3', LLAMA_ENTRIES + SLIDING_ENTRIES, ATTENTION + MLP,
                       GEMMA | dict(attn_logit_softcapping=None), norm_offset=1),
    olmo2=Family('olmo2', LLAMA_ENTRIES, ATTENTION + MLP, SILU | WITHOUT_BIAS),
    granite=Family('granite', LLAMA_ENTRIES + (
        ('attention.scale', 'attention_multiplier', float),
        ('embedding_scale', 'embedding_multiplier', float),
        ('residual_scale', 'residual_multiplier', float), ('logit_scale', 'logits_scaling', float)),
        ATTENTION + MLP, SILU, is_permuted=True),
    smollm3=Family('smollm3', LLAMA_ENTRIES, ATTENTION + MLP, QWEN, is_permuted=True),
    gpt2=Family(
        'gpt2', GPT2_ENTRIES, ['ln_1', 'ln_2', 'attn.c_attn', 'attn.c_proj', 'mlp.c_fc', 'mlp.c_proj'],
        dict(scale_attn_weights=True, scale_attn_by_inverse_layer_idx=False), block='transformer.h.{}.',
        whole=('transformer.wte', 'transformer.wpe', 'transformer.ln_f', 'lm_head')),
    gpt_neox=Family(
        'gptneox', NEOX_ENTRIES,
        ['input_layernorm', 'post_attention_layernorm', 'attention.query_key_value', 'attention.dense',
         'mlp.dense_h_to_4h', 'mlp.dense_4h_to_h'],
        dict(hidden_act='gelu', attention_bias=True), block='gpt_neox.layers.{}.', partial_key='rotary_pct',
        whole=('gpt_neox.embed_in', 'gpt_neox.final_layer_norm', 'embed_out')))
GELUS = 'gelu_new', 'gelu_pytorch_tanh', 'gelu'
ROPE_ENTRIES = ('rope_type', 'rope_theta', 'partial_rotary_factor', 'factor', 'beta_fast', 'beta_slow',
                'original_max_position_embeddings', 'low_freq_factor', 'high_freq_factor', 'long_factor',
                'short_factor')
SIGMOID = 2  # expert_gating_func
# The numbers of Llama 3.1, 3.2 and 3.3.
LLAMA3_ENTRIES = 'factor', 'low_freq_factor', 'high_freq_factor', 'original_max_position_embeddings'
LLAMA3_SCALINGS = ((8.0, 1.0, 4.0, 8192), (32.0, 1.0, 4.0, 8192))


def find_family(theirs):
    """The Family of config.json's entries. ValueError for others."""
    kind = theirs.get('model_type')
    if kind not in FAMILIES:
        raise ValueError(f'a GGUF file of model_type {kind!r} is not supported: choose a model of '
                         f'{", ".join(FAMILIES)}')
    return FAMILIES[kind]


def count_blocks(theirs):
    return theirs['n_layer'] if theirs['model_type'] == 'gpt2' else theirs['num_hidden_layers']


def head_width(theirs):
    return theirs.get('head_dim') or theirs['hidden_size'] // theirs['num_attention_heads']


def expected_layer_types(theirs):
    """The attention of each block in llama.cpp, which knows the order of each architecture."""
    period = dict(gemma2=2, gemma3_text=6).get(theirs['model_type'], 1)
    blocks = range(1, theirs['num_hidden_layers'] + 1)
    return ['full_attention' if block % period == 0 else 'sliding_attention' for block in blocks]


def expected_scalar(theirs):
    """The query_pre_attn_scalar of a Gemma in llama.cpp, which knows the largest models by their blocks."""
    if (theirs['model_type'], theirs['num_hidden_layers']) in (('gemma2', 46), ('gemma3_text', 62)):
        return theirs['hidden_size'] // theirs['num_attention_heads']
    return head_width(theirs)


def known_entries(theirs):
    """{entry: value} that llama.cpp does not read from a file, because it knows only this value."""
    known = dict(find_family(theirs).fixed)
    kind = theirs['model_type']
    if kind in ('gemma2', 'gemma3_text'):
        known |= dict(layer_types=expected_layer_types(theirs), query_pre_attn_scalar=expected_scalar(theirs))
    if kind == 'smollm3':
        known['no_rope_layers'] = [int((block + 1) % 4 != 0) for block in range(theirs['num_hidden_layers'])]
    return known


# --- to a file ----------------------------------------------------------------------------------------------

def entries_to_gguf(theirs):
    """{key of a GGUF file: value} of config.json's entries. ValueError if llama.cpp cannot represent them."""
    family = find_family(theirs)
    theirs = complete(theirs)
    check_known_entries(theirs)
    found = {} if family.arch == 'gpt2' else rope_to_gguf(theirs)
    for key, entry, kind in family.entries:
        if theirs.get(entry) is not None:
            found[f'{family.arch}.{key}'] = kind(theirs[entry])
    if f'{family.arch}.attention.key_length' in found:
        found[f'{family.arch}.attention.value_length'] = theirs['head_dim']
    if theirs.get('activation_function') == 'gelu':
        # llama.cpp computes GELU by its approximation with tanh, and our own reader finds the exact one here.
        found['kilogpt.activation_function'] = 'gelu'
    if family.arch == 'phi3':  # 0 is llama.cpp's sign of a model without a window
        found.setdefault('phi3.attention.sliding_window', 0)
    if family.arch == 'glm4moe':
        found['glm4moe.expert_gating_func'] = SIGMOID
    found[f'{family.arch}.vocab_size'] = theirs['vocab_size']
    return found


def complete(theirs):
    """config.json's entries with those that files may leave out, or call by another name."""
    theirs = dict(theirs)
    if theirs['model_type'] == 'gpt2':
        theirs['n_inner'] = theirs.get('n_inner') or 4 * theirs['n_embd']
    else:
        theirs['num_key_value_heads'] = theirs.get('num_key_value_heads') or theirs['num_attention_heads']
        theirs['head_dim'] = head_width(theirs)
    if 'num_local_experts' in theirs:  # what version 5 of transformers writes for every mixture
        theirs |= dict.fromkeys(('num_experts', 'n_routed_experts'), theirs['num_local_experts'])
    return theirs


def check_known_entries(theirs):
    """Raise a ValueError for a value that llama.cpp does not read, and that differs from the one it knows."""
    kind = theirs['model_type']
    known = known_entries(theirs)
    softcaps = [theirs.get(f'{place}_logit_softcapping') for place in ('attn', 'final')]
    if kind == 'gemma2' and None in softcaps:
        raise ValueError('a GGUF file of gemma2 needs attn_logit_softcapping and final_logit_softcapping in '
                         'config.json, since llama.cpp takes 50 and 30 without them')
    if kind == 'gpt2':
        known['activation_function'] = 'gelu_new'
    else:
        known['layer_types'] = expected_layer_types(theirs)
    for key, value in known.items():
        # These entries of transformers have a default that is another one, or that follows from others.
        default = False if key == 'norm_topk_prob' else value
        found = theirs.get(key, default)
        if found is None and key in ('layer_types', 'mlp_only_layers', 'no_rope_layers'):
            continue
        if found != value and not (key == 'activation_function' and found in GELUS):
            raise ValueError(f'a GGUF file of {kind} cannot represent {key}={found!r}: llama.cpp knows only '
                             f'{key}={value!r}')


def rope_of(theirs):
    """(the entries that describe RoPE, the base of blocks with a sliding window or None).

    Version 5 of transformers keeps them in rope_parameters, and earlier ones in several entries.
    """
    parameters = theirs.get('rope_parameters') or {}
    rope = dict(theirs.get('rope_scaling') or {}) | parameters.get('full_attention', parameters)
    rope['rope_type'] = rope.get('rope_type', rope.pop('type', 'default'))
    base = theirs.get('rope_theta', theirs.get('rotary_emb_base', 10000.0))
    rope['rope_theta'] = float(rope.get('rope_theta') or base)
    local = parameters.get('sliding_attention', {}).get('rope_theta', theirs.get('rope_local_base_freq'))
    if rope.get('partial_rotary_factor') is None:
        default = dict(glm4_moe=0.5, gpt_neox=0.25).get(theirs['model_type'], 1.0)
        key = find_family(theirs).partial_key or 'partial_rotary_factor'
        rope['partial_rotary_factor'] = theirs.get(key, default)
    original = theirs.get('original_max_position_embeddings')
    if original and rope['rope_type'] != 'default':
        rope.setdefault('original_max_position_embeddings', original)
    return rope, local


def rope_to_gguf(theirs):
    arch = find_family(theirs).arch
    rope, local = rope_of(theirs)
    kind, scaling = rope['rope_type'], f'{arch}.rope.scaling'
    kinds = ('default', 'linear', 'yarn', 'llama3') + (('longrope',) if arch == 'phi3' else ())
    unknown = {key: value for key, value in rope.items() if key not in ROPE_ENTRIES and value is not None}
    if kind not in kinds or unknown:
        raise ValueError(f'a GGUF file of {theirs["model_type"]} cannot represent the RoPE scaling '
                         f'{unknown or kind!r} of config.json')
    found = {f'{arch}.rope.dimension_count': int(rope['partial_rotary_factor'] * theirs['head_dim']),
             f'{arch}.rope.freq_base': rope['rope_theta']}
    if arch == 'gemma3' and local:
        found['gemma3.rope.freq_base_swa'] = float(local)
    if kind in ('linear', 'yarn'):  # llama3 and longrope are tensors
        found |= {f'{scaling}.type': kind, f'{scaling}.factor': float(rope['factor'])}
    if kind == 'yarn':
        found[f'{scaling}.original_context_length'] = int(rope['original_max_position_embeddings'])
        for key in ('beta_fast', 'beta_slow'):
            if rope.get(key) is not None:
                found[f'{scaling}.yarn_{key}'] = float(rope[key])
    if kind == 'longrope':
        original = int(rope['original_max_position_embeddings'])
        growth = theirs['max_position_embeddings'] / original
        factor = math.sqrt(1 + math.log(growth) / math.log(original)) if growth > 1 else 1.0
        found |= {f'{scaling}.type': kind, f'{scaling}.original_context_length': original,
                  f'{scaling}.attn_factor': factor}
    return found


def llama3_factors(theta, width, factor, low, high, original):
    """What divides each frequency in Llama 3's scaling (llama.cpp: generate_extra_tensors of LlamaModel)."""
    frequencies = theta ** -(torch.arange(0, width, 2, dtype=torch.float64) / width)
    turns = original * frequencies / (2 * torch.pi)  # how often a pair of dimensions turns in a context
    smooth = ((turns - low) / (high - low)).clamp(0, 1)
    return (1 / ((1 - smooth) / factor + smooth)).float()


# --- from a file --------------------------------------------------------------------------------------------

def shortest(value):
    """The number with the fewest digits that float32 stores as this value: 1e-05 for 9.9999997e-06."""
    return float(str(np.float32(value)))


def entries_from_gguf(metadata, tensors):
    """config.json's entries from {key: value} and {name: LazyTensor} of a file. ValueError for unknown models."""
    kind = find_kind(metadata)
    family = FAMILIES[kind]
    prefix = metadata['general.architecture'] + '.'
    own = {key.removeprefix(prefix): value for key, value in metadata.items() if key.startswith(prefix)}
    check_keys(family, own)
    theirs = dict(model_type=kind, vocab_size=tensors['token_embd.weight'].shape[0],
                  tie_word_embeddings='output.weight' not in tensors)
    for key, entry, kind_of_value in family.entries:
        if key in own:
            theirs[entry] = shortest(own[key]) if kind_of_value is float else kind_of_value(own[key])
    if kind == 'gpt2':
        activation = metadata.get('kilogpt.activation_function', 'gelu_new')
        return theirs | family.fixed | dict(n_ctx=theirs['n_positions'], activation_function=activation)
    if kind != 'gpt_neox':
        theirs.setdefault('num_key_value_heads', theirs['num_attention_heads'])
        theirs.setdefault('head_dim', head_width(theirs))
        value_width = own.get('attention.value_length', theirs['head_dim'])
        if value_width != theirs['head_dim']:
            raise ValueError(f'its heads have keys of {theirs["head_dim"]} and values of {value_width} '
                             f'numbers, which no {kind} of transformers has')
    # transformers does not run the blocks that predict the token after the next.
    theirs['num_hidden_layers'] -= own.get('nextn_predict_layers', 0)
    if kind == 'gemma2':  # what llama.cpp takes without these keys
        defaults = dict(sliding_window=4096, attn_logit_softcapping=50.0, final_logit_softcapping=30.0)
        theirs = defaults | theirs
    if kind == 'granite':
        theirs.setdefault('attention_multiplier', head_width(theirs) ** -0.5)  # transformers would take 1
    if kind == 'phi3':
        theirs['sliding_window'] = theirs.get('sliding_window') or None
    if kind in ('llama', 'mixtral', 'granite', 'smollm3', 'glm4_moe'):
        theirs |= dict(attention_bias='blk.0.attn_q.bias' in tensors, mlp_bias='blk.0.ffn_up.bias' in tensors)
    if kind == 'glm4_moe':
        theirs.setdefault('norm_topk_prob', False)  # transformers would take True
        if own.get('expert_gating_func', SIGMOID) != SIGMOID:
            raise ValueError(f'its expert_gating_func is {own["expert_gating_func"]}, but a {kind} of transformers has '
                             f'sigmoids ({SIGMOID})')
        theirs['use_qk_norm'] = 'blk.0.attn_q_norm.weight' in tensors
    return theirs | known_entries(theirs) | rope_from_gguf(theirs, own, tensors)


def find_kind(metadata):
    """The model_type of transformers. ValueError for an architecture that FAMILIES does not have."""
    kinds = {}
    for kind, family in FAMILIES.items():
        kinds.setdefault(family.arch, kind)
    arch = metadata.get('general.architecture')
    if arch not in kinds:
        raise ValueError(f'its architecture is {arch!r}, but only {", ".join(kinds)} are supported')
    return 'mixtral' if metadata.get('llama.expert_count') else kinds[arch]


def check_keys(family, own):
    """Raise a ValueError if a file's keys of its architecture, `own`, lack some or mean another model."""
    read = {key for key, _, _ in family.entries}
    unknown = {key: value for key, value in own.items() if key not in read and key not in OTHER_KEYS}
    unknown |= {key: value for key, value in own.items() if isinstance(value, list)}
    unknown = [f'{family.arch}.{key}={value}' for key, value in unknown.items() if value not in (0, False)]
    if unknown:
        raise ValueError(f'its metadata has {", ".join(unknown)}, which no {family.arch} of transformers has')
    required = [key for key, _, _ in family.entries[:5]]
    if family.arch == 'gemma3':  # without it llama.cpp gives no block a window
        required.append('attention.sliding_window')
    missing = [f'{family.arch}.{key}' for key in required if key not in own]
    if missing:
        raise ValueError(f'its metadata lacks {", ".join(missing)}')


def rope_from_gguf(theirs, own, tensors):
    family = find_family(theirs)
    width = head_width(theirs)
    theta = shortest(own.get('rope.freq_base', 10000.0))
    found = dict(rope_theta=theta)
    rotated = own.get('rope.dimension_count', width)
    if family.partial_key:
        found[family.partial_key] = rotated / width
    elif rotated != width:
        raise ValueError(f'it rotates {rotated} dimensions of heads of {width}, which no '
                         f'{theirs["model_type"]} of transformers does')
    if family.arch == 'gptneox':
        found['rotary_emb_base'] = theta
    if family.arch == 'gemma3':
        found['rope_local_base_freq'] = shortest(own.get('rope.freq_base_swa', 10000.0))
    if family.arch == 'phi3' and 'rope.scaling.original_context_length' in own:
        found['original_max_position_embeddings'] = own['rope.scaling.original_context_length']
    scaling = scaling_from_gguf(own, tensors, theta, width)
    return found | dict(rope_scaling=scaling) if scaling else found


def scaling_from_gguf(own, tensors, theta, width):
    """config.json's rope_scaling, or None for a model without one."""
    if 'rope_freqs.weight' in tensors:
        factors = tensors['rope_freqs.weight'].whole()
        for numbers in LLAMA3_SCALINGS:
            expected = llama3_factors(theta, width, *numbers)
            if factors.shape == expected.shape and torch.allclose(factors, expected, rtol=1e-4, atol=0):
                return dict(zip(LLAMA3_ENTRIES, numbers), rope_type='llama3')
        raise ValueError('its rope_freqs.weight is not the scaling of Llama 3.1 (factor 8) or 3.2 (factor '
                         '32), and the numbers of another scaling cannot be computed from it')
    kind = own.get('rope.scaling.type', 'linear')
    original = own.get('rope.scaling.original_context_length')
    if kind == 'longrope':
        factors = {}
        for name in ('long', 'short'):
            values = tensors[f'rope_factors_{name}.weight'].whole().tolist()
            factors[f'{name}_factor'] = [shortest(value) for value in values]
        return dict(rope_type=kind, original_max_position_embeddings=original, **factors)
    if 'rope_factors_long.weight' in tensors:
        raise ValueError(f'it has rope_factors_long.weight, but its rope.scaling.type is {kind!r}, and not longrope')
    factor = own.get('rope.scaling.factor', 1.0)
    if kind == 'none' or factor == 1.0:
        return None
    scaling = dict(rope_type=kind, factor=shortest(factor))
    if kind == 'yarn':
        scaling['original_max_position_embeddings'] = original
        for key in ('beta_fast', 'beta_slow'):
            if f'rope.scaling.yarn_{key}' in own:
                scaling[key] = shortest(own[f'rope.scaling.yarn_{key}'])
    elif kind != 'linear':
        raise ValueError(f'its RoPE scaling {kind!r} is not linear, yarn or longrope')
    return scaling
