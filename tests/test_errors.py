"""Bad input ends a run with one clear sentence and exit code 1. Damaged checkpoints are passed over."""
import functools
import hashlib
import json
import os
import shutil
import socket
import subprocess
import sys

import numpy as np
import pytest
import torch

from data.datasets import find_sources, fingerprint
from data.loader import SCAN_TOKENS
from helpers import (FAULTS, ROOT, TINY, curve, first_iterations, newest_state, run_script, saved_iterations,
                     side_by_side)
from kilogpt.weights.nanogpt import packed_in_memory
from model import GPT, GPTConfig


# --- bad arguments --------------------------------------------------------------------------------------

# {name: (arguments after TINY, words that the sentence must contain, ...)}; {tmp} is the folder `inputs`.
BAD_ARGUMENTS = {
    'unknown key': (['--n_layers=2'], 'n_layers', 'did you mean n_layer?'),
    'unknown key in a file': (['{tmp}/unknown.py'], 'learning_rat', 'unknown.py', 'mean learning_rate?'),
    'no such file': (['config/nowhere.py'], 'config/nowhere.py'),
    'mistyped value': (['--batch_size=many'], 'batch_size', 'int', 'many'),
    'width': (['--n_embd=30'], 'n_embd=30', 'n_head=4'),
    'zero batch': (['--batch_size=0'], 'batch_size', '0', 'at least 1'),
    'negative batch': (['--batch_size=-3'], 'batch_size', '-3', 'at least 1'),
    'negative evaluation': (['--eval_iters=-1'], 'eval_iters', '-1', 'negative'),
    'schedule': (['--lr_schedule=cosin'], 'lr_schedule', 'cosin', 'wsd'),
    'rate of 0': (['--lr_decay_iters=3', '--min_lr=0'], 'lr_decay_iters is 3', 'iteration 3', 'max_iters=12'),
    'rate of an unknown kind': (['--lr_factors=tables:3'], 'lr_factors', 'tables:3', 'embedding'),
    'decay of nothing': (['--lr_decay_ratio=0'], 'lr_decay_ratio is 0', 'above 0'),
    'negative decay': (['--lr_decay_iters=-1'], 'lr_decay_iters', '-1', 'negative'),
    'dropout': (['--dropout=1.5'], 'dropout', '1.5'),
    'dtype': (['--dtype=float8'], 'dtype', 'float8', 'bfloat16'),
    'no GPU': (['--device=cuda'], 'device=cuda', '--device=cpu'),
    'no such device': (['--device=gpu'], "'gpu'", 'cuda'),
    'missing dataset': (['--dataset=nothing_here'], 'nothing_here', 'data/text/prepare.py --input',
                        'data/preferences'),
    'dataset not prepared': (['--dataset={tmp}/empty'], 'empty', 'has no data'),
    'own dataset not prepared': (['--dataset={tmp}/own'], 'run python', 'own/prepare.py (the first'),
    'alien token': (['--dataset={tmp}/alien'], 'token 65', 'vocab_size is 65', 'train.bin'),
    'alien token in a large file': (['--dataset={tmp}/large'], 'token 65', 'vocab_size is 65'),
    'four bytes a token': (['--dataset={tmp}/wide'], 'train.bin', 'uint16', '4 bytes', '"dtype": "uint32"'),
    'half a token': (['--dataset={tmp}/half'], 'train.bin', 'truncated'),
    'fewer tokens than written': (['--dataset={tmp}/fewer'], 'val.bin', '3000', 'truncated'),
    'block size': (['--block_size=3000'], 'block_size=3000', '3000 tokens', 'val', '2999'),
    'nothing to resume': (['--init_from=resume'], 'no checkpoint', 'out_dir', 'init_from=scratch'),
    'misspelt init_from': (['--init_from=scrach'], "'scrach'", 'scratch', 'resume', 'gpt2'),
    'no network': (['--init_from=gpt2'], 'gpt2', 'could not be downloaded'),
    'no weights in the folder': (['--init_from={tmp}/empty'], 'empty', 'config.json'),
    'no account': (['--wandb_log=True'], 'wandb_log=True', 'API key', 'WANDB_MODE=offline'),
    'out_dir is a file': (['--out_dir={tmp}/unknown.py'], 'unknown.py'),
}

# Each differs little from the one before it.
SIMILAR = ('unknown key in a file', 'negative batch', 'negative evaluation', 'rate of an unknown kind',
           'decay of nothing', 'negative decay', 'no such device', 'alien token in a large file',
           'fewer tokens than written', 'misspelt init_from')


