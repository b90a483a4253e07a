"""How a model is laid out on the processes, and how it then runs.

`Parallel.lay_out` applies a layout in one order; each part is PyTorch's own and follows below in that order:

  pipeline (pp)  pipeline.py: each rank holds one or two runs of blocks (GPipe, Huang et al. 2019)
  tensor (tp)    DTensor: heads, hidden features and vocabulary rows split over ranks (Megatron-LM, Shoeybi et
                 al. 2019), the sequence split between blocks (sequence parallelism, Korthikanti et al. 2022)
  expert (ep)    expert.py: each rank holds some of the experts of a mixture (GShard, Lepikhin et al. 2020)
  context (cp)   the sequence split over ranks, in attention the heads (DeepSpeed-Ulysses, Jacobs et al. 2023)
  data (rest)    DDP, or FSDP2 over dp_shard × cp (ZeRO, Rajbhandari et al. 2020), dp_replicate times (HSDP)

The model says in `split_plan` how each of its parts is split, `layout.py` over how many processes.
"""
import contextlib
import functools
import logging
import math
import warnings

import torch
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from data.loader import Batches
from kilogpt.devices import cpu, cpu_kernels, cuda
from kilogpt.parallel.compiler import agree_on_fallbacks, set_up_async_tp, set_up_compiler
from kilogpt.parallel.ddp import PowerSGD, Zero1, replicate
from kilogpt.parallel.expert import ExpertBalance, find_experts, remember_choice, shard_experts, split_experts
from kilogpt.parallel.layout import SPLIT_BACKWARD, check_layout
from kilogpt.parallel.whole_matrices import apply_to_whole_matrices
from kilogpt.optim import local_part
from kilogpt.parallel.pipeline import Pipeline, cut_stage
from kilogpt.parallel.processes import autocast

# Under autocast RMSNorm has bfloat16 inputs and float32 weights, which is not fused, but correct.
warnings.filterwarnings('ignore', 'Mismatch dtype between input and weight')
# The norm of all gradients is summed over one mesh dimension after the other, which DTensor warns about.
logging.getLogger('torch.distributed.tensor._redistribute').setLevel(logging.ERROR)


