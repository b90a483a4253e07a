"""What can end a run, or must not: signals, updates that are not finite, and processes that hang."""
import faulthandler
import json
import math
import os
import signal
import socket
import sys
import threading
import time
import traceback
from typing import NamedTuple

import torch
import torch.distributed as dist


class Ending(NamedTuple):
    """Why and how a run ends after its present iteration."""
    reason: str  # 'finished', 'stopped' or 'failed'
    message: str
    exit_code: int


class StopRequest:
    """A signal that asks for a checkpoint and a clean exit, caught from the moment this object is made.

    The signals are SIGTERM, SIGINT (Ctrl-C) and SIGUSR1, which Slurm's --signal=USR1@120 sends before the end
    of a job. A second signal ends the process at once, but within five seconds of the first it counts as the
    same request: Slurm signals every process, and torchrun passes its own signal on to them.
    """

    def __init__(self):
        self._number, self._time = 0, 0.0
        for name in ('SIGTERM', 'SIGINT', 'SIGUSR1'):
            if hasattr(signal, name):  # Windows has no SIGUSR1
                signal.signal(getattr(signal, name), self._receive)

    def _receive(self, number, frame):
        if not self._number:
            self._number, self._time = number, time.monotonic()
        elif time.monotonic() - self._time > 5:
            os._exit(128 + number)

    def poll(self, processes):
        """The number of a signal that has reached any process, the same on all of them; 0 for none."""
        return int(processes.max(self._number))


# --- updates that are not finite ----------------------------------------------------------------------------

class Update(NamedTuple):
    """An update by the optimizer. The device itself leaves the update out if its gradient is not finite."""
    iteration: int  # finished updates before this one
    lr: float
    loss_sum: torch.Tensor  # the losses of this process's tokens, added up
    grad_norm: torch.Tensor  # the norm of all gradients on all processes


class NonfiniteUpdates:
    """Decides whether a run continues where the loss or gradient of an update may be NaN or infinite.

    on_nonfinite: 'abort', or 'skip' (up to 9 in a row). parallel: the Parallel that sums losses.
    report(update, what): writes down the update's batch and returns the name of the file.
    has_scaler: the loss decides, since a gradient scaler (float16) mends gradients that overflow.
    """

    def __init__(self, on_nonfinite, parallel, report, has_scaler, skipped=0, skipped_in_a_row=0):
        self.on_nonfinite, self.has_scaler = on_nonfinite, has_scaler
        self.parallel, self.report = parallel, report
        self.skipped, self.skipped_in_a_row = skipped, skipped_in_a_row
        self.problem = None  # why the run cannot continue, once an update was fatal

    def check(self, update):
        """'applied', 'skipped' or 'fatal', the same on all processes; 'applied' for an update of None.

        Waits until the device has made or skipped the update.
        """
        if update is None:
            return 'applied'
        # The norm is that of all gradients on all processes, but each process has a loss of its own.
        value = self.parallel.sum_losses(update.loss_sum) if self.has_scaler else update.grad_norm.item()
        if math.isfinite(value):
            self.skipped_in_a_row = 0
            return 'applied'
        quantity = 'loss' if self.has_scaler else 'gradient norm'
        what = f'{quantity} of iteration {update.iteration + 1} is {value}'
        path = self.report(update, what)
        if self.on_nonfinite == 'skip' and self.skipped_in_a_row < 9:
            self.skipped += 1
            self.skipped_in_a_row += 1
            self.parallel.processes.say(
                f'the {what}: update skipped ({self.skipped} so far), its batch is in {path}')
            return 'skipped'
        after = f', after {self.skipped_in_a_row} that were skipped' if self.skipped_in_a_row else ''
        self.problem = (f'the {what}{after}: the update was not made, its batch is in {path}; '
                        'try a lower learning_rate, or --on_nonfinite=skip if it is the data')
        return 'fatal'


# --- processes that hang ------------------------------------------------------------------------------------

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
OUR_FOLDERS = [os.path.join(ROOT, name).rstrip(os.sep) for name in ('', 'data', 'kilogpt')]