@pytest.fixture(scope='module')
def inputs(dataset, tmp_path_factory):
    """A folder with a bad config file and bad datasets."""
    folder = tmp_path_factory.mktemp('inputs')
    (folder / 'unknown.py').write_text('learning_rat = 1.0\n')
    (folder / 'empty').mkdir()
    (folder / 'own').mkdir()
    (folder / 'own' / 'prepare.py').touch()
    for name in ('alien', 'large', 'half', 'fewer'):
        shutil.copytree(dataset, folder / name)
    tokens = np.fromfile(dataset / 'train.bin', dtype='<u2')
    tokens[1234] = 65
    tokens.tofile(folder / 'alien' / 'train.bin')
    # This file is too large to be searched as a whole at the start.
    np.full(SCAN_TOKENS + 64, 65, dtype='<u2').tofile(folder / 'large' / 'train.bin')
    (folder / 'wide').mkdir()
    tokens.astype('<u4').tofile(folder / 'wide' / 'train.bin')
    shutil.copy(dataset / 'val.bin', folder / 'wide')
    with open(folder / 'half' / 'train.bin', 'ab') as file:
        file.truncate(39_999)
    meta = json.loads((dataset / 'meta.json').read_text())
    meta['tokens'] = {'train.bin': 20_000, 'val.bin': 3_000}
    (folder / 'fewer' / 'meta.json').write_text(json.dumps(meta))
    with open(folder / 'fewer' / 'val.bin', 'ab') as file:
        file.truncate(5_000)
    return folder


@pytest.fixture(scope='module')
def offline(inputs):
    """An environment without a network, an account or a cache."""
    return dict(HF_ENDPOINT='http://127.0.0.1:9', HF_HOME=str(inputs / 'empty'), NETRC=str(inputs / 'none'),
                WANDB_API_KEY='', WANDB_MODE='online')


def assert_one_sentence(failure, *words):
    """Assert that a run ended before any iteration, with exit code 1 and one line with these words."""
    assert failure.returncode == 1
    assert failure.stderr.startswith('error: ') and failure.stderr.count('\n') == 1, failure.stderr
    assert [word for word in words if word not in failure.stderr] == [], failure.stderr
    assert 'loss' not in failure.stdout


@pytest.mark.parametrize('name', [
    pytest.param(name, marks=pytest.mark.slow if name in SIMILAR else pytest.mark.quick) for name in BAD_ARGUMENTS])
def test_bad_arguments_end_in_one_sentence_and_exit_code_1(train, inputs, offline, name):
    arguments, *words = BAD_ARGUMENTS[name]
    failure = train(*(argument.format(tmp=inputs) for argument in arguments), check=False, env=offline)
    if name == 'no GPU' and failure.returncode == 0:
        pytest.skip('this machine has a GPU')
    assert_one_sentence(failure, *words)


@pytest.mark.slow
def test_alien_token_ends_a_compiled_run_in_one_sentence(train, inputs):
    failure = train(f'--dataset={inputs}/large', '--compile=True', check=False)
    assert_one_sentence(failure, 'token 65', 'vocab_size is 65')
    assert 'torch.compile does not work' not in failure.stdout


@pytest.mark.slow  # test_parallel.py tests what two processes refuse, without torchrun's own traceback
def test_sentence_is_printed_under_torchrun(train):
    failure = train('--backend=nccl', nproc=2, runner=run_script, check=False)
    assert failure.returncode == 1 and 'train.py", line' not in failure.stderr
    sentence = 'error: backend=nccl needs CUDA GPUs, but the device is cpu: use --backend=gloo'
    lines = failure.stderr.splitlines()
    assert lines.count(sentence) == 1
    assert lines[-1].startswith('=====') and lines[-2] == f'  traceback : {sentence}'


def test_of_processes_of_one_torchrun_one_says_a_sentence_and_all_hand_it_over(tmp_path):
    code = 'from kilogpt.configurator import exit_on_error\nwith exit_on_error(): raise ValueError({!r})'
    said = []
    for rank, text in enumerate(['no', 'no', 'nor this']):
        path = tmp_path / str(rank) / 'error.json'
        path.parent.mkdir()
        done = subprocess.run([sys.executable, '-c', code.format(text)], cwd=ROOT, text=True, capture_output=True,
                              env=os.environ | dict(TORCHELASTIC_ERROR_FILE=str(path)))
        assert done.returncode == 1 and json.loads(path.read_text())['message']['message'] == f'error: {text}'
        said.append(done.stderr)
    assert said == ['error: no\n', '', 'error: nor this\n']


