"""Adapters in the files of PEFT: adapter_config.json and adapter_model.safetensors, which `peft` loads."""
import math
import os

import torch

from data import hub
from kilogpt.layers.options import GROUPS
from kilogpt.run.checkpoint_files import write_json
from kilogpt.weights import renaming
from kilogpt.weights.families import FAMILIES, families_of, rows_of
from kilogpt.weights.folders import read_json
from kilogpt.weights.safetensors_files import open_safetensors, write_tensors
from kilogpt.weights.tensors import checked, in_memory

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


def place_in(family, linear, config):
    """(name without .weight, rows there, number of all rows there) of one of our linears in a family's files.

    The rows are None if the linear is not part of a packed one there.
    """
    theirs = next(iter(renaming.rename({f'{linear}.weight': None}, family.names))).removesuffix('weight')
    if config.kv_latent:
        for ours, (packed, rows) in renaming.latent_rows(config).items():
            if ours in theirs:
                size = config.n_head * (config.head_width - config.rope_width + config.value_width)
                return theirs.replace(ours, packed).rstrip('.'), rows, size if packed == '.kv_b_proj.' else len(rows)
    for packed, parts in family.packed:
        for number, part in enumerate(parts):
            if part in theirs:
                sizes = rows_of(config, packed)
                rows = renaming.row_indices(parts=len(parts), **sizes)[number]
                return theirs.replace(part, packed).rstrip('.'), rows, sum(sizes['rows'])
    return theirs.rstrip('.'), None, None


# --- writing ------------------------------------------------------------------------------------------------

def write_adapter(folder, weights, config, base, model_type, dtype):
    """Write the adapters of a model into a new folder.

    weights: {our name: LazyTensor}, the adapters among them. base: as in state.json. model_type: of the family
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
        peft_type='LORA', task_type='CAUSAL_LM', inference_mode=True, **named_base(base['source']),
        r=config.lora_rank, lora_alpha=config.lora_alpha, lora_dropout=config.lora_dropout, bias='none',
        use_rslora=config.lora_rank_stabilised, target_modules=sorted(ranks),
        fan_in_fan_out=model_type == 'gpt2', rank_pattern=others,
        alpha_pattern={linear: config.lora_alpha * factor(rank) / factor(config.lora_rank)
                       for linear, rank in others.items()})
    os.makedirs(folder)
    write_tensors(os.path.join(folder, TENSORS), tensors, dtype)
    write_json(os.path.join(folder, CONFIG), entries)


def named_base(source):
    """The entries of adapter_config.json that name a base. source: as in state.json."""
    name, _, revision = source.partition('@') if hub.is_name(source) else (source, '', '')
    return dict(base_model_name_or_path=name) | (dict(revision=revision) if revision else {})


def group_pieces(weights, config, family):
    """{their linear: [(A, B, rows of B in a packed linear, or None, number of all rows)]} of all adapters."""
    groups = {}
    for name in weights:
        linear, _, kind = name.rpartition('.')
        if kind != 'lora_A':
            continue
        a, b = weights[name].whole(), weights[f'{linear}.lora_B'].whole()
        theirs, rows, n_rows = place_in(family, linear, config)
        if rows is None:
            rows, n_rows = torch.arange(b.size(0)), b.size(0)
        groups.setdefault(theirs, []).append((a, b, rows, n_rows))
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


def base_of(entries):
    """The source of the base that the entries of adapter_config.json name."""
    name, revision = entries['base_model_name_or_path'], entries.get('revision')
    return f'{name}@{revision}' if revision and hub.is_name(name) else name


def read_adapter(folder, entries, config):
    """({key of the model: value}, {our name: LazyTensor}) of an adapter for a base with that GPTConfig.

    It may have the names of any family that can be such a base.
    ValueError if a name is missing, or is of a linear that cannot have an adapter.
    """
    path = os.path.join(folder, TENSORS)
    tensors = {name: checked(stored, path, name, 'use other weights')
               for name, stored in open_safetensors(path).items()}
    attempts = [find_pieces(FAMILIES[name], tensors, config) for name in families_of(config)]
    differing = [{theirs for theirs, _ in places.values()} ^ tensors.keys() for _, places in attempts]
    closest = min(range(len(attempts)), key=lambda i: len(differing[i]))
    if differing[closest]:
        name = sorted(differing[closest])[0]
        place = 'has' if name in tensors else 'lacks'
        raise ValueError(f'{path} {place} {name}: our adapters are beside the same linears of every block, and '
                         'beside nothing else')
    targets, places = attempts[closest]
    keys = dict(lora_rank=entries['r'], lora_alpha=float(entries['lora_alpha']),
                lora_dropout=float(entries.get('lora_dropout', 0.0)), lora_targets=','.join(targets),
                lora_rank_stabilised=entries.get('use_rslora', False))
    return keys, {ours: renaming.selected(tensors[theirs], rows) if rows is not None else tensors[theirs]
                  for ours, (theirs, rows) in places.items()}


def find_pieces(family, tensors, config):
    """(our targets, {our name: (their name, rows of that tensor or None)}) of adapters in names of a family.

    The parts of a packed linear have its A, and rows of its B.
    """
    targets, found = [], {}
    for target in GROUPS['all']:
        places = {}
        for layer in range(config.n_layer):
            linear = f'transformer.h.{layer}.{target}'
            theirs, rows, _ = place_in(family, linear, config)
            places[f'{linear}.lora_A'] = f'{PREFIX}{theirs}.lora_A.weight', None
            places[f'{linear}.lora_B'] = f'{PREFIX}{theirs}.lora_B.weight', rows
        if any(theirs in tensors for theirs, _ in places.values()):
            targets.append(target)
            found |= places
    return targets, found
