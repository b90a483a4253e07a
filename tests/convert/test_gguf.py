"""GGUF files, compared with transformers' own reader and with llama.cpp where its Python package is installed.

All weights are random with a standard deviation of 0.2, as in test_weights.py.
"""
import importlib.util
import json
import os
import pathlib
import struct
import subprocess
import sys

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from test_weights import randomize

from kilogpt.convert.gguf_families import FAMILIES
from kilogpt.convert.gguf_files import read_gguf, write_gguf
from kilogpt.convert.gguf_tokenizer import PRE_TOKENIZERS, PROBE, SAME_SPLIT, build_pre_tokenizer
from kilogpt.convert.gguf_tokenizer import find_pre_tokenizer, tokenizer_from_gguf, tokenizer_to_gguf
from kilogpt.convert.tensors import in_memory

COMMON = dict(vocab_size=320, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
              intermediate_size=96, max_position_embeddings=64, rms_norm_eps=1e-5, bos_token_id=None,
              eos_token_id=None, pad_token_id=None, tie_word_embeddings=False)
LLAMA3 = dict(rope_type='llama3', rope_theta=500000.0, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
              original_max_position_embeddings=8192)
YARN = dict(rope_type='yarn', rope_theta=1e6, factor=4.0, original_max_position_embeddings=16)
LONG = dict(rope_type='longrope', rope_theta=1e4, original_max_position_embeddings=32,
            long_factor=[1.0, 1.5, 2.25, 3.0, 4.0, 5.0, 6.0, 7.0], short_factor=[1.0 + i / 8 for i in range(8)])
EXPERTS = dict(num_experts_per_tok=2, moe_intermediate_size=32)
# {form: (model_type, entries of the config besides COMMON)}
FORMS = dict(
    llama=('llama', dict(head_dim=24)),
    llama_bias=('llama', dict(attention_bias=True, mlp_bias=True, tie_word_embeddings=True)),
    llama3=('llama', dict(rope_parameters=LLAMA3)),
    llama_linear=('llama', dict(rope_parameters=dict(rope_type='linear', rope_theta=1e4, factor=2.0))),
    mistral=('mistral', dict(sliding_window=None)),
    mixtral=('mixtral', dict(num_local_experts=4, num_experts_per_tok=2)),
    qwen2=('qwen2', dict(rope_parameters=YARN)),
    qwen3=('qwen3', dict(head_dim=32, tie_word_embeddings=True)),
    qwen3_moe=('qwen3_moe', EXPERTS | dict(num_experts=4, head_dim=32, norm_topk_prob=True)),
    glm4_moe=('glm4_moe', EXPERTS | dict(n_routed_experts=4, n_shared_experts=2, first_k_dense_replace=1,
                                         use_qk_norm=True, head_dim=32, attention_bias=True,
                                         routed_scaling_factor=1.5)),
    phi3=('phi3', dict(sliding_window=None)),
    phi3_long=('phi3', dict(rope_parameters=LONG, original_max_position_embeddings=32)),
    gemma2=('gemma2', dict(head_dim=32, query_pre_attn_scalar=32, sliding_window=16, tie_word_embeddings=True)),
    gemma3=('gemma3_text', dict(head_dim=32, query_pre_attn_scalar=32, sliding_window=16, num_hidden_layers=7,
                                tie_word_embeddings=True)),
    olmo2=('olmo2', {}),
    granite=('granite', dict(attention_multiplier=0.3, embedding_multiplier=2.0, residual_multiplier=0.5,
                             logits_scaling=4.0)),
    smollm3=('smollm3', dict(num_hidden_layers=5)),
    gpt2=('gpt2', dict(n_positions=64, n_embd=64, n_layer=2, n_head=4, n_inner=None)),
    gpt2_exact=('gpt2', dict(n_positions=64, n_embd=64, n_layer=2, n_head=4, activation_function='gelu',
                             tie_word_embeddings=True)),
    gpt_neox=('gpt_neox', dict(layer_norm_eps=1e-5, use_parallel_residual=True)))
# Forms that transformers 5.24 reads from GGUF, apart from its own faults (see test_transformers_reads_the_file).
READ_BY_TRANSFORMERS = ('llama', 'qwen2', 'qwen3', 'qwen3_moe', 'phi3', 'gemma2', 'gemma3', 'gpt2')
PROMPT = torch.randint(320, (2, 40), generator=torch.Generator().manual_seed(1))


