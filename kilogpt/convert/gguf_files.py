"""Read and write GGUF files, the weights of llama.cpp, in the form of transformers.

Both directions go through config.json's entries and tensors with the names of transformers (gguf_families.py)
and through a tokenizer.json (gguf_tokenizer.py). A tensor is read, dequantized or written when it is needed, so a
model may be larger than memory. The package `gguf` knows the format: https://github.com/ggml-org/ggml.
"""
import contextlib
import os

import numpy as np
import torch

from kilogpt.convert.gguf_families import entries_from_gguf, entries_to_gguf, find_family, tensors_from_gguf
from kilogpt.convert.gguf_families import tensors_to_gguf
from kilogpt.convert.gguf_tokenizer import tokenizer_from_gguf, tokenizer_to_gguf
from kilogpt.convert.tensors import Stored

DTYPES = {'float32': 'F32', 'float16': 'F16', 'bfloat16': 'BF16', 'q8_0': 'Q8_0'}
FILE_TYPES = {'float32': 0, 'float16': 1, 'q8_0': 7, 'bfloat16': 32}  # general.file_type
# Tensors that llama.cpp keeps in float32: routers and positions, besides norms and biases.
ALWAYS_FLOAT32 = 'ffn_gate_inp.weight', 'position_embd.weight'


def import_gguf():
    try:
        import gguf
    except ImportError:
        raise ImportError('GGUF files need gguf: pip install gguf') from None
    return gguf


# --- read ---------------------------------------------------------------------------------------------------

def read_gguf(path):
    """(config.json's entries, {name in transformers: Stored}, write_tokenizer) of a GGUF file.

    write_tokenizer(folder) writes tokenizer.json and tokenizer_config.json into a folder that exists; it is
    None for a file without a tokenizer. ValueError if the file is damaged or its model is not supported.
    """
    gguf = import_gguf()
    try:
        reader = gguf.GGUFReader(path)
        metadata = {key: field.contents() for key, field in reader.fields.items()}
    except OSError:
        raise
    except Exception as error:  # for files of another format, and for parts of a file
        raise ValueError(f'{path} is not a GGUF file, or is damaged or incomplete ({error})') from None
    if reader.byte_order != 'I':
        raise ValueError(f'{path} has the other byte order: convert it with gguf-convert-endian')
    if metadata.get('split.count', 0) > 1:
        raise ValueError(f'{path} is one of {metadata["split.count"]} parts: join them with '
                         'llama-gguf-split --merge')
    try:
        check_types(reader.tensors)
        stored = {tensor.name: open_tensor(tensor) for tensor in reader.tensors}
        if 'token_embd.weight' not in stored:
            raise ValueError('it has no tensor token_embd.weight')
        theirs = entries_from_gguf(metadata, stored)
        for entry, key in dict(bos_token_id='bos', eos_token_id='eos').items():
            theirs[entry] = metadata.get(f'tokenizer.ggml.{key}_token_id')
        tensors = tensors_from_gguf(theirs, stored)
        files = tokenizer_from_gguf(metadata)
    except ValueError as error:
        raise ValueError(f'{path} cannot be read: {error}') from None

    def write_tokenizer(folder):
        for name, text in files.items():
            with open(os.path.join(folder, name), 'w', encoding='utf-8') as file:
                file.write(text)

    return theirs, tensors, write_tokenizer if files else None


def check_types(tensors):
    """Raise a ValueError for a type of numbers that the package gguf cannot read."""
    gguf = import_gguf()
    firsts = {tensor.tensor_type: tensor for tensor in tensors}
    for kind, tensor in firsts.items():
        try:
            gguf.quants.dequantize(tensor.data[:1], kind)
        except NotImplementedError:
            raise ValueError(f'its tensor {tensor.name} has the type {kind.name}, which the package gguf cannot '
                             'dequantize: use the same model as Q8_0, for example') from None


