"""data/corpus/prepare.py: the same files from any number of processes, which a slow reference computes too."""
import gzip
import hashlib
import json
import pathlib
import struct
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings, strategies

from data.make import pipeline
from data.make.corpus_job import prepare_corpus
from data.tokens.tokenizer import get_tokenizer
from helpers import run_script

SEED, EOT = 5, 50256
KEYS = dict(text_field='text', filter='', deduplicate=True, shuffle=True, val_fraction=0.1,
            n_shards=3, seed=SEED, num_proc=1, ray='')


@pytest.fixture(autouse=True)
def gpt2(vocabulary, monkeypatch):
    monkeypatch.setenv('TIKTOKEN_CACHE_DIR', vocabulary)
    monkeypatch.setitem(KEYS, 'encoder', get_tokenizer(dict(tokenizer='gpt2')))


def serially(function, numbers):
    for number in numbers:
        yield number, function(number)


def prepare(folder, out, monkeypatch=None, **keys):
    """Prepare all files of a folder, in this process if there is a monkeypatch; returns {name: content}."""
    if monkeypatch:
        monkeypatch.setattr('data.make.corpus_job.processes_engine', lambda num_proc: serially)
    prepare_corpus(str(folder), out=str(out), **KEYS | keys)
    return read(out)


def read(out):
    return {path.name: path.read_bytes() for path in pathlib.Path(out).iterdir() if path.is_file()}


def write_documents(folder, files):
    """Write {name: [text]} as compressed JSON lines."""
    folder.mkdir()
    for name, texts in files.items():
        with gzip.open(folder / name, 'wt') as file:
            file.writelines(json.dumps(dict(text=text)) + '\n' for text in texts)
    return folder


def make_corpus(folder, files=5, documents=60):
    rng, old = np.random.default_rng(0), []
    texts = {}
    for number in range(files):
        texts[f'd{number}.jsonl.gz'] = mine = []
        for _ in range(documents):
            copy = old and rng.random() < 0.3
            mine.append(old[rng.integers(len(old))] if copy else ' '.join(map(str, rng.integers(0, 99, rng.integers(
                0, 30)))))
            old.append(mine[-1])
    return write_documents(folder, texts), texts


def reference(texts, deduplicate, shuffle, val_fraction, n_shards, sizes=None):
    """{shard: [text]} by the rules that docs/data.md states, with everything in memory. Shard 0 is val."""
    shards, seen = {}, set()
    seed = struct.pack('<Q', SEED)
    for file, name in enumerate(sorted(texts)):
        for number, text in enumerate(texts[name]):
            digest = hashlib.blake2b(text.encode(), digest_size=16).digest()
            if not text or deduplicate and digest in seen:
                continue
            seen.add(digest)
            drawn = hashlib.blake2b(struct.pack('<QQ', file, number) + seed, digest_size=8).digest()
            key = int.from_bytes(drawn, 'little') if shuffle else 0
            shard = 1 + key * n_shards // 2 ** 64
            if not shuffle:
                before = sum(sizes[other] for other in sorted(texts)[:file])
                shard = 1 + before * n_shards // sum(sizes.values())
            chosen = int.from_bytes(hashlib.blake2b(digest + seed, digest_size=8).digest(), 'little') / 2 ** 64
            shards.setdefault(0 if chosen < val_fraction else shard, []).append((key, file, number, text))
    return {shard: [text for *_, text in sorted(rows)] for shard, rows in shards.items()}


def as_tokens(texts):
    encode = get_tokenizer(dict(tokenizer='gpt2')).encode
    return np.array([i for text in texts for i in [*encode(text), EOT]], '<u2').tobytes()


@pytest.mark.parametrize('deduplicate', [True, False])
@pytest.mark.parametrize('shuffle', [True, False])
@pytest.mark.parametrize('segment', [40, 2 ** 25])
def test_files_are_those_of_the_reference(tmp_path, monkeypatch, deduplicate, shuffle, segment):
    folder, texts = make_corpus(tmp_path / 'in')
    monkeypatch.setattr(pipeline, 'SEGMENT_TOKENS', segment)
    monkeypatch.setattr('data.make.corpus_job.DIGESTS_AT_ONCE', 37)  # copies are found in nine parts
    found = prepare(folder, tmp_path / 'out', monkeypatch, deduplicate=deduplicate, shuffle=shuffle)
    sizes = {path.name: path.stat().st_size for path in folder.iterdir()}
    expected = reference(texts, deduplicate, shuffle, 0.1, 3, sizes)
    assert found['val.bin'] == as_tokens(expected[0])
    for shard in range(3):
        assert found[f'train_{shard:06d}.bin'] == as_tokens(expected[1 + shard])
    manifest, meta = json.loads(found['manifest.json']), json.loads(found['meta.json'])
    kept = sum(map(len, expected.values()))
    copies = 300 - len({text for each in texts.values() for text in each})
    n_empty = sum(not text for each in texts.values() for text in each)
    assert manifest['totals']['documents'] == 300 and manifest['totals']['kept'] == kept
    assert manifest['totals']['filtered'] == n_empty
    assert manifest['totals']['copies'] == (300 - n_empty - kept if deduplicate else 0) and copies > 50
    for name, facts in manifest['files'].items():
        assert facts['sha256'] == hashlib.sha256(found[name]).hexdigest()
        assert facts['tokens'] == meta['tokens'][name] == len(found[name]) // 2
    assert meta['separator'] == EOT
    assert not (tmp_path / 'out' / '.partial').exists()


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(texts=strategies.lists(strategies.lists(strategies.sampled_from(
    ['', 'a', 'b', 'a longer one', 'ä', 'zwei\nZeilen', '😀']), max_size=8), min_size=1, max_size=4))
