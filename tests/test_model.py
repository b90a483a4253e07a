"""The model against transformers' GPT-2, itself with a cache, and the papers' formulas in float64.

Tolerances: float32 carries 6e-8 of a number. Logits here are of magnitude 1 to 10, sums of a few hundred
products through two blocks, so 1e-4 leaves room for the order of the sums and is far below the effect of any
wrong formula.
"""
import math
import random
import subprocess
import sys

import pytest
import torch
from helpers import ROOT, continue_texts
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from kilogpt.generate.draw import draw_alike, uniform
from kilogpt.generate.engine import Engine, ModelReader, Request
from kilogpt.layers.rope import rope_tables, rotate
from kilogpt.parallel.dtensor import fill
from kilogpt.run.metrics import flops_per_token
from kilogpt.weights.importing import read_weights
from kilogpt.weights.tensors import pad_rows
from model import GPT, GPTConfig

TINY = dict(block_size=16, vocab_size=97, n_layer=2, n_head=4, n_embd=32)  # 97 rows are padded to 128
MODERN = dict(pos='rope', norm='rmsnorm', mlp='relu2', qk_norm=True, n_kv_head=2, tie_weights=False,
              softcap=5.0, bias=False, value_pattern='NV', attention_gate=True, attention_conv=3, mlp_conv=2)
VARIANTS = dict(
    default={}, no_bias=dict(bias=False), gelu_tanh=dict(mlp='gelu_tanh'), relu2=dict(mlp='relu2'),
    swiglu=dict(mlp='swiglu'), rope=dict(pos='rope'), rmsnorm=dict(norm='rmsnorm'),
    qk_norm=dict(qk_norm=True), grouped=dict(n_kv_head=2), multi_query=dict(n_kv_head=1),
    untied=dict(tie_weights=False), softcap=dict(softcap=2.0),
    widths=dict(n_hidden=40, head_width=12, norm_eps=0.1),
    foreign=MODERN | dict(mlp='swiglu', n_hidden=40, head_width=12, norm_eps=0.1, rope_theta=100.0),
    modern=MODERN, modern_swiglu=MODERN | dict(mlp='swiglu', n_kv_head=1, bias=True))
ROPE = dict(pos='rope', rope_theta=100.0)
PARTS = dict(
    geglu=dict(mlp='geglu'), norms_after=dict(norm_place='after'), norms_both=dict(norm_place='both'),
    parallel=dict(parallel_block=True), qkv_bias=dict(bias_of='qkv'), other_biases=dict(bias_of='mlp+proj'),
    norm_over_all=dict(qk_norm=True, qk_norm_over='all', n_kv_head=2),
    some_features=dict(ROPE, rope_share=0.5), some_layers=dict(ROPE, rope_pattern='RN'),
    linear=dict(ROPE, rope_scaling='linear factor=4'),
    dynamic=dict(ROPE, rope_scaling='dynamic factor=2 original_max_position_embeddings=8'),
    llama3=dict(ROPE, rope_scaling='llama3 factor=8 low_freq_factor=1 high_freq_factor=4 '
                                   'original_max_position_embeddings=32'),
    yarn=dict(ROPE, rope_scaling='yarn factor=4 original_max_position_embeddings=32 beta_fast=4 beta_slow=1'),
    window=dict(window=3), windows=dict(ROPE, window=5, window_pattern='LS', rope_theta_window=10.0),
    wide_window=dict(window=16), scores=dict(attention_scale=0.7, attention_softcap=0.5, n_kv_head=2),
    capped_window=dict(attention_softcap=0.5, window=4, window_pattern='SL'),
    gate=dict(attention_gate=True, n_kv_head=2), convolution=dict(attention_conv=4, n_kv_head=2),
    mlp_convolution=dict(mlp_conv=4, parallel_block=True),
    sinks=dict(attention_sinks=True, n_kv_head=2), clamped=dict(mlp='swiglu_clamped'),
    capped_sinks=dict(attention_sinks=True, attention_softcap=0.5, window=4, window_pattern='SL'),
    latent=dict(ROPE, kv_latent=12, value_width=6),
    latent_queries=dict(ROPE, kv_latent=12, rope_width=2, q_latent=10, attention_sinks=True, window=3,
                        window_pattern='SL', attention_scale=0.7, bias=False),
    values=dict(value_pattern='VN', n_kv_head=2), values_everywhere=dict(ROPE, value_pattern='V'),
    scales=dict(embedding_scale=3.0, residual_scale=0.3, logit_scale=0.2, softcap=2.0),
    all_parts=dict(ROPE, norm='rmsnorm', mlp='geglu', norm_place='both', qk_norm=True, n_kv_head=2,
                   window=3, window_pattern='SL', rope_theta_window=10.0, rope_scaling='linear factor=2',
                   rope_share=0.5, attention_scale=0.5, attention_softcap=1.0, softcap=5.0, bias_of='qkv',
                   embedding_scale=2.0, parallel_block=True, residual_scale=0.5, rope_pattern='RRN',
                   value_pattern='NV', attention_conv=2, mlp_conv=3))
