"""python dev/versus.py as a user runs it, with scripts that take the place of nanoGPT's."""
import json
import re
import sys

import pytest
from helpers import TINY, run_script

import versus as program

ARGUMENTS = [argument for argument in TINY if not argument.startswith(('--max_iters', '--eval', '--log'))]
TINIEST = '--device=cpu --compile=False --n_layer=1 --n_head=1 --n_embd=16 --block_size=16'.split()

# Checks that it gets only nanoGPT's keys and our data, then prints nanoGPT's lines, the slow ones first.
TRAIN = """
import os, pickle, sys
import numpy as np
dataset = 'openwebtext'
n_embd, max_iters = 768, 10
for argument in sys.argv[1:]:
    key, value = argument[2:].split('=')
    globals()[key] = value
    assert key not in ('pos', 'norm')
data = os.path.join('data', dataset)
assert pickle.load(open(data + '/meta.pkl', 'rb')) == dict(vocab_size=128)
assert len(np.memmap(data + '/train.bin', '<u2')) == 20_000
for i in range(int(max_iters) + 1):
    print(f'iter {i}: loss 4.0, time {50.0 if i < 2 else 8.0 + i % 2}ms, mfu -100.00%')
"""

GET_BATCH = """
raise ValueError('executed')
def get_batch(split):
    global calls
    calls = globals().get('calls', 0) + 1
    if calls == 512:
        tokens = np.memmap(os.path.join(data_dir, f'{split}.bin'), np.uint16)
        print(len(tokens), tokens.max(), batch_size, block_size, device_type, device)
    return torch.zeros(1)
"""

PREPARE = """
import numpy as np, tiktoken
text = open('input.txt').read()[:900]
np.array(tiktoken.get_encoding('gpt2').encode_ordinary(text), np.uint16).tofile('train.bin')
"""

SAMPLE = """
import os, pickle, sys, torch
arguments = dict(a[2:].split('=') for a in sys.argv[1:])
content = torch.load(arguments['out_dir'] + '/ckpt.pt', weights_only=True)
meta = pickle.load(open(os.path.join('data', content['config']['dataset'], 'meta.pkl'), 'rb'))
row = content['model']['transformer.wte.weight'][meta['stoi'][arguments['start']]]
with open('calls', 'a') as file:
    print(len(row), len(meta['itos']), arguments['max_new_tokens'], arguments['device'], file=file)
"""


def versus(*arguments, **options):
    return run_script('dev/versus.py', *arguments, **options)


@pytest.mark.slow
def test_train_compares_medians_and_memory_on_the_same_data(dataset, tmp_path):
    (tmp_path / 'train.py').write_text(TRAIN)
    arguments = [tmp_path, '--theirs=max_iters=7', *ARGUMENTS, f'--dataset={dataset}', '--pos=rope',
                 '--iters=5', '--warmup=2', '--rounds=2']
    lines = versus(*arguments).stdout.splitlines()
    assert len(lines) == 3 and lines[-1].startswith('medians')
    assert all(line.split()[1] in ('8.00', '9.00') for line in lines)
    words = lines[-1].split()
    theirs, ours, ratio = float(words[1]), float(words[4]), float(words[7])
    assert ratio == pytest.approx(theirs / ours, abs=0.01)
    memory = re.search(r'memory from ([\d.]+) to ([\d.]+) GB$', lines[-1])
    assert 0.1 < float(memory[1]) < float(memory[2]) < 10  # their script only imports torch
    (tmp_path / 'train.py').write_text('raise ValueError("not today")')
    broken = versus(*arguments, check=False)
    assert broken.returncode == 1 and 'not today' in broken.stdout


@pytest.mark.slow
def test_loader_executes_only_one_function_of_their_script(tmp_path):
    (tmp_path / 'train.py').write_text(GET_BATCH)
    printed, row = versus(tmp_path, '--part=loader', '--rounds=1', '--json').stdout.splitlines()
    assert printed == f'{2 ** 25} 50256 64 1024 cpu cpu'
    row = json.loads(row)
    assert row['theirs_ms'] > 0 and row['ours_ms'] > 0


@pytest.mark.parametrize('arguments, message', [
    (['HERE', '--part=loader'], 'train.py has no function get_batch'),
    (['--part=loader'], '--part=loader needs a nanoGPT checkout'),
    (['--part=loader', 'nowhere'], 'there is no nowhere/train.py'),
    (['HERE', '--part=tokenize'], 'as --input'),
    (['--part=start', '--rounds=0'], '--rounds must be at least 1'),
    (['--part=sample', '--new_tokens=1'], '--new_tokens at least 2'),
    (['--iters=0'], '--iters must be at least 1'),
])
def test_wrong_arguments_are_one_sentence(tmp_path, monkeypatch, arguments, message):
    (tmp_path / 'train.py').write_text('')
    arguments = [str(tmp_path) if argument == 'HERE' else argument for argument in arguments]
    monkeypatch.setattr(sys, 'argv', ['versus.py', *arguments])
    with pytest.raises(SystemExit, match=message):
        program.main()


@pytest.mark.slow
def test_tokenize_compares_commands_that_write_the_same_tokens(tmp_path, vocabulary):
    (tmp_path / 'data/shakespeare').mkdir(parents=True)
    script = tmp_path / 'data/shakespeare/prepare.py'
    script.write_text(PREPARE)
    (tmp_path / 'words.txt').write_text('ten chars\n' * 100)
    arguments = [tmp_path, '--part=tokenize', '--rounds=1', f'--input={tmp_path}/words.txt']
    env = {'TIKTOKEN_CACHE_DIR': vocabulary}
    first, medians = versus(*arguments, env=env).stdout.splitlines()
    assert first.startswith('nanoGPT') and medians.startswith('medians') and medians.endswith('MB/s')
    script.write_text(PREPARE.replace('900', '899'))
    done = versus(*arguments, env=env, check=False)
    assert done.returncode == 1 and 'the two commands have written different tokens' in done.stdout


@pytest.mark.slow
def test_sample_draws_from_the_same_weights(tmp_path):
    (tmp_path / 'sample.py').write_text(SAMPLE)
    arguments = ['--part=sample', '--new_tokens=3', *TINIEST, '--rounds=1', '--json']
    done = versus(tmp_path, *arguments, '--ours=quantize=int4', check=False)
    assert done.returncode == 1 and "quantize is 'int4'" in done.stdout
    (tmp_path / 'calls').unlink()
    arguments.append('--ours=quantize=int8')
    row = json.loads(versus(tmp_path, *arguments).stdout)
    assert set(row) == {'theirs_ms', 'ours_ms'}
    assert (tmp_path / 'calls').read_text() == '16 50257 3 cpu\n16 50257 1 cpu\n'


@pytest.mark.slow
def test_start_needs_no_checkout():
    arguments = ['--random_tokens=65', '--gradient_accumulation_steps=1', *TINIEST, '--rounds=1', '--json']
    row = json.loads(versus('--part=start', *arguments).stdout)
    assert row['theirs_ms'] > 0 and row['ours_ms'] > 0
