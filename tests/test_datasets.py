"""How a dataset is found by its name, what its meta files say, and what is odd about its token files."""
import json
import pickle

import numpy as np
import pytest

from data import checks, datasets
from data.datasets import Source, find_dataset, fingerprint, places_of, read_meta
from data.loader import TokenLoader
from data.tokens.tokenizer import get_tokenizer

U16 = dict(vocab_size=65536, dtype='uint16')
GPT2 = dict(vocab_size=50257, dtype='uint16', tokenizer='gpt2', separator=50256)
ALPHABET = 'aàb日'


@pytest.mark.quick
def test_names_are_looked_up_in_data_first_and_paths_in_the_current_folder(tmp_path, monkeypatch):
    in_data, here = tmp_path / 'data', tmp_path / 'here'
    monkeypatch.setattr(datasets, 'DATA', str(in_data))
    here.mkdir()
    monkeypatch.chdir(here)
    for name, preferred, other in ('a', in_data, here), ('a/b', here, in_data):
        assert places_of(name) == [str(preferred / name), str(other / name)]
        sentence = f"'{name}' has no data in {preferred / name} or {other / name}: make .* --out={name} .*data/preferences.$"
        with pytest.raises(ValueError, match=sentence):
            find_dataset(name)
        for place in other, preferred:  # the preferred place wins once it has tokens
            (place / name).mkdir(parents=True)
            (place / name / 'train.bin').touch()
            assert find_dataset(name) == str(place / name)
    assert find_dataset(str(in_data / 'a/b')) == str(in_data / 'a/b')
    monkeypatch.setenv('HOME', str(tmp_path))
    assert find_dataset('~/here/a') == str(here / 'a')
    (in_data / 'c').mkdir()
    (in_data / 'c/prepare.py').touch()
    with pytest.raises(ValueError, match='run python ../data/c/prepare.py [(]the first lines of that file have examples[)]$'):
        find_dataset('c')


# --- meta.json and nanoGPT's meta.pkl -----------------------------------------------------------------------

@pytest.mark.quick
@pytest.mark.parametrize('text', [
    '', '{"vocab_size": 65', '[]', '"x"', '{}', '{"vocab_size": 65}', '{"dtype": "uint16"}',
    '{"vocab_size": 65, "dtype": "int8"}', '{"vocab_size": "65", "dtype": "uint16"}'])
def test_bad_meta_json_is_refused_by_name(tmp_path, text):
    assert read_meta(tmp_path) == GPT2  # without a meta.json
    (tmp_path / 'meta.json').write_text(text)
    with pytest.raises(ValueError, match='^[^\n]*meta.json[^\n]*$'):
        read_meta(tmp_path)


def meta_of_nanogpt(tokens=ALPHABET, **changes):
    stoi = {token: i for i, token in enumerate(tokens)}
    return dict(vocab_size=len(tokens), itos=dict(enumerate(tokens)), stoi=stoi) | changes


@pytest.mark.quick
@pytest.mark.parametrize('protocol', range(pickle.HIGHEST_PROTOCOL + 1))
def test_meta_pkl_becomes_meta_json(tmp_path, capsys, protocol):
    (tmp_path / 'meta.pkl').write_bytes(pickle.dumps(meta_of_nanogpt(), protocol))
    meta = read_meta(tmp_path)
    assert meta == dict(vocab_size=4, dtype='uint16', tokenizer='char', chars=ALPHABET)
    assert get_tokenizer(meta).decode([3, 0, 1]) == '日aà'
    assert json.loads((tmp_path / 'meta.json').read_text()) == meta
    assert 'meta.json from the meta.pkl there, with a tokenizer' in capsys.readouterr().err
    (tmp_path / 'meta.pkl').write_bytes(b'not read again')
    assert read_meta(tmp_path) == meta and capsys.readouterr().err == ''


CONVERTED = dict(vocab_size=4, dtype='uint16', tokenizer='char', chars=ALPHABET)


@pytest.mark.quick
@pytest.mark.parametrize('theirs, expected', [
    (meta_of_nanogpt(vocab_size=64), CONVERTED | dict(vocab_size=64)),
    (meta_of_nanogpt(itos=list(ALPHABET)), CONVERTED),
    (meta_of_nanogpt(['the', 'a']), dict(vocab_size=2, dtype='uint16')),  # words have no tokenizer here
    (dict(vocab_size=100_000), dict(vocab_size=100_000, dtype='uint32'))])
def test_meta_pkl_of_other_datasets_is_read(tmp_path, theirs, expected):
    (tmp_path / 'meta.pkl').write_bytes(pickle.dumps(theirs))
    tmp_path.chmod(0o500)  # a folder that cannot be written, unless root runs this test
    assert read_meta(tmp_path) == expected == read_meta(tmp_path)


