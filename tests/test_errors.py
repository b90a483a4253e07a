"""Bad input ends a run with one clear sentence and exit code 1; a damaged checkpoint sends it back to the one before."""
import json
import shutil

import numpy as np
import pytest

from conftest import TINY, curve, forked, run, side_by_side
from data.loader import SCAN_TOKENS

# arguments on top of TINY, and words that the sentence must hold
BAD_ARGUMENTS = {
    'unknown key': (['--n_layers=2'], 'n_layers', 'did you mean n_layer?'),
    'unknown key in a file': (['{tmp}/unknown.py'], 'learning_rat', 'unknown.py', 'did you mean learning_rate?'),
    'no such file': (['config/nowhere.py'], 'config/nowhere.py'),
    'mistyped value': (['--batch_size=many'], 'batch_size', 'int', 'many'),
    'width': (['--n_embd=30'], 'n_embd=30', 'n_head=4'),
    'zero batch': (['--batch_size=0'], 'batch_size', '0', 'at least 1'),
    'negative batch': (['--batch_size=-3'], 'batch_size', '-3', 'at least 1'),
    'negative evaluation': (['--eval_iters=-1'], 'eval_iters', '-1', 'negative'),
    'schedule': (['--lr_schedule=cosin'], 'lr_schedule', 'cosin', 'wsd'),
    'dropout': (['--dropout=1.5'], 'dropout', '1.5'),
    'dtype': (['--dtype=float8'], 'dtype', 'float8', 'bfloat16'),
    'no GPU': (['--device=cuda'], 'device=cuda', '--device=cpu'),
    'no such device': (['--device=gpu'], "'gpu'", 'cuda'),
    'missing dataset': (['--dataset=nothing_here'], 'nothing_here', 'data/text/prepare.py --input'),
    'dataset not prepared': (['--dataset={tmp}/empty'], 'empty', 'has no data'),
    'openwebtext not prepared': (['--dataset=openwebtext'], 'python data/openwebtext/prepare.py'),
    'alien token': (['--dataset={tmp}/alien'], 'token 65', 'vocab_size is 65', 'train.bin'),
    'alien token in a large file': (['--dataset={tmp}/large'], 'token 65', 'vocab_size is 65'),
    'alien token, compiled': (['--dataset={tmp}/large', '--compile=True'], 'token 65', 'vocab_size is 65'),
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


@pytest.fixture(scope='module')
def inputs(dataset, tmp_path_factory):
    """A folder with a bad config file and bad datasets."""
    folder = tmp_path_factory.mktemp('inputs')
    (folder / 'unknown.py').write_text('learning_rat = 1.0\n')
    (folder / 'empty').mkdir()
    for name in ('alien', 'large', 'half', 'fewer'):
        shutil.copytree(dataset, folder / name)
    tokens = np.fromfile(dataset / 'train.bin', dtype='<u2')
    tokens[1234] = 65
    tokens.tofile(folder / 'alien' / 'train.bin')
    np.full(SCAN_TOKENS + 64, 65, dtype='<u2').tofile(folder / 'large' / 'train.bin')  # not searched at start
    with open(folder / 'half' / 'train.bin', 'ab') as file:
        file.truncate(39_999)
    meta = json.loads((dataset / 'meta.json').read_text())
    (folder / 'fewer' / 'meta.json').write_text(json.dumps(meta | dict(tokens={'train.bin': 20_000, 'val.bin': 3_000})))
    with open(folder / 'fewer' / 'val.bin', 'ab') as file:
        file.truncate(5_000)
    return folder


@pytest.fixture(scope='module')
def failures(dataset, inputs, tmp_path_factory):
    """{name: finished process} of BAD_ARGUMENTS, run side by side."""
    offline = dict(HF_ENDPOINT='http://127.0.0.1:9', HF_HOME=str(inputs / 'empty'), NETRC=str(inputs / 'none'), WANDB_API_KEY='', WANDB_MODE='online')

    def fail(arguments):
        launcher = run if '--compile=True' in arguments else forked
        return launcher('train.py', *TINY, f'--dataset={dataset}', f'--out_dir={tmp_path_factory.mktemp("out")}',
                        *(argument.format(tmp=inputs) for argument in arguments), check=False, env=offline)
    return dict(zip(BAD_ARGUMENTS, side_by_side(*(lambda a=a: fail(a) for a, *_ in BAD_ARGUMENTS.values()))))


@pytest.mark.parametrize('name', BAD_ARGUMENTS)
def test_exit_on_error_and_exit_code_1(failures, name):
    failure = failures[name]
    if name == 'no GPU' and failure.returncode == 0:
        pytest.skip('there is one')
    assert failure.returncode == 1
    assert failure.stderr.startswith('error: ') and failure.stderr.count('\n') == 1, failure.stderr
    assert not [word for word in BAD_ARGUMENTS[name][1:] if word not in failure.stderr], failure.stderr
    assert 'iter 1:' not in failure.stdout and 'torch.compile does not work' not in failure.stdout


def test_the_sentence_is_there_under_torchrun(dataset, tmp_path):
    failure = run('train.py', *TINY, f'--dataset={dataset}', f'--out_dir={tmp_path}', '--backend=nccl', nproc=2, check=False)
    assert failure.returncode == 1 and 'train.py", line' not in failure.stderr  # torchrun has a traceback of its own
    assert 'error: backend=nccl needs CUDA GPUs, but the device is cpu: use --backend=gloo' in failure.stderr.splitlines()


# damaged checkpoints

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
    return train('--save_interval=3', '--keep_checkpoints=9')


def damaged(whole, folder, *damages):
    """A copy of the run, its newest checkpoint damaged by the first function, the one before it by the second, ..."""
    out_dir = shutil.copytree(whole.out_dir, folder)
    checkpoints = sorted((out_dir / 'ckpt').iterdir(), reverse=True)
    assert len(checkpoints) == 4
    for damage, checkpoint in zip(damages, checkpoints):
        damage(checkpoint)
    return out_dir


def test_damaged_checkpoints_are_passed_over(train, whole, tmp_path):
    first, second = side_by_side(
        lambda: train('--init_from=resume', '--save_interval=3', '--keep_checkpoints=9',
                      out_dir=damaged(whole, tmp_path / 'a', truncate, flip_a_byte, garble_metadata)),
        lambda: train('--init_from=auto', out_dir=damaged(whole, tmp_path / 'b', delete_a_file, cut_state, delete_checksums)))
    for again in (first, second):
        assert again.stdout.count('is damaged') == 3 and 'at iteration 3' in again.stdout
        assert 'iter 4: loss' in again.stdout and 'iter 3: loss' not in again.stdout
        assert curve(again) == curve(whole) and again.evals == whole.evals
    healed = train('--init_from=resume', '--max_iters=13', out_dir=first.out_dir)
    assert 'is damaged' not in healed.stdout and 'at iteration 12' in healed.stdout


def test_damage_that_one_process_of_two_sees(train, whole, tmp_path):
    again = train('--init_from=resume', out_dir=damaged(whole, tmp_path / 'a', never_completed, flip_a_byte), nproc=2)
    assert again.stdout.count('is damaged') == 1 and 'at iteration 6' in again.stdout
    assert curve(again)[12] == pytest.approx(curve(whole)[12], abs=1e-3)


def test_all_checkpoints_damaged(train, whole, dataset, tmp_path):
    every = [truncate, flip_a_byte, delete_a_file, garble_metadata]
    folders = [damaged(whole, tmp_path / name, *every) for name in ('a', 'b')]
    other = damaged(whole, tmp_path / 'c', *[flip_a_byte] * 4)
    resumed, fresh, weights = side_by_side(
        lambda: forked('train.py', *TINY, f'--dataset={dataset}', f'--out_dir={folders[0]}', '--init_from=resume', check=False),
        lambda: train('--init_from=auto', '--max_iters=3', out_dir=folders[1]),
        lambda: forked('train.py', *TINY, f'--dataset={dataset}', f'--out_dir={tmp_path}/d', f'--init_from={other}', check=False))
    assert resumed.returncode == 1 and 'Traceback' not in resumed.stderr and resumed.stdout.count('is damaged') == 4
    assert resumed.stderr.startswith('error: ') and 'init_from=scratch' in resumed.stderr
    assert curve(fresh) == {i: curve(whole)[i] for i in (1, 2, 3)}  # auto begins anew, and throws nothing away
    (earlier,) = fresh.out_dir.glob('earlier-*')
    assert len(list((earlier / 'ckpt').iterdir())) == 4
    assert weights.returncode == 1 and weights.stderr.startswith('error: ') and 'is damaged' in weights.stderr


def test_resuming_with_another_model_size_says_that_the_checkpoint_decides(train, whole, tmp_path):
    again = train('--init_from=resume', '--n_layer=3', '--learning_rate=0.02', '--max_iters=13',
                  out_dir=shutil.copytree(whole.out_dir, tmp_path / 'a'))
    assert 'resuming with another n_layer: 2 -> 3 (the checkpoint decides)\n' in again.stdout
    assert 'resuming with another learning_rate: 0.01 -> 0.02\n' in again.stdout
    assert '29,856 parameters' in again.stdout and list(again.lines) == list(range(1, 14))


def test_another_optimizers_state_is_refused(train, dataset):
    first = train('--max_iters=1', '--eval_iters=1')
    done = forked('train.py', *TINY, f'--dataset={dataset}', f'--out_dir={first.out_dir}', '--init_from=resume', '--optimizer=muon', check=False)
    assert done.returncode == 1 and done.stderr.startswith("error: optimizer is 'muon', but") and "'adamw'" in done.stderr, done.stderr