class Parallel:
    """A model on the processes of a run: laid out once, then run forward and backward.

    processes: a Processes that has joined its group. layout: the Layout of its world size.
    """

    def __init__(self, processes, layout):
        self.processes, self.layout = processes, layout
        self.device, self.mesh = processes.device, processes.mesh
        self.notes = []  # one line for each choice that differs from what was asked for, with the reason
        self._contexts = contextlib.ExitStack()  # stay open, since the backward pass needs them too
        self._zero1 = self._powersgd = None

    def lay_out(self, model, *, global_batch, micro_batch, micro_steps, block_size, compile=False, fp8=False,
                dtype='float32', activation_checkpoint='none', cpu_offload=False, grad_compress='none',
                async_tp=False):
        """Put a model that was built on the meta device onto the processes.

        Afterwards `forward_backward` and `evaluate` run it, and `named_parameters` are what this process
        holds: memory that `fill` or a checkpoint sets. Raises ValueError where check_layout does.
        model: has a `split_plan`, and a `config` with n_head, n_kv_head and n_embd.
        global_batch: the sequences of an iteration, by whose tokens the sum of all losses is divided.
        """
        self.global_batch, self.block_size = global_batch, block_size
        self.micro_batch, self.micro_steps = micro_batch, micro_steps
        check_layout(model, self.layout, block_size=block_size, dtype=dtype, cpu_offload=cpu_offload, fp8=fp8,
                     activation_checkpoint=activation_checkpoint, grad_compress=grad_compress,
                     async_tp=async_tp)
        layout, plan = self.layout, model.split_plan
        # DDP and FSDP2 average gradients over ranks; the loss of each rank is scaled up by their number.
        self.loss_scale = layout.gradient_ranks / (global_batch * block_size)
        # A pipeline takes all micro-batches of an iteration in one step.
        self._rows_per_step = micro_batch * micro_steps if layout.pp > 1 else micro_batch
        self._autocast = contextlib.nullcontext() if layout.uses_fsdp else autocast(dtype, self.device)
        splits_backward = layout.splits_backward(activation_checkpoint)
        if layout.pp > 1 and layout.pp_schedule in SPLIT_BACKWARD and not splits_backward:
            self.notes.append(f'pp_schedule={layout.pp_schedule} does not split the backward pass: '
                              f'activation_checkpoint={activation_checkpoint} would recompute a block for '
                              'each of its weights')
        self.compiles = compile = compile and set_up_compiler(self.processes, layout, self.notes)
        if async_tp:
            set_up_async_tp(self.processes, compile, self.mesh.get_group('tp'), self.notes)

        use_kernels = compile and cpu_kernels.is_usable(self.processes, self.notes)
        self.stages = {0: model}
        if layout.pp > 1:
            mine = layout.stages_of(self.mesh.get_local_rank('pp'))
            self.stages = {index: cut_stage(model, index, layout.n_stages, block_size) for index in mine}
        for stage in self.stages.values():
            blocks = list(stage.get_submodule(plan['blocks']).values())
            if splits_backward and torch.__version__ < '2.13':  # autograd loses LossInParts between halves
                stage.loss = LossOfWholeLogits(stage.loss)
            if self.device.type == 'cpu':
                cpu.use_faster_parts(stage, use_kernels)
            if fp8:
                use_float8(stage.get_submodule(plan['blocks']), self.device, self.notes)
            if layout.tp * layout.ep > 1:
                for routed in find_experts(stage).values():
                    split_experts(routed, self.processes.expert_mesh, layout.ep, layout.tp)
            if layout.tp > 1:
                self._split_tensors(stage, blocks)
            if layout.cp > 1:
                stage.first_position = layout.positions(self.processes.rank, block_size).start
                for block in blocks:
                    for name in plan['attention']:
                        exchange_heads(block.get_submodule(name), self.processes.cp_mesh)
            if self.device.type == 'cuda':  # after cp, which may repeat key/value heads itself
                cuda.use_fused_attention(stage, self.device, dtype)
                cuda.use_grouped_products(stage, self.device)
            for block in blocks:
                apply_to_block(block, plan, activation_checkpoint, compile)
            if compile and layout.tp == 1:
                stage.loss.of_hidden = torch.compile(stage.loss.of_hidden)
            if layout.uses_fsdp:
                shard_parameters(stage, blocks, layout, self.processes, dtype, cpu_offload)
            stage.to_empty(device='cpu' if cpu_offload else self.device)
            stage.tie()
            if model.tied and layout.pp == 1:
                came_apart = model.tied.keys() & dict(stage.named_parameters()).keys()
                assert not came_apart, 'the tied weights came apart'

        self.network = model
        self._is_ddp = layout.world_size > 1 and not layout.uses_fsdp
        self._accumulates = micro_steps > 1
        if self._is_ddp:
            self.network = self._replicate(model, grad_compress)
        self.pipeline = None
        if layout.pp > 1:
            self.pipeline = Pipeline(
                self.stages, layout, self.mesh, self.device, micro_batch=micro_batch, micro_steps=micro_steps,
                block_size=block_size, n_embd=model.config.n_embd, dtype=dtype, tied=model.tied,
                loss_scale=self.loss_scale, splits_backward=splits_backward)
        self._named_parameters = []
        for stage in self.stages.values():
            for name, parameter in name_parameters(stage, self.processes):
                self._named_parameters.append((model.tied.get(name, name), parameter))
        self.balance = ExpertBalance(model, self.stages, self.processes, layout.tp)
        self.balance.set_loss_scale(self.loss_scale)  # a pipeline's stays so

    # --- the parts of a layout ------------------------------------------------------------------------------

    def _split_tensors(self, stage, blocks):
        """Tensor parallelism, and the contexts that its forward and backward passes need."""
        from torch.distributed.tensor.experimental import implicit_replication
        from torch.distributed.tensor.parallel import loss_parallel
        split_tensors(stage, blocks, self.mesh['tp'])
        stage.loss = LossOfWholeLogits(stage.loss)
        self._contexts.enter_context(loss_parallel())  # cross-entropy on logits sharded by vocabulary
        self._contexts.enter_context(implicit_replication())  # plain tensors beside DTensors

    def _replicate(self, model, grad_compress):
        """DDP, with the buckets of gradients that ZeRO-1 and grad_compress ask for."""
        if grad_compress == 'powersgd':
            grad_compress = self._powersgd = PowerSGD()
        if self.layout.zero_stage == 1:
            trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
            self._zero1 = Zero1(trained, self.mesh['dp_shard_cp'], grad_compress)
        network = replicate(model, self.device, self._zero1, grad_compress)
        # The gradient of the embedding is the last one. From then on this process waits for the others.
        self._gradients_ready = []

        def note_time(parameter):
            if network.require_backward_grad_sync:
                self._gradients_ready.append(self.processes.device_time())

        embedding = model.get_submodule(model.split_plan['embedding'][0])
        embedding.weight.register_post_accumulate_grad_hook(note_time)
        return network

    # --- running --------------------------------------------------------------------------------------------

    def batches(self, loader, sequences, starts):
        """The data.loader.Batches of this process. sequences, starts: as there."""
        layout, rank, rows = self.layout, self.processes.rank, self._rows_per_step
        return Batches(loader, sequences, starts, steps=lambda total: -(-total // (rows * layout.dp)),
                       rows=lambda total, step: layout.rows(rank, total, rows, step),
                       positions=layout.positions(rank, loader.block_size), device=self.device)

    def warm_up(self, read_batch):
        """Compile, and let DDP order its buckets, in passes whose gradients are dropped.

        A resumed run then adds up gradients in the order of an unbroken one.
        read_batch(): a micro-batch (x, y), which one process without a compiler does not need.
        """
        if self.compiles:
            self.processes.say('compiling the model (up to a minute or so) ...')
        elif self.layout.world_size == 1:
            return
        x, y = read_batch()
        self.forward_backward(x, y)
        self._drop_gradients()
        self.balance.forget()
        if self._zero1:
            self._zero1.is_first_pass = False
        if self.compiles:
            note = agree_on_fallbacks(self.processes)
            if note:
                self.notes.append(note)
        if self._is_ddp and self._accumulates:  # makes the gradients views of the buckets in their new order
            self.forward_backward(x, y)
            self.zero_grad()
            self.balance.forget()

    def forward_backward(self, x, y, last=True, scale=lambda loss: loss):
        """Add the gradients of a micro-batch (a pipeline: of all); returns this process's sum of losses.

        x, y (B, T / cp). last: whether this micro-batch is the iteration's last. scale(loss): a GradScaler's.
        """
        if self.pipeline:
            return self.pipeline.forward_backward(x, y)
        if self._is_ddp:
            self.network.require_backward_grad_sync = last  # read by the forward pass
        if self.layout.uses_fsdp:
            # Replicas (HSDP) add up the gradients of all micro-batches before they exchange them. What stays
            # gathered between forward and backward stays so until the parameters change.
            self.network.set_requires_all_reduce(last)
            self.network.set_reshard_after_backward(last, recurse=self.layout.zero_stage == 2)
        if self.balance.names:  # a GradScaler's scale changes
            self.balance.set_loss_scale(scale(torch.tensor(self.loss_scale, device=self.device)))
        with self._autocast:
            loss = self.network(x, y)
        scale(loss * self.loss_scale).backward()
        if self._zero1 and last:
            self._zero1.finish_reducing()
        if self._is_ddp and last:
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
    def clip_gradients(self, max_norm, limit=math.inf):
        """Clip gradients to max_norm (0: do not); returns the norm of all, where a tied pair counts once."""
        parameters = [p for _, p in self.optimizer_parameters() if p.grad is not None]
        second_copy = self.pipeline.tied_pair[-1] if self.pipeline and self.pipeline.tied_pair else None
        counted = [p.grad for p in parameters if p is not second_copy]
        if self._zero1:  # as plain tensors, which DTensor's norm would take ten times as long for
            counted = [local_part(gradient) for gradient in counted]
        norm = total_norm(counted)
        if self.pipeline or self._zero1:  # the processes have gradients of different elements
            squares = norm.square()
            group = self.mesh.get_group('pp' if self.pipeline else 'dp_shard_cp')
            torch.distributed.all_reduce(squares, group=group)
            norm = squares.sqrt()
        if max_norm:
            gradients = [local_part(p.grad) for p in parameters]
            torch._foreach_mul_(gradients, (max_norm / (norm + 1e-6)).clamp(max=1).to(gradients[0].device))
        if self._powersgd:  # an update above the limit is left out
            self._powersgd.recover(norm.isfinite() & (norm <= limit))
        return norm

    def zero_grad(self):
        if self._is_ddp and self._accumulates:  # in the memory of DDP's buckets, of which gradients are views
            torch._foreach_zero_([p.grad for _, p in self._named_parameters if p.grad is not None])
        else:
            self._drop_gradients()

    def _drop_gradients(self):
        for _, parameter in self._named_parameters:
            parameter.grad = None

    # --- parameters and the optimizer -----------------------------------------------------------------------

    def named_parameters(self):
        """[(name in the whole model, parameter or DTensor)]; a tied copy has the name of its original."""
        return self._named_parameters

    def optimizer_parameters(self):
        """named_parameters, or for ZeRO-1 this process's rows of them as DTensors over the same memory."""
        if self._zero1:
            return self._zero1.named_rows
        return [(name, parameter) for name, parameter in self._named_parameters if parameter.requires_grad]

    def describe(self, optimizer, batch_size, islands):
        """Lines that say what this layout is: the degrees, bytes on a rank, the batch, and `notes`."""
        layout, processes = self.layout, self.processes
        parameters, moments = (processes.max(n) for n in bytes_held(self._named_parameters, optimizer))
        lines = [f'layout      {layout.describe()}',
                 f'on a rank   parameters {parameters / 1e6:,.1f} MB, optimizer {moments / 1e6:,.1f} MB',
                 f'batch       tokens per iteration: {self.global_batch * self.block_size:,} = {self.global_batch} '
                 f'sequences of {self.block_size}; micro-batch {self.micro_batch}, {self.micro_steps} '
                 'micro-step(s) a process']
        notes = layout.notes + layout.split_notes(self.global_batch, batch_size, islands) + self.notes
        return lines + [f'note        {note}' for note in notes]

    def attach(self, optimizer):
        """For ZeRO-1: gather the parameters after each step."""
        if self._zero1:
            optimizer.register_step_post_hook(self._zero1.gather_parameters)

    def apply_to_whole_matrices(self, function, parameter, parts):
        """Apply a function of whole matrices where each process holds parts; returns the results' parts.

        parts (n, rows, columns): this process's parts of n matrices that are laid out as `parameter` is.
        The processes divide the n matrices: DDP's replicas, or the ranks of each mesh dimension in turn.
        """
        dimensions = []  # (process group, dimension of a matrix that its ranks cut or None), outermost first
        if hasattr(parameter, 'placements'):
            mesh = parameter.device_mesh
            stacked = parameter.dim() - 2  # 1 for the matrices of experts: ranks that cut there have others
            for name, placement in zip(mesh.mesh_dim_names, parameter.placements):
                cut = None if placement.is_replicate() else placement.dim - stacked
                if mesh[name].size() > 1 and cut != -1:
                    dimensions.append((mesh.get_group(name), cut))
        elif self.layout.world_size > 1:
            dimensions.append((torch.distributed.group.WORLD, None))
        # With cpu_offload the parts are in host memory.
        return apply_to_whole_matrices(function, parameter.shape[-2:], parts.to(self.device), dimensions)


def refresh(parallel):
    """Bring what else holds parameters up to date, after a Parallel's `optimizer_parameters` were set."""
    if parallel._zero1:
        parallel._zero1.gather_parameters()
    for stage in parallel.stages.values():
        for module in stage.modules():
            if hasattr(module, 'reshard'):  # FSDP2 may have kept gathered parameters since an evaluation
                module.reshard()


def name_parameters(stage, processes):
    """[(name, parameter)] of a pipeline stage. What is not trained is no DTensor, but all ranks have it."""
    named = []
    for name, parameter in stage.named_parameters():
        is_plain = not parameter.requires_grad and processes.mesh is not None
        named.append((name, processes.as_replicas(parameter) if is_plain else parameter))
    return named


def bytes_held(named_parameters, optimizer):
    """Bytes on this process: (parameters, optimizer state). AdamW has two float32 moments, Muon one."""
    parameters = sum(local_part(parameter).nbytes for _, parameter in named_parameters)
    state = 0
    for group in optimizer.param_groups:
        moments = 1 if 'momentum' in group else 2
        state += moments * 4 * sum(local_part(parameter).numel() for parameter in group['params'])
    return parameters, state


def total_norm(gradients):
    """The norm of all gradients, which may be DTensors on meshes that have the same processes."""
    by_mesh = {}
    for gradient in gradients:
        by_mesh.setdefault(getattr(gradient, 'device_mesh', None), []).append(gradient)
    norms = [torch.nn.utils.get_total_norm(group) for group in by_mesh.values()]
    norms = [norm.full_tensor() if hasattr(norm, 'full_tensor') else norm for norm in norms]
    return norms[0] if len(norms) == 1 else torch.stack(norms).norm()


@torch.no_grad()
def fill(named_parameters, value):
    """Set each parameter, sharded or not, from value(name, shape, rows).

    value: gives the slice `rows` of the whole parameter of that shape. A process asks for no more rows than
    it holds, and cuts the columns itself.
    """
    for name, parameter in named_parameters:
        local, cuts = parameter, []
        if hasattr(parameter, 'placements'):
            local, mesh = parameter.to_local(), parameter.device_mesh
            cuts = list(zip(mesh.shape, parameter.placements, mesh.get_coordinate()))
        held = [slice(0, size) for size in parameter.shape]  # of each dimension
        for ranks, placement, coordinate in reversed(cuts):  # FSDP cuts what tensor parallelism has cut
            if not placement.is_replicate():
                whole = held[placement.dim]
                size = -(-(whole.stop - whole.start) // ranks)
                start = min(whole.start + coordinate * size, whole.stop)
                held[placement.dim] = slice(start, min(start + size, whole.stop))
        rows, *columns = held
        local.copy_(value(name, parameter.shape, rows)[(slice(None), *columns)])


# --- parts, in the order of lay_out -------------------------------------------------------------------------

class LossOfWholeLogits(torch.nn.Module):
    """The model's loss from all logits at once rather than in parts, since tensor parallelism shards them."""

    def __init__(self, loss):
        super().__init__()
        self.of_logits = loss.of_logits

    def forward(self, x, head, targets):
        return self.of_logits(head(x).flatten(0, 1), targets.flatten())


def use_float8(blocks, device, notes):
    """Products of the blocks' linears in float8 by torchao, a scale per tensor (Micikevicius et al. 2022).

    Routers and the matrices of experts are not linears and stay as they are.
    """
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
        local=[SequenceParallel(sequence_dim=1, use_local_output=True)],
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
        if parameter.requires_grad and not hasattr(parameter, 'placements'):
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
                 '_scaled_dot_product_cudnn_attention', '_grouped_mm')


def apply_to_block(block, plan, activation_checkpoint, compile):
    """Checkpoint a block's activations and compile it.

    'selective' is within what is compiled, so that the compiler sees it. 'full' is around what is compiled,
    since the compiler fails on tensor-parallel blocks with 'full' inside.
    """
    modules = dict(block.named_modules())
    routed, parts = modules.get(plan['experts']), [block]
    if routed:  # selective checkpointing does not go around modules that FSDP2 shards on their own
        parts = [modules[name] for name in plan['checkpointed'] if name in modules]
        routed.forward = torch.compiler.disable(routed.forward)  # the numbers of rows depend on the tokens
    if activation_checkpoint == 'selective':  # recompute all in the backward pass but SAVED_OUTPUTS
        saved = [getattr(torch.ops.aten, name).default for name in SAVED_OUTPUTS]
        saved.append(torch.ops.kilogpt.attention.default)
        contexts = functools.partial(create_selective_checkpoint_contexts, saved)
        for part in parts:
            part.forward = functools.partial(checkpoint, part.forward, use_reentrant=False,
                                             context_fn=contexts)
    if compile:
        block.forward = torch.compile(block.forward)
    if activation_checkpoint == 'full':  # recompute the whole block (Chen et al. 2016)
        options = dict(context_fn=remember_choice(routed.router)) if routed else {}
        block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False, **options)


def shard_parameters(stage, blocks, layout, processes, dtype, cpu_offload):
    """FSDP2, which reduces gradients to shards in each micro-batch, and with a pipeline once an iteration."""
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
    mesh = processes.mesh
    mesh_dims = ('dp_replicate', 'dp_shard_cp') if layout.dp_replicate > 1 else 'dp_shard_cp'
    options = dict(mesh=mesh[mesh_dims])
    if dtype == 'bfloat16':  # for parameters alone: the rotary tables are inputs that stay in float32
        options['mp_policy'] = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)
    if cpu_offload:
        options['offload_policy'] = CPUOffloadPolicy(pin_memory=mesh.device_type == 'cuda')
    reshard = layout.zero_stage == 3
    for routed in find_experts(stage).values():
        shard_experts(routed, layout, processes.expert_mesh, reshard, options)
    for block in blocks:
        fully_shard(block, reshard_after_forward=reshard, **options)
    # Embeddings and head together, since they may be tied.
    fully_shard(stage, reshard_after_forward=False, **options)
