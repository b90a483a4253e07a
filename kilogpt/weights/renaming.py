"""Tensors of other programs as ours, and ours as theirs: other names, packed matrices, experts one by one.

Every function takes and returns {name: LazyTensor}. Reads nothing: a LazyTensor is read when it is needed.
"""
import re

import torch

from kilogpt.weights.mxfp4 import decoded
from kilogpt.weights.tensors import (
    LazyTensor, joined, mapped, selected, stacked, transposed, unstacked, with_rows, zeros)

# (part of a name in our model, the same part in Llama), in the order of replacement
LLAMA_NAMES = (
    ('transformer.h.', 'model.layers.'), ('transformer.wte.', 'model.embed_tokens.'),
    ('transformer.ln_f.', 'model.norm.'), ('.ln_1.', '.input_layernorm.'),
    ('.ln_2.', '.post_attention_layernorm.'), ('.c_fc.', '.up_proj.'), ('.c_gate.', '.gate_proj.'),
    ('.mlp.c_proj.', '.mlp.down_proj.'), ('.attn.', '.self_attn.'), ('_attn.c_proj.', '_attn.o_proj.'),
    ('.c_q.', '.q_proj.'), ('.c_k.', '.k_proj.'), ('.c_v.', '.v_proj.'))
# The names of norms in models that do not have exactly two of them, before attention and before the MLP.
OLMO2_NAMES = (
    *(pair for pair in LLAMA_NAMES if pair[0] not in ('.ln_1.', '.ln_2.')),
    ('.ln_1_after.', '.post_attention_layernorm.'), ('.ln_2_after.', '.post_feedforward_layernorm.'),
    ('.q_norm_all.', '.q_norm.'), ('.k_norm_all.', '.k_norm.'))
GEMMA2_NAMES = (
    *(pair for pair in LLAMA_NAMES if pair[0] != '.ln_2.'), ('.ln_2.', '.pre_feedforward_layernorm.'),
    ('.ln_1_after.', '.post_attention_layernorm.'), ('.ln_2_after.', '.post_feedforward_layernorm.'))
NEOX_NAMES = (
    ('transformer.h.', 'gpt_neox.layers.'), ('transformer.wte.', 'gpt_neox.embed_in.'),
    ('transformer.ln_f.', 'gpt_neox.final_layer_norm.'), ('lm_head.', 'embed_out.'),
    ('.ln_1.', '.input_layernorm.'), ('.ln_2.', '.post_attention_layernorm.'),
    ('.mlp.c_fc.', '.mlp.dense_h_to_4h.'), ('.mlp.c_proj.', '.mlp.dense_4h_to_h.'),
    ('.attn.', '.attention.'), ('.attention.c_proj.', '.attention.dense.'))
# Blocks with experts. * is the number of the expert.
MIXTRAL_NAMES = (
    *LLAMA_NAMES, ('.mlp.routed.router.weight', '.block_sparse_moe.gate.weight'),
    ('.mlp.routed.experts.c_fc', '.block_sparse_moe.experts.*.w3.weight'),
    ('.mlp.routed.experts.c_gate', '.block_sparse_moe.experts.*.w1.weight'),
    ('.mlp.routed.experts.c_proj', '.block_sparse_moe.experts.*.w2.weight'))
QWEN3_MOE_NAMES = (
    *LLAMA_NAMES, ('.mlp.routed.router.weight', '.mlp.gate.weight'),
    ('.mlp.routed.experts.c_fc', '.mlp.experts.*.up_proj.weight'),
    ('.mlp.routed.experts.c_gate', '.mlp.experts.*.gate_proj.weight'),
    ('.mlp.routed.experts.c_proj', '.mlp.experts.*.down_proj.weight'))
QWEN2_MOE_NAMES = (
    *QWEN3_MOE_NAMES, ('.mlp.shared_gate.', '.mlp.shared_expert_gate.'), ('.mlp.shared.', '.mlp.shared_expert.'),
    ('.mlp.shared_expert.c_proj.', '.mlp.shared_expert.down_proj.'))
