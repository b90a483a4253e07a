"""The entries and tensors of GGUF files in the form of transformers: its config.json and its names of tensors.

FAMILIES says for each model_type of transformers which architecture of llama.cpp the model is and how its
entries are called, for both directions. gguf_files.py reads and writes the files. The source for values that
differ between the two forms is convert_hf_to_gguf.py of llama.cpp.
"""
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
    ('attention.head_count', 'num_attention_heads', int), ('attention.layer_norm_epsilon', 'layer_norm_eps', float),
    ('use_parallel_residual', 'use_parallel_residual', bool))
LLAMA_ENTRIES = NEOX_ENTRIES[:5] + (
    ('attention.head_count_kv', 'num_key_value_heads', int), ('attention.key_length', 'head_dim', int),
    ('attention.layer_norm_rms_epsilon', 'rms_norm_eps', float))
EXPERT_ENTRIES = (('expert_used_count', 'num_experts_per_tok', int),)
SLIDING_ENTRIES = (('attention.sliding_window', 'sliding_window', int),
                   ('final_logit_softcapping', 'final_logit_softcapping', float))
# Keys of files that change nothing here, or that rope_from_gguf and head_width read.
OTHER_KEYS = ('vocab_size', 'attention.value_length', 'rope.dimension_count', 'rope.freq_base',
              'rope.freq_base_swa', 'rope.scaling.type', 'rope.scaling.factor', 'rope.scaling.attn_factor',
              'rope.scaling.original_context_length', 'rope.scaling.yarn_beta_fast', 'rope.scaling.yarn_beta_slow',
              'rope.scaling.finetuned', 'tensor_data_layout', 'expert_gating_func', 'nextn_predict_layers')

# Names of tensors without `weight` and `bias`. '*' is the number of an expert.
NORMS = ['input_layernorm', 'post_attention_layernorm', 'pre_feedforward_layernorm', 'post_feedforward_layernorm',
         'self_attn.q_norm', 'self_attn.k_norm']
ATTENTION = NORMS + ['self_attn.q_proj', 'self_attn.k_proj', 'self_attn.v_proj', 'self_attn.o_proj']
MLP = ['mlp.gate_proj', 'mlp.up_proj', 'mlp.down_proj']
EXPERTS = ['mlp.gate', 'mlp.experts.*.gate_proj', 'mlp.experts.*.up_proj', 'mlp.experts.*.down_proj']
SHARED_EXPERT = ['mlp.gate.e_score_correction', 'mlp.shared_experts.gate_proj', 'mlp.shared_experts.up_proj',
                 'mlp.shared_experts.down_proj']
MIXTRAL_EXPERTS = ['block_sparse_moe.gate', 'block_sparse_moe.experts.*.w1', 'block_sparse_moe.experts.*.w2',
                   'block_sparse_moe.experts.*.w3']

SILU = dict(hidden_act='silu')
WITHOUT_BIAS = dict(attention_bias=False)
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
    mixtral=LLAMA._replace(entries=LLAMA_ENTRIES + EXPERT_ENTRIES + (('expert_count', 'num_local_experts', int),),
                           parts=ATTENTION + MIXTRAL_EXPERTS, fixed=SILU | dict(sliding_window=None)),
    qwen2=Family('qwen2', LLAMA_ENTRIES, ATTENTION + MLP, SILU | dict(use_sliding_window=False)),
    qwen3=Family('qwen3', LLAMA_ENTRIES, ATTENTION + MLP, SILU | WITHOUT_BIAS | dict(use_sliding_window=False)),
    qwen3_moe=Family(
        'qwen3moe', LLAMA_ENTRIES + EXPERT_ENTRIES + (
            ('expert_count', 'num_experts', int), ('expert_feed_forward_length', 'moe_intermediate_size', int)),
        ATTENTION + EXPERTS,
        SILU | WITHOUT_BIAS | dict(use_sliding_window=False, norm_topk_prob=True, decoder_sparse_step=1,
                                   mlp_only_layers=[])),
    glm4_moe=Family(
        'glm4moe', LLAMA_ENTRIES + EXPERT_ENTRIES + (
            ('expert_count', 'n_routed_experts', int), ('expert_feed_forward_length', 'moe_intermediate_size', int),
            ('expert_shared_count', 'n_shared_experts', int),
            ('leading_dense_block_count', 'first_k_dense_replace', int),
            ('expert_weights_scale', 'routed_scaling_factor', float),
            ('expert_weights_norm', 'norm_topk_prob', bool),
            ('expert_group_count', 'n_group', int), ('expert_group_used_count', 'topk_group', int)),
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
        ('attention.scale', 'attention_multiplier', float), ('embedding_scale', 'embedding_multiplier', float),
        ('residual_scale', 'residual_multiplier', float), ('logit_scale', 'logits_scaling', float)),
        ATTENTION + MLP, SILU, is_permuted=True),
    smollm3=Family('smollm3', LLAMA_ENTRIES, ATTENTION + MLP, SILU | dict(use_sliding_window=False),
                   is_permuted=True),
    gpt2=Family('gpt2', GPT2_ENTRIES, ['ln_1', 'ln_2', 'attn.c_attn', 'attn.c_proj', 'mlp.c_fc', 'mlp.c_proj'],
                dict(scale_attn_weights=True, scale_attn_by_inverse_layer_idx=False), block='transformer.h.{}.',
                whole=('transformer.wte', 'transformer.wpe', 'transformer.ln_f', 'lm_head')),
    gpt_neox=Family('gptneox', NEOX_ENTRIES,
                    ['input_layernorm', 'post_attention_layernorm', 'attention.query_key_value', 'attention.dense',
                     'mlp.dense_h_to_4h', 'mlp.dense_4h_to_h'], dict(hidden_act='gelu', attention_bias=True),
                    block='gpt_neox.layers.{}.', partial_key='rotary_pct',
                    whole=('gpt_neox.embed_in', 'gpt_neox.final_layer_norm', 'embed_out')))
