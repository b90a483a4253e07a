"""Datasets, weights and checkpoints in object storage: a server of S3 on loopback, with faults."""
import functools
import http.server
import importlib.util
import json
import os
import pathlib
import shutil
import threading

import numpy as np
import pytest
import test_corpus

from data import cache, shards, storage
from data.datasets import find_sources, fingerprint
from data.splits import open_training_split
from data.tokens.tokenizer import get_tokenizer
from helpers import TINY, assert_same_tensors, newest_tensors, read_run, read_tensors, run_forked, run_script
from kilogpt.run import checkpoint
from kilogpt.run.remote import RemoteRun
from object_store import FaultyProxy, start_moto

BUCKET = 's3://bucket'
MISSING = [name for name in ('s3fs', 'moto', 'flask', 'flask_cors') if not importlib.util.find_spec(name)]
pytestmark = [pytest.mark.slow, pytest.mark.skipif(
    bool(MISSING), reason=f'{", ".join(MISSING)} missing: pip install s3fs "moto[s3]" flask flask-cors')]


@pytest.fixture(scope='module')
def server():
    """A proxy before an S3 server with an empty bucket, which the environment names."""
    moto, address = start_moto()
    proxy = FaultyProxy(address)
    with pytest.MonkeyPatch.context() as patch:
        for key, value in dict(AWS_ENDPOINT_URL=proxy.url, AWS_ACCESS_KEY_ID='a', AWS_SECRET_ACCESS_KEY='b',
                               AWS_DEFAULT_REGION='us-east-1').items():
            patch.setenv(key, value)
        storage._file_system('s3', os.getpid()).mkdir('bucket')
        yield proxy
    proxy.shutdown()
    moto.stop()


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv('KILOGPT_CACHE', str(tmp_path / 'cache'))


@pytest.fixture
def faults(server):
    """A function that sets attributes of the proxy, until the end of the test."""
    before = dict(vars(server))
    yield lambda **values: vars(server).update(values)
    vars(server).update({key: before[key] for key in ('latency', 'busy', 'cut', 'lag', 'rate')})


def upload(folder, url):
    """Copy the files of a folder to a URL; returns that."""
    for path in pathlib.Path(folder).iterdir():
        if path.is_file():
            storage.write(f'{url}/{path.name}', path.read_bytes())
    return url


def names_below(url):
    return storage.files_below(url)


# --- calls --------------------------------------------------------------------------------------------------

def test_calls_give_what_was_written_although_the_storage_fails(server, faults, tmp_path):
    content = np.random.default_rng(0).bytes(3_000_000)
    faults(busy=0.2, cut=0.2)
    storage.write(f'{BUCKET}/calls/small', b'abc')
    assert storage.write_with(f'{BUCKET}/calls/large', lambda file: file.write(content)) == len(content)
    assert storage.read(f'{BUCKET}/calls/small') == b'abc' and storage.read(f'{BUCKET}/calls/large') == content
    ranges = [(f'{BUCKET}/calls/large', begin, begin + 5000) for begin in range(0, 200_000, 5000)]
    assert storage.read_ranges(ranges) == [content[begin:end] for _, begin, end in ranges]
    assert b''.join(storage.read_parts(f'{BUCKET}/calls/large', 1, len(content))) == content[1:]
    assert storage.files_in(f'{BUCKET}/calls').keys() == {'small', 'large'}
    assert storage.size_of(f'{BUCKET}/calls/large') == 3_000_000 and storage.exists(f'{BUCKET}/calls/small')
    storage.delete([f'{BUCKET}/calls/small', f'{BUCKET}/calls/never-there'])
    assert not storage.exists(f'{BUCKET}/calls/small') and storage.files_in(f'{BUCKET}/nothing') == {}
    copy = storage.local_copy(f'{BUCKET}/calls')
    assert pathlib.Path(copy, 'large').read_bytes() == content
    requests = len(server.requests)
    assert storage.local_copy(f'{BUCKET}/calls') == copy
    assert not any(method == 'GET' and 'large' in path for method, path in server.requests[requests:])


