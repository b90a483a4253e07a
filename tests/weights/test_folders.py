"""What real Hugging Face folders hold: shards, old names, adapters, quantized weights, and damage."""
import json
import pathlib
import shutil
import tempfile

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from test_families import make_theirs
from test_weights import FORMS, PROMPT, change_json, make_run, model_from

from kilogpt.weights.exporting import export_weights
from kilogpt.weights.importing import import_weights, read_weights
from kilogpt.weights.model_card import describe_training

KINDS = 'gpt2', 'llama', 'qwen3'
INDEX = 'model.safetensors.index.json'


@pytest.fixture(scope='module')
def originals(tmp_path_factory):
    """{kind: a folder of transformers in shards}."""
    folders = {}
    for kind in KINDS:
        folders[kind] = tmp_path_factory.mktemp(kind)
        make_theirs(kind).save_pretrained(folders[kind], max_shard_size='60KB')
    return folders


@pytest.fixture
def folder(originals, tmp_path):
    """A copy of Llama's folder, to change."""
    return pathlib.Path(shutil.copytree(originals['llama'], tmp_path / 'llama'))


@torch.no_grad()
def logits_of(source):
    return model_from(source)(PROMPT)


def tensors_of(folder):
    """{name: tensor} of all safetensors files of a folder."""
    tensors = {}
    for path in sorted(folder.glob('*.safetensors')):
        tensors |= load_file(path)
    return tensors


def replace_tensors(folder, tensors):
    """Write a folder's tensors as one file."""
    for path in [*folder.glob('*.safetensors'), *folder.glob('*.index.json')]:
        path.unlink()
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / 'model.safetensors')


def shards_of(folder):
    return sorted(folder.glob('*.safetensors'))


# --- folders that load --------------------------------------------------------------------------------------

@pytest.mark.parametrize('dtype, shards', [
    (torch.float32, 1), (torch.bfloat16, 2), (torch.float16, 1)], ids=str)
def test_pickled_weights_load_like_safetensors(dtype, shards, folder):
    tensors = {name: tensor.to(dtype) for name, tensor in tensors_of(folder).items()}
    replace_tensors(folder, tensors)
    expected = logits_of(folder)
    (folder / 'model.safetensors').unlink()
    if shards == 1:
        torch.save(tensors, folder / 'pytorch_model.bin')
    else:
        names = sorted(tensors)
        halves = {'pytorch_model-00001-of-00002.bin': names[::2],
                  'pytorch_model-00002-of-00002.bin': names[1::2]}
        for file_name, half in halves.items():
            torch.save({name: tensors[name] for name in half}, folder / file_name)
        weight_map = {name: file_name for file_name, half in halves.items() for name in half}
        (folder / 'pytorch_model.bin.index.json').write_text(json.dumps(dict(weight_map=weight_map)))
    assert logits_of(folder).equal(expected)


def test_pickled_weights_of_old_versions_of_torch_load(folder):
    tensors, expected = tensors_of(folder), logits_of(folder)
    replace_tensors(folder, tensors)
    (folder / 'model.safetensors').unlink()
    torch.save(tensors, folder / 'pytorch_model.bin', _use_new_zipfile_serialization=False)
    assert logits_of(folder).equal(expected)


