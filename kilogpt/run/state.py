"""The state of a run: its iteration, its place in the data, its best loss, its clock, and whether it ends."""
import contextlib
import inspect
import json
import os
import pathlib
import shutil
import signal
import sys
import time
from datetime import datetime
from typing import NamedTuple

from filelock import FileLock, SoftFileLock, Timeout

from data.storage import local_folder
from data.tokenizer_base import copy_tokenizer, tokenizer_folder
from kilogpt.parallel.apply import saved_parameters
from kilogpt.run import checkpoint


LEAST_ITERATIONS = 20  # of a run that says what bounds it


class Ending(NamedTuple):
    """Why and how a run ends."""
    reason: str  # 'finished', 'stopped' or 'failed'
    message: str
    exit_code: int


class Run:
    """A run of train.py, the same on all its processes.

    share_out(iteration, tokens): returns the data.shares.Shares of a run that continues at an iteration,
    before which `tokens` tokens of the data have been used. island: the island of this process among those
    that share the data.
    saved: the state of the checkpoint from which the run continues, or {}. config: the keys of train.py.

    iteration: the number of finished updates.
    best_val_loss: the lowest validation loss so far; None before the first evaluation.
    val_loss: the validation loss of the current iteration; None if it was not evaluated.
    ending: an Ending once the run is going to end, else None.
    """

    def __init__(self, share_out, island, saved, config):
        self.max_iters, self.eval_interval, self.eval_only = (
            config[key] for key in ('max_iters', 'eval_interval', 'eval_only'))
        self.always_saves, self.save_interval = config['always_save_checkpoint'], config['save_interval']
        self.save_seconds = 60 * config['save_minutes']
        self.share_out, self.island = share_out, island
        self.clock = Clock()
        self.ending = None
        self.best_val_loss = None
        self.move_to(0, tokens=0)
        if saved:
            self.restore(saved)

    def move_to(self, iteration, tokens):
        """Continue at an iteration that has a checkpoint. tokens: the tokens of the data used before it."""
        self.iteration = self.saved_iteration = iteration
        self.saved_time = time.monotonic()
        self.shares = self.share_out(iteration, tokens)
        self.val_loss, self.has_improved = None, False
        self.clock.start_lap(iteration)

    def join(self, iteration, parts):
        """Continue at the iteration of another island, and with its parts of the data (Shares.parts)."""
        self.iteration, self.shares.parts = iteration, parts
        self.saved_iteration = min(self.saved_iteration, iteration)
        self.clock.start_lap(iteration)

    def restore(self, state, tokens=None):
        """Continue from the state of a checkpoint. tokens: the place in the data, if not the state's."""
        self.move_to(state['iteration'], state['tokens'] if tokens is None else tokens)
        self.best_val_loss, self.val_loss = state['best_val_loss'], state['val_loss']

    def state(self):
        """The values of the run that a checkpoint keeps."""
        return dict(iteration=self.iteration, tokens=self.tokens, val_loss=self.val_loss,
                    best_val_loss=self.best_val_loss)

    # --- the place in the data ------------------------------------------------------------------------------

    @property
    def tokens(self):
        """The number of tokens of the data that were used before the current iteration."""
        return self.shares.tokens_before(self.iteration)

    def sequences(self, iteration):
        """The numbers of the sequences that this island trains on in an iteration, an integer array."""
        return self.shares.sequences(iteration, self.island)

    @property
    def batch(self):
        """The number of sequences that this island trains on in the current iteration."""
        return self.shares.batch_at(self.iteration)

    def change_batch(self, batch):
        """Train on `batch` sequences in each iteration from now on."""
        self.shares.change_batch(self.iteration, batch)

    # --- what is due ----------------------------------------------------------------------------------------

    def is_due(self, signals, hooks):
        """Whether anything other than an update has to be done now."""
        return (self.ending or signals.stop or self.evaluates or self._save_is_due(signals)
                or hooks.are_due(self))

    @property
    def evaluates(self):
        """Whether the current iteration is to be evaluated."""
        at_interval = self.iteration % self.eval_interval == 0
        return self.eval_only or at_interval or self.iteration == self.max_iters

    def wants_save(self):
        """Whether the last checkpoint is older than save_minutes by the clock of this process."""
        return self.save_seconds > 0 and time.monotonic() - self.saved_time >= self.save_seconds

    def _save_is_due(self, signals):
        at_interval = self.save_interval and self.iteration % self.save_interval == 0
        return signals.save_requested or at_interval

    def needs_save(self, signals, saver):
        """Whether to save a checkpoint now. A failed save is tried again at the end of the run."""
        is_unsaved = self.iteration > self.saved_iteration or (self.ending and saver.problem)
        after_evaluation = self.evaluates and (self.always_saves or self.has_improved)
        return is_unsaved and (self.ending or self._save_is_due(signals) or after_evaluation)

    # --- what happens ---------------------------------------------------------------------------------------

    def advance(self):
        """Count an update."""
        self.iteration += 1
        self.val_loss, self.has_improved = None, False

    def note(self, val_loss):
        """Record the validation loss of the current iteration. A NaN is never an improvement."""
        self.val_loss = val_loss
        best = float('inf') if self.best_val_loss is None else self.best_val_loss
        self.has_improved = val_loss < best
        if self.has_improved:
            self.best_val_loss = val_loss

    def note_save(self, signals):
        """Record that the current iteration is saved, which also answers a request to save."""
        self.saved_iteration, self.saved_time = self.iteration, time.monotonic()
        signals.forget_save_request()

    def end(self, reason, message='', exit_code=0):
        """End the run before its next update. If there are several reasons, the first counts."""
        self.ending = self.ending or Ending(reason, message, exit_code)

    def end_if_stopped(self, signals):
        """End the run if any process has received a signal to stop."""
        if signals.stop:
            resumes = '; --init_from=resume continues from here' if self.iteration else ''
            name = signal.Signals(signals.stop).name
            self.end('stopped', f'stopped by {name} at iteration {self.iteration}{resumes}', 143)

    def end_if_finished(self):
        """End the run if it has made all its updates, or if it only evaluates."""
        if self.eval_only or self.iteration >= self.max_iters:
            self.end('finished')

    def report_ending(self, processes, save_problem, meter, config):
        """Print what bounded the run, and why it has ended, unless it has finished; returns the exit code.

        save_problem: why the last checkpoint could not be saved, or None. meter: the Meter. config: the keys.
        """
        ending = self.ending
        if meter.iterations >= LEAST_ITERATIONS and not config['profile'] and processes.is_first:
            from kilogpt.run.verdict import verdict_of_run
            processes.say(verdict_of_run(meter, processes, config))
        if save_problem and ending.reason != 'failed':
            ending = Ending('failed', f'the run ended at iteration {self.iteration}, but its last checkpoint '
                            f'could not be saved ({save_problem})', 1)
        if ending.reason == 'stopped':
            processes.say(ending.message)
        if ending.reason == 'failed' and processes.is_main:
            print(f'error: {ending.message}', file=sys.stderr, flush=True)
        return ending.exit_code


