"""Ends a run in which a process hangs, and says which process and where."""
import contextlib
import datetime
import faulthandler
import itertools
import json
import math
import os
import socket
import sys
import threading
import time
import traceback

import torch
import torch.distributed as dist

STORAGE_LIMIT = 1800  # seconds that storage may take for a checkpoint before a process counts as hung
ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))


class Watchdog:
    """Ends this process if it makes no progress for some time, and says which process hung.

    A thread watches whether `beat` is called. If one process hangs, all others wait in collectives that never
    end. Then each process writes folder/rank_<rank>.txt (the stacks of its threads) and rank_<rank>.json
    (PyTorch's flight recorders, the last collectives), and reports its position through the store of the
    process group. `culprits` finds the ranks that hung. These end first, so that torchrun names them too.

    limit: the longest time in seconds between two beats; three times as long until `first_iteration_done`,
    since a run loads, compiles and connects at its start.
    """

    def __init__(self, processes, folder, limit):
        self.rank, self.world_size, self.folder = processes.rank, processes.world_size, folder
        self.later_limit, self.limit = limit, 3 * limit
        self.last_beat = time.monotonic()
        if self.world_size * processes.replicas > 1:
            store = dist.distributed_c10d._get_default_store() if self.world_size > 1 else dist.HashStore()
            if hasattr(store, 'clone'):  # a second connection, since the main thread may hang in the first
                store = store.clone()
            self.store = dist.PrefixStore('watchdog', store)
            threading.Thread(target=self._watch, daemon=True).start()

    def beat(self):
        """Report progress. The next beat is due within `limit` seconds."""
        self.last_beat = time.monotonic()

    @contextlib.contextmanager
    def waits_for_storage(self):
        """A context in which no beat is due for STORAGE_LIMIT seconds more than usual."""
        self.last_beat = time.monotonic() + STORAGE_LIMIT
        yield
        self.beat()

    @contextlib.contextmanager
    def suspended(self):
        """A context in which no beat is due, for what gives up by itself."""
        self.last_beat = math.inf
        yield
        self.beat()

    def first_iteration_done(self):
        """Apply the usual limit from now on, since everything is compiled."""
        self.limit = self.later_limit

    def _watch(self):
        while time.monotonic() - self.last_beat <= self.limit:
            time.sleep(min(1, self.limit / 20))
        limit = f'{self.limit:g} seconds (comm_timeout)'
        if self.limit != self.later_limit:
            limit = f'{self.limit:g} seconds (3 × comm_timeout until the first iteration is done)'
        seconds = max(5, self.later_limit / 10)  # in which the reports of all processes arrive
        # This thread says what happened. If connections close meanwhile, the main thread must print nothing.
        sys.excepthook = lambda *error: time.sleep(seconds + 60)
        self._write_stacks(exit_after=seconds + 60)
        try:
            hung = self._find_hung(limit, seconds)
        except RuntimeError:  # the process with the store, or the one that collects reports, has ended
            hung = []
        if self.rank not in hung:
            time.sleep(3)  # torchrun names the process that ends first as the cause
        os._exit(1)

    def _write_stacks(self, exit_after):
        """Write the stacks of all threads, and end the process after exit_after seconds in any case."""
        try:
            os.makedirs(self.folder, exist_ok=True)
            file = open(os.path.join(self.folder, f'rank_{self.rank}.txt'), 'w', encoding='utf-8')
        except OSError as error:
            print(f'warning: no stacks in {self.folder} ({error})', file=sys.stderr)
            file = sys.__stderr__
        else:
            faulthandler.dump_traceback(file)
        # NCCL's recorder asks the driver for the state of events while it holds the interpreter's lock. If a
        # kernel hangs, it may wait forever. faulthandler has a thread that does not need the lock.
        faulthandler.dump_traceback_later(exit_after, exit=True, file=file)

    def _find_hung(self, limit, seconds):
        """Report where this process is; returns the ranks that hung.

        The first process to get here collects the reports, prints the error, and tells the others who hung.
        If each of 1,024 processes read all reports, the store would answer a million requests (25 µs each).
        """
        deadline = time.monotonic() + seconds
        at, is_in_distributed = _position_of_main_thread()
        self.store.set(f'position of {self.rank}', json.dumps(report_of({}, at, True)))
        records = _flight_recorders()
        try:
            with open(os.path.join(self.folder, f'rank_{self.rank}.json'), 'w', encoding='utf-8') as file:
                json.dump(records, file)
        except OSError:  # _write_stacks has warned that the folder cannot be written
            pass
        self.store.set(f'report of {self.rank}', json.dumps(report_of(records, at, is_in_distributed)))
        if self.store.add('processes here', 1) > 1:
            self.store.wait(['hung'], datetime.timedelta(seconds=seconds + 30))
            return json.loads(self.store.get('hung'))
        reports = self._collect(deadline)
        hung = culprits(reports, self.world_size)
        print(f'error: no progress for {limit}. {_describe(reports, hung)}'
              f'Stacks and the last collectives of each are in {self.folder}', file=sys.stderr, flush=True)
        self.store.set('hung', json.dumps(hung))
        return hung

    def _collect(self, deadline):
        """{rank: report} of all reports before the deadline; of other ranks their position, if known."""
        reports = {}

        def read(kind):
            for rank in set(range(self.world_size)) - reports.keys():
                if self.store.check([f'{kind} of {rank}']):
                    reports[rank] = json.loads(self.store.get(f'{kind} of {rank}'))

        while len(reports) < self.world_size and time.monotonic() < deadline:
            read('report')
            time.sleep(0.1)
        read('position')
        return reports


