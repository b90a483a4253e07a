"""Export and import of weights, compared with transformers, its tokenizers, and nanoGPT's format.

All weights, norms and biases included, are random with a standard deviation of 0.2, so that swapped tensors
cause errors far above the tolerance of 1e-4.
"""
import dataclasses
import json
import os
import re
import shutil
import socket

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from helpers import continue_texts, run_forked

from data.tokens.tokenizer import ByteTokenizer, CharTokenizer, get_tokenizer
from kilogpt.convert.__main__ import inspect
from kilogpt.optim import build_adamw
from kilogpt.run import checkpoint
from kilogpt.weights import exporting
from kilogpt.weights.exporting import export_weights
from kilogpt.weights.importing import import_weights, read_weights
from kilogpt.weights.tensors import pad_rows
from model import GPT, GPTConfig

TINY = dict(block_size=64, vocab_size=97, n_layer=2, n_head=4, n_embd=32)  # 97 rows are padded to 128
LLAMA = dict(pos='rope', norm='rmsnorm', mlp='swiglu', n_kv_head=2, bias=False, tie_weights=False)
MIXTURE = LLAMA | dict(mlp='moe')
FORMS = dict(
    gpt2=dict(mlp='gelu_tanh'),
    gpt2_plain=dict(bias=False, tie_weights=False),
    llama=LLAMA,
    llama_bias=LLAMA | dict(bias=True, tie_weights=True, dropout=0.1),
    qwen3=LLAMA | dict(qk_norm=True, n_kv_head=1),
    qwen3_tied=LLAMA | dict(qk_norm=True, tie_weights=True),
    mixtral=MIXTURE | dict(n_experts=5, n_active_experts=2, router_balance='none'),
    qwen3moe=MIXTURE | dict(qk_norm=True, router_balance='none', moe_first_layer=1, expert_hidden=24),
    glm4moe=MIXTURE | dict(qk_norm=True, router='sigmoid', n_shared_experts=2, moe_first_layer=1,
                           expert_hidden=24),
    glm4moe_one=MIXTURE | dict(router='sigmoid', n_active_experts=1, n_shared_experts=1))
ASCII = '\n' + ''.join(chr(c) for c in range(ord(' '), ord(' ') + 90))
CHARS = CharTokenizer(ASCII + 'éß✓🙂🇩 ').meta()
PROMPT = torch.randint(97, (2, 9), generator=torch.Generator().manual_seed(1))


def randomize(model, seed=0):
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(0.2 * torch.randn(p.shape, generator=generator) + (p.dim() == 1))
    return model.eval()


def make_run(folder, options=(), meta=CHARS, moments=False):
    """Make a run's folder with a checkpoint at iteration 3; returns (path, model, optimizer)."""
    model = randomize(GPT(GPTConfig(**TINY | dict(options))))
    named = list(model.named_parameters())
    optimizer = build_adamw(named, 1e-3, 0.1, (0.9, 0.95)) if moments else None
    if moments:
        model(PROMPT, PROMPT).backward()
        optimizer.step()
    save_run(folder, model, named, optimizer, meta)
    return str(folder), model, optimizer


def save_run(folder, model, named, optimizer=None, meta=CHARS):
    state = dict(iteration=3, tokens=2304, val_loss=2.5, best_val_loss=2.5, skipped=[0, 0], wandb_id=None,
                 scaler={}, model=dataclasses.asdict(model.config), tokenizer=meta,
                 config=dict(dataset='x', learning_rate=1e-3, beta2=0.95))
    return checkpoint.Saver(str(folder), 1).save(3, named, optimizer, state)


def weights_of(model):
    """{name: parameter} without the padding rows of the vocabulary."""
    return {name: p[:model.config.vocab_size] if name in ('transformer.wte.weight', 'lm_head.weight') else p
            for name, p in model.named_parameters()}


def model_from(source):
    """Our model with the weights that read_weights returns."""
    arguments, tensors, _ = read_weights(str(source))
    model = GPT(GPTConfig(**arguments), seed=None)
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(pad_rows(tensors[name], p.shape))
    return model.eval()


