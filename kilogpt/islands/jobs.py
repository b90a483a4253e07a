"""Islands that are jobs of their own, started at different times, which may be lost and come back.

They meet at the server of kilogpt/islands/server.py, which decides who takes part in an exchange. An island that was
left out joins the others: after their next exchange it takes over the outer parameters, the momentum and the
place in the data from one of them.
"""
import hashlib
import math
import time
import uuid

from kilogpt import checkpoint
from kilogpt.islands.islands import Islands
from kilogpt.islands.client import Meeting, parse_address, read_secret
from kilogpt.parallel.apply import refresh

# Keys that must be the same on all islands, besides those of islands.FIXED_KEYS.
COMMON_KEYS = ('seed', 'outer_lr', 'outer_momentum', 'outer_delay', 'outer_mix', 'outer_timeout',
               'zero_stage', 'dp_replicate', 'tp', 'cp', 'ep', 'pp')


class IslandJob(Islands):
    """One of the islands, of which this job's processes are the whole."""

    def __init__(self, processes, layout, config):
        self.address = config['outer_store']
        parse_address(self.address)  # here, since loading a model takes time
        read_secret()
        super().__init__(processes, layout, config, config['island'])
        self.is_on = True
        # Others do not start from island 0's folder, where it may be at work and delete checkpoints.
        self.main_dir = self.out_dir
        self.copies = 1  # which the server sends on
        self.joins = False  # whether this island waits for the others' next exchange, to join after it

    def _connect(self, state):
        """Introduce this island to the server."""
        shapes = [(name, tuple(parameter.shape)) for name, parameter in self.optimizer.parameters]
        sending = self.processes.gather(self._sends)
        job = self.processes.share(uuid.uuid4().hex)
        if self._sends:
            settings = self._keys | {key: self.config[key] for key in COMMON_KEYS}
            settings['training_tokens'] = self.training_tokens
            settings['parameters'] = hashlib.sha256(repr(sorted(shapes)).encode()).hexdigest()[:16]
            self.wire = Meeting(self.address, self.island, int(sum(sending[:self.processes.rank])),
                                int(sum(sending)), job, settings, self.merged,
                                state.get('history') or (0, f'{self.base:09d}'), self.processes.say)
        if self.processes.any(self._sends and not self.wire.hello()):  # others are ahead
            self._join()
        else:
            self._resend()

    def state(self):
        """What a checkpoint's state.json keeps."""
        history = self.processes.share(self.wire.history if self._sends else None)
        return super().state() | dict(history=history)

    def is_due(self, run):
        """Whether there is something to send or to receive before the next update."""
        return self.joins or super().is_due(run)

    def act(self, run):
        """As in Islands. An island that joins others takes over their state, and continues at their iteration."""
        waited = 0.0
        while True:
            if self.joins:
                began = time.perf_counter()
                if not self._wait(run):
                    return False
                waited += time.perf_counter() - began
                joined = self._receive()
                self.joins = False
                if not self.processes.share(joined is None):
                    self._take_over(run, joined)
                    return True
                self._resend()
            line = self._exchange(run)
            if line:
                self.log.exchange(line | dict(wait_s=line['wait_s'] + waited))
            if not self.joins:
                return False

    def _check_others(self, run):
        """End the wait and the run if the server has not answered for too long."""
        seconds = self.processes.max(self.wire.seconds_silent() if self._sends else 0)
        if seconds > self.config['comm_timeout']:
            run.end('failed', f'outer_store={self.address} has not answered for {seconds:.0f} seconds '
                    '(comm_timeout): start it again, then continue with --init_from=auto', exit_code=1)

    def _has_arrived(self):
        mark = self.wire.done() if self._sends else None
        if not self.signals.all_agree(not self._sends or mark):
            return False
        if self.processes.world_size == 1:
            return True
        # If the server was started again, processes may have the results of two exchanges of one number.
        newest = self.processes.max(mark if self._sends else -math.inf)
        return newest == -self.processes.max(-mark if self._sends else -math.inf)

    def _merge(self, iteration, exchanged, waited):
        if self.processes.share(exchanged is None):
            self._join()
            return None
        line = super()._merge(iteration, exchanged, waited)
        joining = self.processes.share(exchanged.joining)
        if joining and self.island == line['islands'][0] and self._sends:
            state = dict(iteration=iteration, base=self.base, merged=self.merged, shares=self.shares.parts)
            self.wire.give(state, self.optimizer.snapshot())
        return line

    def _join(self):
        self.joins = True
        if self._sends:
            self.wire.join()
        self.processes.say(f'island {self.island} is behind the others: '
                           'it joins them after their next exchange')

    def _take_over(self, run, joined):
        """Continue from the state of an island that has given its own."""
        state = self.processes.share(joined.state if self._sends else None)
        if self._sends:
            self.optimizer.restore(joined.payload)
        if self._replicas:
            self.optimizer.share(self._replicas, self.processes.device)
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
        """Send again what was sent but not merged."""
        if self.started > self.merged:
            self._send(self.merged)

    def close(self):
        """Wait until islands that join have the state that they were promised.

        The server notices by itself that this island has ended.
        """
        if self._sends:
            self.wire.leave()
