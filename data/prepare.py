"""What the datasets' prepare.py share: getting text, tokenising it on many cores, writing token files.

A split is a function read(start): an iterator over its texts from number `start` on, as pairs (text, ends_document).
The texts are the same, in the same order, each time: so a run that was killed goes on after its last complete shard.
"""
import glob
import itertools
import json
import multiprocessing
import os
import pathlib
import re
import shutil
import signal
import sys
import threading
from collections import deque
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool

import numpy as np

from data.fetch import DATA, write_atomically


def find_files(patterns):
    """The files that comma-separated globs match, in their order. ValueError if one matches none."""
    paths = []
    for pattern in patterns.split(','):
        found = sorted(path for path in glob.glob(os.path.expanduser(pattern), recursive=True) if os.path.isfile(path))
        if not found:
            raise ValueError(f'there is no file {pattern!r}: --input takes files or globs, separated by commas')
        paths += found
    return list(dict.fromkeys(paths))


def read_text(path):
    """A file's text, its line ends as \\n. ValueError if it is not UTF-8."""
    try:
        with open(path, encoding='utf-8-sig') as file:  # -sig: many a book starts with a byte order mark
            return file.read()
    except UnicodeDecodeError as error:
        raise ValueError(f'{path} is not UTF-8 text: {error}') from None


def cut(text, size=1 << 16):
    """The text in parts of some `size` characters, for the workers.

    Parts end only at a lone newline before a word character: no tokenizer here joins those two, so the parts' ids, one
    after the other, are the ids of the whole.
    """
    border, start = re.compile(r'\n(?<=\S\n)(?=\w)'), 0  # which re looks for from newline to newline
    while start < len(text):
        match = border.search(text, start + size - 1)
        end = match.end() if match else len(text)
        yield text[start:end]
        start = end


def text_splits(paths, val_fraction):
    """Splits of text files: val has the last `val_fraction` of each one's characters. Of several, each ends in eot."""
    if not 0 < val_fraction < 1:
        raise ValueError(f'val_fraction is {val_fraction}, but has to be between 0 and 1')

    def texts(split):
        for path in paths:
            text = read_text(path)
            border = int(len(text) * (1 - val_fraction))
            part = text[:border] if split == 'train' else text[border:]
            yield from ((piece, False) for piece in cut(part))
            if part and len(paths) > 1:
                yield '', True

    return {split: lambda start, split=split: itertools.islice(texts(split), start, None) for split in ('val', 'train')}


def load_rows(files, repository, **options):
    """Rows with a 'text' field, as a datasets.Dataset (or, streaming, IterableDataset).

    files: globs of .txt (a file is a document), .jsonl, .json or .parquet files; '' = the repository on Hugging Face.
    options: for datasets.load_dataset. OSError if they cannot be loaded, ImportError without the datasets library.
    """
    try:
        import datasets
    except ImportError:
        raise ImportError('this dataset needs the datasets library: pip install datasets') from None
    if files:
        paths = find_files(files)
        kinds = {'.txt': 'text', '.jsonl': 'json', '.json': 'json', '.parquet': 'parquet'}
        repository = kinds.get(os.path.splitext(paths[0])[1])
        if not repository:
            raise ValueError(f'{paths[0]!r} is of no known kind: --input takes {", ".join(kinds)}')
        options = {'data_files': paths, 'streaming': options.get('streaming', False)}
        options |= {'sample_by': 'document'} if repository == 'text' else {}
    try:
        rows = datasets.load_dataset(repository, split='train', **options)
        first = next(iter(rows), {})
    except Exception as error:  # of the library's own types, of pyarrow's, of its HTTP client's
        raise OSError(f'{files or repository} cannot be loaded: {" ".join(str(error).split())}') from None
    if 'text' not in first:
        raise ValueError(f"{files or repository} has no rows with a 'text' field (but {', '.join(first) or 'none'})")
    return rows


def row_split(rows):
    """A split whose documents are the rows of load_rows."""
    return lambda start: ((row['text'], True) for row in rows.skip(start))


def fingerprint(files):
    """What tells whether the files are still the same: [path, size in bytes, time] of each; '' has none."""
    paths = find_files(files) if files else []
    return [[os.path.abspath(path), os.path.getsize(path), os.path.getmtime(path)] for path in paths]


def _start_worker():
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's
    parent = multiprocessing.parent_process()  # which may be killed without telling us
    threading.Thread(target=lambda: (parent.join(), os._exit(1)), daemon=True).start()


def _encode(tokenizer, batch):
    """The ids of each (text, ends_document), as arrays of the dtype they are stored in."""
    dtype = np.dtype(tokenizer.meta()['dtype']).newbyteorder('<')
    eot = np.array([] if tokenizer.eot is None else [tokenizer.eot], dtype)
    return [np.concatenate([tokenizer.array(text), eot[:ends_document]], dtype=dtype, casting='unsafe') for text, ends_document in batch]


