"""Steps shared by the datasets' prepare.py: split texts, encode them, write token files.

A split is a function read(start) that returns an iterator over its texts, from number `start` on, as pairs
(text, ends_document). Each call gives the same texts in the same order, so that a killed run can continue
after its last complete file.
"""
import functools
import importlib.util
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

from data.datasets import find_shards, places_of, read_meta
from data.make.readers import DOCUMENTS, file_versions, form_of, read_pieces
from data.storage import write_atomically
from data.tokens import portable
from data.tokens.tokenizer import TOKEN_BYTES, describe_tokenizer

LONGEST_PART = 2 ** 24  # characters of a text that are encoded in one piece


def cut_text(text, size=1 << 16):
    """Yield a text in parts of about `size` characters. The ids of the parts, joined, are those of the text.

    Parts end only at a single newline before a word, which a tokenizer with `can_cut` does not merge with it.
    """
    border = re.compile(r'\n(?<=\S\n)(?=\w)')  # begins with a literal newline, which re finds fast
    start = 0
    while start < len(text):
        match = border.search(text, start + size - 1)
        end = match.end() if match else len(text)
        yield text[start:end]
        start = end


def cut_pieces(pieces, cuts=True):
    """Yield the parts (cut_text) of pieces (text, ends_document) that are not empty, across pieces.

    cuts: False = whole documents, for a tokenizer that would make other ids of parts.
    A text of LONGEST_PART characters without a line end at which it could be cut is cut anywhere.
    """
    rest = ''
    for text, ends_document in pieces:
        *parts, rest = cut_text(rest + text) if cuts else [rest + text]
        for part in parts:
            yield part, False
        if ends_document or len(rest) >= LONGEST_PART:
            yield rest, ends_document
            rest = ''
    if rest:
        yield rest, False


def clip(pieces, begin, end):
    """Yield what the characters from number `begin` to `end` have of pieces (text, ends_document)."""
    position = 0
    for text, ends_document in pieces:
        if position >= end:
            return
        piece = text[max(0, begin - position):end - position]
        if piece:
            yield piece, ends_document
        position += len(text)


def text_splits(sizes, val_fraction, field='text', cuts=True):
    """Return the splits of files: val has the last `val_fraction` of each file's characters.

    sizes: {path: number of characters}, as from `measure`. field: as in read_pieces. cuts: as in cut_pieces.
    With a val_fraction of 0 there is no val.
    Documents end with Tokenizer.document_end. A file of text is a document only if there are several files.
    """
    def texts(split):
        for path, size in sizes.items():
            border = int(size * (1 - val_fraction))
            begin, end = (0, border) if split == 'train' else (border, size)
            yield from cut_pieces(clip(read_pieces(path, field), begin, end), cuts)
            if begin < end and len(sizes) > 1 and form_of(path) not in DOCUMENTS:
                yield '', True

    def read(split, start):
        return itertools.islice(texts(split), start, None)

    splits = ('val', 'train') if val_fraction else ('train',)
    return {split: functools.partial(read, split) for split in splits}


def load_rows(files, repository, **options):
    """Load rows with a 'text' field, as a datasets.Dataset (or, streaming, IterableDataset).

    files: paths of .txt, .jsonl, .json or .parquet files, all of one kind; [] = the repository on Hugging
        Face. A .txt file is one document.
    options: passed to datasets.load_dataset.
    OSError if the rows cannot be loaded, ImportError if the datasets library is not installed.
    """
    try:
        import datasets
    except ImportError:
        raise ImportError('this dataset needs the datasets library: pip install datasets') from None
    source = ', '.join(files) or repository
    if files:
        builders = {'.txt': 'text', '.md': 'text', '.jsonl': 'json', '.json': 'json', '.parquet': 'parquet'}
        forms = sorted({form_of(path) for path in files})
        if len(forms) > 1 or forms[0] not in builders:
            raise ValueError(f'--input has files that end in {" and ".join(forms)}, but must be of one kind '
                             f'of {", ".join(builders)}: data/text/prepare.py takes several kinds at once')
        repository = builders[forms[0]]
        if repository != 'text':
            return _rows_of_files(files, options.get('streaming', False))
        if any(path.endswith('.zst') for path in files) and not importlib.util.find_spec('zstandard'):
            raise ImportError('.zst files need zstandard: pip install zstandard, or use data/text/prepare.py')
        options = {'data_files': files, 'streaming': options.get('streaming', False)}
        options['sample_by'] = 'document'
    try:
        rows = datasets.load_dataset(repository, split='train', **options)
        first = next(iter(rows), {})
    except Exception as error:  # of the library, of pyarrow, or of its HTTP client
        raise OSError(f'{source} cannot be loaded: {" ".join(str(error).split())}') from None
    if 'text' not in first:
        fields = ', '.join(first) or 'none'
        raise ValueError(f"{source} has no 'text' field, only {fields}; data/text/prepare.py has a key for "
                         'this, --text_field')
    return rows


