"""The folders of datasets, their shards, and what their meta.json says about the tokens.

A folder is a path on this machine, or a URL in object storage.
"""
import contextlib
import fnmatch
import hashlib
import json
import os
import pickle
import subprocess
import sys
from typing import NamedTuple

from data import storage
from data.mixtures import parse_mixture
from data.storage import write_atomically
from data.tokens import FILES
from data.tokens.tokenizer import CharTokenizer, describe_tokenizer

DATA = os.path.dirname(os.path.abspath(__file__))
NUMBERS, TEACHER_FILE = 'train.teacher', 'teacher.json'  # beside train.bin: what a teacher gives its tokens
REFERENCE = '.reference'  # the log-probabilities of pairs are in train.bin.reference, beside train.bin
REFERENCE_FILE = 'reference.json'  # in a dataset of pairs: of which weights the log-probabilities are
TOKENIZER_KEYS = ('tokenizer', 'chars', 'digest', 'folder')  # of a meta
SMALL_DATASETS = ('shakespeare_char', 'shakespeare')  # a run prepares these itself if they are missing
# The digest of a shard covers this many blocks, spread evenly from its beginning to its end.
DIGEST_BLOCKS, DIGEST_BLOCK_BYTES = 8, 4096


def open_dataset(dataset, processes):
    """The sources of a dataset, {name: Source}; prepares missing small ones. All processes call this.

    dataset: a name or a path, or a mixture of several (data.mixtures.parse_mixture). Raises ValueError if one
    does not exist or cannot be used, or if their tokenizers differ.
    """
    # The first process of the run prepares a dataset while the others wait. Then the first process of each
    # node does the same, since the nodes may not share a file system.
    for is_preparer in (processes.is_first, processes.local_rank == 0):
        if is_preparer:
            for name in parse_mixture(dataset):
                prepare_small_dataset(name)
                read_meta(dataset_folder(name))  # writes the meta.json of a dataset of nanoGPT
        processes.barrier()
    return find_sources(dataset)


def check_exists(dataset):
    """Raise ValueError if a dataset, or one of a mixture, is missing on this machine and `open_dataset` cannot help."""
    for name in parse_mixture(dataset):
        if name not in SMALL_DATASETS and not storage.is_url(name):
            find_dataset(name)


class Source(NamedTuple):
    """A dataset, alone or in a mixture: its folder, and what its meta.json says."""
    folder: str
    meta: dict


def find_sources(dataset):
    """{name: Source} of a dataset or a mixture; ValueError as in `open_dataset`."""
    sources = {}
    for name in parse_mixture(dataset):
        folder = find_dataset(name)
        sources[name] = Source(folder, read_meta(folder))
    first, *others = sources
    for name in others:
        (ours, size), (theirs, other_size) = ((describe_tokenizer(meta), meta['vocab_size'])
                                              for meta in (sources[first].meta, sources[name].meta))
        if (ours, size) != (theirs, other_size):
            raise ValueError(f'the sources of a mixture need one tokenizer, but {first} has {ours} with '
                             f'{size:,} tokens and {name} has {theirs} with {other_size:,}: prepare one of '
                             'them again')
    return sources


def prepare_small_dataset(dataset):
    """Run the prepare.py of a small dataset if the dataset is missing; ValueError if prepare.py fails."""
    folder = os.path.join(DATA, dataset)
    if dataset in SMALL_DATASETS and not os.path.exists(os.path.join(folder, 'val.bin')):
        print(f'{dataset} is not prepared yet: running data/{dataset}/prepare.py', flush=True)
        if subprocess.run([sys.executable, os.path.join(folder, 'prepare.py')]).returncode:
            raise ValueError(f'dataset {dataset!r} could not be prepared')


