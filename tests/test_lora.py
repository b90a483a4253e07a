"""Adapters of low rank: their gradients, their checkpoints, and what is said about wrong ones."""
import functools
import re
import shutil

import pytest
import torch

from helpers import (FAULTS, assert_same_tensors, curve, newest_state, newest_tensors, run_forked, run_script,
                     saved_iterations)
from kilogpt.devices.frozen_products import keep_no_copies
from kilogpt.layers.lora import FrozenLinear, quantize, scale_of, widened
from kilogpt.layers.options import GROUPS
from kilogpt.loading import load_model
from kilogpt.run import checkpoint
from model import GPT, GPTConfig
from test_guard import LONG, SEQUENCES, SPIKES, move_position, plant

SMALL = dict(block_size=16, vocab_size=65, n_layer=2, n_head=4, n_kv_head=2, n_embd=32, pos='rope', norm='rmsnorm',
             mlp='swiglu')
MODERN = '--pos=rope --norm=rmsnorm --mlp=swiglu --n_kv_head=2'.split()


def adapted(**keys):
    """(a model in float64 with adapters whose B is not zero, the same model without adapters)."""
    model = GPT(GPTConfig(**SMALL, **dict(lora_rank=4, lora_alpha=6.0) | keys)).double()
    generator = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        if name.endswith('lora_B'):
            parameter.data.normal_(0, 0.1, generator=generator)
    plain = GPT(GPTConfig(**SMALL)).double()
    plain.load_state_dict({name: value for name, value in model.state_dict().items() if '.lora_' not in name})
    return model, plain


def batch():
    generator = torch.Generator().manual_seed(1)
    return torch.randint(65, (3, 16), generator=generator), torch.randint(65, (3, 16), generator=generator)


@pytest.mark.parametrize('keys', [{}, dict(lora_targets='c_q,mlp.c_proj', lora_rank_stabilised=True)])
def test_gradients_are_those_of_the_merged_weights(keys):
    """Autograd on W + scale B A, by the chain rule: a plain model whose weights are functions of A and B."""
    model, plain = adapted(**keys)
    loss = model(*batch())
    loss.backward()
    adapters = {name: value.detach().clone().requires_grad_() for name, value in model.named_parameters()
                if '.lora_' in name}
    weights = dict(plain.named_parameters())
    for name, a in adapters.items():
        linear, _, kind = name.rpartition('.')
        if kind == 'lora_A':
            update = adapters[f'{linear}.lora_B'] @ a
            weights[f'{linear}.weight'] = weights[f'{linear}.weight'] + scale_of(model.config) * update
    expected = torch.func.functional_call(plain, weights, batch())
    expected.backward()
    torch.testing.assert_close(loss, expected)
    assert len(adapters) == 2 * 2 * (7 if not keys else 2)
    for name, parameter in model.named_parameters():
        if name in adapters:
            torch.testing.assert_close(parameter.grad, adapters[name].grad)
            assert parameter.grad.abs().max() > 1e-3
        else:
            assert parameter.grad is None and not parameter.requires_grad


def test_adapters_of_full_rank_make_the_update_of_the_merged_weight():
    """With A = 1 and scale = 1, a step of B alone is the step that full finetuning of W makes."""
    model, plain = adapted(lora_rank=32, lora_alpha=32.0, lora_targets='c_q')
    for name, parameter in model.named_parameters():
        if name.endswith('lora_A'):
            parameter.data.copy_(torch.eye(32))
            parameter.requires_grad_(False)
        if name.endswith('lora_B'):
            parameter.data.zero_()
    before = {name: value.clone() for name, value in plain.state_dict().items()
              if name.endswith('c_q.weight')}
    for trained in (model, plain):
        parameters = [p for name, p in trained.named_parameters() if 'c_q' in name and p.requires_grad]
        trained(*batch()).backward()
        torch.optim.SGD(parameters, lr=0.1).step()
    for name, weight in before.items():
        linear = model.get_submodule(name.removesuffix('.weight'))
        torch.testing.assert_close(plain.state_dict()[name], linear.weight + linear.lora_B @ linear.lora_A)
        assert (plain.state_dict()[name] - weight).abs().max() > 1e-4