def test_remote_file_is_read_like_a_local_one(server, tmp_path):
    content = np.random.default_rng(1).bytes(100_000)
    (tmp_path / 'file').write_bytes(content)
    storage.write(f'{BUCKET}/file', content)
    with storage.open_to_read(f'{BUCKET}/file') as remote, open(tmp_path / 'file', 'rb') as local:
        for offset, whence, count in ((0, 0, 10), (-100, 2, 50), (7, 1, 1000), (99_990, 0, 100), (5, 0, -1)):
            assert remote.seek(offset, whence) == local.seek(offset, whence)
            assert remote.read(count) == local.read(count) and remote.tell() == local.tell()


def test_write_that_is_not_finished_leaves_nothing(server):
    def fill(file):
        file.write(bytes(60_000_000))  # more than one part
        raise ValueError('the middle')

    with pytest.raises(ValueError, match='the middle'):
        storage.write_with(f'{BUCKET}/unfinished', fill)
    assert not storage.exists(f'{BUCKET}/unfinished')


@pytest.mark.parametrize('environment, url, sentence', [
    (dict(AWS_ACCESS_KEY_ID='', AWS_SECRET_ACCESS_KEY='', AWS_EC2_METADATA_DISABLED='true'), 's3://bucket/a',
     'there are no credentials for this storage'),
    (dict(AWS_ENDPOINT_URL='http://127.0.0.1:9'), 's3://bucket/a', 'could not be reached for 1 s'),
    ({}, 's3://no-bucket/a', 'no-bucket/a cannot be written .*is the name of the bucket right?'),
    ({}, 'nothing://bucket/a', 'nothing:// is not known to fsspec'),
    ({}, 'gs://bucket/a', r'gs:// needs gcsfs: pip install gcsfs'),
])
def test_storage_that_cannot_be_used_gets_a_sentence(server, monkeypatch, environment, url, sentence):
    for key, value in environment.items():
        monkeypatch.setenv(key, value)
    monkeypatch.setattr(storage, 'PATIENCE', 1)
    storage._file_system.cache_clear()
    import fsspec
    fsspec.get_filesystem_class('s3').clear_instance_cache()
    with pytest.raises((storage.StorageError, ValueError, ImportError), match=sentence):
        storage.write(url, b'')
    storage._file_system.cache_clear()
    fsspec.get_filesystem_class('s3').clear_instance_cache()


def test_denied_access_is_not_a_missing_file(server, monkeypatch):
    def denied(fs):
        raise PermissionError('Forbidden')

    with pytest.raises(storage.StorageError, match='s3://bucket/x: access is denied: check the credentials'):
        storage._call('s3://bucket/x', denied)


@pytest.mark.parametrize('url', [f'{BUCKET}/anything', 'http://127.0.0.1:9/anything'])
def test_file_that_cannot_be_asked_for_is_not_a_missing_file(server, faults, monkeypatch, url):
    monkeypatch.setattr(storage, 'PATIENCE', 1)
    faults(busy=1.0)
    with pytest.raises(storage.StorageError, match='could not be reached for 1 s'):
        storage.exists(url)


def test_web_server_without_ranges_is_no_source_of_wrong_bytes(tmp_path, monkeypatch):
    """Python's own server sends the whole file, whatever range was asked for."""
    monkeypatch.setattr(storage, 'PATIENCE', 1)
    (tmp_path / 'file').write_bytes(bytes(5000))
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=tmp_path)
    with http.server.ThreadingHTTPServer(('127.0.0.1', 0), handler) as web:
        threading.Thread(target=web.serve_forever, daemon=True).start()
        url = f'http://127.0.0.1:{web.server_port}/file'
        assert storage.read(url) == bytes(5000) and storage.names_in(url.removesuffix('file')) == ['file']
        with pytest.raises(storage.StorageError, match='5,000 bytes came of 10'):
            storage.read_ranges([(url, 0, 10)])
        web.shutdown()


# --- datasets -----------------------------------------------------------------------------------------------

CONFIG = dict(block_size=32, seed=7, documents='stream', max_iters=10, batch_size=4,
              gradient_accumulation_steps=1, eval_only=False)


def batches_of(url, **keys):
    """Batches of the training split of a dataset, from places all over it."""
    config = CONFIG | dict(dataset=str(url)) | keys
    sources = find_sources(str(url))
    loader = open_training_split(sources, next(iter(sources.values())).meta['vocab_size'], config)
    numbers = np.array([0, 1, 2, -1, 300, 599, 1300, 5000])
    return [np.asarray(array) for array in loader.train_batch(numbers)], loader


