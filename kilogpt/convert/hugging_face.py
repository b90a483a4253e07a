"""Convert configs and tensors: GPT-2, Llama, Qwen3 and mixtures of experts of `transformers`, and nanoGPT.

The functions take config.json's entries or {name: Stored}. weights.py reads and writes the files.
"""
import re

from kilogpt.convert.nanogpt import pack_qkv, split_qkv
from kilogpt.convert.tensors import stacked, transposed, unstacked, zeros

KINDS = ('gpt2', 'llama', 'qwen3', 'mixtral', 'qwen3_moe', 'glm4_moe')
MIXTURES = ('mixtral', 'qwen3_moe', 'glm4_moe')
# (part of a name in our model, the same part in Llama), in the order of replacement
LLAMA_NAMES = (
    ('transformer.h.', 'model.layers.'), ('transformer.wte.', 'model.embed_tokens.'),
    ('transformer.ln_f.', 'model.norm.'), ('.ln_1.', '.input_layernorm.'),
    ('.ln_2.', '.post_attention_layernorm.'), ('.c_fc.', '.up_proj.'), ('.c_gate.', '.gate_proj.'),
    ('.mlp.c_proj.', '.mlp.down_proj.'), ('.attn.', '.self_attn.'), ('_attn.c_proj.', '_attn.o_proj.'),
    ('.c_q.', '.q_proj.'), ('.c_k.', '.k_proj.'), ('.c_v.', '.v_proj.'))

# The same for the MLPs of blocks with experts, replaced before LLAMA_NAMES. {j} is the number of the expert.
EXPERT_NAMES = dict(
    mixtral=(('.mlp.routed.router.weight', '.block_sparse_moe.gate.weight'),
             ('.mlp.routed.experts.c_fc', '.block_sparse_moe.experts.{j}.w3.weight'),
             ('.mlp.routed.experts.c_gate', '.block_sparse_moe.experts.{j}.w1.weight'),
             ('.mlp.routed.experts.c_proj', '.block_sparse_moe.experts.{j}.w2.weight')),
    qwen3_moe=(('.mlp.routed.router.weight', '.mlp.gate.weight'),
               ('.mlp.routed.experts.c_fc', '.mlp.experts.{j}.up_proj.weight'),
               ('.mlp.routed.experts.c_gate', '.mlp.experts.{j}.gate_proj.weight'),
               ('.mlp.routed.experts.c_proj', '.mlp.experts.{j}.down_proj.weight')))
EXPERT_NAMES['glm4_moe'] = EXPERT_NAMES['qwen3_moe'] + (
    ('.mlp.routed.router.bias', '.mlp.gate.e_score_correction_bias'),
    ('.mlp.shared.c_fc.', '.mlp.shared_experts.up_proj.'),
    ('.mlp.shared.c_gate.', '.mlp.shared_experts.gate_proj.'),
    ('.mlp.shared.c_proj.', '.mlp.shared_experts.down_proj.'))


# --- from config.json ---------------------------------------------------------------------------------------

def arguments_from_hugging_face(theirs, folder):
    """The GPTConfig arguments for a config.json. ValueError if our model lacks one of its parts."""
    kind = theirs.get('model_type')
    known = dict(model_type=KINDS, quantization_config=[None])
    if kind == 'gpt2':
        known |= dict(activation_function=['gelu_new', 'gelu', 'gelu_pytorch_tanh'],
                      scale_attn_weights=[True], scale_attn_by_inverse_layer_idx=[False])
    else:
        known |= dict(hidden_act=['silu'], use_sliding_window=[False], partial_rotary_factor=[1.0, None],
                      layer_types=[None, ['full_attention'] * theirs.get('num_hidden_layers', 0)])
        if kind == 'llama':
            known |= dict(mlp_bias=[theirs.get('attention_bias', False)])
        else:
            known |= dict(attention_bias=[False], sliding_window=[None])
        if kind in MIXTURES:
            known |= dict(norm_topk_prob=[theirs.get('num_experts_per_tok', 0) > 1], n_group=[1],
                          topk_group=[1], routed_scaling_factor=[1, None])
    unknown = {key: theirs[key] for key in known if key in theirs and theirs[key] not in known[key]}
    rope = {}
    for key in ('rope_scaling', 'rope_parameters'):  # the second key is new in version 5 of transformers
        rope |= theirs.get(key) or {}
        rope_type = rope.get('rope_type', rope.get('type', 'default'))
        if rope.get('partial_rotary_factor', 1.0) != 1.0 or rope_type != 'default' or (
                rope.keys() - {'rope_type', 'type', 'rope_theta', 'partial_rotary_factor'}):
            unknown[key] = rope
    if not kind or unknown:
        raise ValueError(f'{folder} is not one of {", ".join(KINDS)} that our model can represent: '
                         f'its config.json has {unknown or "no model_type"}')
    if kind == 'gpt2':
        return arguments_from_gpt2(theirs)
    return arguments_from_llama(theirs, rope.get('rope_theta', theirs.get('rope_theta', 10000.0)))


