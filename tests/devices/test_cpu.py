"""The parts that a processor has in the model's place compute the same."""
import math

import pytest
import torch

from helpers import graph
from kilogpt.devices import cpu, cpu_attention
from kilogpt.devices.cpu import (FastDropout, Int8Linear, PackedLinear, PlainAttention, can_pack,
                                 use_faster_parts)
from kilogpt.devices.grouped_products import group_products
from kilogpt.devices.parts import replace_all
from kilogpt.layers.attention import starts_of
from kilogpt.layers.preferences import use_preferences
from model import GPT, DotProductAttention, GPTConfig, cap

pytestmark = pytest.mark.quick


@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16])
@pytest.mark.parametrize('p', [0.1, 0.5, 0.9])
def test_dropout_keeps_its_share_and_scales_it(p, dtype):
    dropout, shape = FastDropout(p), (3, 7, 47_619)  # 999,999 elements: no whole number of draws
    x = torch.ones(shape, dtype=dtype, requires_grad=True)
    torch.manual_seed(1)
    y = dropout(x)
    y.sum().backward()
    is_kept = y != 0
    assert y.dtype == dtype
    assert y[is_kept].eq(torch.tensor(1 / (1 - p), dtype=dtype)).all()
    assert x.grad.equal(y)
    standard_error = math.sqrt(p * (1 - p) / is_kept.numel())
    assert is_kept.float().mean().item() == pytest.approx(1 - p, abs=5 * standard_error)
    # The four elements that share a draw are kept independently of each other.
    by_place = torch.stack([is_kept.flatten()[i:999_996:4] for i in range(4)]).float()
    assert (torch.corrcoef(by_place) - torch.eye(4)).abs().max() < 5 / math.sqrt(249_999)
    again = dropout(x)
    assert (again != 0).eq(is_kept).float().mean().item() == pytest.approx(p ** 2 + (1 - p) ** 2, abs=2e-3)
    torch.manual_seed(1)
    assert dropout(x).equal(y)


@pytest.mark.parametrize('kv_heads, length', [(4, 32), (2, 32), (2, 600)])
def test_plain_attention_in_bfloat16_equals_the_fused_one(kv_heads, length):
    """Against the fused one in float64: outputs and gradients to bfloat16's 8 bits. 600 are three parts."""
    attention = PlainAttention(DotProductAttention(dropout=0.0))
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, heads, length, 16, dtype=torch.float64).bfloat16().double()
               for heads in (4, kv_heads, kv_heads))
    results = []
    for dtype in (torch.float64, torch.bfloat16):
        inputs = [x.to(dtype, copy=True).requires_grad_() for x in (q, k, v)]
        y = attention(*inputs)
        y.square().sum().backward()
        results.append([y, *(x.grad for x in inputs)])
        assert ('Softmax' if dtype == torch.bfloat16 else 'ScaledDot') in graph(y)
    for exact, plain in zip(*results):
        assert (plain.double() - exact).abs().max() < 0.03 * exact.abs().max()


class WindowAttention(DotProductAttention):
    """An edit: each position sees the last `window` ones."""

    def __init__(self, window, when=(True, False)):
        super().__init__(dropout=0.0)
        self.window, self.when = window, when

    def forward(self, q, k, v, mask=None):
        if self.training not in self.when:
            return super().forward(q, k, v, mask=mask)
        seen = torch.ones(q.size(2), q.size(2), dtype=torch.bool).tril().triu(1 - self.window)
        return super().forward(q, k, v, mask=seen)


def test_attention_that_was_edited_is_not_replaced():
    model = GPT(GPTConfig(block_size=64, vocab_size=97, n_layer=3, n_head=4, n_kv_head=2, n_embd=32))
    first, second, third = model.transformer.h.values()
    first.attn.dot_product, second.attn.dot_product = WindowAttention(16), WindowAttention(64)  # 64 is all
    use_faster_parts(model)
    assert [type(block.attn.dot_product) for block in (first, second, third)] == [
        WindowAttention, PlainAttention, PlainAttention]


@pytest.mark.parametrize('is_training', [True, False])
def test_attention_that_was_edited_in_training_or_in_evaluation_alone_is_not_replaced(is_training):
    cpu.ARE_PLAIN.clear()
    model = GPT(GPTConfig(block_size=64, vocab_size=97, n_layer=1, n_head=4, n_embd=32))
    attention = model.transformer.h['0'].attn
    attention.dot_product = WindowAttention(16, when=(is_training,))
    use_faster_parts(model)
    assert type(attention.dot_product) is WindowAttention and attention.dot_product.training


def test_faster_parts_stand_everywhere_and_change_no_parameter():
    model = GPT(GPTConfig(block_size=16, vocab_size=97, n_layer=2, n_head=4, n_embd=32, dropout=0.1))
    names = list(model.state_dict())
    weights = dict(model.named_parameters())
    use_faster_parts(model)
    assert list(model.state_dict()) == names
    assert all(parameter is weights[name] for name, parameter in model.named_parameters())
    dropouts = [module for module in model.modules() if isinstance(module, torch.nn.Dropout)]
    assert len(dropouts) == 1 + 2 * 3 and all(isinstance(module, FastDropout) for module in dropouts)
    assert all(isinstance(block.attn.dot_product, PlainAttention) for block in model.transformer.h.values())
    x = torch.randint(97, (2, 16), generator=torch.Generator().manual_seed(0))
    expected = GPT(model.config).eval()(x)
    torch.testing.assert_close(model.eval()(x), expected, atol=0, rtol=0)