class Trap:
    """Creates a file when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (self.path, 'w')


def test_pickled_weights_run_no_code(folder, tmp_path):
    for path in shards_of(folder):
        path.unlink()
    (folder / INDEX).unlink()
    torch.save(dict(x=Trap(str(tmp_path / 'sprung'))), folder / 'pytorch_model.bin')
    with pytest.raises(ValueError, match='pytorch_model.bin is damaged, or has more than tensors, which'):
        read_weights(str(folder))
    assert not (tmp_path / 'sprung').exists()


@pytest.mark.parametrize('kind', KINDS)
def test_names_of_old_files_load(kind, originals, tmp_path):
    """Without the first part of the names, with gamma and beta in norms, and with buffers of old versions."""
    shutil.copytree(originals[kind], tmp_path / 'hf')
    tensors = {}
    for name, tensor in tensors_of(originals[kind]).items():
        name = name.removeprefix('transformer.').removeprefix('model.')
        if 'ln_' in name or 'norm' in name:
            name = name.replace('.weight', '.gamma').replace('.bias', '.beta')
        tensors[name] = tensor
    if kind == 'gpt2':
        tensors |= {'h.0.attn.bias': torch.ones(1, 1, 64, 64), 'h.0.attn.masked_bias': torch.tensor(-1e4)}
    else:
        tensors['layers.0.self_attn.rotary_emb.inv_freq'] = torch.ones(4)
    replace_tensors(tmp_path / 'hf', tensors)
    assert logits_of(tmp_path / 'hf').equal(logits_of(originals[kind]))


def test_generation_config_is_carried_along(folder, tmp_path):
    """With a tokenizer.json beside it, through a run's folder."""
    export_weights(make_run(tmp_path / 'other')[0], str(tmp_path / 'source'))
    text = '{"temperature": 0.6, "eos_token_id": [3, 5]}'
    for name in ('tokenizer.json', 'tokenizer_config.json'):
        shutil.copy(tmp_path / 'source' / name, folder)
    (folder / 'generation_config.json').write_text(text)
    import_weights(str(folder), str(tmp_path / 'run'))
    export_weights(str(tmp_path / 'run'), str(tmp_path / 'hf'))
    assert (tmp_path / 'hf' / 'generation_config.json').read_text() == text


# --- folders that are refused -------------------------------------------------------------------------------

def assert_refused(folder, *words):
    with pytest.raises((ValueError, OSError)) as refused:
        read_weights(str(folder))
    sentence = str(refused.value)
    assert '\n' not in sentence and len(sentence) < 600 and str(folder) in sentence
    for word in words:
        assert word in sentence, sentence


def test_adapter_is_refused_by_name(tmp_path):
    (tmp_path / 'adapter_config.json').write_text('{"base_model_name_or_path": "meta-llama/Llama-3.2-1B"}')
    (tmp_path / 'adapter_model.safetensors').write_bytes(b'')
    assert_refused(tmp_path, 'is an adapter for the model meta-llama/Llama-3.2-1B',
                   'python -m kilogpt.convert import')


@pytest.mark.parametrize('method', ['gptq', 'awq', 'bitsandbytes', 'fp8'])
def test_quantized_folder_is_refused_by_the_name_of_its_method(method, folder):
    change_json(folder / 'config.json', dict(quantization_config=dict(quant_method=method, bits=4)))
    assert_refused(folder, f'is quantized by {method}', 'float32, bfloat16 or float16')


def test_quantized_folder_of_another_file_or_dtype_is_refused(folder):
    (folder / 'quantize_config.json').write_text('{"bits": 4, "quant_method": "gptq"}')
    assert_refused(folder, 'is quantized by gptq (it has a file quantize_config.json)')
    (folder / 'quantize_config.json').unlink()
    tensors = tensors_of(folder)
    name = 'model.layers.0.mlp.up_proj.weight'
    replace_tensors(folder, tensors | {name: tensors[name].to(torch.float8_e4m3fn)})
    assert_refused(folder, 'transformer.h.0.mlp.c_fc.weight in torch.float8_e4m3fn, and may be quantized')


@pytest.mark.parametrize('dtype', ['U32', 'C64', 'F8_E8M0'])
def test_dtype_that_is_not_read_is_named(folder, dtype):
    """Such a file is not damaged."""
    path = shards_of(folder)[0]
    content = path.read_bytes()
    length = int.from_bytes(content[:8], 'little')
    header = json.loads(content[8:8 + length])
    next(entry for entry in header.values() if 'dtype' in entry)['dtype'] = dtype
    header = json.dumps(header).encode()
    path.write_bytes(len(header).to_bytes(8, 'little') + header + content[8 + length:])
    assert_refused(folder, f'in {dtype}, as quantized weights have, but only F64, F32')