def make_shards(folder, dataset, header=False):
    """Cut the training tokens of a dataset into three shards, and put them into a folder with its meta.json."""
    folder.mkdir()
    meta = json.loads((dataset / 'meta.json').read_text()) | dict(separator=0)
    (folder / 'meta.json').write_text(json.dumps(meta))
    shutil.copy(dataset / 'val.bin', folder)
    tokens = np.fromfile(dataset / 'train.bin', '<u2')
    for i, part in enumerate(np.split(tokens, [7_000, 7_033])):
        head = np.array([20240520, 1, len(part), *[0] * 253], '<i4').tobytes() if header else b''
        (folder / f'train_{i}.bin').write_bytes(head + part.tobytes())
    return folder


@pytest.mark.parametrize('header, keys', [
    (False, {}), (True, dict(documents='mask')), (False, dict(documents='pack')), (True, dict(max_epochs=9))],
    ids=['stream', 'mask', 'pack', 'epochs'])
def test_remote_dataset_gives_the_batches_of_a_local_one(server, faults, dataset, tmp_path, keys, header):
    folder = make_shards(tmp_path / 'data', dataset, header)
    url = upload(folder, f'{BUCKET}/{tmp_path.name}')
    faults(busy=0.1, cut=0.1)
    expected, _ = batches_of(folder, **keys)
    found, loader = batches_of(url, **keys)
    assert all(np.array_equal(*pair) for pair in zip(expected, found, strict=True))
    assert fingerprint(find_sources(url)) == fingerprint(find_sources(str(folder)))
    mixture = f'{url}:0.7, {folder}:0.3'  # a source here and one there
    if 'documents' not in keys:
        local = tmp_path / 'other'
        shutil.copytree(folder, local)
        expected, _ = batches_of(f'{local}:0.7, {folder}:0.3', **keys)
        found, _ = batches_of(mixture, **keys)
        assert all(np.array_equal(*pair) for pair in zip(expected, found, strict=True))


def test_part_of_a_file_in_the_cache_is_read_from_there(server, dataset, tmp_path, monkeypatch):
    monkeypatch.setattr(shards, 'PART_BYTES', 4096)
    monkeypatch.setattr(cache, 'PART_BYTES', 4096)
    url = upload(make_shards(tmp_path / 'data', dataset), f'{BUCKET}/{tmp_path.name}')
    expected, loader = batches_of(url)
    shard = loader.shards[0]
    tokens = shard[:]
    cache.copy_file(shard.url, shard.entry)
    pathlib.Path(shard.entry.complete).unlink()
    marks = np.memmap(shard.entry.marks, np.uint8, 'r+')
    assert marks.all() and len(marks) == 4  # 14,000 bytes
    marks[2] = 0
    assert shard.cached(0, 4096) is not None and shard.cached(2047, 2048) is not None
    assert shard.cached(4095, 4097) is None and shard.cached(6144, 7000) is not None
    # A copy of which parts may have been lost with the power is made again.
    with open(shard.entry.copy, 'r+b') as copy:
        copy.write(bytes(14_000))
    other = shards.CacheEntry(shard.entry.folder, shard.size)
    other.marks = os.path.join(shard.entry.folder, 'parts-of-a-later-start')
    assert other.open() is None
    cache.copy_file(shard.url, other)
    copied, parts = other.open()
    assert np.array_equal(copied.view(shard.dtype), tokens) and parts.all()


def test_cache_is_bounded_and_keeps_what_is_used(server, dataset, tmp_path):
    url = upload(make_shards(tmp_path / 'data', dataset), f'{BUCKET}/{tmp_path.name}')
    _, loader = batches_of(url)
    files = [(shard.url, shard.size, shard.entry.folder) for shard in loader.shards]  # 14,000, 66, 25,934 bytes
    cache.copy_all(files, gigabytes=27e-6)
    assert [os.path.exists(shard.entry.complete) for shard in loader.shards] == [True, True, False]
    cache.copy_all(files[2:], gigabytes=30e-6)  # makes room
    assert [os.path.exists(shard.entry.complete) for shard in loader.shards] == [False, True, True]
    used = sum(path.stat().st_size for path in (tmp_path / 'cache' / 'tokens').glob('*/*'))
    assert used < 30_000
    # Another version of a file is another file.
    storage.write(loader.shards[2].url, bytes(20_000))
    other = open_training_split(find_sources(url), 65, CONFIG | dict(dataset=url)).shards[2]
    assert other.entry.folder != loader.shards[2].entry.folder and not other[:].any()