GLM4_MOE_NAMES = (
    *QWEN3_MOE_NAMES, ('.mlp.routed.router.bias', '.mlp.gate.e_score_correction_bias'),
    ('.mlp.shared.', '.mlp.shared_experts.'),
    ('.mlp.shared_experts.c_proj.', '.mlp.shared_experts.down_proj.'))
DEEPSEEK_NAMES = (
    *GLM4_MOE_NAMES, ('.c_q_latent.', '.q_a_proj.'), ('.q_latent_norm.', '.q_a_layernorm.'),
    ('.c_kv_latent.', '.kv_a_proj_with_mqa.'), ('.kv_latent_norm.', '.kv_a_layernorm.'))
GPT_OSS_NAMES = (
    *LLAMA_NAMES, ('.sinks.scores', '.sinks'), ('.router.logit_bias', '.router.bias'),
    ('.mlp.routed.', '.mlp.'))

# Tensors that are not part of the model: masks and tables of older programs, and Qwen's heads for later tokens.
LEFTOVERS = re.compile(r'mtp\..*|.*(\.attn\.(bias|masked_bias)|\.attention\.(bias|masked_bias)|rotary_emb\.\w+)')


def drop_leftovers(tensors):
    """Without masks and rotary tables."""
    return {name: stored for name, stored in tensors.items() if not LEFTOVERS.fullmatch(name)}


def drop_later_layers(tensors, n_layer):
    """Without layers beyond n_layer, which in GLM predict further tokens."""

    def is_later(name):
        layer = re.search(r'\.layers\.(\d+)\.', name)
        return layer and int(layer[1]) >= n_layer

    return {name: stored for name, stored in tensors.items() if not is_later(name)}


def with_prefix(tensors, prefix):
    """With the prefix that files of a model without its head lack, and the present names in LayerNorms."""
    found = {}
    for name, stored in tensors.items():
        name = re.sub(r'(?<=\.)gamma$', 'weight', re.sub(r'(?<=\.)beta$', 'bias', name))
        found[name if name.startswith((prefix, 'lm_head.', 'embed_out.')) else prefix + name] = stored
    return found


def rename(tensors, pairs):
    """Replace parts of names. pairs: [(old, new)], in the order of replacement."""
    for old, new in pairs:
        tensors = {name.replace(old, new): stored for name, stored in tensors.items()}
    return tensors


def rename_back(tensors, pairs):
    """The inverse of `rename`."""
    return rename(tensors, [(new, old) for old, new in reversed(pairs)])


def transpose_matrices(tensors):
    """Transpose the blocks' matrices: (in, out) in GPT-2 of `transformers`, (out, in) in nanoGPT and here."""
    return {name: transposed(stored) if '.h.' in name and len(stored.shape) == 2 else stored
            for name, stored in tensors.items()}


# --- packed matrices ----------------------------------------------------------------------------------------

def row_indices(rows, parts, head_width=0):
    """[rows of each part] of a packed tensor: (LongTensor, ...).

    rows: how many rows each of `parts` parts has. head_width: 0 if the parts lie one below the other; else
    each head has its queries, keys and values together, as in GPT-NeoX.
    """
    if not head_width:
        starts = torch.tensor([0, *rows]).cumsum(0)
        return [torch.arange(starts[i], starts[i + 1]) for i in range(parts)]
    packed = torch.arange(sum(rows)).view(-1, parts, head_width)
    return [packed[:, i].flatten() for i in range(parts)]


def unpack(tensors, packed, parts, rows, head_width=0):
    """Take a packed tensor of each block apart. packed, parts: of names; rows, head_width: as above."""
    found = {}
    for name, stored in tensors.items():
        if packed in name and stored.shape[0] == sum(rows):
            for part, indices in zip(parts, row_indices(rows, len(parts), head_width)):
                found[name.replace(packed, part)] = selected(stored, indices)
        else:
            found[name] = stored
    return found


