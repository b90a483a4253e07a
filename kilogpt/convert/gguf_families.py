"""The metadata of GGUF files as the entries of a config.json of transformers, and the inverse.

FAMILIES says for each model_type of transformers which architecture of llama.cpp the model is and how its
entries are called, for both directions. gguf_files.py reads and writes the files. The source for values that
differ between the two forms is convert_hf_to_gguf.py of llama.cpp.
"""
import math
from typing import NamedTuple

import numpy as np
import torch

from kilogpt.convert.tensors import have_same_values

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
SHARED_ENTRIES = (('expert_shared_feed_forward_length', 'shared_expert_intermediate_size', int),)
DELTA_ENTRIES = (
    ('ssm.conv_kernel', 'linear_conv_kernel_dim', int), ('ssm.state_size', 'linear_key_head_dim', int),
    ('ssm.group_count', 'linear_num_key_heads', int), ('ssm.time_step_rank', 'linear_num_value_heads', int))
DEEPSEEK_ENTRIES = NEOX_ENTRIES[:5] + (
    ('attention.kv_lora_rank', 'kv_lora_rank', int), ('rope.dimension_count', 'qk_rope_head_dim', int),
    ('attention.layer_norm_rms_epsilon', 'rms_norm_eps', float),
    ('attention.q_lora_rank', 'q_lora_rank', int), ('expert_count', 'n_routed_experts', int),
    ('expert_shared_count', 'n_shared_experts', int),
    ('leading_dense_block_count', 'first_k_dense_replace', int),
    ('expert_weights_scale', 'routed_scaling_factor', float)) + EXPERT_ENTRIES
SLIDING_ENTRIES = (('attention.sliding_window', 'sliding_window', int),
                   ('final_logit_softcapping', 'final_logit_softcapping', float))
# Keys of files that change nothing here, or that rope_from_gguf and head_width read.
OTHER_KEYS = ('vocab_size', 'attention.value_length', 'rope.dimension_count', 'rope.freq_base',
              'rope.freq_base_swa', 'rope.scaling.type', 'rope.scaling.factor', 'rope.scaling.attn_factor',
              'rope.scaling.original_context_length', 'rope.scaling.yarn_beta_fast',
              'rope.scaling.yarn_beta_slow', 'rope.scaling.finetuned', 'tensor_data_layout',
              'expert_gating_func', 'nextn_predict_layers')
DELTA_KEYS = 'ssm.inner_size', 'full_attention_interval'
DEEPSEEK_KEYS = ('attention.key_length', 'attention.key_length_mla', 'attention.value_length_mla',
                 'attention.head_count_kv', 'rope.scaling.yarn_log_multiplier')

# Names of tensors without `weight` and `bias`. '*' is the number of an expert.
NORMS = ['input_layernorm', 'post_attention_layernorm', 'pre_feedforward_layernorm',
         'post_feedforward_layernorm', 'self_attn.q_norm', 'self_attn.k_norm']
ATTENTION = NORMS + ['self_attn.q_proj', 'self_attn.k_proj', 'self_attn.v_proj', 'self_attn.o_proj']
MLP = ['mlp.gate_proj', 'mlp.up_proj', 'mlp.down_proj']
EXPERTS = ['mlp.gate', 'mlp.experts.*.gate_proj', 'mlp.experts.*.up_proj', 'mlp.experts.*.down_proj']
SHARED_EXPERT = ['mlp.gate.e_score_correction', 'mlp.shared_experts.gate_proj', 'mlp.shared_experts.up_proj',
                 'mlp.shared_experts.down_proj']
GATED_EXPERT = [f'mlp.shared_expert{part}' for part in ('_gate', '.gate_proj', '.up_proj', '.down_proj')]
LATENT = NORMS[:2] + [f'self_attn.{part}' for part in (
    'q_a_proj', 'q_a_layernorm', 'q_b_proj', 'q_proj', 'kv_a_proj_with_mqa', 'kv_a_layernorm', 'kv_b_proj',
    'k_b_proj', 'v_b_proj', 'o_proj')]
DELTA = [f'linear_attn.{part}' for part in (
    'in_proj_qkv', 'in_proj_z', 'in_proj_a', 'in_proj_b', 'in_proj_ba', 'conv1d', 'dt_proj', 'A_log', 'norm',
    'out_proj')]