VARIANTS |= PARTS
variants = pytest.mark.parametrize('options', VARIANTS.values(), ids=VARIANTS)
few_variants = pytest.mark.parametrize('options', [{}, dict(pos='rope', n_kv_head=2), MODERN],
                                       ids=['default', 'rope', 'modern'])


def seeded(seed):
    return torch.Generator().manual_seed(seed)


def tokens(*shape, seed=0):
    return torch.randint(TINY['vocab_size'], shape, generator=seeded(seed))


def build(options=(), scale=0.25):
    """A tiny model with random parameters (norms, biases, padding rows), large enough that each matters."""
    model, generator = GPT(GPTConfig(**TINY | dict(options))).eval(), seeded(0)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(scale * torch.randn(p.shape, generator=generator) + (p.dim() == 1))
    return model


# --- against transformers -----------------------------------------------------------------------------------

@pytest.fixture(scope='module', params=['gelu_new', 'gelu'])
def gpt2(request, tmp_path_factory):
    """transformers' model, ours with its weights, the folder between them."""
    from transformers import GPT2Config, GPT2LMHeadModel
    torch.manual_seed(0)
    theirs = GPT2LMHeadModel(GPT2Config(
        vocab_size=97, n_positions=16, n_embd=32, n_layer=2, n_head=4, bos_token_id=0, eos_token_id=0,
        initializer_range=0.2, activation_function=request.param)).eval()
    with torch.no_grad():
        for p in theirs.parameters():  # biases and norms are trivial at the start, and would hide a mix-up
            p.add_(0.1 * torch.randn_like(p))
    folder = tmp_path_factory.mktemp('gpt2')
    theirs.save_pretrained(folder)
    arguments, weights, _ = read_weights(str(folder))
    ours = GPT(GPTConfig(**arguments), seed=None).eval()
    fill(ours.named_parameters(), lambda name, shape, rows: pad_rows(weights[name], shape, rows))
    return theirs, ours, folder


@torch.no_grad()
def test_logits_loss_and_greedy_text_equal_transformers(gpt2):
    theirs, ours, _ = gpt2
    idx = tokens(3, 16)
    torch.testing.assert_close(ours(idx), theirs(idx).logits, atol=1e-4, rtol=0)
    mean_loss = ours(idx[:, :-1], idx[:, 1:]) / (3 * 15)
    torch.testing.assert_close(mean_loss, theirs(idx, labels=idx).loss, atol=1e-4, rtol=0)
    text = theirs.generate(idx[:, :5], max_new_tokens=11, do_sample=False, eos_token_id=None, pad_token_id=0)
    assert continue_texts(ours, idx[:, :5], 11, temperature=0).equal(text)


@pytest.mark.parametrize('missing, present', [
    ('model.safetensors', 'config.json'), ('config.json', 'model.safetensors')])
def test_incomplete_folders_are_refused(tmp_path, missing, present):
    (tmp_path / present).write_text('{}')
    with pytest.raises(OSError, match=f'has no {missing}'):
        read_weights(str(tmp_path))


@pytest.mark.slow
def test_a_name_that_cannot_be_downloaded_is_exit_on_error(tmp_path):  # without a network: test_errors.py
    code = ('from kilogpt import configurator\n'
            'from kilogpt.weights import importing\n'
            'with configurator.exit_on_error(): importing.read_weights("gpt2")')
    done = subprocess.run([sys.executable, '-c', code], cwd=ROOT, capture_output=True, text=True,
                          env=dict(PATH='/usr/bin:/bin', HOME=str(tmp_path), HF_HOME=str(tmp_path),
                                   HF_HUB_OFFLINE='1'))
    assert done.returncode == 1 and 'Traceback' not in done.stderr
    last_line = done.stderr.splitlines()[-1]
    assert last_line.startswith('error: gpt2 is neither a folder nor in the Hugging Face cache')


# --- against the formulas -----------------------------------------------------------------------------------

