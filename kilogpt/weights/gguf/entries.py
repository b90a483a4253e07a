"""The metadata of GGUF files from the entries of a config.json of transformers, and the inverse.

families.py has the table of both. The source for values that differ between the two forms is
convert_hf_to_gguf.py of llama.cpp.
"""
import math

import numpy as np
import torch

from kilogpt.weights.gguf.families import (
    DELTA_ENTRIES, FAMILIES, FREE_PERIODS, GELUS, LLAMA3_ENTRIES, LLAMA3_SCALINGS, OTHER_KEYS, PERIODS,
    ROPE_ENTRIES, SIGMOID, SOFTMAX, WITH_FACTORS, expected_layer_types, find_family, has_windows,
    head_width, known_entries, period_of)
from kilogpt.weights.tensors import have_same_values

LARGEST_EPSILON = 1e-5  # with which the tests' models agree within 2e-5


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
    check_epsilon(find_family(theirs).arch, theirs)
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


def check_epsilon(arch, theirs):
    """Raise a ValueError if rms_norm_eps is so large that llama.cpp's other use of it shows."""
    used_by = dict(deepseek2='the norms of latent vectors', qwen3next='the length of keys', qwen35='the length of keys')
    if arch in used_by and theirs['rms_norm_eps'] > LARGEST_EPSILON:
        raise ValueError(f'rms_norm_eps is {theirs["rms_norm_eps"]}, which llama.cpp takes for {used_by[arch]} too, where '
                         f'transformers has 1e-06: up to {LARGEST_EPSILON} they agree')


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
    check_epsilon(family.arch, theirs)
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
    if family.arch in ('gpt-oss', 'gemma3'):  # without it llama.cpp gives no block of gemma3 a window
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
    elif 'attention.kv_lora_rank' in own and own.get('rope.scaling.yarn_log_multiplier'):
        raise ValueError(f'its rope.scaling.yarn_log_multiplier is {own["rope.scaling.yarn_log_multiplier"]} without '
                         'yarn, and llama.cpp then scales attention as no DeepSeek of transformers does')
    return scaling
