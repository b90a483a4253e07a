"""GGUF files, compared with transformers' reader, and with llama.cpp where its Python package is installed.

All weights are random with a standard deviation of 0.2, as in test_weights.py.
"""
import importlib.util
import json
import os
import pathlib
import weakref

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from test_chat_template import FAMILIES, write_folder
from test_json_tokenizer import byte_level, sentence_piece
from test_weights import MIXED, randomize
from tokenizers import Tokenizer, models, pre_tokenizers

from data.tokens.bpe import PATTERNS
from data.tokens.json_tokenizer import JsonTokenizer
from data.tokens.tokenizer import ByteTokenizer, CharTokenizer, get_tokenizer
from kilogpt.weights.gguf.files import read_gguf, write_gguf
from kilogpt.weights.gguf.tokenizer import IGNORE_MERGES, PRE_TOKENIZERS, PROBE, build_pre_tokenizer
from kilogpt.weights.gguf.tokenizer import find_pre_tokenizer, tokenizer_from_gguf, tokenizer_to_gguf
from kilogpt.weights.tensors import LazyTensor, in_memory
from llama_cpp_runs import in_llama_cpp, needs_llama_cpp, worst_difference

MODERN = dict(hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
              intermediate_size=96, max_position_embeddings=64, rms_norm_eps=1e-5)
BASIC = dict(vocab_size=320, bos_token_id=None, eos_token_id=None, pad_token_id=None,
             tie_word_embeddings=False)
LLAMA3 = dict(rope_type='llama3', rope_theta=500000.0, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
              original_max_position_embeddings=8192)
YARN = dict(rope_type='yarn', rope_theta=1e6, factor=4.0, original_max_position_embeddings=16)
PLAIN = dict(rope_type='default', rope_theta=1e4)
LONG = dict(rope_type='longrope', rope_theta=1e4, original_max_position_embeddings=32,
            long_factor=[1.0, 1.5, 2.25, 3.0, 4.0, 5.0, 6.0, 7.0],
            short_factor=[1.0 + i / 8 for i in range(8)])
GEMMA = dict(head_dim=32, query_pre_attn_scalar=32, sliding_window=16, tie_word_embeddings=True)
GEMMA3_ROPE = dict(full_attention=dict(rope_type='linear', rope_theta=1e6, factor=8.0),
                   sliding_attention=dict(rope_type='default', rope_theta=1e4))
EXPERTS = dict(num_experts_per_tok=2, moe_intermediate_size=32)
SHARED = EXPERTS | dict(num_experts=4, shared_expert_intermediate_size=64)
LATENT = EXPERTS | dict(num_key_value_heads=4, kv_lora_rank=24, qk_nope_head_dim=16, qk_rope_head_dim=8,
                        v_head_dim=12, n_routed_experts=8, num_hidden_layers=3, first_k_dense_replace=1)
DEEPSEEK_YARN = YARN | dict(mscale=0.7, mscale_all_dim=0.7)
DELTA = dict(head_dim=32, num_hidden_layers=4, linear_num_value_heads=4, linear_num_key_heads=2,
             linear_key_head_dim=16, linear_value_head_dim=16)
