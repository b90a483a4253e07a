"""A run's checkpoints: save, find, verify, load and prune them.

out_dir/ckpt/iter_00000250/ is a folder of torch.distributed.checkpoint (DCP) that holds tensors alone:
weights as `model.<name>`, optimizer moments as `optimizer.<name>.<kind>`. Beside them, state.json holds
everything else that a run needs to continue, and checksums.json the size and CRC-32 of each file. A
checkpoint is written to iter_00000250.tmp, which is renamed last: a checkpoint that has its final name is
complete.
"""
import glob
import json
import os
import pathlib
import pickle
import re
import shutil
import sys
import time
import warnings
import zlib
from concurrent.futures import ThreadPoolExecutor

import torch
import torch.distributed as dist
from filelock import FileLock, SoftFileLock, Timeout

from kilogpt.optim import local_part

warnings.filterwarnings('ignore', 'torch.distributed is disabled')  # DCP warns of a run of one process


def find(out_dir):
    """Paths of the complete checkpoints of a run, the newest first."""
    paths = [path for path in glob.glob(os.path.join(glob.escape(out_dir), 'ckpt', 'iter_*'))
             if re.fullmatch(r'iter_\d+', os.path.basename(path))
             and os.path.exists(os.path.join(path, '.metadata'))]
    return sorted(paths, key=lambda path: int(path.rsplit('_', 1)[1]), reverse=True)


def find_best(out_dir):
    """The complete checkpoint of least validation loss, or the newest if none was evaluated, or None."""
    return min(find(out_dir), key=_val_loss, default=None)


def choose(source, which='best'):
    """The checkpoint that a user means, or None if it does not exist.

    source: a checkpoint (out_dir/ckpt/iter_*) or a run's folder. which: the 'best' or 'latest' of a run.
    """
    if os.path.exists(os.path.join(source, '.metadata')):
        return source
    return find_best(source) if which == 'best' else next(iter(find(source)), None)


def _val_loss(path):
    try:
        loss = read_state(path)['val_loss']
    except (OSError, ValueError, KeyError):  # a damaged checkpoint is not the best, and not an error here
        return float('inf')
    return float('inf') if loss is None or loss != loss else loss


def read_state(path):
    """state.json of a checkpoint: everything that is not a tensor."""
    with open(os.path.join(path, 'state.json'), encoding='utf-8') as file:
        return json.load(file)


