"""The state of a run: its iteration, its place in the data, its best loss, its clock, and whether it ends."""
import contextlib
import time
from typing import NamedTuple

from data.schedule import DataSchedule


class Ending(NamedTuple):
    """Why and how a run ends."""
    reason: str  # 'finished', 'stopped' or 'failed'
    message: str
    exit_code: int


class Progress:
    """Where a run of train.py is, the same on all its processes.

    config: the keys of train.py. island: the island of this process among those that share the data.
    saved: the state of the checkpoint from which the run continues, or {}.

    iteration: the number of finished updates.
    schedule: the data.schedule.DataSchedule of the run.
    best_val_loss: the lowest validation loss so far; None before the first evaluation.
    val_loss: the validation loss of the current iteration; None if it was not evaluated.
    evaluated_at: the iteration of the last evaluation since the run began, or has moved.
    ending: an Ending once the run is going to end, else None.
    """

    def __init__(self, config, island, saved):
        self.config, self.island = config, island
        self.max_iters, self.eval_only = config['max_iters'], config['eval_only']
        self.block_size = config['block_size']
        self.clock = Clock()
        self.ending = None
        self.best_val_loss = None
        self.move_to(0, tokens=0)
        if saved:
            self.restore(saved)

    def move_to(self, iteration, tokens):
        """Continue at an iteration that has a checkpoint. tokens: the tokens of the data used before it."""
        islands = self.config['islands']
        global_batch = self.config['batch_size'] * self.config['gradient_accumulation_steps'] // islands
        self.iteration = self.saved_iteration = iteration
        self.saved_time = time.monotonic()
        self.schedule = DataSchedule(global_batch, self.block_size, islands, iteration, tokens)
        self.val_loss, self.has_improved, self.evaluated_at = None, False, None
        self.clock.start_lap(iteration)

    def join(self, iteration, parts):
        """Continue at the iteration of another island, and with its parts of the data (DataSchedule.parts)."""
        self.iteration, self.schedule.parts = iteration, parts
        self.saved_iteration = min(self.saved_iteration, iteration)
        self.clock.start_lap(iteration)

    def restore(self, state, tokens=None):
        """Continue from the state of a checkpoint. tokens: the place in the data, if not the state's."""
        self.move_to(state['iteration'], state['tokens'] if tokens is None else tokens)
        self.best_val_loss, self.val_loss = state['best_val_loss'], state['val_loss']

    def progress(self):
        """The values that a checkpoint keeps of this class."""
        return dict(iteration=self.iteration, tokens=self.tokens, val_loss=self.val_loss,
                    best_val_loss=self.best_val_loss)

    # --- the place in the data ------------------------------------------------------------------------------

    @property
    def tokens(self):
        """The number of tokens of the data that were used before the current iteration."""
        return self.schedule.tokens_before(self.iteration)

    def sequences(self, iteration):
        """The numbers of the sequences that this island trains on in an iteration, an integer array."""
        return self.schedule.sequences(iteration, self.island)

    @property
    def batch(self):
        """The number of sequences that this island trains on in the current iteration."""
        return self.schedule.batch_at(self.iteration)

    def change_batch(self, batch):
        """Train on `batch` sequences in each iteration from now on."""
        self.schedule.change_batch(self.iteration, batch)

    # --- what happens ---------------------------------------------------------------------------------------

    def count_update(self):
        """Count a finished update."""
        self.iteration += 1
        self.val_loss, self.has_improved = None, False

    def note_loss(self, val_loss):
        """Record the validation loss of the current iteration. A NaN is never an improvement."""
        self.val_loss = val_loss
        best = float('inf') if self.best_val_loss is None else self.best_val_loss
        self.has_improved = val_loss < best
        if self.has_improved:
            self.best_val_loss = val_loss

    def end(self, reason, message='', exit_code=0):
        """End the run before its next update. If there are several reasons, the first counts."""
        self.ending = self.ending or Ending(reason, message, exit_code)

    def end_if_finished(self):
        """End the run if it has made all its updates, or if it only evaluates."""
        if self.eval_only or self.iteration >= self.max_iters:
            self.end('finished')


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
