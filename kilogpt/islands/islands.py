"""Islands: groups of processes that train separately and exchange their parameters at intervals.

DiLoCo (Douillard et al. 2023, arXiv 2311.08105): each island makes `outer_interval` updates on its share of
the data. Then an outer optimizer, SGD with Nesterov momentum, moves the shared parameters towards the mean of
the islands' parameters. Streaming DiLoCo (Douillard et al. 2025, arXiv 2501.18512) exchanges the parameters
in fragments, one after the other, while the islands continue to train.

Each process exchanges its part of the parameters with the processes of the same rank in the other islands,
over a link. All processes of an island make the same calls:

    link.start(number, payload)   start exchange 0, 1, ... with a payload (uint8, on the CPU, may be empty)
    link.is_done()                whether the payloads of the others have arrived
    link.result()                 wait for the payloads, and return an ExchangeResult

TorchrunLink connects islands of one torchrun. Islands that are jobs of their own have a ServerLink (jobs.py).
"""
import contextlib
import os
import signal
import time
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist

from data import storage
from data.schedule import ranges
from kilogpt.islands.outer_optimizer import OuterOptimizer
from kilogpt.keys.islands import INTERVAL
from kilogpt.parallel.apply import refresh, saved_parameters
from kilogpt.run import checkpoint
from kilogpt.run import Hook

# A run continues to the bit from a checkpoint with islands only if these keys are the same.
FIXED_KEYS = ('islands', 'outer_interval', 'outer_fragments', 'outer_compress', 'batch_size',
              'gradient_accumulation_steps', 'block_size')
EMPTY = torch.empty(0, dtype=torch.uint8)  # the payload of a process whose parameters another one sends


class IslandSettings(NamedTuple):
    """The keys of train.py that islands use."""
    out_dir: str
    seed: int
    batch_size: int
    gradient_accumulation_steps: int
    block_size: int
    comm_timeout: int
    islands: int
    outer_interval: int
    outer_lr: float
    outer_momentum: float
    outer_fragments: int
    outer_compress: str
    outer_delay: int
    outer_mix: float
    outer_offload: bool
    outer_store: str
    island: int
    outer_timeout: float

    @classmethod
    def of(cls, config):
        """Pick the settings from all keys of train.py."""
        return cls(**{key: config[key] for key in cls._fields})


class ExchangeResult(NamedTuple):
    """The result of an exchange: {island: uint8 tensor} of its members, and the islands that join."""
    payloads: dict
    joining: list


class TorchrunLink:
    """The link between islands of one torchrun: an all-gather."""

    def __init__(self, processes):
        self.islands, self.between = processes.islands, processes.between
        self.group = self.between.connect('exchange') if self.between else None

    def start(self, number, payload):
        """Start an exchange, in which every island passes a payload of the same size."""
        self._payloads, self._work = [payload], None
        if self.group and len(payload):
            self._payloads = [torch.empty_like(payload) for _ in range(self.islands)]
            self._sent_payload = payload  # the all-gather reads this memory until it is done
            self._work = self.group.allgather([self._payloads], [payload])
        elif self.group:
            self._payloads *= self.islands

    def is_done(self):
        """Whether the payloads of the other islands have arrived."""
        return self._work is None or self._work.is_completed()

    def result(self):
        """Wait for the payloads of all islands, and return them."""
        if self._work:
            self._work.wait()
        return ExchangeResult(dict(enumerate(self._payloads)), [])

    def announce_end(self, started):
        """Tell the other islands that this one ends, and how many exchanges it has started."""
        self.between.leave_note('end', str(started))

    def is_abandoned(self, number):
        """Whether an island has ended without starting exchange `number`."""
        return any(int(started) <= number for started in self.between.read_notes('end').values())


# --- the islands of a run -----------------------------------------------------------------------------------

