"""checkpoint.py as a library. test_train, test_faults, test_errors and test_parallel save and resume runs."""
import gc
import os
import pathlib
import pickle
import subprocess
import sys
import threading
import warnings

import pytest
import torch
from helpers import ROOT, read_tensors
from test_weights import make_run

from kilogpt.optim import build_adamw
from kilogpt.run import checkpoint, checkpoint_files
from kilogpt.training.cluster import lock_folder, set_aside

pytestmark = pytest.mark.quick


# --- the files ------------------------------------------------------------------------------------------

def parameters_of(path):
    return [(key.removeprefix('model.'), tensor) for key, tensor in read_tensors(path).items()
            if key.startswith('model.')]


def test_runs_that_begin_within_a_second_are_set_aside_in_separate_folders(tmp_path):
    folders = set()
    for count in range(1, 6):
        (tmp_path / 'metrics.jsonl').write_text(str(count))
        folders.add(set_aside(tmp_path))
        assert len(folders) == count and not (tmp_path / 'metrics.jsonl').exists()
    assert sorted(path.read_text() for path in tmp_path.glob('earlier-*/metrics.jsonl')) == list('12345')


class Evil:
    def __reduce__(self):
        return os.mkdir, (self.path,)


def test_checkpoint_from_others_does_not_run_code(tmp_path):
    make_run(tmp_path)
    (path,) = checkpoint.find(str(tmp_path))
    parameters = parameters_of(path)
    checkpoint.load(path, parameters)
    Evil.path = str(tmp_path / 'it ran')
    with open(os.path.join(path, '.metadata'), 'wb') as file:
        pickle.dump(Evil(), file)
    with pytest.raises(ValueError, match=r'names \w+.mkdir, which no checkpoint of kiloGPT does'):
        checkpoint.load(path, parameters)
    assert not os.path.exists(Evil.path)


class PathOfAnotherSystem:
    def __reduce__(self):
        return pathlib.PosixPath if os.name == 'nt' else pathlib.WindowsPath, ('out', 'ckpt')


def test_checkpoint_of_another_operating_system_loads(tmp_path):
    """DCP pickles the path of the folder that it writes."""
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


def test_save_works_where_folders_cannot_be_opened(tmp_path, monkeypatch):
    """Windows does not open folders, which is necessary to sync their lists of files."""
    def refusing(path, *args, **options):
        if os.path.isdir(path):
            raise PermissionError(13, 'Permission denied', path)
        return os_open(path, *args, **options)
    os_open = os.open
    monkeypatch.setattr(os, 'open', refusing)
    make_run(tmp_path)
    (path,) = checkpoint.find(str(tmp_path))
    assert checkpoint.damage(path) is None


# --- saves ----------------------------------------------------------------------------------------------

def model_of_ones():
    return [(name, torch.nn.Parameter(torch.ones(16, 16))) for name in 'abcd']


def save(saver, iteration, parameters, optimizer=None, background=False):
    """Save and wait; returns the {key: tensor} that the checkpoint then holds."""
    path = saver.save(iteration, parameters, optimizer, dict(val_loss=None), background)
    saver.wait()
    assert saver.problem is None and checkpoint.damage(path) is None
    return read_tensors(path)


@pytest.fixture
def writes(monkeypatch):
    """A list that gets (thread, {key: address}, interval of thread switches) at each write of a file."""
    def recorded(name, items, parts, file):
        addresses = {key: part.data_ptr() for key, part in parts.items()}
        found.append((threading.current_thread(), addresses, sys.getswitchinterval()))
        return write_items(name, items, parts, file)
    found, write_items = [], checkpoint_files._write_items
    monkeypatch.setattr(checkpoint_files, '_write_items', recorded)
    return found


