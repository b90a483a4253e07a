"""Mixtures of experts: compared with a plain implementation, in every layout; what they log and refuse.

`kilogpt.prove --random` compares each gradient of mixtures with one process in all layouts.
"""
import math
import pathlib
import re
import shutil

import pytest
import torch
from torch.nn import functional as F

from helpers import FAULTS, ROOT, assert_near, assert_same_tensors, curve, newest_weights
from kilogpt.prove import observer
from kilogpt.prove.compare import relative_error
from kilogpt.run.metrics import flops_per_token, num_active_params
from model import GPT, GPTConfig

MOE = ('--mlp=moe --n_experts=4 --n_active_experts=2 --expert_hidden=16 --n_shared_experts=1 '
       '--router_balance_rate=0.01').split()


# --- what is computed -----------------------------------------------------------------------------------

def plain_mixture(mixture, x):
    """Every expert on every token, with weights of 0 for the experts that a token does not go to."""
    router, experts = mixture.routed.router, mixture.routed.experts
    logits = x @ router.weight.T
    affinities = logits.softmax(-1) if router.kind == 'softmax' else logits.sigmoid()
    ranking = affinities + (router.bias if router.balance == 'bias' else 0)
    least = ranking.topk(router.n_active, dim=-1).values[..., -1:]
    weights = affinities * (ranking >= least)
    if router.n_active > 1:
        weights = weights / weights.sum(-1, keepdim=True)
    y = mixture.shared(x) if mixture.shared else 0
    for expert in range(router.n_experts):
        h = x @ experts.c_fc[expert].T
        if experts.form == 'swiglu':
            h = h * F.silu(x @ experts.c_gate[expert].T)
        else:
            h = F.relu(h) ** 2
        y = y + weights[..., expert:expert + 1] * (h @ experts.c_proj[expert].T)
    return y


def in_float64(**keys):
    """A model of two blocks with experts, whose weights and biases are random."""
    config = GPTConfig(block_size=16, vocab_size=65, n_layer=2, n_head=4, n_embd=32, mlp='moe', bias=False,
                       expert_hidden=24, **keys)
    with torch.device('cpu'):
        model = GPT(config, seed=None).double()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.3, generator=generator)
    return model, generator


@pytest.mark.quick
@pytest.mark.parametrize('keys', [
    dict(), dict(router='sigmoid', n_shared_experts=2), dict(n_active_experts=1, expert_mlp='relu2'),
    dict(n_active_experts=8, router_balance='none'), dict(n_experts=16, router_balance='loss')])
def test_experts_equal_a_plain_implementation(keys):
    """Outputs and all gradients in float64. With 16 experts for 33 tokens some get nothing."""
    model, generator = in_float64(**keys)
    mixture = model.transformer.h['0'].mlp
    x = torch.randn(3, 11, 32, dtype=torch.float64, generator=generator, requires_grad=True)
    direction = torch.randn(3, 11, 32, dtype=torch.float64, generator=generator)
    leaves = [x, *(parameter for parameter in mixture.parameters() if parameter.requires_grad)]
    found, expected = mixture(x, None), plain_mixture(mixture, x)
    torch.testing.assert_close(found, expected, atol=1e-12, rtol=0)
    gradients = torch.autograd.grad((found * direction).sum(), leaves)
    expected = torch.autograd.grad((expected * direction).sum(), leaves)
    torch.testing.assert_close(gradients, expected, atol=1e-11, rtol=0)


