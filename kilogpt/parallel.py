"""How a model is laid out on the processes, and how it then runs.

`Parallel.lay_out` applies a layout in one order; each part is PyTorch's own and follows below in that order:

  pipeline (pp)  pipeline.py: each rank holds one or two runs of blocks (GPipe, Huang et al. 2019)
  tensor (tp)    DTensor: heads, hidden features and vocabulary rows split over ranks (Megatron-LM, Shoeybi et
                 al. 2019), the sequence split between blocks (sequence parallelism, Korthikanti et al. 2022)
  context (cp)   the sequence split over ranks, in attention the heads (DeepSpeed-Ulysses, Jacobs et al. 2023)
  data (rest)    DDP, or FSDP2 over dp_shard × cp (ZeRO, Rajbhandari et al. 2020), dp_replicate times (HSDP)

The model says in `split_plan` how each of its parts is split, `layout.py` over how many processes.
"""
import contextlib
import functools
import math
import warnings

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from kilogpt import cpu
from kilogpt.layout import SPLIT_BACKWARD
from kilogpt.optim import local_part
from kilogpt.pipeline import Pipeline, cut_stage
from kilogpt.processes import autocast

# Under autocast RMSNorm has bfloat16 inputs and float32 weights, which is not fused, but correct.
warnings.filterwarnings('ignore', 'Mismatch dtype between input and weight')


