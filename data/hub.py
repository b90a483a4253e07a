"""Weights, tokenizers and datasets by their names on the Hugging Face hub: org/name, or org/name@revision.

Files come into the cache of huggingface_hub, which other programs share, and are taken from there when the hub
cannot be reached. What has such a name on this machine always wins. $HF_ENDPOINT names another hub.
"""
import contextlib
import functools
import hashlib
import json
import os
import re
import shutil
import sys
import time
from typing import NamedTuple

from filelock import FileLock

from data.storage import write_atomically
from data.tokens import FILES

GPT2_NAMES = ('gpt2', 'gpt2-medium', 'gpt2-large', 'gpt2-xl')  # the only names that are known without their org/
NAME = re.compile(r'[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*')
FILE_ENDINGS = ('.gguf', '.pt', '.bin', '.json', '.safetensors')  # org/name is not a path of such a file
TIMEOUTS = dict(model=10, dataset=60)  # seconds that the hub may take to list files; a dataset has up to 100,000
LARGEST = 50_000_000_000  # bytes of a file that the hub gives by HTTP; larger ones come by its own protocol
# Files of weights that are read, besides the tensors: the last two tell quantized weights.
DESCRIPTIONS = ('config.json', 'adapter_config.json', *FILES, 'quantize_config.json', 'quant_config.json',
                'hf_quant_config.json')
TENSORS = ('model', '.safetensors'), ('adapter_model', '.safetensors'), ('pytorch_model', '.bin')  # the first is taken


class Place(NamedTuple):
    """What a name means: kind is 'model' or 'dataset', and path a file or folder in the repository, or ''."""
    name: str
    kind: str
    repository: str
    path: str
    revision: str


def parse(name, kind='model'):
    """The Place of a name; None if the name cannot be one of the hub."""
    path, _, revision = name.partition('@')
    if kind == 'model' and path in GPT2_NAMES:
        path = f'openai-community/{path}'
    parts = path.split('/')
    repository, path = '/'.join(parts[:2]), '/'.join(parts[2:])
    if not NAME.fullmatch(repository) or repository.endswith(FILE_ENDINGS):
        return None
    return Place(name, kind, repository, path, revision or 'main')


def is_name(source):
    """Whether weights or a tokenizer are on the hub: org/name, org/name/FILE.gguf or one of GPT2_NAMES, not here."""
    place = None if os.path.exists(source) else parse(source)
    return place is not None and (not place.path or place.path.endswith('.gguf'))


# --- what is taken of a repository --------------------------------------------------------------------------

def choose_config(names):
    return [name for name in names if name == 'config.json']


def choose_tokenizer(names):
    if FILES[0] not in names:
        advice = 'docs/data.md says how to make one of its tokenizer.model' if 'tokenizer.model' in names else 'name another'
        raise ValueError(f'has no {FILES[0]}: {advice}')
    return [name for name in names if name in FILES]


def choose_weights(names):
    """The config, the tokenizer, and tensors in one form: safetensors if there are any."""
    described = [name for name in names if name in DESCRIPTIONS]
    for stem, ending in TENSORS:
        if stem + ending in names:
            return [*described, stem + ending]
        index = f'{stem}{ending}.index.json'
        if index in names:
            shard = re.compile(rf'{stem}-\d+-of-\d+{re.escape(ending)}')
            return [*described, index, *filter(shard.fullmatch, names)]
    files = [name for name in names if name.endswith('.gguf')]
    advice = f': name one of its GGUF files, such as ORG/NAME/{files[0]}' if files else ''
    raise ValueError(f'has no weights that are read (model.safetensors or pytorch_model.bin){advice}')


# --- fetching -----------------------------------------------------------------------------------------------

def fetch(place, choose):
    """The folder of this machine that has the files of a Place that `choose` takes, downloaded if necessary.

    choose(names): those that are needed of the names in the repository; a ValueError of it begins with 'has no'.
    Of processes that call this at the same time, one downloads, and the others wait. OSError if the files cannot be
    had, with one sentence; what was downloaded until then is kept.
    """
    cache, own = _folders_of(place)
    is_writable = _is_writable(own)
    commit, files, error = _list(place) if is_writable else _list_read_only(place)
    folder = os.path.join(cache, 'snapshots', commit)
    try:
        names = choose(sorted(files))
    except ValueError as problem:
        raise ValueError(f'{place.name} {problem}') from None
    if not is_writable:
        return folder
    with FileLock(os.path.join(own, '.lock')):
        missing = sorted((name for name in names if not os.path.exists(os.path.join(folder, name))),
                         key=lambda name: files[name][0])  # weights come last: where they are, all is
        if missing and error:
            raise OSError(_reason(place, error))
        if missing:
            _download(place, cache, commit, {name: files[name] for name in missing})
        elif error:
            _say(f'{place.name} is taken from the cache, since the hub does not give it ({_first_line(error)})')
    return folder


