"""Every family of `transformers` that our model can represent, read and written, against transformers itself.

The models of transformers are tiny, with other widths, epsilons and angles than any default, and all weights,
norms and biases are random with a standard deviation of 0.2, so that a wrong part causes errors far above the
tolerance of 1e-4, which is for sums of float32 in another order.
"""
import json
import re
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file
from test_weights import assert_same_predictions, assert_same_tensors, model_from, randomize

from helpers import ROOT
from kilogpt.weights.exporting import export_weights
from kilogpt.weights.families import FAMILIES, arguments_of, entries_of
from kilogpt.weights.importing import import_weights, read_weights
from model import GPTConfig

ENDS = dict(bos_token_id=None, eos_token_id=None, pad_token_id=None, vocab_size=97)
MODERN = ENDS | dict(
    hidden_size=32, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, intermediate_size=88,
    max_position_embeddings=64, rms_norm_eps=1e-3, rope_theta=300.0, initializer_range=0.02)
YARN = dict(rope_type='yarn', rope_theta=300.0, factor=4.0, original_max_position_embeddings=16,
            beta_fast=3.0, beta_slow=0.5)
LLAMA3 = dict(rope_type='llama3', rope_theta=300.0, factor=8.0, original_max_position_embeddings=32,
              low_freq_factor=1.0, high_freq_factor=4.0)
LINEAR = dict(rope_type='linear', rope_theta=300.0, factor=4.0)
MOE = dict(moe_intermediate_size=24, num_experts_per_tok=3, head_dim=12)
LATENT = dict(kv_lora_rank=24, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=10, num_key_value_heads=4,
              moe_intermediate_size=24, num_experts_per_tok=2, n_routed_experts=6)
OSS = dict(num_local_experts=6, num_experts_per_tok=3, sliding_window=5, head_dim=12)
SLIDING = ['sliding_attention', 'full_attention', 'sliding_attention', 'full_attention']
DELTA = dict(head_dim=16, linear_num_value_heads=4, linear_num_key_heads=2, linear_key_head_dim=16, rope_theta=None,
             linear_value_head_dim=12, rope_parameters=dict(rope_type='default', rope_theta=300.0, partial_rotary_factor=0.5))
HYBRID = ['linear_attention', 'full_attention', 'linear_attention', 'linear_attention']
QWEN3_NEXT = DELTA | dict(num_experts=6, moe_intermediate_size=24, num_experts_per_tok=3,
                          shared_expert_intermediate_size=48)
QWEN2_MOE = dict(num_experts=6, moe_intermediate_size=24, num_experts_per_tok=3,
                 shared_expert_intermediate_size=48)
OLMO_HYBRID = dict(linear_num_value_heads=2, linear_num_key_heads=2, linear_key_head_dim=16, rope_theta=None,
                   linear_value_head_dim=12)
GEMMA = dict(head_dim=12, hidden_activation='gelu_pytorch_tanh')

