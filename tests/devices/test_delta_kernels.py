"""The recurrence by flash-linear-attention's kernel, or on a CPU by a stand-in of its signature, step by step."""
import re
import sys
from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional as F

from kilogpt.devices import delta_kernels
from kilogpt.devices.parts import find_parts
from kilogpt.layers.delta import DeltaRule, step_by_step
from model import GPT, GPTConfig

HYBRID = GPTConfig(block_size=80, vocab_size=61, n_layer=2, n_head=2, n_embd=32, pos='rope', norm='rmsnorm',
                   bias=False, mixer_pattern='DA', delta_heads=4, delta_key_heads=2, delta_key_width=16,
                   delta_value_width=32, delta_negative=True)
CPU = torch.device('cpu')


def stand_in(q, k, v, g, beta, scale=None, initial_state=None, output_final_state=False,
             use_qk_l2norm_in_kernel=False, use_beta_sigmoid_in_kernel=False, allow_neg_eigval=False,
             state_v_first=False, cu_seqlens=None, cu_seqlens_cpu=None, chunk_indices=None, cp_context=None):
    """chunk_gated_delta_rule of fla-core 0.6.0: q, k (B, T, G, K), v (B, T, H, V), g, beta (B, T, H)."""
    assert initial_state is None and not output_final_state and use_qk_l2norm_in_kernel
    q, k = (F.normalize(x.float(), dim=-1).repeat_interleave(v.size(2) // x.size(2), dim=2) for x in (q, k))
    inputs = [x.transpose(1, 2) for x in (q * scale, k, v.float(), g, beta)]
    bounds = [0, v.size(1)]
    if cu_seqlens is not None:
        assert v.size(0) == 1 and cu_seqlens.dtype == torch.int64
        bounds = cu_seqlens.tolist()
        assert bounds[0] == 0 and bounds[-1] == v.size(1) and bounds == sorted(set(bounds))
    rows = [step_by_step(*(x[:, :, i:j] for x in inputs))[0] for i, j in zip(bounds, bounds[1:])]
    return torch.cat(rows, dim=2).transpose(1, 2).type_as(v), None


def install(monkeypatch, kernel):
    """Let `fla.ops.gated_delta_rule` be a module with this kernel."""
    monkeypatch.setitem(sys.modules, 'fla', SimpleNamespace())
    monkeypatch.setitem(sys.modules, 'fla.ops', SimpleNamespace())
    monkeypatch.setitem(sys.modules, 'fla.ops.gated_delta_rule', SimpleNamespace(chunk_gated_delta_rule=kernel))


def rules_of(model):
    return [type(getattr(*part)) for part in find_parts(model, 'recurrence')]


@pytest.mark.parametrize('has_documents', [False, True])
def test_kernel_gets_what_the_recurrence_gets(monkeypatch, has_documents):
    """The same loss and gradients of a whole model, in bfloat16 autocast; text and float32 do not call the kernel."""
    calls = []

    def counted(*inputs, **options):
        calls.append(options)
        return stand_in(*inputs, **options)

    model = GPT(HYBRID)
    tokens = torch.randint(61, (2, 80), generator=torch.Generator().manual_seed(0))
    starts = None
    if has_documents:
        starts = torch.zeros_like(tokens)
        starts[0, 30:], starts[0, 31:], starts[1, 64:] = 30, 31, 64

    def loss_and_gradients():
        model.zero_grad()
        with torch.autocast('cpu', torch.bfloat16):
            loss = model(tokens, tokens, starts=starts)
        loss.backward()
        return loss.detach(), torch.cat([p.grad.flatten() for p in model.parameters()])

    loss, gradients = loss_and_gradients()
    install(monkeypatch, counted)
    assert delta_kernels.use_delta_kernels(model, CPU, 'bfloat16') is None
    calls.clear()
    found, found_gradients = loss_and_gradients()
    assert len(calls) == 1 and (calls[0]['cu_seqlens'] is not None) == has_documents
    torch.testing.assert_close(found, loss, atol=0, rtol=5e-5)  # rounding of results to bfloat16
    assert (found_gradients - gradients).norm() < 0.01 * gradients.norm()
    model.eval()(tokens[:1, :9], cache=model.new_cache(1))
    model(tokens, tokens)
    assert len(calls) == 1


def test_kernel_that_differs_is_not_used(monkeypatch):
    """Other scales, documents that are not reset, gradients that are lost, an error: a note, and our own form."""
    def forget_documents(*inputs, cu_seqlens, **options):
        return stand_in(*inputs, **options)

    def lose_gradients_of_decays(q, k, v, g, beta, **options):
        return stand_in(q, k, v, g * 1.0 + 0.5 * (g.detach() - g), beta, **options)

    def fail(*inputs, **options):
        raise RuntimeError('no such instruction\nline 2')

    for kernel, sentence in (
            (lambda *inputs, scale, **options: stand_in(*inputs, scale=2 * scale, **options), 'results differ by 100%'),
            (forget_documents, 'results differ'), (lose_gradients_of_decays, 'gradients of decays differ by 50%'),
            (fail, r'fail here \(RuntimeError: no such instruction\)')):
        model = GPT(HYBRID)
        install(monkeypatch, kernel)
        assert re.search(sentence, delta_kernels.use_delta_kernels(model, CPU, 'bfloat16'))
        assert rules_of(model) == [DeltaRule]


def test_note_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, 'fla', None)
    assert 'pip install' in delta_kernels.use_delta_kernels(GPT(HYBRID), CPU, 'bfloat16')
    model = GPT(HYBRID)
    assert delta_kernels.use_delta_kernels(model, CPU, 'float32') is None and rules_of(model) == [DeltaRule]


@pytest.mark.skipif(not torch.cuda.is_available(), reason='needs a GPU')
def test_kernel_on_a_gpu_is_used():
    pytest.importorskip('fla.ops.gated_delta_rule')
    model = GPT(HYBRID)
    assert delta_kernels.use_delta_kernels(model, torch.device('cuda'), 'bfloat16') is None
    assert rules_of(model) == [delta_kernels.KernelDeltaRule]
