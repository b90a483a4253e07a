"""Islands that are jobs of their own, started at different times, which may be lost and come back.

The jobs exchange through a common server (server.py), which decides which islands take part in an exchange.
An island that was left out joins the others: after their next exchange, it takes over the outer parameters,
the momentum and the place in the data from one of them.
"""
import hashlib
import time

import torch
import torch.distributed as dist

from kilogpt.islands.client import IslandClient, parse_address, read_secret
from kilogpt.islands.islands import EMPTY, ExchangeResult, Islands, IslandSettings
from kilogpt.parallel.apply import refresh
from kilogpt.run import checkpoint

# These must be the same on all islands, as must the keys in islands.FIXED_KEYS.
COMMON_KEYS = ('seed', 'outer_lr', 'outer_momentum', 'outer_delay', 'outer_mix', 'outer_timeout')
COMMON_DEGREES = ('zero_stage', 'dp_replicate', 'tp', 'cp', 'ep', 'pp')


class ServerLink:
    """The link of an island that is a job: its main process exchanges with the server, for all its processes.

    What the server gets are the payloads of all processes, one after the other. So an island has one
    connection, and its processes cannot learn of different decisions.

    client: the IslandClient on the main process, None on the others.
    """

    def __init__(self, processes, client):
        self.processes, self.client = processes, client

    def start(self, number, payload):
        """Start an exchange. payload: the part of this process, which may be empty."""
        self._size = len(payload)
        whole = self.gather(payload)
        if self.client:
            self.client.start(number, whole)

    def is_done(self):
        """Whether the server has answered."""
        return not self.client or self.client.has_arrived()

    def result(self):
        """An ExchangeResult with the parts of this process; None if the other islands are ahead."""
        facts, parts = self.receive(self._size)
        return facts and ExchangeResult(dict(zip(facts['islands'], parts)), facts['joining'])

    def receive(self, size):
        """(facts, parts) of the server's answer. size: the bytes of each part, which belongs to this process."""
        facts, payloads = self.client.result() if self.client else (None, [])
        facts, count = self.processes.share((facts, len(payloads)))
        sizes = [int(each) for each in self.processes.gather(size)]
        parts = torch.empty(count, size, dtype=torch.uint8)
        if self.client and count:
            by_rank = list(zip(*(payload.split(sizes) for payload in payloads)))
            parts = by_rank[0]
            for rank in range(1, len(sizes)):
                if sizes[rank]:
                    dist.send(torch.stack(by_rank[rank]), rank)
        elif len(parts.flatten()):
            dist.recv(parts, 0)
        return facts, parts

    def gather(self, part):
        """The bytes of all processes, one after the other, on the main process; None on the others."""
        sizes = [int(size) for size in self.processes.gather(len(part))]
        if self.client:
            parts = [part, *(torch.empty(size, dtype=torch.uint8) for size in sizes[1:])]
            for rank in range(1, len(sizes)):
                if sizes[rank]:
                    dist.recv(parts[rank], rank)
            return torch.cat(parts)
        if len(part):
            dist.send(part, 0)
        return None