class Saver:
    """Saves the checkpoints of a run, one at a time. All processes make the same calls and write together.

    A save in the background costs training a copy of the tensors to host memory, which is kept for the next
    save: 12 bytes a parameter for AdamW, divided by the number of processes. A save that comes due during
    another one waits for it. A save that fails (a full disk, a folder that is gone) leaves the older
    checkpoints, prints a warning, and sets `problem` to the reason until a later save succeeds.
    """

    def __init__(self, out_dir, keep):
        """keep: complete checkpoints besides the best. In a process group: called by every process."""
        self.out_dir = out_dir
        self.folder = os.path.join(out_dir, 'ckpt')
        self.keep = keep
        self.problem = None
        self.rank = 0
        self.world_size = 1
        self.group = None
        if dist.is_initialized():
            self.rank = dist.get_rank()
            self.world_size = dist.get_world_size()
            # The saver's thread communicates at the same time as training does, hence in a group of its own.
            self.group = dist.new_group(backend='gloo', group_desc='checkpoint')
        # One OpenMP thread: beside a second pool, even an idle one, libgomp wakes the threads of the first
        # pool so late that they compute at half the speed.
        self.thread = ThreadPoolExecutor(1, initializer=torch.set_num_threads, initargs=(1,))
        self.pending = None
        self.host_copies = {}

    def save(self, iteration, parameters, optimizer, state, background=False):
        """Save a checkpoint, then delete all but the newest and the best; returns its path.

        parameters: [(name, parameter)]; parameters of one name are copies of each other.
        optimizer: was given its parameters with their names. None saves the weights alone.
        state: JSON-serialisable; its `val_loss` (a float or None) decides which checkpoint is the best.
        """
        self.wait()
        path = os.path.join(self.folder, f'iter_{iteration:08d}')
        tensors = self._tensors_to_write(parameters, optimizer)
        if background:
            tensors = self._stage_to_host(tensors)
        self.pending = self.thread.submit(self._write, path, tensors, state)
        if not background:
            self.wait()
        return path

    def allocate(self, parameters, optimizer):
        """Allocate the host memory for saves in the background, so that the first of them does not wait."""
        if not self.host_copies and self.pending is None:
            tensors = self._tensors_to_write(parameters, optimizer)
            self.pending = self.thread.submit(self._stage_to_host, tensors)

    def wait(self):
        """Wait until no save is under way."""
        if self.pending is not None:
            self.pending.result()
            self.pending = None

    def _tensors_to_write(self, parameters, optimizer):
        """{key: tensor} that this process hands to DCP.

        A tensor that every process holds whole is written by one of them, in turn. Sharded tensors are handed
        over by all processes: DCP writes each shard once.
        """
        tensors = _named_tensors(parameters, optimizer)
        whole = [key for key, tensor in tensors if tensor.dim() and not hasattr(tensor, 'placements')]
        left_to_others = {key for i, key in enumerate(whole) if i % self.world_size != self.rank}
        return {key: tensor for key, tensor in tensors if key not in left_to_others}

    def _stage_to_host(self, tensors):
        """Copy tensors to host memory, which the first call allocates and later calls overwrite."""
        if self.host_copies.keys() != tensors.keys():
            from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
            on_gpu = any(local_part(tensor).is_cuda for tensor in tensors.values())
            options = StagingOptions(use_pinned_memory=on_gpu, use_non_blocking_copy=on_gpu,
                                     use_shared_memory=False, use_async_staging=False)
            self.host_copies = DefaultStager(options).stage(tensors)
            return self.host_copies
        for key, tensor in tensors.items():  # on a CPU three times as fast as the stager
            local_part(self.host_copies[key]).copy_(local_part(tensor), non_blocking=True)
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        return self.host_copies

    def _write(self, path, tensors, state):
        """Write a checkpoint and prune old ones, or report the problem: in the thread of every process."""
        unfinished = path + '.tmp'
        outcomes = self._gather(self._write_shards(unfinished, tensors))
        problem = next((problem for _, problem in outcomes if problem), None)
        if self.rank == 0 and not problem:
            try:
                self._commit(unfinished, path, state, [checksums for checksums, _ in outcomes])
                self._prune()
            except OSError as error:
                problem = str(error)
        # The first process alone commits, and all processes decide by `problem` whether to save again.
        self.problem = self._gather(problem)[0]
        if self.rank == 0 and problem:
            shutil.rmtree(unfinished, ignore_errors=True)
            last = next(iter(find(self.out_dir)), 'none')
            print(f'warning: {path} could not be saved ({problem}); the last good checkpoint is {last}. '
                  'Make room or mend the folder before the next save', file=sys.stderr, flush=True)

    def _gather(self, value):
        """The values that the processes pass, in order of rank."""
        if not self.group:
            return [value]
        values = [None] * self.world_size
        dist.all_gather_object(values, value, group=self.group)
        return values

    def _write_shards(self, folder, tensors):
        """Write this process's tensors; returns ({file name: checksum}, the problem in words or None)."""
        import torch.distributed.checkpoint as dcp  # takes half a second, which the start need not wait for
        try:
            if self.rank == 0:
                # A killed run may leave folders. The next save tries again to delete them.
                for leftover in glob.glob(os.path.join(glob.escape(self.folder), '*.tmp')):
                    shutil.rmtree(leftover, ignore_errors=True)
            if self.group:
                dist.barrier(self.group)
            dcp.save(tensors, storage_writer=dcp.FileSystemWriter(folder), process_group=self.group)
            return _checksums(folder, f'__{self.rank}_*'), None
        except (Exception, dcp.api.CheckpointException) as error:  # a failed save does not end a run
            return {}, _first_cause(error)

    def _commit(self, unfinished, path, state, shard_checksums):
        """Complete a checkpoint whose shards are written, and give the checkpoint its final name."""
        write_json(os.path.join(unfinished, 'state.json'), state)
        checksums = {}
        for of_one_process in shard_checksums:
            checksums |= of_one_process
        checksums |= _checksums(unfinished, '.metadata') | _checksums(unfinished, 'state.json')
        write_json(os.path.join(unfinished, 'checksums.json'), checksums)
        _sync_folder(unfinished)
        shutil.rmtree(path, ignore_errors=True)  # a damaged checkpoint that this run did not resume from
        os.rename(unfinished, path)
        _sync_folder(self.folder)

    def _prune(self):
        """Delete all checkpoints but the newest `keep` and the best."""
        for path in set(find(self.out_dir)[self.keep:]) - {find_best(self.out_dir)}:
            os.rename(path, path + '.tmp')  # first, since a checkpoint that has its final name is complete
            shutil.rmtree(path + '.tmp', ignore_errors=True)  # the next save tries again


