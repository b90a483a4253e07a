"""A config.json with entries that are moved or missing: our logits are those of transformers, or it is refused."""
import json
import random
import shutil
import sys

import pytest
import torch

from drawing import check_draws, counted
from helpers import ROOT

transformers = pytest.importorskip('transformers')
transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()
sys.path.insert(0, f'{ROOT}/tests/weights')
from test_families import CASES, LINEAR, LLAMA3, MODERN, YARN  # noqa: E402
from test_weights import model_from, randomize  # noqa: E402

TOKENS = torch.randint(97, (2, 40), generator=torch.Generator().manual_seed(0))
# Entries that change no logit, and those with the ids of special tokens
PASSIVE = {'architectures', 'model_type', 'dtype', 'torch_dtype', 'transformers_version', 'id2label', 'label2id',
           'problem_type', 'vocab_size', 'chunk_size_feed_forward', 'is_encoder_decoder', 'output_attentions',
           'output_hidden_states', 'return_dict', 'use_cache', 'pretraining_tp', 'initializer_range',
           'output_router_logits', 'router_jitter_noise', 'keys_to_ignore_at_inference'}
# Entries whose defaults are too large for a test
TOO_LARGE = {'hidden_size', 'intermediate_size', 'num_hidden_layers', 'n_embd', 'n_layer', 'n_head', 'n_positions',
             'num_attention_heads', 'moe_intermediate_size', 'num_experts', 'n_routed_experts', 'head_dim'}
DEFAULT = dict(rope_type='default', rope_theta=300.0)
ACTIVATIONS = 'silu', 'gelu', 'gelu_new', 'gelu_pytorch_tanh', 'relu', 'gelu_fast', 'swish'
KINDS = 'sliding_attention', 'full_attention'
# {entry: values}; other entries get values of their kind
VALUES = dict(
    hidden_size=[32, 48], n_embd=[32, 48], intermediate_size=[88, 24], n_inner=[72, None], num_hidden_layers=[4, 3, 2],
    n_layer=[2, 3], num_attention_heads=[4, 2, 8], n_head=[4, 2], num_key_value_heads=[1, 2, 4, None],
    head_dim=[8, 12, None], max_position_embeddings=[64, 48], n_positions=[64, 48], sliding_window=[3, 5, None],
    max_window_layers=[0, 1, 2, 4], num_experts=[6, 4], num_local_experts=[6, 4], n_routed_experts=[6, 4],
    num_experts_per_tok=[1, 2, 3], n_shared_experts=[1, 2], moe_intermediate_size=[24, 16],
    shared_expert_intermediate_size=[24], first_k_dense_replace=[0, 1, 3], decoder_sparse_step=[1, 2, 3],
    mlp_only_layers=[[], [0], [1], [0, 1]], n_group=[1, 2, 3], topk_group=[1, 2],
    kv_lora_rank=[24, 16], q_lora_rank=[20, None], qk_nope_head_dim=[8, 6], qk_rope_head_dim=[4, 8],
    v_head_dim=[10, 8, 24], topk_method=['greedy', 'group_limited_greedy', None], swiglu_alpha=[1.702, 1.0],
    swiglu_limit=[7.0, 2.0], query_pre_attn_scalar=[20, 64, 256],
    attn_logit_softcapping=[None, 2.0], final_logit_softcapping=[None, 3.0], no_rope_layer_interval=[1, 2, 4],
    original_max_position_embeddings=[16, 64], sliding_window_pattern=[2, 3, 6],
    hidden_activation=[None, 'gelu_pytorch_tanh', 'gelu'], partial_rotary_factor=[0.5, 1.0], rotary_pct=[0.25, 0.5],
    attention_multiplier=[0.2, 1.0], logits_scaling=[0.7, 2.0], rms_norm_eps=[1e-3, 1e-6],
    layer_norm_eps=[1e-3, 1e-5], layer_norm_epsilon=[1e-3, 1e-5],
    rope_parameters=[DEFAULT, LINEAR, YARN, LLAMA3, YARN | dict(attention_factor=0.7), YARN | dict(truncate=False),
                     LINEAR | dict(rope_type='dynamic'), DEFAULT | dict(partial_rotary_factor=0.5)],
    rope_scaling=[None, dict(type='linear', factor=2.0), dict(rope_type='yarn', factor=4.0),
                  dict(rope_type='dynamic', factor=2.0), LLAMA3],
    rope_theta=[300.0, 50, 10000.0])
# Entries of older files, which classes of today still read or ignore
OLDER = 'rope_scaling', 'rope_theta', 'partial_rotary_factor', 'head_dim', 'sliding_window_pattern', 'mlp_bias', \
    'attention_bias', 'tie_word_embeddings', 'rope_local_base_freq', 'rotary_pct', 'qk_norm'


