"""The names and shapes of our weights, and the weights of a checkpoint, read tensor by tensor."""
import os

import torch

from data import storage
from kilogpt.run.checkpoint_files import safe_reader
from kilogpt.weights.tensors import LazyTensor, checked, have_same_values, narrowed
from model import GPT

# Tables with a row for each token. Our model pads them to more rows than the vocabulary has.
TOKEN_TABLES = ('transformer.wte.weight', 'lm_head.weight')


def expected_shapes(config):
    """{name: shape} of the parameters of a GPTConfig's model, without the padding of the vocabulary.

    The scales of weights in 8 bits are not among them: they are computed from the weights.
    """
    with torch.device('meta'):
        shapes = {name: tuple(p.shape) for name, p in GPT(config, seed=None).named_parameters()
                  if not name.endswith('.weight_scale')}
    return {name: (config.vocab_size, config.n_embd) if name in TOKEN_TABLES else shape
            for name, shape in shapes.items()}


def drop_copied_head(tensors):
    """Delete the output head from {name: LazyTensor} if it equals the token table: tied weights are one."""
    if tensors.keys() >= {*TOKEN_TABLES} and have_same_values(*(tensors[name] for name in TOKEN_TABLES)):
        del tensors['lm_head.weight']


def open_weights(path, config, base=()):
    """{name: LazyTensor} of a checkpoint's weights, without the padding of the vocabulary.

    base: {name: LazyTensor} of the weights that a checkpoint of adapters does not hold.
    ValueError if the checkpoint has another model than `config`, or, when a tensor is read, NaN or infinity.
    """
    found = open_checkpoint(path)
    weights = dict(base)
    for name, shape in expected_shapes(config).items():
        if name in weights:
            continue
        stored = found.get(f'model.{name}')
        if stored is None or stored.shape[1:] != shape[1:] or stored.shape[0] < shape[0]:
            raise ValueError(f'{path} holds {stored and stored.shape} where the model has {name} {shape}')
        stored = checked(stored, path, f'model.{name}', 'delete this checkpoint to use another one')
        weights[name] = narrowed(stored, 0, shape[0])
    return weights


def open_checkpoint(path):
    """{key: LazyTensor} of a checkpoint's tensors that have rows. The metadata is read once."""
    from torch.distributed.checkpoint.metadata import MetadataIndex
    from torch.distributed.checkpoint.utils import _create_file_view
    metadata = safe_reader(path).read_metadata()
    loaded = {}  # {MetadataIndex: chunk} of the tensor that was read last

    def load(key, chunk):
        index = MetadataIndex(key, chunk.offsets)
        if index not in loaded:
            for other in [other for other in loaded if other.fqn != key]:
                del loaded[other]
            place = metadata.storage_data[index]
            with storage.open_to_read(os.path.join(path, place.relative_path)) as file:
                view = _create_file_view(file, place.offset, place.length)
                loaded[index] = torch.load(view, map_location='cpu', weights_only=True)
        return loaded[index]

    def stored_in_checkpoint(key, found):
        shape, dtype = tuple(found.size), found.properties.dtype

        def read(rows):
            if len(found.chunks) == 1:
                return load(key, found.chunks[0])[rows]
            start, stop, _ = rows.indices(shape[0])
            whole = torch.empty(max(stop - start, 0), *shape[1:], dtype=dtype)
            for chunk in found.chunks:
                top = chunk.offsets[0]
                first, last = max(start, top), min(stop, top + chunk.sizes[0])
                if first < last:
                    columns = [slice(offset, offset + size)
                               for offset, size in zip(chunk.offsets[1:], chunk.sizes[1:])]
                    part = load(key, chunk)[first - top:last - top]
                    whole[(slice(first - start, last - start), *columns)] = part
            return whole

        return LazyTensor(shape, dtype, read)

    return {key: stored_in_checkpoint(key, found) for key, found in metadata.state_dict_metadata.items()
            if found.size}
