"""A run's checkpoints: save, find, verify, load and prune them.

out_dir/ckpt/iter_00000250/ is a folder of torch.distributed.checkpoint (DCP) that holds only tensors: weights
as `model.<name>`, optimizer moments as `optimizer.<name>.<kind>`. In the same folder, state.json holds
everything else that a run needs to continue, and checksums.json the size and CRC-32 of each file. A
checkpoint is written to iter_00000250.tmp, which is renamed last, so that a checkpoint with its final name is
complete.
"""
import glob
import inspect
import json
import math
import os
import pathlib
import re
import shutil
import socket
import sys
import uuid
import warnings
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime

import torch
import torch.distributed as dist
from filelock import FileLock, SoftFileLock, Timeout

from data.json_tokenizer import tokenizer_folder
from kilogpt.checkpoint_files import (
    ShardWriter, becomes_true, check_finite, checksum, safe_reader, size_of, sync_folder, write_json)
from kilogpt.configurator import announced

warnings.filterwarnings('ignore', 'torch.distributed is disabled')  # DCP warns about a run of one process


def find(out_dir):
    """The paths of a run's complete checkpoints, the newest first."""
    paths = [path for path in glob.glob(os.path.join(glob.escape(out_dir), 'ckpt', 'iter_*'))
             if re.fullmatch(r'iter_\d+', os.path.basename(path))
             and os.path.exists(os.path.join(path, '.metadata'))]
    return sorted(paths, key=iteration_of, reverse=True)


def iteration_of(path):
    """The number of finished updates of a checkpoint, read from its name."""
    return int(path.rsplit('_', 1)[1])


def find_best(out_dir):
    """The checkpoint with the lowest validation loss, the newest if none was evaluated, or None."""
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
    except (OSError, ValueError, KeyError):  # damaged: such a checkpoint is not the best
        return float('inf')
    return float('inf') if loss is None or loss != loss else loss


def read_state(path):
    """The content of a checkpoint's state.json: everything that is not a tensor."""
    with open(os.path.join(path, 'state.json'), encoding='utf-8') as file:
        state = json.load(file)
    if 'folder' in (state.get('tokenizer') or {}):  # the run may have been moved
        state['tokenizer']['folder'] = tokenizer_folder(os.path.dirname(os.path.dirname(path.rstrip('/'))))
    return state