def arguments_from_gpt2(theirs):
    return dict(
        block_size=theirs['n_positions'], vocab_size=theirs['vocab_size'],
        n_layer=theirs['n_layer'], n_head=theirs['n_head'],
        n_embd=theirs['n_embd'], n_hidden=theirs.get('n_inner') or 0,
        mlp='gelu' if theirs.get('activation_function') == 'gelu' else 'gelu_tanh',
        tie_weights=theirs.get('tie_word_embeddings', True), norm_eps=theirs.get('layer_norm_epsilon', 1e-5))


def arguments_from_llama(theirs, rope_theta):
    kind = theirs['model_type']
    has_qk_norm = kind in ('qwen3', 'qwen3_moe') or theirs.get('use_qk_norm', False)
    arguments = dict(
        block_size=theirs['max_position_embeddings'], vocab_size=theirs['vocab_size'],
        n_layer=theirs['num_hidden_layers'], n_head=theirs['num_attention_heads'],
        n_kv_head=theirs.get('num_key_value_heads') or 0,
        head_width=theirs.get('head_dim') or (128 if kind == 'qwen3' else 0),
        n_embd=theirs['hidden_size'], n_hidden=theirs['intermediate_size'],
        pos='rope', norm='rmsnorm', mlp='swiglu', qk_norm=has_qk_norm,
        bias=theirs.get('attention_bias', False),
        tie_weights=theirs.get('tie_word_embeddings', False), norm_eps=theirs.get('rms_norm_eps', 1e-6),
        rope_theta=float(rope_theta))
    return arguments | mixture_from_hugging_face(theirs) if kind in MIXTURES else arguments


def mixture_from_hugging_face(theirs):
    """The GPTConfig arguments of a mixture. ValueError if our model cannot have its order of blocks."""
    kind, n_layer = theirs['model_type'], theirs['num_hidden_layers']
    arguments = dict(mlp='moe', expert_mlp='swiglu', n_active_experts=theirs['num_experts_per_tok'])
    if kind == 'glm4_moe':
        return arguments | dict(
            n_experts=theirs['n_routed_experts'], n_shared_experts=theirs['n_shared_experts'],
            router='sigmoid', expert_hidden=theirs['moe_intermediate_size'],
            moe_first_layer=theirs['first_k_dense_replace'])
    weight_of_loss = theirs.get('router_aux_loss_coef', 0.001)
    arguments |= dict(router='softmax', router_balance='none')
    if weight_of_loss:
        arguments |= dict(router_balance='loss', router_balance_rate=weight_of_loss)
    if kind == 'mixtral':
        return arguments | dict(n_experts=theirs['num_local_experts'],
                                expert_hidden=theirs['intermediate_size'])
    dense, step = theirs.get('mlp_only_layers') or [], theirs.get('decoder_sparse_step', 1)
    blocks = [i for i in range(n_layer) if i not in dense and (i + 1) % step == 0]
    first, every = blocks[0], 1
    if len(blocks) < n_layer - first:
        every = blocks[1] - first if len(blocks) > 1 else n_layer
    if blocks != list(range(first, n_layer, every)):
        raise ValueError(f'the blocks with experts are {blocks}, but in our model every n-th block has them')
    n_experts = theirs['num_experts'] if 'num_experts' in theirs else theirs['num_local_experts']
    return arguments | dict(n_experts=n_experts, expert_hidden=theirs['moe_intermediate_size'],
                            moe_first_layer=first, moe_every=every)


# --- to config.json -----------------------------------------------------------------------------------------