def pack(tensors, packed, parts, head_width=0):
    """The inverse of `unpack`."""
    found = {}
    for name, stored in tensors.items():
        if parts[0] in name:
            pieces = [tensors[name.replace(parts[0], part)] for part in parts]
            whole = joined(pieces)
            if head_width:
                indices = torch.cat(row_indices([piece.shape[0] for piece in pieces], len(parts), head_width))
                whole = selected(whole, indices.argsort())
            found[name.replace(parts[0], packed)] = whole
        elif not any(part in name for part in parts):
            found[name] = stored
    return found


def latent_rows(config):
    """{our name of a linear of latent attention: (DeepSeek's name, the rows there of each of our rows)}.

    DeepSeek's has the rotated features of a head at its end, in pairs side by side. Ours has them at its beginning,
    the first of all pairs before the second ones.
    """
    R, L, V, H = config.rope_width, config.kv_latent, config.value_width, config.n_head
    N = config.head_width - R
    rotated = torch.arange(R).view(-1, 2).t().flatten()

    def of_heads(width, features):
        return (torch.arange(H)[:, None] * width + features).flatten()

    q = of_heads(N + R, torch.cat((N + rotated, torch.arange(N))))
    return {'.q_proj.': ('.q_b_proj.' if config.q_latent else '.q_proj.', q),
            '.kv_a_proj_with_mqa.': ('.kv_a_proj_with_mqa.', torch.cat((L + rotated, torch.arange(L)))),
            '.k_proj.': ('.kv_b_proj.', of_heads(N + V, torch.arange(N))),
            '.v_proj.': ('.kv_b_proj.', of_heads(N + V, N + torch.arange(V)))}


def unpack_latent(tensors, config):
    """Order the rows of latent attention as ours does, and take its packed matrices apart."""
    found, table = {}, latent_rows(config)
    for name, stored in tensors.items():
        parts = {name.replace(packed, ours): rows for ours, (packed, rows) in table.items()
                 if packed in name and stored.shape[0] > int(rows.max())}
        found |= {part: selected(stored, rows) for part, rows in parts.items()} or {name: stored}
    return found


def pack_latent(tensors, config):
    """The inverse of `unpack_latent`."""
    table = latent_rows(config)
    found = {name: stored for name, stored in tensors.items() if not any(part in name for part in table)}
    parts = {}  # {DeepSeek's name: ([tensor], [rows])}
    for name, stored in tensors.items():
        for ours, (packed, rows) in table.items():
            if ours in name:
                pieces, places = parts.setdefault(name.replace(ours, packed), ([], []))
                pieces.append(stored)
                places.append(rows)
    return found | {name: selected(joined(pieces), torch.cat(places).argsort())
                    for name, (pieces, places) in parts.items()}


def shift_norms(tensors, amount):
    """Add a number to the weights of norms: Gemma's multiply by 1 + weight, Gated DeltaNet's own does not."""
    found = dict(tensors)
    for name, stored in tensors.items():
        if 'norm' in name and '.linear_attn.' not in name:
            shifted = mapped(stored, lambda tensor: tensor.float() + amount)
            found[name] = shifted._replace(dtype=torch.float32)
    return found


# --- experts ------------------------------------------------------------------------------------------------

def stack_experts(tensors):
    """{name with an expert's number: (rows, columns)} -> {name with *: (E, rows, columns)}.

    ValueError if an expert is missing.
    """
    found, stacks = {}, {}
    for name, stored in tensors.items():
        match = re.fullmatch(r'(.*\.experts\.)(\d+)(\..*)', name)
        if match:
            before, number, after = match.groups()
            stacks.setdefault(f'{before}*{after}', {})[int(number)] = stored
        else:
            found[name] = stored
    for name, matrices in stacks.items():
        if sorted(matrices) != list(range(len(matrices))):
            raise ValueError(f'{name} lacks some experts: it has only {sorted(matrices)}')
        found[name] = stacked([matrices[number] for number in range(len(matrices))])
    return found


