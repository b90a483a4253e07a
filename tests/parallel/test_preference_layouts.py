"""Every layout trains pairs of answers as one process does: losses, margins, evaluations, each gradient.

The reference is random, so that pairs have weights of their own from the first iteration on. A row has several
pairs, whose answers lie in the parts of different processes.
"""
import functools
import json

import numpy as np
import pytest
from test_document_layouts import ITERATIONS, observed_run, wrong_gradients
from test_lora_layouts import cases, runs_of_layouts
from test_parallel import BASE, MODERN, by_name

from data.datasets import REFERENCE, Source, fingerprint
from data.flags import BEGIN, CONTEXT, REJECTED
from helpers import FAULTS, assert_near
from kilogpt.convert.start import REFERENCE_FILE, describe_weights

SHORT = [*BASE, f'--max_iters={ITERATIONS}', f'--eval_interval={ITERATIONS}']
EXPERTS = '--mlp=moe --n_experts=4 --n_active_experts=2 --expert_hidden=16 --pos=rope'
# {model: (keys of the run from which training starts, keys of the adapters that are trained then)}
MODELS = dict(gpt2=('--bias', ''), modern=(MODERN, ''), moe=(EXPERTS, ''),
              lora=(MODERN, '--lora_rank=4 --lora_targets=all'))
# {processes: {layout, whose name begins with its model: its arguments}}
LAYOUTS = {2: {'modern cp2': '--cp=2', 'gpt2 pp2 1f1b': '--pp=2'}}
SLOW_LAYOUTS = {
    1: {'gpt2 full': '--activation_checkpoint=full', 'modern compiled': '--compile=True', 'gpt2 parts': ''},
    2: {'gpt2 ddp': '', 'modern zero2 selective': '--zero_stage=2 --activation_checkpoint=selective',
        'modern zero3': '--zero_stage=3', 'gpt2 tp2': '--tp=2', 'modern pp2 zbv': '--pp=2 --pp_schedule=zbv',
        'moe ep2': '--ep=2', 'lora tp2': '--tp=2', 'lora pp2 zbv': '--pp=2 --pp_schedule=zbv'},
    3: {'gpt2 zero3': '--zero_stage=3'},  # evaluates padding, too
    4: {'modern cp2 zero3': '--cp=2 --zero_stage=3', 'modern tp2 pp2 zbv': '--tp=2 --pp=2 --pp_schedule=zbv',
        'moe ep2 cp2': '--cp=2 --ep=2 --zero_stage=3'},
}
LAYOUTS_BY_HAND = {
    2: {'gpt2 zero1': '--zero_stage=1', 'modern tp2 full': '--tp=2 --activation_checkpoint=full',
        'modern pp2 zbv parts': '--pp=2 --pp_schedule=zbv', 'modern zero3 parts': '--zero_stage=3',
        'lora cp2': '--cp=2', 'lora zero3': '--zero_stage=3',
        'modern zero2 compiled': '--zero_stage=2 --compile=True'},
    4: {'gpt2 tp2 cp2': '--tp=2 --cp=2', 'modern cp2 pp2': '--cp=2 --pp=2', 'modern cp4': '--cp=4'},
}
ARGUMENTS = by_name(LAYOUTS) | by_name(SLOW_LAYOUTS) | by_name(LAYOUTS_BY_HAND)


def write_pairs(folder):
    """Write a dataset of random pairs, with 2 to 9 targets in each answer, and a random reference."""
    rng = np.random.default_rng(0)
    for split, count in (('train', 1000), ('val', 150)):
        documents = []
        for number in range(2 * count):
            n_prompt, n_targets = rng.integers(1, 4), rng.integers(2, 10)
            tokens = rng.integers(0, 65, n_prompt + n_targets).astype('<u4')
            tokens[:n_prompt] |= CONTEXT
            tokens[0] |= BEGIN
            documents.append(tokens | REJECTED if number % 2 else tokens)
        tokens = np.concatenate(documents)
        tokens.tofile(folder / f'{split}.bin')
        rng.normal(-4, 1, len(tokens)).astype('<f4').tofile(folder / f'{split}.bin{REFERENCE}')
    meta = dict(vocab_size=65, dtype='uint32', flags=True, pairs=True)
    (folder / 'meta.json').write_text(json.dumps(meta))


@pytest.fixture(scope='module')
def preference_run(request, train, tmp_path_factory):
    def prepare(model):
        """(the folder of a run from which training starts, that of pairs for which it claims to be the reference)."""
        of_base, of_adapters = MODELS[model]
        options = ['--eval_iters=0', '--learning_rate=2e-2', '--min_lr=2e-2']
        base = train(*of_base.split(), *options, base=SHORT).out_dir
        if of_adapters:  # with B = 0 the gradients of A would be zero
            base = train(f'--init_from={base}', *of_adapters.split(), *options, base=SHORT).out_dir
        pairs = tmp_path_factory.mktemp('pairs')
        write_pairs(pairs)
        shards = fingerprint({'pairs': Source(str(pairs), {})})
        content = describe_weights(str(base)) | dict(shards=shards)
        (pairs / REFERENCE_FILE).write_text(json.dumps(content))
        return base, pairs

    def start(beginning, nproc, layout):
        model, *words = layout.split()
        base, pairs = beginning
        arguments = ARGUMENTS.get((nproc, layout), '').split()
        return observed_run(
            functools.partial(with_parts, train) if 'parts' in words else train, tmp_path_factory.mktemp('gradients'),
            SHORT, f'--init_from={base}', f'--dataset={pairs}', '--documents=pack', '--loss=dpo', '--dpo_beta=0.2',
            *arguments, nproc=nproc, has_experts=model == 'moe')

    return runs_of_layouts(request, prepare, start)


def with_parts(train, *arguments, faults, **options):
    return train(*arguments, faults=[FAULTS / 'loss_in_parts.py', *faults], **options)


@pytest.mark.parametrize('nproc, layout', cases(LAYOUTS, SLOW_LAYOUTS, LAYOUTS_BY_HAND))
def test_layout_trains_pairs_as_one_process_does(preference_run, nproc, layout):
    run, one = preference_run(nproc, layout), preference_run(1, f'{layout.split()[0]} one')
    assert list(run.lines) == [1, 2, 3] and list(run.evals) == [0, 3]
    assert_near(run, one)
    assert 0 < one.lines[1]['reward_accuracy'] < 1 and abs(one.lines[1]['reward_margin']) > 1e-3
    for found, expected in ((run.lines, one.lines), (run.evals, one.evals)):
        for iteration, line in found.items():
            for name in [name for name in line if 'reward_' in name]:
                assert line[name] == pytest.approx(expected[iteration][name], abs=1e-4), (iteration, name)
    for found, expected, tolerance in zip(run.observations, one.observations, (1e-3, 1e-2, 1e-2)):
        assert wrong_gradients(found, expected, tolerance) == []
