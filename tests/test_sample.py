"""sample.py as a user runs it."""
import re
import signal

import pytest
import torch

from data.tokens.tokenizer import get_tokenizer
from helpers import run_forked, saved_iterations, start_script


@pytest.fixture(scope='module')
def trained(train):
    """The folder of a short run."""
    return train('--max_iters=4', '--lr_decay_iters=4', '--eval_interval=2', '--value_pattern=NV',
                 '--attention_gate', '--attention_conv=3', '--mlp_conv=4').out_dir


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
    assert sample(trained, '--start=-', stdin='AB').stdout == expected


@pytest.mark.parametrize('numbers', ['--quantize=int8', '--dtype=bfloat16'])
def test_samples_in_fewer_bits_have_the_same_length_and_repeat_with_the_seed(trained, numbers):
    first = sample(trained, '--num_samples=3', numbers)
    assert [len(text) for text in texts_of(first)] == [41] * 3
    assert sample(trained, '--num_samples=3', numbers).stdout == first.stdout


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
    done = sample(trained, '--interactive', '--temperature=0', '--top_k=None', stdin='A\né\nB\n')
    assert len(re.findall(r'-{15}', done.stdout)) == 2 and '> A' in done.stdout and '> B' in done.stdout
    assert "'é'" in done.stderr


@pytest.mark.parametrize('arguments, count', [
    ([], 10), (['--interactive'], 1), (['--interactive', '--num_samples=3'], 3)])
def test_number_of_samples_follows_from_interactive_unless_it_is_given(trained, arguments, count):
    done = sample(trained, '--start=A', '--max_new_tokens=1', *arguments, stdin='A\n')
    assert len(re.findall(r'-{15}', done.stdout)) == count


@pytest.mark.slow
def test_ctrl_c_ends_without_a_traceback(trained):
    with sample(trained, '--max_new_tokens=100000', runner=start_script) as process:
        process.stdout.read(1)
        process.send_signal(signal.SIGINT)
        first, *rest = process.stderr.read().splitlines()
    assert 'val loss' in first and rest == [] and process.returncode == -signal.SIGINT


@pytest.mark.slow
def test_reader_that_stops_is_not_an_error(trained):
    with sample(trained, '--max_new_tokens=100000', runner=start_script) as process:
        process.stdout.read(1)
        process.stdout.close()  # as `head` does
        first, *rest = process.stderr.read().splitlines()
    assert 'val loss' in first and rest == [] and process.returncode == 1


def test_gpt2_folder_continues_a_prompt_as_transformers_does(tmp_path, vocabulary, monkeypatch):
    """<|endoftext|> is a token on the command line, and ordinary text in a file."""
    from transformers import GPT2Config, GPT2LMHeadModel
    torch.manual_seed(0)
    theirs = GPT2LMHeadModel(GPT2Config(n_positions=64, n_embd=32, n_layer=2, n_head=2)).eval()
    theirs.save_pretrained(tmp_path / 'gpt2')
    monkeypatch.setenv('TIKTOKEN_CACHE_DIR', vocabulary)
    tokenizer = get_tokenizer(dict(tokenizer='gpt2'))
    (tmp_path / 'prompt.txt').write_text('<|endoftext|>')
    for start, tokens in (('Hello world', [15496, 995]), ('<|endoftext|>', [50256]),
                          (f'FILE:{tmp_path}/prompt.txt', tokenizer.encode('<|endoftext|>'))):
        done = run_forked('sample.py', f'--init_from={tmp_path}/gpt2', '--device=cpu', f'--start={start}',
                          '--num_samples=1', '--max_new_tokens=20', '--temperature=0', '--dtype=float32')
        expected = theirs.generate(torch.tensor([tokens]), max_new_tokens=20, do_sample=False,
                                   pad_token_id=50256)
        assert texts_of(done) == [tokenizer.decode(expected[0].tolist())]


def test_prompt_that_is_not_utf8_is_named(trained, tmp_path):
    path = tmp_path / 'latin-1.txt'
    path.write_bytes(b'CAF\xe9')
    done = sample(trained, f'--start=FILE:{path}', check=False)
    sentence = f"start is 'FILE:{path}', but that text is not UTF-8"
    assert done.returncode == 1 and sentence in done.stderr and 'Traceback' not in done.stderr
    missing = sample(trained, '--start=FILE:none.txt', check=False).stderr
    assert "error: start is 'FILE:none.txt', but that file cannot be read: No such file or directory\n" in missing


@pytest.mark.quick
@pytest.mark.parametrize('arguments, words', [
    (['--out_dir=/nonexistent'], 'no checkpoint to sample from'),
    (['--start=FILE:/nonexistent'], 'No such file'),
    (['--start=é'], "'é'"),
    (['--num_samples=0'], 'num_samples is 0: it must be at least 1'),
    (['--top_k=-1'], 'top_k is -1: it must be at least 0; 0 or None draws from all'),
    (['--top_p=0'], 'top_p is 0.0: it must be above 0 and at most 1; 1 or None draws from all'),
    (['--quantize=int4'], "quantize is 'int4': choose none or int8"),
    (['--temprature=1'], 'did you mean temperature'),
])
def test_bad_input_is_refused_in_one_sentence(trained, arguments, words):
    done = sample(trained, *arguments, check=False)
    assert done.returncode == 1 and words in done.stderr and 'Traceback' not in done.stderr
