"""Read and write GGUF files, the weights of llama.cpp, in the form of transformers.

Both directions go through config.json's entries (entries.py), tensors with the names of transformers
(tensors.py) and a tokenizer.json (tokenizer.py). A tensor is read, dequantized or written when it
is needed, so a model may be larger than memory. The format: docs/gguf.md of https://github.com/ggml-org/ggml.
"""
import contextlib
import math
import mmap
import os
import struct

import numpy as np
import torch

from kilogpt.weights.gguf.entries import entries_from_gguf, entries_to_gguf
from kilogpt.weights.gguf.families import find_family
from kilogpt.weights.gguf.tensors import tensors_from_gguf, tensors_to_gguf
from kilogpt.weights.gguf.tokenizer import tokenizer_from_gguf, tokenizer_to_gguf
from kilogpt.weights.tensors import LazyTensor

NUMBERS = {0: 'B', 1: 'b', 2: 'H', 3: 'h', 4: 'I', 5: 'i', 6: 'f', 7: '?', 10: 'Q', 11: 'q', 12: 'd'}
STRING, ARRAY = 8, 9  # types of metadata, besides the numbers, which are given as the module struct has them
# What numpy and torch call the types that are not packed; numpy does not have bfloat16.
PLAIN = {'F32': ('<f4', torch.float32), 'F16': ('<f2', torch.float16), 'BF16': ('<i2', torch.bfloat16)}
DTYPES = {'float32': 'F32', 'float16': 'F16', 'bfloat16': 'BF16', 'q8_0': 'Q8_0'}
FILE_TYPES = {'float32': 0, 'float16': 1, 'q8_0': 7, 'bfloat16': 32}  # general.file_type
# Tensors that llama.cpp keeps in float32: routers, positions, convolutions, besides norms, biases and vectors.
ALWAYS_FLOAT32 = 'ffn_gate_inp.weight', 'position_embd.weight', 'ssm_conv1d.weight'


def import_gguf():
    try:
        import gguf
    except ImportError:
        raise ImportError('GGUF files need gguf: pip install gguf') from None
    return gguf


# --- read ---------------------------------------------------------------------------------------------------