def places_of(dataset):
    """The folders that the name of a dataset can mean, the preferred one first.

    A plain name is a folder in data/, or else in the current directory. A path is relative to the current
    directory, or else to data/. A URL is one place.
    """
    if storage.is_url(dataset):
        return [dataset.rstrip('/')]
    dataset = os.path.expanduser(dataset)
    places = [os.path.join(DATA, dataset), os.path.abspath(dataset)]
    return places[::-1] if os.path.dirname(dataset) else places


def dataset_folder(dataset):
    """The first of a dataset's places that has token files, or else the preferred place."""
    places = places_of(dataset)
    return next(filter(_has_tokens, places), places[0])


def _has_tokens(folder):
    return any(name.endswith('.bin') for name in _names_in(folder))


def _names_in(folder):
    """The names of the files in a dataset's folder, sorted."""
    names = storage.names_in(folder)
    if not names and str(folder).startswith('http'):  # a web server that does not list its folders
        with contextlib.suppress(FileNotFoundError, ValueError):
            names = sorted(json.loads(storage.read(f'{folder}/meta.json')).get('tokens', {}))
    return names


def find_dataset(dataset):
    """The folder of a dataset; ValueError if it has no token files."""
    folder = dataset_folder(dataset)
    if _has_tokens(folder):
        return folder
    if storage.is_url(dataset):
        raise ValueError(f'dataset {dataset!r} has no token files (*.bin) there: is the name right? A web '
                         'server must list its folder, or have a meta.json with "tokens" there')
    places = places_of(dataset)
    scripts = filter(os.path.exists, [os.path.join(place, 'prepare.py') for place in places])
    advice = (f'make it from text with python data/text/prepare.py --input=FILES --out={dataset} (from '
              'conversations with data/conversations, from pairs of answers with data/preferences)')
    for path in scripts:
        advice = f'run python {os.path.relpath(path)} (the first lines of that file have examples)'
    from data.names import like_prepared
    raise ValueError(f'dataset {dataset!r} has no data in {" or ".join(dict.fromkeys(places))}: {advice}'
                     f'{like_prepared(dataset)}')


def read_meta(folder):
    """The content of a dataset's meta.json; ValueError if it cannot be used.

    If there is only nanoGPT's meta.pkl, a meta.json is written from it. Without either, a dataset has GPT-2's
    vocabulary, as in nanoGPT.
    """
    path = os.path.join(folder, 'meta.json')
    if not storage.exists(path):
        if os.path.exists(os.path.join(folder, 'meta.pkl')):
            return _convert_pickle(folder, path)
        return dict(vocab_size=50257, dtype='uint16', tokenizer='gpt2', separator=50256)
    try:
        meta = json.loads(storage.read(path))
    except ValueError as error:
        raise ValueError(f'{path} is not JSON ({error}): prepare the dataset again') from None
    if not isinstance(meta, dict):
        raise ValueError(f'{path} is not a JSON object: prepare the dataset again')
    if meta.get('dtype') not in ('uint16', 'uint32') or not isinstance(meta.get('vocab_size'), int):
        raise ValueError(f'{path} needs an integer vocab_size and a dtype of uint16 or uint32; it holds '
                         f'vocab_size={meta.get("vocab_size")!r}, dtype={meta.get("dtype")!r}')
    return meta | {'folder': storage.local_copy(folder, FILES)} if 'digest' in meta else meta


class _PlainUnpickler(pickle.Unpickler):
    """Reads dicts, lists, strings and numbers. Anything else in a pickle has a name, which is refused."""

    def find_class(self, module, name):
        raise ValueError(f'it names {module}.{name}')


