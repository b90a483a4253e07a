"""The processes of a run: their ranks and devices, process group and meshes, and sums of numbers over all.

This file does not know the model. `Processes(device)` is enough for a script of one process; `join` connects
many, which torchrun or a launcher of MPI programs has started (launchers.py).
"""
import contextlib
import datetime
import json
import os
import sys
import time

import numpy as np
import torch
import torch.distributed as dist

from kilogpt.devices.cpus import cpu_name

LAUNCHED = 'OMPI_COMM_WORLD_SIZE', 'PMI_SIZE', 'SLURM_STEP_NUM_TASKS'  # set by launchers of MPI programs


class Waits:
    """What the iterations of a process wait for. device: of the process."""

    def __init__(self, device):
        self.device = device
        self._spans = dict(others=[], data=[], optimizer=[])  # {what: [(begin, end)]}, for seconds_of
        self._counts_waits = False
        self.waited = dict.fromkeys(self._spans, 0.0)  # seconds in all, as far as the host has measured them

    @contextlib.contextmanager
    def waits_counted(self):
        """Count the waits within this context, for `seconds_of`."""
        self._counts_waits = True
        try:
            yield
        finally:
            self._counts_waits = False

    def record_wait(self, begin, end, what='others'):
        """Record a wait between two times of `time.perf_counter` or of `device_time`.

        what: 'others' (processes), 'data', or 'optimizer', which is the work of an update.
        """
        if self._counts_waits:
            self._spans[what].append((begin, end))
            if isinstance(begin, float):
                self.waited[what] += end - begin

    @contextlib.contextmanager
    def waits_for_data(self):
        """A context in which this process waits for data. On a GPU, the time in which it has no work counts."""
        begin = self.device_time()
        yield
        self.record_wait(begin, self.device_time(), 'data')

    def device_time(self):
        """The present time on the device's clock. On a GPU this is an event in its stream, without a wait."""
        if self.device.type != 'cuda':
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds_of(self):
        """{'others', 'data', 'optimizer': seconds} that this process has waited or worked since the last call.

        Of the waits for other processes, those for DDP's gradients are counted. The waits of FSDP2, tensor, context
        and pipeline parallelism are within the model and are not measured.
        """
        seconds = {}
        for what, spans in self._spans.items():
            seconds[what] = sum(end - begin if isinstance(begin, float) else begin.elapsed_time(end) / 1000
                                for begin, end in spans)
            spans.clear()
        return seconds


