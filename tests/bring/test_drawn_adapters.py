"""Adapters of PEFT with entries of adapter_config.json that are moved: our logits are those of peft, or it is refused."""
import json
import random
import shutil
import sys

import pytest
import torch

from drawing import check_draws, counted
from helpers import ROOT
from kilogpt.weights.importing import read_adapter, read_weights
from kilogpt.weights.tensors import pad_rows
from model import GPT, GPTConfig

peft = pytest.importorskip('peft')
sys.path.insert(0, f'{ROOT}/tests/weights')
from test_families import CASES, make_theirs  # noqa: E402

TOKENS = torch.randint(97, (2, 40), generator=torch.Generator().manual_seed(0))
BASES = 'llama', 'gpt2', 'phi3', 'gpt_neox', 'qwen3', 'gemma2', 'mixtral', 'granite biases', 'gpt_oss', 'deepseek_v3', \
    'deepseek_v2 greedy'
LINEARS = 'q_proj', 'k_proj', 'v_proj', 'o_proj', 'gate_proj', 'up_proj', 'down_proj', 'c_attn', 'c_proj', 'c_fc', \
    'qkv_proj', 'gate_up_proj', 'query_key_value', 'q_b_proj', 'kv_b_proj', 'dense', 'dense_h_to_4h', 'lm_head', 'embed_tokens'
# {entry: values}. Some of them make other adapters than ours.
VALUES = dict(
    r=[1, 2, 5], lora_alpha=[3, 8, 0.5], use_rslora=[True], lora_dropout=[0.1], fan_in_fan_out=[True, False],
    bias=['all', 'lora_only'], modules_to_save=[['lm_head'], ['embed_tokens'], []],
    init_lora_weights=[True, False, 'gaussian', 'pissa', 'pissa_niter_2', 'olora', 'orthogonal', 'corda', 'loftq'],
    layers_to_transform=[0, [0, 1], [1]], rank_pattern=[dict(q_proj=1), {'.*proj': 3}], use_dora=[True],
    alpha_pattern=[dict(q_proj=1), {'^model.layers.1.*': 4}], lora_bias=[True], exclude_modules=[['q_proj'], '.*1.*'],
    alora_invocation_tokens=[[3, 4]], use_qalora=[True], trainable_token_indices=[[1, 2]], inference_mode=[True],
    layer_replication=[[[0, 2], [1, 2]]], target_parameters=[['mlp.experts.gate_up_proj']], revision=['main'],
    task_type=[None, 'CAUSAL_LM'], ensure_weight_tying=[True])


def draw(generator):
    """A case of test_families, and the entries that are moved."""
    entries = {key: generator.choice(VALUES[key]) for key in generator.sample(sorted(VALUES), generator.choice([0, 1, 1, 2]))}
    entries['target_modules'] = generator.choice(['all-linear', generator.sample(LINEARS, 6), [*LINEARS[:7]], None])
    return dict(base=generator.choice(BASES), entries=entries)


@pytest.fixture
def difference(tmp_path):
    """Function (form) -> how our logits differ, or ''. It counts what was refused."""
    bases = {}

    def compare(form, theirs, ours):
        if form.get('base') not in bases:
            if 'base' not in form:
                return ''
            bases[form['base']] = tmp_path / f'base {len(bases)}'
            make_theirs(form['base']).save_pretrained(bases[form['base']])
        folder = tmp_path / 'adapter'
        shutil.rmtree(folder, ignore_errors=True)
        expected = theirs(lambda: write(form, folder))
        found = ours(lambda: logits_of(folder, str(bases[form['base']])))
        error = (found - expected).abs().max().item()
        # We merge W + s B A, and peft adds two products; with large updates these round differently.
        return '' if error < 1e-3 else f'logits differ by {error:.2g} at a spread of {expected.std():.2g}'

    yield from counted(compare)


def write(form, folder):
    """Write the adapter that peft makes, with random weights; returns its logits."""
    config = peft.LoraConfig(**dict(task_type='CAUSAL_LM') | form.get('entries', {}))
    theirs = peft.get_peft_model(make_theirs(form['base']), config)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            if parameter.requires_grad:
                parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator))
        theirs.save_pretrained(folder)
        assert json.loads((folder / 'adapter_config.json').read_text())
        return theirs.eval()(TOKENS).logits


@torch.no_grad()
def logits_of(folder, base):
    """The logits of our model with an adapter."""
    arguments, adapters, _, _ = read_adapter(str(folder), base)
    _, weights, _ = read_weights(base)
    model = GPT(GPTConfig(**arguments), seed=None)
    for name, parameter in model.named_parameters():
        parameter.copy_(pad_rows((weights | adapters)[name], parameter.shape))
    return model.eval()(TOKENS)


def test_drawn_adapters_give_the_logits_of_peft(difference):
    assert set(BASES) <= CASES.keys()
    check_draws(draw, difference, seed=1, seconds=0, at_least=20)


@pytest.mark.slow
def test_adapters_of_a_new_seed_give_the_logits_of_peft(difference):
    check_draws(draw, difference, seed=random.randrange(10 ** 6), seconds=25)