class Parallel:
    """A model on the processes of a run: laid out once, then run forward and backward.

    processes: a Processes that has joined its group. layout: the Layout of its world size.
    """

    def __init__(self, processes, layout):
        self.processes, self.layout = processes, layout
        self.device, self.mesh = processes.device, processes.mesh
        self.notes = []  # one line for each choice that differs from what was asked for, with the reason
        self._contexts = contextlib.ExitStack()  # stay open, since the backward pass needs them too

    def lay_out(self, model, *, global_tokens, micro_batch, micro_steps, block_size, compile=False, fp8=False,
                dtype='float32', activation_checkpoint='none', cpu_offload=False, grad_compress='none'):
        """Put a model that was built on the meta device onto the processes.

        Afterwards `forward_backward` and `evaluate` run it, and `named_parameters` are what this process
        holds: memory that `fill` or a checkpoint sets. Raises ValueError where check_layout does.
        model: has a `split_plan`, and a `config` with n_head, n_kv_head and n_embd.
        global_tokens: those of an iteration, by which the sum of all losses is divided.
        """
        check_layout(model, self.layout, block_size=block_size, dtype=dtype, cpu_offload=cpu_offload, fp8=fp8,
                     activation_checkpoint=activation_checkpoint, grad_compress=grad_compress)
        layout, plan = self.layout, model.split_plan
        # DDP and FSDP2 average gradients over ranks; the loss of each rank is scaled up by their number.
        self.loss_scale = layout.gradient_ranks / global_tokens
        self._autocast = contextlib.nullcontext() if layout.uses_fsdp else autocast(dtype, self.device)
        splits_backward = layout.pp > 1 and layout.pp_schedule in SPLIT_BACKWARD
        if compile and splits_backward:
            self.notes.append('compile=False: a compiled backward pass cannot be split as '
                              f'pp_schedule={layout.pp_schedule} does')
            compile = False

        self.stages = {0: model}
        if layout.pp > 1:
            mine = layout.stages_of(self.mesh.get_local_rank('pp'))
            self.stages = {index: cut_stage(model, index, layout.n_stages, block_size) for index in mine}
        for stage in self.stages.values():
            blocks = list(stage.get_submodule(plan['blocks']).values())
            if splits_backward and torch.__version__ < '2.13':  # autograd loses LossInParts between halves
                stage.loss = LossOfWholeLogits(stage.loss)
            if self.device.type == 'cpu':
                cpu.use_faster_parts(stage)
            if fp8:
                use_float8(stage.get_submodule(plan['blocks']), self.device, self.notes)
            if layout.tp > 1:
                self._split_tensors(stage, blocks)
            if layout.cp > 1:
                stage.first_position = layout.positions(self.processes.rank, block_size).start
                for block in blocks:
                    for name in plan['attention']:
                        exchange_heads(block.get_submodule(name), self.processes.cp_mesh)
            for block in blocks:
                apply_to_block(block, activation_checkpoint, compile)
            if compile:
                self._compile_loss(stage)
            if layout.uses_fsdp:
                shard_parameters(stage, blocks, layout, self.mesh, dtype, cpu_offload)
            stage.to_empty(device='cpu' if cpu_offload else self.device)
            stage.tie()
            if model.tied and layout.pp == 1:
                came_apart = model.tied.keys() & dict(stage.named_parameters()).keys()
                assert not came_apart, 'the tied weights came apart'

        self.network = model
        if not layout.uses_fsdp and layout.world_size > 1:
            self.network = self._replicate(model, grad_compress)
        self.pipeline = None
        if layout.pp > 1:
            self.pipeline = Pipeline(
                self.stages, layout, self.mesh, self.device, micro_batch=micro_batch, micro_steps=micro_steps,
                block_size=block_size, n_embd=model.config.n_embd, dtype=dtype, tied=model.tied,
                loss_scale=self.loss_scale)
        self._named_parameters = []
        for stage in self.stages.values():
            for name, parameter in stage.named_parameters():
                self._named_parameters.append((model.tied.get(name, name), parameter))
        self._optimizer_parameters = self._named_parameters
        if layout.zero_stage == 1 and layout.world_size > 1:
            self._optimizer_parameters = [(name, torch.nn.Parameter(self._rows_of(parameter)))
                                          for name, parameter in self._named_parameters]

    # --- the parts of a layout ------------------------------------------------------------------------------

    def _split_tensors(self, stage, blocks):
        """Tensor parallelism, and the contexts that its forward and backward passes need."""
        from torch.distributed.tensor.experimental import implicit_replication
        from torch.distributed.tensor.parallel import loss_parallel
        split_tensors(stage, blocks, self.mesh['tp'])
        stage.loss = LossOfWholeLogits(stage.loss)
        self._contexts.enter_context(loss_parallel())  # cross-entropy on logits sharded by vocabulary
        self._contexts.enter_context(implicit_replication())  # plain tensors beside DTensors

    def _compile_loss(self, stage):
        if self.layout.tp == 1:
            stage.loss.of_hidden = torch.compile(stage.loss.of_hidden)
        elif self.device.type == 'cuda':  # asynchronous: collectives run beside matrix products
            from torch.distributed._symmetric_memory import enable_symm_mem_for_group
            torch._inductor.config._micro_pipeline_tp = True
            enable_symm_mem_for_group(self.mesh['tp'].get_group().group_name)

    def _replicate(self, model, grad_compress):
        """DDP, without sending weights first: every rank fills in the same, and the model has no buffers."""
        device_ids = [self.device] if self.device.type == 'cuda' else None
        network = DistributedDataParallel(model, device_ids, gradient_as_bucket_view=True, init_sync=False)
        if grad_compress == 'bf16':
            from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
            # On gloo DDP refuses this hook by name, but runs it under another name.
            network.register_comm_hook(None, lambda state, bucket: bf16_compress_hook(state, bucket))
        elif grad_compress == 'powersgd':  # Vogels et al. 2019, with error feedback
            from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
            state = PowerSGDState(None, matrix_approximation_rank=4, start_powerSGD_iter=10)
            network.register_comm_hook(state, powerSGD_hook)

        # The gradient of the embedding is the last one. From then on this process waits for the others.
        self._gradients_ready = []

        def note_time(parameter):
            if network.require_backward_grad_sync:
                self._gradients_ready.append(self.processes.device_time())

        embedding = model.get_submodule(model.split_plan['embedding'][0])
        embedding.weight.register_post_accumulate_grad_hook(note_time)
        return network

    # --- running --------------------------------------------------------------------------------------------

    def forward_backward(self, x, y, last=True, scale=lambda loss: loss):
        """Add the gradients of a micro-batch (a pipeline: of all); returns this process's sum of losses.

        x, y (B, T / cp). last: whether this micro-batch is the iteration's last. scale(loss): a GradScaler's.
        """
        if self.pipeline:
            return self.pipeline.forward_backward(x, y)
        is_replicated = isinstance(self.network, DistributedDataParallel)
        if is_replicated:
            self.network.require_backward_grad_sync = last  # read by the forward pass
        with self._autocast:
            loss = self.network(x, y)
        scale(loss * self.loss_scale).backward()
        if is_replicated and last:
            self.processes.record_wait(self._gradients_ready.pop(), self.processes.device_time())
        return loss.detach()

    @torch.no_grad()
    def evaluate(self, x, y):
        """The sum of this process's losses over a micro-batch (a pipeline: over all)."""
        if self.pipeline:
            return self.pipeline.evaluate(x, y)
        with self._autocast:
            return self.stages[0](x, y)

    def train(self, mode):
        """Switch dropout on or off."""
        for stage in self.stages.values():
            stage.train(mode)

    def sum_losses(self, loss_sum):
        """The sum of all processes' losses. Tensor-parallel ranks have the same loss, which counts once."""
        return self.processes.sum(loss_sum.item()) / self.layout.tp

    @torch.no_grad()
    def clip_gradients(self, max_norm):
        """Clip gradients to max_norm (0: do not); returns the norm of all, where a tied pair counts once."""
        parameters = [parameter for _, parameter in self._named_parameters if parameter.grad is not None]
        second_copy = self.pipeline.tied_pair[-1] if self.pipeline and self.pipeline.tied_pair else None
        norm = torch.nn.utils.get_total_norm([p.grad for p in parameters if p is not second_copy])
        if hasattr(norm, 'full_tensor'):
            norm = norm.full_tensor()
        if self.pipeline:
            squares = norm.square()
            torch.distributed.all_reduce(squares, group=self.mesh.get_group('pp'))
            norm = squares.sqrt()
        if max_norm:
            torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
        return norm

    def zero_grad(self):
        for _, parameter in self._named_parameters:
            parameter.grad = None

    # --- parameters and the optimizer -----------------------------------------------------------------------

    def named_parameters(self):
        """[(name in the whole model, parameter or DTensor)]; a tied copy has the name of its original."""
        return self._named_parameters

    def optimizer_parameters(self):
        """named_parameters, or for ZeRO-1 this process's rows of them as DTensors over the same memory."""
        return self._optimizer_parameters

    def bytes_held(self, optimizer):
        """Bytes on this process: (parameters, optimizer state). AdamW has two float32 moments, Muon one."""
        parameters = sum(local_part(parameter).nbytes for _, parameter in self._named_parameters)
        state = 0
        for group in optimizer.param_groups:
            moments = 1 if 'momentum' in group else 2
            state += moments * 4 * sum(local_part(parameter).numel() for parameter in group['params'])
        return parameters, state

    def _rows_of(self, tensor):
        """This process's rows of a replicated parameter or gradient: a DTensor over the same memory."""
        from torch.distributed.tensor import DTensor, Shard
        tensor = tensor.detach()
        chunks = tensor.chunk(self.layout.world_size)
        rows = chunks[self.processes.rank] if self.processes.rank < len(chunks) else tensor[:0]
        return DTensor.from_local(rows, self.mesh['dp_shard_cp'], [Shard(0)], run_check=False,
                                  shape=tensor.shape, stride=tensor.stride())

    def attach(self, optimizer):
        """For ZeRO-1: a step takes rows of the gradients first, and gathers the parameters afterwards."""
        if self._optimizer_parameters is self._named_parameters:
            return

        def take_rows_of_gradients(*_):
            for (_, parameter), (_, rows) in zip(self._named_parameters, self._optimizer_parameters):
                rows.grad = self._rows_of(parameter.grad)

        @torch.no_grad()
        def gather_parameters(*_):
            for (_, parameter), (_, rows) in zip(self._named_parameters, self._optimizer_parameters):
                parameter.copy_(rows.full_tensor())
                rows.grad = None

        optimizer.register_step_pre_hook(take_rows_of_gradients)
        optimizer.register_step_post_hook(gather_parameters)

    def apply_to_whole_matrices(self, function, parameter, parts):
        """Apply a function of whole matrices where each process holds parts; returns the results' parts.

        parts (n, rows, columns): this process's parts of n matrices that are laid out as `parameter` is.
        The processes divide the n matrices. Each of DDP's replicas takes a share of them. Otherwise the ranks
        of each mesh dimension, FSDP's first, exchange parts of n matrices for n / ranks whole ones.
        """
        from torch.distributed.tensor import Replicate
        dimensions = []  # (mesh of one dimension, placement on it), outermost first
        if hasattr(parameter, 'placements'):
            mesh = parameter.device_mesh
            for name, placement in zip(mesh.mesh_dim_names, parameter.placements):
                if mesh[name].size() > 1:
                    dimensions.append((mesh[name], placement))
        elif self.layout.world_size > 1:
            dimensions.append((self.processes.world_mesh, Replicate()))
        return _exchange_for_whole(function, parameter.shape, parts, dimensions)