PARTLY = dict(rope_parameters=dict(rope_type='default', rope_theta=1e4, partial_rotary_factor=0.5))
OSS = dict(head_dim=16, num_local_experts=4, num_experts_per_tok=2, sliding_window=8, rope_parameters=YARN)
OLMO3_ROPE = dict(full_attention=YARN, sliding_attention=dict(rope_type='default', rope_theta=1e6))
# {form: (model_type, entries of the config besides BASIC and MODERN)}
FORMS = dict(
    llama=('llama', dict(head_dim=24)),
    llama_bias=('llama', dict(attention_bias=True, mlp_bias=True, tie_word_embeddings=True)),
    llama3=('llama', dict(rope_parameters=LLAMA3)),
    llama_linear=('llama', dict(rope_parameters=dict(rope_type='linear', rope_theta=1e4, factor=2.0))),
    mistral=('mistral', dict(sliding_window=None)),
    mixtral=('mixtral', dict(head_dim=16, num_local_experts=4, num_experts_per_tok=2)),
    qwen2=('qwen2', dict(rope_parameters=YARN)),
    qwen3=('qwen3', dict(head_dim=32, tie_word_embeddings=True)),
    qwen3_moe=('qwen3_moe', EXPERTS | dict(num_experts=4, head_dim=32, norm_topk_prob=True)),
    glm4_moe=('glm4_moe', EXPERTS | dict(n_routed_experts=4, n_shared_experts=2, first_k_dense_replace=1,
                                         use_qk_norm=True, head_dim=32, attention_bias=True,
                                         routed_scaling_factor=1.5)),
    phi3=('phi3', dict(sliding_window=None)),
    phi3_long=('phi3', dict(rope_parameters=LONG, original_max_position_embeddings=32)),
    gemma2=('gemma2', GEMMA),
    gemma3=('gemma3_text', GEMMA | dict(rope_parameters=GEMMA3_ROPE, num_hidden_layers=7)),
    olmo2=('olmo2', {}),
    olmo2_tied=('olmo2', dict(tie_word_embeddings=True)),
    olmo3=('olmo3', dict(sliding_window=8, rope_parameters=OLMO3_ROPE, num_hidden_layers=5)),
    olmo3_every_second=('olmo3', dict(
        sliding_window=8, num_hidden_layers=3,
        layer_types=['sliding_attention', 'full_attention', 'sliding_attention'],
        rope_parameters=dict.fromkeys(OLMO3_ROPE, dict(rope_type='default', rope_theta=1e4)))),
    qwen2_moe=('qwen2_moe', SHARED),
    gpt_oss=('gpt_oss', OSS | dict(rope_parameters=YARN | dict(truncate=True))),
    gpt_oss_tied=('gpt_oss', OSS | dict(tie_word_embeddings=True, num_hidden_layers=3, rope_parameters=PLAIN)),
    deepseek_v2=('deepseek_v2', LATENT | dict(q_lora_rank=20, n_shared_experts=1, routed_scaling_factor=1.5)),
    deepseek_v2_lite=('deepseek_v2', LATENT | dict(q_lora_rank=None, rope_parameters=DEEPSEEK_YARN)),
    deepseek_v3=('deepseek_v3', LATENT | dict(
        q_lora_rank=20, n_group=4, topk_group=2, rope_parameters=DEEPSEEK_YARN)),
    deepseek_v3_whole=('deepseek_v3', LATENT | dict(
        q_lora_rank=None, n_group=1, topk_group=1, norm_topk_prob=False, tie_word_embeddings=True)),
    qwen3_next=('qwen3_next', SHARED | DELTA | PARTLY),
    qwen3_next_tied=('qwen3_next', SHARED | DELTA | PARTLY | dict(
        tie_word_embeddings=True, linear_num_value_heads=2,
        layer_types=['linear_attention', 'full_attention'] * 2)),
    qwen3_5=('qwen3_5_text', DELTA | PARTLY | dict(tie_word_embeddings=True)),
    qwen3_5_six_heads=('qwen3_5_text', DELTA | dict(
        num_hidden_layers=3, linear_num_value_heads=6, linear_conv_kernel_dim=3,
        layer_types=['linear_attention', 'linear_attention', 'full_attention'])),
    granite=('granite', dict(attention_multiplier=0.3, embedding_multiplier=2.0, residual_multiplier=0.5,
                             logits_scaling=4.0)),
    smollm3=('smollm3', dict(num_hidden_layers=5)),
    gpt2=('gpt2', dict(n_positions=64, n_embd=64, n_layer=2, n_head=4, n_inner=256)),
    gpt2_exact=('gpt2', dict(n_positions=64, n_embd=64, n_layer=2, n_head=4, n_inner=96,
                             activation_function='gelu', tie_word_embeddings=True)),
    gpt_neox=('gpt_neox', dict(hidden_size=64, num_hidden_layers=2, num_attention_heads=4,
                               intermediate_size=96, max_position_embeddings=64,
                               use_parallel_residual=False)))
# Architectures that transformers does not read, or only as another model_type
NOT_READ_BY_TRANSFORMERS = {'mistral', 'mixtral', 'glm4_moe', 'olmo2', 'granite', 'smollm3', 'gpt_neox'}
NOT_READ_BY_TRANSFORMERS |= {form for form in FORMS if form.startswith((
    'olmo', 'qwen2_moe', 'gpt_oss', 'deepseek', 'qwen3_next', 'qwen3_5'))}
QUICK_FORMS = ['deepseek_v3', 'gpt_oss', 'qwen3_next', 'qwen3_5_six_heads', 'llama3', 'qwen3', 'gemma3',
               'gpt2_exact', 'mixtral', 'glm4_moe', 'phi3_long', 'gpt_neox']
ALL_FORMS = [form if form in QUICK_FORMS else pytest.param(form, marks=pytest.mark.slow) for form in FORMS]
PROMPT = torch.randint(320, (2, 40), generator=torch.Generator().manual_seed(1))


def make_model(form, **changes):
    from transformers import AutoConfig, AutoModelForCausalLM
    kind, options = FORMS[form]
    options = options if kind in ('gpt2', 'gpt_neox') else MODERN | options
    torch.manual_seed(0)
    return randomize(AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **BASIC | options | changes)))


def save(model, folder):
    """(entries of config.json, {name: LazyTensor}) of a model of transformers that is saved in a folder."""
    model.save_pretrained(folder)
    tensors = {name: in_memory(tensor) for name, tensor in load_file(folder / 'model.safetensors').items()}
    return json.loads((folder / 'config.json').read_text()), tensors


