"""The parts that a processor has in the model's place compute the same."""
import math

import pytest
import torch

from kilogpt.cpu import FastDropout, PlainAttention, use_faster_parts
from model import GPT, DotProductAttention, GPTConfig

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


@pytest.mark.parametrize('kv_heads', [4, 2])
def test_plain_attention_in_bfloat16_equals_the_fused_one(kv_heads):
    """Against the fused one in float64: outputs and gradients to bfloat16's 8 bits."""
    attention = PlainAttention(DotProductAttention(dropout=0.0))
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, heads, 32, 16, dtype=torch.float64).bfloat16().double()
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

    def __init__(self, window):
        super().__init__(dropout=0.0)
        self.window = window

    def forward(self, q, k, v, mask=None):
        seen = torch.ones(q.size(2), q.size(2), dtype=torch.bool).tril().triu(1 - self.window)
        return super().forward(q, k, v, mask=seen)


def test_attention_that_was_edited_is_not_replaced():
    model = GPT(GPTConfig(block_size=64, vocab_size=97, n_layer=3, n_head=4, n_kv_head=2, n_embd=32))
    first, second, third = model.transformer.h.values()
    first.attn.dot_product, second.attn.dot_product = WindowAttention(16), WindowAttention(64)  # 64 is all
    use_faster_parts(model)
    assert [type(block.attn.dot_product) for block in (first, second, third)] == [
        WindowAttention, PlainAttention, PlainAttention]


def graph(y):
    """Names of the operations that made a tensor."""
    names, stack = '', [y.grad_fn]
    while stack:
        node = stack.pop()
        names += f' {node.name()}'
        stack += [parent for parent, _ in node.next_functions if parent]
    return names


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