@pytest.mark.parametrize('changes, is_fast', [
    (dict(window=9, window_pattern='SL'), True), (dict(attention_softcap=5.0, window=9), False),
    (dict(window=9, dropout=0.1), False)], ids=['window', 'softcap', 'dropout'])
def test_documents_and_windows_with_faster_parts_train_as_without(changes, is_fast, monkeypatch):
    """The loss and each gradient. Attention with a cap, or with dropout in training, takes masks."""
    calls, attention = [], cpu_attention.attention
    monkeypatch.setattr(cpu_attention, 'attention', lambda *args: calls.append(1) or attention(*args))
    config = GPTConfig(block_size=64, vocab_size=97, n_layer=2, n_head=4, n_kv_head=2, n_embd=32, **changes)
    x = torch.randint(20, (2, 64), generator=torch.Generator().manual_seed(0))
    starts, losses, gradients = starts_of(x, 0), [], []
    for is_faster in (False, True):
        model = GPT(config)
        if is_faster:
            use_faster_parts(model)
        if not config.dropout:
            losses.append(model(x, x, starts))
        losses.append(model.eval()(x, x, starts))
        losses[-1].backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
        model.train()(x, x, starts)
    assert len(calls) == (6 if is_fast else 2 if config.dropout else 0)  # layers × passes
    without, with_parts = losses[:len(losses) // 2], losses[len(losses) // 2:]
    torch.testing.assert_close(with_parts, without, atol=0, rtol=1e-6)
    torch.testing.assert_close(gradients[1], gradients[0], atol=1e-5, rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize('dtype, tolerance', [(torch.float32, 1e-6), (torch.bfloat16, 4e-3)])
@pytest.mark.parametrize('vocab_size, softcap, reduction', [(97, 15.0, 'sum'), (97, 0.0, 'none'), (128, 0.0, 'sum')])
def test_compiled_cross_entropy_equals_the_eager_one(vocab_size, softcap, reduction, dtype, tolerance):
    """The loss to float32's digits, and the logits' gradients to those of their dtype; -1 is left out."""
    model = GPT(GPTConfig(vocab_size=vocab_size, n_layer=1, n_embd=32, n_head=4, softcap=softcap))
    if reduction == 'none':
        use_preferences(model, 0.1)
    use_faster_parts(model)
    generator = torch.Generator().manual_seed(0)
    logits = (5 * torch.randn(50, 128, generator=generator)).to(dtype).requires_grad_()
    targets = torch.randint(vocab_size, (50,), generator=generator)
    targets[[3, 17]] = -1
    exact = logits.detach().double().requires_grad_()
    expected = torch.nn.functional.cross_entropy(
        cap(exact, model.config)[:, :vocab_size], targets, ignore_index=-1, reduction=reduction)
    found = torch.compile(model.loss.of_logits)(logits, targets)
    assert model.loss.cross_entropy.__module__ == cpu.__name__
    torch.testing.assert_close(found, expected.float(), rtol=1e-5, atol=1e-5)
    weights = 0.5 + torch.rand(expected.shape, generator=generator)
    found.backward(weights)
    expected.backward(weights.type_as(expected))
    torch.testing.assert_close(logits.grad.double(), exact.grad, atol=tolerance, rtol=tolerance)
    assert not logits.grad[[3, 17]].any() and not logits.grad[:, vocab_size:].any()


def test_loss_that_was_edited_may_ask_for_each_targets_loss():
    model = GPT(GPTConfig(n_layer=1, n_embd=32, n_head=4))
    use_faster_parts(model)
    assert model.loss.cross_entropy.__module__ == cpu.__name__
    logits, targets = torch.randn(3, 8, generator=torch.Generator().manual_seed(0)), torch.tensor([4, -1, 0])
    found = model.loss.cross_entropy(logits, targets, 8, reduction='none')
    expected = torch.nn.functional.cross_entropy(logits, targets, ignore_index=-1, reduction='none')
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize('when', [(True, False), (True,), (False,)])
def test_cross_entropy_that_was_edited_is_not_replaced(when):
    """Nor one that was edited in training alone, or in evaluation alone."""
    def smoothed(logits, targets, vocab_size):
        return torch.nn.functional.cross_entropy(logits[:, :vocab_size], targets, ignore_index=-1, reduction='sum',
                                                 label_smoothing=0.1 * (torch.is_grad_enabled() in when))

    model = GPT(GPTConfig(n_layer=1, n_embd=32, n_head=4))
    model.loss.cross_entropy = smoothed
    use_faster_parts(model)
    assert model.loss.cross_entropy is smoothed


@pytest.mark.parametrize('form', ['swiglu', 'relu2'])
@pytest.mark.parametrize('dtype, sizes, tolerance', [
    (torch.float32, [5, 0, 11, 1], 1e-6), (torch.bfloat16, [0, 3, 29, 0], 2e-2), (torch.float32, [0] * 4, 0)])
def test_grouped_products_equal_the_loop(form, dtype, sizes, tolerance):
    """Outputs and all gradients, which are zeros for an expert that no token goes to, or where none came."""
    model = GPT(GPTConfig(n_layer=1, n_embd=32, n_head=4, mlp='moe', n_experts=4, expert_hidden=24,
                          expert_mlp=form))
    experts = model.transformer.h['0'].mlp.routed.experts
    generator, results = torch.Generator().manual_seed(0), []
    for parameter in experts.parameters():
        torch.nn.init.normal_(parameter, 0, 0.3, generator=generator)
    experts.to(dtype)
    x = torch.randn(sum(sizes), 32, generator=generator).to(dtype)
    for is_grouped in (False, True):
        if is_grouped:
            group_products(model, [torch.float32, torch.bfloat16])
        leaves = [x.clone().requires_grad_(), *experts.parameters()]
        y = experts(leaves[0], torch.tensor(sizes).cumsum(0))
        assert ('GroupedMm' in graph(y)) == (is_grouped and sum(sizes) > 0)
        results.append([y, *torch.autograd.grad(y.float().square().sum(), leaves)])
    for found, expected in zip(*results):
        assert found.shape == expected.shape and found.dtype == dtype
        scale = max(1, expected.abs().amax().item() if expected.numel() else 1)
        torch.testing.assert_close(found, expected, atol=tolerance * scale, rtol=0)
    for gradients in results[1][2:]:
        assert [bool(matrix.any()) for matrix in gradients] == [size > 0 for size in sizes]


@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16])
@pytest.mark.parametrize('bias', [True, False])
def test_packed_linear_computes_what_the_linear_does(bias, dtype):
    """Against float64 with the same rounded numbers. The tolerance is a rounding of the largest output."""
    if not can_pack(dtype):
        pytest.skip(f'oneDNN does not multiply in {dtype} here')
    torch.manual_seed(0)
    linear = torch.nn.Linear(96, 130, bias=bias)
    exact = torch.nn.Linear(96, 130, bias=bias).double()
    exact.load_state_dict({name: value.to(dtype).double() for name, value in linear.state_dict().items()})
    packed = PackedLinear(linear, dtype, n_rows=4)
    for shape in (1, 1), (4, 1), (1, 50), (3, 7):
        x = torch.randn(*shape, 96)
        y, expected = packed(x), exact(x.to(dtype).double())
        assert y.dtype == torch.float32 and y.shape == expected.shape
        assert (y - expected).abs().max() <= 4 * torch.finfo(dtype).eps * expected.abs().max()
    assert dtype == torch.float32 or (y - linear(x)).abs().max() > 1e-4  # in bfloat16 as told, not in float32