def _first_cause(error):
    """One line that says why a save failed. DCP wraps the error, with the traceback of each process."""
    while getattr(error, 'failures', None):
        error = next(iter(error.failures.values()))[0]
    first_line = (str(error).strip().splitlines() or [''])[0]
    return f'{type(error).__name__}: {first_line}'


def damage(path, rank=0, world_size=1):
    """What is wrong with a checkpoint, in words, or None. Each of several processes verifies a part."""
    try:
        with open(os.path.join(path, 'checksums.json'), encoding='utf-8') as file:
            expected = sorted(json.load(file).items())
    except (OSError, ValueError):
        return 'checksums.json cannot be read'
    for name, checksum in expected[rank::world_size]:
        found = _checksums(path, name).get(name)
        if found is None:
            return f'{name} is missing'
        if found != checksum:
            return f'{name} is not as it was written'
    return None


def find_undamaged(out_dir, processes):
    """(path, state) of a run's newest checkpoint that no process finds damaged; (None, {}) without one."""
    for path in find(out_dir):
        problem = damage(path, processes.rank, processes.world_size)
        if problem:
            print(f'{path} is damaged ({problem}): going back to the one before it', flush=True)
        if not processes.any(problem):
            return path, read_state(path)
    return None, {}


def load(path, parameters, optimizer=None):
    """Fill parameters and the optimizer's state from a checkpoint. ValueError if the model is another.

    parameters: [(name, parameter)], sharded or not; parameters of one name are copies of each other.
    """
    import torch.distributed.checkpoint as dcp
    stored = stored_tensors(path)
    for name, parameter in parameters:
        found = stored.get(f'model.{name}')
        if found is None or found.size != parameter.shape:
            raise ValueError(f'{path} holds {tuple(found.size) if found else "nothing"} where the model has '
                             f'{name} {tuple(parameter.shape)}')
    if optimizer is not None:
        _allocate_state(optimizer, stored)
    tensors = {}
    copies = []
    for key, tensor in _named_tensors(parameters, optimizer):
        if key in tensors:
            copies.append((tensor, tensors[key]))
        else:
            tensors[key] = tensor
    dcp.load(tensors, storage_reader=_reader(path))
    for tensor, original in copies:
        tensor.copy_(original)


def _allocate_state(optimizer, stored):
    """Give an optimizer tensors like those that a checkpoint holds of its state, for `load` to fill."""
    for name, parameter in _named_parameters(optimizer):
        # A fused optimizer wants the step counter on the parameter's device, other optimizers on the CPU.
        step_device = parameter.device if optimizer.defaults.get('fused') else 'cpu'
        for key, found in stored.items():
            kind = key.removeprefix(f'optimizer.{name}.')
            if kind == key:  # a tensor of another parameter
                continue
            if found.size == parameter.shape:  # a moment: sharded as its parameter is
                tensor = torch.zeros_like(parameter.detach(), dtype=found.properties.dtype)
            else:
                tensor = torch.zeros(found.size, dtype=found.properties.dtype, device=step_device)
            optimizer.state[parameter][kind] = tensor


def stored_tensors(path):
    """{key: DCP's metadata (`size`, `properties.dtype`)} of a checkpoint's tensors, in the files' order."""
    return _reader(path).read_metadata().state_dict_metadata


