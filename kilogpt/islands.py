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

Islands of one torchrun have the wire World, and those that are jobs of their own meeting.Meeting.
"""
import contextlib
import hashlib
import math
import os
import signal
import time
import uuid

import numpy as np
import torch
import torch.distributed as dist

from kilogpt import checkpoint
from kilogpt.meeting import Exchanged, Meeting, parse_address, read_secret
from kilogpt.optim import local_part
from kilogpt.settings import OUTER_INTERVAL

BLOCK = 256  # elements that share a scale in int8
# Keys that must be the same for a run to continue to the bit from a checkpoint with islands.
FIXED_KEYS = ('islands', 'outer_interval', 'outer_fragments', 'outer_compress', 'batch_size',
              'gradient_accumulation_steps', 'block_size')
# Keys that must also be the same on islands that are jobs of their own.
COMMON_KEYS = ('seed', 'outer_lr', 'outer_momentum', 'outer_delay', 'outer_mix', 'outer_timeout', 'zero_stage',
               'dp_replicate', 'tp', 'cp', 'ep', 'pp')


class World:
    """The wire between islands of one torchrun: an all-gather."""

    def __init__(self, processes):
        self.processes, self.islands = processes, processes.islands
        self.group = processes.connect_islands('exchange') if self.islands > 1 else None

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
        self.processes.leave_note(str(started))

    def is_abandoned(self, number):
        """Whether an island has ended that has not started exchange `number`."""
        return any(int(started) <= number for started in self.processes.read_notes())


# --- payloads -----------------------------------------------------------------------------------------------

def encode(tensor, compress):
    """A tensor as bytes, uint8 on the CPU. compress: 'none', 'bf16' or 'int8'.

    int8 has a scale for each BLOCK elements, in bfloat16: then a product of the two is exact in float32, and
    encoding what `decode` returned gives the same bytes again.
    """
    flat = tensor.flatten()
    if compress == 'none':
        return flat.cpu().view(torch.uint8)
    if compress == 'bf16':
        return flat.to(torch.bfloat16).cpu().view(torch.uint8)
    blocks = torch.nn.functional.pad(flat, (0, -len(flat) % BLOCK)).view(-1, BLOCK)
    scales = (blocks.abs().amax(1) / 127).to(torch.bfloat16)
    divisors = torch.where(scales == 0, 1, scales).to(flat.dtype)
    numbers = (blocks / divisors[:, None]).round().clamp(-127, 127).to(torch.int8).flatten()[:len(flat)]
    return torch.cat([numbers.cpu().view(torch.uint8), scales.cpu().view(torch.uint8)])


def encoded_size(tensor, compress):
    """How many bytes `encode` makes of a tensor."""
    count = tensor.numel()
    return {'none': count * tensor.element_size(), 'bf16': 2 * count, 'int8': count + 2 * -(-count // BLOCK)
            }[compress]


def decode(payload, like, compress):
    """The tensor of these bytes, with the shape, dtype and device of another."""
    if compress == 'int8':
        count = like.numel()
        numbers = payload[:count].view(torch.int8).to(like.device, like.dtype)
        scales = payload[count:].clone().view(torch.bfloat16).to(like.device, like.dtype)
        return (numbers * scales.repeat_interleave(BLOCK)[:count]).view(like.shape)
    dtype = torch.bfloat16 if compress == 'bf16' else like.dtype
    return payload.clone().view(dtype).to(like.device, like.dtype).view(like.shape)


# --- the outer optimizer ------------------------------------------------------------------------------------

class OuterOptimizer:
    """SGD with Nesterov momentum on what islands changed in the parameters, one fragment at a time.

    parameters: [(name, parameter or DTensor)]. fragment_of(name): which of the fragments has a parameter.
    compress: of the changes that are sent, with error feedback: what rounding leaves out is added to the next
    change. mix: the share of an island's own parameters in those with which it goes on after an exchange.
    offload: keep the state in host memory.

    state: {kind: [a tensor for each parameter, laid out as it]}: 'outer' are the parameters that all islands
    share, 'sent_0' and 'sent_1' what was sent last, which a run that resumes may have to send again.
    """

    def __init__(self, parameters, fragment_of, fragments, lr, momentum, compress, mix, offload):
        self.parameters = parameters
        self.lr, self.momentum, self.compress, self.mix = lr, momentum, compress, mix
        self.fragments = [[] for _ in range(fragments)]
        for index, (name, _) in enumerate(parameters):
            self.fragments[fragment_of(name)].append(index)
        kinds = ['outer', 'momentum', 'sent_0']
        if fragments == 1:  # two exchanges of the same parameters follow each other
            kinds.append('sent_1')
        if compress != 'none':
            kinds.append('residual')
        self.state = {kind: [_zeros_like(parameter, offload) for _, parameter in parameters]
                      for kind in kinds}
        self._local = {kind: [local_part(tensor) for tensor in tensors]
                       for kind, tensors in self.state.items()}

    def _sent(self, number):
        return self._local['sent_1' if len(self.fragments) == 1 and number % 2 else 'sent_0']

    def of_fragment(self, number):
        """{index: outer parameter} of those that exchange `number` is about."""
        return {index: self._local['outer'][index] for index in self.fragments[number % len(self.fragments)]}

    @torch.no_grad()
    def encode(self, number):
        """Note what this process sends in exchange `number`: the parameters, or their compressed change."""
        for index in self.fragments[number % len(self.fragments)]:
            value, sent = local_part(self.parameters[index][1].detach()), self._sent(number)[index]
            if self.compress == 'none':
                sent.copy_(value)
                continue
            change = self._local['outer'][index] - value.to(sent.device) + self._local['residual'][index]
            sent.copy_(decode(encode(change, self.compress), change, self.compress))
            self._local['residual'][index].copy_(change - sent)

    def payload(self, number):
        """The bytes to send in exchange `number`: all that `encode` has noted."""
        indices = self.fragments[number % len(self.fragments)]
        parts = [encode(self._sent(number)[index], self.compress) for index in indices]
        return torch.cat(parts) if parts else torch.empty(0, dtype=torch.uint8)

    @torch.no_grad()
    def mean(self, number, payloads):
        """(the means of what islands sent, by index; squared distance of the islands from them, and size).

        The islands compute equal bits, since they add in the same order. Distance and size are sums over the
        elements: of the squared deviations from the mean, in the mean over islands, and of the squares.
        """
        means, distance, size, begin = {}, 0.0, 0.0, 0
        for index in self.fragments[number % len(self.fragments)]:
            outer = self._local['outer'][index]
            end = begin + encoded_size(outer, self.compress)
            sent = [decode(payloads[island][begin:end], outer, self.compress) for island in sorted(payloads)]
            means[index] = torch.stack(sent).sum(0) / len(sent) if len(sent) > 1 else sent[0]
            distance += sum((one - means[index]).square().sum().item() for one in sent) / len(sent)
            size += outer.square().sum().item()
            begin = end
        return means, distance, size

    @torch.no_grad()
    def step(self, means):
        """Move the outer parameters, and then the island's. means: {index: mean of what islands sent}."""
        for index, mean in means.items():
            outer, momentum = self._local['outer'][index], self._local['momentum'][index]
            if self.compress != 'none':
                mean = outer - mean
            momentum.mul_(self.momentum).add_(outer - mean)
            # That is outer - lr · (outer - mean + momentum factor · momentum), and at lr 1 and factor 0 the
            # mean to the bit.
            outer.lerp_(mean, self.lr).sub_(momentum, alpha=self.lr * self.momentum)
            value = local_part(self.parameters[index][1].detach())
            new = outer.to(value.device)
            value.copy_(torch.lerp(new, value, self.mix) if self.mix else new)

    @torch.no_grad()
    def reset(self, to_outer=False):
        """Make the outer parameters equal to the island's, or the island's to them."""
        for (_, parameter), outer in zip(self.parameters, self._local['outer']):
            value = local_part(parameter.detach())
            (value if to_outer else outer).copy_(outer if to_outer else value)
        for residual in self._local.get('residual', ()):
            residual.zero_()

    def snapshot(self):
        """The bytes of what an island takes over that joins: the outer parameters and the momentum."""
        tensors = self._local['outer'] + self._local['momentum']
        return torch.cat([tensor.flatten().cpu().view(torch.uint8) for tensor in tensors])

    @torch.no_grad()
    def restore(self, snapshot):
        """Take over a snapshot."""
        tensors = self._local['outer'] + self._local['momentum']
        for tensor, part in zip(tensors, snapshot.split([t.numel() * t.element_size() for t in tensors])):
            tensor.copy_(part.clone().view(tensor.dtype).view(tensor.shape))

    def share(self, group, device):
        """Take over the outer parameters and the momentum of the first process of a group of replicas."""
        for tensor in self._local['outer'] + self._local['momentum']:
            copy = tensor.to(device, copy=True)
            dist.broadcast(copy, dist.get_global_rank(group, 0), group)
            tensor.copy_(copy)

    @torch.no_grad()
    def swap(self):
        """Exchange the values of the outer parameters and the island's."""
        for (_, parameter), outer in zip(self.parameters, self._local['outer']):
            value = local_part(parameter.detach())
            copy = value.to(outer.device, copy=True)
            value.copy_(outer)
            outer.copy_(copy)


