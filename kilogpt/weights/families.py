"""The families of models of `transformers` that our model can represent: config.json and names of tensors.

FAMILIES is the table. To add a family, write how its config.json is read and written, and what its tensors
are called. Everything that a family needs of the model is a key of `kilogpt/layers/options.py`.
"""
import math
from typing import Callable, NamedTuple

from kilogpt.weights import hybrids, renaming
from kilogpt.weights.config_entries import (
    Entries, biases, layer_types, mistral_read, mistral_write, read_attention_bias, read_llama, read_most_windows,
    read_qwen_windows, read_rope, read_windows, shortest, with_local_rope, with_two_ropes, write_llama, write_qwen, write_rope)
from kilogpt.weights.expert_families import (
    deepseek_v2_read, deepseek_v2_write, deepseek_v3_read, deepseek_v3_write, glm4_moe_read, glm4_moe_write,
    gpt_oss_read, gpt_oss_write, mixtral_read, mixtral_write, qwen2_moe_read, qwen2_moe_write,
    qwen3_moe_read, qwen3_moe_write, qwen3_next_read, qwen3_next_write)
from kilogpt.weights.meaning import keys_not_kept
from kilogpt.weights.mxfp4 import is_mxfp4
from model import GPTConfig

# Families that people ask for and that need more than parts.
REFUSED = dict(
    phi='its blocks share one norm between attention and MLP',
    falcon='its blocks share one norm between attention and MLP',
    gemma4='it also reads images, and its layers have vectors of the token and share keys and values',
    gemma4_text='its layers have vectors of the token and share keys and values',
    gemma3='it also reads images: save its language_model, of the family gemma3_text, on its own',
    llama4='its attention is chunked, and it also reads images', mamba='it has no attention',
    qwen3_5='it also reads images: save its language model, of the family qwen3_5_text, on its own',
    qwen3_5_moe='it also reads images, and its experts are in the form of qwen3_5_moe_text',
    kimi_linear='its recurrence has a decay for each feature (Kimi Delta Attention)',
    **dict.fromkeys(('mamba2', 'falcon_mamba', 'rwkv', 'xlstm'), 'it has no attention'),
    **dict.fromkeys(('jamba', 'bamba', 'zamba', 'zamba2', 'falcon_h1', 'nemotron_h', 'granitemoehybrid'),
                    'some of its blocks are those of Mamba, another recurrence than Gated DeltaNet'),
    **dict.fromkeys(('lfm2', 'lfm2_moe'), 'most of its blocks are convolutions with gates, without attention'),
    recurrent_gemma='its recurrence is that of Griffin (RG-LRU)', minimax='its recurrence has a fixed decay')


class Family(NamedTuple):
    architecture: str
    read: Callable  # Entries -> GPTConfig arguments
    write: Callable  # GPTConfig -> entries of config.json
    names: tuple = renaming.LLAMA_NAMES
    prefix: str = 'model.'
    packed: tuple = ()  # ((name of a packed matrix, names of its parts in order), ...), in their names
    norms_add_one: bool = False  # norms multiply by 1 + weight


# --- the families -------------------------------------------------------------------------------------------

def gpt2_read(entries):
    entries.only('scale_attn_weights', True)
    entries.only('scale_attn_by_inverse_layer_idx', False)
    entries.only('activation_function', 'gelu_new', 'gelu', 'gelu_pytorch_tanh')
    exact = entries.hf_config.get('activation_function') == 'gelu'
    return dict(
        block_size=entries.integer('n_positions', 1024), vocab_size=entries.integer('vocab_size'),
        n_layer=entries.integer('n_layer'), n_head=entries.integer('n_head'),
        n_embd=entries.integer('n_embd'), n_hidden=entries.integer('n_inner', 0),
        mlp='gelu' if exact else 'gelu_tanh', tie_weights=entries.flag('tie_word_embeddings', True),
        norm_eps=entries.number('layer_norm_epsilon', 1e-5))


def gpt2_write(config):
    return dict(
        n_positions=config.block_size, n_ctx=config.block_size, n_embd=config.n_embd, n_layer=config.n_layer,
        n_head=config.n_head, n_inner=config.n_hidden, layer_norm_epsilon=config.norm_eps,
        activation_function='gelu' if config.mlp == 'gelu' else 'gelu_new',
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)


