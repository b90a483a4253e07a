"""The tensors of GGUF files under the names of transformers, and the inverse.

Besides the names, the order of rows differs, the matrices of all experts are one tensor, those of GPT-2 are
transposed, and 1 is added to Gemma's norms.
"""
import re

import torch

from kilogpt.convert.gguf_families import (
    LLAMA3_ENTRIES, complete, count_blocks, find_family, head_width, llama3_factors, rope_of)
from kilogpt.convert.tensors import Stored, in_memory, mapped, selected, stacked, transposed, unstacked

# Causal masks and frequencies, which old files of weights have.
CONSTANTS = ('.attn.bias', '.masked_bias', '.attention.bias', '.rotary_emb.inv_freq')


def tensor_names(theirs):
    """{stem of a tensor's name in transformers: stem in GGUF}, with '*' for the number of an expert."""
    import gguf
    family = find_family(theirs)
    arch = next(arch for arch, name in gguf.MODEL_ARCH_NAMES.items() if name == family.arch)
    known = gguf.get_tensor_name_map(arch, count_blocks(theirs))
    stems = list(family.whole)
    for block in range(count_blocks(theirs)):
        stems += [family.block.format(block) + part for part in family.parts]
    names = {stem: known.get_name(stem.replace('.*', '')) for stem in stems}
    return {stem: name for stem, name in names.items() if name}


def rotary_order(stem, theirs):
    """The indices that bring rows of queries or keys into llama.cpp's order, or those of GPT-NeoX, or None.

    llama.cpp's Llama rotates neighbouring rows, (0, 1), (2, 3), ..., and transformers rotates row i of a head
    with the row half a head later. GPT-NeoX has queries, keys and values head by head.
    """
    family = find_family(theirs)
    if family.is_permuted and stem.endswith(('.q_proj', '.k_proj')):
        heads = theirs['num_key_value_heads' if stem.endswith('.k_proj') else 'num_attention_heads']
        order = torch.arange(heads * head_width(theirs)).view(heads, 2, -1)
    elif stem.endswith('.query_key_value'):
        heads = theirs['num_attention_heads']
        order = torch.arange(3 * theirs['hidden_size']).view(heads, 3, -1)
        return order.transpose(0, 1).reshape(-1)
    else:
        return None
    return order.transpose(1, 2).reshape(-1)


def tensors_to_gguf(theirs, tensors):
    """{name in GGUF: Stored} from {name in transformers: Stored}. ValueError for a tensor without a place."""
    family, names = find_family(theirs), tensor_names(theirs)
    theirs = complete(theirs)
    found, experts = {}, {}
    for name, stored in tensors.items():
        stem, _, suffix = name.replace('_correction_bias', '_correction.bias').rpartition('.')
        is_copy = theirs.get('tie_word_embeddings', False) and stem in ('lm_head', 'embed_out')
        if is_copy or name.endswith(CONSTANTS):
            continue
        numbered = re.fullmatch(r'(.*\.experts)\.(\d+)(\..*)', stem)
        stem = f'{numbered[1]}.*{numbered[3]}' if numbered else stem
        if stem not in names:
            raise ValueError(f'the tensor {name} has no place in a GGUF file of {theirs["model_type"]}')
        target = f'{names[stem]}.{suffix}'
        if numbered:
            experts.setdefault(target, {})[int(numbered[2])] = stored
        else:
            found[target] = tensor_to_gguf(stem, stored, theirs)
    for target, parts in experts.items():
        if sorted(parts) != list(range(len(parts))):
            raise ValueError(f'{target} lacks some experts: it has only {sorted(parts)}')
        found[target] = stacked([parts[number] for number in range(len(parts))])
    return found | rope_tensors(theirs)


def tensor_to_gguf(stem, stored, theirs):
    family = find_family(theirs)
    order = rotary_order(stem, theirs)
    if order is not None:
        return selected(stored, order)
    if family.norm_offset and stem.endswith('norm'):
        return Stored(stored.shape, torch.float32, lambda rows: stored[rows].float() + family.norm_offset)
    is_matrix_of_gpt2 = family.arch == 'gpt2' and '.h.' in stem and len(stored.shape) == 2
    return transposed(stored) if is_matrix_of_gpt2 else stored


def rope_tensors(theirs):
    """The tensors with which llama.cpp scales the frequencies of RoPE, if config.json asks for a scaling."""
    if theirs['model_type'] == 'gpt2':
        return {}
    rope, _ = rope_of(theirs)
    if rope['rope_type'] == 'llama3':
        numbers = [rope[key] for key in LLAMA3_ENTRIES]
        factors = llama3_factors(rope['rope_theta'], head_width(theirs), *numbers)
        return {'rope_freqs.weight': in_memory(factors)}
    if rope['rope_type'] == 'longrope':
        return {f'rope_factors_{kind}.weight': in_memory(torch.tensor(rope[f'{kind}_factor']).float())
                for kind in ('long', 'short')}
    return {}


def tensors_from_gguf(theirs, tensors):
    """{name in transformers: Stored} from {name in GGUF: Stored}. ValueError if a tensor is unknown."""
    family = find_family(theirs)
    stems = {name: stem for stem, name in tensor_names(theirs).items()}
    found = {}
    for name, stored in tensors.items():
        stem, _, suffix = name.rpartition('.')
        block = re.match(r'blk\.(\d+)\.', name)
        is_next_token_block = block and int(block[1]) >= count_blocks(theirs)
        if stem in ('rope_freqs', 'rope_factors_long', 'rope_factors_short') or is_next_token_block:
            continue
        if stem not in stems:
            raise ValueError(f'its tensor {name} is unknown in {theirs["model_type"]} of transformers')
        target = stems[stem]
        order = rotary_order(target, theirs)
        if '*' in target:
            for number, matrix in enumerate(unstacked(stored)):
                found[f'{target.replace("*", str(number))}.{suffix}'] = matrix
        elif order is not None:
            found[f'{target}.{suffix}'] = selected(stored, order.argsort())
        elif family.norm_offset and target.endswith('norm'):
            found[f'{target}.{suffix}'] = mapped(stored, lambda tensor: tensor - family.norm_offset)
        elif family.arch == 'gpt2' and '.h.' in target and len(stored.shape) == 2:
            found[f'{target}.{suffix}'] = transposed(stored)
        else:
            found[f'{target}.{suffix}'.replace('_correction.bias', '_correction_bias')] = stored
    return found