class Header:
    """What precedes the numbers in a file: `metadata` {key: value} and `tensors` {name: LazyTensor}.

    gguf.GGUFReader reads the same, but takes seconds for the tokens of a vocabulary.
    """

    def __init__(self, path):
        with open(path, 'rb') as file:
            self.bytes = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self.position = 0
        if self.take(4) != b'GGUF':
            raise ValueError('it does not begin with GGUF')
        version = self.number('I')
        if version not in (2, 3):
            raise ValueError(f'its version is {version}, not 2 or 3')
        tensor_count, entry_count = self.number('Q'), self.number('Q')
        self.metadata = {}
        for _ in range(entry_count):
            key = self.text()
            self.metadata[key] = self.value(self.number('I'))
        infos = [self.tensor_info() for _ in range(tensor_count)]
        alignment = self.metadata.get('general.alignment', 32)
        start = -(-self.position // alignment) * alignment
        self.tensors = {name: self.open(start + offset, *info) for name, offset, *info in infos}

    def take(self, count):
        if self.position + count > len(self.bytes):
            raise ValueError(f'it ends after {len(self.bytes)} bytes')
        self.position += count
        return self.bytes[self.position - count:self.position]

    def number(self, code):
        return struct.unpack('<' + code, self.take(struct.calcsize('<' + code)))[0]

    def text(self):
        return self.take(self.number('Q')).decode('utf-8')

    def value(self, kind):
        if kind == STRING:
            return self.text()
        if kind != ARRAY:
            return self.number(NUMBERS[kind])
        kind, count = self.number('I'), self.number('Q')
        if kind in NUMBERS:
            code = NUMBERS[kind]
            numbers = self.take(count * struct.calcsize(code))
            return [value for value, in struct.iter_unpack('<' + code, numbers)]
        return [self.value(kind) for _ in range(count)]

    def tensor_info(self):
        name = self.text()
        shape = [self.number('Q') for _ in range(self.number('I'))]
        kind = self.number('I')
        return name, self.number('Q'), tuple(reversed(shape)), kind

    def open(self, start, shape, kind):
        """The LazyTensor of a tensor. Types of fewer bits than float16 are read as float32."""
        gguf = import_gguf()
        kind = gguf.GGMLQuantizationType(kind)
        rows_of_bytes = gguf.quants.quant_shape_to_byte_shape(shape, kind)
        stop = start + math.prod(rows_of_bytes)
        if stop > len(self.bytes):
            raise ValueError(f'it ends after {len(self.bytes)} bytes, but its tensors need {stop}')
        data = np.frombuffer(self.bytes, np.uint8, stop - start, start)
        if kind.name in PLAIN:
            numbers, dtype = PLAIN[kind.name]
            plain = data.view(numbers).reshape(shape)
            # a copy, since the file is mapped read-only
            return LazyTensor(shape, dtype, lambda rows: torch.from_numpy(np.array(plain[rows])).view(dtype))
        packed = data.reshape(-1, rows_of_bytes[-1])
        try:
            gguf.quants.dequantize(packed[:1], kind)
        except NotImplementedError:
            raise ValueError(f'it has tensors of the type {kind.name}, which the package gguf cannot '
                             'dequantize: use the same model as Q8_0, for example') from None
        packed = data.reshape(rows_of_bytes) if len(shape) > 1 else packed

        def read(rows):
            some = np.array(packed[rows] if len(shape) > 1 else packed)
            values = torch.from_numpy(gguf.quants.dequantize(some, kind))
            return values if len(shape) > 1 else values[0][rows]

        return LazyTensor(shape, torch.float32, read)


def read_gguf(path):
    """(config.json's entries, {name in transformers: LazyTensor}, write_tokenizer) of a GGUF file.

    write_tokenizer(folder) writes tokenizer.json and tokenizer_config.json into a folder that exists; it is
    None for a file without a tokenizer. ValueError if the file is damaged or its model is not supported.
    """
    import_gguf()
    try:
        header = Header(path)
    except OSError:
        raise
    except Exception as error:  # numbers of a file of another format can be anything
        raise ValueError(f'{path} is not a GGUF file, or is damaged or incomplete: {error}') from None
    metadata = header.metadata
    if metadata.get('split.count', 0) > 1:
        raise ValueError(f'{path} is one of {metadata["split.count"]} parts: join them with '
                         'llama-gguf-split --merge')
    try:
        if 'token_embd.weight' not in header.tensors:
            raise ValueError('it has no tensor token_embd.weight')
        theirs = entries_from_gguf(metadata, header.tensors)
        for entry, key in dict(bos_token_id='bos', eos_token_id='eos', pad_token_id='padding').items():
            theirs[entry] = metadata.get(f'tokenizer.ggml.{key}_token_id')
        tensors = tensors_from_gguf(theirs, header.tensors)
        files = tokenizer_from_gguf(metadata)
    except ValueError as error:
        raise ValueError(f'{path} cannot be read: {error}') from None
    except ImportError:
        raise
    except Exception as error:  # an entry is missing, for example, or tokenizers raises a bare Exception
        raise ValueError(f'{path} cannot be read: its metadata are incomplete or wrong: {error!r}') from None

    def write_tokenizer(folder):
        for name, text in files.items():
            with open(os.path.join(folder, name), 'w', encoding='utf-8') as file:
                file.write(text)

    return theirs, tensors, write_tokenizer if files else None


# --- write --------------------------------------------------------------------------------------------------

def write_gguf(path, theirs, tensors, tokenizer_folder, dtype='float16'):
    """Write a GGUF file for llama.cpp.

    theirs: config.json's entries. tensors: {name in transformers: LazyTensor}. dtype: 'float32', 'float16',
    'bfloat16' or 'q8_0'; norms, biases and routers stay in float32, and matrices whose rows are not whole
    blocks of 32 become float16 instead of q8_0. tokenizer_folder: a folder with a tokenizer.json, or None.
    ValueError if llama.cpp cannot represent the model.
    """
    gguf = import_gguf()
    entries = entries_to_gguf(theirs)
    entries |= tokenizer_to_gguf(tokenizer_folder, theirs['vocab_size'])
    tensors = tensors_to_gguf(theirs, tensors)
    name = os.path.splitext(os.path.basename(path))[0]
    entries |= {'general.name': name, 'general.file_type': FILE_TYPES[dtype],
                'general.quantization_version': 2}
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
    if len(shape) == 1 or not name.endswith('.weight') or name.endswith(('_norm.weight', *ALWAYS_FLOAT32)):
        return kinds.F32
    if dtype == 'q8_0' and shape[-1] % 32:
        return kinds.F16
    return kinds[DTYPES[dtype]]


def convert(path, name, stored, kind):
    """The bytes of a tensor in a file. ValueError if a number is too large for float16."""
    gguf = import_gguf()
    tensor = stored.whole().float().contiguous().numpy()
    if kind == gguf.GGMLQuantizationType.F16 and (largest := np.abs(tensor).max()) > np.finfo(np.float16).max:
        raise ValueError(f'{path} was not written: {name} has a value of {largest:g}, which is too large for '
                         'float16: set dtype to bfloat16')
    return gguf.quants.quantize(tensor, kind).view(np.uint8)
