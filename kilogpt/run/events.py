"""What happens to each process of a run, one JSON line for each event, in out_dir/events/rank_*.jsonl."""
import atexit
import contextlib
import json
import os
import socket
import statistics
import sys
import time
from collections import deque

from kilogpt.parallel.errors import follows_from_another
from kilogpt.run import Hook

WINDOW, LEAST = 64, 8  # the last iterations whose median is the usual time, and the least that have one
FACTOR, MARGIN = 3.0, 0.1  # a slow iteration takes so many times the usual time, and so many seconds more
SIGN_OF_LIFE = 10  # seconds from one change of a file's time to the next, by which a killed process is dated


class Events(Hook):
    """Writes the events of this process: start, first_step, save, save_failed, slow, rollback, error, lost, end.

    Each line has `event`, `time` (Unix time, by the clock of this machine), `rank`, `host` and `iter`. `slow` has
    `seconds` and `usual`, and on a CPU how long of them the process has waited for others and for data. `lost` is an
    error that follows from the end of another process. A process that is killed leaves no `end`.
    run: the Run.
    """

    def __init__(self, run):
        self.run, self.saver, self.processes = run, run.saver, run.processes
        self.started = time.time() - (time.perf_counter() - run.meter.started)  # of the process
        self.host = socket.gethostname()
        self.path = os.path.join(run.cluster.folder.path, 'events', f'rank_{run.processes.rank:05d}.jsonl')
        self.iteration, self.saved, self.problem = run.iteration, run.saved_iteration, None
        self.lap_began, self.alive_at = None, 0.0
        self.times = deque(maxlen=WINDOW)
        self.is_open = True
        self._write('start', self.started, pid=os.getpid(), ranks=run.processes.world_size)
        self._call_before = sys.excepthook
        sys.excepthook = self._note_error
        atexit.register(self._note_exit)

    def after_update(self):
        now = self.run.clock.now()
        if self.lap_began is None:
            self._write('first_step', iteration=self.run.iteration + 1, seconds=time.time() - self.started)
        else:
            self._note_time(now - self.lap_began)
        self.lap_began, self.waited = now, dict(self.processes.waited)
        self._note_saves()
        if self.run.iteration < self.iteration:
            self._write('rollback', what=f'back from iteration {self.iteration + 1}')
        self.iteration = self.run.iteration
        if time.monotonic() - self.alive_at > SIGN_OF_LIFE and self.is_open:
            self.alive_at = time.monotonic()
            with contextlib.suppress(OSError):  # the next event warns
                os.utime(self.path)

    def _note_time(self, seconds):
        """Note a slow iteration. seconds: of the last one, without evaluation and saving."""
        usual = statistics.median(self.times) if len(self.times) >= LEAST else float('inf')
        if seconds > FACTOR * usual and seconds > usual + MARGIN:
            waited = {}
            if self.processes.device.type != 'cuda':  # where the host does not know how long the device waits
                waited = {f'waited_for_{what}': self.processes.waited[what] - self.waited[what]
                          for what in ('others', 'data')}
            self._write('slow', iteration=self.run.iteration + 1, seconds=seconds, usual=usual, **waited)
        self.times.append(seconds)

    def _note_saves(self):
        run = self.run
        if run.saved_iteration > self.saved:
            self._write('save', time.time() - (time.monotonic() - run.saved_time), run.saved_iteration)
        self.saved = run.saved_iteration
        if self.saver.problem != self.problem and self.saver.problem:
            self._write('save_failed', what=str(self.saver.problem))
        self.problem = self.saver.problem

    def _note_error(self, kind, error, trace):
        """sys.excepthook: write the error that ends this process, and then print it as before."""
        follows = self.processes.world_size > 1 and follows_from_another(error)
        self._write('lost' if follows else 'error', what=' '.join(f'{kind.__name__}: {error}'.split()))
        self.is_open = False
        self._call_before(kind, error, trace)

    def _note_exit(self):
        """At the exit of Python: write the sentence that has ended this process before its run was over."""
        if self.is_open:
            self._write('error', what=' '.join(str(getattr(sys, 'last_value', 'the process exits')).split()))

    def close(self):
        self._note_saves()
        ending = self.run.ending
        if ending.reason == 'failed':
            self._write('error', what=ending.message)
        self._write('end', what=ending.reason)
        self.is_open = False

    def _write(self, event, at=None, iteration=None, **values):
        if not self.is_open:
            return
        line = dict(event=event, time=round(at or time.time(), 3), rank=self.processes.rank, host=self.host,
                    iter=self.run.iteration if iteration is None else iteration, **values)
        try:
            os.makedirs(os.path.dirname(self.path), exist_ok=True)
            with open(self.path, 'ab+') as file:
                if file.tell():  # a machine that failed may have left half a line
                    file.seek(-1, os.SEEK_END)
                    if file.read() != b'\n':
                        file.write(b'\n')
                file.write(json.dumps(line).encode() + b'\n')
        except OSError as error:
            self.is_open = False
            print(f'warning: {self.path} could not be written ({error}). Training continues without the events of '
                  f'rank {self.processes.rank}', file=sys.stderr, flush=True)
