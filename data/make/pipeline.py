"""Token files of a corpus: many files of documents, filtered, deduplicated and shuffled, by many processes.

Each step is a number of tasks that do not depend on one another, and what a task writes depends on its input
alone. So the result is the same, byte for byte, for any number of processes or machines, and after any restart.
Memory is bounded: a task holds a part of a file, or the documents of one shard.

1. tokenize: of each input file, documents pass the filter and become tokens, which are sorted by shard.
2. find_copies: of each part of all digests of documents, which of them have occurred before.
3. mark_copies: of each input file, which documents are kept.
4. write_shard: the documents of each shard, in their final order.

The files between steps are in the folder of the dataset, in .partial, which all machines must share.
"""
import contextlib
import functools
import hashlib
import json
import multiprocessing
import os
import pathlib
import runpy
import struct
import sys
import tempfile
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool

import numpy as np

from data import storage
from data.make.prepare import cut_text, start_worker
from data.make.readers import DOCUMENTS, form_of, read_pieces
from data.storage import write_atomically
from data.tokens.tokenizer import get_tokenizer

# Of a document: its shard (0 = val), its place in the shard, its number in the file, its tokens in the file
INDEX = np.dtype([('shard', '<u4'), ('key', '<u8'), ('number', '<u4'), ('begin', '<u8'), ('length', '<u4')])
DIGEST = np.dtype([('first', '<u8'), ('second', '<u8'), ('number', '<u4')])  # of the text of a document
SEGMENT_TOKENS = 2 ** 25  # tokens that are sorted by shard at a time
DIGESTS_AT_ONCE = 2 ** 25  # digests in which copies are found at a time
TRIES = 3  # of a task whose process was killed


# --- steps --------------------------------------------------------------------------------------------------

