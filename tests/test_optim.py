"""Learning-rate schedules, AdamW's groups and Muon.

The schedules are compared with nanoGPT's formula and their definitions, Muon with PyTorch's Muon and its
definition.
"""
import math
import subprocess
import sys

import pytest
import torch

from helpers import ROOT
from model import GPT, GPTConfig
from kilogpt.learning_rate import parse_lr_factors, scheduled_lr
from kilogpt.optim import Muon, build_adamw, build_optimizer, kind_of_parameter, orthogonalize, set_lr

pytestmark = pytest.mark.quick

PEAK = 6e-4


def remaining(schedule, it, warmup, decay, decay_ratio):
    """How much of the distance between floor and peak is left, from 1 to 0."""
    if schedule == 'wsd':
        return min(1, (decay - it) / min(decay_ratio * decay, decay - warmup))
    ratio = (it - warmup) / (decay - warmup)
    return 0.5 * (1 + math.cos(math.pi * ratio)) if schedule == 'cosine' else 1 - ratio


@pytest.mark.parametrize('schedule, decay_ratio', [('cosine', 0.5), ('linear', 0.5), ('wsd', 0.2), ('wsd', 0.65)])
@pytest.mark.parametrize('warmup, decay, floor', [
    (20, 200, 6e-5), (0, 7, 0.0), (190, 200, 6e-5), (200, 200, 6e-5), (1, 3, 0.0), (2000, 600_000, 6e-5),
    (5, 3, 0.0)])