def change_json(path, changes):
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@torch.no_grad()
def assert_same_predictions(ours, theirs):
    """Assert that logits agree within 1e-4, and that 50 greedy tokens are the same."""
    theirs.eval()
    logits = ours(PROMPT)
    assert logits.std() > 0.3
    torch.testing.assert_close(logits, theirs(PROMPT).logits, atol=1e-4, rtol=0)
    text = theirs.generate(PROMPT, max_new_tokens=50, do_sample=False, pad_token_id=0)
    assert text.size(1) == 59 and continue_texts(ours, PROMPT, 50, temperature=0).equal(text)


def whole(tensors):
    """{name: tensor} of {name: LazyTensor}."""
    return {name: stored.whole() for name, stored in tensors.items()}


def assert_same_tensors(tensors, others):
    assert tensors.keys() == others.keys()
    different = [name for name, tensor in tensors.items()
                 if tensor.dtype != others[name].dtype or not tensor.equal(others[name])]
    assert different == []


# --- Hugging Face folders -------------------------------------------------------------------------------

def slow_but(chosen, forms):
    return [form if form in chosen else pytest.param(form, marks=pytest.mark.slow) for form in forms]


@pytest.mark.parametrize('form', slow_but([*FORMS][:6], FORMS))
def test_export_runs_in_transformers_and_is_imported_unchanged(form, tmp_path):
    from transformers import AutoModelForCausalLM
    out_dir, model, _ = make_run(tmp_path / 'run', FORMS[form])
    first, second = str(tmp_path / 'first'), str(tmp_path / 'second')
    export_weights(out_dir, first)
    theirs = AutoModelForCausalLM.from_pretrained(first)
    assert type(theirs).__name__.lower().startswith(form.partition('_')[0])
    assert_same_predictions(model, theirs)

    arguments, tensors, meta = read_weights(first)
    assert arguments == dataclasses.asdict(model.config) and meta == CHARS
    assert_same_tensors(whole(tensors), weights_of(model))
    import_weights(first, str(tmp_path / 'again'))
    export_weights(str(tmp_path / 'again'), second)
    assert_same_tensors(load_file(f'{first}/model.safetensors'), load_file(f'{second}/model.safetensors'))
    for name in ('config.json', 'generation_config.json', 'tokenizer.json', 'tokenizer_config.json'):
        assert (tmp_path / 'first' / name).read_text() == (tmp_path / 'second' / name).read_text()


@pytest.mark.parametrize('options, words', [
    (dict(mlp='relu2'), 'gpt2, does not have mlp=relu2'),
    (LLAMA | dict(mlp='relu2', softcap=15.0), 'llama, does not have mlp=relu2, softcap=15.0'),
    (LLAMA | dict(norm='layernorm'), 'llama, does not have norm=layernorm'),
    (MIXTURE, 'mixtral, does not have router_balance=bias'),
    (MIXTURE | dict(n_shared_experts=1, n_active_experts=1, router_balance='loss'),
     'qwen2_moe, does not have shared_gate=False'),
    (MIXTURE | dict(router='sigmoid', moe_every=2, expert_mlp='gelu'),
     'glm4_moe, does not have expert_mlp=gelu, moe_every=2'),
    (LLAMA | dict(qk_norm=True, bias=True), 'llama, does not have qk_norm=True'),
    (dict(qk_norm=True, n_kv_head=2), 'gpt2, does not have n_kv_head=2, qk_norm=True'),
    (dict(norm='rmsnorm', mlp='swiglu'), 'llama, does not have pos=learned')], ids=str)
def test_model_without_a_standard_form_is_not_exported(options, words, tmp_path):
    out_dir, *_ = make_run(tmp_path / 'run', options)
    with pytest.raises(ValueError, match=f'cannot be exported: the closest standard form, {words}$'):
        export_weights(out_dir, str(tmp_path / 'hf'))
    assert not os.path.exists(tmp_path / 'hf')
    with pytest.raises(ValueError, match='which nanoGPT does not have'):
        export_weights(out_dir, str(tmp_path / 'ckpt.pt'))


@pytest.fixture(scope='module')
def folders(tmp_path_factory):
    """{form: its exported folder}."""
    folder = tmp_path_factory.mktemp('folders')
    for form in ('gpt2', 'llama', 'qwen3'):
        export_weights(make_run(folder / f'run-{form}', FORMS[form])[0], str(folder / form))
    return {form: folder / form for form in ('gpt2', 'llama', 'qwen3')}


def link_folder(source, target, changes):
    """Make `target` a copy of an exported folder with changes to its config.json."""
    (target / 'model.safetensors').symlink_to(source / 'model.safetensors')
    (target / 'config.json').write_text((source / 'config.json').read_text())
    change_json(target / 'config.json', changes)


