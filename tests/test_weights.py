"""checkpoint.py export, import and inspect, against transformers, tokenizers and nanoGPT's format written out.

Weights are of standard deviation 0.2 and all random, norms and biases too, so that a mix-up shows far above the tolerance of 1e-4.
"""
import dataclasses
import json
import os
import re

import pytest
import torch
from conftest import run, side_by_side
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from kilogpt import checkpoint
from data.tokenizer import ByteTokenizer, CharTokenizer, get_tokenizer
from model import GPT, GPTConfig
from kilogpt.optim import build_adamw

TINY = dict(block_size=64, vocab_size=97, n_layer=2, n_head=4, n_embd=32)  # 97 rows are padded to 128
LLAMA = dict(pos='rope', norm='rmsnorm', mlp='swiglu', n_kv_head=2, bias=False, tie_weights=False)
FORMS = dict(gpt2=dict(mlp='gelu_tanh'), gpt2_plain=dict(bias=False, tie_weights=False), llama=LLAMA,
             llama_bias=LLAMA | dict(bias=True, tie_weights=True, dropout=0.1), qwen3=LLAMA | dict(qk_norm=True, n_kv_head=1),
             qwen3_tied=LLAMA | dict(qk_norm=True, tie_weights=True))
CHARS = CharTokenizer('\n' + ''.join(chr(c) for c in range(ord(' '), ord(' ') + 90)) + 'éß✓🙂🇩 ').meta()
PROMPT = torch.randint(97, (2, 9), generator=torch.Generator().manual_seed(1))


def randomize(model, seed=0):
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(0.2 * torch.randn(p.shape, generator=generator) + (p.dim() == 1))
    return model.eval()


def make_run(folder, options=(), meta=CHARS, moments=False):
    """A run's folder with a checkpoint at iteration 3; (its path, the model, its optimizer)."""
    model = randomize(GPT(GPTConfig(**TINY | dict(options))))
    named = list(model.named_parameters())
    optimizer = build_adamw(named, 1e-3, 0.1, (0.9, 0.95)) if moments else None
    if moments:
        model(PROMPT, PROMPT).backward()
        optimizer.step()
    checkpoint.Saver(str(folder), 1).save(3, named, optimizer, dict(
        iteration=3, tokens=2304, val_loss=2.5, best_val_loss=2.5, skipped=[0, 0], wandb_id=None, scaler={},
        model=dataclasses.asdict(model.config), tokenizer=meta, config=dict(dataset='x', learning_rate=1e-3, beta2=0.95)))
    return str(folder), model, optimizer


def weights_of(model):
    """Parameters without the vocabulary's padding rows."""
    return {name: p[:model.config.vocab_size] if name in ('transformer.wte.weight', 'lm_head.weight') else p
            for name, p in model.named_parameters()}


def built(source):
    """Our model from what read_weights gives."""
    arguments, weights, _ = checkpoint.read_weights(str(source))
    model = GPT(GPTConfig(**arguments), seed=None)
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(checkpoint.padded(weights)(name, p.shape))
    return model.eval()


@torch.no_grad()
def assert_alike(ours, theirs):
    """Logits within 1e-4, and 50 greedy tokens the same."""
    theirs.eval()
    logits = ours(PROMPT)
    assert logits.std() > 0.3
    torch.testing.assert_close(logits, theirs(PROMPT).logits, atol=1e-4, rtol=0)
    text = theirs.generate(PROMPT, max_new_tokens=50, do_sample=False, pad_token_id=0)
    assert text.size(1) == 59 and ours.generate(PROMPT, 50, temperature=0).equal(text)


def assert_same(tensors, others):
    assert tensors.keys() == others.keys()
    assert [name for name in tensors if tensors[name].dtype != others[name].dtype or not tensors[name].equal(others[name])] == []


# --- Hugging Face folders -----------------------------------------------------------------------------------------------