def test_folder_of_checkpoints_leads_to_its_run(tmp_path):
    (tmp_path / 'ckpt').mkdir()
    assert_refused(tmp_path / 'ckpt', f'is the folder of checkpoints of a run: name the run, {tmp_path}, or one of them')


def test_folder_of_mlx_is_refused_as_quantized(folder):
    change_json(folder / 'config.json', dict(quantization=dict(group_size=64, bits=4)))
    assert_refused(folder, 'is quantized by an unnamed method (config.json has an entry quantization)')


def test_shards_that_are_cut_missing_or_swapped_are_named(folder):
    first, second, *_ = shards_of(folder)
    content = second.read_bytes()
    second.write_bytes(content[:-100])
    size = len(content)
    assert_refused(folder, f'{second.name} is damaged (its tensors end at byte {size:,}, but the file has '
                   f'{size - 100:,} bytes)')
    second.write_bytes(content[:100])
    assert_refused(folder, f'{second.name} is damaged (its header ends at byte', 'but the file has 100 bytes')
    second.write_bytes(b'')
    assert_refused(folder, f'{second.name} is damaged', 'has 0 bytes')
    second.unlink()
    assert_refused(folder, f'has no {second.name}, which {INDEX} names')
    second.write_bytes(first.read_bytes())
    first.write_bytes(content)
    assert_refused(folder, f'which is in {second.name}, although {INDEX} names it')


def test_tensors_that_share_bytes_are_refused(folder):
    """Then one of them has the values of another."""
    path = shards_of(folder)[0]
    content = path.read_bytes()
    length = int.from_bytes(content[:8], 'little')
    header = json.loads(content[8:8 + length])
    names = [name for name, entry in header.items() if entry.get('shape') == [88, 32]]
    header[names[0]] = header[names[1]]
    path.write_bytes(content[:8] + json.dumps(header, separators=(',', ':')).encode().ljust(length)
                     + content[8 + length:])
    assert_refused(folder, f'{path.name} is damaged', 'two tensors overlap')


@pytest.mark.parametrize('change, words', [
    (dict(rms_norm_eps=None), 'rms_norm_eps must be a number'),
    (dict(rms_norm_eps=float('nan')), 'rms_norm_eps must be finite'),
    (dict(rms_norm_eps=-1.0), 'norm_eps is -1.0: it cannot be negative'),
    (dict(num_key_value_heads=True), 'num_key_value_heads must be a whole number'),
    (dict(num_hidden_layers=10 ** 12), 'num_hidden_layers=1000000000000, but the files have only'),
    (dict(vocab_size=10 ** 40), 'vocab_size must be a whole number'),
    (dict(hidden_size='wide'), 'hidden_size must be a whole number'),
    (dict(num_attention_heads=0, head_dim=None), 'n_head')], ids=str)
def test_config_with_values_of_a_wrong_kind_is_refused(change, words, folder):
    change_json(folder / 'config.json', change)
    assert_refused(folder, words)


def test_of_a_tensor_in_two_shards_the_one_that_the_index_names_counts(folder):
    expected = logits_of(folder)
    shard_of = json.loads((folder / INDEX).read_text())['weight_map']
    first, *_, last = shards_of(folder)
    name = next(name for name, shard in shard_of.items() if shard == first.name)
    save_file(load_file(last) | {name: load_file(first)[name] + 1}, last)
    assert logits_of(folder).equal(expected)


@pytest.mark.parametrize('weight_map, words', [
    ({'model.extra': 'model-00001-of-00002.safetensors'}, 'model.extra, which is in no file'),
    ({'model.norm.weight': '../model.safetensors'}, "'../model.safetensors', which is not a file of this"),
    ({'model.norm.weight': None}, 'no weight_map that names the file'),
    ([], 'no weight_map that names the file')], ids=str)