def rope_angles(theta, scaling, R, T):
    """(frequency of each pair, factor of the R rotated features) from the definitions of the scalings."""
    name, *entries = scaling.split() or ['none']
    s = {key: float(value) for key, value in (entry.split('=') for entry in entries)}
    original = s.get('original_max_position_embeddings')
    if name == 'dynamic' and T > original:  # NTK-aware: theta grows with the length
        theta *= (s['factor'] * T / original - s['factor'] + 1) ** (R / (R - 2))
    frequencies, factor = [], 1.0
    for j in range(R // 2):
        f = theta ** (-2 * j / R)
        if name == 'linear':
            f /= s['factor']
        if name == 'llama3':  # Llama 3.1: by the wavelength
            wavelength = 2 * math.pi / f
            if wavelength > original / s['low_freq_factor']:
                f /= s['factor']
            elif wavelength > original / s['high_freq_factor']:
                smooth = (original / wavelength - s['low_freq_factor']) / (
                    s['high_freq_factor'] - s['low_freq_factor'])
                f = (1 - smooth) * f / s['factor'] + smooth * f
        if name == 'yarn':  # Peng et al. 2023, (23) and its code's find_correction_range
            low, high = (R * math.log(original / (beta * 2 * math.pi)) / (2 * math.log(theta))
                         for beta in (s['beta_fast'], s['beta_slow']))
            low, high = max(math.floor(low), 0), min(math.ceil(high), R - 1)
            ramp = min(max((j - low) / max(high - low, 0.001), 0), 1)
            f = f / s['factor'] * ramp + f * (1 - ramp)
            factor = 0.1 * math.log(s['factor']) + 1
        frequencies.append(f)
    return torch.tensor(frequencies).double(), factor


def reference(w, c, idx):
    """Logits (T, vocab_size) of one sequence (T,), from the formulas.

    A loop runs over the heads, the causal softmax is explicit, and complex numbers do the rotation.
    w: weights in float64 by name; c: the GPTConfig.
    """
    T, D = len(idx), c.head_width

    def linear(x, name):
        return x @ w[f'{name}.weight'].T + w.get(f'{name}.bias', 0)

    def rms(x, name, eps=c.norm_eps):  # Zhang and Sennrich 2019, (4)
        normalized = x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt()
        return normalized * w[f'{name}.weight'] + w.get(f'{name}.bias', 0)

    def norm(x, name):  # LayerNorm is RMSNorm of the centred x
        return rms(x - x.mean(-1, keepdim=True) if c.norm == 'layernorm' else x, name)

    def turn(x, layer):  # RoFormer (Su et al. 2021), 3.2.2: pair j of position t turns by t * theta^(-2j/R)
        if c.pos != 'rope' or c.rope_pattern[layer % len(c.rope_pattern)] == 'N':
            return x
        local = c.rope_theta_window and is_windowed(layer)
        theta, scaling = (c.rope_theta_window, '') if local else (c.rope_theta, c.rope_scaling)
        frequencies, factor = rope_angles(theta, scaling, c.rope_width or int(D * c.rope_share), T)
        P = len(frequencies)
        angle = torch.arange(T).double()[:, None] * frequencies
        z = torch.complex(x[:, :P], x[:, P:2 * P]) * torch.exp(1j * angle) * factor
        return torch.cat((z.real, z.imag, x[:, 2 * P:]), -1)

    def neighbours(x, factors):  # y_t = x_t + Σ_i f_i x_(t-i), each feature by itself
        y, factors = x.clone(), factors.view(x.size(1), -1)
        for t in range(T):
            for i in range(1, min(t, factors.size(1)) + 1):
                y[t] += factors[:, i - 1] * x[t - i]
        return y

    def is_windowed(layer):
        return c.window > 0 and c.window_pattern[layer % len(c.window_pattern)] == 'S'

    def latent_projections(x, name):  # DeepSeek-V2, (9) to (18); the rotated features come first
        R, N = c.rope_width, D - c.rope_width
        q = rms(linear(x, f'{name}.c_q_latent'), f'{name}.q_latent_norm', 1e-6) if c.q_latent else x
        both = linear(x, f'{name}.c_kv_latent')
        latent = rms(both[:, R:], f'{name}.kv_latent_norm', 1e-6)
        k = linear(latent, f'{name}.c_k')
        k = torch.cat([torch.cat((both[:, :R], k[:, h * N:(h + 1) * N]), -1) for h in range(c.n_head)], -1)
        return dict(q=linear(q, f'{name}.c_q'), k=k, v=linear(latent, f'{name}.c_v'))

    def attention(x, name, layer):
        heads = []
        if c.kv_latent:
            projected = latent_projections(x, name)
        else:
            projected = {p: linear(x, f'{name}.c_{p}') for p in 'qkv'}
        V = projected['v'].size(1) // c.n_kv_head
        if c.attention_conv:
            projected = {p: neighbours(y, w[f'{name}.convolution.{p}']) for p, y in projected.items()}
        if c.qk_norm and c.qk_norm_over == 'all':
            for p in 'qk':
                projected[p] = rms(projected[p], f'{name}.{p}_norm_all')
        if c.value_pattern[layer % len(c.value_pattern)] == 'V':
            gate = 2 * torch.sigmoid(linear(x[:, :32], f'{name}.value_embedding.gate'))
            embedding = w[f'{name}.value_embedding.table.weight'][idx]
            projected['v'] = projected['v'] + gate.repeat_interleave(D, dim=1) * embedding
        for h in range(c.n_head):
            # Consecutive query heads share a key/value head (Ainslie et al. 2023).
            g = h // (c.n_head // c.n_kv_head)
            q, k, v = (projected[p][:, i * W:(i + 1) * W] for p, i, W in (('q', h, D), ('k', g, D), ('v', g, V)))
            if c.qk_norm and c.qk_norm_over == 'head':
                q, k = rms(q, f'{name}.q_norm'), rms(k, f'{name}.k_norm')
            scores = turn(q, layer) @ turn(k, layer).T * (c.attention_scale or 1 / math.sqrt(D))
            if c.attention_softcap:
                scores = c.attention_softcap * torch.tanh(scores / c.attention_softcap)
            weights = scores.exp().tril()
            if is_windowed(layer):
                weights = weights.triu(1 - c.window)
            sink = w[f'{name}.sinks.scores'][h].exp() if c.attention_sinks else 0
            heads.append(weights / (weights.sum(-1, keepdim=True) + sink) @ v)
        if c.attention_gate:
            gate = 2 * torch.sigmoid(linear(x[:, :32], f'{name}.gate'))
            heads = [heads[h] * gate[:, h:h + 1] for h in range(c.n_head)]
        return linear(torch.cat(heads, -1), f'{name}.c_proj')

    def mlp(x, name):
        h = linear(x, f'{name}.c_fc')
        if c.mlp == 'gelu':
            h = h * 0.5 * (1 + torch.erf(h / math.sqrt(2)))
        elif c.mlp == 'gelu_tanh':  # Hendrycks and Gimpel 2016
            h = 0.5 * h * (1 + torch.tanh(math.sqrt(2 / math.pi) * (h + 0.044715 * h ** 3)))
        elif c.mlp == 'relu2':
            h = torch.where(h > 0, h * h, 0)
        else:  # Shazeer 2020, (6)
            gate = linear(x, f'{name}.c_gate')
            if c.mlp == 'swiglu_clamped':  # gpt-oss, 2025, footnote of 2.2, and its code
                gate, h = gate.clamp(max=7), h.clamp(-7, 7) + 1
                gate = gate * torch.sigmoid(1.702 * gate)
            elif c.mlp == 'geglu':
                gate = 0.5 * gate * (1 + torch.tanh(math.sqrt(2 / math.pi) * (gate + 0.044715 * gate ** 3)))
            else:
                gate = gate * torch.sigmoid(gate)
            h = gate * h
        return linear(h, f'{name}.c_proj')

    def norm_at(place, x, name):
        return norm(x, name) if c.norm_place in (place, 'both') else x

    x = w['transformer.wte.weight'][idx] * c.embedding_scale
    if c.pos == 'learned':
        x = x + w['transformer.wpe.weight'][:T]
    for i in range(c.n_layer):
        block = f'transformer.h.{i}'
        y = attention(norm_at('before', x, f'{block}.ln_1'), f'{block}.attn', i)
        y = x + c.residual_scale * norm_at('after', y, f'{block}.ln_1_after')
        h = norm_at('before', x if c.parallel_block else y, f'{block}.ln_2')
        h = mlp(neighbours(h, w[f'{block}.convolution.x']) if c.mlp_conv else h, f'{block}.mlp')
        x = y + c.residual_scale * norm_at('after', h, f'{block}.ln_2_after')
    head = w['transformer.wte.weight' if c.tie_weights else 'lm_head.weight'][:c.vocab_size]
    logits = norm(x, 'transformer.ln_f') @ head.T * c.logit_scale
    return c.softcap * torch.tanh(logits / c.softcap) if c.softcap else logits


@pytest.mark.parametrize('in_parts', [False, True])
@variants
def test_logits_loss_and_gradients_equal_the_formulas(monkeypatch, options, in_parts):
    """The loss is a sum over the valid targets, with none of the probability in the padding rows.

    in_parts: the loss is computed from four targets at a time.
    """
    model, idx, targets = build(options), tokens(2, 12), tokens(2, 12, seed=1)
    rows, of_logits = [], model.loss.of_logits  # rows: of each part that the loss is computed from

    def counted(logits, targets):
        rows.append(len(logits))
        return of_logits(logits, targets)

    model.loss.of_logits = counted
    monkeypatch.setattr('model.MAX_LOGITS', (5 if in_parts else 24) * model.config.padded_vocab_size)
    targets[0, :5] = -1  # left out
    w = {name: p.detach().double().requires_grad_() for name, p in model.named_parameters()}
    expected = torch.stack([reference(w, model.config, row) for row in idx])
    torch.testing.assert_close(model(idx).double(), expected, atol=1e-4, rtol=0)

    loss = model(idx, targets)
    of_targets = expected.log_softmax(-1).gather(-1, targets.clamp(min=0)[..., None])[..., 0]
    expected_loss = -of_targets[targets >= 0].sum()
    torch.testing.assert_close(loss.double(), expected_loss, atol=0, rtol=1e-5)
    with torch.no_grad():
        torch.testing.assert_close(model(idx, targets), loss)
    assert rows == ([4] * 12 if in_parts else [24] * 2)
    (3 * loss).backward()
    (3 * expected_loss).backward()
    largest = max(p.grad.abs().max() for p in w.values())
    # The terms of a gradient may cancel (in c_k.bias to zero), hence a floor of 1e-6 of the largest gradient.
    for name, p in model.named_parameters():
        error = (p.grad - w[name].grad).abs().max()
        tolerance = 1e-4 * w[name].grad.abs().max() + 1e-6 * largest
        assert error < tolerance, f'gradient of {name} is off by {error:.1e}'


def test_loss_in_parts_under_autocast_casts_the_heads_weight_once(monkeypatch):
    """And computes the sums of the parts' losses and gradients, to the bit."""
    model, x, targets = build(), torch.randn(2, 16, 32, generator=seeded(0)), tokens(2, 16)
    monkeypatch.setattr('model.MAX_LOGITS', 4 * model.config.padded_vocab_size)
    weight, losses, gradient = model.lm_head.weight, [], torch.zeros(model.lm_head.weight.shape)

    class CountCasts(TorchDispatchMode):
        n_casts = 0

        def __torch_dispatch__(self, operation, types, arguments=(), options=None):
            result = operation(*arguments, **(options or {}))
            if operation is torch.ops.aten._to_copy.default and result.dtype == torch.bfloat16:
                self.n_casts += result.shape == weight.shape
            return result

    with torch.autocast('cpu', torch.bfloat16), CountCasts() as counter:
        loss = model.loss(x, model.lm_head, targets)
    assert counter.n_casts == 1
    loss.backward()
    for part, part_targets in zip(x.flatten(0, 1).split(4), targets.flatten().split(4)):
        with torch.autocast('cpu', torch.bfloat16):
            part_loss = model.loss.of_hidden(part, weight, part_targets)
        gradient += torch.autograd.grad(part_loss, weight)[0]
        losses.append(part_loss.detach())
    assert loss.equal(sum(losses)) and weight.grad.equal(gradient) and len(losses) == 8


def test_rope_depends_on_the_distance_alone():
    model = GPT(GPTConfig(**TINY, pos='rope'))
    q, k = torch.randn(2, 1, 1, 1, 8, generator=seeded(0))

    def score(m, n):
        table = lambda position: rope_tables(model.config, torch.tensor([position]), 1)['whole']
        return (rotate(q, *table(m)) * rotate(k, *table(n))).sum().item()

    for m, n, shift in [(0, 0, 13), (3, 1, 5), (10, 0, 5)]:
        assert score(m, n) == pytest.approx(score(m + shift, n + shift), abs=1e-5)
    assert abs(score(5, 0) - score(6, 0)) > 1e-2


# --- weights, sizes, configs --------------------------------------------------------------------------------

def test_weights_depend_on_seed_and_name_alone():
    def weights(seed=1337, **options):
        torch.manual_seed(len(options))  # of no consequence
        return dict(GPT(GPTConfig(**TINY | options), seed).named_parameters())
    one, deeper, other_seed = weights(), weights(**MODERN | dict(n_layer=3)), weights(seed=1)
    shared = [name for name in one if name in deeper and one[name].shape == deeper[name].shape]
    assert len(shared) > 10
    for name in shared:
        ratio = math.sqrt(3 / 2) if name.endswith('c_proj.weight') else 1
        torch.testing.assert_close(one[name], ratio * deeper[name], atol=1e-7, rtol=0)
    matrices = [name for name in one if one[name].dim() == 2]
    assert not any(one[name].equal(other_seed[name]) for name in matrices)
    # a matrix's first draw over its std is its generator's: no two share one
    assert len({one[n].flatten()[0].item() * (2 if 'c_proj' in n else 1) for n in matrices}) == len(matrices)


@pytest.mark.parametrize('shape', [(37, 8192), (40, 8192), (1, 8), (6, 100_000), (400, 1001)])
def test_each_process_draws_the_rows_it_holds_and_they_are_those_of_the_whole(monkeypatch, shape):
    """Blocks of 8 rows, of one row, and of 65 rows, which are 65,065 elements: no whole number of vectors."""
    n_drawn, normal_ = [], torch.Tensor.normal_

    def counted(tensor, *arguments, **options):
        n_drawn.append(tensor.numel())
        return normal_(tensor, *arguments, **options)

    monkeypatch.setattr(torch.Tensor, 'normal_', counted)
    model, name = GPT(GPTConfig(**TINY), seed=None), 'transformer.h.0.mlp.c_fc.weight'
    whole = model.initial_value(name, shape, 1)
    assert len(set(whole[:, 0].tolist())) == shape[0]  # no two blocks are alike
    for start in range(0, shape[0] + 1, 1 + shape[0] // 40):
        for stop in {start, start + 1, start + 9, shape[0]}:
            if stop <= shape[0]:
                n_drawn.clear()
                rows = model.initial_value(name, shape, 1, slice(start, stop))
                assert rows.equal(whole[start:stop])
                assert sum(n_drawn) <= rows.numel() + 2 * max(2 ** 16, shape[1])


def test_zero_init_starts_each_block_as_the_identity():
    model = GPT(GPTConfig(block_size=8, vocab_size=50, n_layer=2, n_head=2, n_embd=8, zero_init=True))
    x = torch.randn(2, 8, 8)
    for block in model.transformer.h.values():
        assert torch.equal(block(x), x) and block.mlp.c_fc.weight.std() > 0.01


def test_value_embeddings_gates_and_convolutions_change_nothing_at_first():
    without, values, gates, convolutions = (GPT(GPTConfig(**TINY, **keys)) for keys in (
        {}, dict(value_pattern='VN'), dict(attention_gate=True), dict(attention_conv=3, mlp_conv=4)))
    assert values.num_params() == without.num_params() + 128 * 32 + 4 * 32  # a table, and a gate for each head
    assert gates.num_params() == without.num_params() + TINY['n_layer'] * 4 * 32
    assert convolutions.num_params() == without.num_params() + TINY['n_layer'] * 32 * (3 * 2 + 3)
    for model in (values, gates, convolutions):
        assert torch.equal(model(tokens(2, 16)), without(tokens(2, 16)))


def test_weights_start_as_gpt2s():
    model = GPT(GPTConfig(block_size=256, vocab_size=500, n_layer=8, n_head=4, n_embd=128, tie_weights=False))
    for name, p in model.named_parameters():
        if p.dim() == 1:
            assert p.eq(name.endswith('weight')).all(), name
        else:
            # A standard deviation from n draws errs by 1/sqrt(2n): 0.6% for the 16,384 draws of the smallest
            # matrix.
            std = 0.02 / math.sqrt(16) if 'c_proj' in name else 0.02
            assert p.std().item() == pytest.approx(std, rel=0.03) and abs(p.mean().item()) < 0.03 * std, name
    tied = GPT(GPTConfig(**TINY))
    assert tied.lm_head.weight is tied.transformer.wte.weight


@few_variants
def test_builds_on_the_meta_device_and_runs_in_bfloat16(options):
    with torch.device('meta'):
        model = GPT(GPTConfig(**TINY | options))
    assert all(tensor.is_meta for tensor in [*model.parameters(), *model.buffers()])
    loss, low = (m(tokens(2, 16), tokens(2, 16, seed=1)) for m in (build(options), build(options).bfloat16()))
    # bfloat16 keeps 8 bits.
    assert low.dtype == torch.float32 and low.item() == pytest.approx(loss.item(), rel=0.05)


def test_gpt2s_size():
    with torch.device('meta'):
        # The two terms are the published weights and the padding rows.
        assert GPT(GPTConfig()).num_params() == 124_439_808 + (50304 - 50257) * 768


@variants
def test_flops_per_token_equals_what_the_operations_count(options):
    """The counts are equal but for rounding, once one attention is added.

    PyTorch counts all of the causal square, the formula only the half that is needed, or a window's part.
    """
    model, T = build(options), 12
    backend = torch.nn.attention.SDPBackend.MATH
    with FlopCounterMode(display=False) as counter, torch.nn.attention.sdpa_kernel(backend):
        model(tokens(2, T), tokens(2, T)).backward()
    config = model.config
    seen = 0  # keys by all queries of all layers
    for layer in range(config.n_layer):
        window = min(config.window_of(layer) or T, T)
        # Papers take the mean of T / 2 keys for a causal square, which is that of continuous positions.
        seen += sum(min(t, window) for t in range(1, T + 1)) - window / 2
    # Values that are narrower than keys are computed with zeros beside them, which the formula does not count.
    width, needed = config.head_width, config.head_width + (config.value_width or config.head_width)
    attention = config.n_head * (12 * config.n_layer * T * width - 6 * seen / T * needed)
    assert counter.get_total_flops() == pytest.approx(2 * T * (flops_per_token(model, [T]) + attention), rel=1e-5)


@pytest.mark.parametrize('bad, message', [
    (dict(n_embd=30), 'n_embd=30 is not divisible by n_head=4: n_embd=32'),
    (dict(n_kv_head=3), 'n_kv_head=3 .* n_head=4'),
    (dict(n_kv_head=-1), 'n_kv_head'), (dict(n_kv_head=8), 'n_kv_head'),
    (dict(pos='alibi'), "pos is 'alibi': choose one of learned, rope"),
    (dict(norm='batchnorm'), "norm is 'batchnorm': choose one of layernorm, rmsnorm"),
    (dict(mlp='tanh'), "mlp is 'tanh': choose one of gelu, gelu_tanh, relu2, swiglu"),
    (dict(pos='rope', n_embd=20), 'pos=rope .* n_embd'), (dict(softcap=-1.0), 'softcap is -1.0'),
    (dict(mlp_conv=1), 'mlp_conv is 1, .*: set it to 0, or to 2 or more'),
    (dict(attention_conv=-2), 'attention_conv is -2: it cannot be negative'),
    (dict(dropout=1.0), 'dropout is 1.0'), (dict(dropout=-0.1), 'dropout is -0.1'),
    *((dict([(key, 0)]), f'{key} is 0')
      for key in ('block_size', 'vocab_size', 'n_layer', 'n_head', 'n_embd')),
], ids=str)
def test_impossible_configs_are_exit_on_error(bad, message):
    with pytest.raises(ValueError, match=f'^[^\n]*{message}[^\n]*$'):
        GPTConfig(**TINY | bad)


def test_dropout_is_on_in_training_alone():
    model, idx = build(dict(dropout=0.5)), tokens(2, 16)
    assert model(idx).equal(build()(idx)) and not model.train()(idx).equal(model(idx))


# --- the cache, and sampling --------------------------------------------------------------------------------

@variants
@torch.no_grad()
def test_logits_with_a_cache_equal_those_without(options):
    model, idx = build(options), tokens(3, 16)
    parts = [[16], [1] * 16, [5, 1, 1, 6, 3], [15, 1]]
    if 'dynamic' in options.get('rope_scaling', ''):  # turns a key by the length at which it was read
        parts = [[16]]
    for chunks in parts:
        cache = model.new_cache(3)
        # With a cache, the model returns the logits of each chunk's last position.
        logits = torch.cat([model(chunk, cache=cache) for chunk in idx.split(chunks, dim=1)], dim=1)
        last_positions = torch.tensor(chunks).cumsum(0) - 1
        torch.testing.assert_close(logits, model(idx)[:, last_positions], atol=1e-4, rtol=0)
    with pytest.raises(ValueError, match='17 positions, but block_size is 16'):
        model(idx[:, :1], cache=cache)


@variants
@torch.no_grad()
def test_rows_of_a_cache_have_lengths_of_their_own(options):
    """Rows are read in parts of drawn sizes, with padding, some of them alone, and are begun again or copied."""
    model, draw = build(options), random.Random(len(str(options)))
    texts = tokens(4, 16)
    cache, lengths = model.new_cache(4), [0] * 4
    for _ in range(16):
        rows = sorted(draw.sample(range(4), draw.randint(1, 4)))
        if draw.random() < 0.3:
            first, last = sorted(draw.sample(range(5), 2))
            rows = [*range(first, last)]
        if 'dynamic' in options.get('rope_scaling', ''):  # turns a key by the length at which it was read
            for row in rows:
                lengths[row] = cache.lengths[row] = 0
        counts = [draw.randint(0, min(draw.choice((1, 9)), 16 - lengths[row])) for row in rows]
        idx = torch.zeros(len(rows), max(1, *counts), dtype=torch.long)
        for i, (row, count) in enumerate(zip(rows, counts)):
            idx[i, :count] = texts[row, lengths[row]:lengths[row] + count]
            lengths[row] += count
        is_slice = rows == [*range(rows[0], rows[-1] + 1)]
        part = slice(rows[0], rows[-1] + 1) if is_slice else torch.tensor(rows)
        logits = model(idx, cache=cache.part(part, torch.tensor(counts)))
        assert cache.lengths.tolist() == lengths
        for i, (row, count) in enumerate(zip(rows, counts)):
            if count:
                expected = model(texts[row:row + 1, :lengths[row]])[0, -1]
                torch.testing.assert_close(logits[i, 0], expected, atol=1e-4, rtol=0)
        for row in range(4):
            if lengths[row] > 15 or draw.random() < 0.05:
                lengths[row] = cache.lengths[row] = 0
        source, target = draw.sample(range(4), 2)
        if draw.random() < 0.2:
            cache.copy_row(source, target, lengths[source])
            texts[target], lengths[target] = texts[source], lengths[source]


@few_variants
@pytest.mark.parametrize('prompt', [1, 7, 16, 20])
@torch.no_grad()
def test_greedy_text_equals_a_naive_loop(options, prompt):
    """Before and past block_size, where the window slides; rows of a batch do not see one another."""
    model, idx = build(options), tokens(3, prompt)
    naive = idx
    for _ in range(25):
        naive = torch.cat((naive, model(naive[:, -16:])[:, -1:].argmax(-1)), dim=1)
    assert continue_texts(model, idx, 25, temperature=0).equal(naive)
    assert continue_texts(model, idx[1:2], 25, temperature=0).equal(naive[1:2])


@few_variants
def test_the_compiled_step_is_one_graph_for_all_tokens(options):
    """The step is traced once, whatever the position.

    The graph does not read a number that only the device knows, because a CUDA graph cannot.
    """
    model, idx, graphs = build(options), tokens(2, 3), []
    expected = continue_texts(model, idx, 20, temperature=0)  # past block_size
    torch.compiler.reset()
    model.compile(backend=lambda graph, inputs: graphs.append(graph.code) or graph,
                  fullgraph=True, dynamic=False)
    engine = Engine(ModelReader(model, 3, model.new_cache(3)))
    for length, n_tokens in ((3, 20), (5, 18)):
        requests = engine.complete([Request(ids, n_tokens, 0) for ids in expected[:, :length].tolist()])
        assert [request.ids + request.tokens for request in requests] == expected.tolist()
    assert len(graphs) == 1 and 'item()' not in graphs[0]


VALUES = torch.tensor([2.0, 1.5, 1.0, 0.9, 0.5, 0.0, -1.0, -3.0])  # logits, the likeliest token first


@pytest.mark.parametrize('temperature, top_k, top_p, support', [
    (1.0, None, None, 8), (0.5, None, None, 8), (2.0, 2, None, 2), (1.0, 1, None, 1), (1.0, 100, 1.0, 8),
    (1.0, None, 0.5, 2), (1.0, None, 1e-6, 1), (1.5, None, 0.9, 6), (1.0, 2, 0.6, 1), (3.0, 6, 0.8, 5)])
def test_sampling_draws_from_the_stated_distribution(temperature, top_k, top_p, support):
    weights = [math.exp(value / temperature) for value in VALUES.tolist()]
    kept = weights[:top_k]
    # Keep the fewest tokens that reach top_p of the probability that top_k left.
    while top_p and sum(kept[:-1]) >= top_p * sum(weights[:top_k]):
        kept.pop()
    assert len(kept) == support
    n = 40_000
    places = [uniform(0, number) for number in range(n)]
    drawn = draw_alike(VALUES.expand(n, -1), places, temperature, top_k, top_p)
    counts = torch.tensor(drawn).bincount(minlength=8)
    for token, count in enumerate(counts.tolist()):
        p = kept[token] / sum(kept) if token < support else 0
        assert abs(count / n - p) <= 4 * math.sqrt(p * (1 - p) / n), token  # four standard errors


def test_draw_does_not_depend_on_the_order_of_tokens_that_are_equally_likely():
    logits = VALUES.repeat(3, 1)
    logits[:, 4] = logits[:, 3] + torch.tensor([-1e-7, 0, 1e-7])
    for number in range(200):
        assert len(set(draw_alike(logits, [uniform(1, number)] * 3, 1.0, 6, 0.9))) == 1


def test_logits_that_are_nan_are_an_error():
    with pytest.raises(ValueError, match='no probabilities for the next token, but NaN'):
        draw_alike(VALUES[None] / 0 * 0, [0.5], 1.0, 3, None)


@pytest.mark.parametrize('tie', [True, False])
def test_padding_rows_are_never_drawn(tie):
    model = build(dict(tie_weights=tie), scale=0.02)
    with torch.no_grad():
        model.lm_head.weight[97:] = 100.0
        model.transformer.ln_f.bias.fill_(1.0)
    for temperature in (0, 1, 10):
        assert continue_texts(model, tokens(8, 1), 50, temperature=temperature).max() < 97


def test_sampling_repeats_with_its_seed():
    model = build(scale=0.02)
    one, two, three = (continue_texts(model, tokens(2, 3), 40, seed) for seed in (1, 1, 2))
    assert one.equal(two) and not one.equal(three)