def test_losses_of_the_router_equal_those_of_the_papers():
    """Switch's and the z-loss, by their gradients, which are those of the model's loss and nothing more."""
    model, generator = in_float64(router_balance='loss', router_balance_rate=0.3, router_z_loss=0.2)
    router = model.transformer.h['0'].mlp.routed.router
    router.loss_scale = 0.125
    with torch.no_grad():
        router.load.copy_(torch.arange(8) / 28)
    x = torch.randn(20, 32, dtype=torch.float64, generator=generator)
    is_counted = torch.arange(20) < 15
    _, weights = router(x, is_counted)
    gradient, = torch.autograd.grad(0 * weights.sum(), router.weight)
    logits = x[:15] @ router.weight.T
    switch = 8 * (logits.softmax(-1).mean(0) * router.load).sum()  # of a mean token
    z_loss = logits.logsumexp(-1).square().mean()
    expected, = torch.autograd.grad(0.125 * 15 * (0.3 * switch + 0.2 * z_loss), router.weight)
    torch.testing.assert_close(gradient, expected, atol=1e-12, rtol=0)
    assert router.n_tokens.sum() == 30  # padding is not counted


def test_bias_moves_towards_idle_experts_unless_the_update_is_skipped():
    model, _ = in_float64(router_balance_rate=0.25)
    router, n_tokens = model.transformer.h['0'].mlp.routed.router, torch.tensor([9., 0, 4, 4, 4, 4, 4, 3])
    router.bias.data.zero_()
    router.rebalance(n_tokens, torch.tensor(0.))
    assert not router.bias.any()
    router.rebalance(n_tokens, torch.tensor(1.))
    assert router.bias.tolist() == [-0.25, 0.25, 0, 0, 0, 0, 0, 0.25]


def test_flops_count_the_experts_that_a_token_goes_to():
    dense = GPT(GPTConfig(n_layer=2, n_head=4, n_embd=32, mlp='swiglu', n_hidden=48, bias=False,
                          vocab_size=65))
    config = GPTConfig(n_layer=2, n_head=4, n_embd=32, mlp='moe', n_experts=8, n_active_experts=2,
                       n_shared_experts=1, expert_hidden=16, bias=False, vocab_size=65)
    model = GPT(config)
    routers = 2 * 8 * 32
    assert flops_per_token(model, [16]) == flops_per_token(dense, [16]) + 6 * routers
    assert num_active_params(model) == dense.num_params() + routers + 2 * 8  # and the biases
    assert model.num_params() - num_active_params(model) == 2 * 6 * 3 * 16 * 32


# --- in every layout ------------------------------------------------------------------------------------

@pytest.fixture(scope='session')
def first_gradients(train, tmp_path_factory):
    """Function (arguments, nproc) -> [(name, whole gradient)] of iteration 1 on all ranks, in float64."""
    done = {}

    def get(arguments, nproc=1, faults=()):
        key = tuple(arguments), nproc, tuple(faults)
        if key not in done:
            folder = tmp_path_factory.mktemp('gradients')
            train(*arguments, '--bias', '--eval_iters=0', '--max_iters=1', '--keep_checkpoints=0',
            nproc=nproc,
                  env=dict(GRADIENTS=str(folder)), faults=[FAULTS / 'dump_gradients.py', *faults])
            done[key] = []
            for observation in observer.read(folder, 1, range(nproc)):
                done[key] += observation.gradients
        return done[key]

    return get


def largest_error(found, expected):
    """(the largest error of a gradient relative to its norm, the parameter's name), on any rank."""
    expected = dict(expected)
    assert dict(found).keys() == expected.keys()
    return max((relative_error(gradient, expected[name]), name)
               for name, gradient in found if not name.endswith('c_k.bias'))  # zero but for rounding


@pytest.mark.slow
@pytest.mark.drawn(1)
@pytest.mark.parametrize('nproc, layout', [(2, '--ep=2 --zero_stage=3'), (2, '--pp=2'), (4, '--ep=2 --tp=2')])
def test_gradients_of_idle_experts_equal_those_of_one_process(first_gradients, nproc, layout):
    """Most of 64 experts get no token in a micro-batch. float64 sums differ by 1e-15, the float32 loss's by 1e-7."""
    idle = '--mlp=moe --n_experts=64 --n_active_experts=1 --expert_hidden=16'.split()
    expected = first_gradients(idle)
    assert sum('router' in name for name, _ in expected) == 2
    error, name = largest_error(first_gradients([*idle, *layout.split()], nproc), expected)
    assert error < 1e-5, name


