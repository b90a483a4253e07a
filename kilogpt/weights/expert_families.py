"""How families with experts are read from a config.json of `transformers` and written to it. families.py has the table."""
import math

from kilogpt.layers.rope import read_scaling
from kilogpt.weights import hybrids
from kilogpt.weights.config_entries import (
    Entries, biases, layer_types, mistral_read, mistral_write, read_attention_bias, read_llama, read_most_windows,
    read_qwen_windows, read_windows, write_llama, write_llama_with_share, write_qwen)


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


def read_shared_expert(entries, **defaults):
    """The arguments of Qwen's experts beside one that all tokens go to, by a gate. defaults: those of the family."""
    entries = Entries(defaults | entries.hf_config, entries.source)
    width, shared = (entries.integer(key) for key in ('moe_intermediate_size', 'shared_expert_intermediate_size'))
    if not width or not shared or shared % width:
        entries.refuse('shared_expert_intermediate_size', shared,
                       f'which our model cannot represent: it must be a multiple of moe_intermediate_size={width}')
    return read_qwen_experts(entries) | dict(n_shared_experts=shared // width, shared_gate=True)


def qwen2_moe_read(entries):
    # Every other layer before max_window_layers, where Qwen2 has those from it on (findings/qwen2_moe_windows.sh).
    windows = read_qwen_windows(entries, lambda layer, first: layer % 2 == 0 and layer < first)
    return (read_llama(entries) | biases(qkv=entries.flag('qkv_bias', True)) | windows
            | read_shared_expert(entries, num_experts=60, num_experts_per_tok=4, moe_intermediate_size=1408,
                                 shared_expert_intermediate_size=5632))


def qwen2_moe_write(config):
    return qwen3_moe_write(config) | dict(
        qkv_bias=config.has_bias('qkv'), shared_expert_intermediate_size=config.n_shared_experts * config.expert_hidden)


def qwen3_next_read(entries):
    n_layer, arguments = entries.integer('num_hidden_layers'), hybrids.read_qwen_hybrid(entries)
    dense = entries.value('mlp_only_layers', [], (list,), 'a list')
    if not entries.integer('num_experts', 512) or all(layer in dense for layer in range(n_layer)):
        return arguments
    return arguments | read_shared_expert(entries, num_experts=512, norm_topk_prob=True, moe_intermediate_size=512,
                                          num_experts_per_tok=10, shared_expert_intermediate_size=512)


def qwen3_next_write(config):
    experts = qwen2_moe_write(config) if config.mlp == 'moe' else dict(num_experts=0)
    return experts | hybrids.write_qwen_hybrid(config)


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
    return write_llama_with_share(config) | write_grouped_experts(config) | dict(use_qk_norm=config.qk_norm)


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
    entries.only('rope_interleave', True)
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
    has_bias = entries.flag('attention_bias', True)
    return read_llama(entries, head_width=64, eps=1e-5, theta=150000.0) | read_most_windows(entries, 2, 128) | biases(
        qkv=has_bias, proj=has_bias) | read_softmax_router(entries) | dict(
        attention_sinks=True, expert_mlp='swiglu_clamped', expert_bias=True,
        n_experts=entries.integer('num_local_experts', 128), expert_hidden=entries.integer('intermediate_size'))


def gpt_oss_write(config):
    return write_llama(config) | write_softmax_router(config) | dict(
        num_local_experts=config.n_experts, intermediate_size=config.expert_hidden, swiglu_limit=7.0,
        swiglu_alpha=1.702, sliding_window=config.window or config.block_size, layer_types=layer_types(config))