class Watchdog:
    """A thread that ends this process when `beat` has not been called for a time, and says which one hung.

    One process that stops halts all others, each in a collective that never ends. Each process then writes
    folder/rank_<rank>.txt (the stacks of its threads) and .json (PyTorch's flight recorder: the last
    collectives), and tells the others through the process group's store where it is; `culprits` finds the
    ranks that hung. Those end first, so that torchrun names them too.

    limit: seconds between two beats. first_limit: the same until `first_iteration_done`, since the first
    iteration may compile.
    """

    def __init__(self, processes, folder, limit, first_limit=1800):
        self.rank, self.world_size, self.folder = processes.rank, processes.world_size, folder
        self.limit, self.later_limit = first_limit, limit
        self.last_beat = time.monotonic()
        if self.world_size > 1:
            store = dist.distributed_c10d._get_default_store()
            if hasattr(store, 'clone'):  # a second connection: the main thread may hang in the first
                store = store.clone()
            self.store = dist.PrefixStore('watchdog', store)
            threading.Thread(target=self._watch, daemon=True).start()

    def beat(self, pause=0):
        """Report progress. The next beat is due within `limit` + `pause` seconds."""
        self.last_beat = time.monotonic() + pause

    def first_iteration_done(self):
        """Apply the limit of later iterations, now that everything is compiled."""
        self.limit = self.later_limit

    def _watch(self):
        while time.monotonic() - self.last_beat <= self.limit:
            time.sleep(min(1, self.limit / 20))
        trace = _flight_recorder()
        own_report = _report_of_this_process(trace)
        self._write_stacks(trace)
        reports = self._exchange(own_report, seconds=max(5, self.limit / 10))
        hung = culprits(reports, self.world_size)
        # One process speaks: the first rank that hung, or the first of all if none that hung has reported.
        if self.rank == min(set(hung) & set(reports) or reports):
            print(f'error: no progress for {self.limit:g} seconds (comm_timeout). '
                  f'{_describe(reports, hung)}Stacks and the last collectives of each are in {self.folder}',
                  file=sys.stderr, flush=True)
        if self.rank not in hung:
            time.sleep(3)  # torchrun calls the process that ends first the cause
        os._exit(1)

    def _write_stacks(self, trace):
        path = os.path.join(self.folder, f'rank_{self.rank}')
        try:
            os.makedirs(self.folder, exist_ok=True)
            with open(path + '.json', 'w', encoding='utf-8') as file:
                json.dump(trace, file)
            with open(path + '.txt', 'w', encoding='utf-8') as file:
                faulthandler.dump_traceback(file)
        except OSError as error:
            print(f'warning: no stacks in {self.folder} ({error})', file=sys.stderr)

    def _exchange(self, own_report, seconds):
        """Send this process's report; returns {rank: report}, those that arrive within `seconds`."""
        reports = {self.rank: own_report}
        deadline = time.monotonic() + seconds
        try:
            self.store.set(str(self.rank), json.dumps(own_report))
            while len(reports) < self.world_size and time.monotonic() < deadline:
                for rank in set(range(self.world_size)) - reports.keys():
                    if self.store.check([str(rank)]):
                        reports[rank] = json.loads(self.store.get(str(rank)))
                time.sleep(0.1)
        except RuntimeError:  # the process that keeps the store has ended
            pass
        return reports


def culprits(reports, world_size):
    """The ranks that hold up the others.

    They are those that wait for nobody; if there are none, those that sent no report; and if all did, those
    that are in an earlier collective than others.
    """
    silent = [rank for rank in range(world_size) if rank not in reports]
    busy = [rank for rank, report in reports.items() if not report['waits']]
    newest = {}  # {process group: number of the last collective that any rank has entered}
    for report in reports.values():
        for group, number in report['entered'].items():
            newest[group] = max(number, newest.get(group, 0))
    behind = []
    for rank, report in reports.items():
        if any(number < newest[group] for group, number in report['entered'].items()):
            behind.append(rank)
    for ranks in (busy, silent, behind):
        if 0 < len(ranks) < world_size:
            return sorted(ranks)
    return []


def _report_of_this_process(trace):
    """Where this process is and what it waits for, as plain data."""
    at, is_in_distributed = _position_of_main_thread()
    report = dict(at=at, host=socket.gethostname(), pid=os.getpid(), under_way=[], entered={})
    for entry in trace.get('entries', []):
        if 'checkpoint' in entry['process_group']:  # the collectives of the thread that saves
            continue
        group, number = str(entry['process_group']), entry['collective_seq_id']
        report['entered'][group] = max(number, report['entered'].get(group, 0))
        if not entry['retired']:
            report['under_way'].append(entry['profiling_name'])
    report['waits'] = bool(report['under_way']) or is_in_distributed
    return report


def _describe(reports, hung):
    """Sentences that name the ranks that hung and what the others wait for."""
    names, waiting = [], []
    for rank in hung:
        report = reports.get(rank)
        names.append(f'rank {rank} (host {report["host"]}, pid {report["pid"]}, at {report["at"]})' if report
                     else f'rank {rank} (silent)')
    for rank in sorted(reports.keys() - set(hung)):
        collectives = ', '.join(reports[rank]['under_way']) or 'point-to-point'
        waiting.append(f'rank {rank} in {collectives} at {reports[rank]["at"]}')
    cause = f'Hung: {", ".join(names)}. ' if hung else 'All processes wait for each other. '
    return f'{cause}Waiting: {"; ".join(waiting) or "none yet"}. '


def _position_of_main_thread():
    """(last line in our own files > last line, whether the latter is in torch.distributed)."""
    stack = traceback.extract_stack(sys._current_frames()[threading.main_thread().ident])
    ours = [frame for frame in stack if os.path.dirname(frame.filename) in OUR_FOLDERS]
    lines = [f'{os.path.basename(frame.filename)}:{frame.lineno} {frame.name}'
             for frame in (*ours[-1:], stack[-1])]
    is_in_distributed = os.path.join('torch', 'distributed', '') in stack[-1].filename
    return ' > '.join(dict.fromkeys(lines)), is_in_distributed


def _flight_recorder():
    """PyTorch's record of the last collectives; {} where this version of PyTorch keeps none."""
    dump = getattr(torch._C._distributed_c10d, '_dump_fr_trace_json', None)
    return json.loads(dump()) if dump else {}