def fetch_file(place):
    """The path on this machine of the one file that a Place names."""
    def choose(names):
        if place.path not in names:
            raise ValueError(f'has no file {place.path}')
        return [place.path]
    return os.path.join(fetch(place, choose), place.path)


def pinned(name):
    """A name of weights with the commit that this process has: another process finds the same weights by it."""
    place = parse(name)
    folder = fetch(place, choose_config)
    path = f'/{place.path}' if place.path else ''
    return f'{place.repository}{path}@{os.path.basename(folder)}'


def _folders_of(place):
    """The folders of a repository in the cache of huggingface_hub, and beside it for what that does not keep.

    The second has the names of all files, for a time without a network.
    """
    from huggingface_hub.constants import HF_HOME, HF_HUB_CACHE
    name = f'{place.kind}s--{place.repository.replace("/", "--")}'
    return os.path.join(HF_HUB_CACHE, name), os.path.join(HF_HOME, 'kilogpt', name)


@functools.cache  # a process sees one commit
def _list(place):
    """(commit, {file: [bytes, sha256 or None]}, error) of a Place: of the hub, or with the error of the last time."""
    from huggingface_hub import HfApi
    own, began = _folders_of(place)[1], time.time()
    path = os.path.join(own, f'{place.revision.replace("/", "--")}.json')
    os.makedirs(own, exist_ok=True)
    with FileLock(f'{path}.lock'):
        has_list = os.path.exists(path)
        if has_list:
            with open(path, encoding='utf-8') as file:
                commit, files = json.load(file)
            # A commit does not change. Otherwise another process may have asked in the meantime.
            if place.revision == commit or os.path.getmtime(path) >= began:
                return commit, files, None
        try:
            info = HfApi().repo_info(place.repository, revision=place.revision, repo_type=place.kind,
                                     timeout=TIMEOUTS[place.kind], files_metadata=True)
        except Exception as error:  # without a network, the client raises many kinds of errors
            commit, files = (commit, files) if has_list else _list_cache(place) or (None, None)
            if commit is None:
                raise OSError(_reason(place, error)) from None
            if place.revision != commit:  # so that the other processes of this machine do not ask too
                _write_list(path, commit, files)
            return commit, files, error
        files = {file.rfilename: [file.size or 0, file.lfs.sha256 if file.lfs else None] for file in info.siblings}
        for kept in {path, os.path.join(own, f'{info.sha}.json')}:
            _write_list(kept, info.sha, files)
        return info.sha, files, None


def _write_list(path, commit, files):
    with write_atomically(path) as file:
        file.write(json.dumps([commit, files]).encode())


def _is_writable(folder):
    """Whether a folder, which may not exist yet, can be written. Clusters share caches that users may only read."""
    while not os.path.exists(folder):
        folder = os.path.dirname(folder)
    return os.access(folder, os.W_OK)


def _list_read_only(place):
    """The list of `_list` for a cache that cannot be written: what is there."""
    from huggingface_hub.constants import HF_HOME
    found = _list_cache(place)
    if not found:
        raise OSError(f'{place.name} is not in the cache, and {HF_HOME} cannot be written: set HF_HOME to a folder of '
                      'your own')
    return *found, None


def _list_cache(place):
    """The list of what another program has put into the cache of a model, as it is there; None without a model."""
    from huggingface_hub import try_to_load_from_cache
    found = try_to_load_from_cache(place.repository, 'config.json', revision=place.revision, repo_type=place.kind)
    if not isinstance(found, str):
        return None
    folder = os.path.dirname(found)
    return os.path.basename(folder), {name: [0, None] for name in os.listdir(folder)}


