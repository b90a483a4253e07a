"""sample.py as a user runs it."""
import json
import re

import pytest
import torch
from conftest import forked, run


@pytest.fixture(scope='module')
def trained(train):
    return train('--max_iters=4', '--lr_decay_iters=4', '--eval_interval=2').out_dir


def sample(out_dir, *arguments, launcher=forked, **options):
    return launcher('sample.py', f'--out_dir={out_dir}', '--device=cpu', '--max_new_tokens=40', *arguments, **options)


def test_samples(trained, tmp_path):
    first = sample(trained, '--start=AB', '--num_samples=3')
    texts = first.stdout.split('\n---------------\n')
    assert [len(text) for text in texts] == [42, 42, 42, 0]  # one character a token; past block_size 32
    assert all(text.startswith('AB') for text in texts[:3]) and len(set(texts[:3])) == 3
    assert sample(trained, '--start=AB', '--num_samples=3').stdout == first.stdout  # the seed decides
    assert sample(trained, '--start=AB', '--num_samples=3', '--seed=1').stdout != first.stdout
    (tmp_path / 'prompt.txt').write_text('AB')
    assert sample(trained, f'--start=FILE:{tmp_path}/prompt.txt', '--num_samples=3').stdout == first.stdout
    assert sample(trained, '--start=-', '--num_samples=3', stdin='AB', launcher=run).stdout == first.stdout
    half = sample(trained, '--start=AB', '--num_samples=3', '--dtype=bfloat16').stdout
    assert half != first.stdout and [len(text) for text in half.split('\n---------------\n')] == [42, 42, 42, 0]


def test_best_unless_latest(trained):
    paths = sorted((trained / 'ckpt').iterdir())
    losses = {path.name: json.loads((path / 'state.json').read_text())['val_loss'] for path in paths}
    best = min(losses, key=losses.get)
    assert best in sample(trained, '--num_samples=1').stderr
    assert paths[-1].name in sample(trained, '--num_samples=1', '--which=latest').stderr


def test_interactive(trained):
    done = sample(trained, '--interactive', '--num_samples=1', '--temperature=0', '--top_k=None', stdin='A\né\nB\n')
    assert len(re.findall(r'-{15}', done.stdout)) == 2 and '> A' in done.stdout and '> B' in done.stdout
    assert "'é'" in done.stderr  # not in the alphabet: said, and the conversation goes on


def test_gpt2_folder(tmp_path, vocabulary, monkeypatch):
    """Weights from a Hugging Face folder continue a prompt as transformers does; the vocabulary is GPT-2's."""
    from transformers import GPT2Config, GPT2LMHeadModel
    torch.manual_seed(0)
    theirs = GPT2LMHeadModel(GPT2Config(n_positions=64, n_embd=32, n_layer=2, n_head=2)).eval()
    theirs.save_pretrained(tmp_path / 'gpt2')
    done = forked('sample.py', f'--init_from={tmp_path}/gpt2', '--device=cpu', '--start=Hello world', '--num_samples=1',
                  '--max_new_tokens=20', '--temperature=0', env=dict(TIKTOKEN_CACHE_DIR=vocabulary))
    expected = theirs.generate(torch.tensor([[15496, 995]]), max_new_tokens=20, do_sample=False, pad_token_id=50256)
    monkeypatch.setenv('TIKTOKEN_CACHE_DIR', vocabulary)
    from data.tokenizer import get_tokenizer
    assert done.stdout.removesuffix('\n---------------\n') == get_tokenizer(dict(tokenizer='gpt2')).decode(expected[0].tolist())


@pytest.mark.parametrize('arguments, words', [
    (['--out_dir=/nonexistent'], 'no checkpoint to sample from'),
    (['--start=FILE:/nonexistent'], 'No such file'),
    (['--start=é'], "'é'"),
    (['--num_samples=0'], 'num_samples is 0'),
    (['--temprature=1'], 'did you mean temperature'),
])
def test_bad_input(trained, arguments, words):
    done = sample(trained, *arguments, check=False)
    assert done.returncode == 1 and words in done.stderr and 'Traceback' not in done.stderr