OSS = ['self_attn.sinks', 'mlp.router', *(name.replace('.*', '') for name in EXPERTS[1:])]
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
    computed: tuple = ()  # keys of the file that do not stand in one entry alone
    needs_head: bool = False  # whether llama.cpp reads no file without output.weight


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
    qwen2_moe=Family(
        'qwen2moe', LLAMA_ENTRIES + EXPERT_ENTRIES + (('expert_count', 'num_experts', int),) + SHARED_ENTRIES,
        ATTENTION + EXPERTS + GATED_EXPERT,
        QWEN | dict(norm_topk_prob=False, decoder_sparse_step=1, mlp_only_layers=[]), needs_head=True),
    gpt_oss=Family(
        'gpt-oss', LLAMA_ENTRIES + SLIDING_ENTRIES[:1] + ACTIVE_ENTRIES + (
            ('expert_feed_forward_length', 'intermediate_size', int),
            ('expert_count', 'num_local_experts', int)),
        ATTENTION + OSS, SILU | dict(attention_bias=True, swiglu_alpha=1.702, swiglu_limit=7.0),
        computed=('attention.sliding_window_pattern',), needs_head=True),
    deepseek_v2=Family(
        'deepseek2', DEEPSEEK_ENTRIES, LATENT + MLP + EXPERTS + SHARED_EXPERT[1:],
        SILU | WITHOUT_BIAS | dict(mlp_bias=False, topk_method='greedy'),
        computed=DEEPSEEK_KEYS + tuple(key for key, _, _ in GROUP_ENTRIES)),
    deepseek_v3=Family(
        'deepseek2', DEEPSEEK_ENTRIES + GROUP_ENTRIES + (('expert_weights_norm', 'norm_topk_prob', bool),),
        LATENT + MLP + EXPERTS + SHARED_EXPERT, SILU | WITHOUT_BIAS, computed=DEEPSEEK_KEYS),
    qwen3_next=Family(
        'qwen3next', LLAMA_ENTRIES + EXPERT_ENTRIES + (('expert_count', 'num_experts', int),) + SHARED_ENTRIES
        + DELTA_ENTRIES, ATTENTION + EXPERTS + GATED_EXPERT + DELTA,
        SILU | WITHOUT_BIAS | dict(norm_topk_prob=True, decoder_sparse_step=1, mlp_only_layers=[]),
        norm_offset=1, partial_key='partial_rotary_factor', computed=DELTA_KEYS),
    qwen3_5_text=Family(
        'qwen35', LLAMA_ENTRIES + DELTA_ENTRIES, ATTENTION + MLP + DELTA, SILU | WITHOUT_BIAS, norm_offset=1,
        partial_key='partial_rotary_factor', computed=(*DELTA_KEYS, 'rope.dimension_sections')),
    olmo2=Family('olmo2', LLAMA_ENTRIES, ATTENTION + MLP, SILU | WITHOUT_BIAS, needs_head=True),
    olmo3=Family('olmo2', LLAMA_ENTRIES + SLIDING_ENTRIES[:1], ATTENTION + MLP, SILU | WITHOUT_BIAS,
                 computed=('attention.sliding_window_pattern',), needs_head=True),
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
# Architectures in which llama.cpp reads rope_freqs.weight, the scaling of Llama 3
WITH_FACTORS = 'llama', 'granite'
SOFTMAX, SIGMOID = 1, 2  # expert_gating_func
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


PERIODS = dict(gemma2=2, gemma3_text=6, gpt_oss=2, olmo3=4, qwen3_next=4, qwen3_5_text=4)
# Families of which a file says which blocks have full attention: each n-th one.
FREE_PERIODS = dict(gpt_oss='attention.sliding_window_pattern', olmo3='attention.sliding_window_pattern',
                    qwen3_next='full_attention_interval', qwen3_5_text='full_attention_interval')


def period_of(theirs):
    """Each how many blocks one has full attention in llama.cpp."""
    kind, types = theirs['model_type'], theirs.get('layer_types')
    if types and kind in FREE_PERIODS:
        return [*types, 'full_attention'].index('full_attention') + 1
    return theirs.get('full_attention_interval') or PERIODS.get(kind, 1)


