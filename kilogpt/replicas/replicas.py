"""The layer between a run and its other replicas, each of which has the whole model and may be lost at any time.

In each iteration the replicas that are there divide the global batch, add up their gradients and losses, and vote.
Unless all sums have arrived, the iteration is made again by those that are left, with the same batch. So neither
the loss nor the update depends on who takes part, but for the order of additions. A replica that starts takes over
parameters, optimizer and the rest of the run's state from a peer's memory.
"""
import importlib.util
import json
import os
import time
from types import SimpleNamespace

import torch

from data import storage
from kilogpt.keys import with_resuming
from kilogpt.optim import local_part
from kilogpt.parallel.apply import forget_gathered, saved_parameters
from kilogpt.parallel.ddp import BUCKET_BYTES
from kilogpt.replicas.log import ReplicaLog, ReplicaSignals
from kilogpt.run import checkpoint

VARIABLES = 'REPLICA_GROUP_ID', 'NUM_REPLICA_GROUPS', 'TORCHFT_LIGHTHOUSE'  # as torchft's own launchers set them
ALONE_BYTES = 2 ** 20  # from which on copying a gradient takes longer than a message of its own
LAST_SECONDS = 3600.0  # for which the other replicas wait for the last checkpoint


class Replicas:
    """This replica of a run among the others.

    processes: those of this replica. config: the keys of train.py. ValueError if they do not go together.

    is_lead: whether this replica writes the log and the checkpoints.
    """
    log_class, signals_class = ReplicaLog, ReplicaSignals

    def __init__(self, processes, config):
        check_start(config)
        self.processes, self.timeout = processes, config['replica_timeout']
        self.number, processes.replicas = (int(os.environ[name]) for name in VARIABLES[:2])
        self.is_restarted = int(os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)) > 0
        processes.is_first = processes.is_main and self.number == 0 and not self.is_restarted
        if self.is_restarted and _has_saved(config['out_dir']):
            # In case no replica is left whose state it could take over.
            config['init_from'] = with_resuming(config['init_from'])
        self.hang_folder = os.path.join('hang', f'replica_{self.number}')
        self.is_lead = self.has_begun = self.owes_save = False
        self.failed_at = None  # when the first failure since the last update was noticed
        self.recovered_ms = 0.0
        self.lead_saves = False  # whether the replica that led was writing a checkpoint
        self.members = None
        # The others wait for a replica that has joined. One that starts with them joins before it compiles.
        if not self.is_restarted:
            self._join()

    def _join(self):
        from kilogpt.replicas.membership import Membership, unique_name
        name = self.processes.share(unique_name(self.number, self.is_restarted))
        self.members = Membership(self.processes, name, os.environ[VARIABLES[2]], self.timeout)

    def describe(self):
        """Lines about the replicas, as a run prints them when it starts."""
        return [f'replicas    {self.processes.replicas}, of which this is number {self.number}']

    def share(self):
        """(index, count): which part of a global batch this replica takes."""
        return (self.members.index, self.members.count) if self.members else (0, 1)

    def attach(self, run, save):
        """Take part with a run that is set up. save(): saves a checkpoint."""
        self.run, self.save = run, save
        if self.members is None:
            self._join()
        self.members.step = run.iteration

    def open_folder(self, run):
        """The replica that leads prepares the folder, once it is known which does."""

    # --- an iteration ---------------------------------------------------------------------------------------

    def begin(self):
        """Before an iteration: agree who takes part. A replica that is behind moves to the iteration of the others."""
        run, members = self.run, self.members
        names_before, led_before = members.names, self.is_lead
        began = time.perf_counter()
        run.signals.flush()
        run.guard.settle()  # the state of the run is whole from here on
        with run.cluster.watchdog.suspended():
            self.has_begun |= members.meet(self._state, self._load)
        self.is_lead = members.index == 0
        self.processes.is_first = self.processes.is_main and self.is_lead
        run.cluster.islands.rank = members.index * self.processes.world_size + self.processes.rank  # for dropout
        if self.is_lead and not self.has_begun:
            run.open_folder()
        self.has_begun = True
        if not set(names_before) <= set(members.names):  # perhaps one was lost after the last update
            self.failed_at = self.failed_at or began
        if names_before and members.names != names_before:
            self.processes.say(f'members at iteration {run.iteration}: {len(names_before)} -> {members.count} '
                               f'({describe_change(names_before, members.names)})')
        self.owes_save |= self.is_lead and not led_before and self.lead_saves
        if self.processes.is_main:
            run.log.lead() if self.is_lead else run.log.follow()

    def add_up(self, loss_sum):
        """Sum gradients, losses and the other sums of an iteration over the replicas, each on the same process.

        loss_sum: a tensor, summed in place. Returns whether all sums have arrived. If so, the update is to be made;
        otherwise the iteration is to be made again.
        """
        run, members = self.run, self.members
        began = time.perf_counter()
        sums, routers = run.parallel.pop_sums(), run.parallel.balance.routers
        counts = [torch.zeros(run.parallel.balance.n_experts) if router.n_tokens is None else router.n_tokens
                  for router in routers.values()]
        is_leader = self.is_lead and self.processes.is_main
        wants_save = is_leader and (run.wants_save() or self.owes_save)
        numbers = [is_leader and run.saver.under_way, is_leader and run.log.begin,
                   is_leader and run.log.is_unwritten, *run.signals.here(wants_save)]
        numbers = torch.tensor(numbers, dtype=torch.float64)
        names = sorted(sums)
        vector = torch.cat([_on_device(part.detach().double().reshape(-1), loss_sum.device) for part in [
            numbers, loss_sum, *(torch.as_tensor(sums[name]) for name in names), *counts]])
        is_whole = self._add_up_gradients([local_part(p.grad) for p in self._with_gradients()], vector)
        if not is_whole:
            self.failed_at = self.failed_at or time.perf_counter()
        if not members.vote():
            self.failed_at = self.failed_at or time.perf_counter()
            run.parallel.zero_grad()
            run.parallel.balance.forget()
            return False
        parts = vector.split([len(numbers), 1, *(1 for _ in names), *(count.numel() for count in counts)])
        loss_sum.copy_(parts[1].view_as(loss_sum))
        stage = next(iter(run.parallel.stages.values()))
        for name, value in zip(names, parts[2:]):
            stage.sums[name] = value.squeeze().float()
        for router, value in zip(routers.values(), parts[2 + len(names):]):
            router.n_tokens = value.round().to(torch.int64)
        lead_saves, begin, is_unwritten, *run.signals.agreed = parts[0].tolist()
        self.lead_saves, run.log.begin, self.owes_save = bool(lead_saves), int(begin), False
        if is_leader or not is_unwritten:  # the others keep what only the leader's memory has
            run.log.agreed()
        now = time.perf_counter()
        self.processes.record_wait(began, now)
        self.recovered_ms = 1000 * (now - self.failed_at) if self.failed_at else 0.0
        self.failed_at = None
        return True

    def _with_gradients(self):
        """The trained parameters. One without a gradient, as of an expert without tokens, gets zeros."""
        for _, parameter in self.run.parallel.optimizer_parameters():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            yield parameter

    def _add_up_gradients(self, gradients, vector):
        """Sum gradients, of which one message is under way while the next is filled, and a vector.

        A large gradient is summed where it is. The others are copied into buckets.
        """
        waits = [(self.members.add_up([vector]), [], None)]
        for bucket in buckets(gradients) if self.members.count > 1 else ():
            if len(bucket) == 1 and bucket[0].is_contiguous():
                waits.append((self.members.add_up([bucket[0].view(-1)]), [], None))
            else:
                flat = torch.cat([gradient.reshape(-1) for gradient in bucket])
                waits.append((self.members.add_up([flat]), bucket, flat))
            if len(waits) > 2 and not _finish(*waits.pop(0)):
                return False
        return all(_finish(*each) for each in waits)

    def figures(self):
        """The values of a line of the log: how many replicas took part, and how long a failure lasted."""
        return dict(members=self.members.count, recovered_ms=self.recovered_ms)

    def finish(self):
        """Wait until all replicas get here, and until the one that leads has saved the last checkpoint.

        All end with exit code 1 if it could not.
        """
        run = self.run
        self.members.group.seconds = LAST_SECONDS
        while True:
            if self.processes.is_main:
                run.log.lead() if self.is_lead else run.log.follow()
            has_failed = torch.tensor([float(self.is_lead and run.ending.exit_code == 1)], device=self.processes.device)
            wait = self.members.add_up([has_failed])
            with run.cluster.watchdog.suspended():
                is_here = wait is not None and wait()
                is_agreed = self.members.vote()  # a GPU waits here
            if is_agreed and is_here:
                if has_failed and run.ending.exit_code != 1:
                    run.ending = run.ending._replace(exit_code=1)
                return
            self.begin()
            saved = [checkpoint.iteration_of(path) for path in checkpoint.find(run.cluster.out_dir)]
            if self.is_lead and run.saves_checkpoints and run.iteration not in saved:
                self.save()
                run.saver.wait()

    # --- the state that a replica takes over ----------------------------------------------------------------

    def _state(self):
        """The state of this process: {'tensors': {key: tensor}, 'values': JSON}."""
        run = self.run
        named = self._named_tensors()
        own = dict(evaluated_at=run.evaluated_at, saved_iteration=run.saved_iteration, has_improved=run.has_improved,
                   stop=run.signals.stop, save_requested=run.signals.save_requested, agreed=run.signals.agreed,
                   pending=run.log.pending, begin=run.log.begin, ending=run.ending,
                   shapes={key: list(tensor.shape) for key, tensor in named})
        values = run.progress() | run.guard.state() | run.hooks.state() | dict(replicas=own)
        return dict(tensors={key: local_part(tensor.detach()) for key, tensor in named}, values=json.dumps(values))

    def _named_tensors(self):
        run = self.run
        named = checkpoint.named_tensors(saved_parameters(run.parallel), run.optimizer)
        return [(key, tensor) for key, (tensor, _) in named] + run.hooks.tensors()

    def _load(self, state):
        """Take over the `_state` of the same process of a peer."""
        run, tensors, values = self.run, state['tensors'], json.loads(state['values'])
        own = values['replicas']
        stored = {key: SimpleNamespace(size=torch.Size(shape), properties=SimpleNamespace(dtype=tensors[key].dtype))
                  for key, shape in own['shapes'].items()}
        run.optimizer.state.clear()
        checkpoint.allocate_state(run.optimizer, stored)
        with torch.no_grad():
            for key, tensor in self._named_tensors():
                local_part(tensor).copy_(tensors[key])
        forget_gathered(run.parallel)
        run.guard.last_update = None
        run.guard.load_state(values)
        for hook in run.hooks:
            if hook.name in values:
                hook.load_state(values[hook.name])
        run.restore(values)
        run.evaluated_at, run.saved_iteration = own['evaluated_at'], own['saved_iteration']
        run.has_improved = own['has_improved']
        if own['ending']:
            run.end(*own['ending'])
        run.signals.stop, run.signals.save_requested = own['stop'], own['save_requested']
        run.signals.agreed = tuple(own['agreed'])
        run.log.pending = [tuple(pair) for pair in own['pending']] if self.processes.is_main else []
        run.log.begin = own['begin']