def load(theirs, tensors, folder):
    """The model of transformers with entries and tensors that read_gguf returns."""
    from transformers import AutoModelForCausalLM
    folder.mkdir()
    (folder / 'config.json').write_text(json.dumps(theirs))
    save_file({name: stored.whole().contiguous().clone() for name, stored in tensors.items()},
              folder / 'model.safetensors', metadata=dict(format='pt'))
    return AutoModelForCausalLM.from_pretrained(folder).eval()


@torch.no_grad()
def assert_same_logits(model, other, atol=1e-4):
    logits = model(PROMPT).logits
    assert logits.std() > 0.3
    torch.testing.assert_close(other(PROMPT).logits, logits, atol=atol, rtol=0)


@pytest.mark.parametrize('form', ALL_FORMS)
def test_read_gives_what_was_written(form, tmp_path):
    model = make_model(form)
    theirs, tensors = save(model, tmp_path / 'hf')
    path = str(tmp_path / 'model.gguf')
    write_gguf(path, theirs, tensors, None, 'float32')
    entries, read, write_tokenizer = read_gguf(path)
    assert write_tokenizer is None
    again = load(entries, read, tmp_path / 'again')
    ours, original = again.config.to_dict(), model.config.to_dict()
    different = {key for key in original if ours.get(key) != original[key]}
    # transformers has <s> and </s> of some families even if they are None; gpt-oss names a default of YaRN.
    different -= {'architectures', '_name_or_path', 'bos_token_id', 'eos_token_id'}
    assert different == dict(mistral={'model_type'}, gpt_oss={'rope_parameters'}).get(form, set())
    assert read.keys() == tensors.keys()
    for name, stored in read.items():
        assert stored.shape == tensors[name].shape and stored[1:3].equal(stored.whole()[1:3])
        # Adding 1 to norms and subtracting 1 rounds twice, and so does -exp.
        atol = 2e-7 if 'norm' in name or name.endswith('A_log') else 0
        torch.testing.assert_close(stored.whole(), tensors[name].whole(), atol=atol, rtol=0)
    assert_same_logits(model, again)
    if form not in NOT_READ_BY_TRANSFORMERS and importlib.util.find_spec('accelerate'):
        # Without a config, transformers guesses the width of heads and ignores biases and RoPE's scaling.
        from_file = type(model).from_pretrained(tmp_path, gguf_file='model.gguf', config=model.config)
        assert_same_logits(model, from_file)