def _exchange_for_whole(function, matrix_shape, parts, dimensions):
    """`Parallel.apply_to_whole_matrices` over the mesh dimensions that still divide the matrices."""
    from torch.distributed.tensor import DTensor, Replicate, Shard
    if len(parts) == 0:
        return parts
    if not dimensions:
        return function(parts)
    (mesh, placement), *inner = dimensions
    shape, held = parts.shape, Replicate()
    if not placement.is_replicate():
        held = Shard(placement.dim + 1)  # dimension 0 of parts counts the matrices
        rows_and_columns = list(matrix_shape)
        for inner_mesh, inner_placement in inner:  # cut the matrix before this dimension does, and evenly
            rows_and_columns[inner_placement.dim] //= inner_mesh.size()
        shape = torch.Size((len(parts), *rows_and_columns))
    whole = dict(device_mesh=mesh, run_check=False, shape=shape, stride=(shape[1] * shape[2], shape[2], 1))
    share = DTensor.from_local(parts, placements=[held], **whole).redistribute(placements=[Shard(0)])
    results = _exchange_for_whole(function, matrix_shape, share.to_local(), inner).contiguous()
    results = DTensor.from_local(results, placements=[Shard(0)], **whole).redistribute(placements=[held])
    return results.to_local()


@torch.no_grad()
def fill(named_parameters, value):
    """Set each parameter, sharded or not, from value(name, shape), a tensor of the whole parameter."""
    for name, parameter in named_parameters:
        part, local = value(name, parameter.shape), parameter
        if hasattr(parameter, 'placements'):
            local, mesh = parameter.to_local(), parameter.device_mesh
            cuts = list(zip(mesh.shape, parameter.placements, mesh.get_coordinate()))
            for ranks, placement, coordinate in reversed(cuts):  # FSDP cuts what tensor parallelism has cut
                if placement.is_replicate():
                    continue
                chunks = part.chunk(ranks, placement.dim)
                part = chunks[coordinate] if coordinate < len(chunks) else part.narrow(placement.dim, 0, 0)
        local.copy_(part)