def encode_all(tokenizer, texts, num_proc):
    """The ids of each (text, ends_document), in order, from num_proc processes; a few batches are under way.

    From this process alone where it takes no longer to encode a text than to send it to another.
    """
    batches = iter(lambda: list(itertools.islice(texts, 64)), [])
    if num_proc <= 1 or tokenizer.quick:
        for batch in batches:
            yield from _encode(tokenizer, batch)
        return
    under_way = deque()
    # spawn: the datasets library has threads by now, and a fork of those may hang
    with ProcessPoolExecutor(num_proc, multiprocessing.get_context('spawn'), _start_worker) as pool:
        try:
            for batch in batches:
                under_way.append(pool.submit(_encode, tokenizer, batch))
                if len(under_way) > 4 * num_proc:
                    yield from under_way.popleft().result()
            while under_way:
                yield from under_way.popleft().result()
        except BrokenProcessPool:
            raise OSError('a tokenising process died, of lack of memory perhaps: try a smaller --num_proc') from None


def write_dataset(out, tokenizer, splits, shard_tokens=0, num_proc=1, source=None):
    """Writes token files and meta.json into the folder data/`out`, in place of what a former run left there.

    splits: {'val': read, 'train': read}. Each is one file, val.bin and train.bin; but with shard_tokens > 0 train has
    train_000000.bin, ... of that many tokens each, the last one of the rest.
    source: what the texts come from, as plain data. A run of the same source, tokenizer and shard_tokens as one that
    was killed continues it: finished files wait in the folder's .partial until all are there.
    ValueError if a split comes out empty.
    """
    from tqdm import tqdm
    folder = pathlib.Path(DATA, out)
    partial, progress_path = folder / '.partial', folder / '.partial/progress.json'
    # texts: how many are wholly in the files; tokens: how many of the next one
    progress = {'recipe': json.loads(json.dumps([tokenizer.meta(), shard_tokens, source]))}
    progress |= {split: {'texts': 0, 'tokens': 0, 'files': {}, 'done': False} for split in splits}
    former = json.loads(progress_path.read_text()) if progress_path.exists() else {'recipe': None}
    done = [name for split in splits for name in former.get(split, progress[split])['files']]
    if former['recipe'] == progress['recipe'] and all((partial / name).exists() for name in done):
        progress = former
        print(f'continuing after {done[-1]}')
    else:
        shutil.rmtree(partial, ignore_errors=True)

    for split, read in splits.items():
        state, limit = progress[split], shard_tokens if shard_tokens and split == 'train' else sys.maxsize
        if state['done']:
            continue
        encoded = encode_all(tokenizer, read(state['texts']), num_proc)
        ids = next(encoded, None)
        with tqdm(desc=split, initial=sum(state['files'].values()), unit='token', unit_scale=True, disable=None) as bar:
            while ids is not None:
                name = f"{split}_{len(state['files']):06d}.bin" if limit < sys.maxsize else f'{split}.bin'
                count = 0
                with write_atomically(partial / name) as file:
                    while ids is not None and count < limit:
                        part = ids[state['tokens']:][:limit - count]
                        file.write(part.tobytes())
                        count += len(part)
                        bar.update(len(part))
                        state['tokens'] += len(part)
                        if state['tokens'] >= len(ids):
                            ids = next(encoded, None)
                            state.update(texts=state['texts'] + 1, tokens=0)
                if count:
                    state['files'][name] = count
                    state['done'] = ids is None
                    with write_atomically(progress_path) as file:
                        file.write(json.dumps(progress).encode())
        if not state['files']:
            raise ValueError(f'no text is left for {split}.bin: give more text, or another share of it to val')

    tokens = {name: count for split in splits for name, count in sorted(progress[split]['files'].items())}
    for old in [folder / 'meta.json', *folder.glob('train*.bin'), folder / 'val.bin']:
        old.unlink(missing_ok=True)
    with write_atomically(folder / 'meta.json') as file:
        file.write(json.dumps(tokenizer.meta() | {'tokens': tokens}, indent=1).encode())
    for name in sorted(tokens):  # val.bin last: no dataset is seen without its meta.json and all of its train shards
        os.replace(partial / name, folder / name)
    shutil.rmtree(partial)
    for split in splits:
        print(f"{split} has {sum(progress[split]['files'].values()):,} tokens")
    print(f'wrote {folder}')


def write_random_tokens(folder, vocab_size, count=2 ** 22):
    """Write a dataset of uniform random tokens, to measure speed where there is no data. Its loss means nothing."""
    dtype = 'uint16' if vocab_size <= 2 ** 16 else 'uint32'
    for split in ('train', 'val'):
        tokens = np.random.default_rng(0).integers(0, vocab_size, size=count, dtype=dtype)
        tokens.tofile(os.path.join(folder, f'{split}.bin'))
    with open(os.path.join(folder, 'meta.json'), 'w', encoding='utf-8') as file:
        json.dump(dict(vocab_size=vocab_size, dtype=dtype, tokenizer='random'), file)
