"""The configs of finetuning, adapters and DPO as they are, from the commands in their comments, on a small model.

The model has the weights of nobody, the chat template of SmolLM2, and its name, as a folder, which wins over the hub. The conversations are those of the
package that the configs name.
"""
import json
import math
import os
import re

import pytest
import torch
from helpers import ROOT, newest_tensors, read_lines, run_forked
from test_chat_template import FAMILIES, write_folder

from data.fetch import CHATTERBOT_WHEEL

pytestmark = pytest.mark.slow
NAME = 'HuggingFaceTB/SmolLM2-135M-Instruct'
HERE = '--device=cpu', '--compile=False', '--dtype=float32'  # of the machine, not of the config


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
    """A folder with a small model and the conversations, as pairs with their reference, too."""
    from transformers import LlamaConfig, LlamaForCausalLM
    folder = tmp_path_factory.mktemp('tuning')
    (folder / NAME).parent.mkdir()
    write_folder(folder / NAME, *FAMILIES['chatml'])
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(
        vocab_size=320, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=2048, initializer_range=0.1)).save_pretrained(folder / NAME)
    for name, arguments in (('chatterbot', []), ('chatterbot_pairs', ['--pairs'])):
        done = run_forked('data/chatterbot/prepare.py', f'--tokenizer={NAME}', f'--out={folder}/{name}', *arguments,
                          cwd=folder, check=False)
        if 'pip cannot download' in done.stderr:
            pytest.skip(f'PyPI does not give {CHATTERBOT_WHEEL[0]}, perhaps because this machine is offline')
        assert done.returncode == 0 and '2,025 conversations from PyPI' in done.stdout, done.stderr
    run_forked('kilogpt.evaluate', folder / NAME, f'--reference={folder}/chatterbot_pairs', '--device=cpu',
               '--dtype=float32')
    return folder


def train(folder, name, *more):
    """(evaluations, output, folder of the run) of a config, of which the dataset's place is changed, and `more`."""
    config = open(os.path.join(ROOT, 'config', f'{name}.py')).read()
    dataset, out_dir = (re.search(rf"^{key} = '(.+)'", config, re.M)[1] for key in ('dataset', 'out_dir'))
    done = run_forked('train.py', os.path.join(ROOT, 'config', f'{name}.py'), f'--dataset={folder}/{dataset}', *HERE,
                      *more, cwd=folder)
    _, evals = read_lines(folder / out_dir)
    assert f'python sample.py --out_dir={out_dir} --chat' in config
    return evals, done.stdout, folder / out_dir


def saved_talk(out_dir):
    """The messages that /save writes after a word to a run's model, whose answer may be empty."""
    path = out_dir / 'talk.jsonl'
    run_forked('sample.py', f'--out_dir={out_dir}', '--chat', '--device=cpu', '--max_new_tokens=5', '--temperature=0',
               '--system=Be kind.', stdin=f'Hello\n/save {path}\n')
    return json.loads(path.read_text())['messages']


@pytest.mark.parametrize('name', ['finetune_chat', 'finetune_lora'])
def test_answers_are_learned_and_the_run_chats(folder, name):
    evals, printed, out_dir = train(folder, name)
    assert list(evals) == [0, 25] and evals[25]['val_loss'] < evals[0]['val_loss'] - 0.05
    assert 'of the tokens: those of answers' in printed and 'documents   ' in printed
    assert printed.count('My laptop screen is black.') == 2  # samples at the beginning and at the end
    is_adapted = [('.lora_' in key) for key in newest_tensors(out_dir)]
    assert all(is_adapted) if name == 'finetune_lora' else not any(is_adapted)
    assert saved_talk(out_dir)[0] == dict(role='system', content='Be kind.')


def test_preferences_are_learned_and_the_run_chats(folder):
    """At a higher rate, since these weights know nothing: an answer that they prefer is one that they have seen."""
    evals, _, out_dir = train(folder, 'dpo', '--learning_rate=1e-3')
    assert list(evals) == [0, 10, 20] and evals[0]['val_loss'] == pytest.approx(math.log(2), abs=1e-6)
    margins = [evals[iteration]['train_reward_margin'] for iteration in evals]
    assert margins == sorted(margins) and margins[-1] > 0.1
    assert saved_talk(out_dir)[0] == dict(role='system', content='Be kind.')