def test_dataset_that_is_not_there_or_cut_gets_a_sentence(server, dataset, tmp_path):
    with pytest.raises(ValueError, match=f"dataset '{BUCKET}/nothing' has no token files"):
        find_sources(f'{BUCKET}/nothing')
    url = upload(make_shards(tmp_path / 'data', dataset), f'{BUCKET}/{tmp_path.name}')
    meta = json.loads(storage.read(f'{url}/meta.json')) | dict(tokens={'train_1.bin': 34})
    storage.write(f'{url}/meta.json', json.dumps(meta).encode())
    with pytest.raises(ValueError, match='train_1.bin should hold 34 tokens of 2 bytes, but is 66 bytes long'):
        batches_of(url)


@pytest.mark.parametrize('pattern', ['', '/*.jsonl.gz'], ids=['folder', 'glob'])
def test_corpus_is_prepared_from_the_bucket(server, faults, tmp_path, monkeypatch, vocabulary, pattern):
    monkeypatch.setenv('TIKTOKEN_CACHE_DIR', vocabulary)
    folder, _ = test_corpus.make_corpus(tmp_path / 'in')
    url = upload(folder, f'{BUCKET}/{tmp_path.name}')
    faults(busy=0.1, cut=0.1)
    encoder = dict(encoder=get_tokenizer(dict(tokenizer='gpt2')))
    here = test_corpus.prepare(folder, tmp_path / 'here', monkeypatch, **encoder)
    there = test_corpus.prepare(url + pattern, tmp_path / 'there', monkeypatch, **encoder)
    assert [name for name in here if name.endswith('.bin') and here[name] != there[name]] == []
    metas = [json.loads(files['meta.json']) for files in (here, there)]
    assert [meta.pop('input') for meta in metas] == [str(folder), url + pattern] and metas[0] == metas[1]


# --- runs ---------------------------------------------------------------------------------------------------

def run_there(*arguments, cwd, check=True, runner=run_forked, **options):
    return runner('train.py', *TINY, *arguments, cwd=cwd, check=check, **options)


def test_run_with_everything_in_the_bucket_continues_on_another_machine(
        train, server, dataset, tmp_path):
    """12 iterations here equal 5 with everything in the bucket and 7 on a machine that has nothing."""
    data, home = upload(dataset, f'{BUCKET}/{tmp_path.name}/data'), f'{BUCKET}/{tmp_path.name}/run'
    here = train('--keep_checkpoints=1', '--save_interval=5')
    first, second = tmp_path / 'first', tmp_path / 'second'
    first.mkdir()
    second.mkdir()
    keys = f'--dataset={data}', f'--out_dir={home}', '--keep_checkpoints=1', '--save_interval=5'
    run_there(*keys, '--max_iters=5', cwd=first, nproc=2)
    (first / 'out-s3').rename(first / 'lost')
    done = run_there(*keys, '--init_from=auto', cwd=second, nproc=3)
    assert f'resuming {home}/ckpt/iter_00000005' in done.stdout
    there = read_run(second / 'out-s3' / 'bucket' / tmp_path.name / 'run')
    assert [i for i in there.lines] == list(range(1, 13)) == list(here.lines)
    for i, line in here.lines.items():
        assert abs(line['loss'] - there.lines[i]['loss']) < 2e-5
    assert here.evals.keys() <= there.evals.keys()
    # Of old checkpoints, the newest and the best are kept there too.
    kept = {name.split('/')[0] for name in names_below(f'{home}/ckpt')}
    assert 'iter_00000012' in kept and len(kept) <= 2
    assert storage.read(f'{home}/metrics.jsonl').count(b'"grad_norm"') == 12
    text = run_forked('sample.py', f'--out_dir={home}', '--num_samples=1', '--max_new_tokens=20',
                      '--device=cpu', cwd=second).stdout
    copied = tmp_path / 'copied'
    for name in names_below(home):
        (copied / name).parent.mkdir(parents=True, exist_ok=True)
        (copied / name).write_bytes(storage.read(f'{home}/{name}'))
    assert text == run_forked('sample.py', f'--out_dir={copied}', '--num_samples=1', '--max_new_tokens=20',
                              '--device=cpu').stdout
    assert checkpoint.damage(f'{home}/ckpt/iter_00000012') is None
    # A new run there would have to delete this one.
    again = run_there(*keys, cwd=second, check=False)
    assert again.returncode == 1
    assert f'error: {home} has checkpoints of another run: set another out_dir, or --init_from=resume' in again.stderr


