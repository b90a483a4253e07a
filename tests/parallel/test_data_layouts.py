"""Layouts train documents, answers, pairs and adapters as one process does: losses, norms, each gradient.

These are examples, and what `kilogpt.prove --random` does not draw: compiled blocks, the loss in parts, answers so
rare that a process has none, kills, and how much work each process has.
"""
import functools
import json
import os
import shutil

import numpy as np
import pytest
import torch
from test_parallel import BASE, MODELS, MODERN

from data.datasets import find_sources
from data.flags import BEGIN, CONTEXT
from data.splits import open_training_split
from helpers import FAULTS, ROOT, assert_near, assert_same_tensors, curve, newest_weights, side_by_side
from kilogpt.configurator import config_of
from kilogpt.prove import compare, data, observer

ITERATIONS = 3
SHORT = [*BASE, f'--max_iters={ITERATIONS}', f'--eval_interval={ITERATIONS}']
DOCUMENTS = [*MODERN.split(), '--documents=mask', '--window=5', '--window_pattern=SL']
ADAPTERS = '--lora_rank=4', '--lora_rank_stabilised'
INT8_ADAPTERS = '--lora_rank=4', '--lora_targets=c_q,mlp.c_proj', '--lora_base_dtype=int8'
slow = functools.partial(pytest.param, marks=pytest.mark.slow)


@pytest.fixture(scope='module')
def documents(tmp_path_factory):
    """The folder of a dataset whose documents have 9 tokens on average, so that they begin in every part."""
    return data.write_text(tmp_path_factory.mktemp('documents') / 'text')


@pytest.fixture(scope='module')
def compare_with_one_process(train, tmp_path_factory):
    """Function (processes, arguments of a layout, other arguments) -> (its run, that of one process).

    It asserts that they agree. faults: files that the layout's processes execute before train.py.
    """
    def observed_run(nproc, *arguments, faults=()):
        folder = tmp_path_factory.mktemp('gradients')
        run = train(*arguments, base=SHORT, nproc=nproc, faults=[FAULTS / 'dump_gradients.py', *faults],
                    env=dict(GRADIENTS=str(folder), GRADIENTS_IN='float32'))
        observations = [observer.read(folder, i + 1, range(nproc)) for i in range(ITERATIONS)]
        shutil.rmtree(folder)
        return run, observations

    def compare_runs(nproc, layout, *arguments, faults=()):
        (run, found), (one, expected) = side_by_side(
            functools.partial(observed_run, nproc, *arguments, *layout.split(), faults=faults),
            functools.partial(observed_run, 1, *arguments))
        assert list(one.lines) == [1, 2, 3] and list(one.evals) == [0, 3]
        assert_near(run, one)
        for observations, (of_one,), tolerance in zip(found, expected, (1e-3, 1e-2, 1e-2)):
            gradients = dict(of_one.gradients)
            floor = compare.NEGLIGIBLE * compare.norm_of_all(gradients.values())
            for observation in observations:
                differences, _ = compare.compare_tensors(0, 'gradient', observation.gradients, gradients, tolerance,
                                                         floor)
                assert differences == []
            assert set().union(*(dict(observation.gradients) for observation in observations)) == gradients.keys()
        return run, one

    return compare_runs


# --- documents and answers --------------------------------------------------------------------------------

@pytest.mark.slow
def test_compiled_layout_trains_documents_as_one_process_does(compare_with_one_process, documents):
    compare_with_one_process(2, '--zero_stage=2 --compile=True', *DOCUMENTS, f'--dataset={documents}')


@pytest.mark.parametrize('nproc, layout', [
    (3, ''), slow(3, '--zero_stage=3'), slow(2, '--pp=2 --pp_schedule=zbv')])
def test_processes_without_any_answer_train_as_one_process_does(compare_with_one_process, documents, tmp_path, nproc,
                                                                layout):
    """One or two rows of an iteration have answers, so that other processes and micro-batches have no target."""
    for split in ('train', 'val'):  # about one document in sixty is an answer
        ids = np.fromfile(documents / f'{split}.bin', '<u2')
        is_begin = ids == 0
        is_target = np.random.default_rng(4).random(is_begin.sum() + 1) < 1 / 60
        tokens = ids.astype('<u4') | np.where(is_target[is_begin.cumsum()] & ~is_begin, 0, CONTEXT)
        (tokens | np.where(is_begin, BEGIN, 0)).astype('<u4').tofile(tmp_path / f'{split}.bin')
    (tmp_path / 'meta.json').write_text('{"vocab_size": 65, "dtype": "uint32", "flags": true}')
    arguments = [*MODERN.split(), '--documents=mask', f'--dataset={tmp_path}']

    config = config_of(os.path.join(ROOT, 'train.py'), [*SHORT, *arguments])
    loader = open_training_split(find_sources(config['dataset']), 65, config)
    has_answers = (loader.train_batch(np.arange(ITERATIONS * 24))[1] >= 0).any(axis=1)
    assert has_answers.reshape(ITERATIONS, 24).sum(axis=1).max() <= 2 and has_answers.sum() >= ITERATIONS
    _, one = compare_with_one_process(nproc, layout, *arguments)
    assert all(line['grad_norm'] > 0 for line in one.lines.values())


@pytest.mark.slow
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


