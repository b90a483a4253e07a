"""What processes tell each other as they train: signals to stop, requests to save, sums for the log."""
import os
import signal
import time

SIGNALS = ('SIGTERM', 'SIGINT', 'SIGUSR1')  # with --signal=USR1@120, Slurm sends SIGUSR1 before a job ends


class StopRequest:
    """Catches the signals that ask for a checkpoint and a clean exit, from its construction on.

    A second signal ends the process at once. A signal within five seconds of the first counts as the same
    request, because Slurm signals every process, and torchrun also passes its own signal on to them.
    """

    def __init__(self):
        self.number = 0  # the number of the signal that this process has received, 0 for none
        self._time = 0.0  # when the signal was received
        for name in SIGNALS:
            if hasattr(signal, name):  # Windows does not have SIGUSR1
                signal.signal(getattr(signal, name), self._receive)

    def _receive(self, number, frame):
        if not self.number:
            self.number, self._time = number, time.monotonic()
        elif time.monotonic() - self._time > 5:
            os._exit(128 + number)


class Signals:
    """Adds up a few numbers over all processes as they train, without waiting for them.

    Each `exchange` sends the numbers of this process, and receives the sums of the previous exchange, which
    have arrived while the processes computed. After the same exchange, all processes therefore agree on:

    stop: the number of a signal that any process has received, 0 for none.
    save_requested: whether the main process has asked for a checkpoint since the last `forget_save_request`.

    watchdog: a Watchdog, which gets a beat in each micro-step. wants_save(): whether the main process asks
    for a checkpoint. write_line(line): logs a line whose sums have arrived.
    """
    PERIOD = 1.0  # seconds between two exchanges; a longer micro-step is not interrupted

    def __init__(self, processes, stop_request, watchdog, wants_save, write_line):
        self.processes, self.stop_request, self.watchdog = processes, stop_request, watchdog
        self.wants_save, self.write_line = wants_save, write_line
        self.stop, self.save_requested = 0, False
        self._interval = 1  # micro-steps between two exchanges
        self._steps = 0  # micro-steps since the last exchange
        self._time = time.perf_counter()  # the time of the last exchange
        self._under_way = None  # (function that waits for the sums, line) of the last exchange

    def poll(self):
        """Before each micro-step: report progress, and exchange about once a second. Returns `stop`."""
        self.watchdog.beat()
        if self._steps >= self._interval:
            self.exchange()
        self._steps += 1
        return self.stop

    def exchange(self, line=None):
        """Send the numbers of this process, and receive the sums of the previous exchange.

        line: a line of the log (Meter.line) whose `loss_sum` and `sums` are to be added up. The next
        exchange, or `flush`, passes the line to `write_line` with the sums over all processes. With several
        processes, the line then also has `slowest_rank`, the process that has waited least for others since
        the previous line, `comm_ms`, how long that process has waited, and `lag_ms`, by how much the longest wait of
        another process exceeds that. `data_ms` and `optimizer_ms` are means over the processes.
        """
        processes, now = self.processes, time.perf_counter()
        seconds_per_step = (now - self._time) / max(1, self._steps)
        self._steps, self._time = 0, now
        numbers = self._signals_here() | dict(save_requests=0.0, seconds_per_step=0.0, loss_sum=0.0)
        if processes.is_main:
            numbers |= dict(save_requests=float(self.wants_save()), seconds_per_step=seconds_per_step)
        waited = 0.0
        if line is not None:
            seconds = processes.seconds_of()
            waited = seconds.pop('others')
            numbers |= dict(loss_sum=line['loss_sum']) | line['sums'] | seconds
        arrived, self._under_way = self._under_way, (processes.sum_later(numbers, waited), line)
        if processes.world_size == 1:
            self.flush()
        else:
            self._receive_sums(arrived)

    def flush(self):
        """Wait for the sums of the last exchange, and log its line."""
        arrived, self._under_way = self._under_way, None
        self._receive_sums(arrived)

    def forget_save_request(self):
        """Clear save_requested, now that a checkpoint is saved."""
        self.save_requested = False

    def all_agree(self, flag):
        """Whether a flag is set on all processes. Waits for the others, and also exchanges signals."""
        numbers = self._signals_here() | dict(unset=float(not flag))
        sums, _ = self.processes.sum_later(numbers)()
        self._note_signals(sums)
        return not sums['unset']

    def _signals_here(self):
        """{name of a signal: 1.0 if this process has received it, else 0.0}."""
        return {name: float(self.stop_request.number == getattr(signal, name, None)) for name in SIGNALS}

    def _note_signals(self, sums):
        for name in SIGNALS:
            if sums[name]:
                self.stop = self.stop or int(getattr(signal, name))

    def _receive_sums(self, arrived):
        if arrived is None:
            return
        wait, line = arrived
        sums, waits = wait()
        self._note_signals(sums)
        self.save_requested = self.save_requested or sums['save_requests'] > 0
        self._interval = max(1, int(self.PERIOD / max(sums['seconds_per_step'], 1e-6)))
        if line is None:
            return
        line['loss_sum'] = sums['loss_sum']
        line['sums'] = {name: sums[name] for name in line['sums']}
        for what in ('data', 'optimizer'):
            line[f'{what}_ms'] = 1000 * sums[what] / len(waits)
        if len(waits) > 1:
            line['slowest_rank'] = waits.index(min(waits))
            line['comm_ms'] = 1000 * min(waits)
            line['lag_ms'] = 1000 * (max(waits) - min(waits))
        self.write_line(line)