def expected_layer_types(theirs):
    """The kind of each block in llama.cpp, which knows an architecture's order, or reads its period."""
    is_hybrid = theirs['model_type'] in ('qwen3_next', 'qwen3_5_text')
    other = 'linear_attention' if is_hybrid else 'sliding_attention'
    blocks = range(1, theirs['num_hidden_layers'] + 1)
    return ['full_attention' if block % period_of(theirs) == 0 else other for block in blocks]


def expected_scalar(theirs):
    """The query_pre_attn_scalar of a Gemma in llama.cpp, which knows the largest models by their blocks."""
    if (theirs['model_type'], theirs['num_hidden_layers']) in (('gemma2', 46), ('gemma3_text', 62)):
        return theirs['hidden_size'] // theirs['num_attention_heads']
    return head_width(theirs)


def has_windows(theirs):
    return 'sliding_attention' in expected_layer_types(theirs)


def known_entries(theirs):
    """{entry: value} that llama.cpp does not read from a file, because it knows only this value."""
    known = dict(find_family(theirs).fixed)
    kind = theirs['model_type']
    if kind in ('gemma2', 'gemma3_text'):
        known |= dict(layer_types=expected_layer_types(theirs), query_pre_attn_scalar=expected_scalar(theirs))
    if kind in FREE_PERIODS:
        known['layer_types'] = expected_layer_types(theirs)
    if kind in ('olmo2', 'olmo3', 'qwen2_moe'):
        known['head_dim'] = theirs['hidden_size'] // theirs['num_attention_heads']
    if kind in ('qwen3_next', 'qwen3_5_text'):
        known['linear_value_head_dim'] = theirs['linear_key_head_dim']
    if kind == 'qwen3_next' and not theirs.get('num_experts'):
        known['num_experts'] = 'a number above 0'
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
    if theirs['model_type'] in FREE_PERIODS and (has_windows(theirs) or 'linear_num_key_heads' in theirs):
        found[f'{family.arch}.{FREE_PERIODS[theirs["model_type"]]}'] = period_of(theirs)
    if family.arch in ('qwen3next', 'qwen35'):
        values = theirs['linear_value_head_dim'] * theirs['linear_num_value_heads']
        found[f'{family.arch}.ssm.inner_size'] = values
    if family.arch == 'qwen35':
        found['qwen35.rope.dimension_sections'] = rope_sections(found['qwen35.rope.dimension_count'])
    if family.arch == 'deepseek2':
        found |= latent_to_gguf(theirs)
    if theirs['model_type'] == 'olmo3' and not has_windows(theirs):  # an olmo2, as which the file is read
        del found['olmo2.attention.sliding_window']
    found[f'{family.arch}.vocab_size'] = theirs['vocab_size']
    return found