def make_model(form):
    from transformers import AutoConfig, AutoModelForCausalLM
    kind, options = FORMS[form]
    torch.manual_seed(0)
    return randomize(AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **COMMON | options)))


def save(model, folder):
    """(entries of config.json, {name: Stored}) of a model of transformers that is saved in a folder."""
    model.save_pretrained(folder)
    tensors = {name: in_memory(tensor) for name, tensor in load_file(folder / 'model.safetensors').items()}
    return json.loads((folder / 'config.json').read_text()), tensors


def load(theirs, tensors):
    """The model of transformers with entries and tensors that read_gguf returns."""
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM
    import tempfile
    with tempfile.TemporaryDirectory() as folder:
        pathlib.Path(folder, 'config.json').write_text(json.dumps(theirs))
        save_file({name: tensor.whole().contiguous().clone() for name, tensor in tensors.items()}, f'{folder}/model.safetensors',
                  metadata=dict(format='pt'))
        return AutoModelForCausalLM.from_pretrained(folder).eval()


@pytest.mark.parametrize('form', FORMS)
def test_read_gives_what_was_written(form, tmp_path):
    model = make_model(form)
    theirs, tensors = save(model, tmp_path)
    path = str(tmp_path / 'model.gguf')
    write_gguf(path, theirs, tensors, None, 'float32')
    entries, read, write_tokenizer = read_gguf(path)
    assert write_tokenizer is None
    again = load(entries, read)
    ours, original = again.config.to_dict(), model.config.to_dict()
    different = {key for key in original if ours.get(key) != original[key]} - {'architectures', '_name_or_path'}
    assert different == ({'model_type'} if form == 'mistral' else set())
    assert read.keys() == tensors.keys()
    for name, stored in read.items():
        assert stored.shape == tensors[name].shape and stored[1:3].equal(stored.whole()[1:3])
        # Adding 1 to the norms of Gemma and subtracting 1 rounds twice.
        atol = 2e-7 if form.startswith('gemma') and 'norm' in name else 0
        torch.testing.assert_close(stored.whole(), tensors[name].whole(), atol=atol, rtol=0)
    with torch.no_grad():
        torch.testing.assert_close(again(PROMPT).logits, model(PROMPT).logits, atol=1e-4, rtol=0)


RUN_LLAMA_CPP = """
import ctypes, sys
import numpy as np
import llama_cpp
path, out, ids = sys.argv[1], sys.argv[2], [int(i) for i in sys.argv[3].split()]
llama_cpp.llama_backend_init()
options = llama_cpp.llama_model_default_params()
model = llama_cpp.llama_model_load_from_file(path.encode(), options)
options = llama_cpp.llama_context_default_params()
options.n_ctx, options.n_batch, options.n_threads = 256, 64, 1
options.type_k = options.type_v = 0  # float32
options.flash_attn_type = 0
context = llama_cpp.llama_init_from_model(model, options)
batch = llama_cpp.llama_batch_init(len(ids), 0, 1)
batch.n_tokens = len(ids)
for i, token in enumerate(ids):
    batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.seq_id[i][0], batch.logits[i] = token, i, 1, 0, 1
assert llama_cpp.llama_decode(context, batch) == 0
n_vocab = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
logits = [np.ctypeslib.as_array(llama_cpp.llama_get_logits_ith(context, i), (n_vocab,)) for i in range(len(ids))]
np.save(out, np.stack(logits))
"""


@pytest.mark.skipif(not importlib.util.find_spec('llama_cpp'), reason='llama-cpp-python is not installed: PyPI has '
                    'only its source, which takes minutes to compile')
@pytest.mark.parametrize('form', FORMS)
def test_llama_cpp_computes_the_same(form, tmp_path):
    model = make_model(form)
    write_gguf(str(tmp_path / 'model.gguf'), *save(model, tmp_path), None, 'float32')
    ids = ' '.join(map(str, PROMPT[0].tolist()))
    done = subprocess.run([sys.executable, '-c', RUN_LLAMA_CPP, tmp_path / 'model.gguf', tmp_path / 'logits.npy', ids],
                          capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    with torch.no_grad():
        expected = model(PROMPT[:1]).logits[0]
    logits = torch.from_numpy(np.load(tmp_path / 'logits.npy'))
    print(form, (logits - expected).abs().max(), expected.std())
    assert logits.argmax(-1).equal(expected.argmax(-1))
    torch.testing.assert_close(logits, expected, atol=0.01, rtol=0)