class Malicious:
    """Creates a file when it is unpickled."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return open, (self.path, 'w')


@pytest.mark.quick
def test_code_in_meta_pkl_does_not_run(tmp_path):
    for content, problem in [
            (Malicious(tmp_path / 'it ran'), 'it names .*io.open'),
            (meta_of_nanogpt(extra=Malicious(tmp_path / 'it ran')), 'it names .*io.open'),
            (meta_of_nanogpt(vocab_size=np.int64(4)), 'it names numpy'),
            (meta_of_nanogpt(vocab_size=3), 'vocab_size is 3'),
            (meta_of_nanogpt(vocab_size=True), 'vocab_size is True'),
            (meta_of_nanogpt(stoi={'a': 0}), 'stoi is not the inverse of its itos'),
            ([4], 'list indices'),
            (dict(stoi={}), 'vocab_size')]:
        (tmp_path / 'meta.pkl').write_bytes(pickle.dumps(content))
        sentence = f'{tmp_path} has a meta.pkl but no meta.json; a pickle can run code.*{problem}.*again'
        with pytest.raises(ValueError, match=sentence):
            read_meta(tmp_path)
    for damaged in b'', b'\x80\x04', b'no pickle', pickle.dumps(meta_of_nanogpt())[:-9]:
        (tmp_path / 'meta.pkl').write_bytes(damaged)
        with pytest.raises(ValueError, match='meta.pkl but no meta.json'):
            read_meta(tmp_path)
    assert not (tmp_path / 'it ran').exists() and not (tmp_path / 'meta.json').exists()
    (tmp_path / 'meta.json').write_text(json.dumps(U16))
    assert read_meta(tmp_path) == U16


# --- looks at token files -----------------------------------------------------------------------------------

def text_like(count, seed=0, vocab_size=65):
    return np.random.default_rng(seed).integers(0, vocab_size, count)


def oddities(folder, meta=None, dtype='<u2', **splits):
    """The oddities of a dataset with these tokens. meta: the content of its meta.json, None for no file."""
    for name, tokens in splits.items():
        np.asarray(tokens).astype(dtype).tofile(folder / f'{name}.bin')
    if meta:
        (folder / 'meta.json').write_text(json.dumps(meta))
    meta = read_meta(folder)
    loaders = [TokenLoader(str(folder), split, 8, meta['vocab_size'], meta, 1)
               for split in ('train', 'val') if list(folder.glob(f'{split}*.bin'))]
    return checks.find_oddities(str(folder), meta, loaders)


CHARS = dict(vocab_size=65, dtype='uint16', tokenizer='char', chars=[*map(chr, range(65))])


@pytest.mark.quick
def test_usual_datasets_are_not_odd(tmp_path):
    train, val = text_like(300_000), text_like(9_000, 1)
    assert oddities(tmp_path, CHARS, train=train, val=val) == []
    assert oddities(tmp_path, CHARS, train=train, val=[0] * 100) == []  # too few tokens to judge
    assert oddities(tmp_path, CHARS, train=text_like(9_000, vocab_size=4), val=val // 4) == []
    assert oddities(tmp_path, dict(GPT2, vocab_size=50304), train=text_like(9_000, vocab_size=50257)) == []
    assert oddities(tmp_path, dict(CHARS, dtype='uint32'), dtype='<u4', train=train, val=val) == []


@pytest.mark.quick
@pytest.mark.parametrize('dtype, bytes_of_a_token, advice', [
    ('<u4', 4, 'write "dtype": "uint32" and the vocab_size into .*/meta.json'),
    ('<i8', 8, 'write them as uint16 or uint32')])
def test_tokens_of_more_bytes_are_refused_without_meta_json(tmp_path, dtype, bytes_of_a_token, advice):
    factor = bytes_of_a_token // 2
    sentence = (f'train.bin is read as uint16, but only one of {factor} numbers is above 3: its tokens seem '
                f'to have {bytes_of_a_token} bytes each: {advice}$')
    with pytest.raises(ValueError, match=sentence):
        oddities(tmp_path, dtype=dtype, train=text_like(100_000), val=text_like(5_000, 1))
    found, = oddities(tmp_path, CHARS, dtype=dtype, train=text_like(100_000))  # a meta.json decides
    assert f'{bytes_of_a_token} bytes each' in found
    if bytes_of_a_token == 8:
        found, = oddities(tmp_path, dict(CHARS, dtype='uint32'), dtype=dtype, train=text_like(100_000))
        assert 'read as uint32, but only one of 2 numbers' in found and '8 bytes each' in found


@pytest.mark.quick
def test_vocabulary_far_larger_than_any_token_is_odd(tmp_path):
    train, val = text_like(100_000), text_like(5_000, 1)
    found, = oddities(tmp_path, train=train, val=val)
    assert 'vocab_size is 50,257, but the largest token seen' in found and ' is 64: ' in found
    assert f'set vocab_size and tokenizer in {tmp_path}/meta.json' in found
    assert oddities(tmp_path, train=np.where(train == 0, 20_000, train), val=val) == []


@pytest.mark.quick
def test_repeated_token_is_odd(tmp_path):
    """Whole files, and the end of a file whose preparation was interrupted."""
    train, val = text_like(1_000_000), text_like(5_000, 1)
    found, = oddities(tmp_path, CHARS, train=train * 0 + 7, val=val)
    assert f'{tmp_path}/train.bin has nothing but the token 7 in 64 of 64 samples, first from' in found
    train[800_000:] = 0
    found, = oddities(tmp_path, CHARS, train=train, val=val)
    assert 'train.bin has nothing but the token 0 in 13 of 64 samples' in found
    position = int(found.split('position ')[1].split()[0].replace(',', ''))
    assert 800_000 <= position < 820_000
    np.zeros(50_000, '<u2').tofile(tmp_path / 'val_1.bin')
    found, = oddities(tmp_path, train=text_like(9_000))
    assert f'{tmp_path}/val_1.bin has nothing but the token 0' in found


@pytest.mark.quick
def test_val_split_that_is_part_of_the_train_split_is_odd(tmp_path):
    train = text_like(200_000)
    for val, what in [(train, 'is the same as'), (train[-20_001:], 'is also the end of'),
                      (train[:3_000], 'is also the beginning of')]:
        found, = oddities(tmp_path, CHARS, train=train, val=val)
        assert f'the val split of {tmp_path} {what} the train split: its loss says nothing' in found
    val = train[-20_000:].copy()
    val[::1000] += 1
    assert oddities(tmp_path, dict(CHARS, vocab_size=66), train=train, val=val) == []


@pytest.mark.quick
def test_looks_read_little_of_a_large_file(tmp_path, monkeypatch):
    with open(tmp_path / 'train.bin', 'wb') as file:
        file.truncate(2 ** 40)  # a terabyte that takes no room on the disk
    monkeypatch.setattr('data.loader.SCAN_TOKENS', 2 ** 12)
    n_read, read_many = [], TokenLoader.read_many

    def counting_read(loader, starts, length):
        n_read.append(len(starts) * length)
        return read_many(loader, starts, length)

    monkeypatch.setattr(TokenLoader, 'read_many', counting_read)
    assert 'nothing but the token 0 in 64 of 64' in oddities(tmp_path, CHARS)[0]
    assert sum(n_read) == 64 * 4096


# --- through the door ---------------------------------------------------------------------------------------

def test_run_takes_nanogpts_dataset_without_a_val_split_by_a_relative_path(train, dataset, tmp_path):
    folder = tmp_path / 'a/b'
    folder.mkdir(parents=True)
    tokens = np.fromfile(dataset / 'train.bin', '<u2')
    np.concatenate([tokens, np.zeros(20_000, '<u2')]).tofile(folder / 'train.bin')
    chars = json.loads((dataset / 'meta.json').read_text())['chars']
    (folder / 'meta.pkl').write_bytes(pickle.dumps(meta_of_nanogpt(chars)))
    run = train('--dataset=a/b', '--eval_iters=0', '--max_iters=1', nproc=2, cwd=tmp_path)
    assert list(run.lines) == [1] and not run.evals
    assert json.loads((folder / 'meta.json').read_text())['chars'] == ''.join(chars)
    assert run.stderr.count('meta.json from the meta.pkl there') == 1
    warning = f'warning: {folder}/train.bin has nothing but the token 0 in '
    assert run.stdout.count(warning) == 1


# --- whether the data have changed --------------------------------------------------------------------------

@pytest.mark.quick
def test_fingerprint_notices_other_data_and_only_other_data(tmp_path):
    for name, seed in ('train_000.bin', 0), ('train_001.bin', 1), ('val.bin', 2):
        np.random.default_rng(seed).integers(0, 65, 100_000, dtype='<u2').tofile(tmp_path / name)
    sources = dict(some=Source(str(tmp_path), {}))
    former = fingerprint(sources)
    assert {name: size for name, (size, _) in former.items()} == dict.fromkeys(
        ['train_000.bin', 'train_001.bin', 'val.bin'], 200_000)
    assert len({digest for _, digest in former.values()}) == 3
    (tmp_path / 'meta.json').write_text('{}')  # not a shard
    assert fingerprint(sources) == former
    for changed in 0, 99_999:  # the first and the last token
        tokens = np.fromfile(tmp_path / 'val.bin', '<u2')
        tokens[changed] ^= 1
        tokens.tofile(tmp_path / 'val.bin')
        later = fingerprint(sources)
        assert [name for name in former if later[name] != former[name]] == ['val.bin']
        tokens[changed] ^= 1
        tokens.tofile(tmp_path / 'val.bin')
    (tmp_path / 'train_001.bin').write_bytes(b'short')
    assert fingerprint(sources)['train_001.bin'][0] == 5
    (tmp_path / 'train_001.bin').unlink()
    assert list(fingerprint(sources)) == ['train_000.bin', 'val.bin']
    mixture = sources | dict(other=sources['some'])
    assert list(fingerprint(mixture)) == [
        'some/train_000.bin', 'some/val.bin', 'other/train_000.bin', 'other/val.bin']