class Processes(Waits):
    """This process among all of torchrun's: `rank`, `local_rank`, `world_size`, `is_main`, `device`.

    device: 'auto' (CUDA, else Apple's MPS, else CPU), 'cpu', 'cuda', 'cuda:1', 'mps'. Under torchrun with
    CUDA each process takes the GPU of its local rank. Raises ValueError for a device that does not exist.
    islands: the number of groups of processes that train separately (islands.py). `rank`, `world_size`,
    `is_main` and all communication but `barrier` and `tell_islands` are within this process's island. Raises
    ValueError if the islands do not divide the processes, or if a launcher's variables do not suffice.
    """

    def __init__(self, device='auto', islands=1):
        if any(name in os.environ for name in LAUNCHED):
            from kilogpt.parallel import launchers  # which other runs do not load
            launchers.adopt()
        self.local_rank = int(os.environ.get('LOCAL_RANK', 0))
        rank, count = int(os.environ.get('RANK', 0)), int(os.environ.get('WORLD_SIZE', 1))
        if count % islands:
            raise ValueError(f'islands={islands} does not divide the {count} process(es): '
                             f'start a multiple of {islands}, or set islands to a divisor of {count}')
        self.world_size, self.islands = count // islands, islands
        self.island, self.rank = divmod(rank, self.world_size)
        self.replicas = 1  # groups of processes that may be lost by themselves (kilogpt/replicas)
        self.is_main = self.rank == 0
        self.is_first = rank == 0  # the main process of island 0
        super().__init__(find_device(device, self.local_rank, count))
        self.between = None  # the Between of this process
        self.mesh = None  # the mesh of the parameters: pp × dp_replicate × dp_shard_cp × tp
        self.cp_mesh = None  # the mesh of the ranks that share sequences
        self.expert_mesh = None  # the mesh of experts' parameters

    def join(self, layout, backend='auto', comm_timeout=600):
        """Join the process group that torchrun announces and build the meshes of a Layout.

        backend: 'auto' is NCCL for CUDA tensors and gloo for CPU tensors. comm_timeout: in seconds.
        """
        raise_file_limit()
        is_alone = self.world_size == 1 and not layout.uses_fsdp
        if is_alone and self.islands == 1:
            return
        from kilogpt.parallel import errors, network
        network.choose_gloo_interface()
        if backend == 'nccl' and self.device.type != 'cuda':
            raise ValueError(f'backend=nccl needs CUDA GPUs, but the device is {self.device}: '
                             'use --backend=gloo')
        if backend == 'auto':
            backend = 'nccl' if self.device.type == 'cuda' else 'gloo'
        if backend == 'nccl':
            # Flags and sums of single numbers travel over gloo, which does not synchronize the device.
            backend = 'cpu:gloo,cuda:nccl'
        # The group's own timeout is longer than any wait that the watchdog allows. The watchdog ends a run
        # that hangs, since it names the process that hung and gives a start and a save more time.
        timeout = datetime.timedelta(seconds=3600 + 3 * comm_timeout)
        # NCCL's own watchdog has a monitor that aborts a process whose driver does not answer for 8 minutes, and does
        # not say which one hung, or some time after a member of another group was lost. Our watchdog reports.
        os.environ.setdefault('TORCH_NCCL_ENABLE_MONITORING', '0')
        # An event before each collective lets the watchdog see which device has reached the collective.
        os.environ.setdefault('TORCH_NCCL_ENABLE_TIMING', '1')
        store = store_of_all = dist.HashStore() if self.world_size * self.islands == 1 else network.fresh_store()
        if self.islands > 1:
            self.between = Between(store, self.rank, self.island, self.islands)
            store = dist.PrefixStore(f'island {self.island}', store)
        if is_alone:
            errors.report_errors(store_of_all)
            return
        dist.init_process_group(backend, store=store, rank=self.rank, world_size=self.world_size,
                                timeout=timeout)
        errors.report_errors(store_of_all)  # after init_process_group, which sets a hook of its own
        # Without this line the groups of meshes would have NCCL's own timeout, which comm_timeout may exceed.
        dist.distributed_c10d.default_pg_nccl_timeout = timeout
        self.build_meshes(layout)

    def machine(self):
        """The facts besides a run's keys that decide the bits of its results, as a list of plain values."""
        name = torch.cuda.get_device_name(self.device) if self.device.type == 'cuda' else cpu_name()
        return [self.world_size, name, torch.get_num_threads(), torch.__version__]

    def build_meshes(self, layout):
        """Make the device meshes of a Layout, if it needs any."""
        if layout.zero_stage == 0 and layout.cp == 1:
            return
        from torch.distributed.device_mesh import init_device_mesh  # slow, and not needed by plain DDP
        # FSDP2 shards parameters over the ranks of context parallelism too, which exchange activations on a
        # mesh of their own.
        self.mesh = init_device_mesh(
            self.device.type, (layout.pp, layout.dp_replicate, layout.dp_shard * layout.cp, layout.tp),
            mesh_dim_names=('pp', 'dp_replicate', 'dp_shard_cp', 'tp'))
        self.expert_mesh = self.mesh
        if layout.ep > 1:
            expert_shard = layout.dp_shard * layout.cp // layout.ep
            self.expert_mesh = init_device_mesh(
                self.device.type, (layout.pp, layout.dp_replicate, expert_shard, layout.ep, layout.tp),
                mesh_dim_names=('pp', 'dp_replicate', 'expert_shard', 'ep', 'tp'))
        if layout.cp > 1:
            cp_meshes = init_device_mesh(self.device.type, (layout.pp * layout.dp, layout.cp, layout.tp),
                                         mesh_dim_names=('pp_dp', 'cp', 'tp'))
            self.cp_mesh = cp_meshes['cp']

    def as_replicas(self, tensor):
        """A DTensor in the memory of a tensor that is the same on all processes of a pipeline stage."""
        from torch.distributed.tensor import DTensor, Replicate
        mesh = self.mesh['dp_replicate', 'dp_shard_cp', 'tp']
        return DTensor.from_local(tensor.detach(), mesh, [Replicate()] * 3, run_check=False)

    def say(self, text):
        """Print on one process alone, the main process of island 0."""
        if self.is_first:
            print(text, flush=True)

    # --- numbers over all processes -------------------------------------------------------------------------

    def _all_reduce(self, values, operation):
        """Reduce a list of numbers over all processes, in float64."""
        values = torch.tensor(values, dtype=torch.float64)
        if self.world_size > 1:
            begin = time.perf_counter()
            dist.all_reduce(values, operation)
            self.record_wait(begin, time.perf_counter())
        return values.tolist()

    def sum(self, value):
        """The sum of every process's number."""
        return self._all_reduce([value], dist.ReduceOp.SUM)[0]

    def sums(self, values):
        """The sums of every process's numbers, for each number of a list."""
        return self._all_reduce(values, dist.ReduceOp.SUM)

    def max(self, value):
        """The largest of every process's numbers."""
        return self._all_reduce([value], dist.ReduceOp.MAX)[0]

    def any(self, flag):
        """True on every process if the flag is set on one of them."""
        return bool(self.max(bool(flag)))

    def gather(self, value):
        """Every process's number, in the order of ranks."""
        values = [0.0] * self.world_size
        values[self.rank] = value
        return self._all_reduce(values, dist.ReduceOp.SUM)

    def sum_later(self, numbers, of_rank=0.0):
        """Start the sums of every process's numbers, {name: number}; returns a function that waits for them.

        The function returns {name: sum} and [of_rank of each process].
        """
        of_ranks = [0.0] * self.world_size
        of_ranks[self.rank] = of_rank
        sums = torch.tensor([*numbers.values(), *of_ranks], dtype=torch.float64)
        under_way = dist.all_reduce(sums, async_op=True) if self.world_size > 1 else None

        def wait():
            if under_way:
                begin = time.perf_counter()
                under_way.wait()
                self.record_wait(begin, time.perf_counter())
            values = sums.tolist()
            return dict(zip(numbers, values)), values[len(numbers):]

        return wait

    def share(self, value, rank=0):
        """The value of one rank, by default of the main process, on every process: any picklable object."""
        if self.world_size == 1:
            return value
        values = [value]
        dist.broadcast_object_list(values, src=rank, device=torch.device('cpu'))
        return values[0]

    def first_problem(self, problem):
        """(rank, problem) of the first process that passes a problem, on every process; None without one."""
        has_problem = self.gather(bool(problem))
        if not any(has_problem):
            return None
        rank = has_problem.index(1)
        return rank, self.share(problem, rank)

    def barrier(self):
        """Wait until every process of every island has called this."""
        self.any(False)
        if self.between:
            self.between.barrier()

    def tell_islands(self, value):
        """The JSON values that the islands' main processes pass, by island, on all processes."""
        values = [value]
        if self.between:
            values = self.between.tell(value) if self.is_main else None
        return self.share(values)

    def leave(self, exit_code):
        """End this process once every process has called this."""
        # Processes wait until the main process has written, since torchrun ends all others when one fails.
        self.barrier()
        if self.world_size > 1:
            dist.destroy_process_group()
        sys.stdout.flush()
        # A regular exit takes a second, and would abort in threads of gloo that still need the interpreter.
        os._exit(exit_code)

    def seed(self, seed, iteration, rank):
        """Seed the generators of this process's device and of its CPU for an iteration.

        rank: this process among those of all islands.
        torch.manual_seed also records a stack trace for each type of device that is not in use, in 0.4 ms.
        """
        number = int(np.random.SeedSequence([seed, iteration, rank]).generate_state(1)[0])
        torch.default_generator.manual_seed(number)
        if self.device.type != 'cpu':
            torch.get_device_module(self.device).manual_seed(number)