# --- what cannot be laid out --------------------------------------------------------------------------------

def check_layout(model, layout, *, block_size, dtype, activation_checkpoint, cpu_offload, grad_compress, fp8):
    """Raise ValueError, with the keys to change, if a model cannot run under a Layout with these options."""
    n_parts = len(model.get_submodule(model.split_plan['blocks'])) + 2  # embedding, blocks, head
    if obstacle := _split_obstacle(model, block_size, layout.tp, layout.cp):
        processes = layout.world_size // layout.pp
        fits = []
        for tp in range(1, processes + 1):
            for cp in range(1, processes // tp + 1):
                if processes % (tp * cp) == 0 and not _split_obstacle(model, block_size, tp, cp):
                    fits.append(f'tp={tp} cp={cp}')
        raise ValueError(f'{obstacle} cannot be split over tp={layout.tp} cp={layout.cp}: '
                         f'on these processes this model can have {", ".join(fits)}')
    if layout.n_stages > n_parts:
        raise ValueError(
            f'pp={layout.pp} with pp_schedule={layout.pp_schedule} makes {layout.n_stages} stages, but '
            f'n_layer={n_parts - 2} gives {n_parts} parts to cut between (embedding, blocks, head): set pp '
            f'to at most {n_parts // layout.stages_per_rank}, or n_layer to at least {layout.n_stages - 2}')
    if activation_checkpoint not in ('none', 'selective', 'full'):
        raise ValueError(
            f'activation_checkpoint is {activation_checkpoint!r}: choose one of none, selective, full')
    if cpu_offload and not layout.uses_fsdp:
        raise ValueError(f'cpu_offload=True needs sharded parameters, but zero_stage is {layout.zero_stage}: '
                         'set zero_stage to 2 or 3')
    if grad_compress not in ('none', 'bf16', 'powersgd'):
        raise ValueError(f'grad_compress is {grad_compress!r}: choose one of none, bf16, powersgd')
    if grad_compress != 'none' and layout.uses_fsdp:
        raise ValueError(f"grad_compress={grad_compress} compresses DDP's all-reduce, but this layout runs "
                         'FSDP2 (zero_stage 2 or 3, or tp or pp above 1): set grad_compress to none')
    if dtype == 'float16' and layout.zero_stage > 0:
        raise ValueError(
            'dtype=float16 needs a gradient scaler, which works with zero_stage=0 and tp=pp=1 alone, '
            f'but zero_stage is {layout.zero_stage} here: set dtype to bfloat16 or float32')
    if fp8 and (dtype != 'bfloat16' or layout.tp > 1):
        raise ValueError(f'fp8=True goes with dtype=bfloat16 and tp=1, but they are {dtype} and {layout.tp}: '
                         'change those, or set fp8 to False')


def _split_obstacle(model, block_size, tp, cp):
    """The first size of a model that tp × cp or tp ranks do not divide, such as 'n_head=25', or None."""
    config, plan = model.config, model.split_plan
    sizes = [('n_head', config.n_head, tp * cp), ('block_size', block_size, tp * cp),
             ('n_kv_head', config.n_kv_head, tp)]
    for name, module in model.get_submodule(plan['blocks'])['0'].named_modules():
        if name in plan['colwise']:
            sizes.append((name, module.out_features, tp))
    for name in plan['embedding']:
        sizes.append((f'{name} (rows)', model.get_submodule(name).weight.size(0), tp))
    for name, size, ranks in sizes:
        if size % ranks:
            return f'{name}={size}'
    return None


# --- parts, in the order of lay_out -------------------------------------------------------------------------

class LossOfWholeLogits(torch.nn.Module):
    """The model's loss from all logits at once rather than in parts, since tensor parallelism shards them."""

    def __init__(self, loss):
        super().__init__()
        self.of_logits = loss.of_logits

    def forward(self, x, head, targets):
        return self.of_logits(head(x).flatten(0, 1), targets.flatten())


def use_float8(blocks, device, notes):
    """Products of the blocks' linears in float8 by torchao, a scale per tensor (Micikevicius et al. 2022)."""
    try:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    except ImportError:
        raise ValueError('fp8=True needs torchao: pip install torchao, or set fp8 to False') from None
    emulate = device.type != 'cuda' or torch.cuda.get_device_capability(device) < (8, 9)
    note = ('fp8 is emulated, at a loss of speed: '
            'float8 products need a GPU of compute capability 8.9 or above')
    if emulate and note not in notes:
        notes.append(note)

    def is_convertible(module, name):
        return isinstance(module, torch.nn.Linear) and all(size % 16 == 0 for size in module.weight.shape)

    config = Float8LinearConfig(emulate=emulate)
    convert_to_float8_training(blocks, config=config, module_filter_fn=is_convertible)


def split_tensors(model, blocks, mesh):
    """Tensor and sequence parallelism: split_plan makes every parameter a DTensor on `mesh`.

    Between blocks each rank has its part of the sequence. A norm's output is gathered once for all linears
    that read it; a row-wise linear's is summed and scattered in one step (Korthikanti et al. 2022, 4.2.2).
    """
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (ColwiseParallel, PrepareModuleInput, PrepareModuleOutput,
                                                   RowwiseParallel, SequenceParallel, parallelize_module)
    styles = dict(
        colwise=[ColwiseParallel()],
        rowwise=[RowwiseParallel(output_layouts=Shard(1))],
        sequence=[SequenceParallel(), PrepareModuleOutput(
            output_layouts=Shard(1), desired_output_layouts=Replicate(), use_local_output=False)],
        positions=[PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=Shard(0)),
                   SequenceParallel(sequence_dim=0, use_local_output=True)],
        heads=[SequenceParallel(sequence_dim=1, use_local_output=True)],
        embedding=[RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1))],
        head=[ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)],
    )
    for part in (model, *blocks):
        modules = dict(part.named_modules())
        for kind, steps in styles.items():
            for name in model.split_plan[kind]:
                if name not in modules or not list(modules[name].parameters()):
                    continue
                for style in steps:
                    parallelize_module(modules[name], mesh, style)
                if kind == 'embedding':  # a compiled block loses gradients of a pending input
                    modules[name].register_forward_hook(lambda module, inputs, output: output.clone())
    model.tie()  # splitting gave each of the two a parameter of its own
    for name, parameter in model.named_parameters():
        if not hasattr(parameter, 'placements'):
            raise ValueError(f'{name} is in no part of split_plan (model.py): say there how tp={mesh.size()} '
                             'splits it, or set tp to 1')
    model.register_forward_hook(
        lambda module, inputs, output: output.to_local().clone() if hasattr(output, 'to_local') else output)