# (factor, low_freq_factor, high_freq_factor, original_max_position_embeddings) of Llama 3.1, 3.2 and 3.3
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


def count_heads(theirs):
    return theirs['n_head'] if theirs['model_type'] == 'gpt2' else theirs['num_attention_heads']


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
    known = known_entries(theirs)
    if theirs['model_type'] != 'gpt2':
        known['layer_types'] = expected_layer_types(theirs)
    defaults = dict(norm_topk_prob=False) if theirs['model_type'] == 'qwen3_moe' else {}
    for key, value in known.items():
        found = theirs.get(key, defaults.get(key, value))
        if found != value and not (found is None and key in ('layer_types', 'mlp_only_layers', 'no_rope_layers')):
            raise ValueError(f'a GGUF file of {theirs["model_type"]} cannot represent {key}={found!r}: '
                             f'llama.cpp knows only {key}={value!r}')
    theirs = dict(theirs)
    found = {}
    if theirs['model_type'] == 'gpt2':
        theirs['n_inner'] = theirs.get('n_inner') or 4 * theirs['n_embd']
        activation = theirs.get('activation_function', 'gelu_new')
        if activation not in ('gelu_new', 'gelu_pytorch_tanh', 'gelu'):
            raise ValueError(f'a GGUF file of gpt2 cannot represent activation_function={activation!r}: '
                             'llama.cpp knows only GELU')
        if activation == 'gelu':  # llama.cpp computes GELU by tanh, and our own reader finds this entry
            found['kilogpt.activation_function'] = activation
    else:
        theirs['num_key_value_heads'] = theirs.get('num_key_value_heads') or theirs['num_attention_heads']
        theirs['head_dim'] = head_width(theirs)
        if 'num_local_experts' in theirs:  # what version 5 of transformers writes for every mixture
            theirs |= dict.fromkeys(('num_experts', 'n_routed_experts'), theirs['num_local_experts'])
        found |= rope_to_gguf(theirs)
    for key, entry, kind in family.entries:
        if theirs.get(entry) is not None:
            found[f'{family.arch}.{key}'] = kind(theirs[entry])
    if 'attention.key_length' in dict.fromkeys(key for key, _, _ in family.entries):
        found[f'{family.arch}.attention.value_length'] = theirs['head_dim']
    if family.arch == 'phi3':  # 0 is llama.cpp's sign of a model without a window
        found.setdefault('phi3.attention.sliding_window', 0)
    if family.arch == 'glm4moe':
        found['glm4moe.expert_gating_func'] = 2  # sigmoid
    found[f'{family.arch}.vocab_size'] = theirs['vocab_size']
    return found