class Between:
    """Connects a process with the processes of the same rank in the other islands.

    torch.distributed knows the processes of one island alone, hence groups without torch.distributed's help.
    """

    def __init__(self, store, rank, island, islands):
        """store: of all processes of all islands."""
        self.store, self.rank, self.island, self.islands = store, rank, island, islands
        self._group = self.connect('barrier')
        self._n_told = 0

    def connect(self, purpose):
        """A gloo group, in which the island is the rank."""
        store = dist.PrefixStore(f'{purpose} of {self.rank}', self.store)
        return dist.ProcessGroupGloo(store, self.island, self.islands, datetime.timedelta(days=30))

    def barrier(self):
        """Wait until the processes of all islands have called this."""
        self._group.barrier().wait()

    def tell(self, value):
        """The JSON values that the islands pass, by island. One process of each island calls this."""
        self._n_told += 1
        keys = [f'value {self._n_told} of {island}' for island in range(self.islands)]
        self.store.set(keys[self.island], json.dumps(value))
        return [json.loads(self.store.get(key)) for key in keys]

    def leave_note(self, subject, text):
        """Leave a note that `read_notes` of the other islands finds. A later note replaces an earlier one."""
        self.store.set(f'{subject} {self.island}', text)

    def read_notes(self, subject):
        """{island: note} of the islands that have left a note."""
        keys = {island: f'{subject} {island}' for island in range(self.islands)}
        return {island: self.store.get(key).decode() for island, key in keys.items()
                if self.store.check([key])}


