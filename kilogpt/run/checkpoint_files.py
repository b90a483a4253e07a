"""The tensors of a checkpoint, in the format of torch.distributed.checkpoint (DCP), on disk or at a URL.

Each process writes one file, __<rank>_0.distcp. The first process writes .metadata, which says where each
part of each tensor is. This file decides which process writes what, lets the processes write together, and
reads .metadata without running code.
"""
import contextlib
import gc
import io
import json
import os
import pathlib
import pickle
import socket
import time
import zlib
from functools import partial

import torch
import torch.distributed as dist

from data import storage
from kilogpt.optim import local_part

PATIENCE = 60  # seconds until NFS must show what another node has written


class ShardWriter:
    """Writes the tensors of checkpoints. All processes make the same calls and write together.

    At the first save, the processes agree on a plan of who writes what. Planning runs Python code for each
    part of each tensor on the first process, so later saves follow the same plan and write the same metadata.
    """

    def __init__(self, group):
        """group: a gloo group of all processes, or None for one process."""
        self.group = group
        self.rank = dist.get_rank(group) if group else 0
        self.world_size = dist.get_world_size(group) if group else 1
        self.layout = None  # {key: (shape, dtype, placements)} of the tensors in the plan
        self.local_plan = None  # DCP's plan of what this process could write
        self.items = None  # DCP's list of what this process writes, once all processes have a plan
        self.results = None  # where in the file of this process the items are
        self.metadata = None  # on the first process: the bytes of .metadata, or DCP's object of a new plan

    # --- who writes what ------------------------------------------------------------------------------------

    def parts_to_write(self, named_tensors):
        """{key: this process's part of the tensor} of the tensors that this process writes."""
        return {key: local_part(tensor) for key, tensor in self._choose(named_tensors).items()}

    def prepare(self, named_tensors):
        """Plan what this process writes, unless the last plan still holds; returns `parts_to_write`."""
        tensors = self._choose(named_tensors)
        layout = {key: (tensor.shape, tensor.dtype, getattr(tensor, 'placements', None))
                  for key, tensor in tensors.items()}
        if layout != self.layout:
            from torch.distributed.checkpoint import DefaultSavePlanner  # takes half a second to import
            planner = DefaultSavePlanner()
            planner.set_up_planner(tensors, is_coordinator=self.rank == 0)
            self.layout, self.local_plan, self.items = layout, planner.create_local_plan(), None
        return {key: local_part(tensor) for key, tensor in tensors.items()}

    def _choose(self, named_tensors):
        """{key: tensor} of the tensors of which this process writes its part.

        named_tensors: [(key, (tensor, the parameter it belongs to))].
        Of the processes that hold the same part of a tensor, the one that has the least to write so far is
        chosen. All processes reach the same result without communication, since they hold the same tensors in
        the same order. Tied parameters on two pipeline stages are chosen on both; DCP's plan drops one of
        them.
        """
        chosen = {}
        assigned = {}  # {number of replicas: how many elements each of them writes}
        for key, (tensor, parameter) in dict(named_tensors).items():
            replica, replicas = self._replica(tensor, parameter)
            elements = assigned.setdefault(replicas, [0] * replicas)
            writer = elements.index(min(elements))
            elements[writer] += tensor.numel()
            if writer == replica:
                chosen[key] = tensor
        return chosen

    def _replica(self, tensor, parameter):
        """(which replica of its part of a tensor this process holds, how many replicas there are).

        tensor: a parameter, or its state in the optimizer. State that is not a DTensor (a step counter) is
        the same on all processes that hold a part of the parameter.
        """
        dtensor = tensor if hasattr(tensor, 'placements') else parameter
        if not hasattr(dtensor, 'placements'):
            return self.rank, self.world_size
        replica, replicas = 0, 1
        mesh = dtensor.device_mesh
        for size, coordinate, placement in zip(mesh.shape, mesh.get_coordinate(), dtensor.placements):
            if placement.is_replicate() or tensor is not dtensor:
                replica, replicas = replica * size + coordinate, replicas * size
        return replica, replicas

    # --- writing --------------------------------------------------------------------------------------------

    def write(self, folder, parts, begin, commit):
        """Write the files of a checkpoint; returns the problem in words, or None, the same on all processes.

        parts: what `prepare` returned, or copies of it. The first process calls begin() before any process
        writes, and commit(content of .metadata, {file name: checksum}) when it sees all files. An error in
        either is a problem too.
        """
        from torch.distributed.checkpoint.api import CheckpointException
        from torch.distributed.checkpoint.utils import _DistWrapper
        # The steps of dcp.save, except that the metadata stays on the first process: the others would take
        # seconds to read it if there are 1,024 of them.
        processes = _DistWrapper(self.group, self.group is not None, coordinator_rank=0)

        def start():
            if self.rank == 0:
                begin()
            return self.items is not None

        def write_and_commit():
            processes.all_reduce('write', lambda: self._write_part(folder, parts),
                                 lambda written: commit(*self._gather(folder, written)))

        try:
            if processes.all_reduce('start', start, all):
                write_and_commit()
            else:
                with _collector_paused():
                    plan = processes.reduce_scatter('plan', lambda: self.local_plan, self._plan_for_all)
                    self.items, self.results = plan.items, None
                    write_and_commit()
        except CheckpointException as error:
            self.items = None  # the next save plans again
            return _first_cause(error)

    def _plan_for_all(self, local_plans):
        """The plans of all processes, in which every part is written once. The first process calls this."""
        from torch.distributed.checkpoint import DefaultSavePlanner
        plans, self.metadata = DefaultSavePlanner().create_global_plan(local_plans)
        return plans

    def _write_part(self, folder, parts):
        """Write this process's file; returns (host, file name, checksum, DCP's results if they are new)."""
        path = os.path.join(folder, f'__{self.rank}_0.distcp')
        results, written = write_with(path, partial(_write_items, os.path.basename(path), self.items, parts))
        new_results = results if self.results is None else None
        if self.results is not None and results != self.results:
            raise ValueError(f'{path} is not laid out as in the previous save')
        self.results = results
        return socket.gethostname(), os.path.basename(path), written, new_results

    def _gather(self, folder, written):
        """(content of .metadata, {file name: checksum}) once all files are visible. The first process calls this.

        written: what `_write_part` returned on each process.
        """
        checksums = {}
        for host, name, expected, _ in written:
            path = os.path.join(folder, name)
            if not becomes_true(lambda: size_of(path) == expected[0]):
                raise ValueError(f'host {socket.gethostname()} does not see {path} as host {host} wrote it: '
                                 'out_dir must be on storage that all nodes share')
            checksums[name] = expected
        if not isinstance(self.metadata, bytes):
            from torch.distributed.checkpoint.metadata import StorageMeta
            self.metadata.storage_data = {result.index: result.storage_data
                                          for *_, results in written for result in results}
            self.metadata.storage_meta = StorageMeta()
            self.metadata = pickle.dumps(self.metadata)
        return self.metadata, checksums