class IslandJob(Islands):
    """The hook of an island that consists of all processes of this job."""

    def __init__(self, processes, layout, settings):
        parse_address(settings.outer_store)  # bad input must end the run before it loads a model
        read_secret()
        super().__init__(processes, layout, settings, settings.island)
        # No island starts from the folder of island 0, which may be training and deleting checkpoints there.
        self.main_dir = self.out_dir
        self.n_receivers = 1  # the server
        self.is_joining = False  # whether this island waits for the next exchange of the others, to join them

    def _connect(self, state):
        """Introduce this island to the server."""
        client, others_are_ahead = None, False
        if self.processes.is_main:
            history = state.get('history') or (0, f'{self.base:09d}')
            client = IslandClient(self.settings.outer_store, self.island, self._common_settings(),
                                  self.merged, history, self.processes.say)
            others_are_ahead = not client.register()
        self.link = ServerLink(self.processes, client)
        if self.processes.any(others_are_ahead):
            self._start_joining()
        else:
            self._resend()

    def _common_settings(self):
        """Plain values in which all islands must agree."""
        settings = dict(self._fixed_settings)
        settings |= {key: getattr(self.settings, key) for key in COMMON_KEYS}
        settings |= {key: getattr(self.layout, key) for key in COMMON_DEGREES}
        shapes = [(name, tuple(parameter.shape)) for name, parameter in self.optimizer.parameters]
        settings['training_tokens'] = self.training_tokens
        settings['parameters'] = hashlib.sha256(repr(sorted(shapes)).encode()).hexdigest()[:16]
        return settings

    def state(self):
        """What state.json of a checkpoint keeps."""
        history = self.processes.share(self.link.client and self.link.client.history)
        return super().state() | dict(history=history)

    def is_due(self, run):
        """Whether the island joins others, or an exchange starts or ends, before the next update."""
        return self.is_joining or super().is_due(run)

    def act(self, run):
        """Start or finish the exchanges that are due.

        An island that joins others takes over their state and continues at their iteration.
        """
        waited = 0.0
        while True:
            if self.is_joining:
                wait_began = time.perf_counter()
                if not self._wait_for_others(run):
                    return False
                waited += time.perf_counter() - wait_began
                self.processes.waited['others'] += waited
                state, parts = self.link.receive(self.optimizer.snapshot_size() if self._is_sender else 0)
                self.is_joining = False
                if state is not None:
                    self._take_over(run, state, parts[0])
                    return True
                self._resend()
            line = self._exchange(run)
            if line:
                self.log.exchange(line | dict(wait_s=line['wait_s'] + waited))
            if not self.is_joining:
                return False

    def _end_if_abandoned(self, run):
        """End the run if the server does not answer within comm_timeout."""
        seconds = self.processes.max(self.link.client.seconds_silent() if self.link.client else 0)
        if seconds > self.settings.comm_timeout:
            message = (f'outer_store={self.settings.outer_store} did not answer for {seconds:.0f} seconds '
                       '(comm_timeout): start the server again, then continue with --init_from=auto')
            run.end('failed', message, exit_code=1)

    def _merge(self, iteration, result, waited):
        if result is None:
            self._start_joining()
            return None
        line = super()._merge(iteration, result, waited)
        if result.joining and self.island == line['islands'][0]:
            state = dict(iteration=iteration, base=self.base, merged=self.merged, shares=self.schedule.parts)
            whole = self.link.gather(self.optimizer.snapshot() if self._is_sender else EMPTY)
            if self.link.client:
                self.link.client.send_state(state, whole)
        return line

    def _start_joining(self):
        self.is_joining = True
        if self.link.client:
            self.link.client.start_joining()
        self.processes.say(f'island {self.island} is behind the others: '
                           'it joins them after their next exchange')

    def _take_over(self, run, state, snapshot):
        """Continue from the state of another island. snapshot: of its outer optimizer, for this process."""
        if self._is_sender:
            self.optimizer.load_snapshot(snapshot)
        if self._replica_group:
            self.optimizer.broadcast_state(self._replica_group, self.processes.device)
        self.optimizer.reset(to_outer=True)
        refresh(self.parallel)
        self.base = state['base']
        self.started = self.merged = state['merged']
        run.join(state['iteration'], state['shares'])
        self.processes.say(f'island {self.island} joins the others at iteration {run.iteration}')
        with self.signals.watchdog.waits_for_storage():
            self.saver.wait()
            checkpoint.delete_after(self.out_dir, run.iteration, self.processes)

    def _resend(self):
        """Send again the exchange that was started but not merged."""
        if self.started > self.merged:
            self._send(self.merged)

    def close(self):
        """Wait until the server has the state for islands that join.

        The server finds out by itself that this island has ended.
        """
        if self.link.client:
            self.link.client.wait_until_state_is_sent()


def open_islands(processes, layout, config):
    """The hook of a run with islands: those of one torchrun, or the one that this job is. config: the keys."""
    kind = IslandJob if config['outer_store'] else Islands
    return kind(processes, layout, IslandSettings.of(config))