@pytest.mark.parametrize('form', FORMS)
def test_export_is_what_transformers_runs_and_comes_back_the_same(form, tmp_path):
    from transformers import AutoModelForCausalLM
    out_dir, model, _ = make_run(tmp_path / 'run', FORMS[form])
    first, second = str(tmp_path / 'first'), str(tmp_path / 'second')
    checkpoint.export_weights(out_dir, first)
    theirs = AutoModelForCausalLM.from_pretrained(first)
    assert type(theirs).__name__.lower().startswith(form.partition('_')[0])
    assert_alike(model, theirs)

    arguments, weights, meta = checkpoint.read_weights(first)
    assert arguments == dataclasses.asdict(model.config) and meta == CHARS
    assert_same(weights, weights_of(model))
    checkpoint.import_weights(first, str(tmp_path / 'again'))
    checkpoint.export_weights(str(tmp_path / 'again'), second)
    assert_same(load_file(f'{first}/model.safetensors'), load_file(f'{second}/model.safetensors'))
    for name in ('config.json', 'generation_config.json', 'tokenizer.json', 'tokenizer_config.json'):
        assert (tmp_path / 'first' / name).read_text() == (tmp_path / 'second' / name).read_text()


def foreign(kind):
    from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM
    ends = dict(bos_token_id=None, eos_token_id=None, vocab_size=97)
    modern = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, intermediate_size=88,
                  max_position_embeddings=64, rms_norm_eps=1e-3, rope_theta=300.0, **ends)
    if kind == 'gpt2':
        return GPT2LMHeadModel(GPT2Config(n_positions=64, n_embd=32, n_layer=2, n_head=4, n_inner=72, layer_norm_epsilon=1e-3,
                                          tie_word_embeddings=False, **ends))
    if kind == 'llama':
        return LlamaForCausalLM(LlamaConfig(attention_bias=True, mlp_bias=True, **modern))
    return Qwen3ForCausalLM(Qwen3Config(head_dim=12, tie_word_embeddings=True, **modern))


@pytest.mark.parametrize('kind', ['gpt2', 'llama', 'qwen3'])
def test_folders_of_transformers_read_in(kind, tmp_path):
    """Other widths, epsilon and theta; in shards; bfloat16 widens; exported again, the same tensors."""
    theirs = randomize(foreign(kind)).bfloat16()
    theirs.save_pretrained(tmp_path / 'hf', max_shard_size='20KB')
    assert os.path.exists(tmp_path / 'hf' / 'model.safetensors.index.json')
    assert_alike(built(tmp_path / 'hf'), type(theirs).from_pretrained(tmp_path / 'hf', dtype=torch.float32))
    arguments, weights, meta = checkpoint.read_weights(str(tmp_path / 'hf'))
    assert meta is None
    with pytest.raises(ValueError, match='which tokenizer .* --dataset'):
        get_tokenizer(meta)

    path = tmp_path / 'hf' / 'config.json'
    config = json.loads(path.read_text())
    if 'rope_parameters' in config:  # as transformers wrote it before version 5
        path.write_text(json.dumps(config | dict(rope_theta=config.pop('rope_parameters')['rope_theta'], rope_scaling=None)))
        assert checkpoint.read_weights(str(tmp_path / 'hf'))[0] == arguments
    checkpoint.import_weights(str(tmp_path / 'hf'), str(tmp_path / 'run'))
    checkpoint.export_weights(str(tmp_path / 'run'), str(tmp_path / 'again'), dtype='bfloat16')
    assert checkpoint.read_weights(str(tmp_path / 'again'))[0] == arguments
    assert type(theirs).from_pretrained(tmp_path / 'again', dtype='auto').dtype == torch.bfloat16
    assert_same(load_file(tmp_path / 'again' / 'model.safetensors'),
                {name: p for name, p in theirs.state_dict().items() if name != 'lm_head.weight' or not arguments['tie_weights']})


@pytest.mark.parametrize('options, words', [
    (dict(mlp='relu2'), 'mlp=relu2'), (LLAMA | dict(mlp='relu2', softcap=15.0), 'mlp=relu2, softcap=15.0'),
    (LLAMA | dict(norm='layernorm'), 'norm=layernorm'), (LLAMA | dict(qk_norm=True, bias=True), 'bias=True'),
    (dict(qk_norm=True, n_kv_head=2), 'n_kv_head=2, qk_norm=True'), (dict(norm='rmsnorm', mlp='swiglu'), 'norm=rmsnorm, mlp=swiglu')],
    ids=str)