def test_new_adapters_change_nothing():
    model, plain = GPT(GPTConfig(**SMALL, lora_rank=4)), GPT(GPTConfig(**SMALL))
    torch.testing.assert_close(model(*batch()), plain(*batch()), rtol=0, atol=0)


def test_loss_in_parts_does_not_compute_the_gradient_of_a_frozen_head(monkeypatch):
    model, _ = adapted()
    model(*batch()).backward()
    whole = {name: p.grad.clone() for name, p in model.named_parameters() if p.requires_grad}
    model.zero_grad()
    monkeypatch.setattr('model.MAX_LOGITS', 1024)
    grad, counts = torch.autograd.grad, []

    def counting_grad(loss, inputs):
        counts.append(len(inputs))
        return grad(loss, inputs)

    monkeypatch.setattr('torch.autograd.grad', counting_grad)
    model(*batch()).backward()
    assert set(counts) == {1} and len(counts) > 1
    for name, gradient in whole.items():
        torch.testing.assert_close(model.get_parameter(name).grad, gradient)


def test_dropout_is_of_the_adapters_inputs_alone():
    """With B = 0 it makes no difference; with B ≠ 0 it makes one, in training alone."""
    new = GPT(GPTConfig(**SMALL, lora_rank=4, lora_dropout=0.5))
    torch.testing.assert_close(new(*batch()), new.eval()(*batch()), rtol=0, atol=0)
    model, _ = adapted(lora_dropout=0.5)
    trained = model(*batch())
    model.eval()
    torch.testing.assert_close(model(*batch()), adapted()[0](*batch()))
    assert not torch.allclose(trained, model(*batch()))


def narrow_and_wide(base_dtype):
    """(a model whose frozen linears are narrow, the same model with their values in float32), B not zero."""
    models = [GPT(GPTConfig(**SMALL, lora_rank=4, lora_targets='c_q,c_fc', lora_base_dtype=dtype))
              for dtype in (base_dtype, 'float32')]
    narrow, wide = (dict(model.named_modules()) for model in models)
    for path in [path for path, module in narrow.items() if isinstance(module, FrozenLinear)]:
        weight = wide[path].weight.data
        stored, scale = quantize(weight) if base_dtype == 'int8' else (weight.to(torch.bfloat16), None)
        narrow[path].weight.data.copy_(stored)
        if scale is not None:
            narrow[path].weight_scale.data.copy_(scale)
            assert ((widened(stored, scale, torch.float32) - weight).abs() <= 0.501 * scale[:, None]).all()
        weight.copy_(widened(stored, scale, torch.float32))
        if hasattr(narrow[path], 'lora_B'):
            for module in (narrow[path], wide[path]):
                module.lora_B.data.copy_(torch.linspace(-0.1, 0.1, module.lora_B.numel()).view_as(module.lora_B))
    return models


@pytest.mark.parametrize('base_dtype', ['bfloat16', 'int8'])
def test_narrow_base_trains_as_its_values_in_float32(base_dtype):
    """To the bit: x is in float32, and so is each weight when it is multiplied."""
    narrow, wide = narrow_and_wide(base_dtype)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        loss = narrow(*batch())
    loss.backward()
    wide(*batch()).backward()
    torch.testing.assert_close(loss, wide(*batch()), rtol=0, atol=0)
    for name, parameter in wide.named_parameters():
        if parameter.requires_grad:
            torch.testing.assert_close(narrow.get_parameter(name).grad, parameter.grad, rtol=0, atol=0)
            assert parameter.grad.abs().max() > 1e-4
    assert all(module.weight.dtype == getattr(torch, base_dtype) for path, module in narrow.named_modules()
               if isinstance(module, FrozenLinear))
    parameters = {parameter.data_ptr() for parameter in narrow.parameters()}
    shapes = {(32, 32), (16, 32), (narrow.config.n_hidden, 32), (32, narrow.config.n_hidden)}
    assert not [tensor for tensor in kept if tuple(tensor.shape) in shapes and tensor.data_ptr() not in parameters]


