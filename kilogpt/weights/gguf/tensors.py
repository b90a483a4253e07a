"""The tensors of GGUF files under the names of transformers, and the inverse.

Besides the names, the order of rows differs, the matrices of all experts are one tensor, those of GPT-2 are
transposed, and 1 is added to Gemma's norms. Parts that llama.cpp has in another form are in forms.py.
"""
import re

import torch

from kilogpt.weights import renaming
from kilogpt.weights.gguf.entries import complete, llama3_factors, rope_of
from kilogpt.weights.gguf.families import LLAMA3_ENTRIES, count_blocks, find_family, head_width
from kilogpt.weights.gguf.forms import from_parts, to_parts
from kilogpt.weights.tensors import in_memory, selected


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
        return torch.cat(renaming.row_indices(3 * [theirs['hidden_size']], 3, head_width(theirs)))
    else:
        return None
    return order.transpose(1, 2).reshape(-1)


def tensors_to_gguf(theirs, tensors):
    """{name in GGUF: LazyTensor} from {name in transformers: LazyTensor}. ValueError for a tensor without a place."""
    family, names = find_family(theirs), tensor_names(theirs)
    theirs = complete(theirs)
    tensors = to_parts(theirs, renaming.drop_leftovers(tensors))
    if family.arch == 'gpt2':
        tensors = renaming.transpose_matrices(tensors)
    if family.norm_offset:
        tensors = renaming.shift_norms(tensors, family.norm_offset)
    found = {}
    for name, stored in renaming.stack_experts(tensors).items():
        stem, suffix = split_name(name.replace('_correction_bias', '_correction.bias'), names)
        if theirs.get('tie_word_embeddings', False) and stem in ('lm_head', 'embed_out'):
            continue
        if stem not in names:
            raise ValueError(f'the tensor {name} has no place in a GGUF file of {theirs["model_type"]}')
        order = rotary_order(stem, theirs)
        found[names[stem] + suffix] = stored if order is None else selected(stored, order)
    if family.needs_head:
        found.setdefault('output.weight', found['token_embd.weight'])
    return found | rope_tensors(theirs)


def split_name(name, stems):
    """(stem, suffix) of a tensor's name: '.weight', '.bias', or nothing."""
    stem, point, suffix = name.rpartition('.')
    return (name, '') if name in stems else (stem, point + suffix)


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
    """{name in transformers: LazyTensor} from {name in GGUF: LazyTensor}. ValueError if a tensor is unknown."""
    family = find_family(theirs)
    stems = {name: stem for stem, name in tensor_names(theirs).items()}
    found = {}
    for name, stored in tensors.items():
        stem, suffix = split_name(name, stems)
        block = re.match(r'blk\.(\d+)\.', name)
        is_next_token_block = block and int(block[1]) >= count_blocks(theirs)
        if stem in ('rope_freqs', 'rope_factors_long', 'rope_factors_short') or is_next_token_block:
            continue
        if name == 'output.weight' and theirs['tie_word_embeddings']:
            continue
        if stem not in stems:
            raise ValueError(f'its tensor {name} is unknown in {theirs["model_type"]} of transformers')
        order = rotary_order(stems[stem], theirs)
        name = (stems[stem] + suffix).replace('_correction.bias', '_correction_bias')
        found[name] = stored if order is None else selected(stored, order.argsort())
    if family.norm_offset:
        found = renaming.shift_norms(found, -family.norm_offset)
    if family.arch == 'gpt2':
        found = renaming.transpose_matrices(found)
    return from_parts(theirs, renaming.unstack_experts(found))