def llama_read(entries):
    entries.only('layer_types', None, ['full_attention'] * entries.integer('num_hidden_layers'))
    return read_llama(entries) | biases(**read_attention_bias(entries), mlp=entries.flag('mlp_bias', False))


def llama_write(config):
    return write_llama(config) | dict(mlp_bias=config.has_bias('mlp'))


def qwen2_read(entries):
    return read_llama(entries) | biases(qkv=True) | read_qwen_windows(entries)


def qwen3_read(entries):
    return (read_llama(entries, head_width=128) | biases(**read_attention_bias(entries))
            | read_qwen_windows(entries) | dict(qk_norm=True))


def smollm3_read(entries):
    n_layer, every = entries.integer('num_hidden_layers'), entries.integer('no_rope_layer_interval', 4)
    has_rope = [int((i + 1) % max(every, 1) > 0) for i in range(n_layer)]
    has_rope = entries.list('no_rope_layers', has_rope, (0, 1))
    uses_windows = entries.flag('use_sliding_window', False)
    types = ['sliding_attention' if uses_windows and not has else 'full_attention' for has in has_rope]
    types = entries.list('layer_types', types, ('sliding_attention', 'full_attention'))
    return (read_llama(entries, tied=True, theta=2000000.0) | read_windows(entries, types)
            | biases(**read_attention_bias(entries), mlp=entries.flag('mlp_bias', False))
            | dict(rope_pattern=shortest(''.join('NR'[has] for has in has_rope))))


def smollm3_write(config):
    return write_qwen(config) | dict(
        mlp_bias=config.has_bias('mlp'),
        no_rope_layers=[int(config.rope_of(layer) != 'none') for layer in range(config.n_layer)])


def olmo2_read(entries):
    return (read_llama(entries, eps=1e-5) | biases(**read_attention_bias(entries))
            | dict(norm_place='after', qk_norm=True, qk_norm_over='all'))


def olmo3_read(entries):
    theta = entries.number('rope_theta', 500000.0)
    local = entries.value('rope_parameters', {}, (dict,), 'an object').get('sliding_attention') or {}
    if theta != 500000 and 'rope_theta' not in local:
        entries.refuse('rope_theta', theta, 'which transformers 5.24 takes for the layers without a window alone: '
                                            'write rope_parameters with that of sliding_attention too')
    entries = with_two_ropes(entries, theta, theta)
    return olmo2_read(entries) | (read_most_windows(entries, 4, 4096) or dict(rope_theta_window=0.0))


def olmo3_write(config):
    return with_local_rope(write_llama(config), config) | dict(
        sliding_window=config.window or config.block_size, layer_types=layer_types(config))


def phi3_read(entries):
    entries.only('attention_bias', False)
    types = ['sliding_attention'] * entries.integer('num_hidden_layers')
    return read_llama(entries, eps=1e-5, share=1.0) | read_windows(entries, types)


def phi3_write(config):
    return write_llama(config) | dict(
        sliding_window=config.window or None, resid_pdrop=0.0, embd_pdrop=0.0,
        original_max_position_embeddings=config.block_size)


def granite_read(entries):
    return (read_llama(entries) | biases(**read_attention_bias(entries), mlp=entries.flag('mlp_bias', False))
            | dict(embedding_scale=entries.number('embedding_multiplier', 1.0),
                   attention_scale=entries.number('attention_multiplier', 1.0),
                   residual_scale=entries.number('residual_multiplier', 1.0),
                   logit_scale=1 / (entries.number('logits_scaling', 1.0) or math.inf)))


def granite_write(config):
    return llama_write(config) | dict(
        embedding_multiplier=config.embedding_scale, residual_multiplier=config.residual_scale,
        attention_multiplier=config.attention_scale or 1 / math.sqrt(config.head_width),
        logits_scaling=1 / config.logit_scale)


