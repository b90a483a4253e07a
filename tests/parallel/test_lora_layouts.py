"""Every layout trains adapters as one process does: losses, evaluations, norms, each gradient, and no base.

The models `answers` and `expert_answers` train on conversations, where the number of targets differs between processes.
All runs begin with adapters that were trained before, since with B = 0 the gradients of A would be zero.
"""
import functools

import pytest
import torch
from test_document_layouts import (ITERATIONS, conversations, documents, observed_run,  # noqa: F401  two fixtures
                                   wrong_gradients)
from test_parallel import BASE, MODERN, by_name

from helpers import assert_near, newest_weights, side_by_side

SHORT = [*BASE, f'--max_iters={ITERATIONS}', f'--eval_interval={ITERATIONS}']
EXPERTS = '--mlp=moe --n_experts=4 --n_active_experts=2 --expert_hidden=16 --router_balance_rate=0.01 --pos=rope'
# {model: (keys of its base, keys of its adapters)}
MODELS = dict(gpt2=('--bias', '--lora_rank=3'), modern=(MODERN, '--lora_rank=4 --lora_rank_stabilised'),
              few=(MODERN, '--lora_rank=1 --lora_targets=c_q,mlp.c_proj'),
              muon=(MODERN, '--lora_rank=4 --optimizer=muon'),
              shallow=('--n_layer=2', '--lora_rank=4'),
              moe=(EXPERTS, '--lora_rank=4 --lora_targets=attention'),
              answers=(MODERN, '--lora_rank=4'), expert_answers=(EXPERTS, '--lora_rank=4 --lora_targets=attention'),
              int8=(MODERN, '--lora_rank=4 --lora_targets=c_q,mlp.c_proj --lora_base_dtype=int8'),
              bfloat16=('--bias', '--lora_rank=4 --lora_base_dtype=bfloat16'))
# {processes: {layout, whose name begins with its model: its arguments}}
LAYOUTS = {
    2: {'gpt2 ddp': '', 'modern zero3': '--zero_stage=3', 'gpt2 tp2': '--tp=2',
        'modern pp2 zbv': '--pp=2 --pp_schedule=zbv', 'int8 zero3': '--zero_stage=3'},
}
SLOW_LAYOUTS = {
    1: {'gpt2 full': '--activation_checkpoint=full', 'modern compiled': '--compile=True',
        'int8 compiled': '--compile=True'},
    2: {'modern cp2': '--cp=2', 'moe ep2': '--ep=2', 'muon zero3': '--zero_stage=3',
        'gpt2 zero2 selective': '--zero_stage=2 --activation_checkpoint=selective', 'gpt2 pp2 1f1b': '--pp=2',
        'modern offload': '--zero_stage=3 --cpu_offload', 'few tp2': '--tp=2',
        'modern tp2 full': '--tp=2 --activation_checkpoint=full',
        'modern pp2 zbv full': '--pp=2 --pp_schedule=zbv --activation_checkpoint=full', 'int8 ddp': '',
        'int8 tp2': '--tp=2', 'int8 pp2 zbv': '--pp=2 --pp_schedule=zbv',
        'int8 zero3 full': '--zero_stage=3 --activation_checkpoint=full', 'bfloat16 zero3': '--zero_stage=3',
        'answers ddp': '', 'answers zero3': '--zero_stage=3', 'answers tp2': '--tp=2', 'answers cp2': '--cp=2',
        'answers pp2 1f1b': '--pp=2', 'answers pp2 zbv': '--pp=2 --pp_schedule=zbv', 'expert_answers ep2': '--ep=2'},
    3: {'gpt2 zero3': '--zero_stage=3', 'answers ddp': ''},
    4: {'modern tp2 pp2 zbv': '--tp=2 --pp=2 --pp_schedule=zbv', 'moe ep2 cp2': '--cp=2 --ep=2 --zero_stage=3',
        'shallow pp2 interleavedzb': '--pp=2 --pp_schedule=interleavedzb', 'int8 tp2 pp2': '--tp=2 --pp=2',
        'bfloat16 hsdp': '--dp_replicate=2 --zero_stage=3', 'shallow pp4': '--pp=4'},  # the embedding is a stage, and so is the head
}
LAYOUTS_BY_HAND = {
    1: {'bfloat16 full': '--activation_checkpoint=full'},
    2: {'modern zero1': '--zero_stage=1', 'few zero3': '--zero_stage=3', 'muon zero1': '--zero_stage=1',
        'modern pp2 zero3 interleavedzb': '--pp=2 --zero_stage=3 --pp_schedule=interleavedzb',
        'modern zero2 compiled': '--zero_stage=2 --compile=True', 'moe tp2': '--tp=2', 'int8 cp2': '--cp=2',
        'int8 zero1': '--zero_stage=1', 'bfloat16 tp2': '--tp=2',
        'bfloat16 offload': '--zero_stage=3 --cpu_offload',
        'answers zero2 selective': '--zero_stage=2 --activation_checkpoint=selective',
        'answers pp2 zbv full': '--pp=2 --pp_schedule=zbv --activation_checkpoint=full'},
    3: {'answers zero3': '--zero_stage=3'},
    4: {'gpt2 tp2 cp2': '--tp=2 --cp=2', 'answers hsdp': '--dp_replicate=2 --zero_stage=3',
        'answers tp2 pp2 zbv': '--tp=2 --pp=2 --pp_schedule=zbv'},
}
ARGUMENTS = by_name(LAYOUTS) | by_name(SLOW_LAYOUTS) | by_name(LAYOUTS_BY_HAND)


