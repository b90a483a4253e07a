"""Text on a CPU: packed linears, and a whole step of the GPT in one call, against the model itself."""
import copy
import importlib.util
import time

import pytest
import torch
from torch import nn

import model as model_file
from drawing import check_draws
from helpers import ROOT
from kilogpt.devices import cpp, cpu_step
from kilogpt.devices.cpu import PackedLinear
from model import GPT, GPTConfig
from test_edits import ALIBI, EDITS, MLP, apply_diff

pytestmark = [pytest.mark.quick, pytest.mark.skipif(cpu_step.problem() is not None,
                                                    reason=f'no cpu_step.cpp: {cpu_step.problem()}')]
SCALINGS = '', 'linear factor=4', 'yarn factor=4 original_max_position_embeddings=8'
GPT2 = dict(n_layer=2, n_head=4, n_embd=64, vocab_size=101, block_size=24)
LLAMA = dict(GPT2, pos='rope', norm='rmsnorm', mlp='swiglu', n_kv_head=2, bias=False)


def draw_shape(rng):
    """Keys of a small GPTConfig that a step computes."""
    kv_heads = rng.choice([1, 2, 3])
    keys = dict(n_layer=rng.randint(1, 3), n_kv_head=kv_heads, n_head=kv_heads * rng.randint(1, 3),
                block_size=24, vocab_size=rng.randint(20, 150), n_embd=rng.choice([24, 35, 64]),
                head_width=rng.choice([6, 16, 20]), n_hidden=rng.choice([33, 64, 130]),
                mlp=rng.choice(cpu_step.FORMS))
    for key, values in dict(
            norm=['rmsnorm'], pos=['rope'], bias=[False], bias_of=['qkv', 'proj+mlp'], qk_norm=[True],
            norm_place=['after', 'both'], parallel_block=[True], tie_weights=[False], softcap=[5.0],
            attention_softcap=[3.0], attention_scale=[0.2], embedding_scale=[4.0], residual_scale=[0.3],
            logit_scale=[0.5], norm_eps=[1e-3]).items():
        if rng.random() < 0.4:
            keys[key] = rng.choice(values)
    if rng.random() < 0.5:
        keys.update(window=rng.randint(1, 9), window_pattern=rng.choice(['S', 'SL', 'LS']))
    if 'qk_norm' in keys:
        keys['qk_norm_over'] = rng.choice(['head', 'all'])
    if 'pos' in keys:
        keys.update(rope_share=rng.choice([1.0, 0.5]), rope_pattern=rng.choice(['R', 'RN']),
                    rope_scaling=rng.choice(SCALINGS))
        if 'window' in keys:
            keys['rope_theta_window'] = rng.choice([0.0, 100.0])
    return keys


def build(keys, seed=0):
    """A GPT with weights, norms and biases that matter."""
    model = GPT(GPTConfig(**keys), seed=None).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            std = parameter.size(-1) ** -0.5 if parameter.dim() > 1 else 0.3
            parameter.normal_(float(parameter.dim() == 1), std, generator=generator)
    return model


def pack(linear, kind):
    return cpu_step.BlockedLinear(linear, kind, cpu_step.Memory(cpu_step.packed_bytes(linear, kind)))