def gpt_neox_read(entries):
    entries.only('hidden_act', 'gelu', 'gelu_new', 'gelu_pytorch_tanh', 'gelu_fast')
    exact = entries.hf_config.get('hidden_act', 'gelu') == 'gelu'
    entries.only('head_dim', None, entries.integer('hidden_size') // entries.integer('num_attention_heads'))
    # Entries of other families, which this one passes over
    passed_over = 'rope_theta', 'partial_rotary_factor'
    entries = Entries({key: value for key, value in entries.hf_config.items() if key not in passed_over}, entries.source)
    rope = read_rope(entries, entries.number('rotary_emb_base', 10000.0), entries.number('rotary_pct', 0.25))
    return rope | biases(norm=True, mlp=True, **dict.fromkeys(
        ('qkv', 'proj'), entries.flag('attention_bias', True))) | dict(
        vocab_size=entries.integer('vocab_size'), n_layer=entries.integer('num_hidden_layers'),
        n_head=entries.integer('num_attention_heads'), n_embd=entries.integer('hidden_size'),
        n_hidden=entries.integer('intermediate_size'), pos='rope', norm='layernorm',
        mlp='gelu' if exact else 'gelu_tanh', tie_weights=entries.flag('tie_word_embeddings', False),
        norm_eps=entries.number('layer_norm_eps', 1e-5),
        parallel_block=entries.flag('use_parallel_residual', True))


def gpt_neox_write(config):
    return write_rope(config) | dict(
        hidden_size=config.n_embd, intermediate_size=config.n_hidden, num_hidden_layers=config.n_layer,
        num_attention_heads=config.n_head, hidden_act='gelu' if config.mlp == 'gelu' else 'gelu_new',
        layer_norm_eps=config.norm_eps, use_parallel_residual=config.parallel_block,
        attention_bias=config.has_bias('qkv'), rotary_pct=config.rope_share,
        rotary_emb_base=config.rope_theta)


def gemma_read(entries):
    entries.only('hidden_activation', 'gelu_pytorch_tanh', None)
    if entries.family == 'gemma':  # transformers takes "gelu", which its older files have, for the approximation by tanh
        entries.only('hidden_act', 'gelu_pytorch_tanh', 'gelu', 'gelu_new', None)
    elif not entries.hf_config.get('hidden_activation'):
        entries.only('hidden_act', 'gelu_pytorch_tanh', None)
    return (read_llama(entries, head_width=256, tied=True, mlp='geglu')
            | biases(**read_attention_bias(entries))
            | dict(embedding_scale=math.sqrt(entries.integer('hidden_size'))))


def gemma_write(config):
    return write_llama(config) | dict(hidden_act='gelu_pytorch_tanh', hidden_activation='gelu_pytorch_tanh')


def read_gemma_extras(entries, every, softcap, attention_softcap):
    """The arguments that Gemma 2 and 3 share. every: each of so many layers has no window."""
    windows = read_most_windows(entries, every, 4096)
    caps = {key: entries.hf_config.get(key, default) or 0.0 for key, default in (
        ('final_logit_softcapping', softcap), ('attn_logit_softcapping', attention_softcap))}
    entries.only('use_bidirectional_attention', False, None)
    return windows | dict(
        norm_place='both', softcap=float(caps['final_logit_softcapping']),
        attention_softcap=float(caps['attn_logit_softcapping']),
        attention_scale=max(entries.number('query_pre_attn_scalar', 256), 1e-9) ** -0.5)


def gemma2_read(entries):
    return gemma_read(entries) | read_gemma_extras(entries, 2, 30.0, 50.0)


def gemma2_write(config):
    scale = config.attention_scale or config.head_width ** -0.5
    scalar = scale ** -2
    return gemma_write(config) | dict(
        query_pre_attn_scalar=round(scalar) if math.isclose(scalar, round(scalar)) else scalar,
        sliding_window=config.window or config.block_size, layer_types=layer_types(config),
        final_logit_softcapping=config.softcap or None,
        attn_logit_softcapping=config.attention_softcap or None)


def gemma3_read(entries):
    entries.only('attn_logit_softcapping', None)  # which transformers passes over in this family
    entries = with_two_ropes(entries, entries.number('rope_theta', 1000000.0),
                             entries.number('rope_local_base_freq', 10000.0))
    every = entries.integer('sliding_window_pattern', 6)
    return gemma_read(entries) | read_gemma_extras(entries, max(every, 1), 0.0, 0.0) | dict(qk_norm=True)


def gemma3_write(config):
    local = config.rope_theta_window or config.rope_theta
    return with_local_rope(gemma2_write(config), config) | dict(rope_local_base_freq=local)


QKV = ('.q_proj.', '.k_proj.', '.v_proj.')
# {model_type: Family}, in the order in which `entries_of` tries them
FAMILIES = dict(
    gpt2=Family('GPT2LMHeadModel', gpt2_read, gpt2_write, (), 'transformer.',
                (('.attn.c_attn.', ('.attn.c_q.', '.attn.c_k.', '.attn.c_v.')),)),
    llama=Family('LlamaForCausalLM', llama_read, llama_write),
    mistral=Family('MistralForCausalLM', mistral_read, mistral_write),
    qwen2=Family('Qwen2ForCausalLM', qwen2_read, write_qwen),
    qwen3=Family('Qwen3ForCausalLM', qwen3_read, write_qwen),
    smollm3=Family('SmolLM3ForCausalLM', smollm3_read, smollm3_write),
    olmo2=Family('Olmo2ForCausalLM', olmo2_read, write_llama, renaming.OLMO2_NAMES),
    olmo3=Family('Olmo3ForCausalLM', olmo3_read, olmo3_write, renaming.OLMO2_NAMES),
    phi3=Family('Phi3ForCausalLM', phi3_read, phi3_write,
                packed=(('.qkv_proj.', QKV), ('.gate_up_proj.', ('.gate_proj.', '.up_proj.')))),
    granite=Family('GraniteForCausalLM', granite_read, granite_write),
    gpt_neox=Family('GPTNeoXForCausalLM', gpt_neox_read, gpt_neox_write, renaming.NEOX_NAMES, 'gpt_neox.',
                    (('.query_key_value.', ('.c_q.', '.c_k.', '.c_v.')),)),
    gemma=Family('GemmaForCausalLM', gemma_read, gemma_write, norms_add_one=True),
    gemma2=Family('Gemma2ForCausalLM', gemma2_read, gemma2_write, renaming.GEMMA2_NAMES, norms_add_one=True),
    gemma3_text=Family('Gemma3ForCausalLM', gemma3_read, gemma3_write, renaming.GEMMA2_NAMES,
                       norms_add_one=True),
    mixtral=Family('MixtralForCausalLM', mixtral_read, mixtral_write, renaming.MIXTRAL_NAMES),
    qwen3_moe=Family('Qwen3MoeForCausalLM', qwen3_moe_read, qwen3_moe_write, renaming.QWEN3_MOE_NAMES),
    qwen2_moe=Family('Qwen2MoeForCausalLM', qwen2_moe_read, qwen2_moe_write, renaming.QWEN2_MOE_NAMES),
    glm4_moe=Family('Glm4MoeForCausalLM', glm4_moe_read, glm4_moe_write, renaming.GLM4_MOE_NAMES),
    deepseek_v3=Family('DeepseekV3ForCausalLM', deepseek_v3_read, deepseek_v3_write, renaming.DEEPSEEK_NAMES),
    deepseek_v2=Family('DeepseekV2ForCausalLM', deepseek_v2_read, deepseek_v2_write, renaming.DEEPSEEK_NAMES),
    gpt_oss=Family('GptOssForCausalLM', gpt_oss_read, gpt_oss_write, renaming.GPT_OSS_NAMES),
    qwen3_5_text=Family('Qwen3_5ForCausalLM', hybrids.read_qwen_hybrid, hybrids.write_qwen_hybrid,
                        hybrids.QWEN3_5_NAMES, packed=(hybrids.GATED_QUERIES,), norms_add_one=True),
    qwen3_next=Family('Qwen3NextForCausalLM', qwen3_next_read, qwen3_next_write, hybrids.QWEN3_NEXT_NAMES,
                      packed=(hybrids.GATED_QUERIES,), norms_add_one=True),
    olmo_hybrid=Family('OlmoHybridForCausalLM', hybrids.olmo_hybrid_read, hybrids.olmo_hybrid_write,
                       renaming.OLMO2_NAMES))


# --- config.json --------------------------------------------------------------------------------------------

def arguments_of(hf_config, source):
    """The GPTConfig arguments for the content of a config.json. ValueError if our model lacks a part."""
    family = hf_config.get('model_type')
    if family not in FAMILIES:
        reason = f', since {REFUSED[family]}' if family in REFUSED else ''
        raise ValueError(f'{source} is of the family {family!r} (model_type in its config.json), which our '
                         f'model cannot represent{reason}: it can be {", ".join(FAMILIES)}')
    entries = Entries(hf_config, source)
    if not is_mxfp4(hf_config):
        entries.only('quantization_config', None)
    return FAMILIES[family].read(entries)


def entries_of(config, family=''):
    """The entries of config.json for a GPTConfig, of the first family that can represent it, or of `family`.

    ValueError that names the keys if there is none.
    """
    if family and family not in FAMILIES:
        raise ValueError(f'family is {family!r}: choose one of {", ".join(FAMILIES)}')
    closest = None
    for name in [family] if family else FAMILIES:
        entries = dict(architectures=[FAMILIES[name].architecture], model_type=name,
                       vocab_size=config.vocab_size, tie_word_embeddings=config.tie_weights)
        entries |= FAMILIES[name].write(config)
        keys = keys_not_kept(config, lambda: arguments_of(entries, name))
        if not keys:
            return entries
        distance = len({'pos', 'norm', 'mlp'}.intersection(keys)), len(keys)
        if closest is None or distance < closest[0]:
            closest = distance, name, keys
    _, name, keys = closest
    values = ', '.join(f'{key}={getattr(config, key)}' for key in keys)
    raise ValueError(f'the {"" if family else "closest "}standard form, {name}, does not have {values}')


def families_of(config):
    """The names of the families that can represent a GPTConfig, in the order of FAMILIES."""
    found = []
    for name in FAMILIES:
        try:
            entries_of(config, name)
        except ValueError:
            continue
        found.append(name)
    return found


# --- tensors ------------------------------------------------------------------------------------------------

def to_ours(tensors, hf_config, arguments):
    """{our name: LazyTensor} from {their name: LazyTensor}. hf_config: config.json; arguments: those that it gave."""
    family, config = FAMILIES[hf_config['model_type']], GPTConfig(**arguments)
    tensors = renaming.with_prefix(renaming.drop_leftovers(tensors), family.prefix)
    tensors, of_states = hybrids.states_to_ours(tensors, config, hf_config['model_type'])
    if hf_config['model_type'] in ('glm4_moe', 'deepseek_v3'):
        tensors = renaming.drop_later_layers(tensors, config.n_layer)
    if hf_config['model_type'] == 'gpt_oss':
        tensors = renaming.unpack_oss(tensors)
    if config.kv_latent:
        tensors = renaming.unpack_latent(tensors, config)
    if hf_config['model_type'] == 'gpt2':
        tensors = renaming.transpose_matrices(tensors)
    for packed, parts in family.packed:
        tensors = renaming.unpack(tensors, packed, parts, **rows_of(config, packed))
    if family.norms_add_one:
        tensors = renaming.shift_norms(tensors, 1)
    tensors = renaming.rename_back(renaming.stack_experts(tensors), family.names)
    tensors |= of_states
    return renaming.with_router_loads(tensors) if arguments.get('router_balance') == 'loss' else tensors


def to_hf_names(tensors, entries, config):
    """{their name: LazyTensor} from {our name: LazyTensor}. entries: those of `entries_of`."""
    family = FAMILIES[entries['model_type']]
    tensors = {name: stored for name, stored in tensors.items() if not name.endswith('.router.load')}
    tensors, of_states = hybrids.states_to_hf(tensors, config, entries['model_type'])
    if entries['model_type'] in ('glm4_moe', 'deepseek_v3'):
        tensors = renaming.with_bias_and_shared_expert(tensors)
    if entries['model_type'] == 'gpt2':
        tensors = renaming.with_zero_biases(tensors)
    tensors = renaming.unstack_experts(renaming.rename(tensors, family.names))
    if family.norms_add_one:
        tensors = renaming.shift_norms(tensors, -1)
    if entries['model_type'] == 'gpt_oss':
        tensors = renaming.pack_oss(tensors)
    if config.kv_latent:
        tensors = renaming.pack_latent(tensors, config)
    for packed, parts in family.packed:
        tensors = renaming.pack(tensors, packed, parts, rows_of(config, packed).get('head_width', 0))
    tensors |= of_states
    return renaming.transpose_matrices(tensors) if entries['model_type'] == 'gpt2' else tensors


def rows_of(config, packed):
    """The arguments `rows` and `head_width` of `renaming.unpack` for a packed matrix."""
    if 'gate' in packed:
        return dict(rows=[config.n_hidden, config.n_hidden])
    heads = [config.n_head, config.n_kv_head, config.n_kv_head]
    if packed == hybrids.GATED_QUERIES[0]:
        heads = [config.n_head, config.n_head]
    is_interleaved = packed in ('.query_key_value.', hybrids.GATED_QUERIES[0])
    interleaved = dict(head_width=config.head_width) if is_interleaved else {}
    return dict(rows=[number * config.head_width for number in heads], **interleaved)