class Saver:
    """Saves the checkpoints of a run, one at a time. All processes make the same calls and write together.

    For a save in the background, training waits only while the tensors are copied to host memory. This memory
    is kept for the next save: 12 bytes a parameter for AdamW, divided by the number of processes. A save that
    becomes due during another one waits for it. A save that fails (a full disk, a deleted folder) leaves the
    older checkpoints alone, prints a warning, and sets `problem` to the reason until a later save succeeds.
    """

    def __init__(self, out_dir, keep, needed=lambda: None):
        """All processes of a process group call this.

        keep: how many checkpoints to keep besides the best. needed(): the path of another one to keep, or
        None.
        """
        self.out_dir = out_dir
        self.folder = os.path.join(out_dir, 'ckpt')
        self.keep, self.needed = keep, needed
        self.problem = None
        self.under_way = False  # whether a save in the background is being written
        self.rank = 0
        group = None
        if dist.is_initialized():
            self.rank = dist.get_rank()
            # The saver's thread communicates while training does, and so needs a group of its own.
            group = dist.new_group(backend='gloo', group_desc='checkpoint')
        self.shards = ShardWriter(group)
        gpu = torch.cuda.current_device() if torch.cuda.is_initialized() else None
        self.thread = ThreadPoolExecutor(1, initializer=_set_up_thread, initargs=(gpu,))
        self.pending = None
        self.host_copies = {}

    def save(self, iteration, parameters, optimizer, state, background=False, more=(), values=None):
        """Save a checkpoint, then delete old ones; returns the path of the new one.

        parameters: [(name, parameter)]; parameters of one name are copies of each other.
        optimizer: an optimizer that was given named parameters, or None to save only the weights.
        more: [(key, tensor)] of other tensors, each a DTensor or the same on all processes that have it.
        state: JSON-serialisable; its `val_loss` (a float or None) decides which checkpoint is the best.
        values: {key in the checkpoint: function that returns the tensor} if parameters and moments are on the
        meta device: a model that is larger than memory is written tensor by tensor.
        """
        self.wait()
        path = os.path.join(self.folder, f'iter_{iteration:08d}')
        parts = self.shards.prepare([*_named_tensors(parameters, optimizer), *_as_own_layout(more)])
        if background:
            # The thread reads copies only: it does not know the stream in which training writes to the GPU.
            copies = self._copy_to_host(parts)
            self.under_way = True
            self.pending = self.thread.submit(self._write_in_background, path, copies, state)
        else:
            self._write(path, values or parts, state)
        return path

    def allocate(self, parameters, optimizer, more=()):
        """Allocate host memory ahead of the first save in the background, in a thread."""
        if self.pending is None:
            named_tensors = [*_named_tensors(parameters, optimizer), *_as_own_layout(more)]
            parts = self.shards.parts_to_write(named_tensors)
            self.pending = self.thread.submit(self._allocate, parts)

    def wait(self):
        """Wait until no save is under way."""
        if self.pending is not None:
            self.pending.result()
            self.pending = None

    def _allocate(self, parts):
        """Allocate host memory for copies of tensors. Only their shapes and dtypes are read."""
        from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
        on_gpu = any(part.is_cuda for part in parts.values())
        # The stager pins exactly the memory that it needs; pin_memory=True would take the next power of two.
        stager = DefaultStager(StagingOptions(use_pinned_memory=on_gpu, use_non_blocking_copy=False,
                                              use_shared_memory=False, use_async_staging=False))
        self.host_copies = {key: stager.stage(torch.empty_like(part, device='cpu'))
                            for key, part in parts.items()}

    def _copy_to_host(self, parts):
        """Copy tensors to host memory, which the first call allocates and later calls use again."""
        if self.host_copies.keys() != parts.keys():
            self._allocate(parts)
        for key, part in parts.items():
            self.host_copies[key].copy_(part, non_blocking=part.is_cuda)
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        return self.host_copies

    def _write_in_background(self, path, parts, state):
        """`_write` in the saver's thread."""
        interval = sys.getswitchinterval()
        sys.setswitchinterval(1e-4)  # seconds for which training waits at most while this thread runs Python
        try:
            self._write(path, parts, state)
        finally:
            sys.setswitchinterval(interval)
            self.under_way = False

    def _write(self, path, parts, state):
        """Write a checkpoint and prune old ones, or report the problem. All processes call this.

        parts: {key: this process's part of the tensor}.
        """
        unfinished = path + '.tmp'
        self.problem = self.shards.write(unfinished, parts, self._delete_leftovers,
                                         lambda checksums: self._commit(unfinished, path, state, checksums))
        if self.problem and self.rank == 0:
            shutil.rmtree(unfinished, ignore_errors=True)
            last = next(iter(find(self.out_dir)), 'none')
            print(f'warning: {path} could not be saved ({self.problem}); the last good checkpoint is {last}. '
                  'Make room or repair the folder before the next save', file=sys.stderr, flush=True)

    def _delete_leftovers(self):
        """Delete unfinished folders of a killed run. The next save tries again if that fails."""
        for leftover in glob.glob(os.path.join(glob.escape(self.folder), '*.tmp')):
            shutil.rmtree(leftover, ignore_errors=True)

    def _commit(self, unfinished, path, state, checksums):
        """Complete a checkpoint whose tensors are written, and prune. The first process calls this.

        checksums: {file name: checksum} of the files with tensors.
        """
        write_json(os.path.join(unfinished, 'state.json'), state)
        checksums['state.json'] = checksum(os.path.join(unfinished, 'state.json'))
        write_json(os.path.join(unfinished, 'checksums.json'), checksums)
        sync_folder(unfinished)
        shutil.rmtree(path, ignore_errors=True)  # an older checkpoint of this name, which must be damaged
        os.rename(unfinished, path)
        sync_folder(self.folder)
        self._prune()

    def _prune(self):
        """Delete all checkpoints but the newest `keep`, the best and the needed one."""
        for path in set(find(self.out_dir)[self.keep:]) - {find_best(self.out_dir), self.needed()}:
            _delete(path)


def delete_after(out_dir, iteration, processes):
    """Delete a run's checkpoints of later iterations. All processes call this."""
    if processes.is_main:
        for path in find(out_dir):
            if iteration_of(path) > iteration:
                _delete(path)
    processes.barrier()


def _delete(path):
    os.rename(path, path + '.tmp')  # first, so that a checkpoint with its final name is always complete
    shutil.rmtree(path + '.tmp', ignore_errors=True)  # the next save tries again if that fails