def buckets(gradients):
    """Yield lists of gradients, each of one dtype. A large gradient is alone."""
    bucket, room = [], BUCKET_BYTES
    for gradient in gradients:
        if gradient.nbytes >= ALONE_BYTES:
            yield [gradient]
            continue
        if bucket and (gradient.nbytes > room or gradient.dtype != bucket[0].dtype):
            yield bucket
            bucket, room = [], BUCKET_BYTES
        bucket.append(gradient)
        room -= gradient.nbytes
    if bucket:
        yield bucket


def describe_change(before, after):
    """Which replicas the names of members say are lost, and which have joined."""
    changes = dict(lost=set(before) - set(after), joined=set(after) - set(before))
    numbers = {change: sorted(int(name.split('-')[1]) for name in names) for change, names in changes.items()}
    return '; '.join(f'{change}: replica {", ".join(map(str, found))}' for change, found in numbers.items() if found)


def _on_device(tensor, device):
    """A tensor on a device. The host does not wait for the copy to a GPU, nor for what the GPU does before it."""
    if tensor.device != device and device.type == 'cuda':
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def _finish(wait, gradients, flat):
    """Wait for a sum, and write it to the gradients that it consists of. Returns whether the sum has arrived."""
    if wait is None or not wait():
        return False
    if gradients:
        sums = flat.split([gradient.numel() for gradient in gradients])
        torch._foreach_copy_(gradients, [part.view_as(own) for part, own in zip(sums, gradients)])
    return True


def _has_saved(out_dir):
    """Whether this run has saved a checkpoint. An earlier run in the folder does not count."""
    paths, began = checkpoint.find(out_dir), float(os.environ.get('REPLICAS_BEGAN', 0))
    return bool(paths) and os.path.getmtime(os.path.join(paths[0], '.metadata')) > began


def check_start(config):
    """Raise ValueError if this process was not started as one of a replica, or torchft is not installed."""
    missing = [name for name in VARIABLES if name not in os.environ]
    if missing:
        raise ValueError(f'fault_tolerance is replicas, but {", ".join(missing)} are not set: start the run with '
                         'python -m kilogpt.replicas, or set them for each replica (docs/faults.md)')
    if importlib.util.find_spec('torchft') is None:
        raise ValueError('fault_tolerance=replicas needs torchft: pip install torchft==0.2.0')
    if storage.is_url(config['out_dir']):
        raise ValueError(f'out_dir is {config["out_dir"]}, but fault_tolerance=replicas needs a folder that all '
                         'replicas see: set out_dir to one')
