"""Where a run runs: its processes, the layout of its model, its islands, its folder and its watchdog."""
import inspect
import json
import os
import pathlib
import shutil
from datetime import datetime

import torch
from filelock import FileLock, SoftFileLock, Timeout

from data.storage import local_folder
from data.tokens import copy_tokenizer, tokenizer_folder
from kilogpt.devices import host
from kilogpt.keys.islands import are_on
from kilogpt.parallel.apply import describe_layout, saved_parameters
from kilogpt.parallel.layout import Layout
from kilogpt.parallel.processes import Processes, make_deterministic, resolve_dtype
from kilogpt.plan.fits import describe_memory
from kilogpt.run import checkpoint
from kilogpt.run.metrics import Metrics, available_memory
from kilogpt.run.signals import Signals, StopRequest
from kilogpt.run.watchdog import Watchdog


class Cluster:
    """The processes of a run, which have joined each other, and what they run in.

    config: the keys of train.py. ValueError or OSError if these processes, or this machine, cannot run it.

    processes: a Processes. layout: the Layout of the model on them. dtype: that of training, 'bfloat16' say.
    islands: the hook kilogpt.islands.islands.Islands, or NoIslands.
    replicas: a kilogpt.replicas.replicas.Replicas, or NoReplicas.
    folder: the RunFolder. out_dir: its path or URL, in which an island has a folder of its own.
    """

    def __init__(self, config):
        self.stop_request = StopRequest()  # first, since a signal may come at any time
        torch.set_float32_matmul_precision('high')  # TF32 on GPUs that have it
        if config['deterministic']:
            make_deterministic()
        self.processes = Processes(config['device'], 1 if config['outer_store'] else config['islands'])
        self.layout = Layout.of(self.processes.world_size, config)
        self.processes.join(self.layout, config['backend'], config['comm_timeout'])
        host.prepare(self.processes.say)
        self.dtype = resolve_dtype(config['dtype'], self.processes.device)
        self.islands = NoIslands(self.processes, config)
        if are_on(config):
            from kilogpt.islands.jobs import open_islands
            self.islands = open_islands(self.processes, self.layout, config)
        self.out_dir = self.islands.out_dir
        self.replicas = NoReplicas()
        if config['fault_tolerance'] == 'replicas':
            from kilogpt.replicas.replicas import Replicas
            self.replicas = Replicas(self.processes, config)
        self.folder = RunFolder(self.out_dir, self.processes, is_written=not config['eval_only'],
                                is_lead=self.replicas.is_lead)
        self.watchdog = Watchdog(self.processes, os.path.join(self.folder.path, self.replicas.hang_folder),
                                 config['comm_timeout'])

    def describe(self, config, data, model, parallel, optimizer, size):
        """Print what is going to be trained, and where. size: that of the whole model, in words."""
        processes, say, place = self.processes, self.processes.say, data.train.place
        say(f'{processes.world_size} process(es) on {processes.device}, {self.dtype}, {size}, '
            f'{data.train.n_tokens:,} training tokens in {place}')
        available = available_memory(processes.device) - self.islands.bytes_on(processes.device)
        lines = [*describe_layout(parallel, optimizer, config['batch_size'], config['islands']),
                 *self.islands.describe(), *self.replicas.describe(), *data.train.describe()]
        if processes.world_size * processes.islands > 1:
            from kilogpt.parallel.network import describe_nodes
            lines += describe_nodes(self.out_dir, place)
        lines += describe_memory(model, self.layout, config | dict(dtype=self.dtype), available, processes.device)
        for line in lines:
            say(f'  {line}')


class NoIslands:
    """What a run without islands has in the place of kilogpt.islands.islands.Islands."""
    island = 0

    def __init__(self, processes, config):
        self.processes, self.out_dir, self.rank = processes, config['out_dir'], processes.rank

    def find_checkpoint(self):
        return checkpoint.find_undamaged(self.out_dir, self.processes)

    def attach_model(self, parallel, model):
        self.parallel = parallel

    def parameters(self):
        return saved_parameters(self.parallel)

    def needed_checkpoint(self):
        return None

    def bytes_on(self, device):
        return 0

    def describe(self):
        return []

    def begin(self, *_):
        pass


