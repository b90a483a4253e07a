"""How llama.cpp represents the families of transformers.

FAMILIES says for each model_type of transformers which architecture of llama.cpp the model is and how its
entries are called, for both directions. files.py reads and writes the files. The source for values that
differ between the two forms is convert_hf_to_gguf.py of llama.cpp.
"""
from typing import NamedTuple

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