def keys_without_standard_form(config):
    """The entries of a GPTConfig, as 'key=value', that no family of Hugging Face can represent."""
    if config.pos == 'learned':
        known = dict(pos=['learned'], norm=['layernorm'], mlp=['gelu', 'gelu_tanh'],
                     n_kv_head=[config.n_head], qk_norm=[False], softcap=[0],
                     head_width=[config.n_embd / config.n_head])
    else:
        known = dict(pos=['rope'], norm=['rmsnorm'], mlp=['swiglu', 'moe'], softcap=[0],
                     bias=[False] if config.qk_norm or config.mlp == 'moe' else [False, True])
        if config.mlp == 'moe':
            known |= keys_of_mixtures(config)
    return [f'{key}={getattr(config, key)}' for key in known if getattr(config, key) not in known[key]]


def keys_of_mixtures(config):
    """{key: values that the form of this mixture of experts can represent}."""
    known = dict(expert_mlp=['swiglu'])
    if config.router == 'sigmoid':
        return known | dict(moe_every=[1])
    known |= dict(router_balance=['loss', 'none'], n_shared_experts=[0])
    if kind_of_mixture(config) == 'mixtral':
        known |= dict(moe_first_layer=[0], moe_every=[1], n_active_experts=range(2, config.n_experts + 1))
    return known


def kind_of_mixture(config):
    """The form with a GPTConfig's router and attention norms: 'glm4_moe', 'qwen3_moe' or 'mixtral'."""
    if config.router == 'sigmoid':
        return 'glm4_moe'
    return 'qwen3_moe' if config.qk_norm else 'mixtral'


def gpt2_config(config):
    """The entries of config.json for GPT-2."""
    return dict(
        architectures=['GPT2LMHeadModel'], model_type='gpt2',
        n_positions=config.block_size, n_ctx=config.block_size, n_embd=config.n_embd, n_layer=config.n_layer,
        n_head=config.n_head, n_inner=config.n_hidden, layer_norm_epsilon=config.norm_eps,
        activation_function='gelu' if config.mlp == 'gelu' else 'gelu_new',
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)


def llama_config(config):
    """The entries of config.json for Llama, Qwen3 or a mixture."""
    if config.mlp == 'moe':
        kind = mixture_config(config)
    elif config.qk_norm:
        kind = dict(architectures=['Qwen3ForCausalLM'], model_type='qwen3')
    else:
        kind = dict(architectures=['LlamaForCausalLM'], model_type='llama', mlp_bias=config.bias)
    return dict(intermediate_size=config.n_hidden) | kind | dict(
        max_position_embeddings=config.block_size, hidden_size=config.n_embd,
        hidden_act='silu', num_hidden_layers=config.n_layer,
        num_attention_heads=config.n_head, num_key_value_heads=config.n_kv_head, head_dim=config.head_width,
        attention_bias=config.bias, rms_norm_eps=config.norm_eps, rope_theta=config.rope_theta)


def mixture_config(config):
    """The entries of config.json that are specific to a mixture."""
    kind = kind_of_mixture(config)
    weight_of_loss = config.router_balance_rate if config.router_balance == 'loss' else 0.0
    common = dict(model_type=kind, num_experts_per_tok=config.n_active_experts,
                  router_aux_loss_coef=weight_of_loss)
    if kind == 'mixtral':
        return common | dict(architectures=['MixtralForCausalLM'], num_local_experts=config.n_experts,
                             intermediate_size=config.expert_hidden, sliding_window=None)
    common |= dict(moe_intermediate_size=config.expert_hidden, norm_topk_prob=config.n_active_experts > 1)
    if kind == 'qwen3_moe':
        dense = [layer for layer in range(config.n_layer) if not config.has_experts(layer)]
        return common | dict(architectures=['Qwen3MoeForCausalLM'], num_experts=config.n_experts,
                             decoder_sparse_step=1, mlp_only_layers=dense)
    return common | dict(
        architectures=['Glm4MoeForCausalLM'], n_routed_experts=config.n_experts, n_group=1, topk_group=1,
        n_shared_experts=max(1, config.n_shared_experts), first_k_dense_replace=config.moe_first_layer,
        routed_scaling_factor=1.0, use_qk_norm=config.qk_norm, partial_rotary_factor=1.0,
        # Version 5 of transformers reads rope_theta here.
        rope_parameters=dict(rope_type='default', rope_theta=config.rope_theta, partial_rotary_factor=1.0))


# --- our tensors and theirs ---------------------------------------------------------------------------------