def test_thread_writes_copies_and_a_blocking_save_has_neither(tmp_path, writes):
    """The thread does not know in which stream, on which GPU, training writes the tensors."""
    saver, parameters = checkpoint.Saver(str(tmp_path), 9), model_of_ones()
    interval = sys.getswitchinterval()
    save(saver, 1, parameters, background=True)
    save(saver, 2, parameters)
    (thread, in_background, short), (main, blocking, usual) = writes
    live = {f'model.{name}': parameter.data_ptr() for name, parameter in parameters}
    assert thread is not main and main is threading.main_thread()
    assert blocking == live and not set(in_background.values()) & set(live.values())
    assert short == pytest.approx(1e-4) and usual == interval == sys.getswitchinterval()


def test_thread_uses_the_gpu_of_its_process(tmp_path, monkeypatch):
    used = []
    monkeypatch.setattr(torch.cuda, 'is_initialized', lambda: True)
    monkeypatch.setattr(torch.cuda, 'current_device', lambda: 3)
    monkeypatch.setattr(torch.cuda, 'set_device',
                        lambda index: used.append((threading.current_thread(), index)))
    monkeypatch.setattr(torch.cuda, 'synchronize', lambda: None)
    save(checkpoint.Saver(str(tmp_path), 1), 1, model_of_ones(), background=True)
    ((thread, index),) = used
    assert index == 3 and thread is not threading.main_thread()


def test_save_in_the_background_is_under_way_until_it_is_written(tmp_path, monkeypatch):
    gate, write_items = threading.Event(), checkpoint_files._write_items
    monkeypatch.setattr(checkpoint_files, '_write_items', lambda *args: gate.wait() and write_items(*args))
    saver, parameters = checkpoint.Saver(str(tmp_path), 1), model_of_ones()
    saver.allocate(parameters, None)
    assert not saver.under_way
    saver.save(1, parameters, None, dict(val_loss=None), background=True)
    assert saver.under_way
    gate.set()
    saver.wait()
    assert not saver.under_way


def test_blocking_save_copies_one_tensor_at_a_time(tmp_path, monkeypatch):
    """Parameters that FSDP2 pads are views of larger memory, and are copied to be written."""
    def counting_save(tensor, file):
        storages = {}
        for found in gc.get_objects():
            # Other tests leave tensors too, some of which do not have memory.
            if type(found) in (torch.Tensor, torch.nn.Parameter) and found.shape == (10_000,):
                storages[found.untyped_storage().data_ptr()] = found.untyped_storage().nbytes()
        held.append(sum(storages.values()))
        return torch_save(tensor, file)
    held, torch_save = [], torch.save
    monkeypatch.setattr(torch, 'save', counting_save)
    parameters = [(f'p{i}', torch.nn.Parameter(torch.zeros(10_001)[:10_000])) for i in range(5)]
    save(checkpoint.Saver(str(tmp_path), 1), 1, parameters)
    assert len(held) == 5 and max(held) - min(held) <= 40_000


def test_saves_that_follow_one_plan_hold_the_tensors_of_their_iteration(tmp_path):
    """Even after the first checkpoint is deleted, after a save has failed, and in a run that resumes."""
    saver, parameters = checkpoint.Saver(str(tmp_path), 1), model_of_ones()
    for iteration in range(1, 7):
        for _, parameter in parameters:
            parameter.data.fill_(iteration)
        if iteration == 3:
            (tmp_path / 'ckpt' / 'iter_00000003.tmp').write_text('a file where the folder should be')
            saver.save(3, parameters, None, dict(val_loss=None))
            assert saver.problem.startswith('FileExistsError')
            (tmp_path / 'ckpt' / 'iter_00000003.tmp').unlink()
        if iteration == 5:
            saver = checkpoint.Saver(str(tmp_path), 1)
        found = save(saver, iteration, parameters, background=iteration % 2 == 0)
        assert found.keys() == {f'model.{name}' for name in 'abcd'}
        assert all((tensor == iteration).all() for tensor in found.values())
        assert [os.path.basename(path) for path in checkpoint.find(tmp_path)] == [f'iter_{iteration:08d}']