def _zeros_like(parameter, offload):
    """Zeros laid out as a parameter is, in host memory if asked."""
    local = local_part(parameter.detach())
    zeros = torch.zeros_like(local, device='cpu' if offload else local.device)
    if not hasattr(parameter, 'placements'):
        return zeros
    from torch.distributed.tensor import DTensor
    return DTensor(zeros, parameter._spec, requires_grad=False)


# --- shares of the data -------------------------------------------------------------------------------------

class Shares:
    """Which sequences of the stream each island trains on, and how many tokens that makes.

    Each iteration, the islands that are present take `batch` sequences of block_size tokens each, in order.
    What was given to an island that then misses an exchange is given out again, before the rest of the
    stream. With all islands present an iteration has the sequences that it would have without islands.

    iteration, tokens: where the run begins, or continues, and how many tokens it has used by then.
    parts: those of the Shares that the run continues.
    """

    def __init__(self, batch, block_size, islands, iteration=0, tokens=0, parts=None):
        self.batch, self.block_size = batch, block_size
        # A new part begins when the islands that are present change.
        self.parts = parts or [dict(iteration=iteration, tokens=tokens, position=-(-tokens // block_size),
                                    backlog=[], present=list(range(islands)))]

    def tokens_before(self, iteration):
        """Tokens used before an iteration, without those that islands have lost."""
        part = self._part_of(iteration)
        return part['tokens'] + self._count(part, iteration) * self.block_size

    def sequences(self, iteration, island):
        """The numbers of the sequences that an island trains on in an iteration."""
        part = self._part_of(iteration)
        begin = self._count(part, iteration) + part['present'].index(island) * self.batch
        return self._numbers(part, begin, begin + self.batch)

    def given(self, since, iteration, islands):
        """The numbers of the sequences that these islands were given from an iteration on, before another."""
        numbers = [np.arange(0)]
        for i in range(since, iteration):
            for island in self._part_of(i)['present']:
                if island in islands:
                    numbers.append(self.sequences(i, island))
        return np.concatenate(numbers)

    def change(self, iteration, present, since, members):
        """From an iteration on, these islands are present.

        Those that are not among the members of the last exchange lose what they were given from `since` on.
        Returns whether anything has changed.
        """
        part = self.parts[-1]
        lost = self.given(since, iteration, set(part['present']) - set(members))
        if present == part['present'] and not len(lost):
            return False
        count, n_waiting = self._count(part, iteration), _length(part['backlog'])
        left = self._numbers(part, min(count, n_waiting), n_waiting)
        tokens = self.tokens_before(iteration) - len(lost) * self.block_size
        first = self._part_of(since)['iteration']
        self.parts = [part for part in self.parts if part['iteration'] >= first]
        self.parts.append(dict(iteration=iteration, tokens=tokens, present=present,
                               position=part['position'] + max(0, count - n_waiting),
                               backlog=ranges(np.concatenate([left, lost]))))
        return True

    def _part_of(self, iteration):
        return [part for part in self.parts if part['iteration'] <= iteration][-1]

    def _count(self, part, iteration):
        """How many sequences a part has given out before an iteration."""
        return (iteration - part['iteration']) * len(part['present']) * self.batch

    def _numbers(self, part, begin, end):
        """The numbers `begin` to `end` of those that a part gives out: its backlog, then the stream."""
        backlog = np.concatenate([np.arange(0), *(np.arange(*pair) for pair in part['backlog'])])
        n_waiting = len(backlog)
        rest = part['position'] + np.arange(max(0, begin - n_waiting), max(0, end - n_waiting))
        return np.concatenate([backlog[begin:end], rest])


def ranges(numbers):
    """[[begin, end]] of the runs of neighbours among integers."""
    numbers = np.sort(numbers)
    runs = np.split(numbers, np.flatnonzero(np.diff(numbers) != 1) + 1)
    return [[int(run[0]), int(run[-1]) + 1] for run in runs if len(run)]


def _length(pairs):
    return sum(end - begin for begin, end in pairs)


# --- the islands of a run -----------------------------------------------------------------------------------

class Islands:
    """What a run of train.py does with the other islands; nothing, where it has none and no outer optimizer.

    config: the keys of train.py. out_dir: island 0's folder; `out_dir` is this island's.
    """

    def __init__(self, processes, layout, config):
        self.processes, self.layout, self.config = processes, layout, config
        self.islands = config['islands']
        self.is_on = self.islands > 1 or config['outer_interval'] > 0
        self.interval, self.delay = config['outer_interval'] or OUTER_INTERVAL, config['outer_delay']
        self.address = config['outer_store']
        self.island, self.main_dir = processes.island, config['out_dir']
        if self.address:
            self.island = config['island']
            parse_address(self.address)  # here, since loading a model takes time
            read_secret()
        self.joins = False  # whether this island waits for the others' next exchange, to join after it
        self.moved_to = None  # the iteration at which it continues since it has joined
        self.problem = ''  # why it cannot continue
        self.out_dir = self.main_dir
        if self.island:
            self.out_dir = os.path.join(self.main_dir, f'island_{self.island}')
        # This process among those of all islands.
        self.rank = self.island * processes.world_size + processes.rank
        self.base = 0  # the iteration from which exchanges are counted
        self.started = self.merged = 0  # exchanges
        self.resend_from = None  # the first exchange that an island of the checkpoints had not finished
        self.continues = False  # whether the checkpoint is one of these islands
        self._keys = {key: config[key] for key in FIXED_KEYS}
        self.optimizer = None

    # --- set-up ---------------------------------------------------------------------------------------------

    def find_checkpoint(self):
        """(path, state) of the checkpoint from which to resume; (None, {}) without one.

        Each island has its own. Islands that were saved in different rounds cannot go on together: with E the
        exchanges that an island has finished and S those that it has started, E <= M <= S must hold for one M
        on all islands. Then those that had finished exchange M - 1 send again what they sent. Without such
        checkpoints all islands begin with the parameters of the newest one of island 0.
        """
        found = self._find_own() if self.is_on else None
        self.continues = found is not None
        return found or checkpoint.find_undamaged(self.main_dir, self.processes)

    def _find_own(self):
        """(path, state) of this island's checkpoint that goes with those of the others, or None.

        (None, {}) if the run ended within the first save: it then begins again.
        """
        is_unsaved = os.path.exists(os.path.join(self.out_dir, 'config.json')) and not checkpoint.find(self.out_dir)
        options = []  # (path, state) of this island's checkpoints, the newest first
        for path in checkpoint.find(self.out_dir) if self.processes.is_main else ():
            with contextlib.suppress(OSError, ValueError):  # damaged
                state = checkpoint.read_state(path)
                if state.get('islands', {}).get('keys') != self._keys:
                    break  # what is older is of another run
                options.append((path, state))
        options = self.processes.share(options)
        while True:
            counts = [(state['islands']['merged'], state['islands']['started']) for _, state in options]
            of_islands, are_unsaved = zip(*self.processes.tell_islands([counts, is_unsaved]))
            chosen = newest_together(of_islands)
            if chosen is None:
                return (None, {}) if of_islands[0] and any(are_unsaved) else None
            path, state = options[chosen[self.processes.island]]
            problem = checkpoint.damage_on_any(path, self.processes)
            if not any(self.processes.tell_islands(problem)):
                self.resend_from = min(of_islands[island][choice][0] for island, choice in enumerate(chosen))
                return path, state
            if problem:
                self.processes.say(f'{path} is damaged ({problem}): going back to the one before it')
                del options[chosen[self.processes.island]]

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
        self.wire = None if self.address else World(self.processes)
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

    def tensors(self, saved=None):
        """[(key, (tensor, parameter))] of what else a checkpoint holds, or of what to load from that one."""
        if not self.is_on or (saved is not None and 'islands' not in saved):
            return []
        found = []
        for index, (name, parameter) in enumerate(self.optimizer.parameters):
            kinds = {kind: tensors[index] for kind, tensors in self.optimizer.state.items()}
            if self.islands > 1:  # the outer parameters are those of the checkpoint's model
                kinds['outer'] = parameter.detach()
            if saved is not None and not self.continues:
                kinds = dict(momentum=kinds['momentum'])
            found += [(f'outer.{name}.{kind}', (tensor, parameter)) for kind, tensor in kinds.items()]
        return found

    def begin(self, batch, iteration, saved, has_loaded):
        """Begin or continue. batch: sequences of an island in an iteration.

        has_loaded: whether a checkpoint was loaded, which sets the outer parameters; else the island's are.
        """
        state = saved.get('islands', {}) if self.continues else {}
        self.share_out(batch, iteration, saved.get('tokens', 0), state.get('shares'))
        if not self.is_on:
            return
        self.base = state.get('base', iteration)
        self.started, self.merged = state.get('started', 0), state.get('merged', 0)
        if not self.continues:
            self.optimizer.reset(to_outer=has_loaded and self.islands > 1)
        self.parallel.parameters_changed()
        if self.address and self._meet(state):
            return
        for number in range(self.started if self.resend_from is None else self.resend_from, self.started):
            self._send(number)
            if number < self.merged:
                self._receive()

    def share_out(self, batch, iteration, tokens, parts=None):
        """Give out the data from an iteration on, of which so many tokens are used."""
        self.shares = Shares(batch, self.config['block_size'], self.islands, iteration, tokens, parts)

    def state(self):
        """What a checkpoint's state.json keeps."""
        if not self.is_on:
            return {}
        return dict(islands=dict(keys=self._keys, base=self.base, started=self.started, merged=self.merged,
                                 shares=self.shares.parts,
                                 history=self._history()))

    # --- running --------------------------------------------------------------------------------------------

    def describe(self):
        """How the islands work together, in one line."""
        size = sum(outer.nbytes for outer in self.optimizer.of_fragment(0).values())
        return (f'{self.islands} of {self.processes.world_size} process(es); every {self.interval} iterations '
                f'an exchange of {self.config["outer_fragments"]} fragment(s), {size / 1e6:,.1f} MB on a rank '
                f'in the first, sent as {self.config["outer_compress"]}')

    def sequences(self, iteration):
        """The numbers of the sequences on which this island trains in an iteration."""
        return self.shares.sequences(iteration, self.island)

    def is_due(self, iteration):
        """Whether there is something to send or to receive before an iteration."""
        return self.is_on and (self.joins or self._count(iteration) > self.started
                               or self._is_to_merge(iteration))

    def _count(self, iteration):
        """How many exchanges have started when an iteration begins."""
        return (iteration - self.base) * self.config['outer_fragments'] // self.interval

    def _begin_of(self, number):
        """The iteration before which exchange `number` starts."""
        return self.base - (-(number + 1) * self.interval // self.config['outer_fragments'])

    def _is_to_merge(self, iteration):
        return self.started > self.merged and iteration >= self._begin_of(self.merged) + self.delay

    def exchange(self, iteration, agreement, beat):
        """Send and receive what is due before an iteration; returns a line for the log, or None.

        A signal to stop ends the wait for other islands: what was sent waits in the checkpoint. beat(): says
        that this process has not hung.

        An island that joins others takes over their state instead, and continues at `moved_to`.
        """
        if self._count(iteration) > self.started and not self.joins:
            self.optimizer.encode(self.started)
            self._send(self.started)
            self.started += 1
        began, exchanged = time.perf_counter(), None
        while exchanged is None:
            if not self.joins and not self._is_to_merge(iteration):
                return None
            if not self._wait(agreement, beat):
                return None
            exchanged = self._receive()
            is_none = self.processes.share(exchanged is None)
            if self.joins:
                self.joins = False
                if not is_none:
                    self._take_over(exchanged)
                    return None
                self._resend()
            elif is_none:
                self._join()
        waited, number = time.perf_counter() - began, self.merged
        members, joining = self.processes.share((sorted(exchanged.payloads), exchanged.joining))
        distance, size = self._merge(number, exchanged)
        since, until = self._begin_of(number - 1), self._begin_of(number)
        sequences = ranges(self.shares.given(since, until, members))
        self.has_new_shares = self.shares.change(iteration, sorted({*members, *joining}), since, members)
        self.merged += 1
        if joining and self.island == members[0] and self._sends:
            state = dict(iteration=iteration, base=self.base, merged=self.merged, shares=self.shares.parts)
            self.wire.give(state, self.optimizer.snapshot())
        sums = [self.processes.sum(value) for value in (distance, size, self._bytes_sent)]
        return dict(iter=iteration, exchange=number, fragment=number % self.config['outer_fragments'],
                    bytes_sent=int(sums[2]), wait_s=waited, islands=members,
                    distance=(sums[0] / sums[1]) ** 0.5, sequences=sequences)

    def _send(self, number):
        if self._sends:
            payload = self.optimizer.payload(number)
            # The server of islands that are jobs sends each payload on.
            self._bytes_sent = len(payload) * (1 if self.address else self.islands - 1)
            self.wire.start(number, payload)
        else:
            self._bytes_sent = 0

    def _receive(self):
        return self.wire.result() if self._sends else Exchanged({}, [])

    def _wait(self, agreement, beat):
        """Wait until all processes have what the other islands send; False if something else ends the wait."""
        passes = 0
        while not self._has_arrived(agreement):
            if agreement.stop_signal:
                return False
            if self.address:
                seconds = self.processes.max(self.wire.seconds_silent() if self._sends else 0)
                if seconds > self.config['comm_timeout']:
                    self.problem = (f'outer_store={self.address} has not answered for {seconds:.0f} seconds '
                                    '(comm_timeout): start it again, then continue with --init_from=auto')
                    return False
            elif passes % 500 == 499 and self.processes.is_main and self.wire.is_abandoned(self.merged):
                signal.raise_signal(signal.SIGTERM)
            beat()
            passes += 1
            time.sleep(0.002 if passes < 500 or not self.address else 0.05)
        return True

    def _has_arrived(self, agreement):
        mark = self.wire.done() if self._sends else None
        if not agreement.is_unanimous(not self._sends or mark):
            return False
        if not self.address or self.processes.world_size == 1:
            return True
        # If the server was started again, processes may have the results of two exchanges of one number.
        newest = self.processes.max(mark if self._sends else -math.inf)
        return newest == -self.processes.max(-mark if self._sends else -math.inf)

    def _merge(self, number, exchanged):
        """Take the outer step; returns the two sums of `mean`."""
        distance, size = 0.0, 0.0
        if self._sends:
            means, distance, size = self.optimizer.mean(number, exchanged.payloads)
        if self._replicas:
            means = self._tell_replicas(number, means if self._sends else {})
        self.optimizer.step(means)
        self.parallel.parameters_changed()
        return distance, size

    # --- islands that are jobs of their own -----------------------------------------------------------------

    def _meet(self, state):
        """Introduce this island to the server; returns whether it has to join the others."""
        shapes = [(name, tuple(parameter.shape)) for name, parameter in self.optimizer.parameters]
        sending = self.processes.gather(self._sends)
        job = self.processes.share(uuid.uuid4().hex)
        if self._sends:
            settings = self._keys | {key: self.config[key] for key in COMMON_KEYS}
            settings['parameters'] = hashlib.sha256(repr(sorted(shapes)).encode()).hexdigest()[:16]
            self.wire = Meeting(self.address, self.island, int(sum(sending[:self.processes.rank])),
                                int(sum(sending)), job, settings, self.merged,
                                state.get('history') or (0, f'{self.base:09d}'), self.processes.say)
        if self.processes.any(self._sends and not self.wire.hello()):
            self._join()
        return self.joins

    def _join(self):
        self.joins = True
        if self._sends:
            self.wire.join()
        self.processes.say(f'island {self.island} is behind the others: it joins them after their next exchange')

    def _take_over(self, joined):
        """Continue from the state of an island that has given its own."""
        state = self.processes.share(joined.state if self._sends else None)
        if self._sends:
            self.optimizer.restore(joined.payload)
        if self._replicas:
            self.optimizer.share(self._replicas, self.processes.device)
        self.optimizer.reset(to_outer=True)
        self.parallel.parameters_changed()
        self.base, self.shares.parts, self.moved_to = state['base'], state['shares'], state['iteration']
        self.started = self.merged = state['merged']
        self.processes.say(f'island {self.island} joins the others at iteration {self.moved_to}')

    def _resend(self):
        """Send again what was sent before this island wanted to join, since nobody is ahead any more."""
        if self.started > self.merged:
            self._send(self.merged)

    def _history(self):
        """What the server needs to know of an island that resumes, or None."""
        return self.processes.share(self.wire.history if self._sends else None) if self.address else None

    def leave(self):
        """Wait until islands that join have the state that they were promised."""
        if self.address and self._sends:
            self.wire.leave()

    def _tell_replicas(self, number, means):
        """The means, {index: tensor}, of the first replica, on all."""
        like = self.optimizer.of_fragment(number)
        sizes = [tensor.numel() for tensor in like.values()]
        device = self.processes.device
        flat = torch.empty(sum(sizes), dtype=next(iter(like.values())).dtype, device=device)
        if self._sends:
            flat = torch.cat([mean.flatten() for mean in means.values()]).to(device)
        dist.broadcast(flat, dist.get_global_rank(self._replicas, 0), self._replicas)
        parts = flat.split(sizes)
        return {index: part.view(tensor.shape).to(tensor.device)
                for part, (index, tensor) in zip(parts, like.items())}

    def end(self):
        """Tell the other islands that this one ends, so that they do not wait for it."""
        if self.processes.islands > 1 and self.processes.is_main:
            self.wire.end(self.started)

    @contextlib.contextmanager
    def outer_parameters(self):
        """A context in which the model has the parameters that all islands share."""
        if self.islands > 1:
            self.optimizer.swap()
            self.parallel.parameters_changed()
        yield
        if self.islands > 1:
            self.optimizer.swap()
            self.parallel.parameters_changed()


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
