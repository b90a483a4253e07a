"""Islands: groups of processes that train apart and exchange their parameters now and then.

DiLoCo (Douillard et al. 2023, arXiv 2311.08105): each island makes `outer_interval` updates on its share of
the data. The mean of the islands' parameters then is what an outer optimizer, SGD with Nesterov momentum,
takes for the gradient's direction. Streaming DiLoCo (Douillard et al. 2025, arXiv 2501.18512) exchanges the
parameters in fragments, one after the other, while the islands train on.

Each process exchanges the parts of the parameters that it holds, with the processes of its rank in the other
islands. Between them is a wire:

    wire.start(number, payload)   send the payload (uint8, on the CPU) of exchange 0, 1, ...; returns at once
    wire.done()                   whether the payloads of the others have arrived
    wire.result()                 wait for them, and return an Exchanged

Islands of one torchrun have the wire World. jobs.py is about islands that are jobs of their own.
"""
import contextlib
import os
import signal
import time

import torch
import torch.distributed as dist

from kilogpt import checkpoint
from kilogpt.islands.client import Exchanged
from kilogpt.islands.outer_optimizer import OuterOptimizer
from kilogpt.parallel.apply import refresh
from kilogpt.run import Hook
from kilogpt.settings import OUTER_INTERVAL
from data.shares import ranges

# Keys that must be the same for a run to continue to the bit from a checkpoint with islands.
FIXED_KEYS = ('islands', 'outer_interval', 'outer_fragments', 'outer_compress', 'batch_size',
              'gradient_accumulation_steps', 'block_size')


class World:
    """The wire between islands of one torchrun: an all-gather."""

    def __init__(self, processes):
        self.islands, self.between = processes.islands, processes.between
        self.group = self.between.connect('exchange') if self.between else None

    def start(self, number, payload):
        self._payloads, self._work = [payload], None
        if self.group and len(payload):
            self._payloads = [torch.empty_like(payload) for _ in range(self.islands)]
            self._sent = payload  # must outlive the work
            self._work = self.group.allgather([self._payloads], [payload])
        elif self.group:
            self._payloads *= self.islands

    def done(self):
        return self._work is None or self._work.is_completed()

    def result(self):
        if self._work:
            self._work.wait()
        return Exchanged(dict(enumerate(self._payloads)), [])

    def end(self, started):
        """Tell the other islands that this one ends, and how many exchanges it has started."""
        self.between.leave_note('end', str(started))

    def is_abandoned(self, number):
        """Whether an island has ended that has not started exchange `number`."""
        return any(int(started) <= number for started in self.between.read_notes('end').values())


# --- the islands of a run -----------------------------------------------------------------------------------

