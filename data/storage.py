"""Object storage: files that have a URL (s3://, gs://, az://, https://, ...), through fsspec.

Everything that this repository reads or writes there goes through this file. A call that fails because of the
network or the storage is made again, at growing intervals. FileNotFoundError then always means that the file
is not there; anything else that stays wrong is a StorageError.
"""
import contextlib
import errno
import functools
import hashlib
import io
import os
import pathlib
import random
import re
import sys
import time

from filelock import FileLock

PATIENCE = 60  # seconds for which a call that fails is made again
RANGE_BYTES, RANGES_AT_ONCE = 2 ** 22, 8  # a large file is read in ranges of this size, so many side by side
PACKAGES = {'s3': 's3fs', 's3a': 's3fs', 'gs': 'gcsfs', 'gcs': 'gcsfs', 'az': 'adlfs', 'abfs': 'adlfs',
            'http': 'aiohttp', 'https': 'aiohttp', 'hf': 'huggingface_hub'}
# botocore allows 10 connections unless told otherwise, and would wait longer between its own attempts than _call.
OPTIONS = {'s3': dict(config_kwargs=dict(max_pool_connections=256, retries=dict(total_max_attempts=1))),
           'file': dict(auto_mkdir=True)}
# Libraries whose errors are about the network or the storage
LIBRARIES = 'aiohttp', 'botocore', 'aiobotocore', 'google', 'gcsfs', 'azure', 'adlfs', 'requests', 'urllib3', 'httpx'


class StorageError(Exception):
    """Storage that cannot be used. Not an OSError, so that nobody takes it for a file that is missing."""


def is_url(path):
    """Whether a path is a URL, of object storage, and not of a file system of this machine."""
    return '://' in str(path)


def local_folder(path):
    """The folder of this machine that stands for a folder: a path itself, out-s3/bucket/run for a URL."""
    if not is_url(path):
        return path
    protocol, _, rest = path.partition('://')
    return os.path.join(f'out-{protocol}', rest.strip('/'))


def cache_folder():
    """Where copies of remote files are kept: $KILOGPT_CACHE, or ~/.cache/kilogpt."""
    default = os.path.join(os.environ.get('XDG_CACHE_HOME') or os.path.expanduser('~/.cache'), 'kilogpt')
    return os.environ.get('KILOGPT_CACHE') or default


# --- calls --------------------------------------------------------------------------------------------------

def _call(path, function):
    """function(file system of path), made again while the storage fails. FileNotFoundError passes through."""
    deadline, pause = time.monotonic() + PATIENCE, 0.2
    file_system = _file_system(path.partition('://')[0], os.getpid())
    while True:
        try:
            return function(file_system)
        except Exception as found:
            error = _behind(found)
            if isinstance(error, FileNotFoundError):
                raise
            if reason := _lasting_reason(error):
                raise StorageError(f'{path}: {reason} ({_first_line(error)})') from None
            if not isinstance(error, OSError) and type(error).__module__.partition('.')[0] not in LIBRARIES:
                raise
            if time.monotonic() > deadline:
                raise StorageError(f'{path} could not be reached for {PATIENCE} s ({_first_line(error)}): check '
                                   'the network, and the endpoint if you have set one') from None
            if 2 < pause < 4:  # once
                print(f'warning: {path} does not answer ({_first_line(error)}); trying again',
                      file=sys.stderr, flush=True)
        time.sleep(pause * random.uniform(0.5, 1.5))  # so that a thousand processes do not come back together
        pause = min(2 * pause, 8)


@functools.cache
def _file_system(protocol, process_id):
    """fsspec's file system for a protocol. A process that was forked needs one of its own."""
    import fsspec
    try:
        return fsspec.filesystem(protocol, use_listings_cache=False, **OPTIONS.get(protocol, {}))
    except ImportError:
        package = PACKAGES.get(protocol, f"fsspec's package for {protocol}")
        raise ImportError(f'{protocol}:// needs {package}: pip install {package}') from None
    except ValueError:
        raise ValueError(f'{protocol}:// is not known to fsspec: use s3://, gs://, az:// or https://') from None


def _behind(error):
    """The error itself, or what it hides: fsspec says of a web server that is away that a file is not found."""
    cause = error.__cause__
    is_of_http = isinstance(error, FileNotFoundError) and type(cause).__module__.partition('.')[0] == 'aiohttp'
    return cause if is_of_http and getattr(cause, 'status', None) != 404 else error


def _lasting_reason(error):
    """What is wrong, if it makes no sense to try again; None if it does."""
    status = getattr(error, 'status', None) or getattr(error, 'status_code', None)
    if 'Credential' in type(error).__name__ or 'credentials' in str(error):
        return 'there are no credentials for this storage: set them in the environment'
    if isinstance(error, PermissionError) or status in (401, 403):
        return 'access is denied: check the credentials, and what they may do there'
    if isinstance(error, NotImplementedError) or getattr(error, 'errno', None) == errno.EINVAL:
        return 'the storage refuses this'
    return None