def in_llama_cpps_order(rows, heads):
    """LlamaModel.permute in llama.cpp's conversion/llama.py."""
    halves = rows.reshape(heads, 2, len(rows) // heads // 2, *rows.shape[1:])
    return halves.swapaxes(1, 2).reshape(rows.shape)


@pytest.mark.parametrize('form', ['mistral', 'mixtral', 'granite', 'smollm3', 'olmo2', 'gpt_neox', 'gemma2',
                                  'llama3'])
def test_file_has_what_the_converter_of_llama_cpp_writes(form, tmp_path):
    """Formulas of convert_hf_to_gguf.py: the same error in both directions would not be seen otherwise."""
    theirs, tensors = save(make_model(form), tmp_path / 'hf')
    write_gguf(str(tmp_path / 'model.gguf'), theirs, tensors, None, 'float32')
    written = {tensor.name: torch.from_numpy(np.array(tensor.data))
               for tensor in gguf.GGUFReader(tmp_path / 'model.gguf').tensors}
    tensors = {name: stored.whole() for name, stored in tensors.items()}
    if form == 'gpt_neox':
        packed = tensors['gpt_neox.layers.1.attention.query_key_value.weight'].reshape(4, 3, 16, 64)
        parts = [packed[:, i].reshape(64, 64) for i in range(3)]
        assert written['blk.1.attn_qkv.weight'].equal(torch.cat(parts))
        return
    for name, heads in dict(q=4, k=2).items():
        rows = tensors[f'model.layers.1.self_attn.{name}_proj.weight']
        rows = rows if form in ('olmo2', 'gemma2') else in_llama_cpps_order(rows, heads)
        assert written[f'blk.1.attn_{name}.weight'].equal(rows)
    norm = tensors['model.layers.1.post_attention_layernorm.weight']
    name = 'post_attention_norm' if form in ('olmo2', 'gemma2') else 'ffn_norm'
    assert written[f'blk.1.{name}.weight'].equal(norm + 1 if form == 'gemma2' else norm)
    if form == 'mixtral':
        down = [tensors[f'model.layers.1.block_sparse_moe.experts.{i}.w2.weight'] for i in range(4)]
        assert written['blk.1.ffn_down_exps.weight'].equal(torch.stack(down))
    if form == 'llama3':
        expected = []
        for i in range(8):
            wavelength = 2 * np.pi * LLAMA3['rope_theta'] ** (i / 8)
            smooth = (8192 / wavelength - 1) / 3
            middle = 1 / ((1 - smooth) / 8 + smooth)
            expected.append(1 if wavelength < 8192 / 4 else 8 if wavelength > 8192 else middle)
        assert {1, 8} < set(expected)
        torch.testing.assert_close(written['rope_freqs.weight'], torch.tensor(expected), rtol=1e-5, atol=0)


def limit_of(form):
    """How far log-probabilities of llama.cpp may be from ours: it looks GELU up in a table of float16."""
    return 0.05 if form.startswith(('gemma', 'gpt')) else 1e-3


@pytest.mark.slow
@needs_llama_cpp
@pytest.mark.parametrize('form', FORMS)
def test_llama_cpp_computes_the_same(form, tmp_path):
    model, tokenizer = make_model(form), write_folder(tmp_path / 'tokenizer', *FAMILIES['chatml'])
    path = str(tmp_path / 'model.gguf')
    write_gguf(path, *save(model, tmp_path / 'hf'), str(tokenizer), 'float32')
    prompt = PROMPT[0, :24].tolist()
    assert worst_difference(model, prompt, in_llama_cpp(path, prompt, 12)) < limit_of(form)


@needs_llama_cpp
def test_expert_groups_of_deepseek_v2_are_others_in_llama_cpp(tmp_path):
    """Why they are refused. A file that names them is refused too."""
    model = make_model('deepseek_v2', topk_method='group_limited_greedy', n_group=3, topk_group=1,
                       n_routed_experts=12, num_experts_per_tok=3)
    theirs, tensors = save(model, tmp_path / 'hf')
    with pytest.raises(ValueError, match="cannot represent topk_method='group_limited_greedy': llama.cpp"):
        write_gguf(str(tmp_path / 'model.gguf'), theirs, tensors, None)
    tokenizer, path = write_folder(tmp_path / 'tokenizer', *FAMILIES['chatml']), str(tmp_path / 'model.gguf')
    write_gguf(path, theirs | dict(topk_method='greedy'), tensors, str(tokenizer), 'float32')
    groups = {'deepseek2.expert_group_count': 3, 'deepseek2.expert_group_used_count': 1}
    path = change(path, str(tmp_path / 'groups.gguf'), metadata=groups)
    prompt = PROMPT[0, :24].tolist()
    assert worst_difference(model, prompt, in_llama_cpp(path, prompt, 12)) > 0.1
    with pytest.raises(ValueError, match='its expert_group_count is 3, but llama.cpp rates a group'):
        read_gguf(path)


def test_limits_of_yarn_that_llama_cpp_rounds_are_found_again(tmp_path):
    model = make_model('gpt_oss', rope_parameters=YARN | dict(truncate=False))
    path = str(tmp_path / 'model.gguf')
    write_gguf(path, *save(model, tmp_path / 'hf'), None, 'float32')
    theirs, read, _ = read_gguf(path)
    assert theirs['rope_parameters']['truncate'] is False
    assert_same_logits(model, load(theirs, read, tmp_path / 'again'), atol=1e-5)


@pytest.mark.slow
@needs_llama_cpp
def test_experts_in_mxfp4_are_read(tmp_path):
    kind = gguf.GGMLQuantizationType.MXFP4
    tokenizer, path = write_folder(tmp_path / 'tokenizer', *FAMILIES['chatml']), str(tmp_path / 'model.gguf')
    write_gguf(path, *save(make_model('gpt_oss'), tmp_path / 'hf'), str(tokenizer), 'float32')
    packed = {}
    for tensor in gguf.GGUFReader(path).tensors:
        if tensor.name.endswith('_exps.weight'):
            packed[tensor.name] = gguf.quants.quantize(np.array(tensor.data), kind)
    assert len(packed) == 6
    path = change(path, str(tmp_path / 'packed.gguf'), tensors=packed, raw_dtype=kind)
    theirs, read, _ = read_gguf(path)
    again, prompt = load(theirs, read, tmp_path / 'again'), PROMPT[0, :24].tolist()
    experts = again.model.layers[0].mlp.experts.down_proj
    assert len(experts[0, :32, 0].unique()) <= 16
    # llama.cpp rounds the inputs of such products to 8 bits.
    assert worst_difference(again, prompt, in_llama_cpp(path, prompt, 12)) < 0.2


def test_keys_and_values_in_one_matrix_are_read(tmp_path):
    """As in files of DeepSeek that were made before llama.cpp took them apart."""
    model = make_model('deepseek_v3')
    original, path = save(model, tmp_path / 'hf'), str(tmp_path / 'model.gguf')
    write_gguf(path, *original, None, 'float32')
    sizes = dict(key_length=24, value_length=12, key_length_mla=None, value_length_mla=None, head_count_kv=4)
    joined = {}
    for i in range(3):
        matrix = original[1][f'model.layers.{i}.self_attn.kv_b_proj.weight']
        joined[f'blk.{i}.attn_kv_b.weight'] = matrix.whole().numpy()
    split = [f'blk.{i}.attn_{part}_b.weight' for i in range(3) for part in 'kv']
    sizes = {f'deepseek2.attention.{key}': size for key, size in sizes.items()}
    path = change(path, str(tmp_path / 'joined.gguf'), sizes, joined | dict.fromkeys(split))
    theirs, read, _ = read_gguf(path)
    assert_same_logits(model, load(theirs, read, tmp_path / 'again'), atol=1e-5)


# --- types of numbers -----------------------------------------------------------------------------------

@pytest.mark.parametrize('dtype', ['float16', 'bfloat16', 'q8_0'])
def test_numbers_are_rounded_as_the_type_says(dtype, tmp_path):
    theirs, tensors = save(make_model('qwen3_moe'), tmp_path / 'hf')
    narrow = 'model.layers.0.mlp.experts.0.down_proj.weight'
    theirs['moe_intermediate_size'] = 24
    for name in tensors:
        if '.experts.' in name:
            matrix = tensors[name].whole()
            tensors[name] = in_memory(matrix[:, :24] if 'down' in name else matrix[:24])
    path = str(tmp_path / 'model.gguf')
    write_gguf(path, theirs, tensors, None, dtype)
    _, read, _ = read_gguf(path)
    for name, stored in tensors.items():
        original, rounded = stored.whole(), read[name].whole()
        if 'norm' in name or '.gate.' in name:
            assert rounded.dtype == torch.float32 and rounded.equal(original)
        elif dtype != 'q8_0' or 'down_proj' in name:
            half = torch.bfloat16 if dtype == 'bfloat16' else torch.float16
            assert rounded.dtype == half and rounded.equal(original.to(half))
        else:
            # A block of 32 has steps of its largest number / 127, rounded to float16, which has 11 bits.
            largest = original.view(-1, 32).abs().amax(1, keepdim=True)
            error = (rounded - original).view(-1, 32).abs()
            assert (error <= largest * (0.5 / 127 + 2 ** -11)).all() and error.max() > 0
    assert narrow in read


def test_number_too_large_for_float16_is_named(tmp_path):
    theirs, tensors = save(make_model('llama'), tmp_path / 'hf')
    tensors['lm_head.weight'] = in_memory(torch.full((320, 64), 70000.0))
    path = str(tmp_path / 'model.gguf')
    with pytest.raises(ValueError, match='output.weight has a value of 70000, which is too large for '):
        write_gguf(path, theirs, tensors, None, 'float16')
    assert os.listdir(tmp_path) == ['hf']
    write_gguf(path, theirs, tensors, None, 'bfloat16')
    assert os.listdir(tmp_path) != ['hf']


def test_one_tensor_at_a_time_is_in_memory(tmp_path):
    theirs, tensors = save(make_model('llama'), tmp_path / 'hf')
    alive, most = weakref.WeakSet(), 0

    class Tracked(torch.Tensor):
        pass

    def tracked(stored):
        def read(rows):
            nonlocal most
            tensor = stored[rows].clone().as_subclass(Tracked)
            alive.add(tensor)
            most = max(most, len(alive))
            return tensor
        return LazyTensor(stored.shape, stored.dtype, read)

    path = str(tmp_path / 'model.gguf')
    write_gguf(path, theirs, {name: tracked(stored) for name, stored in tensors.items()}, None, 'q8_0')
    assert most <= 2 < len(tensors)


# --- files that cannot be read or written ---------------------------------------------------------------

def change(path, target, metadata=(), tensors=(), raw_dtype=None):
    """Copy a GGUF file with other metadata, and other tensors of the type raw_dtype; None deletes one."""
    reader = gguf.GGUFReader(path)
    fields = {key: field for key, field in reader.fields.items() if not key.startswith('GGUF.')}
    writer = gguf.GGUFWriter(target, fields.pop('general.architecture').contents())
    for key, value in ({key: field.contents() for key, field in fields.items()} | dict(metadata)).items():
        if value is not None:
            new = gguf.GGUFValueType.UINT32 if type(value) is int else gguf.GGUFValueType.get_type(value)
            kinds = fields[key].types if key in fields else [new]
            writer.add_key_value(key, value, kinds[0], kinds[1] if len(kinds) > 1 else None)
    tensors = dict(tensors)
    for tensor in reader.tensors:
        if tensor.name not in tensors:
            writer.add_tensor(tensor.name, np.array(tensor.data))
    for name, array in tensors.items():
        if array is not None:
            writer.add_tensor(name, array, raw_dtype=raw_dtype)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target


@pytest.fixture(scope='module')
def llama_file(tmp_path_factory):
    folder = tmp_path_factory.mktemp('llama')
    write_gguf(str(folder / 'model.gguf'), *save(make_model('llama'), folder), None, 'float32')
    return str(folder / 'model.gguf')


@pytest.mark.parametrize('share', [0, 1e-5, 1e-4, 0.002, 0.005, 0.01, 0.5, 0.9999])
def test_part_of_a_file_is_refused_in_one_sentence(share, llama_file, tmp_path):
    content = pathlib.Path(llama_file).read_bytes()
    path = tmp_path / 'part.gguf'
    path.write_bytes(content[:int(len(content) * share)])
    with pytest.raises(ValueError, match=f'^{path} is not a GGUF file, or is damaged or incomplete: [^\n]*$'):
        read_gguf(str(path))


@pytest.mark.parametrize('metadata, tensors, message', [
    ({'general.architecture': 'rwkv7'}, {}, "its architecture is 'rwkv7', but only llama, "),
    ({'split.count': 3}, {}, 'is one of 3 parts: join them'),
    ({'llama.attention.sliding_window': 16}, {}, 'llama.attention.sliding_window=16, which no llama of tr'),
    ({'llama.block_count': None}, {}, 'its metadata lacks llama.block_count'),
    ({'llama.rope.dimension_count': 8}, {}, 'it rotates 8 dimensions of heads of 24'),
    ({'llama.rope.scaling.type': 'other', 'llama.rope.scaling.factor': 2.0}, {},
     "RoPE scaling 'other' is not linear"),
    ({}, {'rope_freqs.weight': np.full(12, 3, np.float32)}, 'rope_freqs.weight is not the scaling of '),
    ({}, {'x.weight': np.zeros(3, np.float32)}, 'its tensor x.weight is unknown in llama'),
    ({}, {'x.weight': np.zeros(3, np.int32)}, 'the type I32, which the package gguf cannot dequantize'),
    ({'tokenizer.ggml.model': 'gpt2'}, {}, "its metadata are incomplete or wrong: KeyError\\('tokens'\\)"),
    ({'tokenizer.ggml.model': 'bert'}, {}, "its tokenizer is 'bert', but only 'gpt2'"),
    ({'tokenizer.ggml.model': 'gpt2', 'tokenizer.ggml.pre': 'viking', 'tokenizer.ggml.tokens': ['a']}, {},
     "its tokenizer.ggml.pre is 'viking', but only gpt-2, ")])
def test_unknown_content_is_named(metadata, tensors, message, llama_file, tmp_path):
    path = change(llama_file, str(tmp_path / 'changed.gguf'), metadata, tensors)
    with pytest.raises(ValueError, match=f'^{path} [^\n]*{message}[^\n]*$'):
        read_gguf(path)


@pytest.mark.parametrize('form, entries, message', [
    ('llama', dict(model_type='rwkv'), "model_type 'rwkv' is not supported: choose a model of llama, "),
    ('llama', dict(hidden_act='relu'), "hidden_act='relu': llama.cpp knows only hidden_act='silu'"),
    ('mistral', dict(sliding_window=16), 'cannot represent sliding_window=16'),
    ('qwen3_moe', dict(norm_topk_prob=False), 'cannot represent norm_topk_prob=False'),
    ('smollm3', dict(no_rope_layers=[1] * 5), r'cannot represent no_rope_layers=\[1, 1'),
    ('gemma2', dict(query_pre_attn_scalar=7), 'knows only query_pre_attn_scalar=32'),
    ('gemma2', dict(attn_logit_softcapping=None), 'needs attn_logit_softcapping and final_logit_softcapping'),
    ('gemma2', dict(layer_types=['full_attention'] * 2), 'cannot represent layer_types='),
    ('olmo2', dict(head_dim=32), 'cannot represent head_dim=32: llama.cpp knows only head_dim=16'),
    ('olmo3', dict(layer_types=['full_attention'] + 4 * ['sliding_attention']), 'represent layer_types='),
    ('olmo3', dict(rope_parameters=dict(full_attention=PLAIN, sliding_attention=PLAIN | dict(rope_theta=5e4))),
     "cannot represent the RoPE scaling {'sliding_attention': {'rope_theta': 50000.0}}"),
    ('qwen2_moe', dict(mlp_only_layers=[0]), r'cannot represent mlp_only_layers=\[0\]'),
    ('qwen3', dict(rope_parameters=LLAMA3), "a GGUF file of qwen3 cannot represent the RoPE scaling 'llama3'"),
    ('gpt_oss', dict(attention_bias=False), 'cannot represent attention_bias=False'),
    ('deepseek_v2', dict(attention_bias=True), 'cannot represent attention_bias=True'),
    ('deepseek_v3', dict(rope_parameters=YARN | dict(mscale=1.0, mscale_all_dim=0.7)),
     'cannot represent yarn with mscale=1.0 and mscale_all_dim=0.7: llama.cpp knows only two equal ones'),
    ('qwen3_next', dict(linear_value_head_dim=8), 'cannot represent linear_value_head_dim=8: llama.cpp'),
    ('qwen3_next', dict(num_experts=0), "cannot represent num_experts=0"),
    ('gpt2', dict(activation_function='relu'), "llama.cpp knows only activation_function='gelu_new'"),
    ('llama', dict(rope_parameters=dict(rope_type='dynamic', factor=2.0)), "the RoPE scaling 'dynamic' of ")])
def test_model_that_llama_cpp_does_not_know_is_named(form, entries, message, tmp_path):
    theirs, tensors = save(make_model(form), tmp_path / 'hf')
    with pytest.raises(ValueError, match=message):
        write_gguf(str(tmp_path / 'model.gguf'), theirs | entries, tensors, None)
    tensors['model.x.weight'] = in_memory(torch.zeros(3))
    with pytest.raises(ValueError, match='the tensor model.x.weight has no place in a GGUF file of '):
        write_gguf(str(tmp_path / 'model.gguf'), theirs, tensors, None)
    assert os.listdir(tmp_path) == ['hf']


# --- tokenizers -----------------------------------------------------------------------------------------

TEXTS = [*MIXED, 'the quick brown fox', "It's a dark and stormy night 12345\n\n  42", 'a<|end|>b</s> c']


def save_tokenizer(backend, folder, end, template='{{ messages }}'):
    folder.mkdir()
    backend.save(str(folder / 'tokenizer.json'))
    (folder / 'tokenizer_config.json').write_text(json.dumps(dict(eos_token=end, bos_token=end)))
    (folder / 'chat_template.jinja').write_text(template)
    return str(folder)


@pytest.fixture(scope='module', params=[byte_level, sentence_piece])
def model_with_tokenizer(request, tmp_path_factory):
    """(folder of a tokenizer, GGUF file of a model with more rows than tokens)."""
    folder = tmp_path_factory.mktemp('tokenizer')
    backend = request.param()
    end = '<|end|>' if request.param is byte_level else '</s>'
    save_tokenizer(backend, folder / 'tokenizer', end)
    if request.param is sentence_piece:
        (folder / 'tokenizer' / 'tokenizer_config.json').write_text(json.dumps(dict(
            bos_token='<s>', eos_token='</s>', unk_token='<unk>')))
    theirs, tensors = save(make_model('llama'), folder / 'hf')
    theirs['vocab_size'] = 500
    for name in ('model.embed_tokens.weight', 'lm_head.weight'):
        tensors[name] = in_memory(torch.cat([tensors[name].whole(), torch.zeros(180, 64)]))
    write_gguf(str(folder / 'model.gguf'), theirs, tensors, str(folder / 'tokenizer'), 'float32')
    return str(folder / 'tokenizer'), str(folder / 'model.gguf')


def test_tokenizer_is_the_one_that_was_written(model_with_tokenizer, tmp_path):
    folder, path = model_with_tokenizer
    theirs, _, write_tokenizer = read_gguf(path)
    write_tokenizer(tmp_path)
    original, again = JsonTokenizer(folder), JsonTokenizer(tmp_path)
    for text in TEXTS:
        assert again.encode(text) == original.encode(text)
        assert again.encode_prompt(text) == original.encode_prompt(text)
        assert again.decode(original.encode(text)) == original.decode(original.encode(text))
    assert again.vocab_size == original.vocab_size < 500 == theirs['vocab_size']
    assert again.eot == original.eot == theirs['eos_token_id'] is not None
    config = json.loads((tmp_path / 'tokenizer_config.json').read_text())
    assert config['chat_template'] == '{{ messages }}'
    tokens = gguf.GGUFReader(path).fields['tokenizer.ggml.tokens'].contents()
    assert tokens[-1] == '[PAD499]' and len(tokens) == 500
    # Once more, everything is the same.
    entries = tokenizer_to_gguf(str(tmp_path), 500)
    assert entries['tokenizer.ggml.tokens'] == tokens
    files = tokenizer_from_gguf(entries)
    assert files['tokenizer.json'] == (tmp_path / 'tokenizer.json').read_text()


def test_tokenizer_is_that_of_transformers(model_with_tokenizer, tmp_path):
    pytest.importorskip('accelerate', reason='transformers reads GGUF files only with accelerate')
    from transformers import AutoTokenizer
    _, path = model_with_tokenizer
    read_gguf(path)[2](tmp_path)
    ours = JsonTokenizer(tmp_path)
    theirs = AutoTokenizer.from_pretrained(os.path.dirname(path), gguf_file='model.gguf')
    # llama.cpp also puts a space before a text that begins with a space, and after special tokens.
    texts = [text for text in TEXTS if text[:1] not in ('', ' ') and '</s>' not in text]
    for text in texts:
        assert theirs(text, add_special_tokens=False)['input_ids'] == ours.encode(text)
    assert len(texts) > 7


@pytest.mark.slow
@needs_llama_cpp
def test_tokenizer_is_that_of_llama_cpp(model_with_tokenizer, tmp_path):
    _, path = model_with_tokenizer
    read_gguf(path)[2](tmp_path)
    texts = [text.replace('\0', '') for text in TEXTS]
    found = in_llama_cpp(path, [1, 2], 1, texts)['texts']
    assert found == [JsonTokenizer(tmp_path).encode_prompt(text) for text in texts]


def test_bytes_have_their_own_ids(tmp_path):
    (tmp_path / 'first').mkdir()
    ByteTokenizer().save(str(tmp_path / 'first'), 64)
    for name, text in tokenizer_from_gguf(tokenizer_to_gguf(str(tmp_path / 'first'), 256)).items():
        (tmp_path / name).write_text(text)
    assert all(JsonTokenizer(tmp_path).encode(text) == list(text.encode()) for text in TEXTS)


@pytest.mark.slow
def test_gpt2_of_tiktoken_keeps_its_ids(vocabulary, monkeypatch, tmp_path):
    monkeypatch.setenv('TIKTOKEN_CACHE_DIR', vocabulary)
    tokenizer = get_tokenizer(dict(tokenizer='gpt2'))
    (tmp_path / 'first').mkdir()
    tokenizer.save(str(tmp_path / 'first'), 64)
    entries = tokenizer_to_gguf(str(tmp_path / 'first'), 50304)
    assert entries['tokenizer.ggml.pre'] == 'gpt-2' and entries['tokenizer.ggml.eos_token_id'] == 50256
    for name, text in tokenizer_from_gguf(entries).items():
        (tmp_path / name).write_text(text)
    again = JsonTokenizer(tmp_path)
    assert all(again.encode_prompt(text) == tokenizer.encode_prompt(text) for text in TEXTS)
    assert again.eot == tokenizer.eot


def with_pre_tokenizer(*steps):
    tokenizer = Tokenizer(models.BPE(vocab={'a': 0, 'b': 1, 'ab': 2}, merges=[('a', 'b')]))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(list(steps))
    return tokenizer


def name_of(tokenizer):
    return find_pre_tokenizer('x', tokenizer, json.loads(tokenizer.to_str()))


def test_splits_are_recognised_in_any_spelling():
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    plain = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    digits = pre_tokenizers.Digits(individual_digits=True)
    assert name_of(with_pre_tokenizer(byte_level)) == 'gpt-2'
    assert name_of(with_pre_tokenizer(digits, byte_level)) == 'smollm'
    from tokenizers import Regex
    split = pre_tokenizers.Split(Regex(PATTERNS['gpt4']), 'isolated')
    gpt4 = with_pre_tokenizer(split, plain)
    assert name_of(gpt4) == 'dbrx'  # as Llama 3, but words that are tokens are merged like others
    gpt4.model.ignore_merges = True
    assert name_of(gpt4) == 'llama-bpe'
    for name, patterns in PRE_TOKENIZERS.items():
        found = name_of(with_pre_tokenizer(build_pre_tokenizer(name)))
        assert PRE_TOKENIZERS[found] == patterns and found not in IGNORE_MERGES - {'tekken'}
    split_by = {name: str(build_pre_tokenizer(name).pre_tokenize_str(PROBE)) for name in PRE_TOKENIZERS}
    assert len(set(split_by.values())) == len({str(patterns) for patterns in PRE_TOKENIZERS.values()})


def test_tokenizer_that_llama_cpp_does_not_have_is_named(tmp_path):
    (tmp_path / 'chars').mkdir()
    CharTokenizer('abc').save(str(tmp_path / 'chars'), 64)
    with pytest.raises(ValueError, match='chars/tokenizer.json is BPE without bytes, but llama.cpp needs '):
        tokenizer_to_gguf(str(tmp_path / 'chars'), 3)
    folder = save_tokenizer(byte_level(), tmp_path / 'small', '<|end|>')
    with pytest.raises(ValueError, match='tokenizer.json has 314 tokens, but the model has 100'):
        tokenizer_to_gguf(folder, 100)
    whitespace = byte_level()
    whitespace.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    folder = save_tokenizer(whitespace, tmp_path / 'whitespace', '<|end|>')
    with pytest.raises(ValueError, match='tokenizer.json splits words in a way for which llama.cpp has no '):
        tokenizer_to_gguf(folder, 320)


# --- a real model ---------------------------------------------------------------------------------------