def open_tensor(tensor):
    """The Stored of a tensor of gguf.GGUFReader. Types of fewer bits than float16 are read as float32."""
    gguf = import_gguf()
    kind = tensor.tensor_type
    shape = tuple(int(size) for size in reversed(tensor.shape))
    dtypes = {gguf.GGMLQuantizationType.F16: torch.float16, gguf.GGMLQuantizationType.BF16: torch.bfloat16}
    dtype = dtypes.get(kind, torch.float32)

    def read(rows):
        data = np.array(tensor.data[rows])  # a copy, since the file is mapped read-only
        if dtype == torch.float16:
            return torch.from_numpy(data)
        if dtype == torch.bfloat16:
            return torch.from_numpy(data.view(np.int16)).view(torch.bfloat16)
        return torch.from_numpy(gguf.quants.dequantize(data, kind))

    return Stored(shape, dtype, read)


# --- write --------------------------------------------------------------------------------------------------

def write_gguf(path, theirs, tensors, tokenizer_folder, dtype='float16'):
    """Write a GGUF file for llama.cpp.

    theirs: config.json's entries. tensors: {name in transformers: Stored}. dtype: 'float32', 'float16',
    'bfloat16' or 'q8_0'; norms, biases and routers stay in float32, and matrices whose rows are not whole
    blocks of 32 become float16 instead of q8_0. tokenizer_folder: a folder with a tokenizer.json, or None.
    ValueError if llama.cpp cannot represent the model.
    """
    gguf = import_gguf()
    entries = entries_to_gguf(theirs)
    entries |= tokenizer_to_gguf(tokenizer_folder, theirs['vocab_size'])
    tensors = tensors_to_gguf(theirs, tensors)
    name = os.path.splitext(os.path.basename(path))[0]
    entries |= {'general.name': name, 'general.file_type': FILE_TYPES[dtype], 'general.quantization_version': 2}
    writer = gguf.GGUFWriter(path + '.tmp', find_family(theirs).arch)
    for key, value in entries.items():
        add_entry(writer, key, value)
    kinds = {name: choose_type(name, stored.shape, dtype) for name, stored in tensors.items()}
    for name, stored in tensors.items():
        shape = gguf.quants.quant_shape_to_byte_shape(stored.shape, kinds[name])
        writer.add_tensor_info(name, shape, np.dtype(np.uint8), int(np.prod(shape)), kinds[name])
    try:
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for name, stored in tensors.items():
            writer.write_tensor_data(convert(path, name, stored, kinds[name]))
        writer.close()
        os.replace(path + '.tmp', path)
    except BaseException:
        writer.close()
        with contextlib.suppress(FileNotFoundError):
            os.remove(path + '.tmp')
        raise


def add_entry(writer, key, value):
    gguf = import_gguf()
    kinds = {bool: gguf.GGUFValueType.BOOL, int: gguf.GGUFValueType.UINT32, float: gguf.GGUFValueType.FLOAT32,
             str: gguf.GGUFValueType.STRING, list: gguf.GGUFValueType.ARRAY}
    writer.add_key_value(key, value, kinds[type(value)])


def choose_type(name, shape, dtype):
    gguf = import_gguf()
    kinds = gguf.GGMLQuantizationType
    if len(shape) == 1 or name.endswith(('_norm.weight', *ALWAYS_FLOAT32)):
        return kinds.F32
    if dtype == 'q8_0' and shape[-1] % 32:
        return kinds.F16
    return kinds[DTYPES[dtype]]


def convert(path, name, stored, kind):
    """The bytes of a tensor in a file. ValueError if a number is too large for float16."""
    gguf = import_gguf()
    tensor = stored.whole().float().contiguous().numpy()
    if kind == gguf.GGMLQuantizationType.F16 and (largest := np.abs(tensor).max()) > np.finfo(np.float16).max:
        raise ValueError(f'{path} was not written: {name} has a value of {largest:g}, which is too large for float16: '
                         'set dtype to bfloat16')
    return gguf.quants.quantize(tensor, kind).view(np.uint8)
