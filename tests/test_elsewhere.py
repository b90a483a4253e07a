"""docs/elsewhere.md: the keys that stand for other programs' words exist, and take the values that the page gives."""
import functools
import json
import os
import pathlib
import re

import pytest
import torch
from helpers import ROOT

from kilogpt.configurator import config_of
from kilogpt.parallel.layout import CHECKED_KEYS, Layout, check_layout
from kilogpt.parallel.processes import resolve_dtype
from kilogpt.settings import check_settings, lr_of
from model import GPT, GPTConfig

PAGE = pathlib.Path(ROOT, 'docs', 'elsewhere.md').read_text('utf-8')
TRAIN = os.path.join(ROOT, 'train.py')
PROCESSES = 8
SETTINGS = re.compile(r'[a-z_0-9]+=[^ `]+(?: [a-z_0-9]+=[^ `]+)*')


def ours(page):
    """What the page says of kiloGPT: the second cell of each row, and the text outside tables and blocks."""
    text = re.sub(r'^```.*?^```$', '', page, flags=re.M | re.S)
    for line in text.splitlines():
        if line.startswith('|'):
            yield line.strip('| ').split(' | ', 1)[1]
        else:
            yield line


def code(page):
    return [span for part in ours(page) for span in re.findall('`([^`]+)`', part)]


GIVEN = sorted({span for span in code(PAGE) if SETTINGS.fullmatch(span)})


def test_page_has_many_settings_and_says_what_is_not_here():
    assert len(GIVEN) > 50 and PAGE.count('| not here') > 8
    tables = re.findall(r'^## (.*)$', PAGE, flags=re.M)
    assert [any(name in table for table in tables) for name in (
        'DeepSpeed', 'FSDP', 'Megatron-LM', 'Lightning', 'Horovod', 'tf.distribute', 'Accelerate')] == [True] * 7
    assert "PipeDream's weight stashing" in PAGE


@functools.cache
def model_of(**fields):
    with torch.device('meta'):
        return GPT(GPTConfig(**fields), seed=None)


@pytest.mark.parametrize('settings', GIVEN)
def test_settings_are_accepted(settings):
    """By train.py's own checks, of a run on eight processes with its default model."""
    config = config_of(TRAIN, [f'--{setting}' for setting in settings.split()])
    check_settings(config)
    for setting in settings.split():
        key, _, value = setting.partition('=')
        assert str(config[key]) == value or float(config[key]) == float(value)
    model = model_of(**{key: config[key] for key in vars(GPTConfig()) if key in config})
    config['dtype'] = resolve_dtype(config['dtype'], torch.device('cuda' if config['fp8'] else 'cpu'))
    check_layout(model, Layout.of(PROCESSES, config), **{key: config[key] for key in (*CHECKED_KEYS, 'dtype')})
    assert model.config.vocab_size and lr_of(config, 10) > 0


@pytest.mark.quick
def test_words_alone_are_keys():
    words = {span for span in code(PAGE) if re.fullmatch('[a-z_0-9]+', span)}
    words |= {key for span in code(PAGE) for key in re.findall(r'(?<![\w.-])([a-z]\w*)=(?!=)', span)}
    assert len(words) > 30 and words - config_of(TRAIN, []).keys() == {'parallelism'}  # torchtitan's


@pytest.mark.quick
def test_example_is_the_run_that_it_says():
    (given,) = re.findall(r'^```json\n(.*?)^```$', PAGE, flags=re.M | re.S)
    theirs = json.loads(given)
    (command,) = re.findall(r'^```\ntorchrun (.*?)^```$', PAGE, flags=re.M | re.S)
    words = command.replace('\\\n', ' ').split()
    count = int(words[1].partition('=')[2])
    config = config_of(TRAIN, words[words.index('train.py') + 1:])
    assert config['batch_size'] == theirs['train_micro_batch_size_per_gpu']
    assert config['gradient_accumulation_steps'] == theirs['gradient_accumulation_steps'] * count
    assert config['grad_clip'] == theirs['gradient_clipping']
    assert config['zero_stage'] == theirs['zero_optimization']['stage'] and config['dtype'] == 'bfloat16'