def tokenize(job, file):
    """Write the tokens, the index and the digests of the documents of input file number `file`."""
    path = job['files'][file]
    tokenizer, keep = _tokenizer_of(json.dumps(job['tokenizer'])), _filter_of(job['filter'])
    dtype = np.dtype(job['dtype']).newbyteorder('<')
    counts = dict(documents=0, filtered=0, problem='')
    index, digests, segment = [], [], []
    target = pathlib.Path(job['folder'], f'file_{file:06d}')
    with open(f'{target}.bin', 'wb') as tokens:
        def flush():
            segment.sort(key=lambda entry: entry[:2])  # by shard and place
            for shard, key, number, ids in segment:
                index.append((shard, key, number, tokens.tell() // dtype.itemsize, len(ids)))
                tokens.write(ids.tobytes())
            segment.clear()

        n_tokens = 0
        try:
            for text in _documents(path, job['field']):
                number = counts['documents']
                counts['documents'] += 1
                if keep:
                    text = _filtered(keep, text, job['filter'])
                if not text:
                    counts['filtered'] += 1
                    continue
                digest = hashlib.blake2b(text.encode(errors='replace'), digest_size=16).digest()
                ids = _encode(tokenizer, text, dtype)
                segment.append((*_place(job, file, number, digest), number, ids))
                digests.append((*struct.unpack('<QQ', digest), number))
                n_tokens += len(ids)
                if n_tokens >= SEGMENT_TOKENS:
                    flush()
                    n_tokens = 0
        except UnreadableFile as error:  # none of its documents is used
            counts |= dict(documents=0, filtered=0, problem=str(error))
            index, digests, segment = [], [], []
        flush()
    _save(f'{target}.index.npy', np.sort(np.array(index, INDEX), order=['shard', 'key', 'number']))
    _save(f'{target}.digests.npy', np.sort(np.array(digests, DIGEST), order=['first', 'second', 'number']))
    return counts


def find_copies(job, part):
    """Find the documents that are copies of earlier ones, among those whose digests are in this part."""
    parts = job['digest_parts']
    low, high = ((2 ** 64 * edge // parts) for edge in (part, part + 1))
    found, files = [], []
    for file in range(len(job['files'])):
        digests = np.load(f'{job["folder"]}/file_{file:06d}.digests.npy', mmap_mode='r')
        begin, end = (np.searchsorted(digests['first'], np.uint64(edge)) if edge < 2 ** 64 else len(digests)
                      for edge in (low, high))
        found.append(np.array(digests[begin:end]))
        files.append(np.full(end - begin, file, np.uint32))
    found, files = np.concatenate(found), np.concatenate(files)
    order = np.lexsort([found['number'], files, found['second'], found['first']])
    found, files = found[order], files[order]
    is_copy = np.zeros(len(found), bool)
    is_copy[1:] = (found['first'][1:] == found['first'][:-1]) & (found['second'][1:] == found['second'][:-1])
    copies = np.stack([files[is_copy], found['number'][is_copy]], axis=1)
    _save(f'{job["folder"]}/copies_{part:06d}.npy', copies[np.lexsort(copies.T[::-1])])
    return dict(copies=int(is_copy.sum()))


def mark_copies(job, file):
    """Write which documents of an input file are not copies of earlier ones."""
    is_kept = np.ones(job['documents'][file], bool)
    for part in range(job['digest_parts']):
        copies = np.load(f'{job["folder"]}/copies_{part:06d}.npy', mmap_mode='r')
        begin, end = np.searchsorted(copies[:, 0], [file, file + 1])
        is_kept[copies[begin:end, 1]] = False
    _save(f'{job["folder"]}/file_{file:06d}.kept.npy', is_kept)
    return {}


def write_shard(job, shard):
    """Write the documents of a shard; returns the counts of tokens and documents, and the file's sha256."""
    entries, files = [], []
    for file in range(len(job['files'])):
        base = f'{job["folder"]}/file_{file:06d}'
        index = np.load(f'{base}.index.npy', mmap_mode='r')
        begin, end = np.searchsorted(index['shard'], [shard, shard + 1])
        mine = np.array(index[begin:end])
        if job['deduplicate']:
            mine = mine[np.load(f'{base}.kept.npy', mmap_mode='r')[mine['number']]]
        entries.append(mine)
        files.append(np.full(len(mine), file))
    entries, files = np.concatenate(entries), np.concatenate(files)
    begins = np.cumsum(entries['length'], dtype=np.int64) - entries['length']
    dtype = np.dtype(job['dtype']).newbyteorder('<')
    tokens = np.empty(int(entries['length'].sum(dtype=np.int64)), dtype)
    for file in np.unique(files):  # one file is read after the other
        stored = np.memmap(f'{job["folder"]}/file_{file:06d}.bin', dtype, 'r')
        for row in np.flatnonzero(files == file):
            entry, begin = entries[row], begins[row]
            tokens[begin:begin + entry['length']] = stored[entry['begin']:entry['begin'] + entry['length']]
    order = np.lexsort([entries['number'], files, entries['key']])
    digest = hashlib.sha256()
    with write_atomically(f'{job["folder"]}/shard_{shard:06d}.bin') as file:
        for row in order:
            document = tokens[begins[row]:begins[row] + entries['length'][row]].tobytes()
            digest.update(document)
            file.write(document)
    return dict(tokens=len(tokens), documents=len(entries), sha256=digest.hexdigest())


# --- documents ----------------------------------------------------------------------------------------------

class UnreadableFile(Exception):
    """An input file that cannot be read. A ValueError of the filter is something else, and ends the command."""


def _documents(path, field):
    """Yield the documents of a file: its rows, or its whole text. A remote file is downloaded first."""
    with contextlib.ExitStack() as stack:
        if storage.is_url(path):
            folder = stack.enter_context(tempfile.TemporaryDirectory())
            path = storage.download(path, os.path.join(folder, os.path.basename(path)))
        pieces = (text for text, _ in read_pieces(path, field))
        try:
            if form_of(path) in DOCUMENTS:
                yield from pieces
            else:
                yield ''.join(pieces)
        except ValueError as error:
            raise UnreadableFile(str(error)) from None


def _encode(tokenizer, text, dtype):
    """The ids of a document, with those that end it."""
    parts = [tokenizer.encode_to_numpy(part) for part in (cut_text(text) if tokenizer.can_cut else [text])]
    parts.append(tokenizer.document_end)
    return np.concatenate(parts, dtype=dtype, casting='unsafe')


def _place(job, file, number, digest):
    """(shard, place in the shard) of a document: shard 0 is the validation split.

    The validation split is chosen by the text, so that no copy of a document of one split is in the other.
    """
    seed = struct.pack('<Q', job['seed'])
    is_val = _as_fraction(hashlib.blake2b(digest + seed, digest_size=8)) < job['val_fraction']
    drawn = hashlib.blake2b(struct.pack('<QQ', file, number) + seed, digest_size=8)
    key = struct.unpack('<Q', drawn.digest())[0] if job['shuffle'] else file << 32 | number
    if is_val:
        return 0, key
    if job['shuffle']:
        return 1 + (key * job['shards'] >> 64), key
    return 1 + job['shard_of_file'][file], key


def _as_fraction(hashed):
    return struct.unpack('<Q', hashed.digest())[0] / 2 ** 64


def _filtered(keep, text, path):
    result = keep(text)
    if result is None or isinstance(result, bool):
        return text if result else None
    if isinstance(result, str):
        return result
    raise ValueError(f'keep of {path} returned {result!r:.40}: it must return True or False, or the text to keep')


@functools.lru_cache(1)
def _filter_of(path):
    """The function `keep` of a Python file; None without one."""
    if not path:
        return None
    keep = runpy.run_path(path).get('keep')
    if not callable(keep):
        raise ValueError(f'{path} has no function keep(text)')
    return keep


@functools.lru_cache(1)
def _tokenizer_of(meta):
    return get_tokenizer(json.loads(meta))


def _save(path, array):
    with write_atomically(path) as file:
        np.save(file, array)


# --- tasks --------------------------------------------------------------------------------------------------

def run_tasks(step, job, numbers, engine):
    """[what step(job, number) returns for each number], of earlier runs too: each result is in a file."""
    from tqdm import tqdm
    folder = pathlib.Path(job['folder'])
    paths = {number: folder / f'{step.__name__}_{number:06d}.json' for number in numbers}
    missing = [number for number in numbers if not paths[number].exists()]
    with tqdm(desc=step.__name__.replace('_', ' '), total=len(paths), initial=len(paths) - len(missing),
              disable=None) as bar:
        for number, result in engine(functools.partial(step, job), missing):
            with write_atomically(paths[number]) as file:
                file.write(json.dumps(result).encode())
            bar.update()
    return [json.loads(path.read_text()) for path in paths.values()]


def processes_engine(num_proc):
    """An engine for run_tasks: num_proc processes of this machine."""
    def run(function, numbers):
        missing = list(numbers)
        for attempt in range(TRIES):
            try:
                with ProcessPoolExecutor(num_proc, multiprocessing.get_context('spawn'), start_worker) as pool:
                    pending = {pool.submit(function, number): number for number in missing}
                    while pending:
                        for done in wait(pending, return_when=FIRST_COMPLETED).done:
                            number = pending[done]
                            result = done.result()
                            del pending[done]
                            missing.remove(number)
                            yield number, result
                return
            except BrokenProcessPool:
                print('warning: a process was killed, perhaps for lack of memory: its tasks start again',
                      file=sys.stderr, flush=True)
        raise OSError(f'processes were killed {TRIES} times: set a smaller num_proc, or more n_shards. The same '
                      'command then continues')
    return run


def ray_engine(address, num_proc):
    """An engine for run_tasks: the processors of a Ray cluster. Ray repeats tasks whose process or node is lost.

    address: 'auto' for the cluster that this machine belongs to, 'local' for one on this machine alone, or
    HOST:PORT. num_proc: tasks at a time; 0 = one for each processor.
    """
    try:
        import ray
    except ImportError:
        raise ImportError('ray needs the package: pip install "ray[default]"') from None
    root = str(pathlib.Path(__file__).absolute().parents[2])
    ray.init(address, log_to_driver=False, runtime_env=dict(env_vars=dict(PYTHONPATH=root)))

    def run(function, numbers):
        task = ray.remote(num_cpus=1, max_retries=TRIES)(function.func)
        job = ray.put(*function.args)
        most = num_proc or int(ray.cluster_resources()['CPU'])
        waiting, pending = list(numbers)[::-1], {}
        while waiting or pending:
            while waiting and len(pending) < most:
                number = waiting.pop()
                pending[task.remote(job, number)] = number
            for done in ray.wait(list(pending))[0]:
                try:
                    yield pending.pop(done), ray.get(done)
                except ray.exceptions.RayTaskError as error:
                    raise error.cause from None
                except ray.exceptions.RayError as error:
                    raise OSError(f'Ray gave up on a task: {error}; the same command continues') from None
    return run
