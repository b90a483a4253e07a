"""Mixtures of datasets: exact shares at every prefix, each sequence once, and runs that mix."""
import fractions
import json
import math
import os
import re

import numpy as np
import pytest
from helpers import ROOT, assert_near, curve, run_forked, run_script
from hypothesis import given, settings
from hypothesis import strategies as st

from data.datasets import find_sources
from data.mixtures import Schedule, as_integers, count_out, parse_mixture, parse_phases
from data.splits import open_loader, open_training_split
from kilogpt.configurator import config_of
from kilogpt.prove.data import VOCABULARY, write_conversations, write_text

weights_of = st.lists(st.integers(0, 1000) | st.integers(0, 9), min_size=1, max_size=24).filter(any)


def shares(weights):
    return [fractions.Fraction(weight) for weight in weights]


# --- counting ----------------------------------------------------------------------------------------------

@settings(max_examples=200, deadline=None)
@given(weights_of, st.integers(0, 10 ** 13))
def test_each_source_gives_its_share_of_every_prefix(weights, start):
    """Within 1 of the rounded share, and each sequence is one source's."""
    n = start + np.arange(300)
    counts = count_out(n, as_integers(shares(weights)))
    assert (counts.sum(axis=0) == n).all()
    exact = [[fractions.Fraction(weight, sum(weights)) * int(i) for i in n] for weight in weights]
    off = [abs(int(count) - round(share)) for row, expected in zip(counts, exact)
           for count, share in zip(row, expected)]
    assert max(off) <= 1
    steps = np.diff(counts, axis=1)
    assert (steps >= 0).all() and (steps.sum(axis=0) == 1).all()
    assert not counts[[weight == 0 for weight in weights]].any()


phases_of = st.integers(1, 6).flatmap(lambda sources: st.tuples(
    st.lists(st.lists(st.integers(0, 9), min_size=sources, max_size=sources).filter(any),
             min_size=1, max_size=4),
    st.lists(st.integers(1, 200), min_size=3, max_size=3)))


@settings(max_examples=200, deadline=None)
@given(phases_of, st.one_of(st.none(), st.lists(st.integers(1, 150), min_size=6, max_size=6)))
def test_each_sequence_has_a_place_of_its_own(case, limits):
    """Numbers within a source are consecutive, those of any sequences are found alone, and limits hold."""
    phase_weights, lengths = case
    begins = np.cumsum([0, *lengths])
    limits = limits and limits[:len(phase_weights[0])]
    phases = [(int(begin), shares(weights)) for begin, weights in zip(begins, phase_weights)]
    schedule = Schedule(phases, limits)
    n = int(min(schedule.end, 800))
    sources, within = schedule.locate(np.arange(n))
    for source in range(len(phase_weights[0])):
        assert within[sources == source].tolist() == list(range((sources == source).sum()))
    given = np.bincount(sources, minlength=len(phase_weights[0]))
    assert schedule.counts(n).tolist() == given.tolist()
    if limits:
        assert (given <= limits).all()
    some = np.random.default_rng(n).permutation(n)[:50]
    for alone, whole in zip(schedule.locate(some), (sources, within)):
        assert (alone == whole[some]).all()


def test_a_source_that_is_used_up_leaves_its_share_to_the_others():
    schedule = Schedule([(0, shares([1, 1, 2]))], limits=[10, 100, 1000])
    assert schedule.phases[0][1] == [1, 1, 2] and schedule.phases[1][1] == [0, 1, 2]
    assert schedule.counts(40).tolist() == [10, 10, 20]
    assert schedule.counts(70).tolist() == [10, 20, 40]
    assert schedule.end == 1110
    assert schedule.counts(1110).tolist() == [10, 100, 1000]


def test_weights_without_limits_have_no_end():
    assert Schedule([(0, shares([1, 2]))]).end == math.inf


@pytest.mark.parametrize('weights', [
    [149, 87, 113, 107, 60, 95, 246, 8, 14, 7, 7, 17, 1, 1, 1, 5],
    [212, 46, 20, 3, 24, 1, 17, 21, 5, 9, 7, 1, 11, 1, 2], [0, 0, 0, 0, 1, 1, 1, 9, 0, 0, 1]])
def test_the_worst_known_weights_are_near_their_shares_at_every_prefix(weights):
    """After sum(weights) sequences the counts are exact, and the pattern begins again."""
    n = np.arange(sum(weights) + 1)
    off = count_out(n, weights) - np.outer(weights, n) / sum(weights)
    assert np.abs(off).max() < 1.5 and not off[:, -1].any()


