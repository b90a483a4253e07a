"""Signals that ask a run to stop, and how all its processes learn of them together."""
import os
import signal
import time
from typing import NamedTuple


class Ending(NamedTuple):
    """Why and how a run ends after its present iteration."""
    reason: str  # 'finished', 'stopped' or 'failed'; 'spikes': go back to a checkpoint instead
    message: str
    exit_code: int


class StopRequest:
    """A signal that asks for a checkpoint and a clean exit, caught from the moment this object is made.

    The signals are SIGTERM, SIGINT (Ctrl-C) and SIGUSR1, which Slurm's --signal=USR1@120 sends before the end
    of a job. A second signal ends the process at once, but within five seconds of the first it counts as the
    same request: Slurm signals every process, and torchrun passes its own signal on to them.
    """
    SIGNALS = 'SIGTERM', 'SIGINT', 'SIGUSR1'

    def __init__(self):
        self._number, self._time = 0, 0.0
        for name in self.SIGNALS:
            if hasattr(signal, name):  # Windows has no SIGUSR1
                signal.signal(getattr(signal, name), self._receive)

    def _receive(self, number, frame):
        if not self._number:
            self._number, self._time = number, time.monotonic()
        elif time.monotonic() - self._time > 5:
            os._exit(128 + number)

    def votes(self):
        """For each of SIGNALS, 1.0 if it has reached this process, else 0.0."""
        return [float(self._number == getattr(signal, name, None)) for name in self.SIGNALS]


class Agreement:
    """What all processes of a run know together, without waiting for each other.

    Each `exchange` sends this process's numbers and takes over the sums of the exchange before, which have
    arrived while the processes computed. At the same exchange all processes therefore know the same:
    stop_signal: the number of a signal that has reached any process; 0 for none.
    save_requested: whether the main process has asked for a checkpoint since the last `forget_save_request`.
    """
    PERIOD = 1.0  # seconds from one exchange to the next; a longer micro-step is not interrupted

    def __init__(self, processes, stop_request):
        self.processes, self.stop_request = processes, stop_request
        self.stop_signal, self.save_requested = 0, False
        self._interval = 1  # micro-steps from one exchange to the next
        self._steps = 0  # micro-steps since the last exchange
        self._time = time.perf_counter()  # of the last exchange
        self._sent = None  # (function that waits for the sums, line) of the last exchange

    def forget_save_request(self):
        """Forget the request, now that a checkpoint is saved."""
        self.save_requested = False

    def is_due(self):
        """Whether to call `exchange` after one more micro-step, the same on all processes."""
        self._steps += 1
        return self._steps >= self._interval

    def exchange(self, request_save=False, line=None):
        """Send this process's numbers; returns a line of the log whose sums have arrived, or None.

        request_save: counts on the main process.
        line: a dict whose `loss_sum` is to be added up. It comes back from the next exchange, or from
        `finish`, with the sum over all processes; where there are several, also with `slowest_rank`, the
        process that waited least for others since the line before, and `lag_ms`, how much longer another did.
        """
        processes, now = self.processes, time.perf_counter()
        seconds_per_step = (now - self._time) / max(1, self._steps)
        self._steps, self._time = 0, now
        waits = [0.0] * processes.world_size
        if line is not None:
            waits[processes.rank] = processes.seconds_waited()
        main_numbers = [0.0, 0.0]
        if processes.is_main:
            main_numbers = [float(request_save), seconds_per_step]
        loss_sum = line['loss_sum'] if line else 0.0
        numbers = [*self.stop_request.votes(), *main_numbers, loss_sum, *waits]
        arrived, self._sent = self._sent, (processes.sum_later(numbers), line)
        return self.finish() if processes.world_size == 1 else self._take_over(arrived)

    def finish(self):
        """Wait for the sums of the last exchange; returns its line, or None."""
        arrived, self._sent = self._sent, None
        return self._take_over(arrived)

    def is_unanimous(self, flag):
        """Whether a flag is set on all processes. Waits for them, and learns of signals on the way."""
        *votes, unset = self.processes.sum_later([*self.stop_request.votes(), float(not flag)])()
        self._count(votes)
        return not unset

    def _count(self, votes):
        for name, number in zip(StopRequest.SIGNALS, votes):
            if number:
                self.stop_signal = self.stop_signal or int(getattr(signal, name))

    def _take_over(self, arrived):
        if arrived is None:
            return None
        wait, line = arrived
        sums, n_signals = wait(), len(StopRequest.SIGNALS)
        save_requests, seconds_per_step, loss_sum, *waits = sums[n_signals:]
        self._count(sums[:n_signals])
        self.save_requested = self.save_requested or save_requests > 0
        self._interval = max(1, int(self.PERIOD / max(seconds_per_step, 1e-6)))
        if line is not None:
            line['loss_sum'] = loss_sum
            if len(waits) > 1:
                line['slowest_rank'] = waits.index(min(waits))
                line['lag_ms'] = 1000 * (max(waits) - min(waits))
        return line