def test_what_has_no_standard_form_says_so(options, words, tmp_path):
    out_dir, *_ = make_run(tmp_path / 'run', options)
    with pytest.raises(ValueError, match=f'has {words}, which no standard form has'):
        checkpoint.export_weights(out_dir, str(tmp_path / 'hf'))
    assert not os.path.exists(tmp_path / 'hf')
    with pytest.raises(ValueError, match='which nanoGPT has not'):
        checkpoint.export_weights(out_dir, str(tmp_path / 'ckpt.pt'))


@pytest.mark.parametrize('form, change', [
    ('gpt2', dict(model_type='opt')), ('gpt2', dict(activation_function='relu')), ('gpt2', dict(scale_attn_weights=False)),
    ('gpt2', dict(scale_attn_by_inverse_layer_idx=True)), ('llama', dict(rope_scaling=dict(rope_type='llama3', factor=8.0))),
    ('llama', dict(rope_parameters=dict(rope_type='yarn', rope_theta=1e4))), ('llama', dict(hidden_act='gelu')),
    ('llama', dict(mlp_bias=True)), ('llama', dict(model_type='mistral')), ('llama', dict(quantization_config=dict(bits=4))),
    ('qwen3', dict(use_sliding_window=True)), ('qwen3', dict(layer_types=['full_attention', 'sliding_attention'])),
    ('qwen3', dict(attention_bias=True))], ids=str)
def test_what_our_model_cannot_be_is_refused(folders, form, change, tmp_path):
    (tmp_path / 'model.safetensors').symlink_to(folders[form] / 'model.safetensors')
    (tmp_path / 'config.json').write_text(json.dumps(json.loads((folders[form] / 'config.json').read_text()) | change))
    with pytest.raises(ValueError, match=f'config.json has .*{list(change)[0]}'):
        checkpoint.read_weights(str(tmp_path))


@pytest.mark.parametrize('change, words', [
    (dict(n_positions=32), r'transformer.wpe.weight of shape \(64, 32\) where its config asks for \(32, 32\)'),
    (dict(n_layer=1), r'transformer.h.1.* where its config asks for None'), (dict(n_layer=3), r'h.2.* of shape None'),
    (dict(n_head='four'), 'lacks or garbles an entry'), (dict(n_head=5), 'n_embd=32 is not divisible'),
    (dict(tie_word_embeddings=False), 'lm_head.weight of shape None')], ids=str)
def test_config_and_tensors_that_differ_are_refused(folders, change, words, tmp_path):
    (tmp_path / 'model.safetensors').symlink_to(folders['gpt2'] / 'model.safetensors')
    (tmp_path / 'config.json').write_text(json.dumps(json.loads((folders['gpt2'] / 'config.json').read_text()) | change))
    with pytest.raises(ValueError, match=words):
        checkpoint.read_weights(str(tmp_path))
    (tmp_path / 'config.json').write_text('{"model_type": "gpt2"}')
    with pytest.raises(ValueError, match="garbles .*n_positions"):
        checkpoint.read_weights(str(tmp_path))
    (tmp_path / 'model.safetensors').unlink()
    (tmp_path / 'model.safetensors').write_bytes((folders['gpt2'] / 'model.safetensors').read_bytes()[:-100])
    (tmp_path / 'config.json').write_text((folders['gpt2'] / 'config.json').read_text())
    with pytest.raises(ValueError, match='model.safetensors is damaged'):
        checkpoint.read_weights(str(tmp_path))


@pytest.fixture(scope='module')
def folders(tmp_path_factory):
    """{form: its exported folder}."""
    folder = tmp_path_factory.mktemp('folders')
    for form in ('gpt2', 'llama', 'qwen3'):
        checkpoint.export_weights(make_run(folder / f'run-{form}', FORMS[form])[0], str(folder / form))
    return {form: folder / form for form in ('gpt2', 'llama', 'qwen3')}


def test_biases_that_were_trained_elsewhere_are_kept(tmp_path):
    """An export without biases has zeros there; once they are none, the model has biases."""
    from safetensors.torch import save_file
    out_dir, *_ = make_run(tmp_path / 'run', FORMS['gpt2_plain'])
    checkpoint.export_weights(out_dir, str(tmp_path / 'hf'))
    tensors = load_file(tmp_path / 'hf' / 'model.safetensors')
    tensors['transformer.h.1.attn.c_attn.bias'][40] = 1.0
    save_file(tensors, tmp_path / 'hf' / 'model.safetensors')
    arguments, weights, _ = checkpoint.read_weights(str(tmp_path / 'hf'))
    assert arguments['bias'] and weights['transformer.h.1.attn.c_k.bias'][8] == 1.0


