"""Every layout trains documents and windows as one process does: losses, evaluations, norms, each gradient.

The texts are random, and so are the lengths of their documents, so that documents begin in every part of a
sequence that a process may have, and some are longer than a window, or than a part.
"""
import functools
import itertools
import json
import os
import shutil

import numpy as np
import pytest
from test_islands import PLAIN_OUTER, islands_of
from test_parallel import BASE, MODERN, SCHEDULES

from data.datasets import find_sources
from data.flags import BEGIN, CONTEXT
from data.prepare import write_random_tokens
from data.splits import open_training_split
from helpers import FAULTS, ROOT, assert_near, assert_same_tensors, curve, newest_weights, side_by_side
from kilogpt.configurator import config_of
from kilogpt.prove import compare, observer

ITERATIONS = 3
SHORT = [*BASE, f'--max_iters={ITERATIONS}', f'--eval_interval={ITERATIONS}', '--keep_checkpoints=0']
KINDS = dict(mask='--documents=mask', pack='--documents=pack', window='--window=5 --window_pattern=SL',
             both='--documents=mask --window=5 --window_pattern=SL',
            answers='--documents=pack')  # conversations, in which a third of the tokens are targets
EXPERTS = '--mlp=moe --n_experts=4 --n_active_experts=2 --expert_hidden=16 --pos=rope'
# Attention with a cap takes what queries see in another form, a mask of T² values.
MODELS = dict(learned='--bias', rope=MODERN, capped=f'{MODERN} --attention_softcap=2', moe=EXPERTS)
# {processes: {layout: its arguments}}
LAYOUTS = {
    1: {'full': '--activation_checkpoint=full', 'compiled': '--compile=True'},
    2: {'ddp': '', 'zero1': '--zero_stage=1', 'zero2': '--zero_stage=2', 'zero3': '--zero_stage=3',
        'selective zero2': '--activation_checkpoint=selective --zero_stage=2',
        'full zero3': '--activation_checkpoint=full --zero_stage=3',
        'cp2': '--cp=2', 'cp2 zero3 full': '--cp=2 --zero_stage=3 --activation_checkpoint=full',
        'tp2': '--tp=2', 'tp2 selective': '--tp=2 --activation_checkpoint=selective',
        **{f'pp2 {schedule}': f'--pp=2 --pp_schedule={schedule}' for schedule in SCHEDULES},
        'pp2 zbv selective': '--pp=2 --pp_schedule=zbv --activation_checkpoint=selective',
        'pp2 zbv full': '--pp=2 --pp_schedule=zbv --activation_checkpoint=full',
        'pp2 1f1b full': '--pp=2 --activation_checkpoint=full',
        'moe ep2': '--ep=2', 'moe ep2 full': '--ep=2 --activation_checkpoint=full'},
    3: {'zero3': '--zero_stage=3'},  # evaluates padding, too
    4: {'hsdp': '--dp_replicate=2 --zero_stage=3', 'cp4': '--cp=4', 'tp2 cp2': '--tp=2 --cp=2',
        'cp2 dp2 zero1': '--cp=2 --zero_stage=1', 'tp2 dp2 zero3': '--tp=2 --zero_stage=3',
        'tp2 pp2 zbv': '--tp=2 --pp=2 --pp_schedule=zbv',
        'cp2 pp2 dualpipev': '--cp=2 --pp=2 --pp_schedule=dualpipev',
        'moe ep2 cp2': '--cp=2 --ep=2 --zero_stage=3', 'moe ep2 pp2': '--ep=2 --pp=2'},
    8: {'tp2 cp2 pp2': '--tp=2 --cp=2 --pp=2',
        'tp2 cp2 pp2 zbv full': '--tp=2 --cp=2 --pp=2 --pp_schedule=zbv --activation_checkpoint=full'},
}
CAPPED = {(2, 'cp2'), (2, 'pp2 zbv full'), (2, 'zero2'), (4, 'tp2 cp2')}
DEFAULT = {(2, 'cp2', 'both', 'rope'), (2, 'pp2 zbv', 'both', 'rope'), (2, 'ddp', 'answers', 'rope'),
           (2, 'cp2', 'answers', 'rope')}
# Each mechanism also divides a loss over answers, whose number differs between processes, on its own.
SLOW_ANSWERS = {(2, 'zero3', 'rope'), (2, 'tp2', 'rope'), (2, 'pp2 1f1b', 'rope'), (2, 'pp2 zbv', 'rope'),
                (2, 'moe ep2', 'moe'), (3, 'zero3', 'rope')}


