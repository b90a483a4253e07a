"""sample.py as a user runs it."""
import re

import pytest
import torch

from data.tokenizer import get_tokenizer
from helpers import run_forked, run_script, saved_iterations


@pytest.fixture(scope='module')
def trained(train):
    """The folder of a short run."""
    return train('--max_iters=4', '--lr_decay_iters=4', '--eval_interval=2').out_dir


def sample(out_dir, *arguments, runner=run_forked, **options):
    fixed = f'--out_dir={out_dir}', '--device=cpu', '--max_new_tokens=40'
    return runner('sample.py', *fixed, *arguments, **options)


def texts_of(done):
    """The samples in the output of sample.py."""
    *texts, rest = done.stdout.split('\n---------------\n')
    assert rest == ''
    return texts


@pytest.mark.quick
def test_samples_continue_the_prompt_and_repeat_with_the_seed(trained):
    first = sample(trained, '--start=AB', '--num_samples=3')
    texts = texts_of(first)
    assert [len(text) for text in texts] == [42, 42, 42]  # a character for each token; block_size is 32
    assert all(text.startswith('AB') for text in texts) and len(set(texts)) == 3
    assert sample(trained, '--start=AB', '--num_samples=3').stdout == first.stdout
    assert sample(trained, '--start=AB', '--num_samples=3', '--seed=1').stdout != first.stdout


def test_prompt_can_come_from_a_file_or_from_standard_input(trained, tmp_path):
    expected = sample(trained, '--start=AB').stdout
    (tmp_path / 'prompt.txt').write_text('AB')
    assert sample(trained, f'--start=FILE:{tmp_path}/prompt.txt').stdout == expected
    assert sample(trained, '--start=-', stdin='AB', runner=run_script).stdout == expected


def test_bfloat16_gives_different_samples_of_the_same_length(trained):
    exact = sample(trained, '--num_samples=3', '--dtype=float32')
    half = sample(trained, '--num_samples=3', '--dtype=bfloat16')
    assert half.stdout != exact.stdout and [len(text) for text in texts_of(half)] == [41] * 3


def test_int8_samples_have_the_same_length_and_repeat_with_the_seed(trained):
    first = sample(trained, '--num_samples=3', '--quantize=int8')
    assert [len(text) for text in texts_of(first)] == [41] * 3
    assert sample(trained, '--num_samples=3', '--quantize=int8').stdout == first.stdout


@pytest.mark.quick
def test_best_checkpoint_is_sampled_unless_the_latest_is_asked_for(train):
    # The learning rate rises until the loss rises, too, so that the best checkpoint is not the latest.
    run = train('--learning_rate=0.6', '--warmup_iters=12', '--eval_interval=1', '--max_iters=8',
                '--keep_checkpoints=1')
    best, latest = saved_iterations(run.out_dir)
    assert f'iter_{best:08d}' in sample(run.out_dir, '--num_samples=1').stderr
    assert f'iter_{latest:08d}' in sample(run.out_dir, '--num_samples=1', '--which=latest').stderr
    # As in train.py, init_from can be a run or a checkpoint.
    assert f'iter_{best:08d}' in sample('nowhere', '--num_samples=1', f'--init_from={run.out_dir}').stderr
    one = run.out_dir / 'ckpt' / f'iter_{latest:08d}'
    assert f'iter_{latest:08d}' in sample('nowhere', '--num_samples=1', f'--init_from={one}').stderr


def test_conversation_survives_a_character_outside_the_alphabet(trained):
    done = sample(trained, '--interactive', '--num_samples=1', '--temperature=0', '--top_k=None',
                  stdin='A\né\nB\n')
    assert len(re.findall(r'-{15}', done.stdout)) == 2 and '> A' in done.stdout and '> B' in done.stdout
    assert "'é'" in done.stderr


def test_gpt2_folder_continues_a_prompt_as_transformers_does(tmp_path, vocabulary, monkeypatch):
    from transformers import GPT2Config, GPT2LMHeadModel
    torch.manual_seed(0)
    theirs = GPT2LMHeadModel(GPT2Config(n_positions=64, n_embd=32, n_layer=2, n_head=2)).eval()
    theirs.save_pretrained(tmp_path / 'gpt2')
    done = run_forked('sample.py', f'--init_from={tmp_path}/gpt2', '--device=cpu', '--start=Hello world',
                      '--num_samples=1', '--max_new_tokens=20', '--temperature=0', '--dtype=float32',
                      env=dict(TIKTOKEN_CACHE_DIR=vocabulary))
    expected = theirs.generate(torch.tensor([[15496, 995]]), max_new_tokens=20, do_sample=False,
                               pad_token_id=50256)
    monkeypatch.setenv('TIKTOKEN_CACHE_DIR', vocabulary)
    assert texts_of(done) == [get_tokenizer(dict(tokenizer='gpt2')).decode(expected[0].tolist())]


@pytest.mark.quick
@pytest.mark.parametrize('arguments, words', [
    (['--out_dir=/nonexistent'], 'no checkpoint to sample from'),
    (['--start=FILE:/nonexistent'], 'No such file'),
    (['--start=é'], "'é'"),
    (['--num_samples=0'], 'num_samples is 0'),
    (['--quantize=int4'], "quantize is 'int4': choose none or int8"),
    (['--temprature=1'], 'did you mean temperature'),
])
def test_bad_input_is_refused_in_one_sentence(trained, arguments, words):
    done = sample(trained, *arguments, check=False)
    assert done.returncode == 1 and words in done.stderr and 'Traceback' not in done.stderr
