"""What a run is at a moment: its iteration, its place in the data, its best loss, its clock, and whether it ends.

A hook is what acts between the iterations of a run: write a class of your own, and put it into the list `hooks` of
train.py.
"""
import contextlib
import json
import os
import signal
import sys
import time
from typing import NamedTuple

from kilogpt import checkpoint


class Ending(NamedTuple):
    """Why and how a run ends."""
    reason: str  # 'finished', 'stopped' or 'failed'
    message: str
    exit_code: int


class Run:
    """A run of train.py, the same on all its processes.

    share_out(iteration, tokens): the data.shares.Shares of a run that continues at an iteration, where that
    many tokens of the data have been used. island: this process's island among those that share the data.
    saved: the state of a checkpoint that the run continues, or {}.
    always_saves: whether each evaluation is followed by a save. The other arguments are keys of train.py.

    iteration: the number of finished updates.
    best_val_loss: the least validation loss so far; None before the first evaluation.
    val_loss: that of the present iteration; None unless it was evaluated.
    ending: an Ending, once the run is to end.
    """

    def __init__(self, share_out, island, saved, *, max_iters, eval_interval, eval_only, always_saves,
                 save_interval, save_minutes):
        self.max_iters, self.eval_interval, self.eval_only = max_iters, eval_interval, eval_only
        self.always_saves, self.save_interval = always_saves, save_interval
        self.save_seconds = 60 * save_minutes
        self.share_out, self.island = share_out, island
        self.clock = Clock()
        self.ending = None
        self.best_val_loss = None
        self.move_to(0, tokens=0)
        if saved:
            self.restore(saved)

    def move_to(self, iteration, tokens):
        """Continue at an iteration for which a checkpoint exists, where that many tokens have been used."""
        self.iteration = self.saved_iteration = iteration
        self.saved_time = time.monotonic()
        self.shares = self.share_out(iteration, tokens)
        self.val_loss, self.has_improved = None, False
        self.clock.start_lap(iteration)

    def join(self, iteration, parts):
        """Continue at the iteration of another island, whose parts of the data (Shares.parts) count from now."""
        self.iteration, self.shares.parts = iteration, parts
        self.saved_iteration = min(self.saved_iteration, iteration)
        self.clock.start_lap(iteration)

    def restore(self, state, tokens=None):
        """Continue from a checkpoint's state. tokens: the place in the data, if not that of the state."""
        self.move_to(state['iteration'], state['tokens'] if tokens is None else tokens)
        self.best_val_loss, self.val_loss = state['best_val_loss'], state['val_loss']

    def state(self):
        """What a checkpoint keeps of the run."""
        return dict(iteration=self.iteration, tokens=self.tokens, val_loss=self.val_loss,
                    best_val_loss=self.best_val_loss)

    # --- the place in the data ------------------------------------------------------------------------------

    @property
    def tokens(self):
        """The tokens of the data that were used before this iteration."""
        return self.shares.tokens_before(self.iteration)

    def sequences(self, iteration):
        """The numbers of the sequences that this island trains on in an iteration, an integer array."""
        return self.shares.sequences(iteration, self.island)

    @property
    def batch(self):
        """The number of sequences that this island trains on in this iteration."""
        return self.shares.batch_at(self.iteration)

    def change_batch(self, batch):
        """Train on that many sequences in each iteration from now on."""
        self.shares.change_batch(self.iteration, batch)

    # --- what is due ----------------------------------------------------------------------------------------

    def is_due(self, signals, hooks):
        """Whether anything but an update is to be done now."""
        return (self.ending or signals.stop or self.evaluates or self._save_is_due(signals)
                or any(hook.is_due(self) for hook in hooks))

    @property
    def evaluates(self):
        """Whether this iteration is one that is evaluated."""
        at_interval = self.iteration % self.eval_interval == 0
        return self.eval_only or at_interval or self.iteration == self.max_iters

    def wants_save(self):
        """Whether the last checkpoint is too old (save_minutes), by the clock of this process."""
        return self.save_seconds > 0 and time.monotonic() - self.saved_time >= self.save_seconds

    def _save_is_due(self, signals):
        at_interval = self.save_interval and self.iteration % self.save_interval == 0
        return signals.save_requested or at_interval

    def needs_save(self, signals, saver):
        """Whether to save a checkpoint now. A save that failed is tried once more at the end of the run."""
        is_unsaved = self.iteration > self.saved_iteration or (self.ending and saver.problem)
        after_evaluation = self.evaluates and (self.always_saves or self.has_improved)
        return is_unsaved and (self.ending or self._save_is_due(signals) or after_evaluation)

    # --- what happens ---------------------------------------------------------------------------------------

    def advance(self):
        """Count an update."""
        self.iteration += 1
        self.val_loss, self.has_improved = None, False

    def note(self, val_loss):
        """Take over the validation loss of this iteration. A NaN does not improve on anything."""
        self.val_loss = val_loss
        self.has_improved = val_loss < (float('inf') if self.best_val_loss is None else self.best_val_loss)
        if self.has_improved:
            self.best_val_loss = val_loss

    def note_save(self, signals):
        """Remember that the present iteration is saved, also if somebody has asked for that."""
        self.saved_iteration, self.saved_time = self.iteration, time.monotonic()
        signals.forget_save_request()

    def end(self, reason, message='', exit_code=0):
        """Let the run end before its next update. The first reason counts."""
        self.ending = self.ending or Ending(reason, message, exit_code)

    def end_if_stopped(self, signals):
        """End the run if a signal to stop has reached any process."""
        if signals.stop:
            resumes = '; --init_from=resume continues from here' if self.iteration else ''
            name = signal.Signals(signals.stop).name
            self.end('stopped', f'stopped by {name} at iteration {self.iteration}{resumes}', 143)

    def end_if_finished(self):
        """End the run if it has made all its updates, or was to evaluate only."""
        if self.eval_only or self.iteration >= self.max_iters:
            self.end('finished')

    def report_ending(self, processes, save_problem):
        """Print why the run has ended, where that is news; returns the exit code.

        save_problem: why the last checkpoint could not be saved, or None.
        """
        ending = self.ending
        if save_problem and ending.reason != 'failed':
            ending = Ending('failed', f'the run ended at iteration {self.iteration}, but its last checkpoint '
                            f'could not be saved ({save_problem})', 1)
        if ending.reason == 'stopped':
            processes.say(ending.message)
        if ending.reason == 'failed' and processes.is_main:
            print(f'error: {ending.message}', file=sys.stderr, flush=True)
        return ending.exit_code