def test_no_text_is_in_both_splits_and_all_others_are_kept(tmp_path_factory, texts):
    tmp_path = tmp_path_factory.mktemp('corpus')
    texts = {f'{i}.jsonl.gz': rows for i, rows in enumerate(texts)} | {'z.jsonl.gz': list(map(str, range(200)))}
    folder = write_documents(tmp_path / 'in', texts)
    with pytest.MonkeyPatch.context() as patch:
        found = prepare(folder, tmp_path / 'out', patch, deduplicate=False, val_fraction=0.3)
    split = {name: _documents_in(content)
             for name, content in found.items() if name.endswith('.bin')}
    everything = sorted(text for part in split.values() for text in part)
    assert everything == sorted(text for rows in texts.values() for text in rows if text)
    assert not set(split.pop('val.bin')) & {text for part in split.values() for text in part}


def _documents_in(content):
    tokens = np.frombuffer(content, '<u2')
    ends = np.flatnonzero(tokens == EOT)
    decode = get_tokenizer(dict(tokenizer='gpt2')).decode
    return [decode(tokens[begin:end].tolist()) for begin, end in zip([0, *(ends[:-1] + 1)], ends)]


def command(folder, out, *more):
    return ['data/corpus/prepare.py', f'--input={folder}', f'--out={out}', '--n_shards=3',
            '--val_fraction=0.1', f'--seed={SEED}', *more]


def test_processes_and_restarts_change_no_byte(tmp_path, monkeypatch):
    folder, _ = make_corpus(tmp_path / 'in')
    expected = prepare(folder, tmp_path / 'one', monkeypatch)
    run_script(*command(folder, tmp_path / 'two', '--num_proc=2'))
    assert read(tmp_path / 'two') == expected

    # ended after that many tasks of 5 + 1 + 5 + 4, and at last while files get their names
    for steps in (1, 4, 5, 6, 9, 11, 13, 15):
        done = []

        def ending(function, numbers):
            for number in numbers:
                if len(done) == steps:
                    raise KeyboardInterrupt
                done.append(number)
                yield number, function(number)
        monkeypatch.setattr('data.make.corpus_job.processes_engine', lambda num_proc: ending)
        out = tmp_path / f'ended-{steps}'
        with pytest.raises((KeyboardInterrupt, OSError)):
            with monkeypatch.context() as patch:
                if steps == 15:
                    patch.setattr('data.make.prepare.shutil', SimpleNamespace(rmtree=_fail))
                prepare_corpus(str(folder), out=str(out), **KEYS)
        repeated = []
        monkeypatch.setattr('data.make.corpus_job.processes_engine', lambda num_proc: lambda function, numbers: (
            repeated.append(number) or (number, function(number)) for number in numbers))
        prepare_corpus(str(folder), out=str(out), **KEYS)
        assert read(out) == expected
        assert len(repeated) == (15 - steps if steps < 15 else 4)

    # Other keys begin anew, and other files as well.
    with gzip.open(folder / 'd0.jsonl.gz', 'at') as file:
        file.write('{"text": "one more"}\n')
    monkeypatch.setattr('data.make.corpus_job.processes_engine', lambda num_proc: serially)
    prepare_corpus(str(folder), out=str(tmp_path / 'one'), **KEYS)
    assert read(tmp_path / 'one') != expected


def _fail(*args, **options):
    raise OSError('a disk')


@pytest.mark.slow
def test_killed_process_is_replaced(tmp_path, monkeypatch):
    folder, _ = make_corpus(tmp_path / 'in')
    expected = prepare(folder, tmp_path / 'one', monkeypatch)
    keep = tmp_path / 'keep.py'
    keep.write_text(f'import os, pathlib\nmark = pathlib.Path({str(tmp_path / "mark")!r})\n'
                    'def keep(text):\n    if not mark.exists():\n        mark.touch()\n        os.kill(os.getpid(), 9)\n'
                    '    return True\n')
    done = run_script(*command(folder, tmp_path / 'two', '--num_proc=2', f'--filter={keep}'))
    assert 'a process was killed, perhaps for lack of memory: its tasks start again' in done.stderr
    found = read(tmp_path / 'two')
    assert [name for name in expected if name.endswith('.bin') and found[name] != expected[name]] == []


