"""The prediction of memory that a run prints before its first iteration."""
import re

import pytest
import torch

from helpers import FAULTS
from kilogpt.plan.fits import predict_memory
from kilogpt.parallel.layout import Layout
from model import GPT, GPTConfig

CONFIG = dict(batch_size=8, gradient_accumulation_steps=64, block_size=1024, dtype='bfloat16', zero_stage=0,
              activation_checkpoint='none', cpu_offload=False, grad_compress='none', fp8=False,
              async_tp=False, compile=False, optimizer='adamw')


@pytest.fixture(scope='module')
def gpt2_xl():
    with torch.device('meta'):
        return GPT(GPTConfig(n_layer=48, n_head=25, n_embd=1600, bias=False), seed=None)


@pytest.mark.quick
@pytest.mark.parametrize('gigabytes', [50, 40, 24, 16, 8])
def test_advice_is_a_change_that_fits(gpt2_xl, gigabytes):
    """DDP on 8 GPUs needs 57 GB. The advised change is predicted to fit, with the same global batch."""
    available = 1e9 * gigabytes
    predicted, warning = predict_memory(gpt2_xl, Layout(8), CONFIG, 'cuda', available)
    assert predicted > available and predicted > 16 * gpt2_xl.num_params()
    advised = re.fullmatch(r'the run will probably not fit: .* GB are free; it would fit with (--.*)',
                           warning).group(1)
    change = dict(word.removeprefix('--').split('=') for word in advised.split())
    changed = CONFIG | {key: type(CONFIG[key])(value) if CONFIG[key] is not False else value == 'True'
                        for key, value in change.items()}
    layout = Layout(8, zero_stage=changed['zero_stage'])
    assert predict_memory(gpt2_xl, layout, changed, 'cuda', available)[1] is None
    assert changed['batch_size'] * changed['gradient_accumulation_steps'] == 8 * 64


def test_advice_where_nothing_helps(gpt2_xl):
    assert predict_memory(gpt2_xl, Layout(8), CONFIG, 'cuda', 1e8)[1].endswith('use more GPUs')
    assert predict_memory(gpt2_xl, Layout(8), CONFIG, 'cuda', 1e12)[1] is None


def test_run_prints_what_it_needs_and_warns_if_less_is_free(train):
    fits = train('--max_iters=1', '--eval_iters=0')
    assert re.search(r'  memory      0\.3\d\d GB predicted of [\d.]+ GB', fits.stdout)
    assert '  warning  ' not in fits.stdout
    short = train('--max_iters=1', '--eval_iters=0', faults=[FAULTS / 'little_memory.py'])
    assert re.search(r'  warning     the run will probably not fit: .* need 0\.3 GB, .*; it would fit with '
                     r'--async_checkpoint=False --batch_size=2 --gradient_accumulation_steps=6', short.stdout), short.stdout