# --- nanoGPT ------------------------------------------------------------------------------------------------------------

def nanogpt_shapes(bias):
    """The parameters of nanoGPT's model in its order, with n_layer=2, n_embd=32, block_size=64 and 97 tokens."""
    def layer(name, *shape):
        return {f'{name}.weight': shape} | ({f'{name}.bias': shape[:1]} if bias else {})
    shapes = {'transformer.wte.weight': (97, 32), 'transformer.wpe.weight': (64, 32)}
    for i in (0, 1):
        block = f'transformer.h.{i}'
        shapes |= (layer(f'{block}.ln_1', 32) | layer(f'{block}.attn.c_attn', 96, 32) | layer(f'{block}.attn.c_proj', 32, 32)
                   | layer(f'{block}.ln_2', 32) | layer(f'{block}.mlp.c_fc', 128, 32) | layer(f'{block}.mlp.c_proj', 32, 128))
    return shapes | layer('transformer.ln_f', 32) | {'lm_head.weight': (97, 32)}


@pytest.mark.parametrize('bias', [True, False])
def test_nanogpt_and_back(bias, tmp_path):
    out_dir, model, optimizer = make_run(tmp_path / 'run', dict(bias=bias), moments=True)
    target = str(tmp_path / 'ckpt.pt')
    checkpoint.export_weights(out_dir, target)
    saved = torch.load(target, weights_only=True)
    assert [(name, tuple(p.shape)) for name, p in saved['model'].items()] == list(nanogpt_shapes(bias).items())
    assert saved['model_args'] == dict(n_layer=2, n_head=4, n_embd=32, block_size=64, bias=bias, vocab_size=97, dropout=0.0)
    assert (saved['iter_num'], saved['best_val_loss'], saved['config']['dataset']) == (3, 2.5, 'x')
    ours = weights_of(model)
    qkv = torch.cat([ours[f'transformer.h.1.attn.c_{p}.weight'] for p in 'qkv'])
    assert saved['model']['transformer.h.1.attn.c_attn.weight'].equal(qkv)
    assert saved['model']['lm_head.weight'].equal(ours['transformer.wte.weight'])

    # its optimizer takes the state: matrices, then the rest, each in the model's order
    params = [torch.nn.Parameter(p) for name, p in saved['model'].items() if name != 'lm_head.weight']
    groups = [p for p in params if p.dim() >= 2], [p for p in params if p.dim() < 2]
    theirs = torch.optim.AdamW([dict(params=group) for group in groups])
    theirs.load_state_dict(saved['optimizer'])
    assert [(group['weight_decay'], group['lr'], group['betas']) for group in theirs.param_groups] == [
        (0.1, 1e-3, (0.9, 0.95)), (0.0, 1e-3, (0.9, 0.95))]
    assert [p for p in params if theirs.state[p]['exp_avg'].shape != p.shape or theirs.state[p]['step'] != 1] == []
    moment = theirs.state[params[list(saved['model']).index('transformer.h.0.attn.c_attn.weight')]]['exp_avg_sq']
    named = dict(model.named_parameters())
    assert moment.equal(torch.cat([optimizer.state[named[f'transformer.h.0.attn.c_{p}.weight']]['exp_avg_sq'] for p in 'qkv']))

    arguments, weights, meta = checkpoint.read_weights(target)
    assert arguments == dataclasses.asdict(model.config) and meta == CHARS
    assert_same(weights, ours)
    checkpoint.import_weights(target, str(tmp_path / 'again'))
    (path,) = checkpoint.find(str(tmp_path / 'again'))
    again = GPT(model.config, seed=None)
    its = build_adamw(again.named_parameters(), 1e-3, 0.1, (0.9, 0.95))
    checkpoint.load(path, list(again.named_parameters()), its)
    assert path.endswith('iter_00000003')
    for (name, p), (_, q) in zip(again.named_parameters(), model.named_parameters()):
        rows = 97 if name == 'transformer.wte.weight' else None
        assert p[:rows].equal(q[:rows]) and its.state[p]['step'] == 1
        assert all(its.state[p][kind][:rows].equal(optimizer.state[q][kind][:rows]) for kind in ('exp_avg', 'exp_avg_sq')), name