def _set_up_thread(gpu):
    """Set up the saver's thread. gpu: the index of this process's CUDA device, or None."""
    # One OpenMP thread: with a second pool, even an idle one, libgomp wakes the threads of the first pool so
    # late that they compute at half the speed.
    torch.set_num_threads(1)
    if gpu is not None:  # a thread that has not chosen a device opens a context on GPU 0
        torch.cuda.set_device(gpu)


# --- finding and loading ------------------------------------------------------------------------------------

def damage(path, rank=0, world_size=1):
    """Verify the files of a checkpoint; returns the problem in words, or None.

    With several processes, each verifies its share of the files.
    """
    try:
        with open(os.path.join(path, 'checksums.json'), encoding='utf-8') as file:
            expected = sorted(json.load(file).items())
    except (OSError, ValueError):
        return 'checksums.json cannot be read'
    mine = expected[rank::world_size]
    with announced(f'verifying {path} ({sum(size for _, (size, _) in mine) / 1e9:.1f} GB)'):
        for name, written in mine:
            try:
                found = checksum(os.path.join(path, name))
            except OSError as error:
                return f'{name} cannot be read: {error.strerror}'
            if found != written:
                return f'{name} is not as it was written'
    return None


def damage_on_any(path, processes):
    """Verify a checkpoint that the main process chose; returns a problem that any process found, or None.

    All processes return the same. ValueError on all if one of them does not see the checkpoint.
    """
    _require_visible(os.path.join(path, '.metadata'))
    found = processes.first_problem(damage(path, processes.rank, processes.world_size))
    return found[1] if found else None


def find_undamaged(out_dir, processes, newest=math.inf):
    """(path, state) of a run's newest checkpoint that is not damaged; (None, {}) without one.

    newest: the last iteration whose checkpoint counts.
    The main process lists the checkpoints for all, since a listing may be out of date on other nodes.
    """
    for path in processes.share(find(out_dir) if processes.is_main else None):
        if iteration_of(path) > newest:
            continue
        problem = damage_on_any(path, processes)
        if not problem:
            return path, processes.share(read_state(path) if processes.is_main else None)
        processes.say(f'{path} is damaged ({problem}): going back to the one before it')
    return None, {}


def check_shared(out_dir, processes):
    """Raise ValueError on all processes unless all see in out_dir what the main process writes there."""
    name = f'.shared-{uuid.uuid4().hex}'
    if processes.is_main:
        os.makedirs(out_dir, exist_ok=True)
        pathlib.Path(out_dir, name).touch()
    # No process may look for the file before it exists: NFS would remember its absence for a while.
    path = os.path.join(out_dir, processes.share(name))
    try:
        _require_visible(path)
    finally:
        if processes.is_main:
            os.remove(path)


def _require_visible(path):
    """Wait until all processes see a file that the main process sees; ValueError on all if one does not."""
    found = _all_gather((socket.gethostname(), becomes_true(lambda: size_of(path) is not None)))
    hosts = sorted({host for host, is_visible in found if not is_visible})
    if hosts:
        names = ', '.join(hosts[:3]) + (f' and {len(hosts) - 3} more' if len(hosts) > 3 else '')
        raise ValueError(f'{os.path.abspath(path)} of host {found[0][0]} is not visible on {names}: '
                         'this folder must be on storage that all nodes share')


def _all_gather(value):
    """The picklable values of all processes, in order of rank."""
    if not dist.is_initialized():
        return [value]
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def load(path, parameters, optimizer=None):
    """Fill parameters and the optimizer's state from a checkpoint.

    parameters: [(name, parameter)], sharded or not; parameters of one name are copies of each other.
    ValueError if the checkpoint is of another model, or has NaN or infinity in it.
    """
    stored = stored_tensors(path)
    for name, parameter in parameters:
        found = stored.get(f'model.{name}')
        if found is None or found.size != parameter.shape:
            content = tuple(found.size) if found else 'nothing'
            raise ValueError(f'{path} holds {content} where the model has {name} {tuple(parameter.shape)}')
    if optimizer is not None:
        _allocate_state(optimizer, stored)
    named_tensors = [(key, tensor) for key, (tensor, _) in _named_tensors(parameters, optimizer)]
    with announced(f'loading {path}'):
        load_tensors(path, named_tensors)
    check_finite(path, named_tensors, 'delete this checkpoint to use another one')


def load_tensors(path, named_tensors):
    """Fill tensors from a checkpoint, which must hold them. Tensors of one key are copies of each other."""
    import torch.distributed.checkpoint as dcp
    tensors, copies = {}, []
    for key, tensor in named_tensors:
        if key in tensors:
            copies.append((tensor, tensors[key]))
        else:
            tensors[key] = tensor
    dcp.load(tensors, storage_reader=safe_reader(path))
    for tensor, original in copies:
        tensor.copy_(original)