@torch.inference_mode()
def read(model, separate_documents=False):
    """Logits of texts that grow by single tokens in rows of different lengths: 3 rows, then 2 of these."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(20, (3, 20), generator=generator)
    cache = model.new_cache(3, 22)
    starts = torch.tensor([0, 2, 1])[:, None] if separate_documents else None
    counts = torch.tensor([4, 2, 5])
    first_starts = None if starts is None else torch.zeros(3, 5, dtype=torch.long)
    logits = [model(tokens[:, :5], starts=first_starts, cache=cache.part(slice(0, 3), counts))]
    for i in range(5, 14):
        logits.append(model(tokens[:, i:i + 1], starts=starts, cache=cache))
    for i in range(14, 18):
        rows = torch.tensor([2, 0])
        starts_of_rows = None if starts is None else starts[rows]
        logits.append(model(tokens[rows, i:i + 1], starts=starts_of_rows, cache=cache.part(rows)))
    return torch.cat(logits).flatten(), cache.lengths


def test_step_of_drawn_models_equals_their_forward():
    """In float32, up to rounding: 1e-4 of the largest logit, as much as another order of sums makes of it."""
    def difference(keys):
        keys = GPT2 | keys
        for separate_documents in (False, True):
            model = build(keys)
            expected, lengths = read(model, separate_documents)
            cpu_step.prepare_for_text(model, torch.float32)
            if type(model.forward) is not cpu_step.FusedStep:
                return 'it is not computed in one call'
            found, our_lengths = read(model, separate_documents)
            error = (found - expected).abs().max() / expected.abs().max()
            if not error <= 1e-4 or not our_lengths.equal(lengths):
                return f'an error of {error:.1e}, lengths {our_lengths.tolist()}'
        return ''

    def draw(rng):
        while True:
            keys = draw_shape(rng)
            try:
                GPTConfig(**keys)
                return keys
            except ValueError:
                continue
    check_draws(draw, difference, seed=int(time.time()), seconds=1, at_least=8)


@pytest.mark.parametrize('kind, tolerance', [
    ('float32', 1e-6), ('widened', 1e-6), ('bfloat16', 1e-6), ('int8', 3e-5)])
@pytest.mark.parametrize('inputs, outputs', [(33, 70), (256, 32), (300, 5)])
def test_packed_linear_multiplies_what_it_says(kind, tolerance, inputs, outputs):
    """Against float64, with weights and inputs of that precision; those of 16 bits have errors of 1.5e-5."""
    generator = torch.Generator().manual_seed(inputs)
    linear = nn.Linear(inputs, outputs)
    nn.init.normal_(linear.weight, generator=generator)
    x = torch.randn(3, 7, inputs, generator=generator)
    weight, rounded = linear.weight.detach(), x
    if kind in ('widened', 'bfloat16'):
        weight = weight.bfloat16()
    if kind == 'bfloat16':
        rounded = x.bfloat16()
    if kind == 'int8':
        scale = weight.abs().amax(dim=1, keepdim=True) / 127
        weight = (weight / scale).round().double() * scale
    expected = rounded.double() @ weight.double().T + linear.bias.detach()
    largest = (rounded.double().abs() @ weight.double().abs().T).max()
    assert (pack(linear, kind)(x) - expected).abs().max() <= tolerance * largest


@pytest.mark.parametrize('kind', cpu_step.KINDS)
def test_row_depends_neither_on_other_rows_nor_on_threads(kind):
    linear = nn.Linear(300, 100)
    packed = pack(linear, kind)
    x = torch.randn(40, 300, generator=torch.Generator().manual_seed(0))
    whole, threads = packed(x), torch.get_num_threads()
    torch.set_num_threads(2)
    for rows in (1, 2, 3, 5, 8, 13):
        assert packed(x[20:20 + rows]).equal(whole[20:20 + rows])
    torch.set_num_threads(threads)


@pytest.mark.parametrize('dtype, quantize', [
    (torch.bfloat16, 'none'), (torch.bfloat16, 'int8'), (torch.float32, 'none')])
def test_text_alone_has_the_logits_that_it_has_in_a_batch(dtype, quantize):
    """To the bit, in each precision; and they are near those of the model."""
    model = build(dict(LLAMA, window=5))
    tokens = torch.randint(100, (9, 12), generator=torch.Generator().manual_seed(2))

    def continue_texts(model, tokens):
        cache = model.new_cache(len(tokens))
        return torch.cat([model(tokens[:, i:i + 1], cache=cache) for i in range(12)], dim=1)
    with torch.inference_mode():
        exact = continue_texts(model, tokens)
        cpu_step.prepare_for_text(model, dtype, quantize)
        whole = continue_texts(model, tokens)
        assert all(continue_texts(model, row[None])[0].equal(logits) for row, logits in zip(tokens, whole))
    assert (whole - exact).abs().mean() <= (0.04 if dtype == torch.bfloat16 else 1e-5) * exact.abs().mean()


@pytest.mark.parametrize('place', ['class', 'object', 'hook', 'module'])
def test_edited_model_keeps_its_forward(place, monkeypatch):
    """Its linears are packed all the same."""
    def edited(self, x):
        return self.c_proj(self.activate(self.form, self.c_fc(x), self.c_gate(x))) * 1.01

    model = build(LLAMA)
    if place == 'class':
        monkeypatch.setattr(model_file.MLP, 'forward', edited)
    elif place == 'object':
        model.transformer.h['1'].mlp.activate = lambda form, h, gate: gate * h
    elif place == 'hook':
        model.transformer.h['1'].mlp.register_forward_hook(lambda module, inputs, y: 2 * y)
    else:
        model.transformer.h['0'].attn.q_norm = nn.Tanh()
    expected, _ = read(model)
    cpu_step.prepare_for_text(model, torch.float32)
    assert 'forward' not in vars(model) and type(model.lm_head) is cpu_step.BlockedLinear
    torch.testing.assert_close(read(model)[0], expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize('title, keys', [(ALIBI, dict(pos='alibi')), (MLP, dict(mlp='reglu')), (None, {})])
def test_edits_of_the_model_file_are_noticed(title, keys, tmp_path):
    (tmp_path / 'model.py').write_text(open(f'{ROOT}/model.py').read())
    if title:
        apply_diff(EDITS[title], tmp_path)
    spec = importlib.util.spec_from_file_location('edited_model', tmp_path / 'model.py')
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(importlib.sys.modules, 'edited_model', module)
        spec.loader.exec_module(module)
        assert cpu_step.is_computed(module.GPT(module.GPTConfig(**LLAMA | keys))) == (title is None)


@pytest.mark.parametrize('keys', [
    dict(mlp='moe', n_experts=4), dict(attention_conv=3), dict(value_pattern='V'), dict(attention_gate=True),
    dict(pos='rope', rope_scaling='dynamic factor=2 original_max_position_embeddings=8')])
def test_model_with_other_parts_keeps_its_forward(keys):
    model = build(LLAMA | keys)
    expected, _ = read(model)
    cpu_step.prepare_for_text(model, torch.float32)
    assert 'forward' not in vars(model)
    torch.testing.assert_close(read(model)[0], expected, rtol=1e-4, atol=1e-4)


def test_copy_for_text_leaves_the_model_as_it_is():
    model = build(GPT2)
    before = copy.deepcopy(model.state_dict())
    prepared = cpu_step.copy_for_text(model, torch.float32)
    assert type(prepared.forward) is cpu_step.FusedStep and 'forward' not in vars(model)
    assert all(tensor.equal(before[name]) for name, tensor in model.state_dict().items())
    assert prepared.transformer.wpe.weight is model.transformer.wpe.weight
    torch.testing.assert_close(read(prepared)[0], read(model)[0], rtol=1e-4, atol=1e-4)


def test_weights_that_bfloat16_has_are_kept_in_it():
    linear = nn.Linear(64, 32)
    assert not cpu_step.is_narrow(linear.weight) and cpu_step.is_narrow(linear.weight.bfloat16().float())
    model = build(LLAMA).bfloat16().float()
    expected, _ = read(model)
    cpu_step.prepare_for_text(model, torch.float32)
    assert cpu_step.KINDS[model.lm_head.matrix.kind] == 'widened'
    torch.testing.assert_close(read(model)[0], expected, rtol=1e-4, atol=1e-4)


def test_without_a_compiler_pytorch_computes(monkeypatch, tmp_path):
    model = build(LLAMA)
    expected, _ = read(model)
    cpp.library.cache_clear()
    cpu_step.library.cache_clear()
    monkeypatch.setenv('HOME', str(tmp_path))
    monkeypatch.setenv('CXX', 'no-such-compiler')
    note = cpu_step.prepare_for_text(model, torch.float32)
    assert note.startswith('kilogpt/devices/cpu_step.cpp cannot be compiled: FileNotFoundError')
    assert type(model.lm_head) is PackedLinear
    torch.testing.assert_close(read(model)[0], expected, rtol=1e-4, atol=1e-4)


def test_second_process_does_not_compile(monkeypatch):
    cpu_step.library()
    cpp.library.cache_clear()
    cpu_step.library.cache_clear()
    monkeypatch.setenv('CXX', 'no-such-compiler')
    assert cpu_step.problem() is None