@pytest.mark.parametrize('form, changes', [
    ('gpt2', dict(model_type='opt')),
    ('gpt2', dict(activation_function='relu')),
    ('gpt2', dict(scale_attn_weights=False)),
    ('gpt2', dict(scale_attn_by_inverse_layer_idx=True)),
    ('llama', dict(rope_scaling=dict(rope_type='llama3', factor=8.0))),
    ('llama', dict(rope_scaling=dict(rope_type='longrope', long_factor=[1.0], short_factor=[1.0]))),
    ('llama', dict(rope_scaling=dict(rope_type='mrope', factor=2.0))),
    ('llama', dict(partial_rotary_factor=0.5)),
    ('llama', dict(hidden_act='gelu')),
    ('llama', dict(mlp_bias='yes')),
    ('llama', dict(model_type='kimi_linear')),
    ('llama', dict(layer_types=['full_attention', 'sliding_attention'])),
    ('llama', dict(quantization_config=dict(bits=4))),
    ('qwen3', dict(layer_types=['chunked_attention'] * 2, use_sliding_window=True))], ids=str)
def test_config_that_our_model_cannot_represent_is_refused(folders, form, changes, tmp_path):
    link_folder(folders[form], tmp_path, changes)
    with pytest.raises(ValueError, match=f'{list(changes)[0]}'):
        read_weights(str(tmp_path))


@pytest.mark.parametrize('changes, words', [
    (dict(n_positions=32), r'wpe.weight with shape \(64, 32\), but its config requires \(32, 32\)'),
    (dict(n_layer=1), r'transformer.h.1.* but its config requires None'),
    (dict(n_layer=3), r'h.2.* with shape None'),
    (dict(n_head='four'), "n_head='four' in its config.json, but n_head must be a whole number"),
    (dict(n_head=5), 'n_embd=32 is not divisible'),
    (dict(tie_word_embeddings=False), 'lm_head.weight with shape None')], ids=str)
def test_config_that_contradicts_the_tensors_is_refused(folders, changes, words, tmp_path):
    link_folder(folders['gpt2'], tmp_path, changes)
    with pytest.raises(ValueError, match=words):
        read_weights(str(tmp_path))


def test_damaged_folders_are_refused(folders, tmp_path):
    link_folder(folders['gpt2'], tmp_path, {})
    (tmp_path / 'config.json').write_text('{"model_type": "gpt2"}')
    with pytest.raises(ValueError, match='vocab_size=None in its config.json'):
        read_weights(str(tmp_path))
    (tmp_path / 'config.json').write_text((folders['gpt2'] / 'config.json').read_text())
    (tmp_path / 'model.safetensors').unlink()
    (tmp_path / 'model.safetensors').write_bytes((folders['gpt2'] / 'model.safetensors').read_bytes()[:-100])
    with pytest.raises(ValueError, match='model.safetensors is damaged'):
        read_weights(str(tmp_path))


@pytest.mark.slow
def test_hub_that_does_not_answer_is_asked_once_and_weights_in_the_cache_need_no_hub(folders, tmp_path):
    """The hub accepts connections and is silent. The client alone would try for minutes."""
    with socket.create_server(('127.0.0.1', 0)) as hub:
        env = dict(HF_ENDPOINT=f'http://127.0.0.1:{hub.getsockname()[1]}', HF_HOME=str(tmp_path))
        failed = run_forked('kilogpt.convert', 'inspect', 'gpt2', env=env, check=False, timeout=60)
        assert failed.stderr.startswith('error: gpt2 is neither a folder nor in the Hugging Face cache')
        assert 'ReadTimeout' in failed.stderr and failed.returncode == 1
        offline = run_forked('kilogpt.convert', 'inspect', 'gpt2', env=env | dict(HF_HUB_OFFLINE='1'),
                             check=False)
        assert 'OfflineModeIsEnabled' in offline.stderr and offline.stderr.count('\n') == 1
        cached = tmp_path / 'hub' / 'models--openai-community--gpt2'
        (cached / 'refs').mkdir(parents=True)
        (cached / 'refs' / 'main').write_text('a1')
        shutil.copytree(folders['gpt2'], cached / 'snapshots' / 'a1')
        found = run_forked('kilogpt.convert', 'inspect', 'gpt2', env=env, timeout=60)
        assert f'block_size {TINY["block_size"]}, ' in found.stdout