class Islands(Hook):
    """What a run of train.py does with the other islands; nothing, where it has none and no outer optimizer.

    config: the keys of train.py. `out_dir`: the folder of this island, where that of island 0 is `main_dir`.
    """

    def __init__(self, processes, layout, config, island=None):
        self.processes, self.layout, self.config = processes, layout, config
        self.islands = config['islands']
        self.is_on = self.islands > 1 or config['outer_interval'] > 0
        self.interval, self.delay = config['outer_interval'] or OUTER_INTERVAL, config['outer_delay']
        self.island = processes.island if island is None else island
        self.out_dir = self.main_dir = config['out_dir']
        if self.island:
            self.out_dir = os.path.join(self.main_dir, f'island_{self.island}')
        # This process among those of all islands.
        self.rank = self.island * processes.world_size + processes.rank
        self.copies = self.islands - 1  # of what a process sends: one for each other island
        self.base = 0  # the iteration from which exchanges are counted
        self.started = self.merged = 0  # exchanges
        self.resend_from = None  # the first exchange that an island of the checkpoints had not finished
        self.continues = False  # whether the checkpoint is one of these islands
        self._keys = {key: config[key] for key in FIXED_KEYS}
        self.optimizer = None

    name = 'islands'

    # --- set-up ---------------------------------------------------------------------------------------------

    def find_checkpoint(self):
        """(path, state) of the checkpoint from which to resume; (None, {}) without one.

        Each island has its own. Islands that were saved in different rounds cannot go on together: with E the
        exchanges that an island has finished and S those that it has started, E <= M <= S must hold for one M
        on all islands. Then those that had finished exchange M - 1 send again what they sent. Without such
        checkpoints all islands begin with the parameters of the newest one of island 0.
        """
        found = None
        if self.is_on:
            found, self.resend_from = find_together(self.processes, self.out_dir, self._keys)
        self.continues = bool(found and found[0])
        return found or checkpoint.find_undamaged(self.main_dir, self.processes)

    def attach(self, parallel, model):
        """Make the outer parameters of a model that is laid out. model: the whole one."""
        self.parallel = parallel
        if not self.is_on:
            return
        trained = parallel.optimizer_parameters()
        others = [(name, p) for name, p in parallel.named_parameters() if not p.requires_grad]
        fragments, prefix = self.config['outer_fragments'], model.split_plan['blocks'] + '.'

        def fragment_of(name):
            """Neighbouring blocks are in different fragments; what is not in a block is in the first."""
            block = int(name.removeprefix(prefix).partition('.')[0]) + 1 if name.startswith(prefix) else 0
            return block % fragments

        self.optimizer = OuterOptimizer(
            trained + others, fragment_of, fragments, self.config['outer_lr'], self.config['outer_momentum'],
            self.config['outer_compress'], self.config['outer_mix'], self.config['outer_offload'])
        # Of replicas within the island one exchanges, and tells the others.
        self._replicas, self._sends = None, True
        if self.layout.zero_stage == 0 and self.processes.world_size > 1:
            self._replicas, self._sends = dist.group.WORLD, self.processes.is_main
        elif self.layout.dp_replicate > 1:
            mesh = self.processes.mesh['dp_replicate']
            self._replicas, self._sends = mesh.get_group(), mesh.get_local_rank() == 0

    def parameters(self):
        """[(name, parameter)] of a checkpoint's model: those that all islands share."""
        if self.islands == 1:
            return self.parallel.named_parameters()
        names = [name for name, _ in self.optimizer.parameters]
        return list(zip(names, self.optimizer.state['outer']))

    def tensors(self):
        """[(key, tensor)] of what a checkpoint holds of the islands, besides its model."""
        found = []
        for index, (name, parameter) in enumerate(self.optimizer.parameters):
            kinds = {kind: tensors[index] for kind, tensors in self.optimizer.state.items()}
            if self.islands > 1:  # the outer parameters are those of the checkpoint's model
                kinds['outer'] = parameter.detach()
            found += [(f'outer.{name}.{kind}', tensor) for kind, tensor in kinds.items()]
        return found

    def restore(self, path, state, processes):
        """Load the tensors of a checkpoint: all of them, or the momentum alone if other islands saved it."""
        if self.name in state:
            tensors = self.tensors()
            if not self.continues:
                tensors = [(key, tensor) for key, tensor in tensors if key.endswith('.momentum')]
            checkpoint.load_tensors(path, tensors)

    def begin(self, run, signals, saver, log, saved, has_loaded, training_tokens):
        """Begin or continue a run; connects the islands.

        saved: the state of a checkpoint that the run continues, or {}. has_loaded: whether a checkpoint was
        loaded, which sets the outer parameters; otherwise the island's parameters do.
        training_tokens: the dataset's, which islands share.
        """
        self.training_tokens, self.signals, self.saver, self.log = training_tokens, signals, saver, log
        self.shares = run.shares
        state = saved.get(self.name, {}) if self.continues else {}
        self.shares.parts = state.get('shares') or self.shares.parts
        if not self.is_on:
            return
        self.base = state.get('base', run.iteration)
        self.started, self.merged = state.get('started', 0), state.get('merged', 0)
        if not self.continues:
            self.optimizer.reset(to_outer=has_loaded and self.islands > 1)
        refresh(self.parallel)
        self._connect(state)

    def _connect(self, state):
        """Make the wire, and send again what may not have arrived. state: a checkpoint's, or {}."""
        if self.processes.between and self.processes.is_main:
            self.processes.between.leave_note('saved', str(self.started))
        self.wire = World(self.processes)  # waits for all islands
        for number in range(self.started if self.resend_from is None else self.resend_from, self.started):
            self._send(number)
            if number < self.merged:
                self._receive()

    def state(self):
        """What a checkpoint's state.json keeps."""
        return dict(keys=self._keys, base=self.base, started=self.started, merged=self.merged,
                    shares=self.shares.parts)

    # --- running --------------------------------------------------------------------------------------------

    def bytes_on(self, device):
        """Bytes of a device's memory that the outer optimizer takes."""
        return self.optimizer.bytes_on(device) if self.optimizer else 0

    def describe(self):
        """Lines that say how the islands work together; none where there is nothing to exchange."""
        if not self.is_on:
            return []
        size = sum(outer.nbytes for outer in self.optimizer.of_fragment(0).values())
        return [f'islands     {self.islands} of {self.processes.world_size} process(es); {size / 1e6:,.1f} MB on a '
                f'rank in the first of {self.config["outer_fragments"]} fragment(s), each exchanged every '
                f'{self.interval} iterations; outer_compress={self.config["outer_compress"]}']

    def is_due(self, run):
        """Whether there is something to send or to receive before the next update."""
        return self._count(run.iteration) > self.started or self._is_to_merge(run.iteration)

    def _count(self, iteration):
        """How many exchanges have started when an iteration begins."""
        return (iteration - self.base) * self.config['outer_fragments'] // self.interval

    def _begin_of(self, number):
        """The iteration before which exchange `number` starts."""
        return self.base - (-(number + 1) * self.interval // self.config['outer_fragments'])

    def _is_to_merge(self, iteration):
        return self.started > self.merged and iteration >= self._begin_of(self.merged) + self.delay

    def act(self, run):
        """Exchange with the other islands what is due, and log it."""
        line = self._exchange(run)
        if line:
            self.log.exchange(line)
        return False

    def _exchange(self, run):
        """Send and receive what is due before the next update; returns a line for the log, or None.

        A signal to stop ends the wait for other islands: what was sent waits in the checkpoint.
        """
        iteration = run.iteration
        if self._count(iteration) > self.started:
            self.optimizer.encode(self.started)
            self._send(self.started)
            self.started += 1
        if not self._is_to_merge(iteration):
            return None
        began = time.perf_counter()
        if not self._wait(run):
            return None
        return self._merge(iteration, self._receive(), time.perf_counter() - began)

    def _send(self, number):
        if self._sends:
            payload = self.optimizer.payload(number)
            self._bytes_sent = len(payload) * self.copies
            self.wire.start(number, payload)
        else:
            self._bytes_sent = 0

    def _receive(self):
        return self.wire.result() if self._sends else Exchanged({}, [])

    def _wait(self, run):
        """Wait until all processes have what other islands send; False if something else ends the wait."""
        passes = 0
        while not self._has_arrived():
            if self.signals.stop or run.ending:
                return False
            self.signals.watchdog.beat()
            passes += 1
            if passes >= 500 and passes % 20 == 0:  # once a second
                self._check_others(run)
            time.sleep(0.002 if passes < 500 else 0.05)
        return True

    def _has_arrived(self):
        return self.signals.all_agree(not self._sends or self.wire.done())

    def _check_others(self, run):
        """Ask this process to stop if an island has ended without its part: that takes the others along."""
        if self.processes.is_main and self.wire.is_abandoned(self.merged):
            signal.raise_signal(signal.SIGTERM)

    def _merge(self, iteration, exchanged, waited):
        """Take the outer step; returns the line for the log."""
        number, means, distance, size = self.merged, {}, 0.0, 0.0
        members, joining = self.processes.share((sorted(exchanged.payloads), exchanged.joining))
        if self._sends:
            means, distance, size = self.optimizer.mean(number, exchanged.payloads)
        if self._replicas:
            means = self.optimizer.share_means(number, means, self._replicas, self.processes.device)
        self.optimizer.step(means)
        refresh(self.parallel)
        since, until = self._begin_of(number - 1), self._begin_of(number)
        sequences = ranges(self.shares.given(since, until, members))
        self.shares.change(iteration, sorted({*members, *joining}), since, members)
        self.merged += 1
        sums = [self.processes.sum(value) for value in (distance, size, self._bytes_sent)]
        return dict(iter=iteration, exchange=number, fragment=number % self.config['outer_fragments'],
                    bytes_sent=int(sums[2]), wait_s=waited, islands=members,
                    distance=(sums[0] / sums[1]) ** 0.5, sequences=sequences)

    def close(self):
        """Tell the other islands that this one has ended, so that they do not wait for it."""
        if self.islands > 1 and self.processes.is_main:
            self.wire.end(self.started)

    @contextlib.contextmanager
    def weights_for_evaluation(self):
        """A context in which the model has the parameters that all islands share."""
        if self.islands > 1:
            self.optimizer.swap()
            refresh(self.parallel)
        yield
        if self.islands > 1:
            self.optimizer.swap()
            refresh(self.parallel)


def newest_together(counts):
    """The choice of one checkpoint on each island from which all can continue, as new as possible, or None.

    counts: for each island, [(exchanges that it had finished, those that it had started)], the newest first.
    Returns an index for each island; see Islands.find_checkpoint.
    """
    for together in sorted({finished for options in counts for finished, _ in options}, reverse=True):
        chosen = []
        for options in counts:
            fitting = [index for index, (finished, started) in enumerate(options)
                       if finished <= together <= started]
            chosen += fitting[:1]
        if len(chosen) == len(counts):
            return chosen
    return None


def find_together(processes, out_dir, keys):
    """((path, state) of this island's checkpoint that goes with those of the others, or None; an exchange).

    The exchange is the first that one of the islands had not finished. (None, {}) instead of a checkpoint if
    the run ended within its first save, so that it begins again. keys: those that the state must have.
    """
    has_begun = os.path.exists(os.path.join(out_dir, 'config.json'))
    is_unsaved = has_begun and not checkpoint.find(out_dir)
    options = []  # (path, state) of this island's checkpoints, the newest first
    for path in checkpoint.find(out_dir) if processes.is_main else ():
        with contextlib.suppress(OSError, ValueError):  # damaged
            state = checkpoint.read_state(path)
            if state.get('islands', {}).get('keys') != keys:
                break  # what is older is of another run
            options.append((path, state))
    options = processes.share(options)
    while True:
        counts = [(state['islands']['merged'], state['islands']['started']) for _, state in options]
        of_islands, are_unsaved = zip(*processes.tell_islands([counts, is_unsaved]))
        chosen = newest_together(of_islands)
        if chosen is None and of_islands[0] and any(are_unsaved):
            return (None, {}), None
        if chosen is None:
            return None, None
        path, state = options[chosen[processes.island]]
        problem = checkpoint.damage_on_any(path, processes)
        if not any(processes.tell_islands(problem)):
            return (path, state), min(island[choice][0] for island, choice in zip(of_islands, chosen))
        if problem:
            processes.say(f'{path} is damaged ({problem}): going back to the one before it')
            del options[chosen[processes.island]]


def needed_checkpoint(out_dir, between):
    """A checkpoint of this island that must not be deleted yet, or None. To be called after each save.

    An island may be some saves ahead of others, and keeps the newest that goes with what all have saved.
    between: None, or what connects the islands.
    """
    if not between:
        return None
    states = {path: checkpoint.read_state(path).get('islands') for path in checkpoint.find(out_dir)}
    states = {path: state for path, state in states.items() if state}
    between.leave_note('saved', str(next(iter(states.values()))['started']))
    least = min(map(int, between.read_notes('saved').values()))
    return next((path for path, state in states.items() if state['merged'] <= least), None)
