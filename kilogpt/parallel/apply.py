"""How a model is laid out on the processes, and how it then runs.

`Parallel.parallelize` and stages.py apply a layout in one order, with parts that PyTorch has:

  pipeline (pp)  pipeline.py: each rank has one or two runs of blocks (GPipe, Huang et al. 2019)
  expert (ep)    expert.py: each rank has some of the experts of a mixture (GShard, Lepikhin et al. 2020)
  tensor (tp)    dtensor.py: heads, hidden features and vocabulary rows are split over ranks (Megatron-LM,
                 Shoeybi et al. 2019), and between blocks the sequence (Korthikanti et al. 2022)
  context (cp)   context.py: the sequence is split over ranks, and in attention the heads (DeepSpeed-Ulysses,
                 Jacobs et al. 2023)
  data (rest)    DDP, or FSDP2 over dp_shard × cp (ZeRO, Rajbhandari et al. 2020), dp_replicate times (HSDP)

The model says in `split_plan` how its parts are split, and in `replaceable` which parts may take another
form. `layout.py` says over how many processes.
"""
import contextlib
import functools
import logging
import math
import warnings

import torch

from data.batches import Batches
from kilogpt.configurator import announced, exit_on_error
from kilogpt.devices.parts import find_experts, replace_parts
from kilogpt.optim import local_part
from kilogpt.parallel.dtensor import bytes_held, name_parameters, take_whole_logits, tensor_context, total_norm
from kilogpt.parallel.layout import CHECKED_KEYS, SPLIT_BACKWARD, check_layout
from kilogpt.parallel.processes import autocast
from kilogpt.parallel.stages import lay_out_stage, multiply_finite

# Under autocast RMSNorm has bfloat16 inputs and float32 weights, which is correct, but not fused.
warnings.filterwarnings('ignore', 'Mismatch dtype between input and weight')
# The norm of all gradients is summed over one mesh dimension after the other, which DTensor warns about.
logging.getLogger('torch.distributed.tensor._redistribute').setLevel(logging.ERROR)


# The keys of train.py that `Parallel.parallelize` takes, besides batch_size, gradient_accumulation_steps and
# block_size, and their values where a config does not have them.
DEFAULTS = dict(islands=1, compile=False, cpu_offload=False, fp8=False, async_tp=False, activation_checkpoint='none',
                grad_compress='none', documents='stream', cuda_graph=False, loss='cross_entropy', dpo_beta=0.1)  # and those of the other losses


