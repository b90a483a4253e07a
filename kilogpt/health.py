"""Names the process that hung. Of many processes one that stops stops them all, each in a collective that never ends."""
import faulthandler
import json
import os
import socket
import sys
import threading
import time
import traceback

import torch
import torch.distributed as dist

HERE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
FIRST_LIMIT = 1800  # seconds for the first iteration, which may compile


class Watchdog:
    """A thread that ends this process when `beat` has not been called for `limit` seconds, and says who held it up.

    Each process then leaves folder/rank_<rank>.txt (the stacks of its threads) and .json (PyTorch's flight recorder: the last
    collectives), and tells the others through the process group's store where it is; `culprits` says who hung. That one ends first, for
    torchrun to name it too.
    """

    def __init__(self, rank, world_size, folder):
        self.rank, self.world_size, self.folder = rank, world_size, folder
        self.limit, self.last = FIRST_LIMIT, time.monotonic()
        if world_size > 1:
            store = dist.distributed_c10d._get_default_store()
            # a connection of its own, where there can be one: the main thread may hang in the other
            self.store = dist.PrefixStore('watchdog', store.clone() if hasattr(store, 'clone') else store)
            threading.Thread(target=self._watch, daemon=True).start()

    def beat(self, pause=0):
        """There is progress. The next beat is due `limit` seconds after a pause of so many."""
        self.last = time.monotonic() + pause

    def _watch(self):
        while time.monotonic() - self.last <= self.limit:
            time.sleep(min(1, self.limit / 20))
        trace = _flight_recorder()
        at, within_distributed = _main_thread()
        mine = dict(at=at, host=socket.gethostname(), pid=os.getpid(), under_way=[], entered={})
        for entry in trace.get('entries', []):
            if 'checkpoint' in entry['process_group']:  # of the thread that saves
                continue
            group, number = str(entry['process_group']), entry['collective_seq_id']
            mine['entered'][group] = max(number, mine['entered'].get(group, 0))
            if not entry['retired']:
                mine['under_way'].append(entry['profiling_name'])
        mine['waits'] = bool(mine['under_way']) or within_distributed
        try:
            os.makedirs(self.folder, exist_ok=True)
            path = os.path.join(self.folder, f'rank_{self.rank}')
            with open(path + '.json', 'w', encoding='utf-8') as file:
                json.dump(trace, file)
            with open(path + '.txt', 'w', encoding='utf-8') as file:
                faulthandler.dump_traceback(file)
        except OSError as error:
            print(f'warning: no stacks in {self.folder} ({error})', file=sys.stderr)
        reports = self._exchange(mine, seconds=max(5, self.limit / 10))
        hung = culprits(reports, self.world_size)
        if self.rank == min(set(hung) & set(reports) or reports):
            names = ', '.join(f'rank {r}' + (' (host {host}, pid {pid}, at {at})'.format(**reports[r]) if r in reports else ' (silent)')
                              for r in hung)
            waiting = '; '.join(f'rank {r} in {", ".join(reports[r]["under_way"]) or "point-to-point"} at {reports[r]["at"]}'
                                for r in sorted(reports) if r not in hung)
            print(f'error: no progress for {self.limit:g} seconds (comm_timeout). ' + (
                f'Hung: {names}. ' if hung else 'All processes wait for each other. ') + f'Waiting: {waiting or "none yet"}. '
                f'Stacks and the last collectives of each are in {self.folder}', file=sys.stderr, flush=True)
        if self.rank not in hung:
            time.sleep(3)  # torchrun calls the one that ends first the cause
        os._exit(1)

    def _exchange(self, mine, seconds):
        """{rank: report} of those that told theirs within so many seconds."""
        reports, deadline = {self.rank: mine}, time.monotonic() + seconds
        try:
            self.store.set(str(self.rank), json.dumps(mine))
            while len(reports) < self.world_size and time.monotonic() < deadline:
                for rank in set(range(self.world_size)) - reports.keys():
                    if self.store.check([str(rank)]):
                        reports[rank] = json.loads(self.store.get(str(rank)))
                time.sleep(0.1)
        except RuntimeError:  # the process that keeps the store is gone
            pass
        return reports


def culprits(reports, world_size):
    """The ranks that hold up the others: who waits for nobody, else who is silent, else who has entered fewer collectives."""
    silent = [rank for rank in range(world_size) if rank not in reports]
    idle = [rank for rank, report in reports.items() if not report['waits']]
    last = {}
    for report in reports.values():
        for group, number in report['entered'].items():
            last[group] = max(number, last.get(group, 0))
    behind = [rank for rank, report in reports.items()
              if any(number < last[group] for group, number in report['entered'].items())]
    return next((sorted(ranks) for ranks in (idle, silent, behind) if 0 < len(ranks) < world_size), [])


def _main_thread():
    """Where the main thread is (its last line in our own files, and the last of all), and whether that is in torch.distributed."""
    stack = traceback.extract_stack(sys._current_frames()[threading.main_thread().ident])
    ours = [frame for frame in stack if os.path.dirname(frame.filename) in (HERE, os.path.join(HERE, 'data'))]
    at = ' > '.join(dict.fromkeys(f'{os.path.basename(frame.filename)}:{frame.lineno} {frame.name}' for frame in (*ours[-1:], stack[-1])))
    return at, os.path.join('torch', 'distributed', '') in stack[-1].filename


def _flight_recorder():
    """PyTorch's record of the last collectives; {} where this PyTorch keeps none."""
    dump = getattr(torch._C._distributed_c10d, '_dump_fr_trace_json', None)
    return json.loads(dump()) if dump else {}