def test_biases_trained_elsewhere_are_imported(tmp_path):
    """An export of a model without biases has zeros for them. If one is not zero, they are imported."""
    out_dir, *_ = make_run(tmp_path / 'run', FORMS['gpt2_plain'])
    export_weights(out_dir, str(tmp_path / 'hf'))
    tensors = load_file(tmp_path / 'hf' / 'model.safetensors')
    tensors['transformer.h.1.attn.c_attn.bias'][40] = 1.0
    save_file(tensors, tmp_path / 'hf' / 'model.safetensors')
    arguments, tensors, _ = read_weights(str(tmp_path / 'hf'))
    assert arguments['bias'] and tensors['transformer.h.1.attn.c_k.bias'].whole()[8] == 1.0


@pytest.mark.parametrize('form', ['gpt2', 'llama_bias', 'qwen3_tied'])
def test_head_that_differs_from_the_table_is_kept_though_config_says_tied(form, tmp_path):
    export_weights(make_run(tmp_path / 'run', FORMS[form])[0], str(tmp_path / 'hf'))
    path = tmp_path / 'hf' / 'model.safetensors'
    tensors = load_file(path)
    table = tensors['transformer.wte.weight' if form == 'gpt2' else 'model.embed_tokens.weight']
    for head, is_tied in ((table.clone(), True), (table + 1, False)):
        save_file(tensors | {'lm_head.weight': head}, path)
        assert read_weights(str(tmp_path / 'hf'))[0]['tie_weights'] == is_tied
        assert model_from(tmp_path / 'hf').lm_head.weight[:97].equal(head)


# --- nanoGPT --------------------------------------------------------------------------------------------

def nanogpt_shapes(bias):
    """{name: shape} in nanoGPT's order, for n_layer=2, n_embd=32, block_size=64 and 97 tokens."""
    def layer(name, *shape):
        return {f'{name}.weight': shape} | ({f'{name}.bias': shape[:1]} if bias else {})
    shapes = {'transformer.wte.weight': (97, 32), 'transformer.wpe.weight': (64, 32)}
    for i in (0, 1):
        block = f'transformer.h.{i}'
        shapes |= layer(f'{block}.ln_1', 32)
        shapes |= layer(f'{block}.attn.c_attn', 96, 32)
        shapes |= layer(f'{block}.attn.c_proj', 32, 32)
        shapes |= layer(f'{block}.ln_2', 32)
        shapes |= layer(f'{block}.mlp.c_fc', 128, 32)
        shapes |= layer(f'{block}.mlp.c_proj', 32, 128)
    return shapes | layer('transformer.ln_f', 32) | {'lm_head.weight': (97, 32)}


def packed_qkv(tensors, block):
    return torch.cat([tensors[f'transformer.h.{block}.attn.c_{part}.weight'] for part in 'qkv'])


@pytest.mark.parametrize('bias', [True, False])
def test_export_to_nanogpt(bias, tmp_path):
    out_dir, model, optimizer = make_run(tmp_path / 'run', dict(bias=bias), moments=True)
    export_weights(out_dir, str(tmp_path / 'ckpt.pt'))
    saved = torch.load(tmp_path / 'ckpt.pt', weights_only=True)
    shapes = [(name, tuple(p.shape)) for name, p in saved['model'].items()]
    assert shapes == list(nanogpt_shapes(bias).items())
    assert saved['model_args'] == dict(n_layer=2, n_head=4, n_embd=32, block_size=64, bias=bias,
                                       vocab_size=97, dropout=0.0)
    assert (saved['iter_num'], saved['best_val_loss'], saved['config']['dataset']) == (3, 2.5, 'x')
    ours = weights_of(model)
    assert saved['model']['transformer.h.1.attn.c_attn.weight'].equal(packed_qkv(ours, 1))
    assert saved['model']['lm_head.weight'].equal(ours['transformer.wte.weight'])

    # The state fits nanoGPT's optimizer: first matrices, then vectors, both in the model's order.
    params = [torch.nn.Parameter(p) for name, p in saved['model'].items() if name != 'lm_head.weight']
    groups = [[p for p in params if p.dim() >= 2], [p for p in params if p.dim() < 2]]
    theirs = torch.optim.AdamW([dict(params=group) for group in groups])
    theirs.load_state_dict(saved['optimizer'])
    assert [(group['weight_decay'], group['lr'], group['betas']) for group in theirs.param_groups] == [
        (0.1, 1e-3, (0.9, 0.95)), (0.0, 1e-3, (0.9, 0.95))]
    for p in params:
        assert theirs.state[p]['exp_avg'].shape == p.shape and theirs.state[p]['step'] == 1
    c_attn = params[list(saved['model']).index('transformer.h.0.attn.c_attn.weight')]
    our_moments = {name: optimizer.state[p]['exp_avg_sq'] for name, p in model.named_parameters()}
    assert theirs.state[c_attn]['exp_avg_sq'].equal(packed_qkv(our_moments, 0))


