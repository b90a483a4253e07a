"""A run whose out_dir is a URL: what takes the place of renaming, locking and appending, which URLs lack.

Checkpoints are written to their places in object storage, .metadata last. Everything else that a run writes is
in a folder of this machine (data.storage.local_folder), and what a later run needs of it (config.json,
metrics.jsonl, the tokenizer) is copied to the URL with each checkpoint.
"""
import contextlib
import os
import pathlib
import uuid

from data import storage
from data.tokens import tokenizer_folder

LOGS = 'config.json', 'metrics.jsonl', 'samples.jsonl'


class RemoteRun:
    """What the first process of a run does at a URL besides writing checkpoints."""

    def __init__(self, url):
        self.url = url
        self.owner = None  # what this run has written into `owner`, from its first save on

    def begin(self, path):
        """Make place for the checkpoint `path`: delete it, and others that a killed run has not completed.

        Another run that saves here too is told to stop: it finds that the file `owner` has changed.
        """
        if self.owner is None:
            self.owner = uuid.uuid4().hex.encode()
            storage.write(self._owner, self.owner)
        self._check_owner()
        folder = os.path.dirname(path)
        begun = {name.partition('/')[0] for name in storage.files_below(folder)}
        for name in begun | {os.path.basename(path)}:
            checkpoint = os.path.join(folder, name)
            # A list of files may be out of date, so each checkpoint is looked at.
            if checkpoint == path or not storage.exists(os.path.join(checkpoint, '.metadata')):
                delete_remote(checkpoint)

    def before_commit(self):
        """Copy the run's other files to the URL, just before a checkpoint becomes complete."""
        self._check_owner()
        copy_logs(self.url)

    @property
    def _owner(self):
        return os.path.join(self.url, 'owner')

    def _check_owner(self):
        if storage.read(self._owner) != self.owner:
            raise ValueError(f'another run has begun to save in {self.url}: end one of the two, or give it '
                             'another out_dir')


def copy_logs(url):
    """Copy to the URL what a later run needs of this machine's folder of the run."""
    folder = storage.local_folder(url)
    tokenizer = [os.path.join('tokenizer', name) for name in storage.names_in(tokenizer_folder(folder))]
    for name in (*LOGS, *tokenizer):
        with contextlib.suppress(FileNotFoundError):
            storage.write(f'{url}/{name}', pathlib.Path(folder, name).read_bytes())


def delete_remote(path):
    """Delete a checkpoint: .metadata first, so that a checkpoint with .metadata is always complete."""
    names = storage.files_below(path)
    storage.delete([os.path.join(path, name) for name in ('.metadata', *names)])


def begin(url, continues):
    """Fetch the log of a run that continues, unless this machine has it: its lines will follow.

    ValueError if the run does not continue what is at the URL, since a checkpoint there cannot be moved away.
    """
    if not continues and any(name.endswith('/.metadata') for name in storage.files_below(f'{url}/ckpt')):
        raise ValueError(f'{url} has checkpoints of another run: set another out_dir, or --init_from=resume to '
                         'continue that run')
    for name in ('metrics.jsonl', 'samples.jsonl'):
        log = os.path.join(storage.local_folder(url), name)
        if continues and not os.path.exists(log):
            with contextlib.suppress(FileNotFoundError):
                pathlib.Path(log).write_bytes(storage.read(f'{url}/{name}'))