def test_filter_chooses_and_changes(tmp_path, monkeypatch):
    folder = write_documents(tmp_path / 'in', {'a.jsonl.gz': [*map(str, range(100)), 'drop me', 'UPPER']})
    keep = tmp_path / 'keep.py'
    keep.write_text("def keep(text):\n    return text.lower() if text.isupper() else 'drop' not in text\n")
    found = prepare(folder, tmp_path / 'out', monkeypatch, filter=str(keep), n_shards=1)
    texts = {text for name in ('val.bin', 'train_000000.bin') for text in _documents_in(found[name])}
    assert texts == {*map(str, range(100)), 'upper'}
    assert json.loads(found['manifest.json'])['totals']['filtered'] == 1


def test_files_of_all_kinds_and_a_bad_one(tmp_path, monkeypatch, capsys):
    import pyarrow as pa
    import pyarrow.parquet
    folder = write_documents(tmp_path / 'in', {'a.jsonl.gz': list(map(str, range(50)))})
    pa.parquet.write_table(pa.table(dict(text=['from parquet'])), folder / 'b.parquet')
    (folder / 'c.txt').write_text('a whole\ntext')
    (folder / 'd.jsonl').write_text('{"text": "good"}\nbroken\n')
    with pa.output_stream(folder / 'e.jsonl.zst', compression='zstd') as file:
        file.write(b'{"text": "from zstd"}\n')
    found = prepare(folder, tmp_path / 'out', monkeypatch, n_shards=1)
    texts = {text for name in ('val.bin', 'train_000000.bin') for text in _documents_in(found[name])}
    assert texts == {*map(str, range(50)), 'from parquet', 'a whole\ntext', 'from zstd'}
    assert f'left out: {folder}/d.jsonl has no JSON in line 2' in capsys.readouterr().out


@pytest.mark.parametrize('keys, sentence', [
    (dict(input=''), 'no files given: set --input'),
    (dict(val_fraction=1), 'val_fraction is 1, but must be at least 0 and below 1'),
    (dict(n_shards=-1), 'n_shards is -1'),
    (dict(val_fraction=1e-9), r'in has no document for the val split: of 60, .* val_fraction \(now 1e-09\) or filter'),
    (dict(filter='{keep}'), 'keep of .*keep.py returned 3: it must return True or False, or the text to keep'),
    (dict(filter='{raises}'), 'invalid literal for int'),
    (dict(filter='{other}'), r'other.py has no function keep\(text\)'),
    (dict(text_field='content'), "has no 'content' field, only text"),
])
def test_wrong_keys_get_a_sentence(tmp_path, monkeypatch, keys, sentence):
    folder, _ = make_corpus(tmp_path / 'in', files=1)
    (tmp_path / 'keep.py').write_text('def keep(text):\n    return 3\n')
    (tmp_path / 'raises.py').write_text('def keep(text):\n    return int("x")\n')
    (tmp_path / 'other.py').write_text('')
    files = {name: tmp_path / f'{name}.py' for name in ('keep', 'raises', 'other')}
    keys = {key: value.format(**files) if key == 'filter' else value
            for key, value in keys.items()}
    with pytest.raises(ValueError, match=sentence):
        monkeypatch.setattr('data.make.corpus_job.processes_engine', lambda num_proc: serially)
        prepare_corpus(**dict(input=str(folder), out=str(tmp_path / 'out')) | KEYS | keys)


@pytest.mark.slow
def test_ray_writes_the_same_files_with_any_number_of_workers_and_after_a_kill(tmp_path, monkeypatch):
    pytest.importorskip('ray')
    folder, _ = make_corpus(tmp_path / 'in')
    expected = prepare(folder, tmp_path / 'one', monkeypatch)
    for workers in (1, 2, 4):
        run_script(*command(folder, tmp_path / f'ray-{workers}', '--ray=local', f'--num_proc={workers}'))
        assert read(tmp_path / f'ray-{workers}') == expected
    keep = tmp_path / 'keep.py'
    keep.write_text(f'import os, pathlib\nmark = pathlib.Path({str(tmp_path / "mark")!r})\n'
                    'def keep(text):\n    if not mark.exists():\n        mark.touch()\n        os.kill(os.getpid(), 9)\n'
                    '    return True\n')
    run_script(*command(folder, tmp_path / 'killed', '--ray=local', '--num_proc=2', f'--filter={keep}'))
    assert (tmp_path / 'mark').exists()
    found = read(tmp_path / 'killed')
    assert [name for name in expected if name.endswith('.bin') and found[name] != expected[name]] == []
