"""Attention and activations for processors that multiply in bfloat16."""
import types

import pytest
import torch
from torch.nn import functional as F

from helpers import graph, run_script
from kilogpt.devices import cpp, cpu_kernels
from kilogpt.devices.cpu import use_faster_parts
from model import GPT, GPTConfig, activate

pytestmark = pytest.mark.quick
needs_kernels = pytest.mark.skipif(cpu_kernels.problem() is not None,
                                   reason=f'no cpu_kernels.cpp: {cpu_kernels.problem()}')
ALONE = types.SimpleNamespace(device=torch.device('cpu'),  # a process
                              first_problem=lambda problem: (0, problem) if problem else None)


def with_gradients(function, q, k, v, grad):
    inputs = [x.detach().clone().requires_grad_() for x in (q, k, v)]
    y = function(*inputs)
    y.backward(grad)
    return [y.detach(), *(x.grad for x in inputs)]


def exact(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def random_inputs(B, T, H, G, D, seed=0):
    """q, k, v and the gradient of y, in the model's layout: views of (B, T, heads, D)."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(B, T, heads, D, generator=generator).bfloat16().transpose(1, 2)
            for heads in (H, G, G, H)]


@needs_kernels
@pytest.mark.parametrize('B, T, H, G, D', [
    (2, 64, 4, 4, 32), (3, 256, 6, 2, 64), (1, 200, 3, 3, 16), (1, 1034, 2, 1, 64), (2, 22, 2, 1, 8),
    (1, 4, 1, 1, 2)])
def test_attention_equals_the_exact_one(B, T, H, G, D):
    """Against float64. Weights and the gradients of scores are rounded to 8 bits, and so are the results."""
    inputs = random_inputs(B, T, H, G, D)
    found = with_gradients(cpu_kernels.attention, *inputs)
    expected = with_gradients(exact, *(x.double() for x in inputs))
    for ours, reference in zip(found, expected):
        assert ours.dtype == torch.bfloat16 and ours.shape == reference.shape
        assert (ours.double() - reference).abs().max() <= 0.01 * reference.abs().max()


@needs_kernels
def test_result_of_a_sequence_depends_neither_on_its_batch_nor_on_the_number_of_threads():
    inputs = random_inputs(3, 128, 4, 2, 32)
    whole = with_gradients(cpu_kernels.attention, *inputs)
    threads = torch.get_num_threads()
    torch.set_num_threads(3)
    alone = with_gradients(cpu_kernels.attention, *(x[1:2] for x in inputs))
    torch.set_num_threads(threads)
    assert all(part.equal(of_all[1:2]) for part, of_all in zip(alone, whole))


@needs_kernels
def test_later_positions_do_not_matter():
    q, k, v, grad = random_inputs(1, 150, 2, 2, 16)
    changed = [torch.cat((x[:, :, :100], 3 * x[:, :, 100:]), dim=2) for x in (q, k, v)]
    assert cpu_kernels.attention(*changed)[:, :, :100].equal(cpu_kernels.attention(q, k, v)[:, :, :100])


@needs_kernels
def test_large_scores_and_nan():
    q, k, v, grad = random_inputs(1, 64, 1, 1, 16)
    large = 100 * q, 100 * k, v, grad
    found = with_gradients(cpu_kernels.attention, *large)
    expected = with_gradients(exact, *(x.double() for x in large))
    assert (found[0].double() - expected[0]).abs().max() <= 0.01 * expected[0].abs().max()
    assert all(x.isfinite().all() for x in found)
    q[0, 0, 30, 3] = torch.nan
    y, *gradients = with_gradients(cpu_kernels.attention, q, k, v, grad)
    assert y[0, 0, 30].isnan().all() and not y[0, 0, :30].isnan().any() and not y[0, 0, 31:].isnan().any()
    assert all(x.isnan().any() for x in gradients)


@needs_kernels
def test_model_takes_it_where_it_can():
    """In training in bfloat16, with losses and gradients near those of plain attention."""
    config = GPTConfig(block_size=64, vocab_size=97, n_layer=2, n_head=4, n_kv_head=2, n_embd=64, pos='rope')
    text = torch.randint(97, (2, 65), generator=torch.Generator().manual_seed(0))
    results = []
    for uses_kernels in (False, True):
        model = GPT(config)
        use_faster_parts(model, uses_kernels)
        with torch.autocast('cpu', torch.bfloat16):
            loss = model(text[:, :-1], text[:, 1:])
        assert ('AttentionBackward' in graph(loss)) == uses_kernels
        results.append((loss, torch.autograd.grad(loss, list(model.parameters()))))
    (plain, plain_gradients), (ours, our_gradients) = results
    torch.testing.assert_close(ours, plain, rtol=1e-3, atol=0)
    for found, expected in zip(our_gradients, plain_gradients):
        assert (found - expected).norm() <= 0.02 * expected.norm()


def test_processor_with_bfloat16_but_without_a_compiler_says_so(monkeypatch, tmp_path):
    cpp.library.cache_clear()
    monkeypatch.setattr(torch.cpu, 'get_capabilities', lambda: dict(avx512_bf16=True))
    monkeypatch.setenv('HOME', str(tmp_path))
    monkeypatch.setenv('CXX', 'no-such-compiler')
    notes = []
    assert not cpu_kernels.is_usable(ALONE, notes)
    monkeypatch.setenv('CXX', 'false')  # a compiler that fails without a word
    assert not cpu_kernels.is_usable(ALONE, notes)
    assert notes == [
        'the model could be faster: kilogpt/devices/cpu_kernels.cpp cannot be compiled (rank 0: FileNotFoundError: '
        "[Errno 2] No such file or directory: 'no-such-compiler')",
        'the model could be faster: kilogpt/devices/cpu_kernels.cpp cannot be compiled (rank 0: false: )']
    assert not list(tmp_path.rglob('*.so*'))


def test_other_processors_say_nothing(monkeypatch):
    monkeypatch.setattr(torch.cpu, 'get_capabilities', dict)
    notes = []
    assert not cpu_kernels.is_usable(ALONE, notes) and not notes


def every_number():
    """All finite numbers in bfloat16 that a square does not take beyond its range."""
    numbers = torch.arange(2 ** 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    return numbers[numbers.abs() < 1e15]


def activation(form, x, factor):
    """cpu_kernels.activation of any number of numbers: zeros behind them fill the last block."""
    size = x.numel()
    inputs = [None if part is None else F.pad(part.flatten(), (0, -size % cpu_kernels.BLOCK))
              for part in (x, factor)]
    return cpu_kernels.activation(*inputs, *cpu_kernels.tables(form))[:size].view_as(x)


@needs_kernels
@pytest.mark.parametrize('form', cpu_kernels.ACTIVATIONS)
def test_activations_are_the_exact_ones_rounded_to_bfloat16(form):
    """At all numbers, with gradients; those below 1e-38 may become 0. Against model.py's in float64.

    The product with a factor is one of float32.
    """
    x = every_number().requires_grad_()
    generator = torch.Generator().manual_seed(0)
    factor, grad = (torch.randn(len(x), generator=generator).bfloat16() for _ in range(2))
    factor = factor.requires_grad_() if form in cpu_kernels.GATED else None
    inputs = [x] if factor is None else [x, factor]
    found = activation(form, x, factor)
    exact = [tensor.detach().double().requires_grad_() for tensor in inputs]
    expected = activate(form, *exact, None) if factor is None else activate(form, exact[1], exact[0])
    rounded = expected
    if factor is not None:
        rounded = activate(form, torch.ones_like(exact[1]), exact[0]).float() * factor.float()
    torch.testing.assert_close(found, rounded.bfloat16(), rtol=0, atol=2e-38)
    for ours, reference in zip(torch.autograd.grad(found, inputs, grad),
                               torch.autograd.grad(expected, exact, grad.double())):
        torch.testing.assert_close(ours.double(), reference, rtol=2 ** -8, atol=2e-38)


@needs_kernels
def test_activations_of_a_few_numbers_and_of_none():
    for size in (0, 1, 15, 17, 3 * cpu_kernels.BLOCK):
        x = torch.linspace(-2, 2, size).bfloat16()
        assert activation('gelu', x, None).equal(F.gelu(x.double()).bfloat16())
    assert activation('gelu', torch.tensor([torch.nan]).bfloat16(), None).isnan().all()


@needs_kernels
@pytest.mark.slow
@pytest.mark.parametrize('form', cpu_kernels.ACTIVATIONS)
def test_compiled_mlp_takes_its_activation_from_the_table(form, monkeypatch):
    """But not one that was edited, nor that of few numbers, of an odd number or of another dtype."""
    model = GPT(GPTConfig(n_layer=2, n_embd=32, n_head=4, mlp=form))
    first, second = (block.mlp for block in model.transformer.h.values())
    first.activate = edited = lambda form, h, gate: activate(form, h, gate).square()
    use_faster_parts(model, use_kernels=True)
    assert first.activate is edited
    h = torch.randn(512, 512, generator=torch.Generator().manual_seed(0)).bfloat16()
    h, gate = (h, h.flip(0)) if form in cpu_kernels.GATED else (h, None)
    x, factor = (h, None) if gate is None else (gate, h)
    expected = activation(form, x, factor)
    torch.compiler.reset()  # each form counts as another compilation of one function, of which it makes eight
    compiled = torch.compile(second.activate)
    assert compiled(form, h, gate).equal(expected)
    monkeypatch.setattr(cpu_kernels, 'activation', None)  # is not called
    compiled(form, h[:4], None if gate is None else gate[:4])
    compiled(form, h[1:, 1:], None if gate is None else gate[1:, 1:])
    compiled(form, h.float(), None if gate is None else gate.float())


@needs_kernels
@pytest.mark.slow
def test_run_with_it_follows_the_run_without(train):
    """Compiled in bfloat16, through train.py: what the parity tests in float32 do not reach."""
    options = '--compile=True', '--dtype=bfloat16', '--n_kv_head=2', '--eval_interval=12'
    runs = [train(*options, runner=run_script, env=env)
            for env in (dict(), dict(ONEDNN_MAX_CPU_ISA='AVX512_CORE'))]
    losses = [[line['loss'] for line in run.lines.values()] for run in runs]
    assert losses[0] != losses[1] and losses[0] == pytest.approx(losses[1], rel=5e-3)
    assert not any('cpu_kernels' in run.stdout for run in runs)
