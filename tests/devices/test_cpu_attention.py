"""Attention of documents and windows on CPUs, whose cost is that of what queries see."""
import functools
import subprocess
import sys

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from helpers import ROOT
from kilogpt.devices import cpu_attention, cpu_kernels
from kilogpt.devices.cpu_attention import attention

pytestmark = pytest.mark.quick
needs_kernels = pytest.mark.skipif(cpu_kernels.problem() is not None,
                                   reason=f'no cpu_kernels.cpp: {cpu_kernels.problem()}')
by_kernels = functools.partial(attention, use_kernels=True)
# Largest difference from the reference, as a part of its largest number, or of 1 if that is smaller.
TOLERANCES = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 1e-2}


def first_keys(*rows, window=None):
    """first (B, T) for rows of documents, each a list of lengths."""
    first = torch.stack([starts_of(lengths) for lengths in rows])
    if window is None:
        return first
    return torch.maximum(first, torch.arange(first.size(1)) - window + 1)


def starts_of(lengths):
    lengths = torch.tensor(lengths)
    return (lengths.cumsum(0) - lengths).repeat_interleave(lengths)


def random_documents(T, longest, generator):
    """Lengths whose sum is T."""
    lengths = []
    while sum(lengths) < T:
        length = int(torch.randint(1, longest + 1, (), generator=generator))
        lengths.append(min(length, T - sum(lengths)))
    return lengths


def random_inputs(B, T, H=2, G=2, D=8, dtype=torch.float64, seed=0):
    """q, k, v and the gradient of y, in the model's layout: views of (B, T, heads, D)."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(B, T, heads, D, generator=generator).to(dtype).transpose(1, 2)
            for heads in (H, G, G, H)]


def masked_attention(q, k, v, first):
    """`attention` by a matrix of all scores."""
    k, v = (x.repeat_interleave(q.size(1) // x.size(1), dim=1) for x in (k, v))
    positions = torch.arange(q.size(2))
    is_visible = (positions <= positions[:, None]) & (positions >= first[:, None, :, None])
    scores = (q @ k.mT) * q.size(-1) ** -0.5
    return scores.masked_fill(~is_visible, -torch.inf).softmax(dim=-1) @ v


def with_gradients(function, q, k, v, grad, first):
    inputs = [x.detach().clone().requires_grad_() for x in (q, k, v)]
    y = function(*inputs, first)
    y.backward(grad)
    return [y.detach(), *(x.grad for x in inputs)]


def check(inputs, first, function=attention):
    found = with_gradients(function, *inputs, first)
    expected = with_gradients(masked_attention, *(x.double() for x in inputs), first)
    for ours, reference in zip(found, expected):
        assert ours.dtype == inputs[0].dtype and ours.shape == reference.shape
        largest = max(1, float(reference.abs().max()))
        assert (ours.double() - reference).abs().max() <= TOLERANCES[ours.dtype] * largest


ROWS = {
    'one document': ([300], [300]),
    'lengths of 1': ([1] * 300, [299, 1]),
    'equal lengths': ([100] * 3, [50] * 6),
    'short and long': ([5, 200, 3, 3, 31, 32, 26], [1, 1, 64, 65, 63, 106]),
    'twenty each': ([20] * 15, [7, *[20] * 14, 13]),
}


@pytest.mark.parametrize('window', [None, 1, 3, 64, 100, 1000])
@pytest.mark.parametrize('rows', ROWS.values(), ids=ROWS)
def test_attention_equals_that_with_a_mask(rows, window):
    check(random_inputs(2, 300), first_keys(*rows, window=window))


@needs_kernels
@pytest.mark.parametrize('window', [None, 1, 3, 64, 100, 1000])
@pytest.mark.parametrize('rows', ROWS.values(), ids=ROWS)
def test_kernels_equal_attention_with_a_mask(rows, window):
    inputs = random_inputs(2, 300, H=4, dtype=torch.bfloat16)
    check(inputs, first_keys(*rows, window=window), by_kernels)


@needs_kernels
def test_kernels_at_other_lengths():
    """The longest one has several blocks of keys in the backward pass."""
    generator = torch.Generator().manual_seed(0)
    for T, longest, window in ((2, 1, None), (6, 6, 2), (64, 9, None), (1034, 900, None), (1034, 900, 400)):
        rows = [random_documents(T, longest, generator) for _ in range(2)]
        check(random_inputs(2, T, D=16, dtype=torch.bfloat16), first_keys(*rows, window=window), by_kernels)


@needs_kernels
def test_kernels_without_documents_and_windows_are_those_without_first():
    inputs = random_inputs(2, 300, H=4, dtype=torch.bfloat16)
    found = with_gradients(by_kernels, *inputs, torch.zeros(2, 300, dtype=torch.int64))
    expected = with_gradients(lambda q, k, v, first: cpu_kernels.attention(q, k, v), *inputs, None)
    assert all(x.equal(y) for x, y in zip(found, expected))


@pytest.mark.parametrize('dtype', TOLERANCES)
@pytest.mark.parametrize('H, G, D', [(2, 2, 16), (6, 2, 5), (3, 1, 1)])
def test_dtypes_and_grouped_heads(dtype, H, G, D):
    generator = torch.Generator().manual_seed(H)
    for T, longest, window in ((1, 1, None), (2, 2, 1), (77, 9, None), (230, 150, 3), (230, 230, 40)):
        rows = [random_documents(T, longest, generator) for _ in range(2)]
        check(random_inputs(2, T, H, G, D, dtype), first_keys(*rows, window=window))


def test_queries_that_see_none_of_the_first_512_keys_of_their_block():
    """Flash attention takes 512 keys at a time."""
    first = first_keys([1130, 20, 20, 30], window=700)
    assert any(blocks.before > 512 and max(map(max, blocks.firsts)) >= 0
               for blocks in cpu_attention.find_blocks(first) if blocks.firsts)
    check(random_inputs(1, 1200, dtype=torch.float32), first)


def test_first_may_rise_in_any_way():
    """Not only by one or to the query's own position."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(10):
        first = torch.randint(200, (2, 200), generator=generator).sort().values
        check(random_inputs(2, 200), torch.minimum(first, torch.arange(200)))