# --- what users write ---------------------------------------------------------------------------------------

@pytest.mark.parametrize('text, mixture', [
    ('shakespeare_char', {'shakespeare_char': 1}),
    ('C:\\data\\web', {'C:\\data\\web': 1}),
    ('web:0.7, code:.2,wiki:1/10', {'web': fractions.Fraction(7, 10), 'code': fractions.Fraction(1, 5),
                                    'wiki': fractions.Fraction(1, 10)}),
    ('../a:3e-1, b:0', {'../a': fractions.Fraction(3, 10), 'b': 0}),
])
def test_mixtures_are_read(text, mixture):
    assert parse_mixture(text) == mixture


@pytest.mark.parametrize('text, message', [
    ('web:0.7, code', "'code' in the mixture 'web:0.7, code' is not NAME:WEIGHT"),
    ('web:0.7, code:-1', "'code:-1' in the mixture"),
    ('web:0, code:0', 'sum to 0'),
    ('web:1, web:2', 'names web twice'),
])
def test_bad_mixtures_are_refused(text, message):
    with pytest.raises(ValueError, match=message):
        parse_mixture(text)


@pytest.mark.parametrize('text, message', [
    ('5e9 web:1', 'not TOKENS: NAME:WEIGHT'),
    ('0: web:1', 'not TOKENS'),
    ('5e9: code:1', 'names code, which is not in dataset .web.'),
    ('5e9: web:1; 4e9: web:1', 'begins at 4e.09 tokens, but the one before it at 5e.09'),
])
def test_bad_phases_are_refused(text, message):
    with pytest.raises(ValueError, match=message):
        parse_phases(text, ['web'])


def test_phases_are_read():
    assert parse_phases('5e9: web:1, code:3; 9e9: code:1', ['web', 'code']) == [
        (5 * 10 ** 9, dict(web=1, code=3)), (9 * 10 ** 9, dict(code=1))]


def test_config_file_may_have_tables(tmp_path):
    config = tmp_path / 'config.py'
    config.write_text("dataset = {'web': 0.7, 's3://bucket/code': 0.3}\n"
                      "mixture_phases = {5e9: dict(web=0.4), 6e9: {'s3://bucket/code': 1}}\n")
    keys = config_of(os.path.join(ROOT, 'train.py'), [str(config)])
    mixture = parse_mixture(keys['dataset'])
    assert mixture == {'web': fractions.Fraction(7, 10), 's3://bucket/code': fractions.Fraction(3, 10)}
    assert parse_phases(keys['mixture_phases'], mixture) == [
        (5 * 10 ** 9, {'web': fractions.Fraction(2, 5)}), (6 * 10 ** 9, {'s3://bucket/code': 1})]


def test_weights_with_too_many_digits_are_refused():
    with pytest.raises(ValueError, match='too many digits'):
        as_integers([fractions.Fraction('0.1234567891234'), fractions.Fraction('0.5')])


# --- loaders ------------------------------------------------------------------------------------------------

SIZES = dict(web=9000, code=3000, wiki=1500)
META = dict(vocab_size=65, dtype='uint16', tokenizer='char', separator=0,
            chars=['\n', *map(chr, range(ord(' '), ord(' ') + 64))])


def write_source(folder, name, size, **meta):
    """A source with documents of 15 tokens on average, from a part of the vocabulary of its own."""
    (folder / name).mkdir()
    first = 1 + 20 * list(SIZES).index(name)
    generator = np.random.default_rng(first)
    for split, count in (('train', size), ('val', 1000)):
        tokens = first + generator.integers(0, 3, count).cumsum() % 20
        tokens[generator.random(count) < 1 / 15] = 0
        tokens.astype('<u2').tofile(folder / name / f'{split}.bin')
    (folder / name / 'meta.json').write_text(json.dumps(META | meta))


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp('sources')
    for name, size in SIZES.items():
        write_source(folder, name, size)
    return folder


def mixture_of(folder, **weights):
    return ', '.join(f'{folder / name}:{weight}' for name, weight in weights.items())