def test_index_that_is_wrong_is_refused(weight_map, words, folder):
    index = json.loads((folder / INDEX).read_text())
    first = shards_of(folder)[0].name
    if isinstance(weight_map, dict):
        weight_map = index['weight_map'] | {
            name: first if file_name and file_name.startswith('model-') else file_name
            for name, file_name in weight_map.items()}
    (folder / INDEX).write_text(json.dumps(index | dict(weight_map=weight_map)))
    assert_refused(folder, INDEX, words)


def test_tensor_that_is_not_of_the_model_is_named(folder):
    tensors = tensors_of(folder)
    replace_tensors(folder, tensors | {'model.layers.0.extra.weight': torch.ones(3)})
    assert_refused(folder, 'extra.weight with shape (3,), but its config requires None')
    del tensors['model.layers.1.self_attn.q_proj.weight']
    replace_tensors(folder, tensors)
    assert_refused(folder, 'transformer.h.1.attn.c_q.weight with shape None')


# --- model card ---------------------------------------------------------------------------------------------

def test_model_card_has_the_metadata_and_facts_of_the_run(tmp_path):
    from huggingface_hub import ModelCard
    out_dir, model, _ = make_run(tmp_path / 'run', FORMS['llama'])
    export_weights(out_dir, str(tmp_path / 'tiny'), dtype='bfloat16')
    card = ModelCard.load(tmp_path / 'tiny' / 'README.md')
    assert card.data.to_dict() == dict(library_name='transformers', pipeline_tag='text-generation',
                                       tags=['llama', 'kilogpt'])
    parameters = sum(tensor.numel() for tensor in tensors_of(tmp_path / 'tiny').values())
    for words in ('# tiny\n', f'{parameters:,} parameters in bfloat16', '2 layers, width 32, 4 attention',
                  'the dataset x ', '3 iterations, 2,304 tokens', '2.5000 nats', 'Tokenizer: char',
                  "from_pretrained('tiny')"):
        assert words in card.text, card.text
    assert 'started from' not in card.text and 'license' not in card.content
    config = json.loads((tmp_path / 'tiny' / 'config.json').read_text())
    assert config['dtype'] == config['torch_dtype'] == 'bfloat16'
    assert config['architectures'] == ['LlamaForCausalLM']


def test_model_card_names_the_weights_that_the_run_started_from():
    state = dict(config=dict(init_from='/data/Llama-3.2-1B/', dataset='x'), tokenizer=None, iteration=0, tokens=0,
                 val_loss=None)
    facts = ['Data: the dataset x of the run.', 'The run started from the weights of Llama-3.2-1B.']
    assert list(describe_training(state)) == facts
    state['config']['init_from'] = 'resume'
    assert list(describe_training(state)) == facts[:1]


# --- anything else ------------------------------------------------------------------------------------------

VALUES = st.sampled_from([None, '', 'x', -1, 0, 1, 2, 3, 10 ** 6, 10 ** 12, 10 ** 40, 0.5, -2.0, True, False,
                          [], {}, [1], {'a': 1}, float('nan'), float('inf')])


def change_config(folder, draw):
    path = folder / 'config.json'
    config = json.loads(path.read_text())
    key = draw(st.sampled_from(sorted(config)), 'key')
    if draw(st.booleans(), 'dropped'):
        del config[key]
    else:
        value = draw(VALUES, 'value')
        # Our model takes 1 for 1.0, which transformers refuses.
        config[key] = float(value) if isinstance(config[key], float) and type(value) is int else value
    path.write_text(json.dumps(config))


def change_shape(folder, draw):
    path = draw(st.sampled_from(shards_of(folder)), 'shard')
    tensors = load_file(path)
    name = draw(st.sampled_from(sorted(tensors)), 'tensor')
    tensor = tensors[name]
    changed = dict(transpose=tensor.t(), less=tensor[:-1], more=torch.cat([tensor, tensor[:1]]),
                   flat=tensor.flatten(), nested=tensor[None], scalar=tensor.sum())
    tensors[name] = changed[draw(st.sampled_from(sorted(changed)), 'change')].contiguous()
    save_file(tensors, path)