def _first_line(error):
    text = (str(error).strip().splitlines() or [''])[0]
    return f'{type(error).__name__}: {text}' if text else type(error).__name__


# --- reading ------------------------------------------------------------------------------------------------

def exists(path):
    """Whether a file is there; path: a URL or a local path."""
    if not is_url(path):
        return os.path.exists(path)
    try:
        return size_of(path) is not None
    except FileNotFoundError:
        return False


def size_of(path):
    """The size of a file in bytes; path: a URL or a local path."""
    if not is_url(path):
        return os.path.getsize(path)
    return _call(path, lambda fs: fs.info(path))['size']


def version_of(url):
    """(size in bytes, text that changes when the file is written again)."""
    return _version_in(_call(url, lambda fs: fs.info(url)))


def _version_in(info):
    """What `version_of` returns, of what fsspec tells of a file; None if it does not tell the size."""
    stamps = [str(info[key]) for key in ('ETag', 'etag', 'mtime', 'LastModified', 'updated') if info.get(key)]
    return (info['size'], stamps[0] if stamps else '') if info.get('size') is not None else None


def read(path):
    """The content of a file as bytes; path: a URL or a local path."""
    if not is_url(path):
        return pathlib.Path(path).read_bytes()
    return _call(path, lambda fs: fs.cat_file(path))


def read_ranges(ranges):
    """The bytes of [(path, begin, end)]; those of URLs, all of one protocol, are read side by side."""
    if ranges and not is_url(ranges[0][0]):
        return [_read_range(*piece) for piece in ranges]
    found = {}

    def read_missing(fs):
        missing = [piece for piece in dict.fromkeys(ranges) if piece not in found]
        problem = None
        for piece, content in zip(missing, fs.cat_ranges(*map(list, zip(*missing)), on_error='return')):
            url, begin, end = piece
            if isinstance(content, Exception):
                problem = content
            elif len(content) != end - begin:  # the connection was cut, or the server does not know ranges
                problem = OSError(f'{len(content):,} bytes came of {end - begin:,}')
            else:
                found[piece] = content
        if problem:
            raise problem

    if ranges:
        _call(ranges[0][0], read_missing)
    return [found[piece] for piece in ranges]


def _read_range(path, begin, end):
    with open(path, 'rb', buffering=0) as file:
        file.seek(begin)
        return file.read(end - begin)


def read_parts(url, begin, end):
    """Yield bytes begin to end of a file, in order, some RANGES_AT_ONCE * RANGE_BYTES at a time."""
    for first in range(begin, end, RANGES_AT_ONCE * RANGE_BYTES):
        last = min(end, first + RANGES_AT_ONCE * RANGE_BYTES)
        yield b''.join(read_ranges([(url, start, min(last, start + RANGE_BYTES))
                                    for start in range(first, last, RANGE_BYTES)]))


def open_to_read(path):
    """A file, open for reading bytes; path: a URL or a local path."""
    return RemoteFile(path) if is_url(path) else open(path, 'rb')


class RemoteFile(io.RawIOBase):
    """A file of object storage that is open for reading. The blocks that were read last are kept."""

    def __init__(self, url):
        self.url, self.size, self.position = url, size_of(url), 0
        self._block = functools.lru_cache(4)(self._block)

    def _block(self, number):
        begin = number * RANGES_AT_ONCE * RANGE_BYTES
        return next(read_parts(self.url, begin, min(self.size, begin + RANGES_AT_ONCE * RANGE_BYTES)))

    def readable(self):
        return True

    def seekable(self):
        return True

    def tell(self):
        return self.position

    def seek(self, offset, whence=os.SEEK_SET):
        self.position = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self.position, os.SEEK_END: self.size}[whence]
        return self.position

    def readinto(self, buffer):
        if self.position >= self.size:
            return 0
        number, offset = divmod(self.position, RANGES_AT_ONCE * RANGE_BYTES)
        piece = memoryview(self._block(number))[offset:offset + len(buffer)]
        buffer[:len(piece)] = piece
        self.position += len(piece)
        return len(piece)


def names_in(folder):
    """The names of the files in a folder, sorted; [] if there is none. folder: a URL or a local path."""
    if not is_url(folder):
        return sorted(os.listdir(folder)) if os.path.isdir(folder) else []
    return sorted(files_in(folder))