@pytest.mark.parametrize('documents', ['stream', 'mask', 'pack'])
def test_rows_are_those_that_each_source_would_give(folder, documents):
    config = dict(dataset=mixture_of(folder, web=5, code=3, wiki=2), block_size=32, seed=1, max_iters=1,
                  batch_size=1, gradient_accumulation_steps=1, documents=documents, eval_only=False)
    sources = find_sources(config['dataset'])
    loader = open_training_split(sources, 65, config)
    alone = [open_loader(source, 'train', 65, config) for source in sources.values()]
    numbers = np.array([5, -1, 4097, 300, 7, 4096, 0])
    batch = loader.train_batch(numbers)
    assert len(batch) == (2 if documents == 'stream' else 3)
    for row, number in enumerate(numbers.tolist()):
        if number < 0:
            assert (batch[1][row] == -1).all()
            continue
        source, within = (int(array[0]) for array in loader.schedule.locate(np.array([number])))
        for array, own in zip(batch, alone[source].train_batch(np.array([within]))):
            assert (array[row] == own[0]).all()
        start = loader.train_starts(np.array([number]))
        assert loader.where(start) == alone[source].where(alone[source].train_starts(np.array([within])))
        if documents != 'pack':  # whose rows do not follow the stream
            assert (loader.batch(start)[0] == batch[0][row]).all()
    assert loader.train_starts(np.array([-1, 3]))[0] == -1
    numbers = np.arange(500)  # more than an epoch: some rows cross the end of their source's stream
    origins, within = loader.schedule.locate(numbers)
    for source, part in enumerate(alone):
        rows = numbers[origins == source]
        for array, own in zip(loader.train_batch(rows), part.train_batch(within[origins == source])):
            assert (array == own).all()
    counts = loader.schedule.counts(50)
    starts = loader.eval_starts(50)
    assert len(starts) == 50
    inputs = loader.batch(starts)[0].max(axis=1)
    assert [int((inputs > 1 + 20 * i).sum()) for i in range(3)] == np.cumsum(counts[::-1])[::-1].tolist()


# --- runs ---------------------------------------------------------------------------------------------------

RUN = '--eval_interval=4 --eval_iters=3 --keep_checkpoints=9 --init_from=auto'.split()


@pytest.fixture(scope='module')
def keys(folder):
    """A mixture with a phase that begins within the fifth iteration, and limits within the eighth."""
    return [f'--dataset={mixture_of(folder, web=0.5, code=0.3, wiki=0.2)}', '--max_epochs=1',
            f'--mixture_phases=1700: {mixture_of(folder, code=0.9, wiki=0.1)}']


@pytest.mark.slow
def test_run_continues_over_a_phase_on_any_number_of_processes(train, keys, tmp_path):
    whole = train(*RUN, *keys)
    for stop in (4, 8, 12):
        again = train(*RUN, *keys, f'--max_iters={stop}', out_dir=tmp_path / 'again')
    assert curve(again) == curve(whole) and again.evals == whole.evals
    for stop, nproc in ((4, 1), (8, 3), (12, 2)):
        other = train(*RUN, *keys, f'--max_iters={stop}', out_dir=tmp_path / 'other', nproc=nproc)
    assert_near(other, whole)


@pytest.mark.slow
def test_masked_documents_of_a_mixture_are_trained_on_any_number_of_processes(train, keys):
    keys = [*RUN, *keys, '--pos=rope', '--documents=mask']
    assert_near(train(*keys, nproc=3), train(*keys))