def test_no_positions_and_no_rows():
    for B, T in ((2, 0), (0, 3)):
        inputs = random_inputs(B, T, H=4)
        first = torch.zeros(B, T, dtype=torch.int64)
        assert [x.shape for x in with_gradients(attention, *inputs, first)] == [
            inputs[0].shape, *(x.shape for x in inputs[:3])]


def test_layout_of_the_inputs_does_not_matter():
    first = first_keys([30, 70, 200], [300], window=80)
    inputs = random_inputs(2, 300)
    expected = with_gradients(masked_attention, *inputs, first)
    others = [
        [x.contiguous() for x in inputs],
        [x.mT.contiguous().mT for x in inputs],
        [torch.cat((x.transpose(1, 2), x.transpose(1, 2)), dim=2)[:, :, :2].transpose(1, 2) for x in inputs],
        [torch.stack((x, x), dim=-1)[..., 0] for x in inputs],
    ]
    for q, k, v, grad in others:
        inputs = [x.detach().requires_grad_() for x in (q, k, v)]
        y = attention(*inputs, first)
        found = [y.detach(), *torch.autograd.grad(y, inputs, grad)]
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize('function, dtype', [
    (attention, torch.float32), pytest.param(by_kernels, torch.bfloat16, marks=needs_kernels)])
def test_row_depends_neither_on_other_rows_nor_on_the_run(function, dtype):
    inputs = random_inputs(3, 300, H=4, D=16, dtype=dtype)
    for first in (first_keys([60] * 5, [60] * 5, [300]), first_keys([300], [10] * 30, [150] * 2, window=40)):
        whole = with_gradients(function, *inputs, first)
        again = with_gradients(function, *inputs, first)
        assert all(x.equal(y) for x, y in zip(whole, again))
        for row in range(3):
            part = slice(row, row + 1)
            alone = with_gradients(function, *(x[part] for x in inputs), first[part])
            assert all(x.equal(y[part]) for x, y in zip(alone, whole))


@pytest.mark.parametrize('function', [attention, pytest.param(by_kernels, marks=needs_kernels)])
@pytest.mark.parametrize('first', [[0, 2, 0, 0], [0, 2, 2, 2], [-1, 0, 0, 0]])
def test_impossible_first_keys_are_an_error(function, first):
    q, k, v, _ = random_inputs(1, 4, dtype=torch.bfloat16)
    with pytest.raises((ValueError, RuntimeError), match='first must neither fall'):
        function(q, k, v, torch.tensor([first]))


def test_no_grad_and_autocast():
    q, k, v, _ = random_inputs(2, 100, dtype=torch.float32)
    first = first_keys([100], [30, 70])
    expected = masked_attention(q, k, v, first)
    with torch.no_grad():
        torch.testing.assert_close(attention(q, k, v, first), expected)
    with torch.autocast('cpu', torch.bfloat16):
        y = attention(q, k.bfloat16(), v, first)
    assert y.dtype == torch.bfloat16
    torch.testing.assert_close(y.float(), expected, rtol=0, atol=0.03)