@pytest.mark.slow
@pytest.mark.parametrize('nproc', [1, 2])
def test_lack_of_memory_is_one_sentence_with_the_keys_to_change(tmp_path, dataset, nproc):
    failure = run_script('tests/with_fault.py', FAULTS / 'out_of_memory.py', *TINY, f'--dataset={dataset}',
                         f'--out_dir={tmp_path}/out', nproc=nproc, check=False)
    assert failure.returncode == 1 and 'train.py", line' not in failure.stderr
    sentence = next(line for line in failure.stderr.splitlines() if line.startswith('error: '))
    assert '2.54 GiB are wanted, but of its 79.65 GiB only 1.31 GiB are free.' in sentence
    assert all(key in sentence for key in (
        'gradient_accumulation_steps', 'activation_checkpoint', 'zero_stage', 'kilogpt.plan'))


def test_sentence_and_the_end_of_its_line_are_one_write():
    """With python -u, as under torchrun, the sentences of two processes must not end up in one line."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)  # keeps writes separate
    code = 'from kilogpt.configurator import exit_on_error\nwith exit_on_error(): raise ValueError("no")'
    with ours, theirs:
        assert subprocess.run([sys.executable, '-u', '-c', code], cwd=ROOT, stderr=theirs).returncode == 1
        assert ours.recv(100) == b'error: no\n'


def test_nodes_with_different_data_are_refused(train, dataset, tmp_path):
    other = shutil.copytree(dataset, tmp_path / 'other')
    np.fromfile(dataset / 'train.bin', dtype='<u2')[:-32].tofile(other / 'train.bin')
    failure = train('--max_iters=1', nproc=2, check=False, faults=[FAULTS / 'other_dataset.py'],
                    env=dict(OTHER_DATASET=str(other)))
    assert failure.codes == [1, 1] and failure.lines == {}
    assert 'does not hold the same data on every node (20,000 training tokens here)' in failure.outputs[0]
    assert '(19,968 training tokens here)' in failure.outputs[1]


# --- damaged checkpoints --------------------------------------------------------------------------------

def truncate(checkpoint):
    path = next(checkpoint.glob('*.distcp'))
    path.write_bytes(path.read_bytes()[:-1000])


def flip_a_byte(checkpoint):
    path = next(checkpoint.glob('*.distcp'))
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def delete_a_file(checkpoint):
    next(checkpoint.glob('*.distcp')).unlink()


def garble_metadata(checkpoint):
    (checkpoint / '.metadata').write_bytes(b'garbage')


def cut_state(checkpoint):
    (checkpoint / 'state.json').write_text('{"iteration": 1')


def delete_checksums(checkpoint):
    (checkpoint / 'checksums.json').unlink()


def never_completed(checkpoint):
    (checkpoint / '.metadata').unlink()


@pytest.fixture(scope='module')
def whole(train):
    """A run that left checkpoints at 3, 6, 9 and 12."""
    run = train('--save_interval=3', '--keep_checkpoints=9')
    assert saved_iterations(run.out_dir) == [3, 6, 9, 12]
    return run


def damaged(whole, folder, *damages):
    """Copy a run, and damage its checkpoints from the newest on, each by one of these functions."""
    out_dir = shutil.copytree(whole.out_dir, folder)
    checkpoints = sorted((out_dir / 'ckpt').iterdir(), reverse=True)
    for damage, checkpoint in zip(damages, checkpoints):
        damage(checkpoint)
    return out_dir


def test_damaged_checkpoints_are_passed_over(train, whole, tmp_path):
    resumed, auto = side_by_side(
        functools.partial(train, '--init_from=resume', '--save_interval=3', '--keep_checkpoints=9',
                          out_dir=damaged(whole, tmp_path / 'a', truncate, flip_a_byte, garble_metadata)),
        functools.partial(train, '--init_from=auto',
                          out_dir=damaged(whole, tmp_path / 'b', delete_a_file, cut_state, delete_checksums)))
    for run in (resumed, auto):
        assert run.stdout.count('is damaged') == 3 and 'at iteration 3' in run.stdout
        assert 'iter 4: loss' in run.stdout and 'iter 3: loss' not in run.stdout
        assert curve(run) == curve(whole) and run.evals == whole.evals
    # New checkpoints take the places of the damaged ones.
    healed = train('--init_from=resume', '--max_iters=13', out_dir=resumed.out_dir)
    assert 'is damaged' not in healed.stdout and 'at iteration 12' in healed.stdout


def test_checkpoint_that_one_process_finds_damaged_is_passed_over_by_both(train, whole, tmp_path):
    out_dir = damaged(whole, tmp_path / 'a', never_completed, flip_a_byte)
    run = train('--init_from=resume', out_dir=out_dir, nproc=2)
    assert run.stdout.count('is damaged') == 1 and 'at iteration 6' in run.stdout
    assert curve(run)[12] == pytest.approx(curve(whole)[12], abs=1e-3)


ALL_FOUR = truncate, flip_a_byte, delete_a_file, garble_metadata


def test_resume_without_an_undamaged_checkpoint_is_refused(train, whole, tmp_path):
    resumed = train('--init_from=resume', out_dir=damaged(whole, tmp_path / 'a', *ALL_FOUR), check=False)
    assert resumed.stdout.count('is damaged') == 4
    assert_one_sentence(resumed, 'init_from=scratch')


def test_auto_without_an_undamaged_checkpoint_begins_again_and_keeps_the_damaged_ones(train, whole, tmp_path):
    fresh = train('--init_from=auto', '--max_iters=3', out_dir=damaged(whole, tmp_path / 'a', *ALL_FOUR))
    assert curve(fresh) == curve(first_iterations(whole, 3))
    (earlier,) = fresh.out_dir.glob('earlier-*')
    assert len(list((earlier / 'ckpt').iterdir())) == 4


def test_damaged_weights_of_another_run_are_refused(train, whole, tmp_path):
    other = damaged(whole, tmp_path / 'a', *[flip_a_byte] * 4)
    refused = train(f'--init_from={other}', check=False)
    assert_one_sentence(refused, 'is damaged')


# --- tokenizers -----------------------------------------------------------------------------------------

def with_meta(dataset, folder, **entries):
    """Copy a dataset, with other entries in its meta.json; an entry of None is removed."""
    copy = shutil.copytree(dataset, folder)
    meta = json.loads((copy / 'meta.json').read_text()) | entries
    meta = {key: value for key, value in meta.items() if value is not None}
    (copy / 'meta.json').write_text(json.dumps(meta))
    return copy


def test_dataset_with_another_tokenizer_is_refused(train, whole, dataset, tmp_path):
    """In a finetuned and a resumed run, with another alphabet and another kind of tokenizer."""
    chars = json.loads((dataset / 'meta.json').read_text())['chars']
    reversed_chars = with_meta(dataset, tmp_path / 'reversed', chars=chars[::-1])
    refused = train(f'--init_from={whole.out_dir}', f'--dataset={reversed_chars}', check=False)
    digests = [hashlib.sha256(''.join(text).encode()).hexdigest()[:8] for text in (chars, chars[::-1])]
    both = [f'char (65 characters, digest {digest})' for digest in digests]
    assert_one_sentence(refused, f'the tokenizer {both[0]}', f'has {both[1]}', 'set --dataset')
    in_bytes = with_meta(dataset, tmp_path / 'bytes', tokenizer='bytes', chars=None)
    refused = train('--init_from=resume', f'--dataset={in_bytes}',
                    out_dir=shutil.copytree(whole.out_dir, tmp_path / 'a'), check=False)
    assert_one_sentence(refused, f'the tokenizer {both[0]}', 'bytes', '--dataset', '--init_from=scratch')


def test_gpt2_finetuned_on_characters_is_refused(train, tmp_path):
    """nanoGPT's ckpt.pt does not name its tokenizer, but this is the size to which it pads GPT-2's tokens."""
    arguments = dict(n_layer=1, n_head=2, n_embd=8, block_size=32, bias=False, vocab_size=50304, dropout=0.0)
    weights = packed_in_memory(dict(GPT(GPTConfig(**arguments)).named_parameters()))
    torch.save(dict(model=weights, model_args=arguments), tmp_path / 'ckpt.pt')
    refused = train(f'--init_from={tmp_path}/ckpt.pt', check=False)
    assert_one_sentence(refused, 'ckpt.pt has the tokenizer gpt2', 'has char (65', '--dataset')


def test_run_on_nameless_tokens_keeps_the_tokenizer_of_its_model(train, whole, dataset, tmp_path):
    nameless = with_meta(dataset, tmp_path / 'nameless', tokenizer=None, chars=None)
    run = train(f'--init_from={whole.out_dir}', f'--dataset={nameless}', '--max_iters=1')
    theirs, ours = newest_state(run.out_dir)['tokenizer'], newest_state(whole.out_dir)['tokenizer']
    assert theirs == ours and theirs['tokenizer'] == 'char'


# --- what a checkpoint decides --------------------------------------------------------------------------

@pytest.mark.quick
def test_checkpoint_decides_the_model_of_a_resumed_run_which_says_so(train, whole, tmp_path):
    resumed = train('--init_from=resume', '--n_layer=3', '--learning_rate=0.02', '--max_iters=13',
                    out_dir=shutil.copytree(whole.out_dir, tmp_path / 'a'))
    assert f'the model is that of {resumed.out_dir}/ckpt/iter_00000012: n_layer=2 (not 3)\n' in resumed.stdout
    assert 'resuming with another learning_rate: 0.01 -> 0.02\n' in resumed.stdout
    assert 'the learning rate jumps at iteration 12: the last update had 0.00122' in resumed.stdout
    assert 'warning: the learning rate stays at min_lr=0.001 from lr_decay_iters=12' in resumed.stdout
    assert '29,856 parameters' in resumed.stdout and list(resumed.lines) == list(range(1, 14))
    config = json.loads((resumed.out_dir / 'config.json').read_text())
    assert (config['n_layer'], config['learning_rate']) == (2, 0.02)
    assert newest_state(resumed.out_dir)['config'] == config


def test_finished_run_that_is_resumed_says_what_to_raise(train, whole, tmp_path):
    resumed = train('--init_from=auto', out_dir=shutil.copytree(whole.out_dir, tmp_path / 'a'),
                    faults=[FAULTS / 'terminal.py'])
    for text in ('verifying', 'loading'):
        assert f'{text} {resumed.out_dir}/ckpt/iter_00000012' in resumed.stderr
    assert 'nothing is left to do: the checkpoint has 12 iterations, and max_iters is 12' in resumed.stdout
    assert 'warning' not in resumed.stdout


@pytest.mark.quick
def test_resumed_run_that_is_beyond_max_iters_makes_no_update(train, whole, tmp_path):
    out_dir = shutil.copytree(whole.out_dir, tmp_path / 'a')
    before = sorted(os.listdir(out_dir / 'ckpt'))
    resumed = train('--init_from=resume', '--max_iters=5', '--warmup_iters=1', '--eval_interval=50',
                    '--sample_interval=50', '--sample_tokens=2', '--sample_prompts=A', out_dir=out_dir)
    assert 'nothing is left to do: the checkpoint has 12 iterations, and max_iters is 5' in resumed.stdout
    assert 'iter 13' not in resumed.stdout and 'step 12: ' in resumed.stdout and 'sample at iteration 12' in resumed.stdout
    assert sorted(os.listdir(out_dir / 'ckpt')) == before


def test_resumed_run_finds_that_its_dataset_was_replaced(train, dataset, tmp_path):
    data = shutil.copytree(dataset, tmp_path / 'data')
    options = [f'--dataset={data}', '--eval_iters=1']
    first = train(*options, '--max_iters=1')
    (data / 'train.bin').write_bytes((dataset / 'train.bin').read_bytes()[::-1][1:] + b'\0')
    refused = train(*options, '--init_from=resume', out_dir=first.out_dir, check=False)
    assert_one_sentence(refused, str(data), 'train.bin has other content', '--accept_new_data=True')
    accepted = train(*options, '--init_from=resume', '--accept_new_data=True', '--max_iters=2',
                     out_dir=first.out_dir)
    assert 'continues with other batches' in accepted.stdout and list(accepted.lines) == [1, 2]
    # The acceptance is for these data, not for the next change.
    assert newest_state(first.out_dir)['shards'] == fingerprint(find_sources(str(data)))
    assert json.loads((first.out_dir / 'config.json').read_text())['accept_new_data'] is False


def test_state_of_another_optimizer_is_refused(train):
    first = train('--max_iters=1', '--eval_iters=1')
    refused = train('--init_from=resume', '--optimizer=muon', out_dir=first.out_dir, check=False)
    assert refused.returncode == 1, refused.stderr
    assert refused.stderr.startswith("error: optimizer is 'muon', but") and "'adamw'" in refused.stderr
