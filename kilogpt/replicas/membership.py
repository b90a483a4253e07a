"""Who takes part in an iteration: a quorum of replicas by torchft, their process group, and the state of a peer.

torchft (github.com/pytorch/torchft, BSD) has the servers: a lighthouse that all replicas ask for a quorum, and one
manager for each replica, whose processes vote on each update. Only its `coordination` interface, its process
groups and its HTTP transport are used.
"""
import math
import os
import pickle
import select
import socket
import sys
import threading
import time
import urllib.parse
import urllib.request
import uuid
import warnings
from datetime import timedelta

import torch
import torch.distributed as dist

os.environ.setdefault('RUST_LOG', 'error')  # read when torchft is imported
from torch.distributed._serialization import _streaming_load
from torchft.checkpointing import HTTPTransport
from torchft.coordination import ManagerClient, ManagerServer
from torchft.process_group import ProcessGroupGloo, ProcessGroupNCCL

from kilogpt.parallel.network import choose_gloo_interface

CONNECT_SECONDS = 5  # in which the members of a new quorum connect; one of them may have been lost since
warnings.filterwarnings('ignore', 'The given buffer is not writable')  # of a received tensor, which is only read
PROBE_SECONDS = 1e-4  # between two looks at the device and at the members while the device adds up
ARRIVE_SECONDS = 0.3  # in which sums arrive that a lost member has sent
QUORUM_SECONDS = 86400  # for which a replica waits for others, which may be evaluating, or for the lighthouse


def with_timeout(process_group):
    """A class of torchft's process groups whose operations have the time limit `seconds`, unlike connections."""
    class Group(process_group):
        seconds = 60.0

        def _opts_hook(self, opts):
            opts.timeout = timedelta(seconds=self.seconds)
            return opts

    return Group


class NCCLGroup(with_timeout(ProcessGroupNCCL)):
    """NCCL, which must not end this process when another replica is lost."""
    # PyTorch's threads read these when they start to watch a group. By default, an error of NCCL between replicas
    # ends the process, or makes an abort wait for a minute.
    HARMLESS = dict(TORCH_NCCL_ASYNC_ERROR_HANDLING='0', TORCH_NCCL_ENABLE_MONITORING='0',
                    TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC='0')

    def __init__(self, timeout):
        os.environ.setdefault('TORCH_NCCL_NONBLOCKING_TIMEOUT', str(math.ceil(timeout.total_seconds())))
        super().__init__(timeout)

    def _create_pg(self, store, rank, world_size):
        before = {name: os.environ.get(name) for name in self.HARMLESS}
        os.environ.update(self.HARMLESS)
        try:
            group = super()._create_pg(store, rank, world_size)
        finally:
            for name, value in before.items():
                os.environ.pop(name)
                if value is not None:
                    os.environ[name] = value
        # `seconds` counts, and may be longer than the 10 minutes after which PyTorch's watchdog reports an error.
        group._get_backend(torch.device('cuda'))._set_default_timeout(timedelta(seconds=QUORUM_SECONDS))
        return group


class SafeTransport(HTTPTransport):
    """Sends the state of a process to a peer over HTTP. The peer unpickles tensors and strings alone."""

    def __init__(self, timeout):
        super().__init__(timeout, num_chunks=0)
        self._server.RequestHandlerClass.log_message = lambda *_: None
        self._checkpoint_lock.timeout = 3 * timeout.total_seconds()  # longer than a peer that hangs is waited for

    @classmethod
    def _load_from_address(cls, address, timeout):
        with urllib.request.urlopen(address, timeout=timeout.total_seconds()) as file:
            return _streaming_load(file, weights_only=True)


