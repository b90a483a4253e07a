"""A run's checkpoints: save, find, verify, load and prune them.

out_dir/ckpt/iter_00000250/ is a folder of torch.distributed.checkpoint (DCP) that holds only tensors: weights
as `model.<name>`, optimizer moments as `optimizer.<name>.<kind>`. In the same folder, state.json holds
everything else that a run needs to continue, and checksums.json the size and CRC-32 of each file. A
checkpoint is written to iter_00000250.tmp, which is renamed last, so that a checkpoint with its final name is
complete. If out_dir is a URL, where nothing can be renamed, .metadata is written last, and makes it complete.
"""
import contextlib
import glob
import json
import math
import os
import re
import shutil
import socket
import sys
import uuid
import warnings
import zlib
from concurrent.futures import ThreadPoolExecutor

import torch
import torch.distributed as dist

from data import storage
from data.tokens import tokenizer_folder
from kilogpt.configurator import announced
from kilogpt.run.checkpoint_files import (
    ShardWriter, becomes_true, check_finite, checksum, safe_reader, size_of, sync_folder, write_file, write_json)

warnings.filterwarnings('ignore', 'torch.distributed is disabled')  # DCP warns about a run of one process


def find(out_dir):
    """The paths of a run's complete checkpoints, the newest first."""
    folder = os.path.join(out_dir, 'ckpt')
    if storage.is_url(out_dir):
        names = [name.partition('/')[0] for name in storage.files_below(folder) if name.endswith('/.metadata')]
    else:
        names = [name for name in storage.names_in(folder)
                 if os.path.exists(os.path.join(folder, name, '.metadata'))]
    paths = [os.path.join(folder, name) for name in names if re.fullmatch(r'iter_\d+', name)]
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
    if storage.exists(os.path.join(source, '.metadata')):
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
    state = json.loads(storage.read(os.path.join(path, 'state.json')))
    if 'folder' in (state.get('tokenizer') or {}):  # the run may have been moved
        out_dir = os.path.dirname(os.path.dirname(path.rstrip('/')))
        state['tokenizer']['folder'] = storage.local_copy(tokenizer_folder(out_dir))
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
        self.remote = None
        if storage.is_url(out_dir):
            from kilogpt.run.remote import RemoteRun
            self.remote = RemoteRun(out_dir)
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
        parts = self.shards.prepare([*named_tensors(parameters, optimizer), *_as_own_layout(more)])
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
            tensors = [*named_tensors(parameters, optimizer), *_as_own_layout(more)]
            parts = self.shards.parts_to_write(tensors)
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
        unfinished = path if self.remote else path + '.tmp'
        self.problem = self.shards.write(
            unfinished, parts, lambda: self._begin(path),
            lambda metadata, checksums: self._commit(unfinished, path, state, metadata, checksums))
        if self.problem and self.rank == 0:
            shutil.rmtree(unfinished, ignore_errors=True)
            last = next(iter(find(self.out_dir)), 'none')
            print(f'warning: {path} could not be saved ({self.problem}); the last good checkpoint is {last}. '
                  'Make room or repair the folder before the next save', file=sys.stderr, flush=True)

    def _begin(self, path):
        """Delete unfinished checkpoints of a killed run. The next save tries again if that fails."""
        if self.remote:
            self.remote.begin(path)
        for leftover in glob.glob(os.path.join(glob.escape(self.folder), '*.tmp')):
            shutil.rmtree(leftover, ignore_errors=True)

    def _commit(self, unfinished, path, state, metadata, checksums):
        """Complete a checkpoint whose tensors are written, and prune. The first process calls this.

        metadata: the content of .metadata. checksums: {file name: checksum} of the files with tensors.
        """
        checksums['.metadata'] = [len(metadata), zlib.crc32(metadata)]
        checksums['state.json'] = write_json(os.path.join(unfinished, 'state.json'), state)
        write_json(os.path.join(unfinished, 'checksums.json'), checksums)
        if self.remote:
            self.remote.before_commit()
        write_file(os.path.join(unfinished, '.metadata'), metadata)
        if not self.remote:
            sync_folder(unfinished)
            shutil.rmtree(path, ignore_errors=True)  # an older checkpoint of this name, which must be damaged
            os.rename(unfinished, path)
            sync_folder(self.folder)
        self._prune()

    def _prune(self):
        """Delete all checkpoints but the newest `keep`, the best and the needed one."""
        with contextlib.suppress(storage.StorageError):  # the next save tries again
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
    if storage.is_url(path):
        from kilogpt.run.remote import delete_remote
        delete_remote(path)
        return
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
        expected = sorted(json.loads(storage.read(os.path.join(path, 'checksums.json'))).items())
    except (OSError, ValueError):
        return 'checksums.json cannot be read'
    mine = expected[rank::world_size]
    with announced(f'verifying {path} ({sum(size for _, (size, _) in mine) / 1e9:.1f} GB)'):
        for name, written in mine:
            try:
                found = checksum(os.path.join(path, name))
            except OSError as error:
                return f'{name} cannot be read: {error.strerror or error}'
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
        write_file(os.path.join(out_dir, name), b'')
    # No process may look for the file before it exists: NFS would remember its absence for a while.
    path = os.path.join(out_dir, processes.share(name))
    try:
        _require_visible(path)
    finally:
        if processes.is_main:
            storage.delete([path])


def _require_visible(path):
    """Wait until all processes see a file that the main process sees; ValueError on all if one does not."""
    found = _all_gather((socket.gethostname(), becomes_true(lambda: size_of(path) is not None)))
    hosts = sorted({host for host, is_visible in found if not is_visible})
    if hosts:
        names = ', '.join(hosts[:3]) + (f' and {len(hosts) - 3} more' if len(hosts) > 3 else '')
        place = path if storage.is_url(path) else os.path.abspath(path)
        raise ValueError(f'{place} of host {found[0][0]} is not visible on {names}: '
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
        allocate_state(optimizer, stored)
    tensors = [(key, tensor) for key, (tensor, _) in named_tensors(parameters, optimizer)]
    with announced(f'loading {path}'):
        load_tensors(path, tensors)
    check_finite(path, tensors, 'delete this checkpoint to use another one')


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


def allocate_state(optimizer, stored):
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


def _named_parameters(optimizer):
    """[(name, parameter)] of an optimizer that was given its parameters with their names."""
    named = []
    for group in optimizer.param_groups:
        named += zip(group['param_names'], group['params'])
    return named


def _as_own_layout(named_tensors):
    """[(key, (tensor, tensor))] of tensors that do not belong to a parameter, as ShardWriter takes them."""
    return [(key, (tensor, tensor)) for key, tensor in named_tensors]


def named_tensors(parameters, optimizer):
    """[(key in a checkpoint, (tensor, the parameter it belongs to))]; tensors of one key are copies."""
    named = [(f'model.{name}', (parameter.detach(), parameter)) for name, parameter in parameters]
    if optimizer is not None:
        for name, parameter in _named_parameters(optimizer):
            for kind, tensor in optimizer.state.get(parameter, {}).items():
                if torch.is_tensor(tensor):  # SGD without momentum has None here
                    named.append((f'optimizer.{name}.{kind}', (tensor, parameter)))
    return named