def exchange_heads(attention, mesh):
    """Context parallelism: attention over the whole sequence, with a part of the heads on each rank.

    q, k, v (B, heads, T / cp, D) become (B, heads / cp, T, D) by an all-to-all, and another all-to-all turns
    the result back. Key/value heads are repeated where they are fewer than the ranks.
    """
    from torch.distributed.tensor import DTensor, Shard

    def redistribute(x, source, target):
        x = DTensor.from_local(x, mesh, [Shard(source)], run_check=False)
        return x.redistribute(placements=[Shard(target)]).to_local()

    def gather_sequence(module, inputs):
        q, k, v = inputs
        repeats = mesh.size() // math.gcd(mesh.size(), k.size(1))
        if repeats > 1:
            k, v = k.repeat_interleave(repeats, dim=1), v.repeat_interleave(repeats, dim=1)
        return tuple(redistribute(x, 2, 1) for x in (q, k, v))

    attention.register_forward_pre_hook(gather_sequence)
    attention.register_forward_hook(lambda module, inputs, output: redistribute(output, 1, 2))


# The outputs that selective activation checkpointing keeps: those of matrix products and of attention.
SAVED_OUTPUTS = ('mm', 'addmm', '_scaled_mm', '_scaled_dot_product_flash_attention_for_cpu',
                 '_scaled_dot_product_flash_attention', '_scaled_dot_product_efficient_attention',
                 '_scaled_dot_product_cudnn_attention')


