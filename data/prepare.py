"""Steps that the datasets' prepare.py share: reading texts, encoding them, writing token files.

A split is a function read(start): an iterator over its texts from number `start` on, as pairs (text,
ends_document). Each call gives the same texts in the same order, so a run that was killed continues after its
last complete file.
"""
import functools
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
    """Return the files that comma-separated globs match, in that order. ValueError if a glob matches none."""
    paths = []
    for pattern in patterns.split(','):
        matches = sorted(glob.glob(os.path.expanduser(pattern), recursive=True))
        files = [path for path in matches if os.path.isfile(path)]
        if not files:
            raise ValueError(f'there is no file {pattern!r}: --input takes files or globs, '
                             'separated by commas')
        paths += files
    return list(dict.fromkeys(paths))


def fingerprint(files):
    """Return [path, size in bytes, modification time] of each file, to tell whether one has changed."""
    paths = find_files(files) if files else []
    return [[os.path.abspath(path), os.path.getsize(path), os.path.getmtime(path)] for path in paths]


def read_text(path):
    """Return a file's text, its line ends as \\n. ValueError if it is not UTF-8."""
    try:
        with open(path, encoding='utf-8-sig') as file:  # -sig: many books start with a byte order mark
            return file.read()
    except UnicodeDecodeError as error:
        raise ValueError(f'{path} is not UTF-8 text: {error}') from None


def cut_text(text, size=1 << 16):
    """Yield a text in parts of about `size` characters, whose ids one after another are the ids of the whole.

    Parts end only at a single newline before a word, which no tokenizer here joins with the word.
    """
    border = re.compile(r'\n(?<=\S\n)(?=\w)')  # begins with the newline, for which re searches fast
    start = 0
    while start < len(text):
        match = border.search(text, start + size - 1)
        end = match.end() if match else len(text)
        yield text[start:end]
        start = end


def text_splits(paths, val_fraction):
    """Return the splits of text files: val has the last `val_fraction` of each file's characters.

    Where there are several files, each one's part ends with the end-of-text token.
    """
    if not 0 < val_fraction < 1:
        raise ValueError(f'val_fraction is {val_fraction}, but has to be between 0 and 1')

    def texts(split):
        for path in paths:
            text = read_text(path)
            border = int(len(text) * (1 - val_fraction))
            text = text[:border] if split == 'train' else text[border:]
            for part in cut_text(text):
                yield part, False
            if text and len(paths) > 1:
                yield '', True

    def read(split, start):
        return itertools.islice(texts(split), start, None)

    return {split: functools.partial(read, split) for split in ('val', 'train')}


def load_rows(files, repository, **options):
    """Load rows with a 'text' field, as a datasets.Dataset (or, streaming, IterableDataset).

    files: globs of .txt (each file is a document), .jsonl, .json or .parquet files; '' = the repository on
        Hugging Face.
    options: for datasets.load_dataset.
    OSError if the rows cannot be loaded, ImportError without the datasets library.
    """
    try:
        import datasets
    except ImportError:
        raise ImportError('this dataset needs the datasets library: pip install datasets') from None
    if files:
        paths = find_files(files)
        formats = {'.txt': 'text', '.jsonl': 'json', '.json': 'json', '.parquet': 'parquet'}
        repository = formats.get(os.path.splitext(paths[0])[1])
        if not repository:
            raise ValueError(f'{paths[0]!r} has an unknown format: --input takes {", ".join(formats)}')
        options = {'data_files': paths, 'streaming': options.get('streaming', False)}
        if repository == 'text':
            options['sample_by'] = 'document'
    try:
        rows = datasets.load_dataset(repository, split='train', **options)
        first = next(iter(rows), {})
    except Exception as error:  # the library's own types, those of pyarrow, those of its HTTP client
        raise OSError(f'{files or repository} cannot be loaded: {" ".join(str(error).split())}') from None
    if 'text' not in first:
        fields = ', '.join(first) or 'none'
        raise ValueError(f"{files or repository} has no rows with a 'text' field (but {fields})")
    return rows


def row_split(rows):
    """Return a split whose documents are the rows of load_rows."""
    def read(start):
        for row in rows.skip(start):
            yield row['text'], True
    return read


def _start_worker():
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    parent = multiprocessing.parent_process()

    def exit_with_parent():  # a parent that is killed cannot tell its workers to stop
        parent.join()
        os._exit(1)

    threading.Thread(target=exit_with_parent, daemon=True).start()


def _batches(texts, size=64):
    while batch := list(itertools.islice(texts, size)):
        yield batch


def _encode_batch(tokenizer, batch):
    """Return the ids of each (text, ends_document), as arrays of the dtype in which they are stored."""
    dtype = np.dtype(tokenizer.meta()['dtype']).newbyteorder('<')
    arrays = []
    for text, ends_document in batch:
        parts = [tokenizer.encode_to_numpy(text)]
        if ends_document and tokenizer.eot is not None:
            parts.append([tokenizer.eot])
        arrays.append(np.concatenate(parts, dtype=dtype, casting='unsafe'))
    return arrays


def encode_all(tokenizer, texts, num_proc):
    """Yield the ids of each (text, ends_document) of an iterator, in order, encoded by num_proc processes.

    Only a few batches are in memory at a time.
    """
    if num_proc <= 1 or not tokenizer.gains_from_processes:
        for batch in _batches(texts):
            yield from _encode_batch(tokenizer, batch)
        return
    pending = deque()
    # spawn: the datasets library has started threads by now, and a fork of a process with threads can hang
    with ProcessPoolExecutor(num_proc, multiprocessing.get_context('spawn'), _start_worker) as pool:
        try:
            for batch in _batches(texts):
                pending.append(pool.submit(_encode_batch, tokenizer, batch))
                if len(pending) > 4 * num_proc:
                    yield from pending.popleft().result()
            while pending:
                yield from pending.popleft().result()
        except BrokenProcessPool:
            raise OSError('a tokenising process died, of lack of memory perhaps: '
                          'try a smaller --num_proc') from None