# {name: (class of the config, its entries)}; a name begins with the family
CASES = {
    'gpt2': ('GPT2', ENDS | dict(n_positions=64, n_embd=32, n_layer=2, n_head=4, n_inner=72,
                                 layer_norm_epsilon=1e-3, tie_word_embeddings=False)),
    'llama': ('Llama', dict(head_dim=12)),
    'llama biases': ('Llama', dict(attention_bias=True, mlp_bias=True, tie_word_embeddings=True)),
    'llama attention bias': ('Llama', dict(attention_bias=True)),
    'llama mlp bias': ('Llama', dict(mlp_bias=True)),
    'llama llama3': ('Llama', dict(rope_parameters=LLAMA3)),
    'llama yarn': ('Llama', dict(rope_parameters=YARN)),
    'llama yarn mscale': ('Llama', dict(rope_parameters=YARN | dict(mscale=0.7, mscale_all_dim=0.5))),
    'llama linear': ('Llama', dict(rope_parameters=LINEAR)),
    # Its 59 tokens are beyond the 32 positions of the original context.
    'llama dynamic': ('Llama', dict(rope_parameters=LINEAR | dict(rope_type='dynamic'),
                                    max_position_embeddings=32)),
    'mistral': ('Mistral', dict(sliding_window=5, head_dim=12)),
    'mistral without windows': ('Mistral', dict(sliding_window=None)),
    'qwen2': ('Qwen2', dict(tie_word_embeddings=True)),
    'qwen2 windows': ('Qwen2', dict(use_sliding_window=True, sliding_window=6, max_window_layers=2)),
    'qwen3': ('Qwen3', dict(head_dim=12, tie_word_embeddings=True)),
    'qwen3 bias': ('Qwen3', dict(head_dim=12, attention_bias=True)),
    'qwen3 windows': ('Qwen3', dict(use_sliding_window=True, sliding_window=6, layer_types=SLIDING)),
    'smollm3': ('SmolLM3', {}),
    'smollm3 windows': ('SmolLM3', dict(no_rope_layers=[1, 0, 0, 1], use_sliding_window=True,
                                        sliding_window=6, attention_bias=True)),
    'olmo2': ('Olmo2', {}),
    'olmo2 bias': ('Olmo2', dict(attention_bias=True, num_key_value_heads=4)),
    'olmo3': ('Olmo3', dict(sliding_window=5, rope_parameters=dict(
        full_attention=dict(rope_type='default', rope_theta=500000.0),
        sliding_attention=dict(rope_type='default', rope_theta=500000.0)))),
    'olmo3 yarn': ('Olmo3', dict(sliding_window=5, layer_types=SLIDING, attention_bias=True, rope_parameters=dict(
        full_attention=YARN | dict(rope_theta=500000.0),
        sliding_attention=dict(rope_type='default', rope_theta=500000.0)))),
    'olmo3 without windows': ('Olmo3', dict(layer_types=['full_attention'] * 4, num_key_value_heads=4, rope_parameters=dict(
        full_attention=YARN | dict(rope_theta=500000.0),
        sliding_attention=dict(rope_type='default', rope_theta=500000.0)))),
    'phi3': ('Phi3', dict(sliding_window=7)),
    'phi3 partial': ('Phi3', dict(sliding_window=None, rope_parameters=dict(
        rope_type='default', rope_theta=300.0, partial_rotary_factor=0.75))),
    'granite': ('Granite', dict(embedding_multiplier=3.0, attention_multiplier=0.2, residual_multiplier=0.4,
                                logits_scaling=0.7)),
    'granite biases': ('Granite', dict(attention_bias=True, mlp_bias=True, attention_multiplier=0.5)),
    'gpt_neox': ('GPTNeoX', dict(rotary_pct=0.25, layer_norm_eps=1e-3)),
    'gpt_neox sequential': ('GPTNeoX', dict(use_parallel_residual=False, attention_bias=False, rotary_pct=1.0,
                                            hidden_act='gelu_new')),
    'gemma': ('Gemma', GEMMA | dict(hidden_act='gelu_pytorch_tanh')),
    'gemma2': ('Gemma2', GEMMA | dict(sliding_window=5, query_pre_attn_scalar=20, attn_logit_softcapping=2.0,
                                      final_logit_softcapping=3.0)),
    'gemma2 without caps': ('Gemma2', GEMMA | dict(attn_logit_softcapping=None, final_logit_softcapping=None,
                                                   attention_bias=True, layer_types=['full_attention'] * 4)),
    'gemma3_text': ('Gemma3Text', GEMMA | dict(
        sliding_window=5, query_pre_attn_scalar=20, layer_types=SLIDING, rope_parameters=dict(
            full_attention=LINEAR, sliding_attention=dict(rope_type='default', rope_theta=50.0)))),
    'mixtral': ('Mixtral', dict(num_local_experts=6, num_experts_per_tok=2)),
    'mixtral window': ('Mixtral', dict(num_local_experts=6, num_experts_per_tok=3, sliding_window=5,
                                       router_aux_loss_coef=0.0)),
    'qwen3_moe': ('Qwen3Moe', MOE | dict(num_experts=6, decoder_sparse_step=2, norm_topk_prob=True)),
    'qwen3_moe as they are': ('Qwen3Moe', MOE | dict(num_experts=6, norm_topk_prob=False)),
    'qwen3_moe single': ('Qwen3Moe', MOE | dict(num_experts=6, num_experts_per_tok=1, norm_topk_prob=False)),
    'glm4_moe': ('Glm4Moe', MOE | dict(n_routed_experts=6, n_shared_experts=2, first_k_dense_replace=1,
                                       use_qk_norm=True, partial_rotary_factor=1.0)),
    'glm4_moe partial': ('Glm4Moe', MOE | dict(
        n_routed_experts=6, n_shared_experts=1, first_k_dense_replace=2, attention_bias=True,
        routed_scaling_factor=2.5, norm_topk_prob=False, rope_parameters=dict(
            rope_type='default', rope_theta=300.0, partial_rotary_factor=0.5))),
    'glm4_moe groups': ('Glm4Moe', MOE | dict(n_routed_experts=6, n_group=3, topk_group=2, num_experts_per_tok=3,
                                              first_k_dense_replace=1, partial_rotary_factor=1.0)),
    'gpt_oss': ('GptOss', dict(OSS, rope_parameters=YARN | dict(truncate=False))),
    'gpt_oss without windows': ('GptOss', dict(OSS, layer_types=['full_attention'] * 4, attention_bias=False,
                                               router_aux_loss_coef=0.0, rope_parameters=LINEAR)),
    'gpt_oss tied': ('GptOss', dict(OSS, num_experts_per_tok=2, layer_types=SLIDING[::-1], tie_word_embeddings=True,
                                    rope_parameters=YARN)),
    'deepseek_v3': ('DeepseekV3', LATENT | dict(q_lora_rank=20, n_group=3, topk_group=2, first_k_dense_replace=1,
                                                rope_parameters=YARN | dict(mscale=0.7, mscale_all_dim=0.5))),
    'deepseek_v3 queries as they are': ('DeepseekV3', LATENT | dict(
        q_lora_rank=None, n_group=1, topk_group=1, first_k_dense_replace=2, n_shared_experts=2,
        norm_topk_prob=False, routed_scaling_factor=1.5)),
    'deepseek_v3 biases': ('DeepseekV3', LATENT | dict(q_lora_rank=16, attention_bias=True, n_group=2, topk_group=1,
                                                       first_k_dense_replace=0, v_head_dim=12)),
    'deepseek_v2': ('DeepseekV2', LATENT | dict(q_lora_rank=20, topk_method='group_limited_greedy', n_group=3,
                                                topk_group=2, first_k_dense_replace=1, routed_scaling_factor=3.0)),
    'deepseek_v2 greedy': ('DeepseekV2', LATENT | dict(q_lora_rank=None, first_k_dense_replace=0, n_shared_experts=1,
                                                       rope_parameters=YARN | dict(mscale=0.7, mscale_all_dim=0.7))),
    'deepseek_v2 biases': ('DeepseekV2', LATENT | dict(q_lora_rank=16, attention_bias=True, mlp_bias=True,
                                                       first_k_dense_replace=2, num_hidden_layers=3)),
    'qwen3_5_text': ('Qwen3_5Text', DELTA | dict(layer_types=HYBRID)),
    'qwen3_5_text regular': ('Qwen3_5Text', DELTA | dict(full_attention_interval=2, linear_conv_kernel_dim=3)),
    'qwen3_5_text equal heads': ('Qwen3_5Text', DELTA | dict(linear_num_value_heads=2, tie_word_embeddings=True,
                                                             num_key_value_heads=4)),
    'qwen2_moe': ('Qwen2Moe', QWEN2_MOE),
    'qwen2_moe some': ('Qwen2Moe', QWEN2_MOE | dict(decoder_sparse_step=2, qkv_bias=False, router_aux_loss_coef=0.0)),
    'qwen2_moe windows': ('Qwen2Moe', QWEN2_MOE | dict(
        norm_topk_prob=True, use_sliding_window=True, sliding_window=5, max_window_layers=2, mlp_only_layers=[0])),
    'qwen3_next': ('Qwen3Next', QWEN3_NEXT | dict(layer_types=HYBRID)),
    'qwen3_next some': ('Qwen3Next', QWEN3_NEXT | dict(decoder_sparse_step=2, norm_topk_prob=False,
                                                       linear_num_value_heads=6)),
    'qwen3_next dense': ('Qwen3Next', DELTA | dict(num_experts=0)),
    'olmo_hybrid': ('OlmoHybrid', OLMO_HYBRID | dict(layer_types=HYBRID)),
    'olmo_hybrid positions': ('OlmoHybrid', OLMO_HYBRID | dict(
        linear_num_value_heads=4, rope_parameters=dict(rope_type='default', rope_theta=300.0))),
    'olmo_hybrid widths': ('OlmoHybrid', dict(linear_allow_neg_eigval=False, attention_bias=True)),
}
FEW = ('deepseek_v3', 'gpt_oss', 'llama yarn', 'qwen2', 'olmo2', 'gpt_neox', 'phi3 partial', 'gemma3_text', 'glm4_moe partial',
       'qwen3_next')