class Membership:
    """The part of this replica in the quorums of all. All processes of the replica make the same calls.

    processes: those of the replica. name: of `unique_name`; the smallest leads.
    lighthouse: its URL. timeout: seconds after which an operation with other replicas has failed.

    index, count: this replica among the members of the last quorum. step: the number of updates on which the
    replicas have agreed. names: those of the members, each with the address of its store.
    """

    def __init__(self, processes, name, lighthouse, timeout):
        self.processes, self.timeout = processes, timedelta(seconds=timeout)
        self.index, self.count, self.step, self.names = 0, 1, 0, []
        self.failures = 0  # in a row; tells the lighthouse to connect the members again
        self._quorum, self._is_broken = None, False
        self._connections = []  # to the stores of the members, each of which ends with its process
        self._asked_at = math.inf  # when this replica has asked for the quorum that it waits for
        host = urllib.parse.urlsplit(lighthouse).hostname
        if host != '127.0.0.1':  # that of a launcher, all of whose replicas are on this machine
            choose_gloo_interface(host)
        on_gpu = processes.device.type == 'cuda'
        if on_gpu:
            self.group = NCCLGroup(self.timeout)
        else:
            self.group = with_timeout(ProcessGroupGloo)(timedelta(seconds=min(timeout, CONNECT_SECONDS)))
        self.group.seconds = timeout
        self._transport = SafeTransport(self.timeout)
        addresses = None
        if processes.is_main:
            host = socket.gethostname()
            self._store = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False)
            self._server = ManagerServer(
                replica_id=f'{name}@{host}:{self._store.port}', lighthouse_addr=lighthouse, hostname=host, bind='[::]:0',
                store_addr=f'{host}:{self._store.port}', world_size=processes.world_size,
                heartbeat_interval=timedelta(milliseconds=100), connect_timeout=self.timeout,
                # The manager waits QUORUM_SECONDS / (retries + 1) before it asks a lighthouse again that has failed.
                quorum_retries=5 * QUORUM_SECONDS)
            addresses = self._server.address()
            threading.Thread(target=self._watch_lighthouse, args=[lighthouse], daemon=True).start()
        self._client = ManagerClient(processes.share(addresses), connect_timeout=self.timeout)

    def _watch_lighthouse(self, url):
        """Say, from a thread, that this replica waits for a lighthouse that does not answer; once each time."""
        address, is_told = urllib.parse.urlsplit(url), False
        while True:
            time.sleep(1)
            if time.monotonic() - self._asked_at < CONNECT_SECONDS:
                is_told = False
                continue
            try:
                socket.create_connection((address.hostname, address.port), CONNECT_SECONDS).close()
            except OSError as error:
                if not is_told:
                    print(f'the lighthouse at {url} does not answer ({error.strerror or error}): waiting for it',
                          file=sys.stderr, flush=True)
                is_told = True

    def meet(self, state, load):
        """Form a quorum with the replicas that ask for one, and connect to its members.

        state(): what a replica that is behind takes over from this one. load(state): takes over that of a peer.
        Returns whether this replica has taken over the state of a peer.
        """
        has_loaded = False
        while True:
            self._asked_at = time.monotonic()
            quorum = self._client._quorum(
                group_rank=self.processes.rank, step=self.step, checkpoint_metadata=self._transport.metadata(),
                shrink_only=False, timeout=timedelta(seconds=QUORUM_SECONDS), commit_failures=self.failures,
                init_sync=False)
            self._asked_at = math.inf
            is_new = (quorum.quorum_id, quorum.replica_ids) != self._quorum
            if quorum.recover_dst_replica_ranks:
                if self.processes.device.type == 'cuda':  # the transport copies in a stream of its own
                    torch.cuda.synchronize(self.processes.device)
                self._transport.send_checkpoint(
                    quorum.recover_dst_replica_ranks, quorum.max_step, state(), self.timeout)
            received = None
            try:
                self._join(quorum, is_new)
                if quorum.heal:
                    received = self._receive(quorum)
            except (RuntimeError, OSError, EOFError, ValueError, pickle.UnpicklingError):  # a member was lost since
                self._is_broken = True
            if is_new and not self._all_here(not self._is_broken):
                continue
            if received is not None:
                load(received)
                self.step, has_loaded = quorum.max_step, True
            return has_loaded

    def _join(self, quorum, is_new):
        self.index, self.count = quorum.replica_rank, quorum.replica_world_size
        self.names = list(quorum.replica_ids)
        if is_new:
            self._quorum, self._is_broken = (quorum.quorum_id, quorum.replica_ids), False
            self._probe_members()
            # A lighthouse that was started again counts from 1, but the store still has the addresses of old groups.
            unique = uuid.uuid5(uuid.NAMESPACE_OID, f'{quorum.max_step} {self.names}').hex
            self.group.configure(
                f'{quorum.store_address}/{quorum.quorum_id}/{unique}/{self.processes.rank}', self.names[self.index],
                self.index, self.count, quorum.quorum_id, self.processes.rank, self.processes.world_size)

    def _probe_members(self):
        """Raise OSError if a member is gone already. Otherwise the others would wait for CONNECT_SECONDS or longer.

        The store of each member is in its main process.
        """
        while self._connections:
            self._connections.pop().close()
        for name in self.names:
            host, _, port = name.partition('@')[2].rpartition(':')
            self._connections.append(socket.create_connection((host, int(port)), CONNECT_SECONDS))

    def _receive(self, quorum):
        peer = ManagerClient(quorum.recover_src_manager_address, connect_timeout=self.timeout)
        address = peer._checkpoint_metadata(self.processes.rank, timeout=self.timeout)
        return self._transport.recv_checkpoint(quorum.recover_src_replica_rank, address, quorum.max_step, self.timeout)

    def _all_here(self, is_ready):
        """Whether all processes of this replica are ready; otherwise its members notice that it has left them."""
        if self._agree(is_ready):
            return True
        self._leave_group()
        return False

    def _agree(self, is_ready):
        """Whether all processes of this replica are ready. One of them may only now notice that it waits in vain."""
        return self._client.should_commit(self.processes.rank, self.step, is_ready, timeout=3 * self.timeout)

    def _leave_group(self):
        self._transport.disallow_checkpoint()
        self.group.abort(errored=False)
        self.failures += 1
        self._is_broken = True

    def add_up(self, tensors):
        """Sum each tensor over the members, in place; returns a function that waits, or None after a failure."""
        if self._is_broken:
            return None
        if self.count == 1:
            return lambda: True
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp.SUM
        try:
            works = [self.group.allreduce([tensor], options) for tensor in tensors]
        except (RuntimeError, AssertionError):  # the latter if the group was aborted
            self._is_broken = True
            return None
        return lambda: self._wait(works)

    def _wait(self, works):
        try:
            for work in works:
                work.wait()
        except RuntimeError:
            self._is_broken = True
        return not self._is_broken

    def _wait_for_device(self):
        """Wait until a GPU has added up. If a member is lost, NCCL may wait for it, with the device, for ever."""
        added = torch.cuda.Event()
        added.record()
        lost = select.poll()
        for connection in self._connections:
            lost.register(connection, select.POLLIN)  # nothing comes but the end
        deadline = math.inf
        while not added.query():
            if self._is_broken or time.monotonic() > deadline:
                self.group.abort()
                self._is_broken = True
                added.synchronize()
            elif deadline == math.inf and lost.poll(0):
                deadline = time.monotonic() + ARRIVE_SECONDS
            time.sleep(PROBE_SECONDS)

    def vote(self):
        """Whether the sums have arrived on all processes of this replica. If so, the update is to be made."""
        if self.processes.device.type == 'cuda':
            self._wait_for_device()
        is_ready = not self._is_broken and self.group.errored() is None
        is_agreed = self._agree(is_ready)
        if is_agreed:
            self._transport.disallow_checkpoint()
            self.step += 1
            self.failures = 0
        else:
            self._leave_group()
        return is_agreed


def unique_name(index, is_restarted):
    """The name of a replica. Those that have been members for longer lead, at first replica 0."""
    age = time.time_ns() if is_restarted else 0
    return f'{age:020d}-{index:04d}-{uuid.uuid4().hex[:8]}'