def rope_sections(rotated):
    """How many pairs of features turn by a picture's time, height and width, which are equal in a text."""
    pairs = rotated // 2
    return [-(-pairs // 3), -(-(pairs - 1) // 3), -(-(pairs - 2) // 3), 0]


def latent_to_gguf(theirs):
    """The keys of latent attention, which llama.cpp computes as one head of keys, the latent vectors."""
    latent, rotated = theirs['kv_lora_rank'], theirs['qk_rope_head_dim']
    sizes = dict(key_length=latent + rotated, value_length=latent, head_count_kv=1,
                 key_length_mla=theirs['qk_nope_head_dim'] + rotated, value_length_mla=theirs['v_head_dim'],
                 q_lora_rank=theirs.get('q_lora_rank') or 0)  # without that key only a few sizes are read
    found = {f'deepseek2.attention.{key}': size for key, size in sizes.items()}
    found['deepseek2.expert_gating_func'] = SIGMOID if theirs['model_type'] == 'deepseek_v3' else SOFTMAX
    return found


def complete(theirs):
    """config.json's entries with those that files may leave out, or call by another name."""
    theirs = dict(theirs)
    if theirs['model_type'] == 'gpt2':
        theirs['n_inner'] = theirs.get('n_inner') or 4 * theirs['n_embd']
    else:
        theirs['num_key_value_heads'] = theirs.get('num_key_value_heads') or theirs['num_attention_heads']
        theirs['head_dim'] = head_width(theirs)
    if theirs['model_type'] in ('deepseek_v2', 'deepseek_v3'):
        theirs['head_dim'] = theirs['qk_rope_head_dim']
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
        if key == 'norm_topk_prob' and kind == 'qwen3_next':
            found = theirs.get(key, True)
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
        shares = dict(glm4_moe=0.5, gpt_neox=0.25, qwen3_next=0.25, qwen3_5_text=0.25)
        default = shares.get(theirs['model_type'], 1.0)
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
    kinds = ('default', 'linear', 'yarn') + (('longrope',) if arch == 'phi3' else ())
    kinds += ('llama3',) * (arch in WITH_FACTORS)
    more = {'deepseek2': ('mscale', 'mscale_all_dim'), 'gpt-oss': ('truncate',)}
    known = ROPE_ENTRIES + more.get(arch, ())
    unknown = {key: value for key, value in rope.items()
               if key not in known and value is not None and not key.startswith('mrope_')}
    if theirs['model_type'] == 'olmo3' and local not in (None, rope['rope_theta']):
        unknown['sliding_attention'] = dict(rope_theta=local)
    scales = rope.get('mscale'), rope.get('mscale_all_dim')
    if arch == 'deepseek2' and kind == 'yarn' and (scales[0] != scales[1] or not scales[0]):
        raise ValueError(f'a GGUF file of {theirs["model_type"]} cannot represent yarn with mscale={scales[0]} and '
                         f'mscale_all_dim={scales[1]}: llama.cpp knows only two equal ones, not 0')
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
        if arch == 'deepseek2':
            found[f'{scaling}.yarn_log_multiplier'] = 0.1 * rope['mscale_all_dim']
        if not rope.get('truncate', True):
            # llama.cpp rounds the limits of YaRN's ramp; our own reader finds the exact ones here.
            found['kilogpt.rope_truncate'] = False
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
    if family.needs_head and have_same_values(tensors['output.weight'], tensors['token_embd.weight']):
        theirs['tie_word_embeddings'] = True
    if family.arch == 'deepseek2':
        theirs |= latent_from_gguf(theirs, own)
    elif kind != 'gpt_neox':
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
    if kind == 'qwen2_moe':
        theirs['qkv_bias'] = 'blk.0.attn_q.bias' in tensors
    if kind == 'deepseek_v2' and own.get('expert_group_count', 1) > 1:
        raise ValueError(f'its expert_group_count is {own["expert_group_count"]}, but llama.cpp rates a group of '
                         'experts by its two best ones, and DeepSeek-V2 by the best one')
    if kind == 'deepseek_v3':  # what llama.cpp takes without these keys; transformers would take others
        theirs = dict(n_group=1, topk_group=1, norm_topk_prob=False) | theirs
    if family.arch in ('qwen3next', 'qwen35'):
        heads = theirs['linear_num_value_heads']
        if own['ssm.inner_size'] != heads * theirs['linear_key_head_dim']:
            raise ValueError(f'its ssm.inner_size is {own["ssm.inner_size"]}, but it has {heads} heads of '
                             f'{theirs["linear_key_head_dim"]} features')
    if kind == 'qwen3_5_text':
        check_sections(own, theirs)
    if kind in FREE_PERIODS:
        period = dict(full_attention_interval=period_from_gguf(kind, own))
        theirs['layer_types'] = expected_layer_types(theirs | period)
    own['rope_truncate'] = metadata.get('kilogpt.rope_truncate', True)
    return theirs | known_entries(theirs) | rope_from_gguf(theirs, own, tensors)


def period_from_gguf(kind, own):
    """Each how many blocks one has full attention. llama.cpp passes over a list of single blocks' windows."""
    period = own.get(FREE_PERIODS[kind], PERIODS[kind])
    if period == 0:
        raise ValueError(f'its {FREE_PERIODS[kind]} is 0, but it must be at least 1')
    if not isinstance(period, list):
        return period
    expected = [(block + 1) % PERIODS[kind] != 0 for block in range(len(period))]
    if period != expected:
        raise ValueError(f'its {FREE_PERIODS[kind]} is {period}, but llama.cpp gives each block but every '
                         f'{PERIODS[kind]}th a window')
    return PERIODS[kind]


def check_sections(own, theirs):
    """Raise a ValueError if a token of a text would have several positions."""
    rotated = own.get('rope.dimension_count', theirs['head_dim'])
    if own['rope.dimension_sections'] != rope_sections(rotated):
        raise ValueError(f'its rope.dimension_sections are {own["rope.dimension_sections"]}, but with {rotated} '
                         f'rotated features only {rope_sections(rotated)} are supported')


def latent_from_gguf(theirs, own):
    """The entries of latent attention. Older files have neither _mla nor the two parts of kv_b_proj."""
    rotated = theirs['qk_rope_head_dim']
    of_keys, of_values = (own.get(f'attention.{part}_length_mla', own[f'attention.{part}_length'])
                          for part in ('key', 'value'))
    return dict(head_dim=rotated, qk_nope_head_dim=of_keys - rotated, v_head_dim=of_values, rope_interleave=True,
                num_key_value_heads=theirs['num_attention_heads'],
                q_lora_rank=theirs.get('q_lora_rank') or None,
                first_k_dense_replace=theirs.get('first_k_dense_replace', 0),
                routed_scaling_factor=theirs.get('routed_scaling_factor', 1.0))


def find_kind(metadata):
    """The model_type of transformers. ValueError for an architecture that FAMILIES does not have."""
    kinds = {}
    for kind, family in FAMILIES.items():
        kinds.setdefault(family.arch, kind)
    arch = metadata.get('general.architecture')
    if arch not in kinds:
        raise ValueError(f'its architecture is {arch!r}, but only {", ".join(kinds)} are supported')
    if arch == 'deepseek2' and metadata.get('deepseek2.expert_gating_func') == SIGMOID:
        return 'deepseek_v3'
    if metadata.get('olmo2.attention.sliding_window'):
        return 'olmo3'
    return 'mixtral' if metadata.get('llama.expert_count') else kinds[arch]


def check_keys(family, own):
    """Raise a ValueError if a file's keys of its architecture, `own`, lack some or mean another model."""
    read = {key for key, _, _ in family.entries}
    unknown = {key: value for key, value in own.items() if key not in read | {*OTHER_KEYS, *family.computed}}
    unknown |= {key: value for key, value in own.items()
                if isinstance(value, list) and key not in family.computed}
    unknown = [f'{family.arch}.{key}={value}' for key, value in unknown.items() if value not in (0, False)]
    if unknown:
        raise ValueError(f'its metadata has {", ".join(unknown)}, which no {family.arch} of transformers has')
    required = [key for key, _, _ in family.entries[:5]]
    if family.arch == 'deepseek2':
        required += [key for key, _, _ in family.entries[5:8]]
        required += ['expert_shared_count', 'attention.key_length', 'attention.value_length']
    if 'ssm.inner_size' in family.computed:
        required += [key for key, _, _ in DELTA_ENTRIES] + ['ssm.inner_size']
    if family.arch == 'qwen35':
        required.append('rope.dimension_sections')
    if family.arch == 'gpt-oss':
        required.append('attention.sliding_window')
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
    if theirs['model_type'] in ('gpt_oss', 'olmo3'):  # without rope_parameters, transformers takes others
        plain = dict(rope_type='default', rope_theta=theta)
        ropes = dict(full_attention=plain | (scaling or {}), sliding_attention=plain)
        return dict(rope_parameters=ropes if theirs['model_type'] == 'olmo3' else ropes['full_attention'])
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
        if not own['rope_truncate']:
            scaling['truncate'] = False
        if 'attention.kv_lora_rank' in own:
            multiplier = own.get('rope.scaling.yarn_log_multiplier')
            if not multiplier:
                raise ValueError(f'its rope.scaling.yarn_log_multiplier is {multiplier}, with which llama.cpp '
                                 'scales attention as no DeepSeek of transformers does')
            scaling |= dict.fromkeys(('mscale', 'mscale_all_dim'), float(f'{multiplier / 0.1:.6g}'))
    elif kind != 'linear':
        raise ValueError(f'its RoPE scaling {kind!r} is not linear, yarn or longrope')
    return scaling