def test_documents_do_not_compile_it_again():
    """With what autograd and the schemas of the operations need (opcheck)."""
    counter = CompileCounterWithBackend('aot_eager')
    compiled = torch.compile(lambda *inputs: attention(*inputs) * 1, backend=counter, fullgraph=True)
    inputs = random_inputs(2, 100, H=4)
    for rows in (([100], [100]), ([30, 70], [1] * 100), ([99, 1], [50, 50])):
        first = first_keys(*rows)
        found = with_gradients(compiled, *inputs, first)
        expected = with_gradients(attention, *inputs, first)
        assert all(x.equal(y) for x, y in zip(found, expected))
    assert counter.frame_count == 1
    q, k, v, grad = inputs
    kernels = torch.ops.kilogpt
    y, log_sums = kernels.visible_attention(q, k, v, first)
    checks = ['test_schema', 'test_faketensor']
    torch.library.opcheck(kernels.visible_attention, (q, k, v, first), test_utils=checks)
    torch.library.opcheck(kernels.visible_attention_backward, (grad, q, k, v, first, y, log_sums),
                          test_utils=checks)


def calls_for(first, monkeypatch):
    """The shapes (N, H, Q, K) of the scores in each call of flash attention in both passes."""
    calls = []

    def forward(q, k, v, **options):
        calls.append((*q.shape[:3], k.size(2)))
        return torch.zeros_like(q), torch.zeros(q.shape[:3])

    def backward(grad_y, q, k, v, y, log_sums, **options):
        calls.append((*q.shape[:3], k.size(2)))
        return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)

    with monkeypatch.context() as patch:
        patch.setattr(cpu_attention, 'flash_attention', forward)
        patch.setattr(cpu_attention, 'flash_attention_backward', backward)
        with_gradients(attention, *random_inputs(*first.shape, H=1, G=1, D=2), first)
    return calls


def test_cost_is_that_of_what_queries_see(monkeypatch):
    """Scores that are computed, in both passes."""
    def scores(first):
        return sum(N * H * Q * K for N, H, Q, K in calls_for(first, monkeypatch))

    assert scores(first_keys([4096])) == 2 * 4096 ** 2
    assert scores(first_keys([256] * 16)) == 2 * 16 * 256 ** 2
    lengths = [700, 300, 96, 1000, 400, 552, 1000, 48]
    assert scores(first_keys(lengths)) == 2 * sum(length ** 2 for length in lengths)
    most = cpu_attention.QUERIES + cpu_attention.MIN_RUN + cpu_attention.STEP  # keys with short documents
    assert scores(first_keys([20] * 204 + [16])) <= 2 * 4096 * most
    for window in (64, 256, 1000):
        assert scores(first_keys([4096], window=window)) <= 2 * 4096 * (window + most)
    generator = torch.Generator().manual_seed(0)
    for longest in (5, 50, 500):
        lengths = random_documents(4096, longest, generator)
        assert scores(first_keys(lengths)) <= 2 * sum(length * max(length, most) for length in lengths)


def test_equal_blocks_are_one_call(monkeypatch):
    """And so are equal rows, equal documents and short documents."""
    assert calls_for(torch.zeros(4, 200, dtype=torch.int64), monkeypatch) == 2 * [(4, 1, 200, 200)]
    assert calls_for(first_keys([50] * 4, [50] * 4), monkeypatch) == 2 * [(8, 1, 50, 50)]
    assert calls_for(first_keys([1024], window=64), monkeypatch) == 2 * [(1, 1, 64, 64), (15, 1, 64, 128)]
    rows = [random_documents(1024, 20, torch.Generator().manual_seed(row)) for row in range(2)]
    assert calls_for(first_keys(*rows), monkeypatch) == 4 * [(1, 1, 64, 64), (15, 1, 64, 96)]


MEMORY = '''
import torch
from kilogpt.devices.cpu_attention import attention

def train(T, first):
    q, k, v = (torch.randn(1, T, 2, 16).transpose(1, 2).requires_grad_() for _ in range(3))
    attention(q, k, v, first).sum().backward()

def peak():
    return int(open('/proc/self/status').read().split('VmHWM:')[1].split()[0])  # KiB

T, positions = 32768, torch.arange(32768)[None]
train(256, positions[:, :256] // 100 * 100)
before = peak()
train(T, positions // 1000 * 1000)
train(T, (positions - 255).clamp(min=0))
train(T, torch.maximum(positions // 3000 * 3000, positions - 63))
print((peak() - before) * 1024)
'''


@pytest.mark.slow
def test_no_matrix_of_all_scores_is_in_memory():
    """Which at 32,768 positions would take 1 GB as a mask alone."""
    done = subprocess.run([sys.executable, '-c', MEMORY], cwd=ROOT, check=True,
                          capture_output=True, text=True)
    assert int(done.stdout) < 2e8
