"""Islands that are jobs of their own, started at different times, which may be lost and come back.

The jobs exchange through a common server (server.py), which decides which islands take part in an exchange.
An island that was left out joins the others: after their next exchange, it takes over the outer parameters,
the momentum and the place in the data from one of them.
"""
import hashlib
import math
import time
import uuid

from kilogpt.islands.client import IslandClient, parse_address, read_secret
from kilogpt.islands.islands import Islands, IslandSettings
from kilogpt.parallel.apply import refresh
from kilogpt.run import checkpoint

# These must be the same on all islands, as must the keys in islands.FIXED_KEYS.
COMMON_KEYS = ('seed', 'outer_lr', 'outer_momentum', 'outer_delay', 'outer_mix', 'outer_timeout')
COMMON_DEGREES = ('zero_stage', 'dp_replicate', 'tp', 'cp', 'ep', 'pp')


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
        are_senders = self.processes.gather(self._is_sender)
        job = self.processes.share(uuid.uuid4().hex)
        if self._is_sender:
            place, places = int(sum(are_senders[:self.processes.rank])), int(sum(are_senders))
            history = state.get('history') or (0, f'{self.base:09d}')
            self.link = IslandClient(self.settings.outer_store, self.island, place, places, job,
                                     self._common_settings(), self.merged, history, self.processes.say)
        others_are_ahead = self._is_sender and not self.link.register()
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
        history = self.processes.share(self.link.history if self._is_sender else None)
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
                join_state = self._receive()
                self.is_joining = False
                if not self.processes.share(join_state is None):
                    self._take_over(run, join_state)
                    return True
                self._resend()
            line = self._exchange(run)
            if line:
                self.log.exchange(line | dict(wait_s=line['wait_s'] + waited))
            if not self.is_joining:
                return False

    def _end_if_abandoned(self, run):
        """End the run if the server does not answer within comm_timeout."""
        seconds = self.processes.max(self.link.seconds_silent() if self._is_sender else 0)
        if seconds > self.settings.comm_timeout:
            message = (f'outer_store={self.settings.outer_store} did not answer for {seconds:.0f} seconds '
                       '(comm_timeout): start the server again, then continue with --init_from=auto')
            run.end('failed', message, exit_code=1)

    def _has_arrived(self):
        mark = self.link.arrived_mark() if self._is_sender else None
        if not self.signals.all_agree(not self._is_sender or mark):
            return False
        if self.processes.world_size == 1:
            return True
        # After a restart of the server, processes may have the results of two decisions on one exchange.
        greatest = self.processes.max(mark if self._is_sender else -math.inf)
        least = -self.processes.max(-mark if self._is_sender else -math.inf)
        return greatest == least

    def _merge(self, iteration, result, waited):
        if self.processes.share(result is None):
            self._start_joining()
            return None
        line = super()._merge(iteration, result, waited)
        joining = self.processes.share(result.joining)
        if joining and self.island == line['islands'][0] and self._is_sender:
            state = dict(iteration=iteration, base=self.base, merged=self.merged, shares=self.schedule.parts)
            self.link.send_state(state, self.optimizer.snapshot())
        return line

    def _start_joining(self):
        self.is_joining = True
        if self._is_sender:
            self.link.start_joining()
        self.processes.say(f'island {self.island} is behind the others: '
                           'it joins them after their next exchange')

    def _take_over(self, run, join_state):
        """Continue from the state of another island."""
        state = self.processes.share(join_state.state if self._is_sender else None)
        if self._is_sender:
            self.optimizer.load_snapshot(join_state.payload)
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
        if self._is_sender:
            self.link.wait_until_state_is_sent()


def open_islands(processes, layout, config):
    """The hook of a run with islands: those of one torchrun, or the one that this job is. config: the keys."""
    kind = IslandJob if config['outer_store'] else Islands
    return kind(processes, layout, IslandSettings.of(config))
