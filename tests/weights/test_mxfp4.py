"""Weights in MXFP4, in which gpt-oss comes: values as transformers decodes them, folders, and damage."""
import json

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from test_families import MODERN, OSS
from test_weights import assert_same_predictions, change_json, model_from, randomize

from kilogpt.weights.importing import read_weights
from kilogpt.weights.mxfp4 import decoded
from kilogpt.weights.tensors import in_memory

EXPERTS = 'gate_up_proj', 'down_proj'


def draw_packed(generator, *shape):
    """Random (blocks, scales) of a matrix (E, rows, columns), with small values."""
    E, rows, columns = shape
    blocks = torch.randint(256, (E, rows, columns // 32, 16), generator=generator, dtype=torch.uint8)
    return blocks, torch.randint(122, 126, (E, rows, columns // 32), generator=generator, dtype=torch.uint8)


def test_values_are_those_of_transformers():
    """Exactly, for all bytes, and for scales whose products bfloat16 can hold."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors
    generator = torch.Generator().manual_seed(0)
    blocks = torch.arange(256, dtype=torch.uint8).repeat(6).view(2, 6, 8, 16)
    scales = torch.randint(8, 250, (2, 6, 8), generator=generator, dtype=torch.uint8)
    expected = convert_moe_packed_tensors(blocks, scales, dtype=torch.bfloat16).mT  # theirs has rows for inputs
    ours = decoded(in_memory(blocks), in_memory(scales))
    assert ours.shape == (2, 6, 256) and ours.whole().dtype == torch.bfloat16
    assert ours.whole().equal(expected) and ours[1:].equal(expected[1:])


@pytest.fixture
def folder(tmp_path):
    """(a folder of a gpt-oss with experts in MXFP4, the model of transformers with their values)."""
    generator = torch.Generator().manual_seed(1)
    config = transformers.GptOssConfig(**MODERN | OSS | dict(intermediate_size=64, num_hidden_layers=2))
    config._attn_implementation = 'eager'
    theirs = randomize(transformers.GptOssForCausalLM(config))
    theirs.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / 'model.safetensors')
    for layer, block in enumerate(theirs.model.layers):
        for name in EXPERTS:
            key, parameter = f'model.layers.{layer}.mlp.experts.{name}', getattr(block.mlp.experts, name)
            E, inputs, outputs = parameter.shape
            blocks, scales = draw_packed(generator, E, outputs, inputs)
            del tensors[key]
            tensors |= {f'{key}_blocks': blocks, f'{key}_scales': scales}
            with torch.no_grad():
                parameter.copy_(decoded(in_memory(blocks), in_memory(scales)).whole().mT)
    save_file(tensors, tmp_path / 'model.safetensors')
    change_json(tmp_path / 'config.json', dict(quantization_config=dict(quant_method='mxfp4')))
    return tmp_path, theirs


def test_folder_gives_the_logits_of_its_decoded_weights(folder):
    path, theirs = folder
    assert_same_predictions(model_from(path), theirs)


def test_damaged_or_misplaced_blocks_are_refused_in_a_sentence(folder):
    path, _ = folder
    tensors = load_file(path / 'model.safetensors')
    key = 'model.layers.1.mlp.experts.down_proj_scales'
    for changed, message in ((tensors | {key: tensors[key][:, 1:].contiguous()}, 'are not of MXFP4'),
                             (tensors | {key: tensors[key].int()}, 'are not of MXFP4'),
                             ({name: t for name, t in tensors.items() if name != key}, 'has no .*down_proj_scales')):
        save_file(changed, path / 'model.safetensors')
        with pytest.raises(ValueError, match=message):
            read_weights(str(path))
    save_file(tensors, path / 'model.safetensors')
    config = json.loads((path / 'config.json').read_text())
    for changes in (dict(quantization_config=dict(quant_method='fp8')), dict(model_type='mixtral')):
        (path / 'config.json').write_text(json.dumps(config | changes))
        with pytest.raises(ValueError, match='is quantized by'):
            read_weights(str(path))
