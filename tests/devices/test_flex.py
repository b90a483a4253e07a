"""Attention that skips blocks: its blocks are PyTorch's, and it computes the formula.

The last test compares values and gradients on a GPU. PyTorch's kernel for CPUs, which other tests run, does
not have a backward pass: their gradients are those of the operations that the compiler would make a kernel
of.
"""
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn.attention import flex_attention as torch_flex
from torch.utils._python_dispatch import TorchDispatchMode

from kilogpt.devices import cuda, flex
from kilogpt.layers.attention import ScoredAttention, build_mask as dense_mask

B, T, H, G, D = 3, 300, 4, 2, 32  # T is not a multiple of 128
CUDA = torch.device('cuda')
needs_gpu = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 0) or not flex.has_triton(),
    reason='needs a GPU of compute capability 8.0 or above, and Triton')


class Attention(nn.Module):
    """Attention by its formula, which notes its masks."""

    def __init__(self, softcap=0.0, dropout=0.0):
        super().__init__()
        self.softcap, self.dropout = softcap, dropout
        self.masks, self.heads = [], []

    def forward(self, q, k, v, mask=None):
        self.masks.append(mask)
        self.heads.append(k.size(1))
        mask = torch.ones(q.size(2), q.size(2), dtype=torch.bool).tril() if mask is None else mask
        k, v = (x.repeat_interleave(q.size(1) // x.size(1), dim=1) for x in (k, v))
        scores = q @ k.mT / q.size(-1) ** 0.5
        if self.softcap:
            scores = self.softcap * torch.tanh(scores / self.softcap)
        return scores.masked_fill(~mask, -torch.inf).softmax(dim=-1) @ v


class Model(nn.Module):
    """A model with what use_flex_attention asks for."""
    split_plan = dict(blocks='blocks')
    replaceable = dict(mask=('build_mask',), attention=('dot_product',))

    def __init__(self, *parts, head_width=D, build_mask=None):
        super().__init__()
        self.config = SimpleNamespace(n_head=H, n_kv_head=G, head_width=head_width, block_size=T)
        self.blocks = nn.ModuleDict({str(i): Block(part) for i, part in enumerate(parts)})
        self.build_mask = build_mask or dense_mask


class Block(nn.Module):
    def __init__(self, attention):
        super().__init__()
        self.dot_product = attention

    def forward(self, q, k, v, mask=None):
        return self.dot_product(q, k, v, mask=mask) * 2


def mask_of(first):
    """The build_mask of model.py, by its definition."""
    T = first.size(1)
    keys, queries = torch.meshgrid(torch.arange(T), torch.arange(T), indexing='xy')
    return ((keys >= first[..., None].cpu()) & (keys <= queries))[:, None].to(first.device)


def random_first(rows, length, window=None, documents=True, seed=0):
    """first (rows, length): documents of about 60 tokens, a window, or both."""
    generator = torch.Generator().manual_seed(seed)
    positions = torch.arange(length)
    first = torch.zeros(rows, length, dtype=torch.int64)
    if documents:
        begins = torch.rand(rows, length, generator=generator) < 1 / 60
        first = torch.where(begins, positions, 0).cummax(dim=1).values
    return torch.maximum(first, positions + 1 - window) if window else first


def random_heads(seed=0, length=T, width=D, **options):
    """q (B, H, length, width) and k, v (B, G, length, width), laid out as the model's are."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(B, length, heads, width, generator=generator).to(**options).transpose(1, 2)
            for heads in (H, G, G)]


def expected(q, k, v, first, softcap=0.0):
    """Attention in float64 on the CPU."""
    return Attention(softcap)(*(x.cpu().double() for x in (q, k, v)), mask=mask_of(first.cpu()))


def assert_close(actual, wanted, tolerance=1e-5):
    torch.testing.assert_close(actual.cpu().double(), wanted, atol=tolerance, rtol=tolerance)


CASES = dict(documents=dict(rows=B), window=dict(rows=1, documents=False, window=70),
             both=dict(rows=B, window=20), long_window=dict(rows=B, window=200))


# --- blocks -------------------------------------------------------------------------------------------------

@pytest.mark.quick
@pytest.mark.parametrize('length', [129, 200, 256, 640, 1000])
@pytest.mark.parametrize('window', [None, 1, 100, 128, 129, 300])
@pytest.mark.parametrize('documents', [True, False])
def test_blocks_are_those_of_pytorch(length, window, documents):
    """With the same strides, which the kernels rely on."""
    first = random_first(B, length, window, documents, seed=length)
    blocks = flex.find_blocks(first)
    wanted = torch_flex.create_block_mask(
        lambda b, h, query, key: (key >= first[b, query]) & (key <= query), B, None, length, length, 'cpu')
    pairs = [(getattr(wanted, f'{kind}_num_blocks'), getattr(wanted, f'{kind}_indices'))
             for kind in ('kv', 'full_kv', 'q', 'full_q')]
    fields = blocks[1:]
    for wanted_counts, wanted_numbers, counts, numbers in zip(*zip(*pairs), fields[::2], fields[1::2]):
        assert counts.equal(wanted_counts)
        has_meaning = torch.arange(numbers.size(-1)) < counts[..., None]
        assert numbers[has_meaning].equal(wanted_numbers[has_meaning])
        for tensor, other in ((counts, wanted_counts), (numbers, wanted_numbers)):
            assert (tensor.dtype, tensor.shape, tensor.stride()) == (other.dtype, other.shape, other.stride())
        assert numbers.min() >= 0 and numbers.max() < numbers.size(-1)


@pytest.mark.quick
def test_blocks_are_found_without_a_tensor_of_all_pairs():
    sizes = []

    class Sizes(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            result = function(*args, **kwargs or {})
            sizes.append(result.numel())
            return result

    first = random_first(1, 4096)
    with Sizes():
        flex.build_mask(first)
    assert max(sizes) <= 4096 + flex.BLOCK


@pytest.mark.quick
def test_rows_of_one_block_take_the_original_mask():
    first = random_first(B, flex.BLOCK)
    assert flex.build_mask(first).equal(mask_of(first))


# --- values and gradients -----------------------------------------------------------------------------------

@pytest.fixture
def without_kernel(monkeypatch):
    """Run the operations that the compiler would make a kernel of, which have gradients on a CPU too."""
    monkeypatch.setattr(torch_flex, '_validate_device', lambda *tensors: None)  # refuses gradients on the CPU
    compiled = torch.compile(flex.attend_to_blocks, backend='aot_eager', dynamic=False)
    monkeypatch.setattr(flex, 'compiled_attend_to_blocks', lambda: compiled)


@torch.no_grad()
@pytest.mark.parametrize('softcap, is_block_compiled', [
    pytest.param(softcap, compiled, marks=pytest.mark.slow)
    for softcap, compiled in ((0.0, True), (2.0, False), (2.0, True))])
def test_attention_is_the_formula_and_compiled_once_for_all_batches(softcap, is_block_compiled):
    """Compiled on its own, and as a part of a block."""
    torch.compiler.reset()
    original = Attention(softcap)
    block = Block(flex.FlexAttention(original)).eval()
    run = torch.compile(block, fullgraph=True) if is_block_compiled else block
    rows_compiled = set()
    for seed, (name, case) in enumerate(CASES.items()):
        first = random_first(length=T, seed=seed, **case)
        q, k, v = random_heads(seed)
        blocks = flex.build_mask(first)
        is_new = case['rows'] not in rows_compiled  # a mask for all rows is another shape
        rows_compiled.add(case['rows'])
        with torch._dynamo.config.patch(error_on_recompile=not is_new):
            assert_close(run(q, k, v, mask=blocks), 2 * expected(q, k, v, first, softcap))
    assert not original.masks


@torch.no_grad()
def test_queries_take_the_dtype_of_values(without_kernel):
    """Under autocast, a norm may leave queries and keys in float32."""
    first = random_first(B, T)
    q, k, v = random_heads()
    y = flex.FlexAttention(Attention())(q, k, v.bfloat16(), mask=flex.find_blocks(first))
    assert y.dtype == torch.bfloat16
    assert_close(y, expected(q, k, v, first), 0.03)


@pytest.mark.parametrize('softcap', [0.0, 2.0])
def test_gradients_are_those_of_the_formula(without_kernel, softcap):
    for case in (CASES['window'], CASES['both']):
        check_gradients(Block(flex.FlexAttention(Attention(softcap))), softcap, case, random_heads(), 1e-4)


@pytest.mark.parametrize('softcap, has_mask', [
    (0.0, True), pytest.param(2.0, True, marks=pytest.mark.slow), pytest.param(0.0, False, marks=pytest.mark.slow)])
def test_sinks_and_their_gradients_are_those_of_the_formula(without_kernel, softcap, has_mask):
    """Also if this process has only the last heads of those with sinks, as under context parallelism."""
    scored = ScoredAttention(0.0, softcap).double()
    scored.first_head = 3 * H
    first = random_first(B, T) if has_mask else torch.zeros(1, T, dtype=torch.int64)
    attention = flex.FlexAttention(scored, flex.find_blocks(torch.zeros(1, T, dtype=torch.int64)))
    q, k, v = random_heads()
    sinks = torch.linspace(-3, 6, 2 * H)  # those of another rank's heads come first
    actual = [x.detach().requires_grad_() for x in (q, k, v, sinks)]
    wanted = [x.detach().double().requires_grad_() for x in (q, k, v, sinks)]
    y = attention(*actual[:3], mask=flex.find_blocks(first) if has_mask else None, sinks=actual[3])
    y_wanted = scored(*wanted[:3], mask=mask_of(first), sinks=wanted[3])
    weights = torch.randn(y.shape, generator=torch.Generator().manual_seed(1))
    y.backward(weights)
    y_wanted.backward(weights.double())
    assert_close(y, y_wanted, 1e-4)
    for x, x_wanted in zip(actual, wanted):
        assert_close(x.grad, x_wanted.grad, 1e-4)
    assert not actual[3].grad[:H].any() and actual[3].grad[H:].all()


def check_gradients(run, softcap, case, heads, tolerance):
    first = random_first(length=T, **case)
    actual = [x.detach().requires_grad_() for x in heads]
    wanted = [x.detach().cpu().double().requires_grad_() for x in heads]
    y = run(*actual, mask=flex.find_blocks(first.to(heads[0].device)))
    y_wanted = 2 * expected(*wanted, first, softcap)
    weights = torch.randn(y.shape, generator=torch.Generator().manual_seed(1))
    y.backward(weights.to(y))
    y_wanted.backward(weights.to(y).cpu().double())
    assert_close(y, y_wanted, tolerance)
    for x, x_wanted in zip(actual, wanted):
        assert_close(x.grad, x_wanted.grad, tolerance)


# --- what goes to the original ------------------------------------------------------------------------------

@pytest.mark.quick
def test_dropout_goes_to_the_original_with_a_dense_mask():
    original = Attention(dropout=0.1)
    attention = flex.FlexAttention(original).train()
    first = random_first(B, T)
    q, k, v = random_heads()
    attention(q, k, v, mask=flex.find_blocks(first))
    assert original.masks[0].equal(mask_of(first))


@pytest.mark.quick
def test_no_mask_and_bool_masks_go_to_the_original():
    original = Attention()
    attention = flex.FlexAttention(original, flex.find_blocks(torch.zeros(1, T, dtype=torch.int64)))
    first = random_first(B, T)
    q, k, v = random_heads()
    mask = mask_of(first)
    attention(q, k, v)
    assert_close(attention(q, k, v, mask=mask), expected(q, k, v, first))
    assert original.masks == [None, mask]


@torch.no_grad()
def test_capped_scores_without_a_mask_take_causal_blocks_of_the_whole_length(without_kernel):
    original = Attention(softcap=2.0)
    causal = torch.zeros(1, T, dtype=torch.int64)
    attention = flex.FlexAttention(original, flex.find_blocks(causal)).eval()
    q, k, v = random_heads()
    assert_close(attention(q, k, v), expected(q, k, v, causal, 2.0))
    assert not original.masks
    q, k, v = random_heads(length=200)  # a prompt
    assert_close(attention(q, k, v), expected(q, k, v, causal[:, :200], 2.0))
    assert original.masks == [None]


# --- installation -------------------------------------------------------------------------------------------

@pytest.fixture
def gpu(monkeypatch):
    """What use_flex_attention asks a GPU for, to be changed by tests. Blocks stay on the CPU."""
    monkeypatch.setattr(torch.cuda, 'get_device_capability', lambda device: (9, 0))
    monkeypatch.setattr(flex, 'has_triton', lambda: True)
    return monkeypatch


@pytest.mark.quick
def test_a_model_gets_blocks_and_attention_that_takes_them(gpu):
    plain, capped = Attention(), Attention(softcap=2.0)
    model = Model(plain, capped)
    assert flex.use_flex_attention(model, 'cpu') is None
    first = random_first(B, T)
    assert isinstance(model.build_mask(first), flex.AttentionBlocks)
    parts = [block.dot_product for block in model.blocks.values()]
    assert [(type(part), part.original) for part in parts] == [
        (flex.FlexAttention, plain), (flex.FlexAttention, capped)]
    assert all(part.causal_blocks.first.shape == (1, T) for part in parts)
    assert plain.training


class Scaled(Attention):
    def forward(self, q, k, v, mask=None):
        return super().forward(q * 1.1, k, v, mask)


class OtherArguments(Attention):
    def forward(self, q, k, v, bias):
        return super().forward(q, k, v)


@pytest.mark.quick
@pytest.mark.parametrize('part', [Scaled(), OtherArguments(), nn.Identity()])
def test_edited_attention_stays_as_it_is(gpu, part):
    model = Model(Attention(), part)
    assert 'attention in model.py was edited' in flex.use_flex_attention(model, 'cpu')
    assert model.build_mask is dense_mask and model.blocks['1'].dot_product is part
    assert isinstance(model.blocks['0'].dot_product, Attention)


@pytest.mark.quick
@pytest.mark.parametrize('build_mask', [lambda first: mask_of(first) | True, lambda first, T: None])
def test_an_edited_mask_stays_as_it_is(gpu, build_mask):
    model = Model(Attention(), build_mask=build_mask)
    assert 'build_mask in model.py was edited' in flex.use_flex_attention(model, 'cpu')
    assert model.build_mask is build_mask


@pytest.mark.quick
@pytest.mark.parametrize('capability, has_triton, head_width, reason', [
    ((7, 5), True, D, 'compute capability 8.0 or above, and this one has 7.5'),
    ((8, 0), False, D, 'needs Triton'), ((8, 0), True, 8, 'head_width is 8')])
def test_a_gpu_without_the_kernel_keeps_the_model_as_it_is(gpu, capability, has_triton, head_width, reason):
    gpu.setattr(torch.cuda, 'get_device_capability', lambda device: capability)
    gpu.setattr(flex, 'has_triton', lambda: has_triton)
    model = Model(Attention(), head_width=head_width)
    assert reason in flex.use_flex_attention(model, 'cpu')
    assert model.build_mask is dense_mask and isinstance(model.blocks['0'].dot_product, Attention)


@torch.no_grad()
def test_heads_are_repeated_for_the_original_alone(gpu, without_kernel):
    original = Attention()
    model = Model(original).eval()
    flex.use_flex_attention(model, 'cpu')
    original.heads.clear()
    cuda.use_fused_attention(model, CUDA, 'float32')
    q, k, v = random_heads()
    seen = []
    model.blocks['0'].dot_product.register_forward_pre_hook(lambda module, inputs: seen.append(inputs))
    first = random_first(B, T)
    assert_close(model.blocks['0'](q, k, v, mask=model.build_mask(first)), 2 * expected(q, k, v, first))
    assert seen[0][1].size(1) == G and not original.heads
    model.blocks['0'](q, k, v)
    assert original.heads == [H]


# --- a GPU --------------------------------------------------------------------------------------------------

@needs_gpu
@pytest.mark.parametrize('dtype, tolerance', [(torch.float32, 1e-4), (torch.bfloat16, 0.05)])
@pytest.mark.parametrize('softcap', [0.0, 2.0])
@pytest.mark.parametrize('is_block_compiled', [False, True])
def test_values_and_gradients_on_a_gpu(is_block_compiled, softcap, dtype, tolerance):
    torch.compiler.reset()
    block = Block(flex.FlexAttention(Attention(softcap)))
    run = torch.compile(block, fullgraph=True) if is_block_compiled else block
    for case in CASES.values():
        heads = random_heads(width=64, device=CUDA, dtype=dtype)
        check_gradients(run, softcap, case, heads, tolerance)