@pytest.mark.parametrize('bias', [True, False])
def test_import_from_nanogpt_restores_weights_and_moments(bias, tmp_path):
    out_dir, model, optimizer = make_run(tmp_path / 'run', dict(bias=bias), moments=True)
    target = str(tmp_path / 'ckpt.pt')
    export_weights(out_dir, target)
    arguments, tensors, meta = read_weights(target)
    assert arguments == dataclasses.asdict(model.config) and meta == CHARS
    assert_same_tensors(whole(tensors), weights_of(model))
    import_weights(target, str(tmp_path / 'again'))
    (path,) = checkpoint.find(str(tmp_path / 'again'))
    assert path.endswith('iter_00000003')
    restored = GPT(model.config, seed=None)
    restored_optimizer = build_adamw(restored.named_parameters(), 1e-3, 0.1, (0.9, 0.95))
    checkpoint.load(path, list(restored.named_parameters()), restored_optimizer)
    for (name, p), (_, q) in zip(restored.named_parameters(), model.named_parameters()):
        rows = 97 if name == 'transformer.wte.weight' else None
        state, expected = restored_optimizer.state[p], optimizer.state[q]
        assert p[:rows].equal(q[:rows]) and state['step'] == 1, name
        assert state['exp_avg'][:rows].equal(expected['exp_avg'][:rows]), name
        assert state['exp_avg_sq'][:rows].equal(expected['exp_avg_sq'][:rows]), name


def test_file_written_by_nanogpt_is_imported(tmp_path):
    """It has torch.compile's prefix, an old causal mask and a loss tensor, but no optimizer or tokenizer."""
    model = {f'_orig_mod.{name}': 0.2 * torch.randn(shape) for name, shape in nanogpt_shapes(True).items()}
    model['_orig_mod.lm_head.weight'] = model['_orig_mod.transformer.wte.weight']
    model['_orig_mod.transformer.h.0.attn.bias'] = torch.ones(1, 1, 64, 64)
    args = dict(n_layer=2, n_head=4, n_embd=32, block_size=64, bias=True, vocab_size=97, dropout=0.0)
    content = dict(model=model, model_args=args, iter_num=7, best_val_loss=torch.tensor(1.5),
                   config=dict(batch_size=12))
    torch.save(content, tmp_path / 'ckpt.pt')
    arguments, tensors, meta = read_weights(str(tmp_path / 'ckpt.pt'))
    assert meta is None and arguments == dataclasses.asdict(GPTConfig(**TINY))
    c_attn = model['_orig_mod.transformer.h.0.attn.c_attn.weight']
    assert tensors['transformer.h.0.attn.c_v.weight'].whole().equal(c_attn[64:])
    import_weights(str(tmp_path / 'ckpt.pt'), str(tmp_path / 'run'))
    (path,) = checkpoint.find(str(tmp_path / 'run'))
    state = checkpoint.read_state(path)
    assert (state['iteration'], state['val_loss'], state['tokenizer']) == (7, 1.5, None)
    with pytest.raises(ValueError, match='already has checkpoints'):
        import_weights(str(tmp_path / 'ckpt.pt'), str(tmp_path / 'run'))