cases = pytest.mark.parametrize('case', [
    pytest.param(case, marks=() if case in FEW else pytest.mark.slow) for case in CASES])


def make_theirs(case):
    """The model of transformers of a case, with random weights."""
    kind, entries = CASES[case]
    config = getattr(transformers, f'{kind}Config')(**(entries if kind == 'GPT2' else MODERN | entries))
    architecture = kind.removesuffix('Text') if kind != 'GPT2' else 'GPT2LMHead'
    name = 'GPT2LMHeadModel' if kind == 'GPT2' else f'{architecture}ForCausalLM'
    config._attn_implementation = 'eager'  # with softcaps, the default of Gemma 2 too
    return randomize(getattr(transformers, name)(config))


@pytest.mark.drawn(20)
@cases
def test_folder_of_transformers_is_read_and_written_back(case, tmp_path):
    """Through shards in bfloat16 and a run's folder, and in the form of files before version 5."""
    theirs = make_theirs(case).bfloat16()
    theirs.save_pretrained(tmp_path / 'hf', max_shard_size='20KB')
    theirs = type(theirs).from_pretrained(tmp_path / 'hf', dtype=torch.float32, attn_implementation='eager')
    assert_same_predictions(model_from(tmp_path / 'hf'), theirs)
    arguments, _, meta = read_weights(str(tmp_path / 'hf'))
    assert meta is None

    import_weights(str(tmp_path / 'hf'), str(tmp_path / 'run'))
    export_weights(str(tmp_path / 'run'), str(tmp_path / 'again'), dtype='bfloat16')
    assert read_weights(str(tmp_path / 'again'))[0] == arguments
    again = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / 'again', dtype=torch.float32, attn_implementation='eager')
    assert_same_predictions(model_from(tmp_path / 'hf'), again)
    family = json.loads((tmp_path / 'hf' / 'config.json').read_text())['model_type']
    if type(again) is type(theirs) and family != 'gpt2':  # Mistral without windows becomes Llama
        expected = {}
        for shard in (tmp_path / 'hf').glob('*.safetensors'):
            expected |= load_file(shard)
        if family == 'olmo_hybrid':
            expected = as_olmo_publishes(expected)
        assert_same_tensors(load_file(tmp_path / 'again' / 'model.safetensors'), expected)