class Clock:
    """The time of a run's iterations: it stands still during evaluations and saves."""

    def __init__(self):
        self._paused = 0.0  # seconds for which the clock has stood still so far
        self._stopped_at = None  # the time at which it was stopped, while it stands still
        self.start_lap(0)

    def now(self):
        """Seconds since some moment in the past."""
        return (self._stopped_at or time.perf_counter()) - self._paused

    @contextlib.contextmanager
    def paused(self):
        """A context in which the clock stands still."""
        self._stopped_at = time.perf_counter()
        try:
            yield
        finally:
            self._paused += time.perf_counter() - self._stopped_at
            self._stopped_at = None

    def start_lap(self, iteration):
        """Measure from here on."""
        self._lap_from, self._lap_began = iteration, self.now()

    def lap(self, iteration):
        """(iterations since the lap began, seconds that each took); the next lap begins."""
        iterations, seconds = iteration - self._lap_from, self.now() - self._lap_began
        self.start_lap(iteration)
        return iterations, seconds / iterations


# --- hooks --------------------------------------------------------------------------------------------------

class Hook:
    """What acts between the iterations of a run. A subclass defines the methods that it needs.

    All processes call the same methods at the same iteration, so that a method may communicate.
    """

    @property
    def name(self):
        """The name under which checkpoints keep what this hook wants saved."""
        return type(self).__name__

    def is_due(self, run):
        """Whether to call `act` before the next update, the same on all processes."""
        return False

    def act(self, run):
        """Act, when the last update is made and nothing else is under way.

        Returns whether the run has moved to another iteration, from which it then continues.
        """
        return False

    def after_update(self):
        """Called after each update, also after one that the guard has left out."""

    def weights_for_evaluation(self):
        """A context in which the model has the weights with which to evaluate the run."""
        return contextlib.nullcontext()

    def state(self):
        """Plain values that a checkpoint is to keep, for `load_state` of the run that resumes; or None."""

    def load_state(self, state):
        """Take over what `state` returned when the checkpoint was saved."""

    def tensors(self):
        """[(key, tensor)] that a checkpoint is to keep. In a run that resumes, these tensors are filled in place.

        Keys are the hook's own, such as f'{self.name}.{name of a parameter}'. A tensor is a DTensor, or the same
        on all processes that have one of this key.
        """
        return []

    def close(self):
        """Called when the run ends, after its last checkpoint."""

    def restore(self, path, state, processes):
        """Continue from a checkpoint, or say that it does not know this hook. All processes call this.

        path: the checkpoint. state: its state.json.
        """
        tensors, keeps_state = self.tensors(), self.state() is not None
        stored = checkpoint.stored_tensors(path) if tensors else {}
        is_unknown = keeps_state and self.name not in state
        if processes.any(is_unknown or any(key not in stored for key, _ in tensors)):
            processes.say(f'{path} was saved without {self.name}, which starts as in a new run')
            return
        if keeps_state:
            self.load_state(state[self.name])
        if tensors:
            checkpoint.load_tensors(path, tensors)


