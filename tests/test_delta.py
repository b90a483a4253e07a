"""Gated DeltaNet: its chunked form, documents, the cache and gradients against the definition, step by step.

float64 throughout, so that a wrong term stands far above rounding, which is below 1e-12 here.
"""
import math
import random

import pytest
import torch

from kilogpt.generate.engine import Engine, ModelReader, Request
from kilogpt.layers import delta
from kilogpt.run.metrics import flops_per_token
from model import GPT, GPTConfig

HYBRID = dict(block_size=96, vocab_size=61, n_layer=3, n_head=2, n_embd=32, pos='rope', norm='rmsnorm', bias=False)
FORMS = dict(
    plain=dict(mixer_pattern='D'),
    grouped=dict(mixer_pattern='DA', delta_heads=4, delta_key_heads=2, delta_key_width=6, delta_value_width=12,
                 delta_negative=True, delta_conv=2),
    others=dict(mixer_pattern='DAD', attention_conv=3, mlp_conv=2, window=5, delta_norm_place='both', mlp='moe',
                n_experts=4, n_shared_experts=1, shared_gate=True, attention_gate=True, attention_gate_over='feature'))
forms = pytest.mark.parametrize('form', FORMS)


def draw_inputs(seed, T):
    """(q, k, v, decay, write, begins, state) of random sizes, in which documents and a first state may be missing."""
    generator, draw = torch.Generator().manual_seed(seed), random.Random(seed)
    B, H, K, V = (draw.randint(1, size) for size in (2, 3, 5, 6))
    K = draw.choice([K, K, K, 70])  # wide keys take longer chunks

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    q, k = (x / x.norm(dim=-1, keepdim=True) for x in (normal(B, H, T, K), normal(B, H, T, K)))
    decay = -normal(B, H, T).abs() * draw.choice([0.01, 1, 30])
    write = draw.choice([1, 2]) * normal(B, H, T).sigmoid()
    begins = None
    if draw.random() < 0.7:
        begins = torch.rand(draw.choice([1, B]), T, generator=generator) < draw.choice([0.02, 0.3, 1])
    return q, k, normal(B, H, T, V), decay, write, begins, draw.choice([None, normal(B, H, K, V)])


def build(form, **options):
    """A model in float64 whose parameters all differ from their first values."""
    model = GPT(GPTConfig(**HYBRID | FORMS[form] | options)).double().eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.2 * torch.randn(parameter.shape, generator=generator)
    return model


def all_logits(model, tokens, starts=None):
    """The logits of every position of tokens (B, T)."""
    forward, model.loss.forward = model.loss.forward, lambda x, head, targets: head(x)
    try:
        return model(tokens, tokens, starts=starts)
    finally:
        model.loss.forward = forward


def tokens_of(rows, T, seed=0):
    return torch.randint(61, (rows, T), generator=torch.Generator().manual_seed(seed))


def test_chunks_give_what_single_steps_give():
    """Lengths that the chunk does not divide, one token, documents of one token, decays that leave nothing."""
    seed = random.randrange(10 ** 6)
    print('seed', seed)
    for number in range(16):
        T = random.Random(seed + number).choice([1, 2, 3, 63, 64, 65, 130, 201])
        inputs = draw_inputs(seed + number, T)
        for found, expected in zip(delta.in_chunks(*inputs), delta.step_by_step(*inputs)):
            torch.testing.assert_close(found, expected, atol=1e-10, rtol=1e-10)