def test_evaluation_has_a_loss_of_each_source_and_what_it_has_given(train, keys):
    run = train(*RUN, *keys)
    line = run.evals[12]
    losses = [line[f'val_loss/{name}'] for name in SIZES]
    # Each token is a character of one byte, so that bits per byte are those per token.
    bits = [line[f'val_bpb/{name}'] for name in SIZES]
    assert bits == pytest.approx([loss / math.log(2) for loss in losses], rel=1e-12)
    assert line['val_bpb'] == pytest.approx(np.dot(bits, [0.5, 0.3, 0.2]), rel=1e-6)
    assert line['val_loss'] == pytest.approx(np.dot(losses, [0.5, 0.3, 0.2]), rel=1e-6)
    tokens = [line[f'tokens/{name}'] for name in SIZES]
    # 54 sequences of the first phase, and 90 of the second, of which code can give 93 - 16 in its epoch.
    assert tokens == [27 * 32, (16 + 77) * 32, (11 + 13) * 32] and sum(tokens) == 12 * 12 * 32
    assert line['epochs/code'] == 1 and line['epochs/web'] == round(27 / (9000 // 32), 4)
    assert f'(web {losses[0]:.4f}, code {losses[1]:.4f}, wiki {losses[2]:.4f})' in run.stdout
    assert 'mixture     web 0.5, code 0.3, wiki 0.2\n' in run.stdout
    assert 'mixture     from sequence 54 on, web 0, code 0.9, wiki 0.1\n' in run.stdout


@pytest.mark.slow
def test_replay_says_from_which_source_a_sequence_is(train, keys):
    run = train(*RUN, *keys)
    done = run_script('kilogpt.replay', run.out_dir, '7')
    assert 'to the bit' in done.stdout
    text = (run.out_dir / 'replay_00000007' / 'batch.txt').read_text()
    heads = [line for line in text.splitlines() if line.startswith('--- token ')]
    assert len(heads) == 12 and sum('code/train.bin' in head for head in heads) == 11
    for head in heads:
        found = re.fullmatch(r'--- token (\d+) of (.*), in its document (\d+)', head)
        position, path, number = found.groups()
        tokens = np.fromfile(path, '<u2')[:int(position) + 1]
        assert (tokens == 0).sum() == int(number)


def test_planner_reads_a_mixture(folder):
    mixture = mixture_of(folder, web=1, code=1)
    done = run_forked('kilogpt.plan', f'--dataset={mixture}', '--documents=mask', '--block_size=32',
                      '--n_layer=1', '--as_given', '--gpus=1')
    assert 'GB' in done.stdout


@pytest.mark.parametrize('keys, message', [
    ('--dataset={web}:1,{other}:1',
     'need one tokenizer, but .*web has char .* with 65 tokens and .*other has char .* with 66'),
    ('--dataset={web}:1,{web}x:1', "dataset '.*webx' has no data"),
    ('--dataset={web}:1,{code}:1 --max_epochs=1 --max_iters=1000',
     'max_epochs=1 leaves 374 sequences to train on, but 1,000 iterations take 12,000: raise max_epochs, or '
     'set max_iters to 31 or less'),
    ('--dataset={web}:1 --mixture_phases=100:{code}:1',
     'mixture_phases names .*code, which is not in dataset'),
    ('--dataset={web}:0,{code}:0', 'sum to 0'),
    ('--max_epochs=-1', 'max_epochs is -1: it cannot be negative'),
])
def test_bad_mixtures_are_one_sentence(train, folder, keys, message):
    if not (folder / 'other').exists():
        (folder / 'other').mkdir()
        (folder / 'other' / 'meta.json').write_text(json.dumps(META | dict(vocab_size=66)))
        (folder / 'other' / 'train.bin').write_bytes(bytes(2000))
    names = {name: folder / name for name in (*SIZES, 'other')}
    run = train(*(key.format(**names) for key in keys.split()), check=False)
    assert run.returncode == 1 and re.search(f'error: .*{message}', run.stderr)


@pytest.mark.parametrize('documents', ['mask', 'pack'])
@pytest.mark.parametrize('order', ['text:0.6, answers:0.4', 'answers:0.4, text:0.6'])
def test_texts_beside_conversations_keep_their_documents(tmp_path, monkeypatch, documents, order):
    """Documents of a text begin at a token, and those of conversations at a flag."""
    write_text(str(tmp_path / 'text'))
    write_conversations(str(tmp_path / 'answers'))
    names = [part.partition(':')[0] for part in order.split(', ')]
    dataset = ', '.join(f'{tmp_path}/{part}' for part in order.split(', '))
    config = config_of(f'{ROOT}/train.py', []) | dict(
        dataset=dataset, documents=documents, block_size=32, max_iters=5, gradient_accumulation_steps=1)
    sources = find_sources(dataset)
    mixture = open_training_split(sources, VOCABULARY, config)
    numbers = np.arange(60)
    rows = mixture.train_batch(numbers)
    places = zip(numbers, *mixture.schedule.locate(numbers))
    begun = {name: 0 for name in names}
    for number, source, within in places:
        alone = open_loader(list(sources.values())[source], 'train', VOCABULARY, config)
        expected = alone.train_batch(np.array([within]))
        assert len(expected) == 3
        for found, of_one in zip(rows, expected):
            np.testing.assert_array_equal(found[number], of_one[0])
        begun[names[source]] += len(np.unique(expected[2])) - 1
    assert min(begun.values()) > 20
