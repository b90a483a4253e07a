"""Open the config and the tensors of a Hugging Face folder, and say what is wrong with a folder.

Only tensors, plain values and JSON are read: no file can run code.
"""
import json
import os
import zipfile

import torch

from kilogpt.weights.mxfp4 import is_mxfp4
from kilogpt.weights.safetensors_files import ADVICE, open_safetensors
from kilogpt.weights.tensors import LazyTensor, checked, in_memory

# The number of blocks, as the families name it in config.json.
LAYER_KEYS = 'num_hidden_layers', 'n_layer', 'n_layers', 'num_layers'
# The weights of a folder with quantized weights need one of these files, or an entry in config.json.
QUANTIZATION_ENTRIES = 'quantization_config', 'quantization'  # the second is that of MLX
QUANTIZATION_FILES = 'quantize_config.json', 'quant_config.json', 'hf_quant_config.json'


def open_folder(folder):
    """(content of config.json, {their name: LazyTensor}) of a Hugging Face folder.

    OSError if a file is missing, ValueError if one is damaged, or if the weights are quantized or an adapter.
    """
    refuse_adapter(folder)
    config_file = os.path.join(folder, 'config.json')
    if not os.path.exists(config_file):
        raise OSError(_missing(folder, 'config.json'))
    hf_config = read_json(config_file)
    refuse_quantized(folder, hf_config)
    tensors = open_tensors(folder)
    for key in LAYER_KEYS:
        if isinstance(hf_config.get(key), int) and hf_config[key] > len(tensors):
            raise ValueError(f'{config_file} has {key}={hf_config[key]}, but the files have only {len(tensors)} '
                             f'tensors: {ADVICE}')
    return hf_config, tensors


def read_json(path):
    """The object in a JSON file. ValueError if the file has anything else."""
    with open(path, encoding='utf-8') as file:
        try:
            content = json.load(file)
        except (ValueError, RecursionError) as error:
            raise ValueError(f'{path} is not JSON ({error})') from None
    if not isinstance(content, dict):
        raise ValueError(f'{path} has a {type(content).__name__} where an object with entries is needed: '
                         f'{ADVICE}')
    return content


def refuse_adapter(folder):
    """ValueError if a folder has an adapter, such as LoRA's, and no model."""
    names = os.listdir(folder)
    has_model = any(name.startswith(('model', 'pytorch_model')) for name in names)
    if 'adapter_config.json' in names and not has_model:
        adapter = read_json(os.path.join(folder, 'adapter_config.json'))
        base = adapter.get('base_model_name_or_path', 'unknown')
        raise ValueError(f'{folder} is an adapter for the model {base}, and not a model: make a run of '
                         f'it with python -m kilogpt.convert import {folder} OUT_DIR')


def refuse_quantized(folder, hf_config):
    """ValueError if the weights are quantized. hf_config: the content of config.json."""
    if is_mxfp4(hf_config):
        return
    entry = next((name for name in QUANTIZATION_ENTRIES if hf_config.get(name)), None)
    found, source = hf_config.get(entry), f'config.json has an entry {entry}'
    for name in QUANTIZATION_FILES:
        if not found and os.path.exists(os.path.join(folder, name)):
            found, source = read_json(os.path.join(folder, name)), f'it has a file {name}'
    if found:
        method = found.get('quant_method') if isinstance(found, dict) else None
        raise ValueError(f'{folder} is quantized by {method or "an unnamed method"} ({source}): use the '
                         'weights in float32, bfloat16 or float16')


def open_tensors(folder):
    """{name: LazyTensor} of the files with tensors: one file, or shards with an index."""
    for name, open_file in (('model.safetensors', open_safetensors), ('pytorch_model.bin', open_pickled)):
        path = os.path.join(folder, name)
        if os.path.exists(path):
            return _open_checked(path, open_file)
        if os.path.exists(f'{path}.index.json'):
            return _open_shards(folder, f'{path}.index.json', open_file)
    raise OSError(_missing(folder, 'model.safetensors'))


def _missing(folder, name):
    path = os.path.abspath(folder)
    if os.path.basename(path) == 'ckpt':
        return f'{folder} is the folder of checkpoints of a run: name the run, {os.path.dirname(path)}, or one of them'
    return (f'{folder} has no {name}: it is not a Hugging Face folder with safetensors weights and has no '
            'checkpoint in ckpt/')


def _open_checked(path, open_file):
    return {name: checked(stored, path, name, 'use other weights')
            for name, stored in open_file(path).items()}


def _open_shards(folder, index, open_file):
    """{name: LazyTensor} of all shards. Of a tensor in two shards, the one that the index names is taken."""
    shard_of = read_json(index).get('weight_map')
    if not isinstance(shard_of, dict) or not all(isinstance(name, str) for name in shard_of.values()):
        raise ValueError(f'{index} has no weight_map that names the file of each tensor: {ADVICE}')
    shards = {}
    for name in sorted(set(shard_of.values())):
        path = os.path.join(folder, name)
        if os.path.basename(name) != name:
            raise ValueError(f'{index} names {name!r}, which is not a file of this folder: {ADVICE}')
        if not os.path.isfile(path):
            raise OSError(f'{folder} has no {name}, which {os.path.basename(index)} names: {ADVICE}')
        shards[name] = _open_checked(path, open_file)
    for name, shard in shard_of.items():
        if name not in shards[shard]:
            others = [other for other, tensors in shards.items() if name in tensors]
            place = f'which is in {others[0]}' if others else 'which is in no file'
            raise ValueError(f'{os.path.join(folder, shard)} does not have {name}, {place}, although '
                             f'{os.path.basename(index)} names it: {ADVICE}')
    tensors = {}
    for shard, in_file in shards.items():
        tensors |= {name: stored for name, stored in in_file.items() if shard_of.get(name, shard) == shard}
    return tensors


def open_pickled(path):
    """{name: LazyTensor} of a pytorch_model.bin."""
    is_mapped = zipfile.is_zipfile(path)  # the format before 2020 cannot be mapped into memory

    def load():
        return torch.load(path, map_location='cpu', weights_only=True, mmap=is_mapped)

    def stored_in_file(name, tensor):
        # The file is mapped at each read, so that the pages of earlier reads do not stay in memory.
        return LazyTensor(tuple(tensor.shape), tensor.dtype, lambda rows: load()[name][rows].clone())

    try:
        content = load()
        if is_mapped:
            return {name: stored_in_file(name, tensor) for name, tensor in content.items()}
        return {name: in_memory(tensor) for name, tensor in content.items()}
    except OSError:
        raise
    except Exception as error:  # for files of another format, torch.load raises many kinds of errors
        raise ValueError(f'{path} is damaged, or has more than tensors, which might run code: it was not '
                         f'loaded ({type(error).__name__})') from None