def raise_file_limit():
    """Raise the limit of open files to the hard limit, in this process and in the torchrun that started it.

    gloo has a socket for each other process, once for the run and once for the saves: 2N sockets, while many
    systems allow 1,024 files. torchrun on the first node, which keeps the store, has as many. A dataset needs
    a file for each of its shards.
    """
    try:
        import resource
    except ImportError:  # Windows
        return
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    with contextlib.suppress(OSError, ValueError):  # macOS refuses its own hard limit
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    if 'TORCHELASTIC_RUN_ID' in os.environ and hasattr(resource, 'prlimit'):  # Linux
        with contextlib.suppress(OSError, ValueError):
            resource.prlimit(os.getppid(), resource.RLIMIT_NOFILE, (hard, hard))


# --- device and dtype ---------------------------------------------------------------------------------------

def find_device(device='auto', local_rank=0, world_size=1):
    """The torch.device that a `device` key means on a local rank. Raises ValueError if it does not exist."""
    if device == 'auto':
        device = 'cpu'
        if torch.cuda.is_available():
            device = 'cuda'
        elif torch.backends.mps.is_available():
            device = 'mps'
    if device == 'cuda' or (device.startswith('cuda:') and world_size > 1):
        device = f'cuda:{local_rank}'
    try:
        found = torch.device(device)
    except RuntimeError:
        raise ValueError(f'device is {device!r}: use auto, cpu, cuda, cuda:N or mps') from None
    if found.type == 'cuda':
        if not torch.cuda.is_available():
            raise ValueError(f'device={device}, but PyTorch {torch.__version__} finds no CUDA GPU here: '
                             'use --device=auto or --device=cpu')
        if found.index >= torch.cuda.device_count():
            raise ValueError(
                f'device={device}, but there are {torch.cuda.device_count()} GPUs here: start at most that '
                'many processes on this node (--nproc_per_node) or name another device')
        torch.cuda.set_device(found)
    elif found.type == 'mps' and not torch.backends.mps.is_available():
        raise ValueError('device=mps, but PyTorch finds no Apple GPU here: use --device=auto or --device=cpu')
    return found


def resolve_dtype(dtype, device):
    """The dtype that a `dtype` key means on a device: 'float32', 'bfloat16' or 'float16'.

    'auto' is bfloat16 on CUDA GPUs, or float16 on those that only emulate bfloat16 (T4, V100, RTX 20). On
    other devices it is float32, but bfloat16 on CPUs that multiply in bfloat16 (AVX512-BF16, AMX).
    """
    if dtype not in ('auto', 'float32', 'bfloat16', 'float16'):
        raise ValueError(f'dtype is {dtype!r}: use auto, float32, bfloat16 or float16')
    if dtype != 'auto':
        return dtype
    if device.type == 'cuda':
        return 'bfloat16' if torch.cuda.is_bf16_supported(including_emulation=False) else 'float16'
    if device.type == 'cpu' and _cpu_multiplies_in_bfloat16():
        return 'bfloat16'
    return 'float32'


def _cpu_multiplies_in_bfloat16():
    # Not every version of PyTorch has both functions.
    for name in ('_is_avx512_bf16_supported', '_is_amx_tile_supported'):
        is_supported = getattr(torch.cpu, name, None)
        if is_supported is not None and is_supported():
            return True
    return False


def autocast(dtype, device):
    """The context in which a forward pass computes in dtype."""
    if dtype == 'float32':
        return contextlib.nullcontext()
    return torch.autocast(device.type, getattr(torch, dtype))


def make_deterministic():
    """Make equal runs on equal GPUs equal to the bit. Call this before CUDA starts.

    By default the backward pass of flash attention adds in any order, and TorchInductor takes the kernels
    that were faster in a measurement. An operation without a deterministic form raises RuntimeError.
    """
    # With this setting the backward pass of flash attention adds in a fixed order, cuDNN's attention is not
    # used, and the process group keeps NCCL from summing within the switch (NCCL_ALGO=^NVLS).
    torch.use_deterministic_algorithms(True)
    # By default the setting also fills every new tensor with NaN, which takes time and changes no result.
    torch.utils.deterministic.fill_uninitialized_memory = False
    os.environ.setdefault('CUBLAS_WORKSPACE_CONFIG', ':4096:8')  # the same workspace for every product
    from torch._inductor import config  # slow, and not needed without this setting
    config.deterministic = True