def files_in(url):
    """{name: (size in bytes, version) as of `version_of`, None if not known} of the files in a folder."""
    try:
        entries = _call(url, lambda fs: fs.ls(url, detail=True))
    except FileNotFoundError:
        return {}
    return {os.path.basename(entry['name']): _version_in(entry) for entry in entries if entry['type'] == 'file'}


def files_below(folder):
    """The paths of all files in a folder and its folders, relative to it: [] if there are none."""
    def find(fs):
        root = fs._strip_protocol(folder).rstrip('/')
        return sorted(path[len(root) + 1:] for path in fs.find(root))
    try:
        return _call(folder, find)
    except FileNotFoundError:
        return []


def local_copy(path, names=None):
    """The path of a copy on this machine of a file, or of a folder with its files (not its folders).

    names: the only files of the folder that matter. Each file is downloaded once, until it changes. A local
    path is its own copy. FileNotFoundError if there is nothing.
    """
    if not is_url(path):
        return os.path.abspath(path)
    url = path.rstrip('/')
    found = names_in(url)
    folder = os.path.join(cache_folder(), 'files', hashlib.sha256(url.encode()).hexdigest()[:16])
    os.makedirs(folder, exist_ok=True)
    with FileLock(os.path.join(folder, '.lock')):
        if found and found != [os.path.basename(url)]:
            for name in found:
                if names is None or name in names:
                    _download(f'{url}/{name}', os.path.join(folder, name))
            return folder
        copy = os.path.join(folder, os.path.basename(url))
        _download(url, copy)
        return copy


def _download(url, path):
    """Copy a file to this machine, unless that copy is there already."""
    version = repr(version_of(url))
    note = f'{path}.version'
    with contextlib.suppress(OSError):
        if pathlib.Path(note).read_text() == version and os.path.exists(path):
            return
    print(f'downloading {url}', file=sys.stderr, flush=True)
    download(url, f'{path}.tmp')
    os.replace(f'{path}.tmp', path)
    pathlib.Path(note).write_text(version)


def download(url, path):
    """Copy a file to this machine; returns the path."""
    with open(path, 'wb') as file:
        for part in read_parts(url, 0, size_of(url)):
            file.write(part)
        file.flush()
        os.fsync(file.fileno())
    return path


def find_files(pattern):
    """The URLs of files that a URL with a glob, or of a folder with all below it, means; sorted."""
    if '*' not in pattern:
        below = files_below(pattern)
        return [f'{pattern.rstrip("/")}/{name}' for name in below] if below and below != [''] else [pattern]
    if pattern.startswith('http'):  # whose folders are pages of links
        return sorted(_call(pattern, lambda fs: [fs.unstrip_protocol(path) for path in fs.glob(pattern)]))

    def find(fs):
        from fsspec.utils import glob_translate
        path = fs._strip_protocol(pattern)
        folder = path[:path.index('*')].rpartition('/')[0]
        matches = re.compile(glob_translate(path)).match
        return sorted(fs.unstrip_protocol(found) for found in fs.find(folder) if matches(found))

    # Not fs.glob, which leaves out folders whose listing fails (findings/s3fs_glob_busy.sh).
    return _call(pattern, find)


# --- writing ------------------------------------------------------------------------------------------------

def write(url, content):
    """Write bytes to a file, which is there with all of them or not at all."""
    with _bucket_named(url):
        _call(url, lambda fs: fs.pipe_file(url, content))


def write_with(url, fill):
    """Write a file with fill(file), which is called again if the storage fails; returns what it returns.

    The file is there once all of it is written. It is uploaded in parts, so that a large one is not held in
    memory.
    """
    def upload(fs):
        file = fs.open(url, 'wb')
        try:
            result = fill(file)
        except BaseException:
            with contextlib.suppress(Exception):
                file.discard()  # closing it would complete it
            file.closed = True
            raise
        file.close()
        return result

    with _bucket_named(url):
        return _call(url, upload)


@contextlib.contextmanager
def _bucket_named(url):
    """A context in which FileNotFoundError, which can only be of a bucket, is a StorageError."""
    try:
        yield
    except FileNotFoundError as error:
        raise StorageError(f'{url} cannot be written ({_first_line(error)}): is the name of the bucket right?'
                           ) from None


def delete(urls):
    """Delete files (URLs or local paths), in this order; those that are not there are left out."""
    for url in urls:
        with contextlib.suppress(FileNotFoundError):
            _call(url, lambda fs: fs.rm_file(url)) if is_url(url) else os.remove(url)


@contextlib.contextmanager
def write_atomically(path):
    """Open a binary file that gets its name when it is complete and on disk. If writing fails, remove it."""
    os.makedirs(os.path.dirname(path), exist_ok=True)
    temporary = f'{path}.{os.getpid()}.tmp'
    try:
        with open(temporary, 'wb') as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.remove(temporary)