@pytest.mark.parametrize('bias', [True, False])
def test_linear_in_8_bits_is_near_the_linear(bias):
    """A weight is rounded by at most half of a step, a 254th of its row's largest; bfloat16 adds as much."""
    torch.manual_seed(0)
    linear = torch.nn.Linear(256, 96, bias=bias)
    with torch.no_grad():
        linear.weight *= torch.logspace(-3, 3, 96)[:, None]  # each row has a scale of its own
        linear.weight[5] = 0
    quantized = Int8Linear(linear)
    few, more = torch.randn(2, 2, 256), torch.randn(5, 1, 256)
    assert quantized(more).equal(linear(more))
    typical = few.norm(dim=-1, keepdim=True) * linear.weight.norm(dim=1) / 256 ** 0.5  # size of an output
    error = (quantized(few) - linear(few)).abs()
    assert error.max() > 0 and (error <= 0.04 * typical).all()


@pytest.mark.parametrize('options', [dict(), dict(pos='rope', mlp='swiglu', tie_weights=False, bias=False)])
def test_tokens_in_8_bits_are_drawn_as_likely(options):
    """The log-probabilities of the next token, which in this model differ by up to 4."""
    model = GPT(GPTConfig(block_size=16, vocab_size=97, n_layer=2, n_head=4, n_embd=32, **options)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter *= 5 if parameter.dim() > 1 else 1
    text, found = torch.randint(97, (1, 9), generator=torch.Generator().manual_seed(0)), []
    for is_quantized in (False, True):
        if is_quantized:
            names = [name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)]
            replace_all(model, torch.nn.Linear, Int8Linear)
            assert names and all(type(model.get_submodule(name)) is Int8Linear for name in names)
        cache = model.new_cache(1)
        steps = [model(text[:, i:i + 1], cache=cache).log_softmax(dim=-1) for i in range(9)]
        found.append(torch.cat(steps))
    assert found[0].max() - found[0].min() > 3
    difference = (found[1] - found[0]).abs().max()
    assert 0 < difference < 0.1