class Parallel:
    """A model on the processes of a run: laid out once, then run forward and backward.

    processes: a Processes that has joined its group. layout: the Layout of its world size.
    """

    def __init__(self, processes, layout):
        self.processes, self.layout = processes, layout
        self.device, self.mesh = processes.device, processes.mesh
        self.notes = []  # one line for each choice that differs from the request, with the reason
        self._contexts = contextlib.ExitStack()  # stays open, since the backward pass needs the contexts too
        self._zero1 = self._powersgd = None

    def parallelize(self, model, config, dtype='float32'):
        """Put a model that was built on the meta device onto the processes.

        Afterwards `forward_backward` and `evaluate` run the model. `named_parameters` have memory, but values
        only after `fill` or the load of a checkpoint. Raises ValueError if check_layout does.
        model: has a `split_plan`, a table `replaceable`, and a `config` with n_head, n_kv_head and n_embd.
        config: keys of train.py (DEFAULTS). dtype: that of training.
        """
        config = DEFAULTS | config
        compile, documents, cpu_offload = config['compile'], config['documents'], config['cpu_offload']
        activation_checkpoint, grad_compress = config['activation_checkpoint'], config['grad_compress']
        batch_size, self.block_size = config['batch_size'], config['block_size']
        self.global_batch = batch_size * config['gradient_accumulation_steps'] // config['islands']
        self.micro_batch, self.micro_steps = self.layout.split_batch(
            -(-self.global_batch // self.processes.replicas), batch_size)
        check_layout(model, self.layout, dtype=dtype, **{key: config[key] for key in CHECKED_KEYS})
        layout, processes = self.layout, self.processes
        # A pipeline takes all micro-batches of an iteration in one step.
        self._rows_per_step = self.micro_batch * (self.micro_steps if layout.pp > 1 else 1)
        self._autocast = contextlib.nullcontext() if layout.uses_fsdp else autocast(dtype, self.device)
        splits_backward = layout.splits_backward(activation_checkpoint)
        if layout.pp > 1 and layout.pp_schedule in SPLIT_BACKWARD and not splits_backward:
            self.notes.append(f'pp_schedule={layout.pp_schedule} does not split the backward pass: '
                              f'activation_checkpoint={activation_checkpoint} would recompute a block for '
                              'each of its weights')
        if compile:
            from kilogpt.parallel.compiler import set_up_compiler
            compile = set_up_compiler(processes, layout, self.notes)
        self.compiles = compile
        if config['async_tp']:
            from kilogpt.parallel.compiler import set_up_async_tp
            set_up_async_tp(processes, compile, self.mesh.get_group('tp'), self.notes)
        self._contexts.enter_context(tensor_context() if layout.tp > 1 else contextlib.nullcontext())
        use_kernels = False
        if compile and self.device.type == 'cpu':
            from kilogpt.devices import cpu_kernels
            use_kernels = cpu_kernels.is_usable(processes, self.notes)
        if config['loss'] != 'cross_entropy':
            from kilogpt.layers.losses import use_loss
            use_loss(model, config)
        self.stages = {0: model}
        if layout.pp > 1:
            from kilogpt.parallel.pipeline import Pipeline, cut_stage
            mine = layout.stages_of(self.mesh.get_local_rank('pp'))
            self.stages = {index: cut_stage(model, index, layout.n_stages, self.block_size) for index in mine}
        for stage in self.stages.values():
            if splits_backward and torch.__version__ < '2.13':  # autograd loses LossInParts between halves
                replace_parts(stage, 'loss', take_whole_logits)
            lay_out_stage(stage, self, dtype=dtype, compile=compile, use_kernels=use_kernels, documents=documents,
                          fp8=config['fp8'], activation_checkpoint=activation_checkpoint, cpu_offload=cpu_offload)
            if model.tied and layout.pp == 1:
                came_apart = model.tied.keys() & dict(stage.named_parameters()).keys()
                assert not came_apart, 'the tied weights came apart'

        self.network, self.has_adapters = model, model.config.lora_rank > 0
        self._is_ddp = layout.world_size > 1 and not layout.uses_fsdp
        self._accumulates = self.micro_steps > 1
        if self._is_ddp:
            from kilogpt.parallel.ddp import note_gradients, replicate
            zero_mesh = self.mesh['dp_shard_cp'] if layout.zero_stage == 1 else None
            network, self._zero1, self._powersgd = replicate(model, self.device, zero_mesh, grad_compress)
            last = next(p for p in model.parameters() if p.requires_grad)  # whose gradient comes last
            self.network, self._gradients_ready = network, note_gradients(network, last, processes)
        self.pipeline = None
        if layout.pp > 1:
            self.pipeline = Pipeline(
                self.stages, layout, self.mesh, self.device, micro_batch=self.micro_batch,
                micro_steps=self.micro_steps, block_size=self.block_size, n_embd=model.config.n_embd, dtype=dtype,
                tied={} if self.has_adapters else model.tied, splits_backward=splits_backward)
        self._named_parameters = [pair for stage in self.stages.values()
                                  for pair in name_parameters(stage, model.tied, processes)]
        self._passes = functools.partial(run_passes, self.network, self._autocast)
        self._records = False
        if config['cuda_graph'] and compile and layout.world_size == 1 and activation_checkpoint == 'none':
            from kilogpt.devices.cuda_graph import GraphedPasses, can_record
            self._records = not layout.uses_fsdp and can_record(model, self.device, dtype)
            if self._records:
                self._passes = GraphedPasses(self._passes, model, self.notes)
        self.balance = NoExperts()
        if find_experts(model):
            from kilogpt.parallel.expert import ExpertBalance
            self.balance = ExpertBalance(model, self.stages, processes, layout.tp)

    # --- running --------------------------------------------------------------------------------------------

    def batches(self, loader, read, sequences, end, share=lambda: (0, 1)):
        """The data.batches.Batches of this process. loader, read, sequences, end, share: as in Batches."""
        layout, rank, rows = self.layout, self.processes.rank, self._rows_per_step
        return Batches(loader, read, sequences, steps=lambda total: -(-total // (rows * layout.dp)),
                       rows=lambda total, step: layout.rows(rank, total, rows, step),
                       positions=layout.positions(rank, self.block_size), device=self.device,
                       sum_later=self.processes.sum_later, copies=layout.world_size // layout.dp, end=end,
                       reading=exit_on_error, waiting=self.processes.waits_for_data, share=share)

    def warm_up(self, read_batch):
        """Compile, and let DDP order its buckets, in passes whose gradients are dropped.

        A resumed run then adds gradients in the same order as an uninterrupted run.
        read_batch(): a micro-batch, which one process without a compiler does not need.
        """
        if self.layout.world_size == 1 and not self.compiles:
            return
        batch = read_batch()
        with announced('compiling the model (up to a minute or so)' if self.compiles else 'warming up'):
            self.forward_backward(batch)
        self._drop_gradients()
        self.balance.forget()
        if self._zero1:
            self._zero1.is_first_pass = False
        if self.compiles:
            from kilogpt.parallel.compiler import agree_on_fallbacks
            agree_on_fallbacks(self.processes, self.notes)
        # DDP's gradients become views of the buckets in their new order; a graph records its second batch.
        if self._is_ddp and self._accumulates or self._records:
            self.forward_backward(batch)
            self.zero_grad()
            self.balance.forget()
        self.pop_sums()

    def forward_backward(self, batch, n_targets=0, last=True, scale=lambda loss: loss):
        """Add the gradients of a micro-batch (pipeline: of all); returns the sum of this process's losses.

        batch: what the model takes, inputs and targets (B, T / cp), `starts` (B, T) if sequences consist of
        documents, and `pairs` and `reference` if these form pairs. n_targets: those of the iteration, or its
        pairs, by which the sum of all losses is divided; 0: the tokens of global_batch. last: whether this
        micro-batch is the iteration's last. scale: that of a GradScaler.
        """
        # DDP and FSDP2 average gradients over ranks, hence the number of ranks in the loss of each.
        loss_scale = self.layout.gradient_ranks / (n_targets or self.global_batch * self.block_size)
        if self.pipeline:
            self.balance.set_loss_scale(loss_scale)
            return self.pipeline.forward_backward(batch, loss_scale, last)
        if self._is_ddp:
            self.network.require_backward_grad_sync = last  # the forward pass reads it
        if self.layout.uses_fsdp:
            # Replicas (HSDP) sum the gradients of all micro-batches before they exchange them. Parameters
            # that stay gathered between forward and backward stay gathered until they change.
            self.network.set_requires_all_reduce(last)
            self.network.set_reshard_after_backward(last, recurse=self.layout.zero_stage == 2)
        if self.balance.names:  # the scale of a GradScaler changes; torch.tensor would wait for the device
            self.balance.set_loss_scale(scale(torch.full((), loss_scale, device=self.device)))
        loss = self._passes(batch, loss_scale, scale)
        if self._zero1 and last:
            self._zero1.finish_reducing()
        if self._is_ddp and last:
            self.processes.record_wait(self._gradients_ready.pop(), self.processes.device_time())
        return loss

    @torch.no_grad()
    def evaluate(self, batch):
        """The sum of this process's losses over a micro-batch (pipeline: over all micro-batches)."""
        if self.pipeline:
            return self.pipeline.evaluate(batch)
        with self._autocast:
            return self.stages[0](*batch)

    def pop_sums(self):
        """{name: sum over this process's tokens} that the model has added to `sums` since the last call."""
        taken = {}
        for stage in self.stages.values():
            for name, value in stage.sums.items():
                taken[name] = taken.get(name, 0.0) + value
                stage.sums[name] = 0.0
        return taken

    def train(self, mode):
        """Switch dropout on or off, and drop the `sums` of passes that belong to no update."""
        for stage in self.stages.values():
            stage.train(mode)
        self.pop_sums()

    def sum_losses(self, loss_sum):
        """The sum of all processes' losses. Tensor-parallel ranks have one loss, which counts once."""
        return self.processes.sum(loss_sum.item()) / self.layout.tp

    @torch.no_grad()
    def clip_gradients(self, max_norm, limit=math.inf):
        """Clip gradients to max_norm (0: do not); returns the norm of all. A tied pair counts once."""
        parameters = [p for _, p in self.optimizer_parameters() if p.grad is not None]
        second_copy = self.pipeline.tied_pair[-1] if self.pipeline and self.pipeline.tied_pair else None
        counted = [p.grad for p in parameters if p is not second_copy]
        if self._zero1:  # DTensor's norm would take ten times as long as that of plain tensors
            counted = [local_part(gradient) for gradient in counted]
        norm = total_norm(counted, self.device)
        if self.pipeline or self._zero1:  # each process has gradients of other elements
            squares = norm.square()
            group = self.mesh.get_group('pp' if self.pipeline else 'dp_shard_cp')
            torch.distributed.all_reduce(squares, group=group)
            norm = squares.sqrt()
        if max_norm and parameters:
            gradients = [local_part(p.grad) for p in parameters]
            torch._foreach_mul_(gradients, (max_norm / (norm + 1e-6)).clamp(max=1).to(gradients[0].device))
        if self._powersgd:  # an update above the limit is skipped
            self._powersgd.recover(norm.isfinite() & (norm <= limit))
        return norm

    def zero_grad(self):
        if self._is_ddp and self._accumulates:  # gradients are views of DDP's buckets and stay so
            torch._foreach_zero_([p.grad for _, p in self._named_parameters if p.grad is not None])
        else:
            self._drop_gradients()

    def _drop_gradients(self):
        for _, parameter in self._named_parameters:
            parameter.grad = None

    # --- parameters and the optimizer -----------------------------------------------------------------------

    def named_parameters(self):
        """[(name in the whole model, parameter or DTensor)]. A tied copy has the name of its original."""
        return self._named_parameters

    def optimizer_parameters(self):
        """The trained parameters, or for ZeRO-1 this process's rows as DTensors in the same memory."""
        if self._zero1:
            return self._zero1.named_rows
        return [(name, parameter) for name, parameter in self._named_parameters if parameter.requires_grad]

    def attach_optimizer(self, optimizer):
        """Let ZeRO-1 gather the parameters after each step of the optimizer."""
        if self._zero1:
            optimizer.register_step_post_hook(self._zero1.gather_parameters)

    def apply_to_whole_matrices(self, function, parameter, parts):
        """Apply a function of whole matrices, of which each process has parts; returns the results' parts.

        parts (n, rows, columns): this process's parts of n matrices that are laid out as `parameter` is.
        The processes divide the n matrices: DDP's replicas, or the ranks of each mesh dimension in turn.
        """
        if self.layout.world_size == 1:
            return function(parts)
        from kilogpt.parallel.whole_matrices import apply_to_whole_matrices, matrix_dimensions
        dimensions = matrix_dimensions(parameter, self.layout.world_size)
        # With cpu_offload the parts come from host memory.
        return apply_to_whole_matrices(function, parameter.shape[-2:], parts.to(self.device), dimensions)


class NoExperts:
    """What a model without experts has in the place of kilogpt.parallel.expert.ExpertBalance."""
    names, routers = (), {}

    def load_max(self):
        return {}

    def loads(self):
        return {}

    def set_loss_scale(self, loss_scale):
        pass

    def forget(self):
        pass

    def update(self, is_applied):
        pass


def take_means(parallel, key, count):
    """{name: value} of a Parallel's `sums` over all processes, divided by a count.

    key: that of the loss in an evaluation. reward_margin beside val_loss has the name val_reward_margin.
    """
    sums = {key.replace('loss', name): float(value) for name, value in parallel.pop_sums().items()}
    totals = parallel.processes.sums(list(sums.values())) if sums else []
    return {name: total / parallel.layout.tp / (count or math.nan) for name, total in zip(sums, totals)}


def saved_parameters(parallel):
    """The named_parameters of a Parallel that a checkpoint holds: of a model with adapters, these alone."""
    return [(name, parameter) for name, parameter in parallel.named_parameters()
            if parameter.requires_grad or not parallel.has_adapters]


def describe_layout(parallel, optimizer, batch_size, islands):
    """Lines about a model that is laid out: degrees of many processes, bytes, the batch, and notes."""
    layout, processes, global_batch = parallel.layout, parallel.processes, parallel.global_batch
    parameters, moments = (processes.max(n) for n in bytes_held(parallel.named_parameters(), optimizer))
    lines, where = [f'layout      {layout.describe()}'], 'on a rank'
    if layout.world_size * islands == 1:
        lines, where = [], 'in memory'
    lines += [f'{where}   parameters {parameters / 1e6:,.1f} MB, optimizer {moments / 1e6:,.1f} MB',
              f'batch       tokens per iteration: {global_batch * parallel.block_size:,} = {global_batch} '
              f'sequences of {parallel.block_size}; micro-batch {parallel.micro_batch}, '
              f'{parallel.micro_steps} micro-step(s) per process']
    share = -(-global_batch // processes.replicas)
    notes = layout.notes + layout.split_notes(share, batch_size, islands * processes.replicas) + parallel.notes
    return lines + [f'note        {note}' for note in notes]


@contextlib.contextmanager
def exchanged_weights(parallel, weights):
    """A context in which the model has other weights, which have the model's own meanwhile.

    weights: [(name, tensor)], in the order of parallel.named_parameters() and laid out as the parameters are.
    """
    def exchange():
        for (_, parameter), (_, other) in zip(parallel.named_parameters(), weights):
            parameter, other = local_part(parameter.detach()), local_part(other)
            own = parameter.clone()
            parameter.copy_(other)
            other.copy_(own)
        refresh(parallel)

    exchange()
    yield
    exchange()


def refresh(parallel):
    """Update the copies of parameters after a Parallel's `optimizer_parameters` were set."""
    if parallel._zero1:
        parallel._zero1.gather_parameters()
    forget_gathered(parallel)


def forget_gathered(parallel):
    """Let FSDP2 gather parameters again after a Parallel's `named_parameters` were set."""
    for stage in parallel.stages.values():
        for module in stage.modules():
            if hasattr(module, 'reshard'):  # FSDP2 may have kept gathered parameters since an evaluation
                module.reshard()


def run_passes(network, context, batch, loss_scale, scale):
    """Run a micro-batch forward, in a context, and backward; returns its loss before scaling."""
    with context:
        loss = network(*batch)
    scale(multiply_finite(loss, loss_scale)).backward()
    return loss.detach()