def rope_of(theirs):
    """The entries that describe RoPE, as one dict. Version 5 of transformers keeps them in rope_parameters."""
    parameters = theirs.get('rope_parameters') or {}
    rope = dict(theirs.get('rope_scaling') or {}) | parameters.get('full_attention', parameters)
    rope['rope_type'] = rope.get('rope_type', rope.pop('type', 'default'))
    base = theirs.get('rope_theta', theirs.get('rotary_emb_base', 10000.0))
    rope['rope_theta'] = float(rope.get('rope_theta') or base)
    local = parameters.get('sliding_attention', {}).get('rope_theta', theirs.get('rope_local_base_freq'))
    share = rope.get('partial_rotary_factor')
    if share is None:
        default = dict(glm4_moe=0.5, gpt_neox=0.25).get(theirs['model_type'], 1.0)
        share = theirs.get(find_family(theirs).partial_key or 'partial_rotary_factor', default)
    rope['partial_rotary_factor'] = share
    original = theirs.get('original_max_position_embeddings')
    if original and rope['rope_type'] != 'default':
        rope.setdefault('original_max_position_embeddings', original)
    return rope, local


def rope_to_gguf(theirs):
    arch = find_family(theirs).arch
    rope, local = rope_of(theirs)
    kind, scaling = rope['rope_type'], f'{arch}.rope.scaling'
    width = theirs['head_dim']
    found = {f'{arch}.rope.dimension_count': int(rope['partial_rotary_factor'] * width),
             f'{arch}.rope.freq_base': rope['rope_theta']}
    if arch == 'gemma3' and local:
        found['gemma3.rope.freq_base_swa'] = float(local)
    known = {'rope_type', 'rope_theta', 'partial_rotary_factor', 'factor', 'original_max_position_embeddings'}
    if kind in ('linear', 'yarn'):
        found |= {f'{scaling}.type': kind, f'{scaling}.factor': float(rope['factor'])}
    if kind == 'yarn':
        known |= {'beta_fast', 'beta_slow'}
        found[f'{scaling}.original_context_length'] = int(rope['original_max_position_embeddings'])
        for key in ('beta_fast', 'beta_slow'):
            if rope.get(key) is not None:
                found[f'{scaling}.yarn_{key}'] = float(rope[key])
    elif kind == 'llama3':  # the tensor rope_freqs.weight
        known |= {'low_freq_factor', 'high_freq_factor'}
    elif kind == 'longrope' and arch == 'phi3':  # the tensors rope_factors_long.weight and _short.weight
        known |= {'long_factor', 'short_factor'}
        original = int(rope['original_max_position_embeddings'])
        growth = theirs['max_position_embeddings'] / original
        factor = float(np.sqrt(1 + np.log(growth) / np.log(original))) if growth > 1 else 1.0
        found |= {f'{scaling}.type': kind, f'{scaling}.original_context_length': original,
                  f'{scaling}.attn_factor': factor}
    unknown = {key: value for key, value in rope.items() if key not in known and value is not None}
    if kind not in ('default', 'linear', 'yarn', 'llama3', 'longrope') or (kind, arch != 'phi3') == (
            'longrope', True) or unknown:
        raise ValueError(f'a GGUF file of {theirs["model_type"]} cannot represent the RoPE scaling '
                         f'{unknown or kind!r} of config.json')
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
    """config.json's entries from {key: value} and {name: Stored} of a file. ValueError for unknown models."""
    arch = metadata.get('general.architecture')
    kinds = {}
    for kind, family in FAMILIES.items():
        kinds.setdefault(family.arch, kind)
    if arch not in kinds:
        raise ValueError(f'its architecture is {arch!r}, but only {", ".join(kinds)} are supported')
    kind = 'mixtral' if arch == 'llama' and metadata.get('llama.expert_count') else kinds[arch]
    family = FAMILIES[kind]
    own = {key.removeprefix(f'{arch}.'): value for key, value in metadata.items() if key.startswith(f'{arch}.')}
    read = {key for key, _, _ in family.entries}
    unknown = {key: value for key, value in own.items() if key not in read and key not in OTHER_KEYS}
    unknown |= {key: value for key, value in own.items() if isinstance(value, list)}
    if unknown := {key: value for key, value in unknown.items() if value not in (0, False)}:
        raise ValueError('its metadata has ' + ', '.join(f'{arch}.{key}={value}' for key, value in unknown.items())
                         + f', which no {kind} of transformers has')
    theirs = dict(model_type=kind, vocab_size=tensors['token_embd.weight'].shape[0],
                  tie_word_embeddings='output.weight' not in tensors)
    for key, entry, kind_of_value in family.entries:
        if key in own:
            theirs[entry] = shortest(own[key]) if kind_of_value is float else kind_of_value(own[key])
    missing = [f'{arch}.{key}' for key, entry, _ in family.entries[:5] if entry not in theirs]
    if missing:
        raise ValueError(f'its metadata lacks {", ".join(missing)}')
    if kind == 'gpt2':
        activation = metadata.get('kilogpt.activation_function', 'gelu_new')
        return theirs | family.fixed | dict(n_ctx=theirs['n_positions'], activation_function=activation)
    if family.entries is not NEOX_ENTRIES:
        theirs.setdefault('num_key_value_heads', theirs['num_attention_heads'])
        theirs.setdefault('head_dim', head_width(theirs))
        if own.get('attention.value_length', theirs['head_dim']) != theirs['head_dim']:
            raise ValueError(f'its {arch}.attention.value_length is {own["attention.value_length"]}, '
                             f'but its key_length is {theirs["head_dim"]}')
    theirs['num_hidden_layers'] -= own.get('nextn_predict_layers', 0)  # transformers does not run these blocks
    if family.arch == 'phi3':
        theirs['sliding_window'] = theirs.get('sliding_window') or None
    if 'attention_bias' not in family.fixed and kind not in ('qwen2', 'phi3'):
        theirs['attention_bias'] = 'blk.0.attn_q.bias' in tensors
    if kind in ('llama', 'mixtral', 'granite', 'smollm3'):
        theirs['mlp_bias'] = 'blk.0.ffn_up.bias' in tensors
    if kind == 'glm4_moe':
        theirs['use_qk_norm'] = 'blk.0.attn_q_norm.weight' in tensors
    return theirs | known_entries(theirs) | rope_from_gguf(theirs, own, tensors)