def _reader(path):
    """DCP's reader of a checkpoint, safe to use on a file from others.

    .metadata is a pickle. The pickle may name only the classes that DCP writes there, so it cannot run code.
    """
    from torch.distributed.checkpoint import FileSystemReader, filesystem, metadata

    class Unpickler(pickle.Unpickler):
        allowed = {(kind.__module__, kind.__qualname__): kind for kind in (
            metadata.Metadata, metadata.MetadataIndex, metadata.TensorStorageMetadata,
            metadata.ChunkStorageMetadata, metadata.TensorProperties, metadata.StorageMeta,
            metadata._MEM_FORMAT_ENCODING, filesystem._StorageInfo,
            torch.Size, torch.serialization._get_layout)}
        # Windows cannot make a PosixPath, nor other systems a WindowsPath.
        allowed |= {('pathlib', name): pathlib.PurePath for name in ('PosixPath', 'WindowsPath')}

        def find_class(self, module, name):
            module = module.removesuffix('._local')  # pathlib's, from Python 3.13 on
            if (module, name) in self.allowed:
                return self.allowed[module, name]
            if module == 'torch' and isinstance(getattr(torch, name, None), torch.dtype):
                return getattr(torch, name)
            raise ValueError(f'{path}/.metadata names {module}.{name}, which no checkpoint of ours does: '
                             'it was not loaded')

    class Reader(FileSystemReader):
        def read_metadata(self, *args, **kwargs):
            with open(os.path.join(path, '.metadata'), 'rb') as file:
                found = Unpickler(file).load()
            found.storage_meta.load_id = self.load_id
            return found

    return Reader(path)


def lock_folder(out_dir, patience=30):
    """Lock out_dir against other runs: two runs in one folder would delete each other's checkpoints.

    Returns the lock, which holds while it is referenced; the operating system releases it when the process
    ends, however it ends. Waits up to `patience` seconds for a run that is about to end (an elastic run on a
    node that was left out). ValueError if the folder is still locked then.
    """
    path = pathlib.Path(out_dir, '.lock')
    path.touch()  # OSError if out_dir is not writable; an OSError from here on is about locks
    lock = FileLock(path)
    for is_last_attempt in (False, True):
        try:
            lock.acquire(timeout=patience if is_last_attempt else 0)
            return lock
        except Timeout:
            if isinstance(lock, SoftFileLock):  # without the system's support; would outlast a killed run
                return lock
            if not is_last_attempt:
                print(f'waiting for the run that is still at work in {out_dir}', flush=True)
        except (OSError, NotImplementedError):  # the storage has no locks, which must not stop a run
            return lock
    raise ValueError(f'another run is at work in {out_dir}: set another --out_dir, or end that one')


def set_aside(out_dir):
    """Move what an earlier run left in out_dir into a new folder in out_dir; returns that folder, or None."""
    if not find(out_dir) and not os.path.exists(os.path.join(out_dir, 'metrics.jsonl')):
        return None
    folder = os.path.join(out_dir, time.strftime('earlier-%Y%m%d-%H%M%S'))
    os.makedirs(folder)
    for name in ('ckpt', 'metrics.jsonl', 'config.json'):
        if os.path.exists(os.path.join(out_dir, name)):
            os.rename(os.path.join(out_dir, name), os.path.join(folder, name))
    return folder


def write_json(path, content):
    """Write a JSON file, and wait until the file is on disk."""
    with open(path, 'w', encoding='utf-8') as file:
        json.dump(content, file, indent=1)
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(folder):
    """Wait until a folder's list of files is on disk; the files are already."""
    try:
        handle = os.open(folder, os.O_RDONLY)
    except PermissionError:  # Windows does not open folders
        return
    os.fsync(handle)
    os.close(handle)


def _checksums(folder, pattern):
    """{file name: [bytes, CRC-32]} of the files of a folder that match a pattern."""
    checksums = {}
    for path in glob.glob(os.path.join(glob.escape(folder), pattern)):
        size = 0
        crc = 0
        with open(path, 'rb') as file:
            while chunk := file.read(2 ** 24):
                size += len(chunk)
                crc = zlib.crc32(chunk, crc)
        checksums[os.path.basename(path)] = [size, crc]
    return checksums


def _named_parameters(optimizer):
    """[(name, parameter)] of an optimizer that was given its parameters with their names."""
    named = []
    for group in optimizer.param_groups:
        named += zip(group['param_names'], group['params'])
    return named


def _named_tensors(parameters, optimizer):
    """[(key in a checkpoint, tensor)]; tensors of one key are copies of each other."""
    named = [(f'model.{name}', parameter.detach()) for name, parameter in parameters]
    if optimizer is not None:
        for name, parameter in _named_parameters(optimizer):
            for kind, tensor in optimizer.state.get(parameter, {}).items():
                named.append((f'optimizer.{name}.{kind}', tensor))
    return named