def test_save_plans_again_when_the_optimizer_has_state(tmp_path):
    saver, parameters = checkpoint.Saver(str(tmp_path), 1), model_of_ones()
    optimizer = build_adamw(parameters, 1e-3, 0.1, (0.9, 0.95))
    assert len(save(saver, 1, parameters, optimizer, background=True)) == 4
    for _, parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    for iteration in (2, 3):
        found = save(saver, iteration, parameters, optimizer, background=True)
        assert len(found) == 4 * 4
        assert found['optimizer.a.exp_avg'].equal(optimizer.state[parameters[0][1]]['exp_avg'])


# --- the lock -------------------------------------------------------------------------------------------

HOLDER = """
import sys, time
from kilogpt.training.cluster import lock_folder
lock = lock_folder(sys.argv[1])
print('locked', flush=True)
time.sleep(100)
"""


def test_two_runs_do_not_share_a_folder(tmp_path, capsys):
    lock = lock_folder(str(tmp_path))
    with pytest.raises(ValueError, match='another run is at work in'):
        lock_folder(str(tmp_path), patience=0)
    assert capsys.readouterr().out == f'waiting for the run that is still at work in {tmp_path}\n'
    lock.release()
    lock_folder(str(tmp_path), patience=0).release()


def test_killed_run_releases_its_folder(tmp_path, capsys):
    """The operating system releases the lock. A run that starts before that waits."""
    holder = subprocess.Popen([sys.executable, '-c', HOLDER, str(tmp_path)], cwd=ROOT, text=True,
                              stdout=subprocess.PIPE)
    try:
        assert holder.stdout.readline() == 'locked\n'
        with pytest.raises(ValueError, match='another run is at work in'):
            lock_folder(str(tmp_path), patience=0)
    finally:
        holder.kill()
    lock_folder(str(tmp_path)).release()
    holder.communicate()


@pytest.mark.parametrize('number', ['ENOSYS', 'ENOLCK', 'EOPNOTSUPP'])
def test_storage_without_locks_does_not_stop_a_run(number, tmp_path, monkeypatch):
    fcntl = pytest.importorskip('fcntl')
    import errno

    def flock(*args):
        raise OSError(getattr(errno, number), 'no locks here')
    monkeypatch.setattr(fcntl, 'flock', flock)
    with warnings.catch_warnings(action='ignore'):
        first = lock_folder(str(tmp_path), patience=0)
        second = lock_folder(str(tmp_path), patience=0)
    assert first is not second


def test_folder_that_cannot_be_written_to_is_an_error(tmp_path):
    with pytest.raises(OSError):
        lock_folder(str(tmp_path / 'nowhere'), patience=0)


# --- any operating system -------------------------------------------------------------------------------

WITHOUT_UNIX = """
import sys
sys.modules['fcntl'] = sys.modules['resource'] = None
import kilogpt.convert.__main__
from kilogpt.weights.gguf import files
from kilogpt.training.cluster import lock_folder
lock_folder(sys.argv[1], patience=0)
lock_folder(sys.argv[1], patience=0)
print('imported')
"""


@pytest.mark.slow
def test_modules_of_unix_are_not_needed(tmp_path):
    done = subprocess.run([sys.executable, '-W', 'ignore', '-c', WITHOUT_UNIX, str(tmp_path)], cwd=ROOT,
                          capture_output=True, text=True)
    assert done.stdout == 'imported\n', done.stderr


@pytest.mark.skipif(not os.path.exists('/dev/full'), reason='no such device')
def test_full_disk_is_the_cause_that_is_said():
    """torch.save says 'unexpected pos' of a file that became too short."""
    for fill in (lambda file: torch.save(torch.ones(10 ** 6), file), lambda file: file.write(b'x')):
        with pytest.raises(OSError, match='No space left on device'):
            checkpoint_files.write_with('/dev/full', fill)