def _rows_of_files(files, streaming):
    """The rows of load_rows of files with documents. The library would make dates of texts that look like dates."""
    import datasets
    options = dict(features=datasets.Features(text=datasets.Value('string')),
                   gen_kwargs=dict(versions=file_versions(files)))  # with other versions they are read again
    if streaming:
        return datasets.IterableDataset.from_generator(_read_documents, **options)
    try:
        return datasets.Dataset.from_generator(_read_documents, **options)
    except datasets.exceptions.DatasetGenerationError as error:
        raise error.__cause__ from None


def _read_documents(versions):
    try:
        for path, *_ in versions:
            for text, _ in read_pieces(path):
                yield dict(text=text)
    except ValueError as error:
        advice = 'use data/text/prepare.py, and set --text_field'
        raise ValueError(str(error).replace('set --text_field', advice)) from None


def row_split(rows):
    """Return a split whose documents are the rows of load_rows."""
    def read(start):
        for row in rows.skip(start):
            yield row['text'], True
    return read


def start_worker():
    """Set up a process of a pool: Ctrl-C is for its parent, with which it ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    parent = multiprocessing.parent_process()

    def exit_with_parent():  # a killed parent cannot tell its workers to stop
        parent.join()
        os._exit(1)

    threading.Thread(target=exit_with_parent, daemon=True).start()


def _batches(texts, size=64):
    while batch := list(itertools.islice(texts, size)):
        yield batch


def _encode_batch(tokenizer, batch):
    """Return the ids of each (text, ends_document) as arrays of the dtype of the token files."""
    dtype = np.dtype(tokenizer.meta()['dtype']).newbyteorder('<')
    arrays = []
    for text, ends_document in batch:
        parts = [tokenizer.encode_to_numpy(text)]
        if ends_document:
            parts.append(tokenizer.document_end)
        arrays.append(np.concatenate(parts, dtype=dtype, casting='unsafe'))
    return arrays


def encode_all(tokenizer, texts, num_proc):
    """Yield the ids of each (text, ends_document) of an iterator, in order, encoded by num_proc processes.

    Only a few batches are in memory at the same time.
    """
    if num_proc <= 1 or not tokenizer.gains_from_processes:
        for batch in _batches(texts):
            yield from _encode_batch(tokenizer, batch)
        return
    pending = deque()
    # The datasets library has started threads, and the fork of a process with threads can hang.
    with ProcessPoolExecutor(num_proc, multiprocessing.get_context('spawn'), start_worker) as pool:
        try:
            for batch in _batches(texts):
                pending.append(pool.submit(_encode_batch, tokenizer, batch))
                if len(pending) > 4 * num_proc:
                    yield from pending.popleft().result()
            while pending:
                yield from pending.popleft().result()
        except BrokenProcessPool:
            raise OSError('a tokenising process died, perhaps for lack of memory: '
                          'try a smaller --num_proc') from None


def check_unused(out, tokenizer, origin, overwrite):
    """Raise ValueError if data/`out` has a dataset of another tokenizer or origin, unless it is to be overwritten.

    Scripts call this before a download or other long work; write_dataset calls it in any case.
    """
    folder = places_of(out)[0]
    if overwrite or not find_shards(folder, 'train'):
        return
    try:
        meta = read_meta(folder)
    except ValueError:  # a damaged one, which has to be prepared again
        return
    ours, theirs = describe_tokenizer(portable(tokenizer.meta())), describe_tokenizer(meta)
    is_same_text = origin == meta.get('input')
    has_new_alphabet = is_same_text and meta.get('tokenizer') == tokenizer.meta()['tokenizer'] == 'char'  # the text was edited
    advice = 'set overwrite to replace it, or out to another name'
    if ours != theirs and not has_new_alphabet:
        raise ValueError(f'{folder} already has a dataset, with the tokenizer {theirs}, and this one would have {ours}: '
                         f'{advice}')
    if not is_same_text and 'input' in meta:
        raise ValueError(f'{folder} already has a dataset, made of {meta["input"]}, and not of {origin}: {advice}')


def write_dataset(out, tokenizer, splits, shard_tokens=0, num_proc=1, source=None, origin=None, overwrite=False,
                  share='val_fraction'):
    """Write token files and meta.json into the folder data/`out`. Replaces an older dataset of the same origin there.

    splits: {'val': read, 'train': read}. Each becomes one file, val.bin and train.bin. With shard_tokens > 0,
        train becomes train_000000.bin, ... with this many tokens each; the last file may have fewer.
    source: the origin of the texts, as plain data. If a run with the same source, tokenizer and shard_tokens
        was killed, this run continues it: complete files are kept in the subfolder .partial.
    origin: what a person calls the texts, such as the key `input`. It is kept in meta.json.
    overwrite: replace a dataset of another tokenizer or origin too.
    share: the key that says how much val has; '' = none.
    ValueError if a split is empty, or if the folder has another dataset.
    """
    folder = pathlib.Path(places_of(out)[0])
    check_unused(out, tokenizer, origin, overwrite)
    partial = folder / '.partial'
    separator = {} if tokenizer.eot is None else dict(separator=tokenizer.eot)  # as data/documents.py reads it
    meta = portable(tokenizer.meta()) | separator | ({} if origin is None else dict(input=origin))
    progress = _load_progress(partial, [meta, shard_tokens, source], splits)
    tokens = {}
    for split, read in splits.items():
        state = progress[split]
        if not state['done']:
            encoded = encode_all(tokenizer, read(state['texts']), num_proc)
            limit = shard_tokens if split == 'train' else 0
            _write_split(partial, split, encoded, limit, progress)
        if not state['files']:
            raise ValueError(_describe_lack(split, splits, origin, share))
        tokens |= state['files']
    publish(partial, folder, meta | {'tokens': tokens}, tokenizer)
    for split in splits:
        print(f"{split} has {sum(progress[split]['files'].values()):,} tokens")
    print(f'wrote {folder}')


def _describe_lack(split, splits, origin, share):
    """One sentence: why a split has no text."""
    others = [name for name, read in splits.items() if name != split and any(text for text, _ in read(0))]
    if not others:
        return f'{origin} has no text'
    change = f'{"raise" if split == "val" else "lower"} {share}, or ' if share else ''
    return f'{origin} has no text left for {split}.bin, since all of it is in {others[0]}.bin: {change}use more text'


def _load_progress(partial, recipe, splits):
    """Return the progress of a killed run with the same recipe; otherwise clear the folder `partial`.

    Progress is {'recipe': ..., split: state}. The state of a split has `files`, {name of a complete file:
    number of tokens}; `texts`, the number of texts that are completely in these files; `tokens`, the number
    of tokens of the next text in these files; and `done`, whether the split is complete.
    """
    recipe = json.loads(json.dumps(recipe))  # makes it comparable with the stored recipe: tuples become lists
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
    """The ids of a split's texts as one stream of tokens that knows its position in the texts."""

    def __init__(self, encoded, skip):
        """encoded: an iterator over the ids of each text. skip: tokens of the first text to leave out."""
        self.encoded = encoded
        self.ids = next(encoded, None)  # ids of the current text; None at the end
        self.texts = 0  # number of texts read to their end
        self.tokens = skip  # number of tokens read from the current text

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
    """Write the rest of a split into the folder `partial`, and the progress after each file."""
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
            if count:  # 0 if only empty texts were left
                state['files'][name] = count
                state['texts'] = first_text + stream.texts
                state['tokens'] = stream.tokens
                state['done'] = stream.ids is None
                with write_atomically(partial / 'progress.json') as file:
                    file.write(json.dumps(progress).encode())


