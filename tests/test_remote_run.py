"""A run whose dataset and out_dir are URLs, here of this machine's files, which need no server (test_storage.py has one)."""
import os
import pathlib
import shutil

import pytest

from helpers import TINY, assert_near, read_run, run_forked
from kilogpt.run import checkpoint

KEYS = '--keep_checkpoints=2', '--save_interval=5'


def test_without_data_cache_gb_nothing_is_kept_on_this_machine(train, dataset, tmp_path, monkeypatch):
    monkeypatch.setenv('KILOGPT_CACHE', str(tmp_path / 'cache'))
    run = train(f'--dataset=file://{dataset}', '--data_cache_gb=0')
    assert_near(run, train())
    assert not (tmp_path / 'cache' / 'tokens').exists()
    wrong = train('--data_cache_gb=-1', check=False)
    assert wrong.returncode == 1 and 'data_cache_gb is -1.0: it cannot be negative' in wrong.stderr


@pytest.mark.parametrize('damage', [
    'flipped', *(pytest.param(damage, marks=pytest.mark.slow) for damage in ('', 'without .metadata'))])
def test_run_at_a_url_continues_on_another_machine(train, dataset, tmp_path, monkeypatch, damage):
    """10 iterations of two processes and the rest by one with nothing but the URL follow 12 of one process here."""
    monkeypatch.setenv('KILOGPT_CACHE', str(tmp_path / 'cache'))
    home = tmp_path / 'there' / 'run'
    keys = *KEYS, f'--dataset=file://{dataset}', f'--out_dir=file://{home}'
    work = tmp_path / 'work'
    work.mkdir()
    run_forked('train.py', *TINY, *keys, '--max_iters=10', cwd=work, nproc=2)
    assert [path[-2:] for path in checkpoint.find(f'file://{home}')] == ['10', '06']  # of 5, 6 and 10
    shutil.rmtree(work / 'out-file')
    newest = pathlib.Path(checkpoint.find(f'file://{home}')[0].removeprefix('file://'))
    if damage == 'without .metadata':
        (newest / '.metadata').unlink()
    elif damage:
        content = bytearray((newest / '__0_0.distcp').read_bytes())
        content[-100] ^= 1
        (newest / '__0_0.distcp').write_bytes(content)
    done = run_forked('train.py', *TINY, *keys, '--init_from=auto', cwd=work)
    assert f'resuming file://{home}/ckpt/iter_{6 if damage else 10:08d}' in done.stdout
    assert ('is damaged (__0_0.distcp is not as it was written)' in done.stdout) == (damage == 'flipped')
    there, here = read_run(home), train(*KEYS)
    del there.evals[10]  # at the end of the first part
    assert_near(there, here)
    assert there.lines.keys() == read_run(os.path.join(work, 'out-file', str(home).strip('/'))).lines.keys()
    assert checkpoint.damage(f'file://{home}/ckpt/iter_00000012') is None
    again = run_forked('train.py', *TINY, *keys, cwd=work, check=False)
    assert again.returncode == 1 and f'error: file://{home} has checkpoints of another run' in again.stderr