def report_of(records, at, is_in_distributed):
    """A report of where a process is and what it waits for, as plain data.

    records: those of _flight_recorders. at, is_in_distributed: as _position_of_main_thread returns them.

    In the report, `waits` says whether the process waits for others, `reached` is {group: number of the last
    collective that the process or its device has begun}, and `unfinished` is {group: (number, name, has
    begun)} of the first collective that is not finished.
    """
    report = dict(at=at, host=socket.gethostname(), pid=os.getpid(), reached={}, unfinished={})
    launches = {}
    for entry in itertools.chain.from_iterable(record.get('entries', []) for record in records.values()):
        backend = entry['profiling_name'].partition(':')[0]
        name, description = entry['process_group']
        if description != 'checkpoint':  # not the collectives of the thread that saves
            # NCCL records the parts of a launch, which never end, then the launch itself under the same
            # number.
            launches[f'{backend}:{name}', entry['collective_seq_id'], entry['p2p_seq_id']] = entry
    # Without TORCH_NCCL_ENABLE_TIMING, the records do not say what a device has begun.
    records_begin = any(entry['time_discovered_started_ns'] for entry in launches.values())
    for (group, number, _), entry in launches.items():
        has_ended = entry['retired'] or entry['state'] == 'completed'
        has_begun = has_ended or entry['state'] == 'started' or group.startswith('gloo') or not records_begin
        reached = report['reached'].get(group, number - 1)
        report['reached'][group] = max(reached, number) if has_begun else reached
        if not has_ended:
            report['unfinished'].setdefault(group, (number, entry['profiling_name'], has_begun))
    report['waits'] = is_in_distributed or bool(report['unfinished'])
    begun_on_device = [has_begun for group, (_, _, has_begun) in report['unfinished'].items()
                       if group.startswith('nccl')]
    if begun_on_device:
        # The main thread runs ahead of its GPU and may wait anywhere, for example in .item(). A GPU that has
        # begun a collective waits in it; otherwise the GPU is busy, or hangs in a kernel.
        report['waits'] = any(begun_on_device)
    return report


def culprits(reports, world_size):
    """The ranks that hold up the others.

    These are the ranks that do not wait for others; without any, those that sent no report; without any,
    those that have not reached a collective in which others wait, and wait in collectives that all have
    reached. A process alone, which is a replica of others, holds them up.
    """
    if world_size == 1:
        return [0]
    busy = [rank for rank, report in reports.items() if not report['waits']]
    silent = [rank for rank in range(world_size) if rank not in reports]
    waits_for = {rank: set() for rank in reports}  # {rank: the ranks that it waits for}
    for rank, report in reports.items():
        for group, (number, _, has_begun) in report['unfinished'].items():
            for other, other_report in reports.items():
                if has_begun and other_report['reached'].get(group, number) < number:
                    waits_for[rank].add(other)
    behind = [rank for rank in set().union(*waits_for.values()) if not waits_for[rank]]
    for ranks in (busy, silent, behind):
        if 0 < len(ranks) < world_size:
            return sorted(ranks)
    return []


def _describe(reports, hung):
    """Sentences that name the ranks that hung and what the others wait for."""
    names, waiting = [], {}  # waiting: {collective and position: ranks}
    for rank in hung:
        where = 'silent'
        if rank in reports:
            where = 'host {host}, pid {pid}, at {at}'.format(**reports[rank])
            for _, name, _ in reports[rank]['unfinished'].values():
                where += f', before {name}'
        names.append(f'rank {rank} ({where})')
    for rank in sorted(reports.keys() - set(hung)):
        collectives = ', '.join(name for _, name, _ in reports[rank]['unfinished'].values())
        where = f'{collectives or "point-to-point"} at {reports[rank]["at"]}'
        waiting.setdefault(where, []).append(rank)
    groups = []
    for where, ranks in waiting.items():
        others = f' and {len(ranks) - 1:,} more' if len(ranks) > 1 else ''
        groups.append(f'rank {ranks[0]}{others} in {where}')
    cause = f'Hung: {", ".join(names)}. ' if hung else 'All processes wait for each other. '
    return f'{cause}Waiting: {"; ".join(groups) or "none yet"}. '


def _is_ours(path):
    """Whether a file belongs to this repository: a script, or a file of data/ or kilogpt/."""
    folder, _, rest = os.path.relpath(path, ROOT).partition(os.sep)
    return folder in ('data', 'kilogpt') or not rest


def _position_of_main_thread():
    """(innermost line in kiloGPT's files > innermost line, whether the latter is in torch.distributed)."""
    stack = traceback.extract_stack(sys._current_frames()[threading.main_thread().ident])
    ours = [frame for frame in stack if _is_ours(frame.filename)]
    lines = [f'{os.path.basename(frame.filename)}:{frame.lineno} {frame.name}'
             for frame in (*ours[-1:], stack[-1])]
    is_in_distributed = os.path.join('torch', 'distributed', '') in stack[-1].filename
    return ' > '.join(dict.fromkeys(lines)), is_in_distributed


def _flight_recorders():
    """PyTorch's records of the last collectives, {'cpu': record, 'nccl': record}, as far as they exist."""
    records = {}
    for name, function in dict(cpu='_dump_fr_trace_json', nccl='_dump_nccl_trace_json').items():
        dump = getattr(torch._C._distributed_c10d, function, None)  # NCCL's exists only in builds for CUDA
        if dump:
            records[name] = json.loads(dump())
    return records