def _allocate_state(optimizer, stored):
    """Give an optimizer the state tensors that a checkpoint holds of it, for `load` to fill."""
    for name, parameter in _named_parameters(optimizer):
        # A fused optimizer wants the step counter on the parameter's device, other optimizers on the CPU.
        step_device = parameter.device if optimizer.defaults.get('fused') else 'cpu'
        for key, found in stored.items():
            kind = key.removeprefix(f'optimizer.{name}.')
            if kind == key:  # a tensor of another parameter
                continue
            if found.size == parameter.shape:  # a moment, which is sharded like its parameter
                tensor = torch.zeros_like(parameter.detach(), dtype=found.properties.dtype)
            else:
                device = parameter.device if found.size else step_device
                tensor = torch.zeros(found.size, dtype=found.properties.dtype, device=device)
            optimizer.state[parameter][kind] = tensor


def stored_tensors(path):
    """{key: DCP's metadata (`size`, `properties.dtype`)} of a checkpoint's tensors."""
    return safe_reader(path).read_metadata().state_dict_metadata


def lock_folder(out_dir, patience=30):
    """Lock out_dir against other runs: two runs in one folder would delete each other's checkpoints.

    Returns the lock, which holds while it is referenced. The operating system releases it when the process
    ends, for whatever reason. A run that is about to end (an elastic run on a node that was left out) is
    waited for, up to `patience` seconds. ValueError if the folder is still locked after that.
    """
    path = pathlib.Path(out_dir, '.lock')
    path.touch()  # OSError if out_dir is not writable; any later OSError is about locks
    # A soft lock, the fallback of newer versions of filelock, would outlast a killed run.
    has_option = 'fallback_to_soft' in inspect.signature(FileLock.__init__).parameters
    lock = FileLock(path, fallback_to_soft=False) if has_option else FileLock(path)
    for is_last_attempt in (False, True):
        try:
            lock.acquire(timeout=patience if is_last_attempt else 0)
            return lock
        except Timeout:
            if isinstance(lock, SoftFileLock):  # not the system's: a killed run leaves its file
                return lock
            if not is_last_attempt:
                print(f'waiting for the run that is still at work in {out_dir}', flush=True)
        except (OSError, NotImplementedError):  # storage without locks, which must not stop a run
            return lock
    raise ValueError(f'another run is at work in {out_dir}: set another --out_dir, or end the other run')


def set_aside(out_dir):
    """Move what an earlier run left in out_dir into a new folder in out_dir; returns that folder, or None."""
    if not find(out_dir) and not os.path.exists(os.path.join(out_dir, 'metrics.jsonl')):
        return None
    # Two short runs can begin within the same second, so the name has microseconds.
    folder = os.path.join(out_dir, f'{datetime.now():earlier-%Y%m%d-%H%M%S-%f}')
    os.makedirs(folder)
    for name in ('ckpt', 'metrics.jsonl', 'config.json', 'tensorboard'):
        if os.path.exists(os.path.join(out_dir, name)):
            os.rename(os.path.join(out_dir, name), os.path.join(folder, name))
    if os.path.exists(tokenizer_folder(out_dir)):  # the new run may have the same tokenizer
        shutil.copytree(tokenizer_folder(out_dir), tokenizer_folder(folder))
    return folder


def _named_parameters(optimizer):
    """[(name, parameter)] of an optimizer that was given its parameters with their names."""
    named = []
    for group in optimizer.param_groups:
        named += zip(group['param_names'], group['params'])
    return named


def _as_own_layout(named_tensors):
    """[(key, (tensor, tensor))] of tensors that do not belong to a parameter, as ShardWriter takes them."""
    return [(key, (tensor, tensor)) for key, tensor in named_tensors]


def _named_tensors(parameters, optimizer):
    """[(key in a checkpoint, (tensor, the parameter it belongs to))]; tensors of one key are copies."""
    named = [(f'model.{name}', (parameter.detach(), parameter)) for name, parameter in parameters]
    if optimizer is not None:
        for name, parameter in _named_parameters(optimizer):
            for kind, tensor in optimizer.state.get(parameter, {}).items():
                if torch.is_tensor(tensor):  # SGD without momentum has None here
                    named.append((f'optimizer.{name}.{kind}', (tensor, parameter)))
    return named