@pytest.mark.parametrize('base_dtype', ['bfloat16', 'int8'])
def test_narrow_base_under_autocast_is_rounded_once(base_dtype):
    """In bfloat16 the products are those of the values in float32, which autocast rounds to bfloat16."""
    narrow, wide = narrow_and_wide(base_dtype)
    with torch.autocast('cpu', torch.bfloat16):
        torch.testing.assert_close(narrow(*batch()), wide(*batch()), rtol=0, atol=0)


@pytest.mark.parametrize('keys, sentence', [
    (dict(lora_base_dtype='int4'), "lora_base_dtype is 'int4': choose one of float32, bfloat16, int8"),
    (dict(lora_rank=0, lora_base_dtype='int8'), 'only frozen weights can be narrow: set lora_rank'),
    (dict(lora_rank=-1), 'lora_rank is -1: it cannot be negative'),
    (dict(lora_alpha=0.0), 'lora_alpha is 0.0: it must be above 0'),
    (dict(lora_dropout=1.0), 'lora_dropout is 1.0: it must be in'),
    (dict(lora_targets='attention,c_x'), "'c_x' is not a linear of a block: join some of attention, mlp, all, c_fc"),
    (dict(lora_targets='c_gate', mlp='gelu'), 'the blocks of this model do not have such linears'),
    (dict(mlp='moe'), 'experts cannot have adapters: set lora_targets to attention')])
def test_impossible_adapters_are_refused_in_one_sentence(keys, sentence):
    with pytest.raises(ValueError, match=sentence):
        GPT(GPTConfig(**SMALL | dict(lora_rank=2) | keys))


def test_targets_are_groups_or_names():
    for text, paths in (('attention', GROUPS['attention']), ('c_q, c_v', ('attn.c_q', 'attn.c_v')),
                        ('c_proj', ('attn.c_proj', 'mlp.c_proj')), ('mlp.c_proj', ('mlp.c_proj',))):
        model = GPT(GPTConfig(**SMALL, lora_rank=2, lora_targets=text))
        found = {name.partition('h.0.')[2].rpartition('.')[0] for name, p in model.named_parameters()
                 if p.requires_grad and 'h.0.' in name}
        assert found == set(paths), text


# --- runs -----------------------------------------------------------------------------------------------

@pytest.fixture(scope='module')
def base(train):
    """The folder of a run whose weights the tests adapt."""
    return train(*MODERN, '--max_iters=6', '--lr_decay_iters=6', '--eval_interval=6').out_dir


ADAPTERS = ['--lora_rank=4', '--lora_alpha=8', '--lora_dropout=0.1', '--save_interval=6']


@pytest.fixture(scope='module')
def tuned(train, base):
    return train(f'--init_from={base}', *ADAPTERS)


def test_checkpoint_holds_adapters_alone_and_names_their_base(tuned, base):
    tensors, state = newest_tensors(tuned.out_dir), newest_state(tuned.out_dir)
    assert tensors and all('.lora_' in name for name in tensors)
    assert {name.partition('.')[0] for name in tensors} == {'model', 'optimizer'}
    assert state['base']['source'] == str(base / 'ckpt' / 'iter_00000006')
    trained = sum(tensor.numel() for name, tensor in tensors.items() if name.startswith('model.'))
    assert f'parameters, of which {trained:,} in adapters are trained, 20,000 training tokens' in tuned.stdout
    assert tuned.evals[12]['val_loss'] < tuned.evals[0]['val_loss'] - 0.01


def test_resumed_run_equals_the_unbroken_one_to_the_bit(train, tuned, tmp_path):
    out_dir = shutil.copytree(tuned.out_dir, tmp_path / 'out')
    shutil.rmtree(out_dir / 'ckpt' / 'iter_00000012')
    resumed = train(*ADAPTERS, '--init_from=resume', out_dir=out_dir)
    assert 'at iteration 6' in resumed.stdout
    assert curve(resumed) == curve(tuned) and resumed.evals == tuned.evals
    assert_same_tensors(newest_tensors(out_dir), newest_tensors(tuned.out_dir))