def cases():
    """Parameters (nproc, layout, kind, model): of each layout one or two are slow, the others by hand."""
    params = []
    named = [(nproc, layout) for nproc, layouts in LAYOUTS.items() for layout in layouts]
    for number, (nproc, layout) in enumerate(named):
        models = ['moe'] if layout.startswith('moe') else ['learned', 'rope', 'capped']
        for i, j in itertools.product(range(len(KINDS)), range(len(models))):
            case = nproc, layout, list(KINDS)[i], models[j]
            # Of neighbours in the table, each kind and each model comes about as often.
            is_slow = i == number % 5 and j == (number // 4 + i // 2) % min(2, len(models))
            if j == 2:
                is_slow = (nproc, layout) in CAPPED and list(KINDS)[i] == 'both'
            if list(KINDS)[i] == 'answers':
                is_slow |= (nproc, layout, models[j]) in SLOW_ANSWERS
            mark = pytest.mark.slow if is_slow else pytest.mark.matrix
            params.append(pytest.param(*case, marks=() if case in DEFAULT else mark))
    return params


@pytest.fixture(scope='session')
def documents(tmp_path_factory):
    """The folder of a dataset whose documents have 9 tokens on average."""
    folder = tmp_path_factory.mktemp('documents')
    write_random_tokens(folder, 65, 2 ** 14, document_length=9, draws_lengths=True)
    return folder


@pytest.fixture(scope='session')
def conversations(documents, tmp_path_factory):
    """The folder of the same dataset with flags, of which a third of the tokens are targets, in runs."""
    folder = tmp_path_factory.mktemp('conversations')
    for split in ('train', 'val'):
        ids = np.fromfile(documents / f'{split}.bin', '<u2')
        generator = np.random.default_rng(len(split))
        is_target = np.repeat(generator.random(len(ids) // 4 + 1) < 1 / 3, 4)[:len(ids)] & (ids > 0)
        tokens = ids.astype('<u4') | np.where(is_target, 0, CONTEXT) | np.where(ids == 0, BEGIN, 0).astype('<u4')
        tokens.astype('<u4').tofile(folder / f'{split}.bin')
    (folder / 'meta.json').write_text('{"vocab_size": 65, "dtype": "uint32", "flags": true}')
    return folder


@pytest.fixture(scope='session')
def document_run(request, train, documents, conversations, tmp_path_factory):
    """Function (nproc, layout, kind, model) -> its run, with `observations` of [iteration - 1][rank].

    The layout 'one' is one process. The first call runs what all selected tests compare, two at a time.
    """
    selected = []
    for item in request.session.items:
        params = getattr(item, 'callspec', None) and item.callspec.params
        if params and {'nproc', 'layout', 'kind', 'model'} <= params.keys():
            case = tuple(params[name] for name in ('nproc', 'layout', 'kind', 'model'))
            selected += [case, (1, 'one', *case[2:])]
    done = {}

    def start(nproc, layout, kind, model):
        text = LAYOUTS[nproc].get(layout, '')
        dataset = conversations if kind == 'answers' else documents
        return observed_run(train, tmp_path_factory.mktemp('gradients'), SHORT, *MODELS[model].split(),
                            *KINDS[kind].split(), *text.split(), f'--dataset={dataset}', nproc=nproc,
                            has_experts=model == 'moe')

    def get(*case):
        if case not in done:
            missing = [each for each in dict.fromkeys([case, *selected]) if each not in done]
            runs = side_by_side(*(functools.partial(start, *each) for each in missing))
            done.update(zip(missing, runs))
        assert done[case].returncode == 0, '\n'.join(done[case].outputs)
        return done[case]

    return get


def observed_run(train, folder, base, *arguments, nproc, has_experts):
    """A run, which has `observations` of [iteration - 1][rank] if it succeeds.

    folder: an empty one. base: arguments that come first, with ITERATIONS iterations.
    """
    # The experts of a token do not change with rounding in float64.
    env = dict(GRADIENTS=str(folder), GRADIENTS_IN='float64' if has_experts else 'float32')
    run = train(*arguments, base=base, nproc=nproc, check=False, env=env, faults=[FAULTS / 'dump_gradients.py'])
    if run.returncode == 0:
        run.observations = [observer.read(folder, i + 1, range(nproc)) for i in range(ITERATIONS)]
        shutil.rmtree(folder)
    return run


def wrong_gradients(found, expected, tolerance):
    """[Difference] of the gradients of all ranks in an iteration, of `expected` of one process."""
    expected = dict(expected[0].gradients)
    floor = compare.NEGLIGIBLE * compare.norm_of_all(expected.values())
    differences = []
    for observation in found:
        of_rank, _ = compare.compare_tensors(0, 'gradient', observation.gradients, expected, tolerance, floor)
        differences += of_rank
    trained = set().union(*(dict(observation.gradients) for observation in found))
    assert trained == expected.keys()
    return differences


@pytest.mark.parametrize('nproc, layout, kind, model', cases())
def test_layout_trains_documents_as_one_process_does(document_run, nproc, layout, kind, model):
    run, one = document_run(nproc, layout, kind, model), document_run(1, 'one', kind, model)
    assert list(one.lines) == [1, 2, 3] and list(one.evals) == [0, 3]
    assert_near(run, one)
    for found, expected, tolerance in zip(run.observations, one.observations, (1e-3, 1e-2, 1e-2)):
        assert wrong_gradients(found, expected, tolerance) == []


@pytest.fixture(scope='module')
def rare_answers(documents, tmp_path_factory):
    """Arguments for a dataset of conversations of which one in about sixty has an answer."""
    folder = tmp_path_factory.mktemp('rare')
    for split in ('train', 'val'):
        ids = np.fromfile(documents / f'{split}.bin', '<u2')
        is_begin = ids == 0
        is_target = np.random.default_rng(4).random(is_begin.sum() + 1) < 1 / 60
        tokens = ids.astype('<u4') | np.where(is_target[is_begin.cumsum()] & ~is_begin, 0, CONTEXT)
        (tokens | np.where(is_begin, BEGIN, 0)).astype('<u4').tofile(folder / f'{split}.bin')
    (folder / 'meta.json').write_text('{"vocab_size": 65, "dtype": "uint32", "flags": true}')
    return [*MODERN.split(), '--documents=mask', f'--dataset={folder}']


@pytest.fixture(scope='module')
def one_with_rare_answers(train, rare_answers, tmp_path_factory):
    return observed_run(train, tmp_path_factory.mktemp('gradients'), SHORT, *rare_answers, nproc=1, has_experts=False)


@pytest.mark.parametrize('nproc, arguments', [
    (3, ''), *(pytest.param(*case, marks=pytest.mark.slow) for case in (
        (2, ''), (3, '--zero_stage=3'), (4, '--dp_replicate=2 --zero_stage=3'), (2, '--cp=2'),
        (2, '--pp=2 --pp_schedule=zbv')))])
def test_processes_without_any_answer_train_as_one_process_does(train, rare_answers, one_with_rare_answers, tmp_path,
                                                                nproc, arguments):
    """One or two rows of an iteration have answers, so that other processes and micro-batches have no target."""
    config = config_of(os.path.join(ROOT, 'train.py'), [*SHORT, *rare_answers])
    loader = open_training_split(find_sources(config['dataset']), 65, config)
    has_answers = (loader.train_batch(np.arange(ITERATIONS * 24))[1] >= 0).any(axis=1)
    assert has_answers.reshape(ITERATIONS, 24).sum(axis=1).tolist() == [1, 2, 1]
    run = observed_run(train, tmp_path, SHORT, *rare_answers, *arguments.split(), nproc=nproc, has_experts=False)
    one = one_with_rare_answers
    assert_near(run, one)
    assert all(line['grad_norm'] > 0 for line in one.lines.values())
    for found, expected, tolerance in zip(run.observations, one.observations, (1e-3, 1e-2, 1e-2)):
        assert wrong_gradients(found, expected, tolerance) == []


@pytest.mark.slow
@pytest.mark.parametrize('model', ['learned', 'rope'])
def test_each_kind_trains_another_model(document_run, model):
    """Otherwise the comparisons above would prove nothing."""
    runs = {kind: document_run(1, 'one', kind, model) for kind in KINDS}
    for first, second in itertools.combinations(runs, 2):
        gradients = [runs[kind].observations[0] for kind in (first, second)]
        wrong = wrong_gradients(*gradients, tolerance=1e-2)
        assert len(wrong) > len(gradients[0][0].gradients) / 2, (first, second)
        difference = runs[first].lines[1]['grad_norm'] / runs[second].lines[1]['grad_norm'] - 1
        assert abs(difference) > 2e-3, (first, second)


@pytest.mark.slow
def test_islands_with_documents_equal_ddp(train, documents):
    """With SGD and an exchange in each iteration, as in tests/islands/test_islands.py."""
    arguments = [f'--dataset={documents}', '--documents=pack', '--window=5', '--window_pattern=SL',
                 '--pos=rope', '--grad_clip=0', '--learning_rate=0.3', '--min_lr=0.03']
    options = dict(faults=[FAULTS / 'plain_sgd.py'], nproc=2)
    ddp = train(*arguments, **options)
    run = train(*arguments, '--islands=2', '--outer_interval=1', *PLAIN_OUTER, **options)
    first, second = islands_of(run, 2)
    assert list(ddp.lines) == list(first.lines) == list(second.lines)
    for iteration, line in ddp.lines.items():
        mean = (first.lines[iteration]['loss'] + second.lines[iteration]['loss']) / 2
        assert mean == pytest.approx(line['loss'], abs=1e-5)
    for iteration, line in ddp.evals.items():
        assert run.evals[iteration] == pytest.approx(line, abs=1e-5) == second.evals[iteration]


def test_packed_run_that_was_killed_continues_on_any_number_of_processes(train, documents, tmp_path):
    """Two processes end after iteration 15 without a save. On two, the rest is equal to the bit."""
    options = [f'--dataset={documents}', '--documents=pack', '--max_iters=20', '--lr_decay_iters=20',
               '--save_interval=4']
    unbroken, killed = side_by_side(
        functools.partial(train, *options, nproc=2),
        functools.partial(train, *options, nproc=2, check=False, faults=[FAULTS / 'fail_at_15.py']))
    assert killed.returncode == 1 and 12 <= max(killed.lines) < 16, killed.outputs
    calls = []
    for nproc in (1, 2, 3):
        out_dir = shutil.copytree(killed.out_dir, tmp_path / str(nproc))
        calls.append(functools.partial(train, *options, '--init_from=resume', out_dir=out_dir, nproc=nproc))
    one, two, three = side_by_side(*calls)
    for run in (one, two, three):
        assert 'at iteration 12' in run.stdout and 'iter 12: loss' not in run.stdout
        assert_near(run, unbroken)
    assert curve(two) == curve(unbroken) and two.evals == unbroken.evals
    assert_same_tensors(newest_weights(two.out_dir), newest_weights(unbroken.out_dir))


@pytest.mark.parametrize('cp', [2, *(pytest.param(cp, marks=pytest.mark.slow) for cp in (4, 8))])
def test_ranks_that_share_sequences_do_the_same_work_in_attention(train, tmp_path, cp):
    """Documents have long-tailed lengths, so that halves of a sequence would have very different ones."""
    generator = np.random.default_rng(0)
    tokens = generator.integers(1, 65, 2 ** 14, dtype=np.uint16)
    lengths = np.exp(generator.normal(2.5, 1.5, 2 ** 12)).astype(int) + 1
    begins = lengths.cumsum()
    tokens[begins[begins < len(tokens)]] = 0
    for split in ('train', 'val'):
        tokens.tofile(tmp_path / f'{split}.bin')
    (tmp_path / 'meta.json').write_text(json.dumps(dict(vocab_size=65, dtype='uint16', separator=0)))
    arguments = [f'--dataset={tmp_path}', '--documents=mask', '--n_head=8', '--n_embd=64', '--block_size=128',
                 '--max_iters=2', '--eval_iters=0', '--keep_checkpoints=0', '--activation_checkpoint=none']
    counts = {}
    for nproc in (1, cp):
        path = tmp_path / f'attention-{nproc}'
        train(*arguments, f'--cp={nproc}', nproc=nproc, faults=[FAULTS / 'count_attention.py'],
              env=dict(ATTENTION=str(path)))
        counts[nproc] = [int((tmp_path / f'{path.name}.{rank}').read_text()) for rank in range(nproc)]
    assert max(counts[cp]) == min(counts[cp]) > 0
    # The warm-up of several processes computes further micro-batches.
    assert 1 <= cp * counts[cp][0] / counts[1][0] < 2
