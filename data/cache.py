"""Copies token files from object storage into the cache of a node, in a process beside the run.

The process works for all processes of a run on its node, and ends with the one that started it. What has been
copied stays for later runs; copies that no run has used for longest are deleted to make room.
"""
import json
import os
import pathlib
import shutil
import subprocess
import sys
import threading

import numpy as np
from filelock import FileLock, Timeout

from data import storage
from data.shards import PART_BYTES, CacheEntry, RemoteTokens

FREE_SHARE = 0.1  # of the disk, which the cache leaves free


def start_copying(loaders, gigabytes):
    """Start to copy the remote files of loaders into the cache, up to so many GB.

    One process of each node calls this. Returns None, or the Popen of the process that copies, which ends when
    nobody refers to this object any more.
    """
    files = [(shard.url, shard.size, shard.entry.folder) for loader in loaders for shard in loader.shards
             if isinstance(shard, RemoteTokens)]
    if not files or not gigabytes:
        return None
    copier = subprocess.Popen([sys.executable, '-m', 'data.cache'], stdin=subprocess.PIPE, text=True,
                              cwd=os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    copier.stdin.write(json.dumps(dict(files=files, gigabytes=gigabytes)) + '\n')
    copier.stdin.flush()  # and not closed: its end tells the copier that this process has ended
    return copier


def copy_all(files, gigabytes):
    """Copy [(URL, size, folder of the cache)], the first ones first, until `gigabytes` are reached."""
    chosen, room = [], gigabytes * 1e9
    for url, size, folder in files:
        if size <= room:
            room -= size
            chosen.append((url, size, folder))
    make_room(gigabytes * 1e9, {folder: size for _, size, folder in chosen})
    for url, size, folder in chosen:
        copy_file(url, CacheEntry(folder, size))


def make_room(limit, chosen):
    """Delete entries of the cache that are not among `chosen` ({folder: size}), the longest unused first.

    limit: bytes that the cache may have together with the chosen entries.
    """
    tokens = pathlib.Path(storage.cache_folder(), 'tokens')
    entries = [entry for entry in tokens.iterdir() if entry.is_dir()] if tokens.exists() else []
    others = sorted((entry for entry in entries if str(entry) not in chosen), key=lambda e: e.stat().st_mtime)
    used = sum(chosen.values()) + sum(map(_bytes_in, others))
    while others and used > limit:
        oldest = others.pop(0)
        used -= _bytes_in(oldest)
        shutil.rmtree(oldest, ignore_errors=True)  # a run that has mapped it keeps what it has


def _bytes_in(folder):
    return sum(path.stat().st_size for path in folder.iterdir())


def copy_file(url, entry):
    """Copy a file into its entry of the cache, unless another process does so already."""
    os.makedirs(entry.folder, exist_ok=True)
    os.utime(entry.folder)  # it was used now
    try:
        with FileLock(os.path.join(entry.folder, '.lock'), timeout=0):
            if not os.path.exists(entry.complete):
                _copy_parts(url, entry)
    except Timeout:
        pass


def _copy_parts(url, entry):
    if shutil.disk_usage(entry.folder).free - entry.size < FREE_SHARE * shutil.disk_usage(entry.folder).total:
        print(f'warning: no room to keep {url} in {storage.cache_folder()}: it is read from afar. Set '
              'KILOGPT_CACHE to a larger disk', file=sys.stderr, flush=True)
        return
    if not os.path.exists(entry.marks):  # of an earlier start of the machine, if there is a copy at all
        with open(entry.copy, 'wb') as copy:
            copy.truncate(entry.size)
        pathlib.Path(entry.marks).write_bytes(bytes(entry.n_parts))
    marks = np.memmap(entry.marks, np.uint8, 'r+')
    with open(entry.copy, 'r+b') as copy:
        for part in np.flatnonzero(marks == 0).tolist():
            begin = part * PART_BYTES
            content = b''.join(storage.read_parts(url, begin, min(entry.size, begin + PART_BYTES)))
            copy.seek(begin)
            copy.write(content)
            copy.flush()
            marks[part] = 1
        os.fsync(copy.fileno())
    pathlib.Path(entry.complete).touch()


def main():
    request = json.loads(sys.stdin.readline())
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        copy_all(**request)
    except (OSError, ValueError, ImportError, storage.StorageError) as error:
        sys.exit(f'warning: no more token files are copied to {storage.cache_folder()}: {error}')


def _end_with_parent():
    sys.stdin.read()
    os._exit(0)


if __name__ == '__main__':
    main()
