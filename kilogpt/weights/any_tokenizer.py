"""The tokenizer that a key `tokenizer` names, wherever it is: in a dataset, a run, a GGUF file, weights, on the hub."""
import atexit
import os
import shutil
import tempfile

from data import hub
from data.datasets import dataset_folder, find_shards, read_meta
from data.storage import is_url
from data.tokens import tokenizer_folder
from data.tokens.json_tokenizer import JsonTokenizer, load_tokenizer
from data.tokens.tokenizer import get_tokenizer


def find_tokenizer(name):
    """The Tokenizer that a name means, as in find_meta."""
    return get_tokenizer(_stored_meta(name) or dict(tokenizer=name))  # of gpt2-gigatoken, the meta says gpt2


def find_meta(name):
    """The meta of the tokenizer that a name means.

    name: a run's folder, a GGUF file, a folder with a tokenizer.json or such a file, a dataset that has the
    tokenizer, org/name on the hub, or the tokenizer's own name, such as 'gpt2'. Raises the errors of read_meta,
    get_tokenizer and hub.fetch.
    """
    return _stored_meta(name) or get_tokenizer(dict(tokenizer=name)).meta()


def _stored_meta(name):
    """The meta that find_meta finds in files; None for a tokenizer's own name."""
    folder = dataset_folder(name)
    if find_shards(folder, 'train') or os.path.exists(os.path.join(folder, 'meta.json')):
        return read_meta(folder)
    if hub.is_name(name) and name not in hub.GPT2_NAMES:  # an encoding of tiktoken has the first of them
        place = hub.parse(name)
        if not place.path:
            return load_tokenizer(hub.fetch(place, hub.choose_tokenizer)).meta()
        name = hub.fetch_file(place)
    if name.endswith('.gguf') and os.path.exists(name):
        from kilogpt.weights.gguf.files import read_gguf  # imports torch, which the preparation of data does not need
        return unpack(name, read_gguf(name)[-1])
    if os.path.exists(os.path.join(name, JsonTokenizer.name)) or os.path.isfile(name):
        return load_tokenizer(name).meta()
    if os.path.isdir(os.path.join(name, 'ckpt')) or is_url(name):
        from kilogpt.run import checkpoint  # as above
        if path := checkpoint.choose(name):
            return checkpoint.read_state(path)['tokenizer'] or _no_tokenizer(name)
    if os.path.exists(os.path.join(tokenizer_folder(name), JsonTokenizer.name)):
        return load_tokenizer(tokenizer_folder(name)).meta()
    if os.path.isdir(name):
        _no_tokenizer(name)
    return None


def _no_tokenizer(name):
    raise ValueError(f'{name} has no tokenizer: it is neither a run that names one, nor a dataset, nor a folder with a '
                     f'{JsonTokenizer.name}')


def unpack(path, write_tokenizer):
    """The meta of a GGUF file's tokenizer, whose files are in a temporary folder from now on.

    write_tokenizer: of read_gguf, None if the file does not have one, which is a ValueError.
    """
    if not write_tokenizer:
        _no_tokenizer(path)
    folder = tempfile.mkdtemp(prefix='kilogpt-tokenizer-')
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    write_tokenizer(folder)
    return load_tokenizer(folder).meta()