def test_nanogpts_own_file(tmp_path):
    """With torch.compile's prefix, causal masks of old, no optimizer, a loss that is a tensor, and nothing of the tokenizer."""
    model = {f'_orig_mod.{name}': 0.2 * torch.randn(shape) for name, shape in nanogpt_shapes(True).items()}
    model['_orig_mod.transformer.h.0.attn.bias'] = torch.ones(1, 1, 64, 64)
    args = dict(n_layer=2, n_head=4, n_embd=32, block_size=64, bias=True, vocab_size=97, dropout=0.0)
    torch.save(dict(model=model, model_args=args, iter_num=7, best_val_loss=torch.tensor(1.5), config=dict(batch_size=12)),
               tmp_path / 'ckpt.pt')
    arguments, weights, meta = checkpoint.read_weights(str(tmp_path / 'ckpt.pt'))
    assert meta is None and arguments == dataclasses.asdict(GPTConfig(**TINY))
    assert weights['transformer.h.0.attn.c_v.weight'].equal(model['_orig_mod.transformer.h.0.attn.c_attn.weight'][64:])
    checkpoint.import_weights(str(tmp_path / 'ckpt.pt'), str(tmp_path / 'run'))
    (path,) = checkpoint.find(str(tmp_path / 'run'))
    state = checkpoint.read_state(path)
    assert (state['iteration'], state['val_loss'], state['tokenizer']) == (7, 1.5, None)
    with pytest.raises(ValueError, match='has checkpoints already'):
        checkpoint.import_weights(str(tmp_path / 'ckpt.pt'), str(tmp_path / 'run'))


class Trap:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (self.path, 'w')


@pytest.mark.parametrize('legacy', [False, True])
def test_nothing_in_a_file_is_run(legacy, tmp_path):
    torch.save(dict(model={}, model_args={}, config=Trap(str(tmp_path / 'sprung'))), tmp_path / 'ckpt.pt',
               _use_new_zipfile_serialization=not legacy)
    with pytest.raises(ValueError, match='which might run code: it was not loaded'):
        checkpoint.read_weights(str(tmp_path / 'ckpt.pt'))
    assert not os.path.exists(tmp_path / 'sprung')
    (tmp_path / 'garbage.pt').write_bytes(b'garbage')
    with pytest.raises(ValueError, match='is no ckpt.pt of nanoGPT'):
        checkpoint.read_weights(str(tmp_path / 'garbage.pt'))
    torch.load(tmp_path / 'ckpt.pt', weights_only=False)
    assert os.path.exists(tmp_path / 'sprung')  # the trap was one


# --- tokenizers ---------------------------------------------------------------------------------------------------------

MIXED = ['', 'Hello, world!', ' a  b   c\n\n\n d \t\r\n  ', "I'll we'VE it's  1234567 3.14",
         'naïve Ünïcödé ß ſ ŉ', '日本語 العربية हिन्दी',
         '🙂👨‍👩‍👧 🇩🇪', '\x00\x1c\x85\u2028\u3000\xa0 x', 'def f(x):\n\treturn x**2  # why?\n\n', ' ' * 99 + 'x' + '\n' * 20]