def transpose_matrices(tensors):
    """Transpose the blocks' matrices: (in, out) in Hugging Face's GPT-2, (out, in) in nanoGPT and here."""
    return {name: transposed(tensor) if '.h.' in name and len(tensor.shape) == 2 else tensor
            for name, tensor in tensors.items()}


def tensors_from_gpt2(tensors):
    """{our name: tensor} from tensors of Hugging Face's GPT-2."""
    tensors = {name: tensor for name, tensor in tensors.items()
               if not name.endswith(('.attn.bias', '.attn.masked_bias'))}  # causal masks
    return split_qkv(transpose_matrices(tensors))


def tensors_to_gpt2(tensors):
    """{name in Hugging Face's GPT-2: tensor} from ours. Biases that we do not have become zeros."""
    with_biases = dict(tensors)
    for name, tensor in tensors.items():
        if '.h.' in name or '.ln_f.' in name:
            with_biases.setdefault(name.replace('weight', 'bias'), zeros(tensor.shape[:1]))
    return transpose_matrices(pack_qkv(with_biases))


def tensors_from_llama(tensors, kind, balance):
    """{our name: tensor} from theirs. kind: their model_type. balance: router_balance of our config."""
    if kind in MIXTURES:
        names = [(theirs, ours) for ours, theirs in _names_of_mixture(kind)]
        tensors = _rename(_stack_experts(tensors), names)
    tensors = _rename(tensors, [(theirs, ours) for ours, theirs in reversed(LLAMA_NAMES)])
    tensors = {name: tensor for name, tensor in tensors.items() if not name.endswith('.rotary_emb.inv_freq')}
    if balance == 'loss':  # our model also keeps the experts' shares of the last batch, unknown here
        routers = [name for name in tensors if name.endswith('.router.weight')]
        tensors |= {name.replace('weight', 'load'): zeros(tensors[name].shape[:1]) for name in routers}
    return tensors


def tensors_to_llama(tensors, config):
    """{their name: tensor} from ours."""
    if config.mlp == 'moe':
        kind = kind_of_mixture(config)
        tensors = {name: tensor for name, tensor in tensors.items() if not name.endswith('.router.load')}
        if kind == 'glm4_moe':
            tensors = _with_bias_and_shared_expert(tensors)
        tensors = _unstack_experts(_rename(tensors, _names_of_mixture(kind)))
    return _rename(tensors, LLAMA_NAMES)


def _rename(tensors, parts):
    """Replace parts of the names of tensors. parts: [(old, new)]."""
    for old, new in parts:
        tensors = {name.replace(old, new): tensor for name, tensor in tensors.items()}
    return tensors


def _names_of_mixture(kind):
    """[(our name, their name)] with '*' for the number of the expert, for matrices in one stack."""
    return [(ours, theirs.replace('{j}', '*')) for ours, theirs in EXPERT_NAMES[kind]]


def _unstack_experts(tensors):
    """{name with '*': (E, rows, columns)} -> {name with the expert's number: (rows, columns)}."""
    found = {}
    for name, tensor in tensors.items():
        matrices = unstacked(tensor) if '*' in name else [tensor]
        found |= {name.replace('*', str(number)): matrix for number, matrix in enumerate(matrices)}
    return found


def _stack_experts(tensors):
    """The inverse of _unstack_experts. ValueError if an expert is missing."""
    found, stacks = {}, {}
    for name, tensor in tensors.items():
        match = re.fullmatch(r'(.*\.experts\.)(\d+)(\..*)', name)
        if match:
            before, number, after = match.groups()
            stacks.setdefault(f'{before}*{after}', {})[int(number)] = tensor
        else:
            found[name] = tensor
    for name, matrices in stacks.items():
        if sorted(matrices) != list(range(len(matrices))):
            raise ValueError(f'{name} lacks some experts: it has only {sorted(matrices)}')
        found[name] = stacked([matrices[number] for number in range(len(matrices))])
    return found


def _with_bias_and_shared_expert(tensors):
    """Tensors with the router bias and shared expert that GLM always has. Zeros do not change the result."""
    found = dict(tensors)
    for name, tensor in tensors.items():
        if name.endswith('.router.weight'):
            found.setdefault(name.replace('weight', 'bias'), zeros(tensor.shape[:1]))
        if '.routed.experts.' in name:
            shared = name.replace('.routed.experts.', '.shared.') + '.weight'
            found.setdefault(shared, zeros(tensor.shape[1:]))
    return found