@pytest.fixture(scope='module')
def saved(server, dataset, tmp_path_factory):
    """The URL of a run with checkpoints at iterations 4, 8 and 12."""
    folder = tmp_path_factory.mktemp('saved')
    home = f'{BUCKET}/saved'
    run_there(f'--dataset={dataset}', f'--out_dir={home}', '--eval_interval=4', '--keep_checkpoints=3',
              cwd=folder)
    return home


def test_damaged_or_incomplete_checkpoint_is_not_resumed(saved, dataset, tmp_path):
    home = f'{BUCKET}/{tmp_path.name}'
    for name in names_below(saved):
        storage.write(f'{home}/{name}', storage.read(f'{saved}/{name}'))
    storage.delete([f'{home}/ckpt/iter_00000012/.metadata'])
    tensors = f'{home}/ckpt/iter_00000008/__0_0.distcp'
    content = bytearray(storage.read(tensors))
    content[-500] ^= 1
    storage.write(tensors, bytes(content))
    assert [path[-2:] for path in checkpoint.find(home)] == ['08', '04']
    done = run_there(f'--dataset={dataset}', f'--out_dir={home}', '--eval_interval=4', '--keep_checkpoints=3',
                     '--init_from=resume', cwd=tmp_path)
    assert f'{home}/ckpt/iter_00000008 is damaged (__0_0.distcp is not as it was written)' in done.stdout
    assert f'resuming {home}/ckpt/iter_00000004' in done.stdout
    for iteration in (8, 12):
        path = f'ckpt/iter_{iteration:08d}'
        assert checkpoint.damage(f'{home}/{path}') is None
        assert storage.read(f'{home}/{path}/__0_0.distcp') == storage.read(f'{saved}/{path}/__0_0.distcp')


def test_unreachable_storage_is_not_taken_for_a_run_without_checkpoints(saved, dataset, tmp_path):
    fault = tmp_path / 'unreachable.py'
    fault.write_text("import os\nfrom data import storage\nstorage.PATIENCE = 1\n"
                     "os.environ['AWS_ENDPOINT_URL'] = 'http://127.0.0.1:9'\n")
    done = run_there(f'--dataset={dataset}', f'--out_dir={saved}', '--init_from=auto', cwd=tmp_path,
                     check=False, faults=[fault])
    assert done.returncode == 1 and 'could not be reached for 1 s' in done.stderr
    assert done.stderr.startswith('error: ') and 'Traceback' not in done.stderr


def test_save_that_the_storage_refuses_is_reported_and_tried_again(dataset, server, tmp_path):
    fault = tmp_path / 'refused.py'
    fault.write_text("from data import storage\nwrite_with = storage.write_with\n"
                     "def refuse(url, fill):\n"
                     "    if 'iter_00000006/__0' in url:\n"
                     "        raise storage.StorageError(f'{url}: access is denied')\n"
                     "    return write_with(url, fill)\n"
                     "storage.write_with = refuse\n")
    home = f'{BUCKET}/{tmp_path.name}'
    done = run_there(f'--dataset={dataset}', f'--out_dir={home}', cwd=tmp_path, faults=[fault])
    assert 'iter_00000006 could not be saved (StorageError: ' in done.stderr
    assert [path[-2:] for path in checkpoint.find(home)] == ['12']


def test_earlier_run_stops_saving_when_a_later_one_begins_to(server, tmp_path):
    home = f'{BUCKET}/{tmp_path.name}'
    earlier, later = RemoteRun(home), RemoteRun(home)
    path = f'{home}/ckpt/iter_00000001'
    earlier.begin(path)
    storage.write(f'{path}/__0_0.distcp', b'half')
    later.begin(f'{home}/ckpt/iter_00000002')
    assert names_below(f'{home}/ckpt') == []  # what the earlier one had begun is gone
    for call in (earlier.before_commit, lambda: earlier.begin(path)):
        with pytest.raises(ValueError, match=f'another run has begun to save in {home}: end one of the two'):
            call()
    later.before_commit()