@pytest.mark.slow
def test_second_choice_in_a_checkpoint_shows(first_gradients, train, monkeypatch):
    """In the gradients. A loop over the experts would end the run, because tensors change their shapes."""
    options = [*MOE, '--activation_checkpoint=full']
    monkeypatch.setenv('FAULT', 'choice')
    monkeypatch.setenv('GRADIENTS_IN', 'float32')  # in float64 it is a loop
    found = first_gradients(options, faults=[FAULTS / 'wrong_experts.py'])
    error, name = largest_error(found, first_gradients(options))
    assert error > 0.05 and 'routed' in name, (error, name)
    looped = train(*options, check=False, faults=[FAULTS / 'looped_products.py', FAULTS / 'wrong_experts.py'])
    assert looped.returncode == 1 and 'CheckpointError' in looped.stderr


@pytest.mark.slow
def test_loads_of_one_rank_alone_show_in_the_biases(train):
    runs = [train(*MOE, '--ep=2', nproc=2, env=dict(FAULT=fault), faults=[FAULTS / 'wrong_experts.py'])
            for fault in ('none', 'loads')]
    right, wrong = (newest_weights(run.out_dir) for run in [train(*MOE), runs[1]])
    biases = [name for name in right if 'router.bias' in name]
    assert_same_tensors(*({name: weights[name] for name in biases}
                          for weights in (right, newest_weights(runs[0].out_dir))))
    assert max((right[name] - wrong[name]).abs().max() for name in biases) > 0.005


def choices_of(train, folder, layout, nproc):
    """The experts of each token, sorted: (iterations, blocks, sequences * positions, K), of 40 updates."""
    folder.mkdir()
    run = train(*MOE, '--max_iters=40', '--lr_decay_iters=40', '--eval_iters=0', '--keep_checkpoints=0',
                *layout.split(), nproc=nproc, env=dict(CHOICES=str(folder)),
                faults=[FAULTS / 'keep_choices.py'])
    micro_steps = int(re.search(r'(\d+) micro-step', run.stdout)[1])
    ranks = []
    for rank in range(1 if '--tp' in layout else nproc):  # tensor-parallel ranks have the same tokens
        calls = torch.load(folder / f'{rank}.pt')[-40 * micro_steps * 2:]  # not those of the warm-up
        ranks.append(torch.stack(calls).unflatten(0, (40, micro_steps, 2)))
    if '--cp' in layout:  # each has half of each sequence
        ranks = [torch.cat([choices.unflatten(3, (-1, 16)) for choices in ranks], dim=4).flatten(3, 4)]
    choices = torch.stack(ranks, dim=2)  # (iterations, micro-steps, ranks, blocks, tokens, K)
    return choices.permute(0, 3, 1, 2, 4, 5).flatten(2, 4)


@pytest.mark.slow
def test_only_rounding_sends_tokens_to_other_experts(train, tmp_path):
    """In float64 none goes elsewhere in 40 updates, in any layout. Prints the counts (-s)."""
    one = choices_of(train, tmp_path / 'one', '', 1)
    for layout in ('--ep=2', '--tp=2', '--cp=2'):
        found = choices_of(train, tmp_path / layout, layout, 2)
        assert found.shape == one.shape == (40, 2, 12 * 32, 2)
        flips = (found != one).any(dim=-1).sum(dim=(1, 2))  # of each iteration
        print(f'{layout}: {flips.sum()} of {2 * 40 * 12 * 32:,} choices differ, by iteration {flips.tolist()}')
        assert not flips.any()


@pytest.mark.slow
@pytest.mark.drawn(2)
@pytest.mark.parametrize('nproc, layout', [
    (1, ''), (1, '--dtype=bfloat16'), (2, '--ep=2 --zero_stage=3'), (2, '--tp=2 --activation_checkpoint=full')])