def hook_states(hooks):
    """{name of a hook: its state} for a checkpoint's state.json."""
    states = {hook.name: hook.state() for hook in hooks}
    return {name: state for name, state in states.items() if state is not None}


def hook_tensors(hooks):
    """[(key in a checkpoint, tensor)] of all hooks."""
    return [named_tensor for hook in hooks for named_tensor in hook.tensors()]


def restore_hooks(hooks, path, state, processes):
    """Let all hooks continue from a checkpoint. state: its state.json."""
    for hook in hooks:
        hook.restore(path, state, processes)


@contextlib.contextmanager
def weights_for_evaluation(hooks):
    """A context in which the model has the weights that the hooks evaluate the run with."""
    with contextlib.ExitStack() as contexts:
        for hook in hooks:
            contexts.enter_context(hook.weights_for_evaluation())
        yield


# --- the folder ---------------------------------------------------------------------------------------------

class RunFolder:
    """out_dir, which one run has for itself from here on until its process ends. All processes make the same calls.

    is_written: whether the run writes there at all; an evaluation alone does not.
    """

    def __init__(self, out_dir, processes, is_written):
        self.out_dir, self.processes, self.is_written = out_dir, processes, is_written
        self.lock = None
        if processes.is_main and is_written and os.path.isdir(out_dir):
            self.lock = checkpoint.lock_folder(out_dir)
        processes.barrier()

    def begin(self, config, resumed, saves_checkpoints):
        """Make room for a run in its folder, and write its config.json.

        resumed: the checkpoint that the run continues, or None. Unless that is one of this folder's own, what an
        earlier run left here moves to a folder inside.
        """
        if self.processes.is_main:
            os.makedirs(self.out_dir, exist_ok=True)
        if saves_checkpoints:
            checkpoint.check_shared(self.out_dir, self.processes)
        if not (self.processes.is_main and self.is_written):
            return
        self.lock = self.lock or checkpoint.lock_folder(self.out_dir)
        continues = resumed and resumed.startswith(os.path.join(self.out_dir, 'ckpt'))
        earlier = None if continues else checkpoint.set_aside(self.out_dir)
        if earlier:
            self.processes.say(f'{self.out_dir} held an earlier run: moved to {earlier}')
        with open(os.path.join(self.out_dir, 'config.json'), 'w', encoding='utf-8') as file:
            json.dump(config | dict(profile=False), file, indent=1)  # a run that repeats this one is not traced