def test_head_that_nanogpt_did_not_tie_is_imported_with_its_moments(tmp_path):
    out_dir, _, optimizer = make_run(tmp_path / 'run', moments=True)
    target = str(tmp_path / 'ckpt.pt')
    export_weights(out_dir, target)
    saved = torch.load(target, weights_only=True)
    names = [name for name in saved['model'] if name != 'lm_head.weight']
    n_matrices = sum(saved['model'][name].dim() > 1 for name in names)
    moments = [moment for _, moment in sorted(saved['optimizer']['state'].items())]
    moments.insert(n_matrices, dict(moments[0], exp_avg=torch.full((97, 32), 5.0)))
    saved['optimizer']['state'] = dict(enumerate(moments))
    head = saved['model']['lm_head.weight'] = torch.full((97, 32), 4.0)
    torch.save(saved, target)

    arguments, tensors, _ = read_weights(target)
    assert not arguments['tie_weights'] and tensors['lm_head.weight'].whole().equal(head)
    import_weights(target, str(tmp_path / 'again'))
    restored = GPT(GPTConfig(**arguments), seed=None)
    restored_optimizer = build_adamw(restored.named_parameters(), 1e-3, 0.1, (0.9, 0.95))
    checkpoint.load(checkpoint.find(str(tmp_path / 'again'))[0], list(restored.named_parameters()),
                    restored_optimizer)
    moment_of = {name: restored_optimizer.state[p]['exp_avg'] for name, p in restored.named_parameters()}
    assert restored.lm_head.weight[:97].equal(head) and moment_of['lm_head.weight'][:97].eq(5).all()
    last_norm = optimizer.param_groups[1]['params'][-1]
    assert moment_of['transformer.ln_f.bias'].equal(optimizer.state[last_norm]['exp_avg'])


# --- values that are not finite -------------------------------------------------------------------------

def test_values_of_a_folder_that_are_not_finite_are_named(folders, tmp_path):
    link_folder(folders['qwen3'], tmp_path, {})
    path = tmp_path / 'model.safetensors'
    tensors = load_file(path)
    path.unlink()
    tensors['model.layers.1.self_attn.o_proj.weight'][2, 3:5] = torch.tensor([torch.inf, torch.nan])
    save_file(tensors, path)
    sentence = ('model.safetensors has NaN or infinity in model.layers.1.self_attn.o_proj.weight (2 of 1,024 '
                'values): use other weights')
    for read in (model_from, inspect, lambda source: import_weights(source, str(tmp_path / 'run'))):
        with pytest.raises(ValueError, match=re.escape(sentence)):
            read(str(tmp_path))
    assert not checkpoint.find(str(tmp_path / 'run'))
    finite = {name: torch.full_like(tensor, 3e38) for name, tensor in tensors.items()}  # the sums overflow
    save_file(finite, path)
    inspect(str(tmp_path))


def test_values_of_nanogpt_that_are_not_finite_are_named(tmp_path):
    out_dir, *_ = make_run(tmp_path / 'run', moments=True)
    path = str(tmp_path / 'ckpt.pt')
    export_weights(out_dir, path)
    saved = torch.load(path, weights_only=True)
    saved['optimizer']['state'][1]['exp_avg_sq'][0] = torch.nan
    torch.save(saved, path)
    with pytest.raises(ValueError, match=r'ckpt.pt has NaN .* exp_avg_sq of transformer.wpe.weight \(32 of '):
        import_weights(path, str(tmp_path / 'again'))
    saved['model']['transformer.ln_f.bias'][5] = torch.nan
    torch.save(saved, path)
    done = run_forked('sample.py', f'--init_from={path}', '--device=cpu', check=False)
    assert done.stderr == (f'error: {path} has NaN or infinity in transformer.ln_f.bias (1 of 32 values): '
                           'use other weights\n')


def test_values_of_a_checkpoint_that_are_not_finite_are_named(tmp_path):
    model = GPT(GPTConfig(**TINY))
    with torch.no_grad():
        model.transformer.wpe.weight[:, 1] = torch.nan
    path = save_run(tmp_path, model, list(model.named_parameters()))
    sentence = (f'{path} has NaN or infinity in model.transformer.wpe.weight (64 of 2,048 values): '
                'delete this checkpoint to use another one')
    done = run_forked('sample.py', f'--out_dir={tmp_path}', '--device=cpu', check=False)
    assert done.stderr.splitlines() == [f'error: {sentence}'] and done.returncode == 1
    with pytest.raises(ValueError, match=re.escape(sentence)):
        export_weights(str(tmp_path), str(tmp_path / 'hf'))
    with pytest.raises(ValueError, match=re.escape(sentence)):
        inspect(str(tmp_path))