def write_dataset(out, tokenizer, splits, shard_tokens=0, num_proc=1, source=None):
    """Write token files and meta.json into the folder data/`out`, in place of a former dataset there.

    splits: {'val': read, 'train': read}. Each becomes one file, val.bin and train.bin. With shard_tokens > 0,
        train becomes train_000000.bin, ... of that many tokens each, but for the last one.
    source: where the texts come from, as plain data. If a run of the same source, tokenizer and shard_tokens
        was killed, this one continues it: complete files wait in the folder's .partial for the others.
    ValueError if a split comes out empty.
    """
    folder = pathlib.Path(DATA, out)
    partial = folder / '.partial'
    progress = _load_progress(partial, [tokenizer.meta(), shard_tokens, source], splits)
    tokens = {}
    for split, read in splits.items():
        state = progress[split]
        if not state['done']:
            encoded = encode_all(tokenizer, read(state['texts']), num_proc)
            limit = shard_tokens if split == 'train' else 0
            _write_split(partial, split, encoded, limit, progress)
        if not state['files']:
            raise ValueError(f'no text is left for {split}.bin: '
                             'give more text, or another share of it to val')
        tokens |= state['files']
    _publish(partial, folder, tokenizer.meta() | {'tokens': tokens})
    for split in splits:
        print(f"{split} has {sum(progress[split]['files'].values()):,} tokens")
    print(f'wrote {folder}')


def _load_progress(partial, recipe, splits):
    """Return the progress of a killed run of the same recipe; else clear the folder `partial` and begin.

    Progress is {'recipe': ..., split: state}. A split's state: its complete `files` {name: number of tokens};
    how many `texts` are wholly in these files, and how many `tokens` of the next text; whether it is `done`.
    """
    recipe = json.loads(json.dumps(recipe))  # to compare with what JSON keeps: tuples become lists
    progress_path = partial / 'progress.json'
    if progress_path.exists():
        progress = json.loads(progress_path.read_text())
        if progress['recipe'] == recipe:
            files = []
            for split in splits:
                files += progress[split]['files']
            if all((partial / name).exists() for name in files):
                print(f'continuing after {files[-1]}')
                return progress
    shutil.rmtree(partial, ignore_errors=True)
    progress = {'recipe': recipe}
    for split in splits:
        progress[split] = {'texts': 0, 'tokens': 0, 'files': {}, 'done': False}
    return progress


class _TokenStream:
    """The ids of a split's texts as one stream of tokens, which knows its position in the texts."""

    def __init__(self, encoded, skip):
        """encoded: an iterator over the ids of each text. skip: how many tokens of the first to leave out."""
        self.encoded = encoded
        self.ids = next(encoded, None)  # the current text's; None at the end
        self.texts = 0  # how many texts have been read to their end
        self.tokens = skip  # how many tokens of the current text have been read

    def read(self, limit):
        """Yield the next tokens, at most `limit` of them, as arrays."""
        while self.ids is not None and limit > 0:
            part = self.ids[self.tokens:self.tokens + limit]
            yield part
            limit -= len(part)
            self.tokens += len(part)
            if self.tokens >= len(self.ids):
                self.ids = next(self.encoded, None)
                self.texts += 1
                self.tokens = 0


def _write_split(partial, split, encoded, shard_tokens, progress):
    """Write the rest of a split into the folder `partial`, and its progress after each file."""
    from tqdm import tqdm
    state = progress[split]
    first_text = state['texts']
    stream = _TokenStream(encoded, state['tokens'])
    done_before = sum(state['files'].values())
    with tqdm(desc=split, initial=done_before, unit='token', unit_scale=True, disable=None) as bar:
        while stream.ids is not None:
            name = f"{split}_{len(state['files']):06d}.bin" if shard_tokens else f'{split}.bin'
            count = 0
            with write_atomically(partial / name) as file:
                for part in stream.read(shard_tokens or sys.maxsize):
                    file.write(part.tobytes())
                    count += len(part)
                    bar.update(len(part))
            if count:  # 0 where only empty texts were left
                state['files'][name] = count
                state['texts'] = first_text + stream.texts
                state['tokens'] = stream.tokens
                state['done'] = stream.ids is None
                with write_atomically(partial / 'progress.json') as file:
                    file.write(json.dumps(progress).encode())


def _publish(partial, folder, meta):
    """Put meta.json and the finished files of `partial` in place of a former dataset in the folder.

    val.bin comes last: a dataset is not seen without its meta.json and all of its train shards.
    """
    for old in [folder / 'meta.json', *folder.glob('train*.bin'), folder / 'val.bin']:
        old.unlink(missing_ok=True)
    with write_atomically(folder / 'meta.json') as file:
        file.write(json.dumps(meta, indent=1).encode())
    for name in sorted(meta['tokens']):
        os.replace(partial / name, folder / name)
    shutil.rmtree(partial)


def write_random_tokens(folder, vocab_size, count=2 ** 22):
    """Write a dataset of uniform random tokens, to measure speed without data. Its loss means nothing."""
    dtype = 'uint16' if vocab_size <= 2 ** 16 else 'uint32'
    for split in ('train', 'val'):
        tokens = np.random.default_rng(0).integers(0, vocab_size, size=count, dtype=dtype)
        tokens.tofile(os.path.join(folder, f'{split}.bin'))
    with open(os.path.join(folder, 'meta.json'), 'w', encoding='utf-8') as file:
        json.dump(dict(vocab_size=vocab_size, dtype=dtype, tokenizer='random'), file)