def unstack_experts(tensors):
    """The inverse of stack_experts."""
    found = {}
    for name, stored in tensors.items():
        parts = unstacked(stored) if '*' in name else [stored]
        found |= {name.replace('*', str(number)): part for number, part in enumerate(parts)}
    return found


def unpack_oss(tensors):
    """gpt-oss's experts as ours: out of MXFP4 if they are in it, rows for outputs, and gates apart from the rest.

    In MXFP4 a matrix has rows for its outputs, in 16 bits for its inputs.
    """
    found = {}
    for name, stored in tensors.items():
        before, _, kind = name.rpartition('.experts.')
        base, is_vector = before + '.experts.', kind.endswith('_bias')
        if not before:
            found[name] = stored
            continue
        if kind.endswith('_scales'):  # read with their blocks
            continue
        if kind.endswith('_blocks'):
            kind, scales = kind.removesuffix('_blocks'), name.replace('_blocks', '_scales')
            if scales not in tensors:
                raise ValueError(f'{name} has no {scales}: copy or download the weights again')
            stored = decoded(stored, tensors[scales])
        elif not is_vector:
            stored = with_rows(stored, stored.shape[:1] + stored.shape[:0:-1], lambda part: part.mT)
        bias = '_bias' * is_vector
        if kind.startswith('down_proj'):
            found[f'{base}c_proj{bias}'] = stored
            continue
        for first, part in enumerate(('c_gate', 'c_fc')):  # side by side
            shape = stored.shape[0], stored.shape[1] // 2, *stored.shape[2:]
            found[f'{base}{part}{bias}'] = with_rows(stored, shape, lambda part, first=first: part[:, first::2])
    return found


def pack_oss(tensors):
    """The inverse of `unpack_oss`, without MXFP4."""
    found = {}
    for name, stored in tensors.items():
        before, _, kind = name.rpartition('.experts.')
        base, bias = before + '.experts.', '_bias' * kind.endswith('_bias')
        if not before:
            found[name] = stored
        elif kind.startswith('c_proj'):
            found[f'{base}down_proj{bias}'] = stored if bias else with_rows(
                stored, stored.shape[:1] + stored.shape[:0:-1], lambda part: part.mT)
        elif kind.startswith('c_gate'):
            found[f'{base}gate_up_proj{bias}'] = side_by_side(stored, tensors[name.replace('c_gate', 'c_fc')])
    return found


def side_by_side(gate, up):
    """(E, inputs, 2 outputs) of two of (E, outputs, inputs), or (E, 2 outputs) of two of (E, outputs)."""
    E, outputs, *inputs = gate.shape
    shape = (E, *inputs, 2 * outputs)

    def read(rows):
        return torch.stack((gate[rows], up[rows]), dim=2).flatten(1, 2).transpose(1, -1).reshape(-1, *shape[1:])

    return LazyTensor(shape, gate.dtype, read)


def with_router_loads(tensors):
    """With the experts' shares of the last batch, which our routers keep for Switch's loss, unknown here."""
    routers = [name for name in tensors if name.endswith('.router.weight')]
    return tensors | {name.replace('weight', 'load'): zeros(tensors[name].shape[:1]) for name in routers}


def with_bias_and_shared_expert(tensors):
    """With the router bias and shared expert that GLM always has. Zeros do not change the result."""
    found = dict(tensors)
    for name, stored in tensors.items():
        if name.endswith('.router.weight'):
            found.setdefault(name.replace('weight', 'bias'), zeros(stored.shape[:1]))
        if '.routed.experts.' in name:
            shared = name.replace('.routed.experts.', '.shared.') + '.weight'
            found.setdefault(shared, zeros(stored.shape[1:]))
    return found


def with_zero_biases(tensors):
    """With the biases that GPT-2 has everywhere."""
    found = dict(tensors)
    for name, stored in tensors.items():
        if '.h.' in name or '.ln_f.' in name:
            found.setdefault(name.replace('weight', 'bias'), zeros(stored.shape[:1]))
    return found