class Trap:
    """Creates a file when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (self.path, 'w')


@pytest.mark.parametrize('legacy', [False, True])
def test_reading_a_file_runs_no_code(legacy, tmp_path):
    torch.save(dict(model={}, model_args={}, config=Trap(str(tmp_path / 'sprung'))), tmp_path / 'ckpt.pt',
               _use_new_zipfile_serialization=not legacy)
    with pytest.raises(ValueError, match='which might run code: it was not loaded'):
        read_weights(str(tmp_path / 'ckpt.pt'))
    assert not os.path.exists(tmp_path / 'sprung')
    (tmp_path / 'garbage.pt').write_bytes(b'garbage')
    with pytest.raises(ValueError, match='is not a ckpt.pt of nanoGPT'):
        read_weights(str(tmp_path / 'garbage.pt'))
    torch.load(tmp_path / 'ckpt.pt', weights_only=False)
    assert os.path.exists(tmp_path / 'sprung')  # the trap works


# --- tokenizers -----------------------------------------------------------------------------------------

MIXED = ['', 'Hello, world!', ' a  b   c\n\n\n d \t\r\n  ', "I'll we'VE it's  1234567 3.14",
         'naïve Ünïcödé ß ſ ŉ', '日本語 العربية हिन्दी',
         '🙂👨‍👩‍👧 🇩🇪', '\x00\x1c\x85\u2028\u3000\xa0 x',
         'def f(x):\n\treturn x**2  # why?\n\n', ' ' * 99 + 'x' + '\n' * 20]


@pytest.fixture(scope='module')
def pairs(tmp_path_factory, vocabulary):
    """{name: (our tokenizer, tokenizer of transformers from the exported folder)}.

    The vocabularies of cl100k_base and o200k_base are not available offline, so they use GPT-2's ranks.
    """
    import tiktoken
    from tiktoken_ext import openai_public
    from transformers import AutoTokenizer
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv('TIKTOKEN_CACHE_DIR', vocabulary)
        gpt2 = get_tokenizer(dict(tokenizer='gpt2'))
        patch.setattr(openai_public, 'load_tiktoken_bpe', lambda *_, **__: gpt2.encoding._mergeable_ranks)
        chars = CharTokenizer(sorted(set(''.join(MIXED))))
        tokenizers = dict(gpt2=gpt2, bytes=ByteTokenizer(), char=chars)
        for name in ('cl100k_base', 'o200k_base'):
            tokenizer = tokenizers[name] = type(gpt2).__new__(type(gpt2))
            tokenizer.encoding = tiktoken.Encoding(**getattr(openai_public, name)())
            tokenizer.name = name
            tokenizer.eot = tokenizer.encoding.eot_token
            tokenizer.vocab_size = tokenizer.encoding.n_vocab
        pairs = {}
        forms = [{}, LLAMA, LLAMA | dict(qk_norm=True), LLAMA, {}]
        for (name, tokenizer), form in zip(tokenizers.items(), forms):
            folder = tmp_path_factory.mktemp(name)
            patch.setattr(exporting, 'get_tokenizer', lambda meta, tokenizer=tokenizer: tokenizer)
            export_weights(make_run(folder / 'run', form)[0], str(folder / 'hf'))
            pairs[name] = tokenizer, AutoTokenizer.from_pretrained(folder / 'hf')
        yield pairs


@pytest.mark.parametrize('name', ['gpt2', 'bytes', 'char', 'cl100k_base', 'o200k_base'])
def test_tokenizers_agree(pairs, name):
    ours, theirs = pairs[name]

    def agree(text):
        ids = ours.encode(text)
        assert theirs(text)['input_ids'] == ids
        assert theirs.decode(ids) == ours.decode(ids) == text

    for text in MIXED:
        agree(text)
    frequent = st.sampled_from(" \n\t'sSlLdD09.,!-🙂é")
    anything = st.characters(codec='utf-8', max_codepoint=0xFFFF) | frequent
    letters = st.sampled_from(ours.chars) if name == 'char' else anything
    settings(max_examples=150, deadline=None, derandomize=True)(given(st.text(letters))(agree))()
    assert theirs.eos_token_id == theirs.bos_token_id == ours.eot
    assert len(theirs) >= len(set(theirs.get_vocab().values()))
    if name == 'gpt2':
        assert ours.decode_bytes([15496, 50300]) == b'Hello'  # a padding row has no bytes
        assert theirs.vocab_size == 50257 and theirs('<|endoftext|>')['input_ids'] == [50256]
        assert len(json.loads(theirs.backend_tokenizer.to_str())['model']['merges']) == 50000