def as_olmo_publishes(tensors):
    """Tensors that transformers 5.24 has saved, with the norms of attention and the cuts of published files."""
    found = {}
    for name, tensor in tensors.items():
        layer = re.search(r'^model\.layers\.\d+\.', name)
        if layer and f'{layer[0]}self_attn.q_proj.weight' in tensors:
            name = name.replace('feedforward_layer_norm', 'post_attention_layernorm')
        found[name] = tensor
    for name in [name for name in found if name.endswith('.q_conv1d.weight')]:
        names = [name.replace('.q_', f'.{part}_') for part in 'qkv']
        sizes = [found[each.replace('_conv1d', '_proj')].shape[0] for each in names]
        whole = torch.cat([found[each] for each in names])
        found |= {each: part.clone() for each, part in zip(names, whole.split(sizes))}
    return found


@cases
def test_config_of_version_4_is_read_alike(case, tmp_path):
    make_theirs(case).save_pretrained(tmp_path)
    arguments = read_weights(str(tmp_path))[0]
    path = tmp_path / 'config.json'
    config = json.loads(path.read_text())
    rope = config.pop('rope_parameters', None)
    if rope is None or rope.get('rope_theta', 'two') is None:
        pytest.skip('GPT-2 has no rotary angles, and OLMo Hybrid may have none')
    if 'full_attention' in rope:
        config['rope_local_base_freq'] = rope['sliding_attention']['rope_theta']
        rope = rope['full_attention']
    config['rope_theta'] = config['rotary_emb_base'] = rope.pop('rope_theta')
    share = rope.pop('partial_rotary_factor', None)
    if share is not None:
        config['partial_rotary_factor'] = config['rotary_pct'] = share
    kind = rope.pop('rope_type')
    config['rope_scaling'] = None if kind == 'default' else rope | dict(type=kind)
    path.write_text(json.dumps(config))
    assert read_weights(str(tmp_path))[0] == arguments


def test_every_family_has_a_case_and_a_row_in_the_docs():
    text = Path(ROOT, 'docs', 'weights.md').read_text()
    for family in FAMILIES:
        assert any(case.split()[0] == family for case in CASES)
        assert re.search(rf'^\|.*`{family}`.*\|', text, flags=re.M), family


@pytest.mark.parametrize('family', FAMILIES)
def test_entries_of_a_family_mean_the_same_to_its_own_class(family):
    case = next(case for case in CASES if case.split()[0] == family)
    theirs = make_theirs(case).config
    arguments = arguments_of(theirs.to_dict(), 'x')
    entries = entries_of(GPTConfig(**arguments), family)
    assert entries['model_type'] == family
    again = arguments_of(type(theirs)(**entries).to_dict(), 'x')
    assert GPTConfig(**again) == GPTConfig(**arguments)