def value_of(generator, key, value, n_layer):
    """Another value for an entry: of VALUES, or of its kind."""
    if key in VALUES:
        return generator.choice(VALUES[key])
    if key in ('hidden_act', 'activation_function'):
        return generator.choice(ACTIVATIONS)
    if key == 'layer_types':
        kinds = ('linear_attention', 'full_attention') if 'linear_attention' in (value or ()) else KINDS
        return [generator.choice(kinds) for _ in range(n_layer)]
    if key == 'no_rope_layers':
        return [generator.randrange(2) for _ in range(n_layer)]
    if isinstance(value, bool) or key.endswith('bias') or key.startswith(('use_', 'tie_')):
        return generator.random() < 0.5
    if isinstance(value, (float, int)) and not key.endswith('token_id'):
        return generator.choice([0.5, 2.0, 1.0])
    return value


def entries_of_class(name):
    """The entries of a family's config that may be moved, from its class in transformers."""
    kind, entries = CASES[name]
    config = getattr(transformers, f'{kind}Config')(**(entries if kind == 'GPT2' else MODERN | entries))
    return json.loads(config.to_json_string(use_diff=False))


def draw(generator):
    """A case of test_families, the entries that are moved, and the names of those that are missing."""
    case = generator.choice([*CASES])
    theirs = entries_of_class(case)
    n_layer = theirs.get('num_hidden_layers') or theirs.get('n_layer')
    keys = sorted({*theirs, *OLDER} - PASSIVE)
    moved = generator.sample(keys, generator.choice([0, 1, 1, 2, 3]))
    gone = generator.sample(sorted(theirs.keys() - PASSIVE - TOO_LARGE), generator.choice([0, 0, 1, 2]))
    moved = {key: value_of(generator, key, theirs.get(key), n_layer) for key in moved}
    scaling = moved.get('rope_scaling') or {}
    # transformers 5.24 passes over it where blocks have two kinds of rotation (findings/gemma3_rope_type.sh).
    if case.startswith(('gemma3_text', 'olmo3')) and 'type' in scaling:
        moved['rope_scaling'] = {'rope_type' if key == 'type' else key: value for key, value in scaling.items()}
    return dict(case=case, moved=moved, gone=[key for key in gone if key not in moved])


@pytest.fixture
def difference(tmp_path):
    """Function (form) -> how our logits differ, or ''. It counts what was refused."""
    def compare(form, theirs, ours):
        if 'case' not in form:
            return ''
        folder = tmp_path / 'hf'
        shutil.rmtree(folder, ignore_errors=True)
        entries = entries_of_class(form['case']) | form.get('moved', {})
        for key in form.get('gone', []):
            entries.pop(key, None)
        original = theirs(lambda: build_and_run(entries, folder))
        original.save_pretrained(folder)
        (folder / 'config.json').write_text(json.dumps(entries))
        model = ours(lambda: model_from(folder))
        tokens = TOKENS[:, :model.config.block_size]
        with torch.no_grad():
            expected, logits = original(tokens).logits, model(tokens)
            error = (logits - expected).abs().max().item()
            tolerance = 1e-4
            if error > tolerance:  # a model may be sensitive to rounding, which ours shows in float64
                tolerance += 4 * (logits - model.double()(tokens)).abs().max().item()
        return f'logits differ by {error:.2g} at a spread of {expected.std():.2g}' if not error < tolerance else ''

    yield from counted(compare)


def build_and_run(entries, folder):
    """The model that transformers makes of a config.json, with random weights, and that computes logits."""
    folder.mkdir()
    (folder / 'config.json').write_text(json.dumps(entries))
    config = transformers.AutoConfig.from_pretrained(folder)
    model = randomize(transformers.AutoModelForCausalLM.from_config(config, attn_implementation='eager'))
    with torch.no_grad():
        model(TOKENS)
    return model


def test_configs_that_were_once_misread_give_the_logits_of_transformers(difference):
    for scaling in (dict(factor=2.0), dict(type='linear', factor=2.0), dict(rope_type='yarn', factor=4.0, rope_theta=None)):
        assert not difference(dict(case='olmo_hybrid', moved=dict(rope_scaling=scaling)))


def test_drawn_configs_give_the_logits_of_transformers(difference):
    check_draws(draw, difference, seed=1, seconds=0, at_least=20)


@pytest.mark.slow
def test_configs_of_a_new_seed_give_the_logits_of_transformers(difference):
    check_draws(draw, difference, seed=random.randrange(10 ** 6), seconds=40)