def apply_to_block(block, activation_checkpoint, compile):
    """Checkpoint a block's activations and compile it.

    'selective' is within what is compiled, so that the compiler sees it. 'full' is around what is compiled,
    since the compiler fails on tensor-parallel blocks with 'full' inside.
    """
    if activation_checkpoint == 'selective':  # recompute all in the backward pass but SAVED_OUTPUTS
        saved = [getattr(torch.ops.aten, name).default for name in SAVED_OUTPUTS]
        contexts = functools.partial(create_selective_checkpoint_contexts, saved)
        block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False, context_fn=contexts)
    if compile:
        block.forward = torch.compile(block.forward)
    if activation_checkpoint == 'full':  # recompute the whole block (Chen et al. 2016)
        block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)


def shard_parameters(stage, blocks, layout, mesh, dtype, cpu_offload):
    """FSDP2, which reduces gradients to shards in each micro-batch, and with a pipeline once an iteration."""
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
    mesh_dims = ('dp_replicate', 'dp_shard_cp') if layout.dp_replicate > 1 else 'dp_shard_cp'
    options = dict(mesh=mesh[mesh_dims])
    if dtype == 'bfloat16':  # for parameters alone: the rotary tables are inputs that stay in float32
        options['mp_policy'] = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)
    if cpu_offload:
        options['offload_policy'] = CPUOffloadPolicy(pin_memory=mesh.device_type == 'cuda')
    for block in blocks:
        fully_shard(block, reshard_after_forward=layout.zero_stage == 3, **options)
    # Embeddings and head together, since they may be tied.
    fully_shard(stage, reshard_after_forward=False, **options)