def test_int8_base_is_smaller_and_resumes_to_the_bit(train, base, tmp_path):
    keys = [f'--init_from={base}', *ADAPTERS, '--lora_base_dtype=int8']
    unbroken = train(*keys)
    # As launch/slurm.sh starts it, and starts it again: the first start is from the weights that are named before.
    broken = train(*keys, '--init_from=auto', '--max_iters=6', '--lr_decay_iters=12')
    resumed = train(*keys, '--init_from=auto', out_dir=broken.out_dir)
    assert curve(resumed) == curve(unbroken)
    assert_same_tensors(newest_tensors(broken.out_dir), newest_tensors(unbroken.out_dir))
    whole = train(f'--init_from={base}', *ADAPTERS, '--max_iters=1')
    small, large = (float(re.search(r'parameters ([\d.]+) MB', run.stdout)[1]) for run in (unbroken, whole))
    assert small < large / 1.7  # embedding, head and adapters are in float32
    assert unbroken.evals[0]['val_loss'] == pytest.approx(whole.evals[0]['val_loss'], abs=2e-3)
    assert unbroken.evals[0]['val_loss'] != whole.evals[0]['val_loss']


def test_int8_base_is_not_sharded_by_a_torch_that_cannot(train, base):
    run = train(f'--init_from={base}', '--lora_rank=4', '--lora_base_dtype=int8', '--zero_stage=3', nproc=2,
                faults=[FAULTS / 'old_torch.py'], check=False)
    assert 'lora_base_dtype is int8, but torch 2.11.0 does not shard integers: set it to bfloat16' in run.outputs[0]


@pytest.mark.slow
@pytest.mark.parametrize('base_dtype', ['float32', 'bfloat16', 'int8'])
def test_compiler_keeps_no_copy_of_a_frozen_weight(base_dtype):
    model, _ = narrow_and_wide(base_dtype)
    linear, kept = model.transformer.h['0'].mlp.c_fc, []
    keep_no_copies(linear)
    x = torch.randn(2, 16, 32, requires_grad=True)
    torch.compiler.reset()
    with (torch.autocast('cpu', torch.bfloat16),
          torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor)):
        torch.compile(linear)(x).sum().backward()
    sizes = {tensor.shape for tensor in kept if tensor.data_ptr() != linear.weight.data_ptr()}
    assert linear.weight.shape not in sizes and x.grad.abs().sum() > 0


@pytest.mark.slow
def test_sharded_checkpoint_continues_on_one_process(train, tuned, base, tmp_path):
    sharded = train(f'--init_from={base}', *ADAPTERS, '--zero_stage=3', '--lora_dropout=0', '--max_iters=6',
                    nproc=2)
    whole = train(f'--init_from={base}', *ADAPTERS, '--lora_dropout=0', '--eval_interval=6')
    assert saved_iterations(sharded.out_dir) == [6]
    resumed = train('--init_from=resume', out_dir=sharded.out_dir)
    for iteration in range(7, 13):
        assert resumed.lines[iteration]['loss'] == pytest.approx(whole.lines[iteration]['loss'], abs=1e-5)


def test_loaded_model_and_samples_have_the_merged_weights(tuned, base):
    """The loss is that of the run's last evaluation; sampling and scoring go the same way."""
    merged, _, _, state = load_model(str(tuned.out_dir))
    plain, *_ = load_model(str(base))
    assert merged.config == plain.config and all(p.requires_grad for p in merged.parameters())
    tensors = newest_tensors(tuned.out_dir)
    linear = 'transformer.h.1.mlp.c_proj'
    update = tensors[f'model.{linear}.lora_B'] @ tensors[f'model.{linear}.lora_A']
    torch.testing.assert_close(merged.get_submodule(linear).weight,
                               plain.get_submodule(linear).weight + 8 / 4 * update)
    sampled = run_forked('sample.py', f'--out_dir={tuned.out_dir}', '--device=cpu', '--start=A', '--num_samples=1',
                         '--max_new_tokens=3')
    assert sampled.stdout.startswith('A')