def test_listing_that_lags_deletes_no_complete_checkpoint(server, tmp_path, monkeypatch):
    home = f'{BUCKET}/{tmp_path.name}'
    for name in ('__0_0.distcp', '.metadata'):
        storage.write(f'{home}/ckpt/iter_00000001/{name}', b'x')
    storage.write(f'{home}/ckpt/iter_00000002/__0_0.distcp', b'x')
    listed = storage.files_below
    monkeypatch.setattr(storage, 'files_below', lambda url: [
        name for name in listed(url) if not name.endswith('.metadata')])
    RemoteRun(home).begin(f'{home}/ckpt/iter_00000003')
    assert listed(f'{home}/ckpt') == ['iter_00000001/.metadata', 'iter_00000001/__0_0.distcp']


# --- weights ------------------------------------------------------------------------------------------------

def test_weights_in_the_bucket_start_a_run(saved, train, dataset, tmp_path):
    run_script('kilogpt.convert', 'export', saved, tmp_path / 'hf')
    url = upload(tmp_path / 'hf', f'{BUCKET}/{tmp_path.name}')
    keys = '--max_iters=1', '--lr_decay_iters=10', '--bias=False'
    here = train(*keys, f'--init_from={tmp_path / "hf"}')
    there = train(*keys, f'--init_from={url}')
    assert here.lines[1]['loss'] == there.lines[1]['loss'] < 4
    from_run = train(*keys, f'--init_from={saved}')
    assert from_run.lines[1]['loss'] == pytest.approx(here.lines[1]['loss'], abs=1e-5)
    missing = train(f'--init_from={BUCKET}/nothing', check=False)
    assert missing.returncode == 1 and f"'{BUCKET}/nothing' does not exist" in missing.stderr


# --- kills --------------------------------------------------------------------------------------------------

def test_kills_change_no_bit(saved, train, server, faults, dataset, tmp_path):
    """Data, first weights and checkpoints in the bucket; killed six times, in five ways.

    The storage is slow, busy and cuts connections, and its lists of files are a second old.
    """
    data, home = upload(dataset, f'{BUCKET}/{tmp_path.name}/data'), f'{BUCKET}/{tmp_path.name}/run'
    run_script('kilogpt.convert', 'export', saved, tmp_path / 'hf')
    weights = upload(tmp_path / 'hf', f'{BUCKET}/{tmp_path.name}/weights')
    keys = ['--save_interval=2', '--max_iters=30', '--lr_decay_iters=30', '--eval_interval=15']
    here = train(*keys, f'--init_from={tmp_path / "hf"}')
    faults(latency=0.02, busy=0.05, cut=0.05, lag=1.0)
    run_there(*keys, '--max_iters=2', f'--dataset={data}', f'--out_dir={home}', f'--init_from={weights}',
              cwd=tmp_path)
    log = tmp_path / 'log'
    done = run_script('dev/kills.py', 6, 6, log, *TINY, *keys, f'--dataset={data}', f'--out_dir={home}',
                      '--init_from=auto', cwd=tmp_path, timeout=900)
    kills = json.loads(done.stdout)  # {how it was killed: how often}
    assert sum(kills.values()) == 6 and len(kills) == 5, log.read_text()
    faults(latency=0.0, busy=0.0, cut=0.0, lag=0.0)
    there = read_run(tmp_path / 'out-s3' / 'bucket' / tmp_path.name / 'run')
    for i, line in here.lines.items():
        assert (line['loss'], line['grad_norm']) == (there.lines[i]['loss'], there.lines[i]['grad_norm'])
    newest = checkpoint.find(home)[0]
    assert newest.endswith('iter_00000030') and 'Traceback' not in log.read_text()
    folder = tmp_path / 'copy'
    folder.mkdir()
    for name in names_below(newest):
        (folder / name).write_bytes(storage.read(f'{newest}/{name}'))
    assert_same_tensors(read_tensors(folder), newest_tensors(here.out_dir))