class Islands(Hook):
    """The hook that exchanges parameters with the other islands of a run.

    A run with one island and without outer_interval has neither other islands nor an outer optimizer, and has
    kilogpt.training.cluster.NoIslands instead.

    settings: an IslandSettings. island: the number of this island, if not that of `processes`.
    out_dir: the folder of this island. main_dir: the folder of island 0.
    """
    name = 'islands'

    def __init__(self, processes, layout, settings, island=None):
        self.processes, self.layout, self.settings = processes, layout, settings
        self.islands = settings.islands
        self.interval, self.delay = settings.outer_interval or INTERVAL, settings.outer_delay
        self.island = processes.island if island is None else island
        self.out_dir = self.main_dir = settings.out_dir
        if self.island:
            self.out_dir = os.path.join(self.main_dir, f'island_{self.island}')
        # The number of this process among the processes of all islands.
        self.rank = self.island * processes.world_size + processes.rank
        self.n_receivers = self.islands - 1  # how many processes each payload is sent to
        self.base = 0  # exchanges are counted from this iteration
        self.started = self.merged = 0  # how many exchanges have started, and how many are merged
        self.resend_from = None  # the first exchange that some island must send again after a resume
        self.continues = False  # whether the run resumes from checkpoints of the same islands
        self._fixed_settings = {key: getattr(settings, key) for key in FIXED_KEYS}

    # --- set-up ---------------------------------------------------------------------------------------------

    def find_checkpoint(self):
        """(path, state) of the checkpoint from which to resume; (None, {}) without one.

        Each island has its own checkpoints. Islands may have been saved in different rounds: if an island has
        merged E exchanges and started S, then E <= M <= S must hold with one M for all islands, so that they
        can continue together. The islands that had merged exchange M - 1 send again what they sent in it.
        Without such checkpoints, all islands start with the parameters of the newest checkpoint of island 0.
        """
        found, self.resend_from = find_together(self.processes, self.out_dir, self._fixed_settings)
        self.continues = bool(found and found[0])
        return found or checkpoint.find_undamaged(self.main_dir, self.processes)

    def attach_model(self, parallel, model):
        """Build the outer optimizer for a model that is laid out. model: the whole model."""
        self.parallel, settings = parallel, self.settings
        trained = parallel.optimizer_parameters()
        others = [(name, p) for name, p in saved_parameters(parallel) if not p.requires_grad]
        self.optimizer = OuterOptimizer(
            trained + others, partial(fragment_of, model.split_plan['blocks'], settings.outer_fragments),
            settings.outer_fragments, settings.outer_lr, settings.outer_momentum, settings.outer_compress,
            settings.outer_mix, settings.outer_offload)
        # Of the replicas in an island one takes part in exchanges, and broadcasts the result to the others.
        self._replica_group, self._is_sender = None, True
        if self.layout.zero_stage == 0 and self.processes.world_size > 1:
            self._replica_group, self._is_sender = dist.group.WORLD, self.processes.is_main
        elif self.layout.dp_replicate > 1:
            mesh = self.processes.mesh['dp_replicate']
            self._replica_group, self._is_sender = mesh.get_group(), mesh.get_local_rank() == 0

    def parameters(self):
        """[(name, parameter)] that a checkpoint keeps as its model: those that all islands share."""
        if self.islands == 1:
            return saved_parameters(self.parallel)
        names = [name for name, _ in self.optimizer.parameters]
        return list(zip(names, self.optimizer.state['outer']))

    def tensors(self):
        """[(key, tensor)] that a checkpoint keeps of the islands, besides its model."""
        found = []
        for index, (name, parameter) in enumerate(self.optimizer.parameters):
            kinds = {kind: tensors[index] for kind, tensors in self.optimizer.state.items()}
            if self.islands > 1:
                # The checkpoint's model is the outer parameters, so the island's own take their place here.
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

    def begin(self, run):
        """Connect the islands of a Run that begins or continues."""
        self.training_tokens = run.data.train.n_tokens  # on which all islands must agree
        self.signals, self.saver, self.log, self.schedule = run.signals, run.saver, run.log, run.schedule
        state = run.start.saved.get(self.name, {}) if self.continues else {}
        self.schedule.parts = state.get('shares') or self.schedule.parts
        self.base = state.get('base', run.iteration)
        self.started, self.merged = state.get('started', 0), state.get('merged', 0)
        if not self.continues:  # parameters from elsewhere were loaded into the outer ones, a new model's were not
            self.optimizer.reset(to_outer=bool(run.start.source) and self.islands > 1)
        refresh(self.parallel)
        self._connect(state)

    def _connect(self, state):
        """Set up the link, and send again what may not have arrived. state: a checkpoint's, or {}."""
        if self.processes.between and self.processes.is_main:
            self.processes.between.leave_note('saved', str(self.started))
        self.link = TorchrunLink(self.processes)  # waits for all islands
        for number in range(self.started if self.resend_from is None else self.resend_from, self.started):
            self._send(number)
            if number < self.merged:
                self.link.result()

    def needed_checkpoint(self):
        """The checkpoint that must be kept for the other islands, or None. To be called after each save."""
        return needed_checkpoint(self.out_dir, self.processes.between)

    def state(self):
        """What state.json of a checkpoint keeps."""
        return dict(keys=self._fixed_settings, base=self.base, started=self.started, merged=self.merged,
                    shares=self.schedule.parts)

    # --- running --------------------------------------------------------------------------------------------

    def bytes_on(self, device):
        """Bytes of a device's memory that the outer optimizer takes."""
        return self.optimizer.bytes_on(device)

    def describe(self):
        """Lines that say how the islands work together."""
        megabytes = sum(outer.nbytes for outer in self.optimizer.of_fragment(0).values()) / 1e6
        return [f'islands     {self.islands} of {self.processes.world_size} process(es); {megabytes:,.1f} MB '
                f'on a rank in the first of {self.settings.outer_fragments} fragment(s), each exchanged '
                f'every {self.interval} iterations; outer_compress={self.settings.outer_compress}']

    def is_due(self, run):
        """Whether an exchange starts or ends before the next update."""
        return self._exchanges_due(run.iteration) > self.started or self._merge_is_due(run.iteration)

    def _exchanges_due(self, iteration):
        """How many exchanges should have been started before an iteration."""
        return (iteration - self.base) * self.settings.outer_fragments // self.interval

    def _start_of(self, number):
        """The iteration before which exchange `number` starts."""
        return self.base - (-(number + 1) * self.interval // self.settings.outer_fragments)

    def _merge_is_due(self, iteration):
        return self.started > self.merged and iteration >= self._start_of(self.merged) + self.delay

    def act(self, run):
        """Start or finish the exchanges that are due, and log those that are finished."""
        line = self._exchange(run)
        if line:
            self.log.exchange(line)
        return False

    def _exchange(self, run):
        """Start or finish the exchange that is due; returns a line for the log, or None.

        A signal to stop ends the wait for other islands: what was sent is in the checkpoint, to be sent
        again.
        """
        iteration = run.iteration
        if self._exchanges_due(iteration) > self.started:
            self.optimizer.encode(self.started)
            self._send(self.started)
            self.started += 1
        if not self._merge_is_due(iteration):
            return None
        wait_began = time.perf_counter()
        if not self._wait_for_others(run):
            return None
        result, waited = self.link.result(), time.perf_counter() - wait_began
        self.processes.waited['others'] += waited
        return self._merge(iteration, result, waited)

    def _send(self, number):
        payload = self.optimizer.payload(number) if self._is_sender else EMPTY
        self._bytes_sent = len(payload) * self.n_receivers
        self.link.start(number, payload)

    def _wait_for_others(self, run):
        """Wait until all processes have what the other islands send. False if the run ends meanwhile."""
        polls = 0
        while not self.signals.all_agree(self.link.is_done()):
            if self.signals.stop or run.ending:
                return False
            self.signals.watchdog.beat()
            polls += 1
            if polls >= 500 and polls % 20 == 0:  # once a second
                self._end_if_abandoned(run)
            time.sleep(0.002 if polls < 500 else 0.05)
        return True

    def _end_if_abandoned(self, run):
        """Stop this process, and so all others, if an island has ended without starting this exchange."""
        if self.processes.is_main and self.link.is_abandoned(self.merged):
            signal.raise_signal(signal.SIGTERM)

    def _merge(self, iteration, result, waited):
        """Take the outer step; returns the line for the log. waited: seconds."""
        number, means, distance, size = self.merged, {}, 0.0, 0.0
        members, joining = sorted(result.payloads), result.joining
        if self._is_sender:
            means, distance, size = self.optimizer.mean(number, result.payloads)
        if self._replica_group:
            means = self.optimizer.broadcast_means(number, means, self._replica_group, self.processes.device)
        self.optimizer.step(means)
        refresh(self.parallel)
        since, until = self._start_of(number - 1), self._start_of(number)
        sequences = ranges(self.schedule.assigned(since, until, members))
        self.schedule.change_islands(iteration, sorted({*members, *joining}), since, members)
        self.merged += 1
        distance, size, bytes_sent = map(self.processes.sum, (distance, size, self._bytes_sent))
        return dict(iter=iteration, exchange=number, fragment=number % self.settings.outer_fragments,
                    bytes_sent=int(bytes_sent), wait_s=waited, islands=members,
                    distance=(distance / size) ** 0.5, sequences=sequences)

    def close(self):
        """Tell the other islands that this one has ended, so that they do not wait for it."""
        if self.islands > 1 and self.processes.is_main:
            self.link.announce_end(self.started)

    @contextlib.contextmanager
    def weights_for_evaluation(self):
        """A context in which the model has the parameters that all islands share."""
        if self.islands > 1:
            self.optimizer.swap_parameters()
            refresh(self.parallel)
        yield
        if self.islands > 1:
            self.optimizer.swap_parameters()
            refresh(self.parallel)


def fragment_of(blocks, fragments, name):
    """The fragment of a parameter: neighbouring blocks are in different ones, all else is in the first.

    blocks: what the names of the blocks' parameters begin with, before a dot and the number of the block.
    """
    prefix = f'{blocks}.'
    if not name.startswith(prefix):
        return 0
    block = int(name.removeprefix(prefix).partition('.')[0])
    return (block + 1) % fragments


# --- checkpoints of several islands -------------------------------------------------------------------------

def newest_together(counts):
    """Choose the newest checkpoint of each island from which all can continue together, or None.

    counts: for each island, [(exchanges merged, exchanges started)] of its checkpoints, the newest first.
    Returns an index for each island. Islands.find_checkpoint says when checkpoints go together.
    """
    merged_counts = set()
    for options in counts:
        merged_counts |= {merged for merged, _ in options}
    for together in sorted(merged_counts, reverse=True):
        chosen = []
        for options in counts:
            fitting = [index for index, (merged, started) in enumerate(options)
                       if merged <= together <= started]
            chosen += fitting[:1]
        if len(chosen) == len(counts):
            return chosen
    return None


def find_together(processes, out_dir, keys):
    """Find a checkpoint of this island that goes together with checkpoints of the others.

    Returns ((path, state), exchange): the first exchange that an island had not merged. (None, None)
    without such checkpoints, and ((None, {}), None) if the run ended within its first save, so that it begins
    again.
    keys: the FIXED_KEYS that the state must have.
    """
    has_begun = storage.exists(os.path.join(out_dir, 'config.json'))
    is_unsaved = has_begun and not checkpoint.find(out_dir)
    options = []  # (path, state) of this island's checkpoints, the newest first
    for path in checkpoint.find(out_dir) if processes.is_main else ():
        with contextlib.suppress(OSError, ValueError):  # a damaged checkpoint
            state = checkpoint.read_state(path)
            if state.get('islands', {}).get('keys') != keys:
                break  # older checkpoints are those of another run
            options.append((path, state))
    options = processes.share(options)
    while True:
        counts = [(state['islands']['merged'], state['islands']['started']) for _, state in options]
        island_counts, are_unsaved = zip(*processes.tell_islands([counts, is_unsaved]))
        chosen = newest_together(island_counts)
        if chosen is None and island_counts[0] and any(are_unsaved):
            return (None, {}), None
        if chosen is None:
            return None, None
        path, state = options[chosen[processes.island]]
        problem = checkpoint.damage_on_any(path, processes)
        if not any(processes.tell_islands(problem)):
            merged = [counts[index][0] for counts, index in zip(island_counts, chosen)]
            return (path, state), min(merged)
        if problem:
            processes.say(f'{path} is damaged ({problem}): going back to the one before it')
            del options[chosen[processes.island]]


def needed_checkpoint(out_dir, between):
    """The checkpoint of this island that must be kept for the others, or None. To be called after each save.

    An island may be some saves ahead of the others, and keeps the newest checkpoint that goes together with
    what all islands have saved. between: None, or the Between that connects the islands.
    """
    if not between:
        return None
    states = {path: checkpoint.read_state(path).get('islands') for path in checkpoint.find(out_dir)}
    states = {path: state for path, state in states.items() if state}
    between.leave_note('saved', str(next(iter(states.values()))['started']))
    least_started = min(map(int, between.read_notes('saved').values()))
    return next((path for path, state in states.items() if state['merged'] <= least_started), None)