def cases(layouts, slow_layouts, layouts_by_hand):
    """Parameters (nproc, layout)."""
    params = []
    for some, marks in ((layouts, ()), (slow_layouts, pytest.mark.slow), (layouts_by_hand, pytest.mark.matrix)):
        for nproc, of_nproc in some.items():
            params += [pytest.param(nproc, layout, marks=marks) for layout in of_nproc]
    return params


def runs_of_layouts(request, prepare, start):
    """Function (nproc, layout) -> its run, with `observations` of [iteration - 1][rank].

    The layout 'MODEL one' is one process. The first call runs what all selected tests of the requesting file
    compare, two at a time. prepare(model): what its runs begin with, where a layout begins with its model.
    start(beginning, nproc, layout): a run.
    """
    selected = []
    for item in request.session.items:
        params = getattr(item, 'callspec', None) and item.callspec.params
        if params and params.keys() == {'nproc', 'layout'} and item.path == request.path:
            selected += [(params['nproc'], params['layout']), (1, f'{params["layout"].split()[0]} one')]
    done, beginnings = {}, {}

    def get(*case):
        if case not in done:
            missing = [each for each in dict.fromkeys([case, *selected]) if each not in done]
            models = [layout.split()[0] for _, layout in missing]
            new = [model for model in dict.fromkeys(models) if model not in beginnings]
            beginnings.update(zip(new, side_by_side(*(functools.partial(prepare, model) for model in new))))
            runs = side_by_side(*(functools.partial(start, beginnings[model], *each)
                                  for model, each in zip(models, missing)))
            done.update(zip(missing, runs))
        assert done[case].returncode == 0, '\n'.join(done[case].outputs)
        return done[case]

    return get


@pytest.fixture(scope='module')
def lora_run(request, train, conversations, tmp_path_factory):  # noqa: F811
    def prepare(model):
        """The folder of a run that has trained adapters beside a base that was trained as well."""
        of_base, of_adapters = MODELS[model]
        options = ['--eval_iters=0', '--learning_rate=2e-2', '--min_lr=2e-2']
        base = train(*of_base.split(), *options, base=SHORT)
        return train(f'--init_from={base.out_dir}', *of_adapters.split(), *options, base=SHORT).out_dir

    def start(adapters, nproc, layout):
        model = layout.split()[0]
        arguments = ARGUMENTS.get((nproc, layout), '').split()
        if model == 'muon':
            arguments.append('--optimizer=muon')
        if 'answers' in model:
            arguments += ['--documents=pack', f'--dataset={conversations}']
        return observed_run(train, tmp_path_factory.mktemp('gradients'), SHORT, f'--init_from={adapters}',
                            *arguments, nproc=nproc, has_experts=model in ('moe', 'expert_answers'))

    return runs_of_layouts(request, prepare, start)


@pytest.mark.parametrize('nproc, layout', cases(LAYOUTS, SLOW_LAYOUTS, LAYOUTS_BY_HAND))
def test_layout_trains_adapters_as_one_process_does(lora_run, nproc, layout):
    run, one = lora_run(nproc, layout), lora_run(1, f'{layout.split()[0]} one')
    assert list(one.lines) == [1, 2, 3] and list(one.evals) == [0, 3]
    assert_near(run, one)
    for found, expected, tolerance in zip(run.observations, one.observations, (1e-3, 1e-2, 1e-2)):
        assert all('.lora_' in name for name, _ in expected[0].gradients)
        assert wrong_gradients(found, expected, tolerance) == []
    saved, saved_by_one = newest_weights(run.out_dir), newest_weights(one.out_dir)
    assert saved.keys() == saved_by_one.keys() and all('.lora_' in name for name in saved)
    for name, tensor in saved.items():
        torch.testing.assert_close(tensor, saved_by_one[name], rtol=0, atol=1e-3)