def _write_items(name, items, parts, file):
    """Write the parts that a plan's items name into a file; returns DCP's results, which say where each is.

    name: that of the file. parts: {key: tensor, or a function that returns it}, so that one of them at a time
    is in memory.
    DCP's FileSystemWriter writes the same file, but keeps copies of all GPU tensors until it is complete.
    """
    from torch.distributed.checkpoint.filesystem import _StorageInfo
    from torch.distributed.checkpoint.storage import WriteResult
    results = []
    for item in items:
        part = parts[item.index.fqn]
        part = part() if callable(part) else part.cpu()
        if part.untyped_storage().nbytes() != part.nbytes:
            part = part.clone()  # torch.save would write the whole storage
        offset = file.size
        torch.save(part, file)
        length = file.size - offset
        results.append(WriteResult(item.index, length, _StorageInfo(name, offset, length)))
        del part  # before the next one is read
    return results


@contextlib.contextmanager
def _collector_paused():
    """A context in which Python's garbage collector does not run.

    A plan for 1,024 processes has millions of objects. The collector would inspect all of them repeatedly,
    for up to 15 seconds at a time, during which no other thread can run.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _first_cause(error):
    """One line that says why a save failed. DCP wraps the error, with the traceback of each process."""
    while getattr(error, 'failures', None):
        error = next(iter(error.failures.values()))[0]
    first_line = (str(error).strip().splitlines() or [''])[0]
    return first_line if isinstance(error, ValueError) else f'{type(error).__name__}: {first_line}'


# --- reading ------------------------------------------------------------------------------------------------

def safe_reader(path):
    """DCP's reader of a checkpoint, which is safe to use on files from others.

    .metadata is a pickle. This reader accepts only the classes that DCP writes there, so that no code can
    run.
    """
    from torch.distributed.checkpoint import FileSystemReader, filesystem, metadata

    class Unpickler(pickle.Unpickler):
        allowed = {(kind.__module__, kind.__qualname__): kind for kind in (
            metadata.Metadata, metadata.MetadataIndex, metadata.TensorStorageMetadata,
            metadata.ChunkStorageMetadata, metadata.TensorProperties, metadata.StorageMeta,
            metadata._MEM_FORMAT_ENCODING, filesystem._StorageInfo,
            torch.Size, torch.serialization._get_layout)}
        # Windows cannot build a PosixPath, and other systems cannot build a WindowsPath.
        allowed |= {('pathlib', name): pathlib.PurePath for name in ('PosixPath', 'WindowsPath')}

        def find_class(self, module, name):
            module = module.removesuffix('._local')  # where pathlib has its classes from Python 3.13 on
            if (module, name) in self.allowed:
                return self.allowed[module, name]
            if module == 'torch' and isinstance(getattr(torch, name, None), torch.dtype):
                return getattr(torch, name)
            raise ValueError(f'{path}/.metadata names {module}.{name}, which no checkpoint of kiloGPT does: '
                             'it was not loaded')

    class RemoteFiles(filesystem.FileSystem):
        def create_stream(self, path, mode):
            return storage.open_to_read(path)

        def concat_path(self, path, suffix):
            return os.path.join(path, suffix)

    class Reader(FileSystemReader):
        def __init__(self, path):
            super().__init__(path)
            if storage.is_url(path):  # DCP's FsspecReader would fetch 50 MB for each tensor, however small
                self.fs, self.path = RemoteFiles(), path

        def read_metadata(self, *args, **kwargs):
            found = Unpickler(io.BytesIO(storage.read(os.path.join(path, '.metadata')))).load()
            found.storage_meta.load_id = self.load_id
            return found

    return Reader(path)


def check_finite(path, named_tensors, advice):
    """Raise ValueError if tensors that were read from `path` have NaN or infinity in them.

    named_tensors: [(name, tensor)]. Of a DTensor, each process checks its part.
    advice: the end of the sentence.
    """
    counts = {}  # {name: (how many values are not finite, how many there are)}
    for name, tensor in named_tensors:
        part = local_part(tensor)
        if count := count_nonfinite(part):
            counts[name] = count, part.numel()
    if counts:
        name, (count, size) = next(iter(counts.items()))
        more = f'; the first of {len(counts)} such tensors' if len(counts) > 1 else ''
        raise ValueError(
            f'{path} has NaN or infinity in {name} ({count:,} of {size:,} values{more}): {advice}')


def count_nonfinite(tensor):
    """How many values of a tensor are NaN or infinity."""
    # A sum takes much less time than isfinite. It is finite only if all values are.
    if not tensor.is_floating_point() or tensor.sum(dtype=torch.float32).isfinite():
        return 0
    return tensor.numel() - int(tensor.float().isfinite().sum())  # 0 if only the sum has overflowed


# --- files --------------------------------------------------------------------------------------------------

class CountedFile:
    """A file that is being written, with the number and the CRC-32 of its bytes so far, and its first error."""

    def __init__(self, file):
        self.file, self.size, self.crc, self.error = file, 0, 0, None

    def write(self, content):
        try:
            self.file.write(content)
        except OSError as error:
            self.error = self.error or error
            raise
        self.size += len(content)
        self.crc = zlib.crc32(content, self.crc)
        return len(content)

    def flush(self):
        self.file.flush()


def write_with(path, fill):
    """Write a file with fill(file), and wait until it is on disk; returns (what fill returned, checksum).

    For a URL, fill is called again if the storage fails.
    """
    def fill_counted(file):
        counted = CountedFile(file)
        try:
            result = fill(counted)
        except RuntimeError as error:  # torch.save then finds that its file is shorter than it should be
            raise counted.error or error
        return result, [counted.size, counted.crc]

    if storage.is_url(path):
        return storage.write_with(path, fill_counted)
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, 'wb') as file:
        result = fill_counted(file)
        file.flush()
        os.fsync(file.fileno())
    return result


def write_file(path, content):
    """Write bytes to a file, and wait until the file is on disk; returns its checksum."""
    return write_with(path, lambda file: file.write(content))[1]


def write_json(path, content):
    """Write a JSON file, and wait until the file is on disk; returns its checksum."""
    return write_file(path, json.dumps(content, indent=1).encode())


def sync_folder(folder):
    """Wait until a folder's list of files is on disk, as the files already are."""
    try:
        handle = os.open(folder, os.O_RDONLY)
    except PermissionError:  # Windows does not open folders
        return
    os.fsync(handle)
    os.close(handle)


def checksum(path):
    """[bytes, CRC-32] of a file."""
    size = 0
    crc = 0
    with storage.open_to_read(path) as file:
        while chunk := file.read(2 ** 24):
            size += len(chunk)
            crc = zlib.crc32(chunk, crc)
    return [size, crc]


def size_of(path):
    """The size of a file in bytes. Opening the file makes NFS ask its server, which os.stat may not do."""
    if storage.is_url(path):
        return storage.size_of(path)
    with open(path, 'rb') as file:
        return os.fstat(file.fileno()).st_size


def becomes_true(condition):
    """Whether a condition becomes true within PATIENCE seconds. An OSError counts as not true yet."""
    deadline = time.monotonic() + PATIENCE
    while True:
        with contextlib.suppress(OSError):
            if condition():
                return True
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
