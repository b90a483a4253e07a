"""Report what ranks of a cluster would allocate and send: one iteration of the real code on fake tensors.

    python -m kilogpt.plan.dry_run 511 1024 config/gpt_70b_3d.py

prints the report of rank 511 of 1,024 as JSON. The process joins a process group that does nothing, lays the
model out on fake tensors, which have shapes but no memory, and runs one iteration. An error that would end
the run on the cluster ends it here, too. `dry_run` starts such a process for each of several ranks.

The tensors are on a fake CPU even if the run is for GPUs, since PyTorch without CUDA has no other fake
device; `substitutes_for_gpus` replaces the parts that differ on GPUs. Nothing is compiled (a compiled model
holds fewer activations), fp8 is emulated, and every expert of a mixture gets the same number of tokens.
"""
import contextlib
import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from unittest import mock

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn import functional as F

from kilogpt.configurator import config_of, exit_on_error
from kilogpt.devices import cpu
from kilogpt.devices.cuda import flash_attention_runs, repeat_grouped_heads
from kilogpt.devices.grouped_products import group_products
from kilogpt.devices.parts import find_parts, replace_parts
from kilogpt.launch_train import ROOT, last_error
from kilogpt.optim import build_optimizer
from kilogpt.parallel import apply, ddp
from kilogpt.parallel.layout import CHECKED_KEYS, Layout
from kilogpt.parallel.processes import Processes, resolve_dtype
from kilogpt.plan.byte_counter import PARTS, ByteCounter
from kilogpt.plan.models import model_config
from kilogpt.run.metrics import peak_memory_gb
from kilogpt.settings import check_settings
from model import GPT, DotProductAttention

HOPPER = (9, 0)  # the compute capability assumed for GPUs


# --- several ranks, each in a process of its own ------------------------------------------------------------