def rope_from_gguf(theirs, own, tensors):
    family = find_family(theirs)
    width = head_width(theirs)
    theta = shortest(own.get('rope.freq_base', 10000.0))
    found = dict(rope_theta=theta)
    share = own.get('rope.dimension_count', width) / width
    if family.partial_key:
        found[family.partial_key] = share
    elif share != 1:
        raise ValueError(f'it rotates {own["rope.dimension_count"]} dimensions of heads of {width}, '
                         f'which no {theirs["model_type"]} of transformers does')
    if family.arch == 'gptneox':
        found['rotary_emb_base'] = theta
    if family.arch == 'gemma3':
        found['rope_local_base_freq'] = shortest(own.get('rope.freq_base_swa', 10000.0))
    kind = own.get('rope.scaling.type', 'linear' if 'rope.scaling.factor' in own else 'none')
    original = own.get('rope.scaling.original_context_length')
    if 'rope_freqs.weight' in tensors:
        factors = tensors['rope_freqs.weight'].whole()
        for scaling in LLAMA3_SCALINGS:
            if torch.allclose(factors, llama3_factors(theta, width, *scaling), rtol=1e-4, atol=0):
                keys = 'factor', 'low_freq_factor', 'high_freq_factor', 'original_max_position_embeddings'
                return found | dict(rope_scaling=dict(rope_type='llama3', **dict(zip(keys, scaling))))
        raise ValueError('its rope_freqs.weight is not the scaling of Llama 3.1 (factor 8) or 3.2 (factor 32), '
                         'and the numbers of another scaling cannot be computed from it')
    if kind == 'longrope':
        scaling = dict(rope_type=kind, original_max_position_embeddings=original)
        for name in ('long', 'short'):
            values = tensors[f'rope_factors_{name}.weight'].whole().tolist()
            scaling[f'{name}_factor'] = [shortest(value) for value in values]
        return found | dict(rope_scaling=scaling, original_max_position_embeddings=original)
    if kind == 'none' or own.get('rope.scaling.factor', 1.0) == 1.0:
        if original and family.arch == 'phi3':
            found['original_max_position_embeddings'] = original
        return found
    scaling = dict(rope_type=kind, factor=shortest(own['rope.scaling.factor']))
    if kind == 'yarn':
        scaling['original_max_position_embeddings'] = original
        for key in ('beta_fast', 'beta_slow'):
            if f'rope.scaling.yarn_{key}' in own:
                scaling[key] = shortest(own[f'rope.scaling.yarn_{key}'])
    elif kind != 'linear':
        raise ValueError(f'its RoPE scaling {kind!r} is not linear, yarn or longrope')
    return found | dict(rope_scaling=scaling)