def publish(partial, folder, meta, tokenizer, more_files=None, names=None):
    """Replace an older dataset in the folder with meta.json and the finished files of `partial`.

    The tokenizer's files and the bytes of each token come along. more_files: {name: text} of further files.
    names: {name of a token file: its name in `partial`}, if these differ.

    val.bin comes last, so that a dataset with val.bin has its meta.json and all train shards.
    """
    for old in [folder / 'meta.json', folder / 'manifest.json', *folder.glob('train*.bin'), folder / 'val.bin']:
        old.unlink(missing_ok=True)
    files = tokenizer.files | (more_files or {})
    if (sizes := tokenizer.bytes_of_tokens()) is not None:
        files[TOKEN_BYTES] = json.dumps(sizes.tolist(), separators=(',', ':'))
    for name, text in files.items():
        with write_atomically(folder / name) as file:
            file.write(text.encode())
    with write_atomically(folder / 'meta.json') as file:
        file.write(json.dumps(meta, indent=1).encode())
    for name in sorted(meta['tokens']):
        os.replace(partial / (names[name] if names else name), folder / name)
    shutil.rmtree(partial)


def write_random_tokens(folder, vocab_size, count=2 ** 22, document_length=0, draws_lengths=False, seed=0):
    """Write a dataset of uniform random tokens, to measure speed without data. Its loss has no meaning.

    document_length: tokens in each document, the first of which is 0; 0 = no documents.
    draws_lengths: draw the lengths of documents from a geometric distribution, whose mean is document_length.
    """
    dtype = 'uint16' if vocab_size <= 2 ** 16 else 'uint32'
    for number, split in enumerate(('train', 'val'), start=2 * seed):
        least = 1 if document_length else 0
        generator = np.random.default_rng(number)
        tokens = generator.integers(least, vocab_size, size=count, dtype=dtype)
        if draws_lengths:
            tokens[generator.random(count) < 1 / document_length] = 0
        elif document_length:
            tokens[::document_length] = 0
        tokens.tofile(os.path.join(folder, f'{split}.bin'))
    with open(os.path.join(folder, 'meta.json'), 'w', encoding='utf-8') as file:
        json.dump(dict(vocab_size=vocab_size, dtype=dtype, separator=0), file)
