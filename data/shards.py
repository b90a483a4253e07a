"""Token files, on this machine or in object storage: opened once, then read in pieces."""
import functools
import hashlib
import os
import pathlib

import numpy as np

from data import storage
from data.checks import refuse_other_formats

# llm.c's shards have a header of 256 integers, which begins with magic, version and token count.
HEADER_MAGIC, HEADER_VERSION, HEADER_BYTES = 20240520, 1, 1024
HEAD_BYTES = 2 ** 16  # of a remote file, which are read at the start


def open_shards(paths, meta):
    """Arrays of the token ids of .bin files of one folder, or RemoteTokens, which are sliced like arrays.

    meta: the content of the dataset's meta.json. ValueError if a file is truncated or damaged.
    """
    if not paths or not storage.is_url(paths[0]):
        return [_open_local(path, os.path.getsize(path), meta) for path in paths]
    versions = storage.files_in(os.path.dirname(paths[0]))
    versions = [versions.get(os.path.basename(path)) or storage.version_of(path) for path in paths]
    ends = [min(size, HEADER_BYTES + HEAD_BYTES) for size, _ in versions]
    heads = storage.read_ranges([(path, 0, end) for path, end in zip(paths, ends)])
    return [_open_remote(path, *version, head, meta) for path, version, head in zip(paths, versions, heads)]


def _open_local(path, size, meta):
    with open(path, 'rb') as file:
        dtype, offset, count = _layout_of(path, size, file.read(HEADER_BYTES), meta)
    tokens = np.memmap(path, dtype=dtype, mode='r', offset=offset, shape=(count,))
    return np.asarray(tokens)  # a plain array, which is faster to slice than a memmap


def _open_remote(url, size, version, head, meta):
    dtype, offset, count = _layout_of(url, size, head[:HEADER_BYTES], meta)
    return RemoteTokens(url, size, version, head, dtype, offset, count)


def _layout_of(path, size, head, meta):
    """(dtype, offset in bytes, count) of the tokens of a file. size: its bytes. head: the first of them."""
    dtype = np.dtype(meta['dtype']).newbyteorder('<')
    header = np.frombuffer(head[:len(head) // 4 * 4], '<i4')
    refuse_other_formats(path, head)
    offset = HEADER_BYTES if len(head) == HEADER_BYTES and header[0] == HEADER_MAGIC else 0
    if offset and header[1] != HEADER_VERSION:
        raise ValueError(f'{path} has a shard header of version {header[1]}, '
                         f'but only version {HEADER_VERSION} can be read')
    count, rest = divmod(size - offset, dtype.itemsize)
    expected = max(1, int(header[2]) if offset else meta.get('tokens', {}).get(os.path.basename(path), count))
    if rest or count != expected:
        raise ValueError(f'{path} should hold {expected} tokens of {dtype.itemsize} bytes, but is {size} '
                         'bytes long: it is truncated or damaged, prepare the dataset again')
    return dtype, offset, count


def first_tokens(path, shard, count):
    """The first tokens of a shard, `count` or fewer."""
    if isinstance(shard, RemoteTokens):
        return shard.first[:count]
    # Reading through the memory map would fetch megabytes ahead at each first access.
    return np.fromfile(path, shard.dtype, count, offset=os.path.getsize(path) - shard.nbytes)


def read_pieces(shards, places):
    """Arrays of the tokens at [(shard, begin, end)], which ends early at the end of a shard.

    Pieces of files in object storage are read side by side.
    """
    pieces, ranges = [], {}
    for number, (i, begin, end) in enumerate(places):
        shard = shards[i]
        pieces.append(shard.cached(begin, end) if isinstance(shard, RemoteTokens) else shard[begin:end])
        if pieces[number] is None:
            ranges[number] = shard.range_of(begin, end)
    for number, content in zip(ranges, storage.read_ranges(list(ranges.values()))):
        pieces[number] = np.frombuffer(content, shards[places[number][0]].dtype)
    return pieces


class RemoteTokens:
    """The token ids of a file in object storage. Slices are read from there, or from the node's cache.

    data.cache copies the file into the cache part by part, and sets the byte of each part in `parts` once the
    part is there. After a crash of the machine parts may be marked that never reached the disk, so a file of
    parts counts only until the machine starts again, unless the copy is complete and was written to disk.
    """

    def __init__(self, url, size, version, head, dtype, offset, count):
        self.url, self.size, self.dtype, self.offset, self.count = url, size, dtype, offset, count
        self.first = np.frombuffer(head[offset:offset + (len(head) - offset) // dtype.itemsize * dtype.itemsize],
                                   dtype)
        self.entry = CacheEntry.of(url, size, version)
        self.copy = self.parts = None  # maps of the copy and of its parts, once there are any

    def __len__(self):
        return self.count

    @property
    def nbytes(self):
        return self.count * self.dtype.itemsize

    def __getitem__(self, tokens):
        begin, end, _ = tokens.indices(self.count)
        return read_pieces([self], [(0, begin, end)])[0]

    def range_of(self, begin, end):
        """(URL, first byte, end) of the tokens from `begin` to `end`."""
        begin, end = (self.offset + min(place, self.count) * self.dtype.itemsize for place in (begin, end))
        return self.url, begin, end

    def cached(self, begin, end):
        """The tokens from `begin` to `end` if the cache has them, else None."""
        if self.copy is None:
            opened = self.entry.open()
            if opened is None:
                return None
            self.copy, self.parts = opened
        _, begin, end = self.range_of(begin, end)
        if not self.parts[begin // PART_BYTES:-(-end // PART_BYTES)].all():
            return None
        return self.copy[begin:end].view(self.dtype)


PART_BYTES = storage.RANGES_AT_ONCE * storage.RANGE_BYTES


class CacheEntry:
    """The copy of a remote file in the node's cache: a folder with `copy` and a file that marks its parts."""

    def __init__(self, folder, size):
        self.folder, self.size, self.n_parts = folder, size, -(-size // PART_BYTES)
        self.copy, self.complete = os.path.join(folder, 'copy'), os.path.join(folder, 'complete')
        self.marks = os.path.join(folder, f'parts-{_boot()}')

    @classmethod
    def of(cls, url, size, version):
        """The entry of a version of a file, whether it exists or not."""
        key = hashlib.sha256(f'{url} {size} {version}'.encode()).hexdigest()[:24]
        return cls(os.path.join(storage.cache_folder(), 'tokens', key), size)

    def open(self):
        """(map of the copy, map of its parts: 1 = there), both of bytes; None if there is no copy."""
        try:
            if os.path.exists(self.complete):
                return np.asarray(np.memmap(self.copy, np.uint8, 'r')), np.ones(self.n_parts, np.uint8)
            if os.path.exists(self.marks):
                return tuple(np.asarray(np.memmap(path, np.uint8, 'r')) for path in (self.copy, self.marks))
        except (OSError, ValueError):  # it is being made, or was deleted at this moment
            pass
        return None


@functools.cache
def _boot():
    """A name for the time since this machine started."""
    path = pathlib.Path('/proc/sys/kernel/random/boot_id')
    return path.read_text().strip() if path.exists() else f'process-{os.getppid()}'