def _download(place, cache, commit, files):
    """Download {file: [bytes, sha256 or None]} into the cache, the smallest first."""
    from huggingface_hub import hf_hub_download
    os.makedirs(os.path.join(cache, 'blobs'), exist_ok=True)
    sizes = {name: size - _size_here(cache, digest) for name, (size, digest) in files.items()}
    total, free = sum(sizes.values()), shutil.disk_usage(cache).free
    if total > free:
        raise OSError(f'{place.name} needs {_text(total)} in {cache}, which has only {_text(free)} free: set HF_HOME '
                      'to a folder on a larger disk')
    if sum(size for size, _ in files.values()) > 1e6:
        _say(f'downloading {place.name}: {len(files)} file(s), {_text(total)}, into {cache}')
    try:
        for name, (size, digest) in files.items():
            if digest and size <= LARGEST:
                _download_large(place, cache, commit, name, size, digest)
            with _without_bars() if size <= LARGEST else contextlib.nullcontext():
                hf_hub_download(place.repository, name, repo_type=place.kind, revision=commit)
        if place.revision != commit:  # by which other programs find the commit without a network
            with write_atomically(os.path.join(cache, 'refs', place.revision)) as file:
                file.write(commit.encode())
    except Exception as error:  # as in _list
        raise OSError(_reason(place, error, name)) from None


@contextlib.contextmanager
def _without_bars():
    """A context in which huggingface_hub shows no progress: of small files it would be a line each."""
    from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars
    shows_bars = not are_progress_bars_disabled()
    disable_progress_bars()
    try:
        yield
    finally:
        if shows_bars:
            enable_progress_bars()


def _part(cache, digest):
    return os.path.join(cache, 'blobs', f'{digest}.incomplete')


def _size_here(cache, digest):
    """The bytes of a file that an interrupted download has left."""
    part = _part(cache, digest)
    return os.path.getsize(part) if digest and os.path.exists(part) else 0


def _download_large(place, cache, commit, name, size, digest):
    """Put a file where hf_hub_download finds it. An interrupted download continues, as not with hf_hub_download."""
    from huggingface_hub import hf_hub_url
    from huggingface_hub.file_download import http_get
    from huggingface_hub.utils import build_hf_headers
    blob, part = os.path.join(cache, 'blobs', digest), _part(cache, digest)
    if os.path.exists(blob):
        return
    begin = _size_here(cache, digest)
    if begin > size:  # several processes have written it, on a file system without locks
        os.remove(part)
        begin = 0
    _say(f'  {name}, {_text(size)}' + (f', of which {_text(begin)} are here' if begin else ''))
    with open(part, 'ab') as file:
        http_get(hf_hub_url(place.repository, name, repo_type=place.kind, revision=commit), file, resume_size=begin,
                 headers=build_hf_headers(), expected_size=size, displayed_filename=name)
    if begin:
        with open(part, 'rb') as file:
            is_whole = hashlib.file_digest(file, 'sha256').hexdigest() == digest
        if not is_whole:
            os.remove(part)
            raise OSError('its parts do not fit together')
    os.replace(part, blob)


@functools.cache  # once is enough
def _say(line):
    print(line, file=sys.stderr, flush=True)


def _text(count):
    """A number of bytes for a person."""
    for unit, size in (('GB', 1e9), ('MB', 1e6)):
        if count >= size:
            return f'{count / size:,.1f} {unit}'
    return f'{count / 1e3:,.1f} kB'


def _reason(place, error, file=''):
    """One sentence: why a Place, or a file of it, cannot be had."""
    from huggingface_hub import constants, errors
    error = error.__cause__ if isinstance(error, errors.LocalEntryNotFoundError) and error.__cause__ else error
    status = getattr(getattr(error, 'response', None), 'status_code', None)
    hub = constants.ENDPOINT
    page = f'{hub}/{"datasets/" if place.kind == "dataset" else ""}{place.repository}'
    if isinstance(error, errors.GatedRepoError):
        return (f'{place.name} is gated: accept its terms at {page}, and set HF_TOKEN to a token of that account, or '
                'run hf auth login')
    if isinstance(error, errors.RevisionNotFoundError):
        return f'{place.name} does not exist: {page} has no revision {place.revision!r}'
    if isinstance(error, errors.RepositoryNotFoundError):
        return (f'{place.name} does not exist here, and there is no {place.kind} {page}: check the name, or if it is '
                'private, set HF_TOKEN to a token that may read it')
    if status in (401, 403):
        return (f'{hub} refuses the token with which {place.name} was asked for (status {status}): make another, and '
                'set HF_TOKEN to it, or run hf auth login')
    if file:
        return (f'{file} of {place.name} could not be downloaded completely ({_first_line(error)}): the same command '
                'continues where it ended')
    here = 'folder' if place.kind == 'model' else 'file'
    return (f'{place.name} is neither a {here} nor in the Hugging Face cache, and could not be '
            f'downloaded ({_first_line(error)}): go online, or name what is on this machine')


def _first_line(error):
    """The kind of an error, with the first line of its message if it has one."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    text = (str(error).strip().splitlines() or [''])[0]
    return f'{type(error).__name__}: {text}' if text else type(error).__name__
