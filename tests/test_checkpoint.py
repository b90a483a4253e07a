"""Checkpoints as a library. How runs save and resume: test_train, test_faults, test_errors, test_parallel."""
import os
import pathlib
import pickle
import subprocess
import sys
import warnings

import pytest
import torch
from helpers import ROOT, read_tensors
from test_weights import make_run

from kilogpt import checkpoint

pytestmark = pytest.mark.quick


# --- the files ------------------------------------------------------------------------------------------

def parameters_of(path):
    return [(key.removeprefix('model.'), tensor) for key, tensor in read_tensors(path).items()
            if key.startswith('model.')]


class Evil:
    def __reduce__(self):
        return os.mkdir, (self.path,)


def test_checkpoint_from_others_runs_nothing(tmp_path):
    make_run(tmp_path)
    (path,) = checkpoint.find(str(tmp_path))
    parameters = parameters_of(path)
    checkpoint.load(path, parameters)
    Evil.path = str(tmp_path / 'it ran')
    with open(os.path.join(path, '.metadata'), 'wb') as file:
        pickle.dump(Evil(), file)
    with pytest.raises(ValueError, match=r'names \w+.mkdir, which no checkpoint of ours does'):
        checkpoint.load(path, parameters)
    assert not os.path.exists(Evil.path)


class PathOfAnotherSystem:
    def __reduce__(self):
        return pathlib.PosixPath if os.name == 'nt' else pathlib.WindowsPath, ('out', 'ckpt')


def test_checkpoint_of_another_operating_system_loads(tmp_path):
    """DCP pickles the path of the folder that it wrote."""
    _, model, _ = make_run(tmp_path)
    (path,) = checkpoint.find(str(tmp_path))
    with open(os.path.join(path, '.metadata'), 'rb') as file:
        metadata = pickle.load(file)
    metadata.storage_meta.checkpoint_id = PathOfAnotherSystem()
    with open(os.path.join(path, '.metadata'), 'wb') as file:
        pickle.dump(metadata, file)
    loaded = {name: torch.empty_like(p) for name, p in model.named_parameters()}
    checkpoint.load(path, list(loaded.items()))
    assert all(loaded[name].equal(p) for name, p in model.named_parameters())


def test_load_refuses_another_model(tmp_path):
    make_run(tmp_path)
    (path,) = checkpoint.find(str(tmp_path))
    name = 'transformer.ln_f.weight'
    with pytest.raises(ValueError, match=rf'holds \(32,\) where the model has {name} \(33,\)'):
        checkpoint.load(path, [(name, torch.zeros(33))])
    with pytest.raises(ValueError, match='holds nothing where the model has extra'):
        checkpoint.load(path, [('extra', torch.zeros(1))])


def test_save_without_folders_that_open(tmp_path, monkeypatch):
    """Windows refuses to open a folder, which a sync of its names would take."""
    def refusing(path, *args, **options):
        if os.path.isdir(path):
            raise PermissionError(13, 'Permission denied', path)
        return os_open(path, *args, **options)
    os_open = os.open
    monkeypatch.setattr(os, 'open', refusing)
    make_run(tmp_path)
    (path,) = checkpoint.find(str(tmp_path))
    assert checkpoint.damage(path) is None


# --- the lock -------------------------------------------------------------------------------------------

HOLDER = """
import sys, time
from kilogpt import checkpoint
lock = checkpoint.lock_folder(sys.argv[1])
print('locked', flush=True)
time.sleep(100)
"""


def test_two_runs_do_not_share_a_folder(tmp_path, capsys):
    lock = checkpoint.lock_folder(str(tmp_path))
    with pytest.raises(ValueError, match='another run is at work in'):
        checkpoint.lock_folder(str(tmp_path), patience=0)
    assert capsys.readouterr().out == f'waiting for the run that is still at work in {tmp_path}\n'
    lock.release()
    checkpoint.lock_folder(str(tmp_path), patience=0).release()


def test_killed_run_releases_its_folder(tmp_path, capsys):
    """The operating system releases the lock; a run that starts before that waits."""
    holder = subprocess.Popen([sys.executable, '-c', HOLDER, str(tmp_path)], cwd=ROOT, text=True,
                              stdout=subprocess.PIPE)
    try:
        assert holder.stdout.readline() == 'locked\n'
        with pytest.raises(ValueError, match='another run is at work in'):
            checkpoint.lock_folder(str(tmp_path), patience=0)
    finally:
        holder.kill()
    checkpoint.lock_folder(str(tmp_path)).release()
    holder.communicate()


@pytest.mark.parametrize('number', ['ENOSYS', 'ENOLCK', 'EOPNOTSUPP'])
def test_storage_without_locks_does_not_stop_a_run(number, tmp_path, monkeypatch):
    fcntl = pytest.importorskip('fcntl')
    import errno

    def flock(*args):
        raise OSError(getattr(errno, number), 'no locks here')
    monkeypatch.setattr(fcntl, 'flock', flock)
    with warnings.catch_warnings(action='ignore'):
        first = checkpoint.lock_folder(str(tmp_path), patience=0)
        second = checkpoint.lock_folder(str(tmp_path), patience=0)
    assert first is not second


def test_folder_that_cannot_be_written_to_is_an_error(tmp_path):
    with pytest.raises(OSError):
        checkpoint.lock_folder(str(tmp_path / 'nowhere'), patience=0)


# --- any operating system -------------------------------------------------------------------------------

WITHOUT_UNIX = """
import sys
sys.modules['fcntl'] = sys.modules['resource'] = None
import kilogpt.convert
from kilogpt import checkpoint, weights
checkpoint.lock_folder(sys.argv[1], patience=0)
checkpoint.lock_folder(sys.argv[1], patience=0)
print('imported')
"""


def test_modules_of_unix_are_not_needed(tmp_path):
    done = subprocess.run([sys.executable, '-W', 'ignore', '-c', WITHOUT_UNIX, str(tmp_path)], cwd=ROOT,
                          capture_output=True, text=True)
    assert done.stdout == 'imported\n', done.stderr
