"""The families of models of `transformers` that our model can represent: config.json and names of tensors.

FAMILIES is the table. To add a family, write how its config.json is read and written, and what its tensors
are called. Everything that a family needs of the model is a key of `kilogpt/layers/options.py`.
"""
import math
from typing import Callable, NamedTuple

from kilogpt.convert import hybrids, renaming
from kilogpt.convert.config_entries import (
    Entries, biases, layer_types, read_attention_bias, read_llama, read_rope, read_windows, shortest,
    with_local_rope, with_two_ropes, write_llama, write_rope)
from kilogpt.convert.meaning import keys_not_kept
from kilogpt.convert.mxfp4 import is_mxfp4
from kilogpt.layers.rope import read_scaling
from model import GPTConfig

# Families that people ask for and that need more than parts.
REFUSED = dict(
    phi='its blocks share one norm between attention and MLP',
    qwen2_moe='its shared expert has a gate', falcon='its blocks share one norm between attention and MLP',
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


def mistral_read(entries, **defaults):
    return read_llama(entries, **defaults) | read_windows(
        entries, ['sliding_attention'] * entries.integer('num_hidden_layers'))


def mistral_write(config):
    return write_llama(config) | dict(sliding_window=config.window or None)


def read_qwen_windows(entries):
    if not entries.flag('use_sliding_window', False):
        return {}
    n_layer, first = entries.integer('num_hidden_layers'), entries.integer('max_window_layers', 28)
    types = ['sliding_attention' if layer >= first else 'full_attention' for layer in range(n_layer)]
    return read_windows(entries, entries.list('layer_types', types, ('sliding_attention', 'full_attention')))


def write_qwen(config):
    return write_llama(config) | dict(use_sliding_window=config.window > 0, layer_types=layer_types(config),
                                      sliding_window=config.window or None, max_window_layers=config.n_layer)


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
    n_layer = entries.integer('num_hidden_layers')
    types = ['sliding_attention' if (i + 1) % 4 else 'full_attention' for i in range(n_layer)]
    types = entries.list('layer_types', types, ('sliding_attention', 'full_attention'))
    theta = entries.number('rope_theta', 500000.0)
    local = entries.value('rope_parameters', {}, (dict,), 'an object').get('sliding_attention') or {}
    if theta != 500000 and 'rope_theta' not in local:
        entries.refuse('rope_theta', theta, 'which transformers 5.24 takes for the layers without a window alone: '
                                            'write rope_parameters with that of sliding_attention too')
    entries = with_two_ropes(entries, theta, theta)
    windows = read_windows(Entries(dict(sliding_window=4096) | entries.hf_config, entries.source), types)
    return olmo2_read(entries) | (windows or dict(rope_theta_window=0.0))


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
    n_layer = entries.integer('num_hidden_layers')
    types = ['sliding_attention' if (i + 1) % every else 'full_attention' for i in range(n_layer)]
    types = entries.list('layer_types', types, ('sliding_attention', 'full_attention'))
    windows = read_windows(Entries(dict(sliding_window=4096) | entries.hf_config, entries.source), types)
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


# --- mixtures of experts ------------------------------------------------------------------------------------

def read_softmax_router(entries):
    rate = entries.number('router_aux_loss_coef', 0.001)
    balance = dict(router_balance='loss', router_balance_rate=rate) if rate else dict(router_balance='none')
    return dict(mlp='moe', expert_mlp='swiglu', router='softmax',
                n_active_experts=entries.integer('num_experts_per_tok')) | balance


def check_single_expert(entries, divides):
    """A token's only expert has weight 1 in transformers, but its affinity in our router."""
    if divides and entries.integer('num_experts_per_tok') == 1:
        entries.refuse('num_experts_per_tok', 1, 'whose weight would be 1, which our model cannot represent')


def mixtral_read(entries):
    check_single_expert(entries, True)
    return mistral_read(entries, eps=1e-5, theta=1000000.0) | read_softmax_router(entries) | dict(
        n_experts=entries.integer('num_local_experts', 8), expert_hidden=entries.integer('intermediate_size'))


def mixtral_write(config):
    return mistral_write(config) | write_softmax_router(config) | dict(
        num_local_experts=config.n_experts, intermediate_size=config.expert_hidden)


def write_softmax_router(config):
    return dict(num_experts_per_tok=config.n_active_experts,
                router_aux_loss_coef=config.router_balance_rate if config.router_balance == 'loss' else 0.0)


def read_qwen_experts(entries):
    """The arguments of Qwen's experts, and of the blocks that have them."""
    n_layer, step = entries.integer('num_hidden_layers'), max(entries.integer('decoder_sparse_step', 1), 1)
    dense = entries.value('mlp_only_layers', [], (list,), 'a list')
    blocks = [i for i in range(n_layer) if i not in dense and (i + 1) % step == 0]
    if not blocks:
        entries.refuse('mlp_only_layers', dense, 'so that no block has experts: set its family to qwen3')
    first, every = blocks[0], 1
    if len(blocks) < n_layer - first:
        every = blocks[1] - first if len(blocks) > 1 else n_layer
    if blocks != list(range(first, n_layer, every)):
        entries.refuse('mlp_only_layers', dense,
                       f'so that blocks {blocks} have experts, but in our model every n-th block has them')
    divides = entries.flag('norm_topk_prob', False)
    check_single_expert(entries, divides)
    n_experts = 'num_experts' if 'num_experts' in entries.hf_config else 'num_local_experts'
    router = read_softmax_router(entries)
    return router | dict(
        n_experts=entries.integer(n_experts, 128), expert_hidden=entries.integer('moe_intermediate_size'),
        moe_first_layer=first, moe_every=every, router_norm=divides or router['n_active_experts'] == 1)


def qwen3_moe_read(entries):
    arguments = read_llama(entries) | biases(**read_attention_bias(entries)) | read_qwen_experts(entries)
    if entries.flag('use_sliding_window', False):
        arguments |= read_windows(entries, ['sliding_attention'] * entries.integer('num_hidden_layers'))
    return arguments | dict(qk_norm=True)


def qwen3_moe_write(config):
    return write_qwen(config) | write_softmax_router(config) | dict(
        num_experts=config.n_experts, moe_intermediate_size=config.expert_hidden, decoder_sparse_step=1,
        norm_topk_prob=config.router_norm and config.n_active_experts > 1,
        mlp_only_layers=[layer for layer in range(config.n_layer) if not config.has_experts(layer)])


def qwen3_next_read(entries):
    n_layer, arguments = entries.integer('num_hidden_layers'), hybrids.read_qwen_hybrid(entries)
    dense = entries.value('mlp_only_layers', [], (list,), 'a list')
    if not entries.integer('num_experts', 512) or all(layer in dense for layer in range(n_layer)):
        return arguments
    entries = Entries(dict(num_experts=512, norm_topk_prob=True, moe_intermediate_size=512, num_experts_per_tok=10,
                           shared_expert_intermediate_size=512) | entries.hf_config, entries.source)
    width, shared = (entries.integer(key) for key in ('moe_intermediate_size', 'shared_expert_intermediate_size'))
    if not width or not shared or shared % width:
        entries.refuse('shared_expert_intermediate_size', shared,
                       f'which our model cannot represent: it must be a multiple of moe_intermediate_size={width}')
    return arguments | read_qwen_experts(entries) | dict(n_shared_experts=shared // width, shared_gate=True)


def qwen3_next_write(config):
    experts = qwen3_moe_write(config) if config.mlp == 'moe' else dict(num_experts=0)
    return experts | hybrids.write_qwen_hybrid(config) | dict(
        shared_expert_intermediate_size=config.n_shared_experts * config.expert_hidden)


def read_grouped_experts(entries, router, groups=1, active_groups=1, first=1, shared=1, scale=1.0, divides=True):
    """The arguments of GLM's and DeepSeek's experts. The numbers are the family's defaults."""
    check_single_expert(entries, divides)
    n_active = entries.integer('num_experts_per_tok')
    groups = max(1, entries.integer('n_group', groups))
    return dict(
        mlp='moe', expert_mlp='swiglu', router=router, n_active_experts=n_active,
        n_experts=entries.integer('n_routed_experts'), n_shared_experts=entries.integer('n_shared_experts', shared),
        expert_hidden=entries.integer('moe_intermediate_size'), router_groups=groups,
        router_active_groups=entries.integer('topk_group', active_groups), router_norm=divides or n_active == 1,
        moe_first_layer=entries.integer('first_k_dense_replace', first),
        router_scale=entries.number('routed_scaling_factor', scale))


def write_grouped_experts(config):
    return dict(
        num_experts_per_tok=config.n_active_experts, n_routed_experts=config.n_experts,
        n_group=config.router_groups, topk_group=config.router_active_groups, num_nextn_predict_layers=0,
        n_shared_experts=max(1, config.n_shared_experts), first_k_dense_replace=config.moe_first_layer,
        moe_intermediate_size=config.expert_hidden, routed_scaling_factor=config.router_scale,
        norm_topk_prob=config.router_norm and config.n_active_experts > 1)


def glm4_moe_read(entries):
    has_bias = entries.flag('attention_bias', False)
    experts = read_grouped_experts(entries, 'sigmoid', divides=entries.flag('norm_topk_prob', True))
    return (read_llama(entries, eps=1e-5, share=0.5) | biases(qkv=has_bias) | experts
            | dict(qk_norm=entries.flag('use_qk_norm', False)))


def glm4_moe_write(config):
    # transformers would otherwise take a share of 0.5.
    rope = dict(partial_rotary_factor=config.rope_share)
    entries = write_llama(config)
    return entries | rope | write_grouped_experts(config) | dict(
        rope_parameters=entries['rope_parameters'] | rope, use_qk_norm=config.qk_norm)


def read_latent(entries, has_mlp_bias=False):
    """The arguments of DeepSeek's attention, and of dense MLPs."""
    n_head = entries.integer('num_attention_heads')
    entries.only('num_key_value_heads', None, n_head)
    arguments, rope_width = read_llama(entries), entries.integer('qk_rope_head_dim', 64)
    q_latent = 0 if entries.hf_config.get('q_lora_rank', 1536) is None else entries.integer('q_lora_rank', 1536)
    arguments |= biases(**read_attention_bias(entries), mlp=has_mlp_bias) | dict(
        n_kv_head=n_head, head_width=rope_width + entries.integer('qk_nope_head_dim', 128), rope_width=rope_width,
        value_width=entries.integer('v_head_dim', 128), q_latent=q_latent, kv_latent=entries.integer('kv_lora_rank', 512))
    name, scaling = read_scaling(arguments['rope_scaling'] or 'default')
    if name == 'yarn' and scaling.get('mscale_all_dim') and scaling['factor'] > 1:
        sharper = 0.1 * scaling['mscale_all_dim'] * math.log(scaling['factor']) + 1.0
        arguments['attention_scale'] = sharper ** 2 / math.sqrt(max(1, arguments['head_width']))
    return arguments


def write_latent(config):
    return write_llama(config) | dict(
        head_dim=config.rope_width, kv_lora_rank=config.kv_latent, q_lora_rank=config.q_latent or None,
        qk_rope_head_dim=config.rope_width, qk_nope_head_dim=config.head_width - config.rope_width,
        v_head_dim=config.value_width)


def deepseek_v3_read(entries):
    entries.flag('rope_interleave', True)
    return read_latent(entries) | read_grouped_experts(
        entries, 'sigmoid', groups=8, active_groups=4, first=3, scale=2.5, divides=entries.flag('norm_topk_prob', True))


def deepseek_v3_write(config):
    return write_latent(config) | write_grouped_experts(config) | dict(rope_interleave=True)


def deepseek_v2_read(entries):
    entries.only('norm_topk_prob', False, None)  # transformers passes over it
    entries.only('topk_method', 'greedy', 'group_limited_greedy')
    rate = entries.number('aux_loss_alpha', 0.001)
    arguments = read_latent(entries, entries.flag('mlp_bias', False)) | read_grouped_experts(
        entries, 'softmax', first=0, shared=2, divides=False)
    arguments |= dict(router_balance='loss' if rate else 'none', router_balance_rate=rate)
    if entries.hf_config.get('topk_method', 'greedy') == 'greedy':
        arguments |= dict(router_groups=1, router_active_groups=1)
    return arguments


def deepseek_v2_write(config):
    is_limited = config.router_active_groups < config.router_groups
    return write_latent(config) | write_grouped_experts(config) | dict(
        topk_method='group_limited_greedy' if is_limited else 'greedy', mlp_bias=config.has_bias('mlp'),
        aux_loss_alpha=config.router_balance_rate if config.router_balance == 'loss' else 0.0)


def gpt_oss_read(entries):
    check_single_expert(entries, True)
    entries.only('swiglu_alpha', 1.702)
    entries.only('swiglu_limit', 7.0)
    if not (entries.hf_config.get('rope_parameters') or entries.hf_config.get('rope_scaling')):
        yarn = dict(rope_type='yarn', factor=32.0, truncate=False, original_max_position_embeddings=4096)
        entries = Entries(entries.hf_config | dict(rope_scaling=yarn), entries.source)
    n_layer = entries.integer('num_hidden_layers')
    types = ['full_attention' if i % 2 else 'sliding_attention' for i in range(n_layer)]
    types = entries.list('layer_types', types, ('sliding_attention', 'full_attention'))
    windows = read_windows(Entries(dict(sliding_window=128) | entries.hf_config, entries.source), types)
    has_bias = entries.flag('attention_bias', True)
    return read_llama(entries, head_width=64, eps=1e-5, theta=150000.0) | windows | biases(
        qkv=has_bias, proj=has_bias) | read_softmax_router(entries) | dict(
        attention_sinks=True, expert_mlp='swiglu_clamped', expert_bias=True,
        n_experts=entries.integer('num_local_experts', 128), expert_hidden=entries.integer('intermediate_size'))


def gpt_oss_write(config):
    return write_llama(config) | write_softmax_router(config) | dict(
        num_local_experts=config.n_experts, intermediate_size=config.expert_hidden, swiglu_limit=7.0,
        swiglu_alpha=1.702, sliding_window=config.window or config.block_size, layer_types=layer_types(config))


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
        is_interleaved = hf_config['model_type'] == 'deepseek_v2' or hf_config.get('rope_interleave', True)
        tensors = renaming.unpack_latent(tensors, config, is_interleaved)
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