class NoReplicas:
    """What a run whose processes are all needed has in the place of kilogpt.replicas.replicas.Replicas."""
    is_lead, hang_folder = True, 'hang'
    log_class, signals_class = Metrics, Signals

    def describe(self):
        return []

    def share(self):
        return 0, 1

    def open_folder(self, run):
        run.open_folder()

    def attach(self, run, save):
        pass

    def begin(self):
        pass

    def add_up(self, loss_sum):
        return True

    def figures(self):
        return {}

    def finish(self):
        pass


# --- the folder ---------------------------------------------------------------------------------------------

class RunFolder:
    """The folder of a run, locked for it until its process ends. All processes make the same calls.

    It is out_dir, or stands for it on this machine if that is a URL (kilogpt.run.remote).
    is_written: whether the run writes there; a run that only evaluates does not. is_lead: whether this replica is
    known to lead. Of replicas, the one that leads locks the folder when it prepares it.
    """

    def __init__(self, out_dir, processes, is_written, is_lead):
        self.out_dir, self.processes, self.is_written = out_dir, processes, is_written
        self.path = local_folder(out_dir)
        self.lock = None
        if processes.is_main and is_written and is_lead and os.path.isdir(self.path):
            self.lock = lock_folder(self.path)
        processes.barrier()

    def begin(self, config, meta, resumed, saves_checkpoints):
        """Prepare the folder for a run, and write config.json and the tokenizer's files.

        meta: the tokenizer's.
        resumed: the checkpoint from which the run continues, or None. Unless this checkpoint is in the
        folder, the files of an earlier run are moved to a subfolder.
        """
        if self.processes.is_main:
            os.makedirs(self.path, exist_ok=True)
        if saves_checkpoints:
            checkpoint.check_shared(self.out_dir, self.processes)
        if not (self.processes.is_main and self.is_written):
            return
        self.lock = self.lock or lock_folder(self.path)
        continues = resumed and resumed.startswith(os.path.join(self.out_dir, 'ckpt'))
        if self.path != self.out_dir:
            from kilogpt.run import remote
            remote.begin(self.out_dir, continues)
            self.processes.say(f'the log of {self.out_dir} is in {self.path}, and there after each checkpoint')
        earlier = None if continues else set_aside(self.path)
        if earlier:
            self.processes.say(f'{self.path} held an earlier run: moved to {earlier}')
        with open(os.path.join(self.path, 'config.json'), 'w', encoding='utf-8') as file:
            # A run that repeats this run is not profiled, and looks at its data.
            json.dump(config | dict(profile=False, accept_new_data=False), file, indent=1)
        copy_tokenizer(meta, tokenizer_folder(self.path))
        if self.path != self.out_dir:
            from kilogpt.run import remote
            remote.copy_logs(self.out_dir)


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
    if not checkpoint.find(out_dir) and not os.path.exists(os.path.join(out_dir, 'metrics.jsonl')):
        return None
    # Two short runs can begin within the same second, so the name has microseconds.
    folder = os.path.join(out_dir, f'{datetime.now():earlier-%Y%m%d-%H%M%S-%f}')
    os.makedirs(folder)
    for name in ('ckpt', 'metrics.jsonl', 'samples.jsonl', 'tasks.jsonl', 'config.json', 'tensorboard', 'events'):
        if os.path.exists(os.path.join(out_dir, name)):
            os.rename(os.path.join(out_dir, name), os.path.join(folder, name))
    if os.path.exists(tokenizer_folder(out_dir)):  # the new run may have the same tokenizer
        shutil.copytree(tokenizer_folder(out_dir), tokenizer_folder(folder))
    return folder
