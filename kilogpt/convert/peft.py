"""Adapters in the files of PEFT: adapter_config.json and adapter_model.safetensors, which `peft` loads."""
import math
import os

import torch

from kilogpt.checkpoint_files import write_json
from kilogpt.convert import renaming
from kilogpt.convert.families import FAMILIES, rows_of
from kilogpt.convert.folders import read_json
from kilogpt.convert.safetensors_files import open_safetensors, write_tensors
from kilogpt.convert.tensors import checked, in_memory
from kilogpt.layers.options import GROUPS

CONFIG, TENSORS = 'adapter_config.json', 'adapter_model.safetensors'
PREFIX = 'base_model.model.'  # of PEFT's names
# Entries of adapter_config.json that are read, or say what the names of the tensors say too, or nothing of the result.
READ = {'r', 'lora_alpha', 'lora_dropout', 'use_rslora', 'target_modules', 'exclude_modules', 'layers_pattern',
        'fan_in_fan_out', 'base_model_name_or_path', 'revision', 'task_type', 'inference_mode', 'auto_mapping',
        'peft_version', 'eva_config', 'runtime_config'}
# Values of the others for adapters such as ours, W + scale B A; of entries that are not here, what is empty or False.
# Initial weights such as PiSSA's and OLoRA's are taken off the base, which the adapter alone does not say.
PLAIN = dict(peft_type=('LORA',), bias=('none',), init_lora_weights=(True, False, 'gaussian', 'eva', 'orthogonal'),
             megatron_core=('megatron.core',), qalora_group_size=(16,))
EMPTY = None, False, [], {}, ''


def is_adapter(folder):
    """Whether a folder has adapters of PEFT."""
    return os.path.exists(os.path.join(folder, CONFIG)) and os.path.exists(os.path.join(folder, TENSORS))


def name_in(linear, family):
    """The name of one of our linears in a family, without .weight."""
    return next(iter(renaming.rename({f'{linear}.weight': None}, family.names))).removesuffix('.weight')


# --- writing ------------------------------------------------------------------------------------------------

def write_adapter(folder, weights, config, base, model_type, dtype):
    """Write the adapters of a model into a new folder.

    weights: {our name: Stored}, the adapters among them. base: as in state.json. model_type: of the family
    whose names the base has. dtype: of the tensors.
    """
    tensors, ranks = {}, {}
    for linear, pieces in group_pieces(weights, config, FAMILIES[model_type]).items():
        a, b = joined_pieces(pieces)
        tensors[f'{PREFIX}{linear}.lora_A.weight'] = in_memory(a)
        tensors[f'{PREFIX}{linear}.lora_B.weight'] = in_memory(b)
        ranks['.'.join(linear.split('.')[-2:])] = a.size(0)
    others = {linear: rank for linear, rank in ranks.items() if rank != config.lora_rank}
    factor = math.sqrt if config.lora_rank_stabilised else float
    entries = dict(
        peft_type='LORA', task_type='CAUSAL_LM', base_model_name_or_path=base['source'], inference_mode=True,
        r=config.lora_rank, lora_alpha=config.lora_alpha, lora_dropout=config.lora_dropout, bias='none',
        use_rslora=config.lora_rank_stabilised, target_modules=sorted(ranks),
        fan_in_fan_out=model_type == 'gpt2', rank_pattern=others,
        alpha_pattern={linear: config.lora_alpha * factor(rank) / factor(config.lora_rank)
                       for linear, rank in others.items()})
    os.makedirs(folder)
    write_tensors(os.path.join(folder, TENSORS), tensors, dtype)
    write_json(os.path.join(folder, CONFIG), entries)


def group_pieces(weights, config, family):
    """{their linear: [(A, B, rows of B in a packed linear, or None, number of all rows)]} of all adapters."""
    groups = {}
    for name in weights:
        linear, _, kind = name.rpartition('.')
        if kind != 'lora_A':
            continue
        theirs = name_in(linear, family) + '.'
        a, b = weights[name].whole(), weights[f'{linear}.lora_B'].whole()
        rows, n_rows = torch.arange(b.size(0)), b.size(0)
        for packed, parts in family.packed:
            for number, part in enumerate(parts):
                if part in theirs:
                    sizes = rows_of(config, packed)
                    rows = renaming.row_indices(parts=len(parts), **sizes)[number]
                    theirs, n_rows = theirs.replace(part, packed), sum(sizes['rows'])
        groups.setdefault(theirs.rstrip('.'), []).append((a, b, rows, n_rows))
    return groups


def joined_pieces(pieces):
    """A and B of one linear. In a packed linear, each part has columns of B, and rows of A, to itself."""
    a = torch.cat([a for a, *_ in pieces])
    b = torch.zeros(pieces[0][-1], a.size(0))
    column = 0
    for _, piece, rows, _ in pieces:
        b[rows, column:column + piece.size(1)] = piece.float()
        column += piece.size(1)
    return a, b


# --- reading ------------------------------------------------------------------------------------------------

def read_entries(folder):
    """The content of adapter_config.json. ValueError if the adapter is none that our model can have."""
    entries = read_json(os.path.join(folder, CONFIG))
    for key in entries.keys() - READ | {'peft_type'}:
        value = entries.get(key)
        if value not in (PLAIN[key] if key in PLAIN else EMPTY):
            raise ValueError(f'{folder} has {key}={value!r} in its {CONFIG}, which our adapters cannot have: '
                             'merge it into its base with merge_and_unload of peft')
    return entries


def read_adapter(folder, entries, n_layer, model_type):
    """({key of the model: value}, {our name: Stored}) of an adapter for a base of that family.

    ValueError if a name is missing, or is of a linear that cannot have an adapter.
    """
    path = os.path.join(folder, TENSORS)
    tensors = {name: checked(stored, path, name, 'use other weights')
               for name, stored in open_safetensors(path).items()}
    found, targets = {}, []
    for target in GROUPS['all']:
        pairs = {}
        for layer in range(n_layer):
            linear = f'transformer.h.{layer}.{target}'
            for kind in ('lora_A', 'lora_B'):
                pairs[f'{linear}.{kind}'] = f'{PREFIX}{name_in(linear, FAMILIES[model_type])}.{kind}.weight'
        if any(theirs in tensors for theirs in pairs.values()):
            targets.append(target)
            found |= pairs
    if set(found.values()) != tensors.keys():
        name = sorted(set(found.values()) ^ tensors.keys())[0]
        place = 'has' if name in tensors else 'lacks'
        raise ValueError(f'{path} {place} {name}: our adapters are beside the same linears of every block '
                         f'(family {model_type}), and beside nothing else')
    keys = dict(lora_rank=entries['r'], lora_alpha=float(entries['lora_alpha']),
                lora_dropout=float(entries.get('lora_dropout', 0.0)), lora_targets=','.join(targets),
                lora_rank_stabilised=entries.get('use_rslora', False))
    return keys, {ours: tensors[theirs] for ours, theirs in found.items()}