def test_grouped_products_train_like_the_loop(train, nproc, layout):
    """In the layouts that come between a parameter and its product."""
    options = [*MOE, *layout.split(), '--eval_iters=0', '--keep_checkpoints=0', '--max_iters=4']
    looped = train(*options, nproc=nproc, faults=[FAULTS / 'looped_products.py'])
    grouped = train(*options, nproc=nproc)
    assert_near(grouped, looped, *((3e-2, 3e-2) if 'bfloat16' in layout else ()))


@pytest.mark.slow
def test_program_that_measures_a_block_runs(capsys):
    program = re.search(r'```python\n(.*?)```', pathlib.Path(ROOT, 'docs/models.md').read_text('utf-8'), re.S)[1]
    exec(program.replace('rounds = 10', 'rounds = 1'), {})
    assert capsys.readouterr().out.count('times as long') == 2


# --- in a run -------------------------------------------------------------------------------------------

def test_run_logs_its_experts_and_resumes_to_the_bit(train):
    options = [*MOE, '--eval_interval=4', '--max_iters=8', '--dropout=0.1']
    whole, part = train(*options), train(*options, '--max_iters=4')
    resumed = train(*options, '--init_from=resume', out_dir=part.out_dir)
    assert curve(resumed) == curve(whole)
    assert [line['val_loss'] for line in resumed.evals.values()] == [
        line['val_loss'] for line in whole.evals.values()]
    assert_same_tensors(newest_weights(resumed.out_dir), newest_weights(whole.out_dir))
    biases = [tensor for name, tensor in newest_weights(whole.out_dir).items() if 'router.bias' in name]
    assert len(biases) == 2 and all(0 < bias.abs().max() <= 0.0801 for bias in biases)
    assert all(1 <= line['moe_load_max'] <= 2 for line in whole.lines.values())
    assert 'moe_loads' not in whole.evals[0]
    for shares in whole.evals[8]['moe_loads']:
        assert len(shares) == 4 and math.isclose(sum(shares), 1, abs_tol=1e-3) and max(shares) > 0.25
    assert 'active in a token)' in whole.stdout


@pytest.mark.slow
def test_checkpoint_of_four_expert_ranks_is_read_to_the_bit_in_other_layouts(train, tmp_path):
    """Weights and the routers' biases, as each process has them in the first iteration after."""
    source = train(*MOE, '--ep=4', '--max_iters=6', nproc=4)
    expected = newest_weights(source.out_dir)
    for nproc, layout in [(1, ''), (2, '--ep=2'), (2, '--tp=2'), (2, '--pp=2'), (4, '--ep=2 --zero_stage=3')]:
        folder = tmp_path / layout.replace(' ', '')
        (folder / 'found').mkdir(parents=True)
        out_dir = shutil.copytree(source.out_dir, folder / 'out')
        train(*MOE, *layout.split(), '--init_from=resume', '--max_iters=7', out_dir=out_dir, nproc=nproc,
              env=dict(GRADIENTS=str(folder / 'found'), GRADIENTS_IN='float32'),
              faults=[FAULTS / 'dump_gradients.py'])
        found = {}
        for observation in observer.read(folder / 'found', 1, range(nproc)):
            found |= {f'model.{name}': tensor for name, tensor in observation.weights}
        assert_same_tensors(found, expected)
        assert any('router.bias' in name and tensor.any() for name, tensor in found.items())


@pytest.mark.parametrize('arguments, sentence', [
    ('--n_experts=4 --n_active_experts=5',
     'n_active_experts=5 is more than n_experts=4: set n_active_experts to 4'),
    ('--n_experts=6 --ep=4', 'ep=4 does not divide'),
    ('--moe_first_layer=2', 'moe_first_layer=2 is beyond the last block of n_layer=2'),
    ('--router=top', "router is 'top': choose one of softmax, sigmoid"),
    ('--router_balance=losses', "router_balance is 'losses': choose one of bias, loss, none"),
])
def test_impossible_experts_are_refused_in_one_sentence(train, arguments, sentence):
    run = train('--mlp=moe', *arguments.split(), check=False)
    assert run.returncode == 1 and f'error: {sentence}' in run.stderr and 'Traceback' not in run.stderr