@pytest.mark.parametrize('cp', [2, slow(4)])
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


# --- adapters and pairs, beside trained weights -----------------------------------------------------------

@pytest.fixture(scope='module')
def trained(train):
    """The folder of a trained run with MODERN parts."""
    return train(*MODERN.split(), '--eval_iters=0', base=SHORT).out_dir


@pytest.mark.slow
@pytest.mark.drawn(1)
@pytest.mark.parametrize('nproc, layout, adapters', [
    (2, '--zero_stage=3', ADAPTERS), (1, '--compile=True', ADAPTERS), (1, '--compile=True', INT8_ADAPTERS)])
def test_layout_trains_adapters_as_one_process_does(compare_with_one_process, train, trained, nproc, layout, adapters):
    """The runs begin with adapters that were trained before, since with B = 0 the gradients of A would be zero."""
    before = train(f'--init_from={trained}', *adapters, '--eval_iters=0', '--learning_rate=2e-2', base=SHORT)
    runs = compare_with_one_process(nproc, layout, f'--init_from={before.out_dir}')
    saved, saved_by_one = (newest_weights(run.out_dir) for run in runs)
    assert saved.keys() == saved_by_one.keys() and all('.lora_' in name for name in saved)
    for name, tensor in saved.items():
        torch.testing.assert_close(tensor, saved_by_one[name], rtol=0, atol=1e-3)


@pytest.mark.slow
@pytest.mark.drawn(1)
@pytest.mark.parametrize('nproc, layout, faults', [
    (2, '--cp=2', []), (1, '--compile=True', []), (2, '--zero_stage=3', [FAULTS / 'loss_in_parts.py'])])
def test_layout_trains_pairs_as_one_process_does(compare_with_one_process, trained, tmp_path, nproc, layout, faults):
    """The reference is random, so that pairs have weights of their own from the first iteration on."""
    pairs = data.pairs_of_reference(data.write_pairs(tmp_path / 'written'), str(tmp_path / 'pairs'), str(trained))
    run, one = compare_with_one_process(nproc, layout, f'--init_from={trained}', f'--dataset={pairs}',
                                        '--documents=pack', '--loss=dpo', '--dpo_beta=0.2', faults=faults)
    assert 0 < one.lines[1]['reward_accuracy'] < 1 and abs(one.lines[1]['reward_margin']) > 1e-3
    for found, expected in ((run.lines, one.lines), (run.evals, one.evals)):
        for iteration, line in found.items():
            for name in [name for name in line if 'reward_' in name]:
                assert line[name] == pytest.approx(expected[iteration][name], abs=1e-4), (iteration, name)


# --- texts and their rewards ------------------------------------------------------------------------------

REWARDED = [  # (processes, layout and other keys), with adapters or experts in some
    (2, ''), (3, '--zero_stage=1'), (2, '--zero_stage=2'), (3, '--zero_stage=3 --rl_updates=2'),
    (4, '--zero_stage=2 --dp_replicate=2'), (2, '--tp=2'), (4, '--tp=2 --zero_stage=2 --rl_kl=0.3'),
    (2, '--cp=2 --rl_updates=2 --rl_kl=0.5'), (4, '--cp=2 --zero_stage=3'), (4, '--tp=2 --cp=2 --rl_scale'),
    (2, '--pp=2'), (2, '--pp=2 --pp_schedule=zbv'), (4, '--pp=2 --zero_stage=2'), (4, '--tp=2 --pp=2'),
    (2, '--zero_stage=3 --lora_rank=4'), (2, '--tp=2 --lora_rank=4 --rl_kl=0.3'),
    (2, f'--ep=2 {MODELS["moe"]}'), (4, f'--ep=2 --tp=2 {MODELS["moe"]}')]


@pytest.mark.slow
@pytest.mark.drawn(2)
@pytest.mark.parametrize('nproc, layout', REWARDED)
def test_layout_learns_from_rewards_as_one_process_does(compare_with_one_process, trained, tmp_path, nproc, layout):
    """The texts are the same too: a reward is a digest, so that otherwise the lines about texts would differ."""
    keys, layout = layout.split(), []
    for key in list(keys):
        if key.split('=')[0] in ('--zero_stage', '--dp_replicate', '--tp', '--cp', '--pp', '--pp_schedule', '--ep'):
            keys.remove(key)
            layout.append(key)
    if '--mlp=moe' not in keys:
        keys.append(f'--init_from={trained}')
    (tmp_path / 'prompts.jsonl').write_text('{"prompt": "AB"}\n{"prompt": "7"}\n{"prompt": "XYZ"}\n')
    (tmp_path / 'reward.py').write_text('import zlib\ndef reward(row, text): return zlib.crc32(text.encode()) / 2 ** 32')
    run, one = compare_with_one_process(
        nproc, ' '.join(layout), '--loss=rl', f'--rl_prompts={tmp_path}/prompts.jsonl',
        f'--rl_reward={tmp_path}/reward.py', '--rl_tokens=5', *keys)
    texts = [[line for line in map(json.loads, (each.out_dir / 'metrics.jsonl').read_text().splitlines())
              if 'without_reward' in line] for each in (run, one)]
    assert texts[0] == texts[1] and len(texts[1]) == (2 if '--rl_updates=2' in keys else 3)