@pytest.fixture(scope='module')
def pairs(tmp_path_factory, vocabulary):
    """{name: (our tokenizer, transformers' from the exported folder)}; the patterns of tiktoken's others over GPT-2's ranks."""
    import tiktoken
    from tiktoken_ext import openai_public
    from transformers import AutoTokenizer
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv('TIKTOKEN_CACHE_DIR', vocabulary)
        gpt2 = get_tokenizer(dict(tokenizer='gpt2'))
        patch.setattr(openai_public, 'load_tiktoken_bpe', lambda *_, **__: gpt2.encoding._mergeable_ranks)
        tokenizers = dict(gpt2=gpt2, bytes=ByteTokenizer(), char=CharTokenizer(sorted(set(''.join(MIXED)))))
        for name in ('cl100k_base', 'o200k_base'):
            tokenizers[name] = type(gpt2).__new__(type(gpt2))
            tokenizers[name].encoding = tiktoken.Encoding(**getattr(openai_public, name)())
            tokenizers[name].name, tokenizers[name].eot = name, tokenizers[name].encoding.eot_token
            tokenizers[name].vocab_size = tokenizers[name].encoding.n_vocab
        pairs = {}
        for (name, tokenizer), form in zip(tokenizers.items(), [{}, LLAMA, LLAMA | dict(qk_norm=True), LLAMA, {}]):
            folder = tmp_path_factory.mktemp(name)
            patch.setattr(checkpoint, 'get_tokenizer', lambda meta, tokenizer=tokenizer: tokenizer)
            checkpoint.export_weights(make_run(folder / 'run', form)[0], str(folder / 'hf'))
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
    anything = st.characters(codec='utf-8', max_codepoint=0xFFFF) | st.sampled_from(" \n\t'sSlLdD09.,!-🙂é")
    letters = st.sampled_from(ours.chars) if name == 'char' else anything
    settings(max_examples=150, deadline=None, derandomize=True)(given(st.text(letters))(agree))()
    assert theirs.eos_token_id == theirs.bos_token_id == ours.eot and len(theirs) >= len(set(theirs.get_vocab().values()))
    if name == 'gpt2':
        assert ours.decode_bytes([15496, 50300]) == b'Hello'  # nanoGPT's padding, which an untrained model may draw
        assert theirs.vocab_size == 50257 and theirs('<|endoftext|>')['input_ids'] == [50256]
        assert len(json.loads(theirs.backend_tokenizer.to_str())['model']['merges']) == 50000


# --- through the door ---------------------------------------------------------------------------------------------------

def test_commands(tmp_path):
    out_dir, model, _ = make_run(tmp_path / 'run', moments=True)
    done, _ = side_by_side(lambda: run('kilogpt.checkpoint', 'inspect', out_dir),
                           lambda: run('kilogpt.checkpoint', 'export', out_dir, tmp_path / 'hf', '--dtype=bfloat16'))
    for words in ('iter_00000003: iteration 3, tokens 2304, val_loss 2.5, best_val_loss 2.5, checksums hold', 'n_layer 2',
                  'n_hidden 128', 'learning_rate 0.001', 'tokenizer: char',
                  f'{model.num_params():,} parameters in {4 * model.num_params():,} bytes'):
        assert words in done.stdout
    assert re.search(r'transformer\.h\.0\.\.1\.attn\.c_q\.weight +\(32, 32\) +float32 +2,048\n', done.stdout)
    assert {p.dtype for p in load_file(tmp_path / 'hf' / 'model.safetensors').values()} == {torch.bfloat16}
    checkpoint.import_weights(str(tmp_path / 'hf'), str(tmp_path / 'again'))
    arguments = '--device=cpu --num_samples=1 --max_new_tokens=30 --start=AB'.split()
    text, same = side_by_side(*(lambda source=source: run('sample.py', source, *arguments).stdout
                                for source in (f'--out_dir={tmp_path}/again', f'--init_from={tmp_path}/hf')))
    assert text == same and len(text) > 32


def test_bad_commands(tmp_path, capsys):
    out_dir, *_ = make_run(tmp_path / 'run')
    done = run('kilogpt.checkpoint', 'export', out_dir, tmp_path / 'run', check=False)
    assert done.returncode == 1 and done.stderr == f'error: {tmp_path}/run is there already: name another\n'
    with pytest.raises(ValueError, match='no checkpoint to export'):
        checkpoint.export_weights(str(tmp_path), str(tmp_path / 'hf'))
    with pytest.raises(ValueError, match='openwebtext has 50257 tokens, the weights have 97'):
        checkpoint.export_weights(out_dir, str(tmp_path / 'hf'))
        checkpoint.import_weights(str(tmp_path / 'hf'), str(tmp_path / 'again'), dataset='openwebtext')
    checkpoint.inspect(str(tmp_path / 'hf'))
    assert 'model: block_size 64' in capsys.readouterr().out
    path = tmp_path / 'run' / 'ckpt' / 'iter_00000003' / 'state.json'
    path.write_text(path.read_text() + ' ')
    for command in (checkpoint.inspect, lambda source: checkpoint.export_weights(source, str(tmp_path / 'x'))):
        with pytest.raises(ValueError, match='state.json is not as it was written'):
            command(out_dir)