def test_gradients_of_chunks_are_those_of_finite_differences(monkeypatch):
    monkeypatch.setattr(delta, 'CHUNK', 4)  # chunks of 2 positions, since the keys are narrow
    generator = torch.Generator().manual_seed(0)
    shapes = (1, 2, 5, 2), (1, 2, 5, 2), (1, 2, 5, 1), (1, 2, 5), (1, 2, 5), (1, 2, 2, 1)
    inputs = [torch.rand(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    inputs[3] = -inputs[3]  # decays
    inputs = [x.requires_grad_() for x in inputs]
    for begins in (None, torch.tensor([[False, False, True, True, False]])):
        assert torch.autograd.gradcheck(lambda *x: delta.in_chunks(*x[:5], begins, x[5]), inputs)


@forms
def test_row_of_documents_gives_what_documents_give_alone(form):
    model, tokens, begins = build(form), tokens_of(2, 90), [0, 1, 2, 30, 64, 65, 77, 90]
    starts = torch.zeros_like(tokens)
    for begin in begins:
        starts[:, begin:] = begin
    packed = all_logits(model, tokens, starts)
    for begin, end in zip(begins, begins[1:]):
        alone = all_logits(model, tokens[:, begin:end])
        torch.testing.assert_close(packed[:, begin:end], alone, atol=1e-10, rtol=1e-10)


@forms
def test_cache_gives_what_whole_texts_give(form):
    """Rows of different lengths in one step, then token by token, and a row that begins again in a used cache."""
    model, tokens, counts = build(form), tokens_of(3, 90), torch.tensor([70, 5, 1])
    expected, rows, cache = all_logits(model, tokens), torch.arange(3), model.new_cache(3)
    found = model(tokens[:, :70], cache=cache.part(slice(0, 3), counts))
    torch.testing.assert_close(found[:, 0], expected[rows, counts - 1][:, :61], atol=1e-10, rtol=1e-10)
    for step in range(20):
        found = model(tokens.gather(1, (counts + step)[:, None]), cache=cache)
        torch.testing.assert_close(found[:, 0], expected[rows, counts + step][:, :61], atol=1e-10, rtol=1e-10)
    cache.lengths.zero_()
    found = model(tokens[:, :9], cache=cache)
    torch.testing.assert_close(found[:, 0], expected[:, 8, :61], atol=1e-10, rtol=1e-10)


def test_state_takes_the_place_of_keys_and_values_in_the_cache():
    model = build('grouped')
    with_state, with_keys, _ = model.new_cache(2).layers.values()
    assert with_state.keys.numel() == with_state.values.numel() == 0 and with_state.states.shape == (2, 4, 6, 12)
    assert with_keys.states.numel() == 0 and with_keys.keys.shape == (2, 2, 96, 16)
    assert not model.new_cache(2).can_go_back


def test_texts_of_one_batch_are_those_of_one_text():
    """Texts of different lengths that join, leave, pass block_size, and begin in rows that others have used."""
    model = build('grouped', block_size=24)

    def texts(rows):
        requests = [Request(tokens_of(1, n, seed=n)[0].tolist(), 12, temperature=0) for n in (7, 1, 20, 3, 7)]
        return [request.tokens for request in Engine(ModelReader(model, rows)).complete(requests)]

    assert texts(3) == texts(1)


def test_first_decays_are_those_of_mamba_2():
    model = GPT(GPTConfig(**HYBRID | dict(n_head=16, n_embd=64, mixer_pattern='D')))
    for block in model.transformer.h.values():
        rate, step = block.attn.decay.log_rate.exp(), torch.nn.functional.softplus(block.attn.decay.shift)
        assert 1 < rate.min() < 8 < rate.max() < 16 and 0.001 < step.min() < 0.01 < step.max() < 0.1
    assert not torch.equal(model.transformer.h['0'].attn.decay.shift, model.transformer.h['1'].attn.decay.shift)


def test_operations_are_those_of_products_attention_and_states():
    """Fewer than with attention in long documents, and the same for documents of any length without attention."""
    def count(pattern, length):
        return flops_per_token(GPT(GPTConfig(**HYBRID | dict(mixer_pattern=pattern))), [length])

    assert count('D', 2 ** 20) == count('D', 1) and count('DA', 2 ** 20) < count('A', 2 ** 20)
    more = GPT(GPTConfig(**HYBRID | dict(mixer_pattern='D')))
    matrices = sum(p.numel() for name, p in more.named_parameters() if p.dim() > 1 and 'wte' not in name)
    assert math.isclose(count('D', 9), 6 * (matrices + more.lm_head.weight.numel()) + 18 * 3 * 2 * 16 * 16)


@pytest.mark.parametrize('options, sentence', [
    (dict(mixer_pattern='DX'), "mixer_pattern is 'DX': it must consist of the letters A and D"),
    (dict(mixer_pattern='D', delta_heads=4, delta_key_heads=3), 'delta_key_heads=3 does not divide delta_heads=4'),
    (dict(delta_conv=1), 'delta_conv is 1: set it to 2 or more'),
    (dict(delta_key_width=-1), 'delta_key_width is -1: it cannot be negative'),
    (dict(delta_norm_place='x'), "delta_norm_place is 'x': choose one of")])
def test_impossible_heads_are_refused(options, sentence):
    with pytest.raises(ValueError, match=sentence):
        GPTConfig(**HYBRID | options)