def test_continued_adapters_start_where_they_were(train, tuned):
    """A new run from a run with adapters trains the same adapters on, with the same base."""
    run = train(f'--init_from={tuned.out_dir}', '--max_iters=1', '--lora_rank=4')
    assert run.evals[0]['val_loss'] == pytest.approx(tuned.evals[12]['val_loss'], abs=1e-5)
    assert newest_state(run.out_dir)['base'] == newest_state(tuned.out_dir)['base']


@pytest.mark.slow
def test_run_with_adapters_goes_back_as_one_that_never_saw_these_batches(train, dataset, tmp_path):
    data = f'--dataset={plant(dataset, tmp_path / "data", [23, 24, 25, 26])}'
    base = train(*MODERN, data, '--max_iters=6', '--lr_decay_iters=6', '--eval_interval=6').out_dir
    options = [*LONG, *ADAPTERS[:2], f'--init_from={base}', '--learning_rate=3e-2', data]
    run = train(*options, '--on_spike=rollback', faults=SPIKES)
    assert run.stdout.count('4 spikes in a row: going back to') == 1
    other = train(*options, '--max_iters=20')
    move_position(checkpoint.find(other.out_dir)[0], 26 * SEQUENCES * 32)
    other = train(*options, '--init_from=resume', out_dir=other.out_dir)
    assert curve(run) == curve(other)
    assert_same_tensors(newest_tensors(run.out_dir), newest_tensors(other.out_dir))


@pytest.mark.slow
def test_islands_exchange_adapters_and_continue_to_the_bit(train, tuned, base):
    options = [f'--init_from={base}', *ADAPTERS, '--outer_interval=5']
    one = train(*options, '--outer_lr=1', '--outer_momentum=0')
    assert curve(one) == curve(tuned)
    options += ['--islands=2', '--outer_fragments=2', '--outer_delay=1', '--outer_compress=int8']
    unbroken = train(*options, nproc=2)
    stopped = train(*options, '--max_iters=7', '--lr_decay_iters=12', nproc=2)
    resumed = train(*options, '--init_from=resume', out_dir=stopped.out_dir, nproc=2)
    assert curve(resumed) == curve(unbroken)
    assert_same_tensors(newest_tensors(resumed.out_dir), newest_tensors(unbroken.out_dir))
    assert unbroken.evals[12]['val_loss'] < unbroken.evals[0]['val_loss'] - 0.01


@pytest.mark.slow
def test_replayed_adapters_agree_with_the_log_to_the_bit(tuned):
    replayed = run_script('kilogpt.replay', tuned.out_dir, 'all', check=False)
    assert 'replay: 12 iterations agree with' in replayed.stdout and 'to the bit' in replayed.stdout, replayed.stderr


def test_wrong_bases_and_ranks_are_refused_in_one_sentence(train, tuned, base, tmp_path):
    path, place = tuned.out_dir / 'ckpt' / 'iter_00000012', base / 'ckpt' / 'iter_00000006'
    other = train(*MODERN, '--seed=1', '--max_iters=6', '--eval_interval=6').out_dir / 'ckpt' / 'iter_00000006'
    calls = {
        'lora_rank is 4, but adapters need a trained model beside them: set init_from': ['--lora_rank=4'],
        'lora_rank is 2, but .* has adapters of rank 4': [f'--init_from={tuned.out_dir}', '--lora_rank=2'],
        'lora_rank is -1: it cannot be negative': [f'--init_from={base}', '--lora_rank=-1'],
    }
    for sentence, arguments in calls.items():
        with pytest.raises(AssertionError, match=f'error: {sentence}'):
            train(*arguments, runner=run_forked)
    moved = shutil.move(place, tmp_path / 'moved')
    try:
        with pytest.raises(ValueError, match='which does not exist: put that base there again'):
            load_model(str(tuned.out_dir))
        shutil.copytree(other, place)
        resume = functools.partial(train, '--init_from=resume', '--max_iters=13', out_dir=tuned.out_dir)
        sentence = f'error: {path} holds adapters for {place}, which has other weights'
        with pytest.raises(AssertionError, match=sentence):
            resume()
        shutil.rmtree(place)
    finally:
        shutil.move(moved, place)