def test_schedules_follow_their_formulas(schedule, decay_ratio, warmup, decay, floor):
    """nanoGPT's get_lr(it), with the other schedules' decay in place of its cosine."""
    def get_lr(it):
        if it < warmup:
            return PEAK * (it + 1) / (warmup + 1)
        if it >= decay:  # nanoGPT has >, which differs only at warmup == decay, where nanoGPT divides by zero
            return floor
        return floor + remaining(schedule, it, warmup, decay, decay_ratio) * (PEAK - floor)
    points = range(0, 2 * decay, max(1, decay // 500))
    values = [scheduled_lr(it, schedule, PEAK, floor, warmup, decay, decay_ratio) for it in points]
    assert values == pytest.approx([get_lr(it) for it in points], rel=1e-9)
    # Any schedule rises to the peak, then falls to the floor, without jumps.
    top = values.index(max(values))
    assert values[:top + 1] == sorted(values[:top + 1]) and values[top:] == sorted(values[top:], reverse=True)
    assert values[-1] == floor and values[top] <= PEAK * (1 + 1e-12)
    if warmup < decay:
        assert scheduled_lr(warmup, schedule, PEAK, floor, warmup, decay, decay_ratio) == pytest.approx(PEAK)
        last = scheduled_lr(decay - 1e-6, schedule, PEAK, floor, warmup, decay, decay_ratio)
        assert last == pytest.approx(floor, abs=1e-5 * PEAK)


@pytest.mark.parametrize('tie', [True, False])
def test_adamw_decays_only_matrices_and_has_each_parameter_once(tie):
    model = GPT(GPTConfig(block_size=8, vocab_size=50, n_layer=2, n_head=2, n_embd=8, tie_weights=tie,
                          qk_norm=True))
    optimizer = build_adamw(model.named_parameters(), 1e-3, 0.1, (0.8, 0.9))
    decay = {}
    for group in optimizer.param_groups:
        decay |= {id(p): group['weight_decay'] for p in group['params']}
    n_parameters = sum(len(group['params']) for group in optimizer.param_groups)
    assert n_parameters == len(decay) == len(list(model.parameters()))
    for name, p in model.named_parameters():
        is_matrix = name.endswith('weight') and 'ln_' not in name and '_norm' not in name
        assert decay[id(p)] == (0.1 if is_matrix else 0), name
    assert all(group['lr'] == 1e-3 and group['betas'] == (0.8, 0.9) for group in optimizer.param_groups)


@pytest.mark.parametrize('kind', ['adamw', 'muon'])
def test_lr_factors_are_those_of_each_kind_of_parameter(kind):
    """A first update is proportional to the rate, but for the weight decay, which is as without factors."""
    factors = dict(embedding=3.0, head=0.5, vector=0.0, matrix=2.0)

    def updates(lr_factors, weight_decay=0.0):
        model = GPT(GPTConfig(block_size=8, vocab_size=50, n_layer=2, n_head=2, n_embd=8, tie_weights=False,
                              qk_norm=True, value_pattern='V', attention_gate=True, attention_conv=3, mlp_conv=2))
        config = dict(optimizer=kind, learning_rate=1e-3, weight_decay=weight_decay, beta1=0.9, beta2=0.95,
                      muon_momentum=0.9, lr_factors=lr_factors)
        optimizer = build_optimizer(config, list(model.named_parameters()), model.split_plan, 'float32',
                                    lambda function, parameter, parts: function(parts))
        set_lr(optimizer, 2e-3)  # as each iteration does
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        generator = torch.Generator().manual_seed(0)
        for p in model.parameters():
            p.grad = torch.randn(p.shape, generator=generator)
        optimizer.step()
        kinds = {name: kind_of_parameter(name, p, model.split_plan) for name, p in model.named_parameters()}
        return kinds, {name: p.detach() - before[name] for name, p in model.named_parameters()}

    kinds, plain = updates('')
    text = 'embedding: 3, head:0.5,vector:0, matrix:2'
    (_, scaled), (_, plain_decayed), (_, decayed) = updates(text), updates('', 10.0), updates(text, 10.0)
    found = {kind: {name for name in kinds if kinds[name] == kind} for kind in factors}
    value_tables = {f'transformer.h.{i}.attn.value_embedding.table.weight' for i in range(2)}
    assert found['embedding'] == {'transformer.wte.weight', 'transformer.wpe.weight', *value_tables}
    assert found['head'] == {'lm_head.weight'}
    assert found['vector'] == {name for name in kinds if name.endswith('bias')
                               or any(part in name for part in ('ln_', '_norm', 'convolution'))}
    for name in kinds:
        torch.testing.assert_close(scaled[name], factors[kinds[name]] * plain[name], rtol=1e-4, atol=1e-8, msg=name)
        torch.testing.assert_close(decayed[name] - scaled[name], plain_decayed[name] - plain[name], rtol=1e-4,
                                   atol=1e-8, msg=name)


@pytest.mark.parametrize('text', ['tables:3', 'embedding', 'embedding:', 'embedding:-1', 'head:nan', 'head:inf',
                                  'head:2 vector:3'])
def test_lr_factors_that_are_not_understood_are_named(text):
    with pytest.raises(ValueError, match=f'lr_factors is {text!r}: .*embedding, head, matrix, vector'):
        parse_lr_factors(text)


@pytest.mark.skipif(not hasattr(torch.optim, 'Muon'), reason='this version of torch does not have Muon')
def test_muon_equals_that_of_pytorch_and_adamw_for_the_rest():
    """Five steps are equal to the bit: the products are the same, but of several matrices at a time.

    An update that found_inf skips has no effect.
    """
    def parameters():
        torch.manual_seed(0)
        shapes = {'h.0.a': (48, 32), 'wte': (50, 32), 'h.0.b': (32, 48), 'h.1.a': (48, 32), 'h.0.norm': (32,),
                  'h.1.b.table.weight': (48, 32)}
        return {name: torch.nn.Parameter(torch.randn(shape)) for name, shape in shapes.items()}
    ours, theirs = parameters(), parameters()
    matrices = ('h.0.a', 'h.0.b', 'h.1.a')
    references = (
        torch.optim.Muon([theirs[name] for name in matrices], lr=1e-2, weight_decay=0.1, momentum=0.8,
                         adjust_lr_fn='match_rms_adamw'),
        build_adamw([(name, theirs[name]) for name in theirs if name not in matrices],
                    1e-2, 0.1, (0.9, 0.95)))
    plan = dict(blocks='h', tables=('b.table',), embedding=('wte',), positions=(), head=())
    optimizer = Muon(ours.items(), 1e-2, 0.1, (0.9, 0.95), plan, momentum=0.8)
    for step in range(5):
        if step in (0, 2):
            for parameter in ours.values():
                parameter.grad = torch.full_like(parameter, torch.nan)
            optimizer.found_inf = torch.ones(())
            optimizer.step()
            optimizer.found_inf = torch.zeros(())
        for one in (optimizer, *references):
            for group in one.param_groups:
                group['lr'] = 1e-2 / (step + 1)
        for name in ours:
            ours[name].grad = torch.randn(ours[name].shape)
            theirs[name].grad = ours[name].grad.clone()
        optimizer.step()
        for reference in references:
            reference.step()
        assert all(torch.equal(ours[name], theirs[name]) for name in ours), step


@pytest.mark.parametrize('shape', [(3, 16, 16), (2, 40, 12), (2, 12, 40)])
def test_orthogonalize_keeps_singular_vectors_and_levels_singular_values(shape):
    """In float64, singular vectors stay and singular values move to between 0.65 and 1.25.

    The smallest singular value of the test is 0.3 times the largest.
    """
    torch.manual_seed(0)
    m = min(shape[1:])
    u, v = (torch.linalg.qr(torch.randn(shape[0], n, m, dtype=torch.float64))[0] for n in shape[1:])
    singular_values = torch.linspace(0.3, 1, m, dtype=torch.float64)
    levelled = u.mT @ orthogonalize(100 * (u * singular_values) @ v.mT) @ v
    found = levelled.diagonal(dim1=-2, dim2=-1)
    assert (levelled - torch.diag_embed(found)).abs().max() < 1e-12
    assert 0.65 < found.min() and found.max() < 1.25


@pytest.mark.slow
def test_update_of_an_eager_run_does_not_import_the_compiler():
    """The compiler takes half a second to import. Runs in a new process, without the compiler."""
    script = '''if True:
        import sys, torch
        from kilogpt.optim import build_optimizer
        from model import GPT, GPTConfig
        with torch.device('meta'):
            model = GPT(GPTConfig(n_layer=1, n_embd=8, n_head=1, block_size=8, vocab_size=8), seed=None)
        model = model.to_empty(device='cpu')
        model(torch.zeros(1, 8, dtype=torch.long), torch.zeros(1, 8, dtype=torch.long)).backward()
        config = dict(optimizer='muon', learning_rate=1e-3, weight_decay=0.1, beta1=0.9, beta2=0.95,
                      muon_momentum=0.95, lr_factors='')
        optimizer = build_optimizer(config, list(model.named_parameters()), model.split_plan, 'bfloat16',
                                    lambda function, parameter, parts: parts)
        optimizer.step()
        sys.exit('torch._dynamo' in sys.modules)'''
    subprocess.run([sys.executable, '-c', script], cwd=ROOT, check=True)