class Clock:
    """A clock that measures iterations and is paused during evaluations and saves."""

    def __init__(self):
        self._paused = 0.0  # seconds for which the clock has been paused so far
        self._stopped_at = None  # while the clock is paused: the time at which the pause began
        self.start_lap(0)

    def now(self):
        """The time of the clock in seconds; only differences have a meaning."""
        return (self._stopped_at or time.perf_counter()) - self._paused

    @contextlib.contextmanager
    def paused(self):
        """A context in which the clock is paused."""
        self._stopped_at = time.perf_counter()
        try:
            yield
        finally:
            self._paused += time.perf_counter() - self._stopped_at
            self._stopped_at = None

    def start_lap(self, iteration):
        """Begin a lap at an iteration."""
        self._first_of_lap, self._lap_began = iteration, self.now()

    def lap(self, iteration):
        """Begin the next lap; returns (iterations of the last lap, seconds per iteration)."""
        iterations, seconds = iteration - self._first_of_lap, self.now() - self._lap_began
        self.start_lap(iteration)
        return iterations, seconds / iterations


class NoIslands:
    """What a run without islands has in the place of kilogpt.islands.islands.Islands."""
    island = 0

    def __init__(self, processes, config):
        self.processes, self.out_dir, self.rank = processes, config['out_dir'], processes.rank

    def find_checkpoint(self):
        return checkpoint.find_undamaged(self.out_dir, self.processes)

    def attach(self, parallel, model):
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


# --- the folder ---------------------------------------------------------------------------------------------

class RunFolder:
    """The folder of a run, locked for it until its process ends. All processes make the same calls.

    It is out_dir, or stands for it on this machine if that is a URL (kilogpt.run.remote).
    is_written: whether the run writes there; a run that only evaluates does not.
    """

    def __init__(self, out_dir, processes, is_written):
        self.out_dir, self.processes, self.is_written = out_dir, processes, is_written
        self.path = local_folder(out_dir)
        self.lock = None
        if processes.is_main and is_written and os.path.isdir(self.path):
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