def cut_file(folder, draw):
    path = draw(st.sampled_from(sorted(folder.iterdir())), 'file')
    size = path.stat().st_size
    content = path.read_bytes()
    path.write_bytes(content[:draw(st.integers(0, size - 1), 'length')])


def swap_files(folder, draw):
    first, second = draw(st.permutations(sorted(folder.iterdir())), 'files')[:2]
    contents = first.read_bytes(), second.read_bytes()
    second.write_bytes(contents[0])
    first.write_bytes(contents[1])


def remove_file(folder, draw):
    draw(st.sampled_from(sorted(folder.iterdir())), 'file').unlink()


def drop_tensor(folder, draw):
    path = draw(st.sampled_from(shards_of(folder)), 'shard')
    tensors = load_file(path)
    del tensors[draw(st.sampled_from(sorted(tensors)), 'tensor')]
    save_file(tensors, path)


def add_tensor(folder, draw):
    path = draw(st.sampled_from(shards_of(folder)), 'shard')
    tensors = load_file(path)
    name = draw(st.sampled_from(['x', 'lm_head.bias', 'model.layers.9.mlp.up_proj.weight', 'wte.weight',
                                 'h.0', 'model.layers.0.self_attn.q_proj.weight', *tensors]), 'tensor')
    tensors[name] = torch.ones(draw(st.lists(st.integers(0, 3), max_size=3), 'shape'))
    save_file(tensors, path)


def change_bytes(folder, draw):
    """In a JSON file, or in the header of a file with tensors: what comes after it has no redundancy."""
    path = draw(st.sampled_from(sorted(folder.iterdir())), 'file')
    content = bytearray(path.read_bytes())
    end = 8 + int.from_bytes(content[:8], 'little') if path.suffix == '.safetensors' else len(content)
    place = draw(st.integers(0, end - 1), 'place')
    new = draw(st.binary(max_size=4), 'bytes')
    content[place:place + draw(st.integers(0, 4), 'replaced')] = new
    path.write_bytes(content)


CHANGES = (change_config, change_config, change_shape, cut_file, swap_files, remove_file, drop_tensor,
           add_tensor, change_bytes)


@torch.no_grad()
def theirs(folder):
    """The logits of transformers for a folder."""
    from transformers import AutoModelForCausalLM
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()(PROMPT).logits


def check_changed_folders(originals, count):
    """Change `count` folders at random: each is refused with one sentence, or gives the right logits."""
    expected = {kind: logits_of(original) for kind, original in originals.items()}
    outcomes = []

    @settings(max_examples=count, deadline=None, derandomize=True, database=None,
              suppress_health_check=list(HealthCheck))
    @given(st.data())
    def check(data):
        kind = data.draw(st.sampled_from(KINDS))
        change = data.draw(st.sampled_from(CHANGES))
        with tempfile.TemporaryDirectory() as parent:
            folder = pathlib.Path(shutil.copytree(originals[kind], f'{parent}/{kind}'))
            change(folder, data.draw)
            try:
                found = logits_of(folder)
            except (ValueError, OSError) as error:
                assert '\n' not in str(error) and len(str(error)) < 900, error
                outcomes.append('refused')
                return
            outcomes.append('loaded')
            if not torch.allclose(found, expected[kind], atol=1e-5):
                torch.testing.assert_close(found, theirs(folder), atol=1e-4, rtol=0)

    check()
    assert {'refused', 'loaded'} == set(outcomes)
    return outcomes


def test_changed_folder_is_refused_in_one_sentence_or_loads_rightly(originals):
    check_changed_folders(originals, 25)


@pytest.mark.slow
def test_many_changed_folders_are_refused_in_one_sentence_or_load_rightly(originals):
    check_changed_folders(originals, 200)