def dry_run(arguments, world_size, ranks=()):
    """[report] of several ranks of a run of train.py, in the order of ranks. Three are computed at a time.

    arguments: config files and keys of train.py. ranks: empty = the first, a middle and the last rank.
    ValueError with the message of the first rank that would not start.
    """
    ranks = sorted(set(ranks or (0, (world_size - 1) // 2, world_size - 1)))
    if not 0 <= ranks[0] <= ranks[-1] < world_size:
        raise ValueError(f'ranks is {ranks}, but the ranks of {world_size} process(es) are 0 to '
                         f'{world_size - 1}: choose --ranks from these')
    with ThreadPoolExecutor(3) as pool:
        return list(pool.map(lambda rank: _launch(arguments, world_size, rank), ranks))


def _launch(arguments, world_size, rank):
    command = [sys.executable, '-m', 'kilogpt.plan.dry_run', str(rank), str(world_size), *arguments]
    environment = dict(os.environ, OMP_NUM_THREADS='1', CUDA_VISIBLE_DEVICES='')
    run = subprocess.run(command, env=environment, capture_output=True, text=True)
    if run.returncode:
        message = last_error(run.stderr).removeprefix('error: ')
        raise ValueError(f'rank {rank}: {message}')
    return json.loads(run.stdout.splitlines()[-1])


def table(results, predicted=None):
    """Lines of two tables: each rank's memory at the peak in GB, and each rank's collectives.

    predicted: {part of PARTS: bytes} of the fullest rank by the planner's formulas, shown in another column.
    """
    columns = [f'rank {result["rank"]}' for result in results] + ['formula'] * bool(predicted)
    lines = [f'{"GB at the peak":<18}' + ''.join(f'{column:>12}' for column in columns)]
    memories = [result['peak_parts'] for result in results] + [predicted] * bool(predicted)
    memories = [memory | dict(all=sum(memory.values())) for memory in memories]
    for part in (*PARTS, 'all'):
        figures = [memory.get(part, 0) for memory in memories]
        if any(figures):
            lines.append(f'{part:<18}' + ''.join(f'{figure / 1e9:>12.3f}' for figure in figures))
    for result in results:
        lines.append(f'rank {result["rank"]} sends and receives in an iteration:')
        for row in result['collectives']:
            lines.append(f'  {row["kind"]:<15}{row["group"]:<14}{row["dtype"]:<10}'
                         f'{row["calls"]:>8,} calls {row["bytes"] / 1e9:>12.3f} GB')
    return lines


# --- one rank, in this process ------------------------------------------------------------------------------

def run_rank(config):
    """The report, a dict, of this process's rank (RANK, WORLD_SIZE). config: the values of train.py's keys.

    `peak_parts` has the bytes of each part at the moment of the iteration when their sum, `peak_bytes`, is
    largest; `held` has the bytes at the optimizer's step. ValueError if train.py would raise it.
    """
    began = time.perf_counter()
    check_settings(config)
    processes = FakeProcesses('cpu')
    layout = Layout.of(processes.world_size, config)
    processes.join(layout)
    on_gpu, block_size = config['device'] != 'cpu', config['block_size']
    dtype = 'bfloat16' if on_gpu and config['dtype'] == 'auto' else config['dtype']
    dtype = resolve_dtype(dtype, processes.device)
    global_batch = config['batch_size'] * config['gradient_accumulation_steps']
    micro_batch, micro_steps = layout.split_batch(global_batch, config['batch_size'])

    memory = FakeMemory()
    with torch.device('meta'):
        model = FakeGPT(model_config(config), memory)
    n_parameters = model.num_params()
    memory.counter.logits_width = model.config.padded_vocab_size // layout.tp
    memory.counter.group_names = names_of_groups(processes)
    with contextlib.ExitStack() as substitutes:
        n_rows = micro_batch * block_size // layout.cp * model.config.n_active_experts
        for substitute in (substitutes_for_experts(n_rows) + substitutes_for_communication(memory)
                           + substitutes_for_gpus(dtype) * on_gpu):
            substitutes.enter_context(substitute)
        laid_out = apply.Parallel(processes, layout)
        keys = *CHECKED_KEYS, 'batch_size', 'gradient_accumulation_steps'
        laid_out.parallelize(model, {key: config[key] for key in keys}, dtype)
        lay_out_seconds = time.perf_counter() - began
        with memory:
            optimizer = build_optimizer(config, laid_out.optimizer_parameters(), model.split_plan, dtype,
                                        laid_out.apply_to_whole_matrices)
            laid_out.attach_optimizer(optimizer)
            rows = micro_batch * (micro_steps if layout.pp > 1 else 1)
            x, y = torch.zeros(2, rows, block_size // layout.cp, dtype=torch.int64)
            steps = 1 if layout.pp > 1 else micro_steps
            held = run_iterations(laid_out, optimizer, x, y, steps, config['grad_clip'], memory.counter)
    in_host_memory = ('parameters', 'gradients', 'moments') if config['cpu_offload'] and on_gpu else ()
    peak_parts = memory.counter.peak(left_out=in_host_memory)
    return dict(
        rank=processes.rank, world_size=processes.world_size, layout=layout.describe(),
        coordinates=dict(zip(('pp', 'dp', 'cp', 'tp'), layout.coordinates(processes.rank))),
        notes=layout.notes + layout.split_notes(global_batch, config['batch_size']) + laid_out.notes
        + ['nothing is compiled here: a compiled model holds fewer activations'] * config['compile']
        + ['each expert gets the same number of tokens here'] * (model.config.mlp == 'moe'),
        parameters=n_parameters, micro_batch=micro_batch, micro_steps=micro_steps, dtype=dtype,
        held=held, peak_bytes=sum(peak_parts.values()), peak_parts=peak_parts,
        collectives=memory.counter.collectives(), lay_out_seconds=lay_out_seconds,
        seconds=time.perf_counter() - began)


def run_iterations(laid_out, optimizer, x, y, steps, grad_clip, counter):
    """Create the optimizer's state, then run one iteration as train.py does; returns {part: bytes} held.

    Only this iteration counts for the counter's peak and collectives.
    """
    parameters = [parameter for _, parameter in laid_out.optimizer_parameters()]
    counter.label((parameter for _, parameter in laid_out.named_parameters()), 'parameters')
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    for parameter in parameters:
        parameter.grad = None
    for state in optimizer.state.values():
        counter.label(state.values(), 'moments')
    counter.phase = 'activations'
    if laid_out.processes.world_size > 1 and not laid_out.layout.uses_fsdp:
        laid_out.warm_up(lambda: (x, y))  # builds DDP's buckets; with FSDP2 the first pass is like the others

    counter.start()
    for step in sorted({0, min(1, steps - 1), steps - 1}):
        # The micro-steps between the first and the last are alike, so the second counts for all of them.
        counter.repeats = steps - 2 if 0 < step < steps - 1 else 1
        laid_out.forward_backward((x, y), last=step == steps - 1)
    counter.phase = 'other'
    grad_norm = laid_out.clip_gradients(grad_clip)
    counter.label((p.grad for p in parameters if p.grad is not None), 'gradients')
    optimizer.found_inf = (~grad_norm.isfinite()).float()
    held = counter.bytes_alive()
    optimizer.step()
    laid_out.balance.update(grad_norm.isfinite().float())
    laid_out.zero_grad()
    return {part: held[part] for part in ('parameters', 'gradients', 'moments')}


class FakeProcesses(Processes):
    """The processes of a run, of which only this one exists."""

    def join(self, layout):
        from torch.testing._internal.distributed.fake_pg import FakeStore
        if self.world_size > 1 or layout.uses_fsdp:
            dist.init_process_group('fake', store=FakeStore(), rank=self.rank, world_size=self.world_size)
            self.build_meshes(layout)


class FakeMemory:
    """A context in which tensors are fake and a ByteCounter counts them."""

    def __init__(self):
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)
        self.counter = ByteCounter(self.mode)

    def __enter__(self):
        self.mode.__enter__()
        self.counter.__enter__()

    def __exit__(self, *error):
        self.counter.__exit__(*error)
        self.mode.__exit__(*error)


class FakeGPT(GPT):
    """A GPT that is built on the meta device and gets fake memory when it is laid out."""

    def __init__(self, config, memory):
        super().__init__(config, seed=None)
        self.memory = memory

    def to_empty(self, *, device, recurse=True):
        if torch.device(device).type == 'meta':
            return super().to_empty(device=device, recurse=recurse)
        with self.memory:
            return super().to_empty(device=device, recurse=recurse)

    def __deepcopy__(self, memo):
        memo[id(self.memory)] = self.memory  # stages of a pipeline share it
        copy = self.__class__.__new__(self.__class__)
        memo[id(self)] = copy
        copy.__dict__.update(deepcopy(self.__dict__, memo))
        return copy


def names_of_groups(processes):
    """{name of a process group: name of its dimension of the mesh}."""
    names = {}
    if dist.is_initialized():
        names[dist.group.WORLD.group_name] = 'all'
    for mesh in filter(None, (processes.expert_mesh, processes.mesh, processes.cp_mesh)):
        for name in mesh.mesh_dim_names:
            names[mesh.get_group(name).group_name] = name
    return names


# --- substitutes for what fake tensors and a fake process group cannot do -----------------------------------

def substitutes_for_communication(memory):
    """Contexts in which DDP and pipelines run without the messages of other processes."""
    from torch.distributed.pipelining import schedules
    from torch.distributed.tensor import _sharding_prop
    reducer_buckets = dist._compute_bucket_assignment_by_size

    def final_buckets(parameters, limits, *options):
        # DDP begins with one bucket, and exchanges the indices of the final buckets after its first pass.
        return reducer_buckets(parameters, [dist._DEFAULT_FIRST_BUCKET_BYTES, 25 * 2 ** 20], *options)

    replicate = ddp.replicate

    def replicate_in_fake_memory(model, device, zero_mesh, grad_compress):
        from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
        with memory:
            network, zero1, powersgd = replicate(model, device, zero_mesh, grad_compress)
        if not zero1 and grad_compress == 'none':  # DDP's own reduction, but in Python, where it is counted
            network.register_comm_hook(None, allreduce_hook)
        return network, zero1, powersgd

    all_reduce = dist.all_reduce

    def all_reduce_at_once(tensor, op=dist.ReduceOp.SUM, group=None, async_op=False):
        all_reduce(tensor, op, group)
        return FinishedWork(tensor) if async_op else None

    send_and_receive = schedules._batch_p2p

    def send_and_receive_at_once(operations, desc=None):
        send_and_receive(operations, desc)
        return [FinishedWork(operation.tensor) for operation in operations]

    def agree_on_shapes(schedule, stages, *options):
        # The stages vote on whether each was given its shapes. Here each was, but no other rank votes.
        for stage in stages:
            stage._inference_mode = schedules.InferenceMode.STATIC

    contexts = [
        mock.patch.object(dist, '_compute_bucket_assignment_by_size', final_buckets),
        mock.patch.object(dist.Reducer, '_rebuild_buckets', lambda reducer: False),
        mock.patch.object(dist, 'all_reduce', all_reduce_at_once),
        mock.patch.object(schedules, '_batch_p2p', send_and_receive_at_once),
        mock.patch.object(ddp, 'replicate', replicate_in_fake_memory)]
    if hasattr(_sharding_prop, 'detect_fake_mode'):
        # DTensor computes shapes on whole tensors. Without an active fake mode it creates its own.
        contexts.append(mock.patch.object(_sharding_prop, 'detect_fake_mode', lambda *inputs: None))
    if hasattr(schedules._PipelineSchedule, '_warmup_p2p'):  # since torch 2.13
        contexts.append(mock.patch.object(schedules._PipelineSchedule, '_warmup_p2p', agree_on_shapes))
    return contexts


class FinishedWork(dist.Work):
    """The handle of a finished operation. Unlike a fake process group's handle, it keeps the tensor alive.

    A pipeline's schedule keeps its handles, and with them the tensors it sent, until the iteration ends.
    """

    def __init__(self, tensor):
        super().__init__()
        self.tensor = tensor

    def wait(self, timeout=None):
        return True

    def get_future(self):
        future = torch.futures.Future()
        future.set_result([self.tensor])
        return future


def substitutes_for_experts(n_rows):
    """Contexts in which all experts, and all processes that have experts, get the same number of rows.

    The only values that the model reads are numbers of rows: for each expert, and to and from each process.
    Fake tensors have no values. n_rows: rows of a micro-batch, the sum of each such list.
    """
    from torch import _meta_registrations

    def even_numbers(counts):
        share, rest = divmod(n_rows, len(counts))
        return [share + (index < rest) for index in range(len(counts))]

    def shape_in_any_dtype(rows, matrices, *scales, offs=None, out_dtype=None, **options):
        return _meta_registrations._create_grouped_mm_output_tensor(rows, matrices, offs, out_dtype)

    contexts = [mock.patch.object(FakeTensor, 'tolist', even_numbers)]
    if hasattr(_meta_registrations, '_create_grouped_mm_output_tensor'):  # otherwise accepts only bfloat16
        contexts.append(mock.patch.object(_meta_registrations, '_meta_grouped_mm_common', shape_in_any_dtype))
    return contexts


def substitutes_for_gpus(dtype):
    """Contexts in which a model on a CPU has the parts that it would have on a GPU."""
    from torch.distributed.tensor import placement_types

    def use_parts_of_gpus(model, use_kernels):
        group_products(model, [torch.bfloat16])
        for owner, name in find_parts(model, 'attention'):
            attention = getattr(owner, name)
            attention.__class__ = FlashAttention
            if not flash_attention_runs(dtype, HOPPER):
                attention.register_forward_pre_hook(repeat_grouped_heads)
        replace_parts(model, 'mask', lambda build_mask: lambda first: None)  # no tensor of T × T there either

    composite = torch.nn.RMSNorm.forward

    def fused_rms_norm(norm, x):
        if torch.is_autocast_enabled('cpu'):  # on GPUs, autocast computes it in float32
            x = x.float()
        if x.dtype != norm.weight.dtype:  # not fused on GPUs either
            return composite(norm, x)
        # CPUs have no fused RMSNorm. Their LayerNorm keeps the same tensors, plus a mean for each row.
        return F.layer_norm(x, norm.normalized_shape, norm.weight, None, norm.eps)

    def fused_dropout(x, p=0.5, training=True, inplace=False):  # keeps a byte for each element, as on GPUs
        return torch.native_dropout(x, p, training)[0] if training and p else x

    def all_to_all(x, gather_dim, shard_dim, mesh, mesh_dim):  # DTensor gathers instead on a CPU, for gloo
        group = mesh.get_group(mesh_dim).group_name
        return torch.ops._dtensor.shard_dim_alltoall(x, gather_dim, shard_dim, group)

    return [mock.patch.object(cpu, 'use_faster_parts', use_parts_of_gpus),
            mock.patch.object(torch.nn.RMSNorm, 'forward', fused_rms_norm),
            mock.patch.object(F, 'dropout', fused_dropout),
            mock.patch.object(placement_types, 'shard_dim_alltoall', all_to_all)]


class FlashAttention(DotProductAttention):
    """The fused attention that PyTorch uses on GPUs. It does not keep the scores."""

    def forward(self, q, k, v, mask=None):
        dropout = self.dropout if self.training else 0.0
        q, k = q.type_as(v), k.type_as(v)  # as autocast does on GPUs; the operator below does not know of it
        return torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, dropout, is_causal=True)[0]


if __name__ == '__main__':
    rank, world_size, *arguments = sys.argv[1:]
    os.environ |= dict(RANK=rank, LOCAL_RANK='0', WORLD_SIZE=world_size)
    with exit_on_error():
        report = run_rank(config_of(os.path.join(ROOT, 'train.py'), arguments))
    report['process_gb'] = peak_memory_gb(torch.device('cpu'))
    print(json.dumps(report))
