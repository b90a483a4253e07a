"""The loader reads every token of an epoch once, with any shards and processes, and refuses bad data."""
import itertools
import tempfile
import threading

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import data.loader
from data.batches import Batches, Prefetcher
from data.loader import TokenLoader, shuffled
from kilogpt.parallel.layout import Layout

pytestmark = pytest.mark.quick

U16 = dict(vocab_size=65536, dtype='uint16')


def write(path, tokens, dtype='<u2', header=False, version=1, count=None):
    """Write a token file, raw or with llm.c's header. count: a false number of tokens for the header."""
    ints = np.zeros(256, dtype='<i4')
    ints[:3] = 20240520, version, len(tokens) if count is None else count
    with open(path, 'wb') as file:
        file.write(ints.tobytes() * header + np.asarray(tokens).astype(dtype).tobytes())


def load(folder, split='train', block_size=4, vocab_size=65536, meta=U16, seed=1):
    return TokenLoader(str(folder), split, block_size, vocab_size, meta, seed)


@settings(max_examples=60, deadline=None)
@given(st.data(), st.integers(1, 9), st.integers(1, 5), st.integers(1, 4), st.integers(1, 4),
       st.integers(0, 2 ** 32))
def test_every_token_of_an_epoch_is_seen_once(data, block_size, world_size, batch_size, accumulation, seed):
    """All processes and micro-steps together read every token once, as train.py asks for the batches.

    This covers three epochs and the batches that span two epochs.
    """
    n = data.draw(st.integers(block_size + 1, 120), 'tokens')
    cuts = sorted(data.draw(st.sets(st.integers(1, n - 1), max_size=3), 'shards'))
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as whole:
        for i, piece in enumerate(np.split(np.arange(n), cuts)):  # the id of a token is its position
            write(f'{folder}/train_{i}.bin', piece, header=data.draw(st.booleans(), 'header'))
        write(f'{whole}/train.bin', np.arange(n))
        loader, one_file = (load(where, block_size=block_size, vocab_size=n, seed=seed)
                            for where in (folder, whole))

        global_batch, per_epoch, seen = batch_size * accumulation, n // block_size, {}
        layout = Layout(world_size)
        micro_batch, micro_steps = layout.split_batch(global_batch, batch_size)
        assert micro_batch <= batch_size
        iterations = -(-3 * per_epoch // global_batch)
        for rank in range(world_size):
            batches = Batches(loader, loader.train_batch, lambda i: i * global_batch + np.arange(global_batch),
                              steps=lambda total: -(-total // (micro_batch * world_size)),
                              rows=lambda total, step: layout.rows(rank, total, micro_batch, step),
                              positions=layout.positions(rank, block_size), device=torch.device('cpu'))
            assert [is_last for _, is_last in batches.of(0)] == [False] * (micro_steps - 1) + [True]
            for iteration, micro_step in np.ndindex(iterations, micro_steps):
                rows = layout.rows(rank, global_batch, micro_batch, micro_step)
                sequences = np.where(rows < 0, -1, iteration * global_batch + rows)
                x, y = (tokens.numpy() for tokens in batches(iteration, micro_step))
                assert len(rows) == micro_batch and (y[rows < 0] == -1).all()
                assert (y[rows >= 0] == (x[rows >= 0] + 1) % n).all()  # a target is its input's successor
                for sequence, inputs in zip(sequences[rows >= 0].tolist(), x[rows >= 0]):
                    assert sequence not in seen
                    seen[sequence] = inputs.tolist()
        assert len(seen) == iterations * global_batch
        for epoch in range(3):
            numbers = np.arange(epoch * per_epoch, (epoch + 1) * per_epoch)
            tokens = list(itertools.chain.from_iterable(seen[number] for number in numbers.tolist()))
            assert len(tokens) == len(set(tokens)) == n - n % block_size
            assert one_file.batch(one_file.train_starts(numbers))[0].flatten().tolist() == tokens


def test_order_and_cuts_differ_between_epochs_and_seeds(tmp_path):
    write(tmp_path / 'train.bin', np.arange(4001))
    orders = []
    for seed in (1, 2):
        loader = load(tmp_path, seed=seed)
        orders += [loader.train_starts(1000 * epoch + np.arange(1000)) for epoch in (0, 1)]
    for i, a in enumerate(orders):
        assert (np.diff(a) == 4).sum() < 10  # the sequences are not in the order of the text
        for b in orders[:i]:  # one of 1000 is in the same place by chance
            assert (a // 4 == b // 4).sum() < 10 and set(a % 4001) != set(b % 4001)


@pytest.mark.parametrize('shuffle_block', [1, 7, 4096])
def test_order_of_training_does_not_change(tmp_path, monkeypatch, shuffle_block):
    """The order does not depend on the number of sequences that are shuffled in one call.

    A run that resumes continues in the order in which it began, also with a later version.
    """
    monkeypatch.setattr(data.loader, 'SHUFFLE_BLOCK', shuffle_block)
    write(tmp_path / 'train.bin', np.arange(4001))
    starts = load(tmp_path).train_starts(np.array([0, 7, -1, 999, 1000, 1003, 2500]))
    assert starts.tolist() == [4457, 5365, -1, 2253, 4930, 4610, 1650]


@pytest.mark.parametrize('n', [*range(1, 70), 255, 256, 257, 1000, 4096, 4097, 10007])
def test_shuffled_is_a_permutation(n):
    assert sorted(shuffled(np.arange(n), n, [1, n])) == list(range(n))


def test_shuffled_looks_random_and_takes_any_size():
    n = 10_000
    a, b = shuffled(np.arange(n), n, [1, 0]), shuffled(np.arange(n), n, [1, 1])
    # The correlation of n random pairs is 0 ± 1/sqrt(n) = 0.01, so 0.05 is five standard deviations.
    for x, y in ((a, np.arange(n)), (a[1:], a[:-1]), (a, b), (a[1:] - a[:-1], b[1:] - b[:-1])):
        assert abs(np.corrcoef(x, y)[0, 1]) < 0.05
    assert (a == np.arange(n)).sum() < 10 and (a == b).sum() < 10  # the expected number is 1
    low = np.add.reduceat(a < n // 2, np.arange(0, n, 100))  # 50 ± 5 in each hundred
    assert 20 < low.min() and low.max() < 80
    far = shuffled(np.arange(1000), 10 ** 13, [1])
    assert len(set(far.tolist())) == 1000 and 0 <= far.min() and 10 ** 12 < far.max() < 10 ** 13


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 9), st.integers(0, 300), st.integers(0, 80))
def test_evaluation_set_is_fixed_evenly_spread_and_without_overlap(block_size, extra, count):
    n = block_size + 1 + extra
    with tempfile.TemporaryDirectory() as folder:
        write(f'{folder}/val.bin', np.arange(n))
        one, two = (load(folder, 'val', block_size, seed=seed) for seed in (1, 2))
        starts = one.eval_starts(count)
        assert starts.tolist() == two.eval_starts(count).tolist()
        assert len(starts) == min(count, (n - 1) // block_size)
        gaps = np.diff(np.append(starts, n - 1))  # the last sequence reaches the end of the split
        assert (gaps >= block_size).all() and (starts[:1] == 0).all()
        assert len(starts) == 0 or gaps.max() - gaps.min() < 2 * block_size
        if count:
            x, y = one.batch(starts)
            assert (x[:, 0] == starts).all() and (y == x + 1).all()


@pytest.mark.parametrize('names', [
    ['train.bin'], ['train_01.bin', 'train_02.bin'], ['set_train_01.bin', 'set_train_02.bin']])
@pytest.mark.parametrize('dtype, first', [('uint16', 0), ('uint32', 100_000)])
@pytest.mark.parametrize('header', [False, True])
def test_files_with_and_without_a_header_are_read_alike(tmp_path, names, dtype, first, header):
    folder = tmp_path / 'a [folder]*'  # a name that is not a pattern
    folder.mkdir()
    tokens = first + np.arange(50)
    for name, piece in zip(names, np.array_split(tokens, len(names))):
        write(folder / name, piece, dtype=np.dtype(dtype).newbyteorder('<'), header=header)
    loader = load(folder, vocab_size=first + 50, meta=dict(vocab_size=first + 50, dtype=dtype))
    assert loader.n_tokens == 50
    assert loader.batch(np.array([45]))[1].tolist() == [[*tokens[46:]]]
    assert loader.read(45, 60).tolist() == [*tokens[45:], *tokens, *tokens[:5]]


# --- what cannot be read ------------------------------------------------------------------------------------

@pytest.mark.parametrize('name, content, message', [
    ('train.bin', b'odd', 'train.bin should hold .* but is 3 bytes'),
    ('train.bin', dict(tokens=[]), 'train.bin should hold'),
    ('train.bin', dict(tokens=[], header=True), 'train.bin should hold'),
    ('train.bin', dict(tokens=range(100), header=True, count=101), 'should hold 101 tokens'),
    ('train.bin', dict(tokens=range(100), header=True, count=99), 'should hold 99 tokens'),
    ('train.bin', dict(tokens=range(100), header=True, version=2), 'header of version 2'),
    # The metadata of the test says that each file holds 100 tokens.
    ('train.bin', dict(tokens=range(99)), 'train.bin should hold 100 tokens'),
    ('train_2.bin', dict(tokens=range(99)), 'train_2.bin should hold 100 tokens'),
    ('train.bin', dict(tokens=[*range(99), 200]), 'train.bin holds the token 200, but vocab_size is 200'),
    ('train_2.bin', dict(tokens=[200] + [0] * 99), 'train_2.bin holds the token 200, but vocab_size is 200'),
    ('train.bin', None, 'has neither train.bin nor train_'),
    ('train.bin', b'<!DOCTYPE html>\n' * 9, "train.bin is text .* '<!DOCTYPE html>.*prepare.py --input"),
    ('train.bin', ('a' * 1023 + 'é').encode(), "train.bin is text that begins with 'aaa"),
    ('train.bin', b'\x93NUMPY\x01\0' + bytes(200), 'train.bin is a .npy file.* tofile'),
], ids=str)
def test_bad_files_are_refused_at_start(tmp_path, name, content, message):
    write(tmp_path / 'train.bin', range(100))
    meta = dict(vocab_size=200, dtype='uint16', tokens={'train.bin': 100, 'train_2.bin': 100})
    assert load(tmp_path, vocab_size=200, meta=meta).n_tokens == 100
    if content is None:
        (tmp_path / name).unlink()
    elif isinstance(content, bytes):
        (tmp_path / name).write_bytes(content)
    else:
        write(tmp_path / name, **content)
    with pytest.raises(ValueError, match=f'^[^\n]*{message}[^\n]*$'):
        load(tmp_path, vocab_size=200, meta=meta)


def test_model_with_fewer_tokens_than_the_dataset_is_named(tmp_path):
    write(tmp_path / 'train.bin', [*range(99), 150])
    with pytest.raises(ValueError, match='the token 150, but vocab_size is 100: the dataset has a vocabulary '
                                         'of 200, another one than the model'):
        load(tmp_path, vocab_size=100, meta=dict(vocab_size=200, dtype='uint16'))


def test_scan_at_start_has_a_total_limit_and_reaches_every_shard(tmp_path, monkeypatch):
    """30 shards of 100 tokens each, of which 600 tokens are read: 20 of each shard."""
    monkeypatch.setattr(data.loader, 'SCAN_TOKENS', 600)
    n_read, check = [], TokenLoader._check

    def counting_check(loader, tokens, source):
        n_read.append(len(tokens))
        check(loader, tokens, source)

    monkeypatch.setattr(TokenLoader, '_check', counting_check)
    for shard in range(30):
        write(tmp_path / f'train_{shard:02d}.bin', range(100))
    assert load(tmp_path, vocab_size=200).n_tokens == 3000 and n_read == [20] * 30
    write(tmp_path / 'train_29.bin', [*range(19), 200, *range(80)])
    with pytest.raises(ValueError, match='train_29.bin holds the token 200'):
        load(tmp_path, vocab_size=200)


def test_bad_token_in_a_large_file_is_refused_when_read(tmp_path, monkeypatch):
    monkeypatch.setattr(data.loader, 'SCAN_TOKENS', 0)
    write(tmp_path / 'train.bin', [*range(99), 200])
    loader = load(tmp_path, vocab_size=200)
    loader.batch(np.array([0, 94]))
    with pytest.raises(ValueError, match='holds the token 200, but vocab_size is 200'):
        loader.batch(np.array([0, 95]))  # as a target


def test_too_few_tokens_are_refused_with_a_block_size_that_fits(tmp_path):
    write(tmp_path / 'train.bin', range(10))
    assert load(tmp_path, block_size=9).batch(np.array([0]))[1].tolist() == [list(range(1, 10))]
    message = '10 tokens in its train split.*block_size=10 needs 11: set block_size to 9 or less$'
    with pytest.raises(ValueError, match=message):
        load(tmp_path, block_size=10)
    with pytest.raises(ValueError, match='has neither val.bin nor val_.*, or set eval_iters to 0'):
        load(tmp_path, 'val')
    (tmp_path / 'train.bin').rename(tmp_path / 'val.bin')
    with pytest.raises(ValueError, match='10 tokens in its val split.* 9 or less, or set eval_iters to 0'):
        load(tmp_path, 'val', block_size=10)


# --- reading ahead ------------------------------------------------------------------------------------------

def test_prefetcher_returns_what_direct_calls_would():
    prepared, ahead = [], threading.Event()
    def prepare(step):
        prepared.append(step)
        if step == 4:
            ahead.set()
        return step * step
    fetch = Prefetcher(prepare)
    assert [fetch(iter([step, step + 1])) for step in range(4)] == [0, 1, 4, 9]
    # The next step is ready before it is asked for, and no step is prepared twice.
    assert ahead.wait(10) and prepared == [0, 1, 2, 3, 4]
    assert [fetch(iter([step, step + 1])) for step in (4, 9, 9, 0, 10, 11)] == [16, 81, 81, 0, 100, 121]


def test_prefetcher_raises_the_error_of_its_thread():
    fetch = Prefetcher(lambda step: 1 // (step - 2))
    assert fetch(iter([1, 2])) == -1  # the failure of step 2 waits until it is asked for
    with pytest.raises(ZeroDivisionError):
        fetch(iter([2, 3]))
    assert fetch(iter([3, 4])) == 1