def _convert_pickle(folder, path):
    """Write a meta.json to `path` from nanoGPT's meta.pkl, of which no code runs; returns its content."""
    try:
        with open(os.path.join(folder, 'meta.pkl'), 'rb') as file:
            meta = _convert_meta(_PlainUnpickler(file).load())
    except Exception as error:  # damaged bytes make an unpickler raise errors of many classes
        raise ValueError(f'{folder} has a meta.pkl but no meta.json; a pickle can run code, so only one with '
                         f"nanoGPT's vocab_size, stoi and itos is read, and this one is not ({error}): "
                         'prepare the dataset again') from None
    with contextlib.suppress(OSError):  # in a folder that cannot be written, each run reads the meta.pkl
        with write_atomically(path) as file:
            file.write(json.dumps(meta, indent=1).encode())
        has_tokenizer = 'with' if 'tokenizer' in meta else 'without'
        print(f'wrote {path} from the meta.pkl there, {has_tokenizer} a tokenizer', file=sys.stderr)
    return meta


def _convert_meta(theirs):
    """The content of a meta.json for nanoGPT's dict of vocab_size, stoi {token: id} and itos {id: token}.

    It has a tokenizer if the tokens are single characters.
    """
    vocab_size, stoi, itos = theirs['vocab_size'], theirs.get('stoi', {}), theirs.get('itos', {})
    if type(vocab_size) is not int or vocab_size < max(1, len(itos)):
        raise ValueError(f'its vocab_size is {vocab_size!r}')
    chars = [itos[i] for i in range(len(itos))]
    if stoi != {char: i for i, char in enumerate(chars)}:
        raise ValueError('its stoi is not the inverse of its itos')
    meta = dict(vocab_size=vocab_size, dtype='uint16' if vocab_size <= 65536 else 'uint32')
    is_char = chars and all(isinstance(char, str) and len(char) == 1 for char in chars)
    return CharTokenizer(chars).meta() | meta if is_char else meta


def join_tokenizers(model_meta, source, meta, dataset,
                    advice='set --dataset to data with the tokenizer of the model, or --init_from=scratch'):
    """The dataset's meta, with the tokenizer of the model's meta if the dataset does not name one.

    ValueError if both name one and they differ. source, dataset: names of the model and of the dataset.
    advice: what the sentence of the error says to do.
    """
    theirs, ours = describe_tokenizer(model_meta), describe_tokenizer(meta)
    if theirs and ours and theirs != ours:
        raise ValueError(
            f'the model of {source} has the tokenizer {theirs}, but dataset {dataset!r} has {ours}: {advice}')
    if theirs and not ours:
        return meta | {key: model_meta[key] for key in TOKENIZER_KEYS if key in model_meta}
    return meta


def find_shards(folder, split):
    """The paths of a split's token files, in the order of their tokens: [] if there are none."""
    names, found = _names_in(folder), []
    for pattern in (f'{split}.bin', f'{split}_*.bin', f'*_{split}_*.bin'):
        found += fnmatch.filter(names, pattern)
    return [os.path.join(folder, name) for name in found]


def fingerprint(sources):
    """{file: [size in bytes, digest]} of the shards of sources, to see whether the data have changed.

    Of pairs, the files with the log-probabilities of a reference count too, if there are any.

    The digest, a hexadecimal number, covers a few blocks of the shard, not all of it. A change of one token
    can therefore go unnoticed, but another text or tokenizer cannot. In a mixture, a file is NAME/FILE.
    """
    shards = {}
    files = [(name, path) for name, source in sources.items() for split in ('train', 'val')
             for path in find_shards(source.folder, split)]
    files += [(name, path + REFERENCE) for name, path in files
              if sources[name].meta.get('pairs') and storage.exists(path + REFERENCE)]
    for name, path in files:
        digest, size = hashlib.blake2b(digest_size=8), storage.size_of(path)
        begins = [max(0, size - DIGEST_BLOCK_BYTES) * block // (DIGEST_BLOCKS - 1)
                  for block in range(DIGEST_BLOCKS)]
        for content in storage.read_ranges([(path, begin, min(size, begin + DIGEST_BLOCK_BYTES))
                                            for begin in begins]):
            digest.update(content)
        file = os.path.basename(path)
        shards[f'{name}/{file}' if len(sources) > 1 else file] = [size, digest.hexdigest()]
    return shards
