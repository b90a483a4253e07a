"""Process group, device mesh, and how a model is laid out on it. Only this file knows how many processes there are.

A layout is a product of degrees, pp × dp_replicate × dp_shard × cp × tp = world size, ranks counted with tp innermost, so that
the most talkative neighbours share a node. `Parallel.lay_out` applies it all, in order; each part is PyTorch's own:

  pipeline (pp)     torch.distributed.pipelining: each rank holds one or two runs of blocks (GPipe, Huang et al. 2019)
  tensor (tp)       DTensor: heads, hidden features and vocabulary rows split over ranks (Megatron-LM, Shoeybi et al. 2019), and the
                    sequence between them (sequence parallelism, Korthikanti et al. 2022)
  context (cp)      the sequence split over ranks, exchanged for heads around attention (DeepSpeed-Ulysses, Jacobs et al. 2023)
  data (the rest)   DDP, or FSDP2 over dp_shard × cp (ZeRO, Rajbhandari et al. 2020), replicated dp_replicate times (HSDP)
"""
import contextlib
import copy
import datetime
import functools
import itertools
import math
import os
import re
import sys
import time
import uuid
import warnings

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from kilogpt.optim import local_part

warnings.filterwarnings('ignore', 'Mismatch dtype between input and weight')  # RMSNorm under autocast: not fused, but right

# pp_schedule: the class in torch.distributed.pipelining, and the stages each rank holds
SCHEDULES = dict(gpipe=('ScheduleGPipe', 1), interleaved1f1b=('ScheduleInterleaved1F1B', 2), zbv=('ScheduleZBVZeroBubble', 2),
                 interleavedzb=('ScheduleInterleavedZeroBubble', 2), dualpipev=('ScheduleDualPipeV', 2))
SCHEDULES['1f1b'] = 'Schedule1F1B', 1
V_SHAPED = 'zbv', 'dualpipev'  # rank r holds stages r and 2 pp - 1 - r, the others r and pp + r
EMULATED = 'fp8 is emulated, at a loss of speed: float8 products need a GPU of compute capability 8.9 or above'
STAYING = contextlib.ExitStack()  # contexts that stay to the end, since the backward pass needs them too
SPLIT_BACKWARD = 'interleavedzb', 'zbv', 'dualpipev'  # gradients of weights apart from those of inputs


class Parallel:
    """This process among all: `rank`, `local_rank`, `world_size`, `device`, `is_main`. Joins the group torchrun announces.

    device: 'auto' (CUDA, else Apple's MPS, else CPU), 'cpu', 'cuda', 'cuda:1', 'mps'. Under torchrun with CUDA each process
    takes the GPU of its local rank. backend: 'auto' is NCCL for CUDA tensors and gloo for CPU tensors.
    Raises ValueError for a device that is not there, and for degrees that do not fit the world size.
    """

    def __init__(self, device='auto', backend='auto', comm_timeout=600, zero_stage=0, dp_replicate=1, tp=1, cp=1, pp=1,
                 pp_schedule='1f1b'):
        self.rank, self.local_rank = int(os.environ.get('RANK', 0)), int(os.environ.get('LOCAL_RANK', 0))
        self.world_size = int(os.environ.get('WORLD_SIZE', 1))
        self.is_main = self.rank == 0
        self.zero_stage, self.dp_replicate, self.tp, self.cp, self.pp = zero_stage, dp_replicate, tp, cp, pp
        self.pp_schedule, self.comm_timeout = pp_schedule, comm_timeout
        self.waits, self.gradients_ready = [], []  # (begin, end) of waiting for other processes; when the last gradient was there
        self.notes = []  # what was chosen otherwise than asked for, and why: one line each
        self._check_degrees()
        self.stages_per_rank = SCHEDULES[pp_schedule][1] if pp > 1 else 1
        self.n_stages = pp * self.stages_per_rank
        # coordinates of this rank; gradients are averaged over dp × cp ranks
        self.dp = self.world_size // (tp * cp * pp)
        _, self.dp_rank, self.cp_rank, _ = np.unravel_index(self.rank, (pp, self.dp, cp, tp))
        self.averaged = self.dp * cp
        if (tp > 1 or pp > 1) and zero_stage < 2:
            self.zero_stage = 2
            self.notes.append(f'zero_stage={zero_stage} runs as 2: with tp or pp above 1 the data-parallel part is FSDP2')
        self.device = self._find_device(device)
        if self.world_size > 1 or self.zero_stage >= 2:
            self._join(backend)

    def _check_degrees(self):
        degrees = dict(tp=self.tp, cp=self.cp, pp=self.pp, dp_replicate=self.dp_replicate)
        for key, degree in degrees.items():
            if degree < 1:
                raise ValueError(f'{key} is {degree}: it must be at least 1')
        if self.zero_stage not in (0, 1, 2, 3):
            raise ValueError(f'zero_stage is {self.zero_stage}: choose 0, 1, 2 or 3')
        if self.pp_schedule not in SCHEDULES:
            raise ValueError(f'pp_schedule is {self.pp_schedule!r}: choose one of {", ".join(SCHEDULES)}')
        if self.comm_timeout < 1:
            raise ValueError(f'comm_timeout is {self.comm_timeout}: it must be at least 1 second')
        model_parallel = self.tp * self.cp * self.pp
        if self.world_size % model_parallel:
            raise ValueError(f'tp={self.tp} × cp={self.cp} × pp={self.pp} is {model_parallel}, which does not divide the '
                             f'{self.world_size} process(es): set tp, cp and pp so that their product is one of '
                             f'{_divisors(self.world_size)}, or start a multiple of {model_parallel} processes')
        dp = self.world_size // model_parallel
        if dp % self.dp_replicate:
            raise ValueError(f'dp_replicate={self.dp_replicate} does not divide the data-parallel degree, {dp}: '
                             f'set it to one of {_divisors(dp)}')
        if self.dp_replicate > 1 and self.zero_stage < 2:
            raise ValueError(f'dp_replicate={self.dp_replicate} groups the replicas of sharded parameters, but zero_stage is '
                             f'{self.zero_stage}: set zero_stage to 2 or 3, or dp_replicate to 1')

    def _find_device(self, device):
        if device == 'auto':
            device = 'cuda' if torch.cuda.is_available() else 'mps' if torch.backends.mps.is_available() else 'cpu'
        if device == 'cuda' or (device.startswith('cuda:') and self.world_size > 1):
            device = f'cuda:{self.local_rank}'
        try:
            found = torch.device(device)
        except RuntimeError:
            raise ValueError(f'device is {device!r}: use auto, cpu, cuda, cuda:N or mps') from None
        if found.type == 'cuda':
            if not torch.cuda.is_available():
                raise ValueError(f'device={device}, but PyTorch {torch.__version__} finds no CUDA GPU here: '
                                 'use --device=auto or --device=cpu')
            if found.index >= torch.cuda.device_count():
                raise ValueError(f'device={device}, but there are {torch.cuda.device_count()} GPUs here: start at most that '
                                 'many processes on this node (--nproc_per_node) or name another device')
            torch.cuda.set_device(found)
        elif found.type == 'mps' and not torch.backends.mps.is_available():
            raise ValueError('device=mps, but PyTorch finds no Apple GPU here: use --device=auto or --device=cpu')
        return found

    def _join(self, backend):
        """The process group, and the mesh where one is needed."""
        if backend == 'auto':
            backend = 'cpu:gloo,cuda:nccl' if self.device.type == 'cuda' else 'gloo'
        elif backend == 'nccl':
            if self.device.type != 'cuda':
                raise ValueError(f'backend=nccl needs CUDA GPUs, but the device is {self.device}: use --backend=gloo')
            backend = 'cpu:gloo,cuda:nccl'  # flags and sums of single numbers travel over gloo, without a device sync
        store = dist.HashStore() if self.world_size == 1 else _fresh_store()
        # longer than any wait should be: the watchdog ends what hangs, and knows the first iteration, which compiles, from the others
        dist.init_process_group(backend, store=store, rank=self.rank, world_size=self.world_size,
                                timeout=datetime.timedelta(seconds=max(3600, 2 * self.comm_timeout)))
        sys.excepthook = _lost_connection
        if self.zero_stage == 0 and self.cp == 1:
            return
        from torch.distributed.device_mesh import init_device_mesh  # here, since a plain run need not wait for it
        shards = self.dp // self.dp_replicate
        # parameters live on this mesh (FSDP shards over cp too), the activations' exchange has one of its own
        self.mesh = init_device_mesh(self.device.type, (self.pp, self.dp_replicate, shards * self.cp, self.tp),
                                     mesh_dim_names=('pp', 'dp_replicate', 'dp_shard_cp', 'tp'))
        if self.cp > 1:
            self.cp_mesh = init_device_mesh(self.device.type, (self.pp * self.dp, self.cp, self.tp),
                                            mesh_dim_names=('pp_dp', 'cp', 'tp'))['cp']

    # ------------------------------------------------------------------------------------------------ which data is whose

    def split_batch(self, global_batch, batch_size):
        """(micro_batch, micro_steps) by which every data-parallel rank takes its part of global_batch sequences.

        micro_batch is the largest up to batch_size that comes out whole, in a number that the pipeline's schedule can run.
        Where there is none, the last micro-batches are padded with sequences that count for nothing.
        """
        rounds = self.pp if self.pp_schedule.startswith('interleaved') else 1

        def runs(micro_steps):  # a pipeline wants a micro-batch for each stage, and an interleaved one whole rounds of them
            return micro_steps >= self.n_stages and micro_steps % rounds == 0

        share = -(-global_batch // self.dp)
        wanted = max(1, -(-share // batch_size))
        micro_steps = next(n for n in itertools.count(wanted) if runs(n))
        micro_batch = -(-share // micro_steps)
        if global_batch % self.dp == 0:
            whole = [b for b in range(1, min(batch_size, share) + 1) if share % b == 0 and runs(share // b)]
            if whole:
                micro_batch, micro_steps = whole[-1], share // whole[-1]
        if self.pp > 1 and micro_batch < min(batch_size, share):
            self.notes.append(f'micro-batch {micro_batch} rather than {min(batch_size, share)}: the pipeline of {self.n_stages} stages '
                              f'({self.pp_schedule}) runs {micro_steps} of them')
        return micro_batch, micro_steps

    def my_rows(self, total, micro_batch, micro_step):
        """Which of `total` sequences are this process's micro-batch: an integer array (micro_batch,); -1 is padding."""
        rows = (micro_step * self.dp + self.dp_rank) * micro_batch + np.arange(micro_batch)
        return np.where(rows < total, rows, -1)

    def my_positions(self, block_size):
        """The slice of a sequence that is this process's."""
        length = block_size // self.cp
        return slice(self.cp_rank * length, (self.cp_rank + 1) * length)

    # ------------------------------------------------------------------------------------------------ the model's layout

    def lay_out(self, model, *, global_tokens, micro_batch, micro_steps, block_size, dtype='float32', compile=False,
                activation_checkpoint='none', cpu_offload=False, grad_compress='none', fp8=False):
        """Put a model that was built on the meta device onto the processes, in the order that the parts need.

        Afterwards `forward_backward` and `evaluate` run it, `named_parameters` are what this process holds of it (memory that
        `fill` or a checkpoint sets), and `notes` say what differs from what was asked for.
        model: declares how it may be split in `split_plan`; its `config` has n_head, n_kv_head and n_embd.
        Raises ValueError where it cannot be laid out so.
        """
        self._check_model(model, block_size, dtype, activation_checkpoint, cpu_offload, grad_compress, fp8)
        self.loss_scale = self.averaged / global_tokens  # of a sum of losses, whose gradients get averaged
        self.ctx = autocast(dtype, self.device) if self.zero_stage < 2 else contextlib.nullcontext()
        plan, tied = model.split_plan, model.tied
        splits_backward = self.pp > 1 and self.pp_schedule in SPLIT_BACKWARD
        if compile and splits_backward:
            self.notes.append(f'compile=False: a compiled backward cannot be split as pp_schedule={self.pp_schedule} does')
            compile = False

        # pipeline
        self.stages = {0: model}
        if self.pp > 1:
            pp_rank = self.mesh.get_local_rank('pp')
            mine = [pp_rank, 2 * self.pp - 1 - pp_rank if self.pp_schedule in V_SHAPED else self.pp + pp_rank]
            self.stages = {index: cut(model, index, self.n_stages, block_size) for index in mine[:self.stages_per_rank]}
        for stage in self.stages.values():
            blocks = list(stage.get_submodule(plan['blocks']).values())
            if splits_backward and torch.__version__ < '2.13':  # autograd forgets a Function between the halves
                stage.loss_in_parts = False
            if fp8:
                self._use_float8(stage.get_submodule(plan['blocks']))
            # tensor and sequence
            if self.tp > 1:
                split_tensors(stage, blocks, plan, self.mesh['tp'])
            # context
            if self.cp > 1:
                stage.first_position = self.my_positions(block_size).start
                for block in blocks:
                    for name in plan['exchange']:
                        exchange_heads(block.get_submodule(name), self.cp_mesh)
            # activation checkpointing, and compilation, block by block
            for block in blocks:
                if activation_checkpoint == 'selective':  # within what is compiled, for the compiler to see
                    checkpoint_activations(block, activation_checkpoint)
                if compile:
                    block.forward = torch.compile(block.forward)
                if activation_checkpoint == 'full':  # around it: within, the compiler fails on tensor-parallel blocks
                    checkpoint_activations(block, activation_checkpoint)
            if compile and self.tp == 1:
                stage.loss = torch.compile(stage.loss)
            if compile and self.tp > 1 and self.device.type == 'cuda':  # async tensor parallel: collectives beside matmuls
                from torch.distributed._symmetric_memory import enable_symm_mem_for_group
                torch._inductor.config._micro_pipeline_tp = True
                enable_symm_mem_for_group(self.mesh['tp'].get_group().group_name)
            # data
            if self.zero_stage >= 2:
                self._shard(stage, blocks, dtype, cpu_offload)
            stage.to_empty(device='cpu' if cpu_offload else self.device)
            stage.tie()
            assert not (tied and self.pp == 1) or not tied.keys() & dict(stage.named_parameters()).keys(), 'the tie broke'
        self.network = model
        if self.zero_stage < 2 and self.world_size > 1:
            self.network = self._replicate(model, grad_compress)
        if self.pp > 1:
            self._schedule(micro_batch, micro_steps, block_size, model.config.n_embd, dtype)
        self.tied_pair = []  # embedding and head on different stages; None where another rank has it
        if self.pp > 1 and tied:
            (alias, original), = tied.items()
            self.tied_pair = [dict(self.stages[index].named_parameters())[name] if index in self.stages else None
                              for index, name in ((0, original), (self.n_stages - 1, alias))]
            if self.pp_schedule not in V_SHAPED:
                self.tied_group, _ = dist.new_subgroups_by_enumeration(self.mesh.mesh[[0, -1]].flatten(1).t().tolist())
        self._named = [(tied.get(name, name), p) for stage in self.stages.values() for name, p in stage.named_parameters()]
        self._rows = self._named
        if self.zero_stage == 1 and self.world_size > 1:
            self._rows = [(name, torch.nn.Parameter(self._rows_of(p))) for name, p in self._named]

    def _rows_of(self, p):
        """This process's rows of a replicated parameter or gradient: a DTensor over the same memory."""
        from torch.distributed.tensor import DTensor, Shard
        mesh, chunks = self.mesh['dp_shard_cp'], p.detach().chunk(self.world_size)
        rows = chunks[self.rank] if self.rank < len(chunks) else p.detach()[:0]
        return DTensor.from_local(rows, mesh, [Shard(0)], run_check=False, shape=p.shape, stride=p.stride())

    def _check_model(self, model, block_size, dtype, activation_checkpoint, cpu_offload, grad_compress, fp8):
        config, plan = model.config, model.split_plan
        blocks = model.get_submodule(plan['blocks'])
        widths = {name: m.out_features for name, m in blocks['0'].named_modules() if name in plan['colwise']}
        widths |= {f'{name} (rows)': model.get_submodule(name).weight.size(0) for name in plan['embedding']}

        def obstacle(tp, cp):  # what cannot be split so
            over_both, over_tp = dict(n_head=config.n_head, block_size=block_size), dict(n_kv_head=config.n_kv_head, **widths)
            return next((f'{name}={size}' for sizes, ranks in ((over_both, tp * cp), (over_tp, tp))
                         for name, size in sizes.items() if size % ranks), None)

        if obstacle(self.tp, self.cp):
            processes = self.world_size // self.pp
            fits = [f'tp={tp} cp={cp}' for tp in range(1, processes + 1) for cp in range(1, processes // tp + 1)
                    if processes % (tp * cp) == 0 and not obstacle(tp, cp)]
            raise ValueError(f'{obstacle(self.tp, self.cp)} cannot be split over tp={self.tp} cp={self.cp}: '
                             f'on these processes this model can have {", ".join(fits)}')
        if self.n_stages > len(blocks) + 2:
            raise ValueError(f'pp={self.pp} with pp_schedule={self.pp_schedule} makes {self.n_stages} stages, but n_layer={len(blocks)} '
                             f'gives {len(blocks) + 2} parts to cut between (embedding, blocks, head): set pp to at most '
                             f'{(len(blocks) + 2) // self.stages_per_rank}, or n_layer to at least {self.n_stages - 2}')
        if activation_checkpoint not in ('none', 'selective', 'full'):
            raise ValueError(f'activation_checkpoint is {activation_checkpoint!r}: choose one of none, selective, full')
        if cpu_offload and self.zero_stage < 2:
            raise ValueError(f'cpu_offload=True needs sharded parameters, but zero_stage is {self.zero_stage}: set zero_stage to 2 or 3')
        if grad_compress not in ('none', 'bf16', 'powersgd'):
            raise ValueError(f'grad_compress is {grad_compress!r}: choose one of none, bf16, powersgd')
        if grad_compress != 'none' and self.zero_stage >= 2:
            raise ValueError(f"grad_compress={grad_compress} compresses DDP's all-reduce, but this layout runs FSDP2 "
                             '(zero_stage 2 or 3, or tp or pp above 1): set grad_compress to none')
        if dtype == 'float16' and self.zero_stage > 0:
            raise ValueError(f'dtype=float16 needs a gradient scaler, which works with zero_stage=0 and tp=pp=1 alone, but '
                             f'zero_stage is {self.zero_stage} here: set dtype to bfloat16 or float32')

        if fp8 and (dtype != 'bfloat16' or self.tp > 1):
            raise ValueError(f'fp8=True goes with dtype=bfloat16 and tp=1, but they are {dtype} and {self.tp}: change those, or set fp8 to False')

    def _use_float8(self, blocks):
        """Products of the blocks' linears in float8, with a scale for each tensor as it comes (Micikevicius et al. 2022), by torchao."""
        try:
            from torchao.float8 import Float8LinearConfig, convert_to_float8_training
        except ImportError:
            raise ValueError('fp8=True needs torchao: pip install torchao, or set fp8 to False') from None
        emulate = self.device.type != 'cuda' or torch.cuda.get_device_capability(self.device) < (8, 9)
        if emulate and not self.notes.count(EMULATED):
            self.notes.append(EMULATED)
        convert_to_float8_training(blocks, config=Float8LinearConfig(emulate=emulate),
                                   module_filter_fn=lambda module, name: isinstance(module, torch.nn.Linear) and not any(
                                       size % 16 for size in module.weight.shape))

    def _shard(self, stage, blocks, dtype, cpu_offload):
        """FSDP2: gradients of every micro-batch are reduced to shards at once; with a pipeline, once an iteration."""
        from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
        options = dict(mesh=self.mesh['dp_replicate', 'dp_shard_cp'] if self.dp_replicate > 1 else self.mesh['dp_shard_cp'])
        if dtype == 'bfloat16':  # the rotary tables stay in float32: no casts but those of parameters
            options['mp_policy'] = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)
        if cpu_offload:
            options['offload_policy'] = CPUOffloadPolicy(pin_memory=self.device.type == 'cuda')
        for block in blocks:
            fully_shard(block, reshard_after_forward=self.zero_stage == 3, **options)
        fully_shard(stage, reshard_after_forward=False, **options)  # embeddings and head, which may be one

    def _replicate(self, model, grad_compress):
        """DDP. Buffers do not exist; weights are the same everywhere without being sent."""
        network = DistributedDataParallel(model, device_ids=[self.device] if self.device.type == 'cuda' else None,
                                          gradient_as_bucket_view=True, init_sync=False)
        if grad_compress == 'bf16':
            from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
            # by another name: DDP refuses that one on gloo, which can do it
            network.register_comm_hook(None, lambda state, bucket: bf16_compress_hook(state, bucket))
        elif grad_compress == 'powersgd':  # Vogels et al. 2019, with error feedback
            from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
            network.register_comm_hook(PowerSGDState(None, matrix_approximation_rank=4, start_powerSGD_iter=10), powerSGD_hook)
        # the embedding's gradient comes last: from then on this process waits for the others
        model.get_parameter(f'{model.split_plan["embedding"][0]}.weight').register_post_accumulate_grad_hook(
            lambda p: self.gradients_ready.append(self._now()) if network.require_backward_grad_sync else None)
        return network

    def _schedule(self, micro_batch, micro_steps, block_size, n_embd, dtype):
        from torch.distributed import pipelining

        class Stage(pipelining.PipelineStage):  # V-shaped schedules hand gradients within a rank, in evaluation too, where are none
            def get_local_bwd_output(self, mb_index):
                return super().get_local_bwd_output(mb_index) if self.has_backward else None

            def set_local_bwd_input(self, next_stage_bwd_outputs, mb_index):
                if self.has_backward:
                    super().set_local_bwd_input(next_stage_bwd_outputs, mb_index)

            def _get_init_p2p_neighbors_ops(self):  # torch 2.11 greets a stage of the same rank too, which gloo cannot
                return [op for op in super()._get_init_p2p_neighbors_ops() if op.group_peer != self.group_rank]

        # shapes are said beforehand, else every change between training and evaluation would run the model to learn them
        tokens = torch.empty(micro_batch, block_size // self.cp, dtype=torch.int64, device='meta')
        x = torch.empty(micro_batch, block_size // self.cp // self.tp, n_embd, device='meta', requires_grad=True,
                        dtype=torch.bfloat16 if dtype == 'bfloat16' else torch.float32)
        loss = torch.empty((), device='meta', requires_grad=True)
        stages = [Stage(stage, index, self.n_stages, self.device, group=self.mesh.get_group('pp'),
                        input_args=x if index else tokens, output_args=x if index < self.n_stages - 1 else loss)
                  for index, stage in self.stages.items()]
        self.pipeline = getattr(pipelining.schedules, SCHEDULES[self.pp_schedule][0])(
            stages if self.stages_per_rank > 1 else stages[0], micro_steps, scale_grads=False,
            loss_fn=lambda loss, target: loss * self.loss_scale)

    # ------------------------------------------------------------------------------------------------ running it

    def forward_backward(self, x, y, last=True, scale=lambda loss: loss):
        """Add the gradients of a micro-batch (of all of them, with a pipeline); returns the sum of this process's losses.

        x, y (B, T / cp). last: of the iteration. scale: of the loss before backward, a GradScaler's.
        """
        if self.pp > 1:
            loss = self._run_pipeline(self.pipeline.step, x, y)
            self._sum_tied_gradients()
            return loss
        if isinstance(self.network, DistributedDataParallel):
            self.network.require_backward_grad_sync = last  # before the forward pass, which reads it
        with self.ctx:
            loss = self.network(x, y)
        scale(loss * self.loss_scale).backward()
        if last and self.gradients_ready:
            self.waits.append((self.gradients_ready.pop(), self._now()))
        return loss.detach()

    @torch.no_grad()
    def evaluate(self, x, y):
        """The sum of this process's losses over a micro-batch (over all of them, with a pipeline)."""
        if self.pp > 1:
            return self._run_pipeline(self.pipeline.eval, x, y)
        with self.ctx:
            return self.stages[0](x, y)

    def train(self, mode):
        for stage in self.stages.values():
            stage.train(mode)

    def _run_pipeline(self, run, x, y):
        losses = []
        run(*([x] if 0 in self.stages else []), target=y, losses=losses, targets=y, return_outputs=False)
        return torch.stack(losses).sum().detach() / self.loss_scale if losses else torch.zeros((), device=self.device)

    def _sum_tied_gradients(self):
        """A tied embedding and head on different stages are two copies of one parameter: each gets the sum of both gradients."""
        mine = [p.grad.to_local() for p in self.tied_pair if p is not None]
        if len(mine) == 2:
            mine[0].add_(mine[1])
            mine[1].copy_(mine[0])
        elif mine:
            dist.all_reduce(mine[0], group=self.tied_group)

    @torch.no_grad()
    def clip_gradients(self, max_norm):
        """The norm of all gradients on all processes, clipped to max_norm where that is not 0. A tied pair counts once."""
        parameters = [p for _, p in self._named if p.grad is not None]
        again = self.tied_pair[-1] if self.tied_pair else None
        norm = torch.nn.utils.get_total_norm([p.grad for p in parameters if p is not again])
        norm = norm.full_tensor() if hasattr(norm, 'full_tensor') else norm
        if self.pp > 1:
            squares = norm.square()
            dist.all_reduce(squares, group=self.mesh.get_group('pp'))
            norm = squares.sqrt()
        if max_norm:
            torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
        return norm

    def zero_grad(self):
        for _, p in self._named:
            p.grad = None

    # ------------------------------------------------------------------------------------------------ what this process holds

    def named_parameters(self):
        """[(name in the whole model, parameter)]: sharded ones are DTensors. A tied copy comes under its original's name."""
        return self._named

    def optimizer_parameters(self):
        """named_parameters; for ZeRO-1 this process's rows of each, as DTensors over the same memory."""
        return self._rows

    def attach(self, optimizer):
        """Let ZeRO-1's optimizer take its rows of the gradients before a step, and all rows of the parameters after it."""
        if self._rows is self._named:
            return

        def before(*_):
            for (_, p), (_, rows) in zip(self._named, self._rows):
                rows.grad = self._rows_of(p.grad)

        @torch.no_grad()
        def after(*_):
            for (_, p), (_, rows) in zip(self._named, self._rows):
                p.copy_(rows.full_tensor())
                rows.grad = None

        optimizer.register_step_pre_hook(before)
        optimizer.register_step_post_hook(after)

    @functools.cached_property
    def _everyone(self):
        from torch.distributed.device_mesh import init_device_mesh
        return init_device_mesh(self.device.type, (self.world_size,))

    def on_whole(self, function, like, stack):
        """This process's parts of function(stack of whole matrices), each process having worked on its share of the matrices.

        stack (n, rows, columns): this process's parts of n matrices that are laid out as the parameter `like`. Replicas divide the n
        among them; then the ranks of FSDP, then those of tensor parallelism, trade parts of n matrices for n / ranks whole ones.
        """
        from torch.distributed.tensor import DTensor, Replicate, Shard
        levels = [(self._everyone, Replicate())] if self.world_size > 1 else []
        if hasattr(like, 'placements'):
            levels = [(like.device_mesh[name], placement) for name, placement in zip(like.device_mesh.mesh_dim_names, like.placements)]

        def trade(levels, part):
            if not levels or not len(part):
                return function(part) if len(part) else part
            (mesh, placement), *inner = levels
            held, shape = Replicate(), part.shape
            if not placement.is_replicate():
                held, sizes = Shard(placement.dim + 1), list(like.shape)
                for other, cut in inner:  # these cut the matrix first, and evenly
                    sizes[cut.dim] //= other.size()
                shape = torch.Size((len(part), *sizes))
            layout = dict(device_mesh=mesh, run_check=False, shape=shape, stride=(shape[1] * shape[2], shape[2], 1))
            share = DTensor.from_local(part, placements=[held], **layout).redistribute(placements=[Shard(0)]).to_local()
            done = trade(inner, share).contiguous()
            return DTensor.from_local(done, placements=[Shard(0)], **layout).redistribute(placements=[held]).to_local()

        return trade([(mesh, placement) for mesh, placement in levels if mesh.size() > 1], stack)

    def describe(self):
        """The layout in a line."""
        data = 'DDP' if self.zero_stage < 2 else f'FSDP2 over {self.averaged // self.dp_replicate}'
        return (f'pp {self.pp}{f" ({self.pp_schedule})" if self.pp > 1 else ""} × dp {self.dp} ({self.dp_replicate} × '
                f'{self.dp // self.dp_replicate}) × cp {self.cp} × tp {self.tp} = {self.world_size}; zero_stage '
                f'{self.zero_stage} ({data})')

    def bytes_held(self, optimizer):
        """(parameters, optimizer state) in bytes that this process holds: AdamW keeps two float32 moments, Muon one."""
        parameters = sum(local_part(p).nbytes for _, p in self._named)
        return parameters, sum((1 if 'momentum' in group else 2) * 4 * local_part(p).numel() for group in optimizer.param_groups
                               for p in group['params'])

    # ------------------------------------------------------------------------------------------------ talking to each other

    def _reduce(self, values, operation):
        """Of numbers over all processes, in float64."""
        values = torch.tensor(values, dtype=torch.float64)
        if self.world_size > 1:
            begin = time.perf_counter()
            dist.all_reduce(values, operation)
            self.waits.append((begin, time.perf_counter()))
        return values.tolist()

    def sum(self, *values):
        """Sums of numbers over all processes."""
        return self._reduce(values, dist.ReduceOp.SUM)

    def sum_losses(self, loss_sum):
        """A sum of losses over the whole batch from each process's; tensor-parallel ranks have the same one."""
        return self.sum(loss_sum.item())[0] / self.tp

    def any(self, flag):
        """True on every process if the flag is set on one."""
        return bool(flag) if self.world_size == 1 else self.sum(bool(flag))[0] > 0

    def max(self, value):
        """The largest of every process's numbers."""
        return self._reduce([value], dist.ReduceOp.MAX)[0]

    def gather(self, value):
        """Every process's number, in the order of ranks."""
        return self.sum(*(value if rank == self.rank else 0.0 for rank in range(self.world_size)))

    def slowest(self):
        """(rank, seconds) of the process that the others waited for, and for how long they did, since `waits` was emptied.

        It is the one that waits least. Seen are waits between micro-steps and for DDP's gradients; FSDP2, tensor, context and
        pipeline parallelism wait within the model too, where nothing looks.
        """
        waited = self.gather(sum(begin.elapsed_time(end) / 1000 if hasattr(begin, 'elapsed_time') else end - begin
                                 for begin, end in self.waits))
        self.waits.clear()
        return waited.index(min(waited)), max(waited) - min(waited)

    def _now(self):
        """A time on the device's own clock: on a GPU an event in its stream, which costs no wait."""
        if self.device.type != 'cuda':
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def barrier(self):
        self.any(False)

    def leave(self, exit_code):
        """End this process, once all have come here."""
        if self.world_size > 1:
            self.barrier()  # none leaves while the main process still writes: torchrun ends the rest when one has failed
            dist.destroy_process_group()
        sys.stdout.flush()
        os._exit(exit_code)  # taking the interpreter down lasts a second, and a thread of gloo's that still wants it would abort


@torch.no_grad()
def fill(named_parameters, value):
    """Set every parameter, sharded or not, to its part of value(name, shape), a tensor of the whole parameter."""
    for name, p in named_parameters:
        part, local = value(name, p.shape), p
        if hasattr(p, 'placements'):
            local = p.to_local()
            for degree, place, coordinate in reversed([*zip(p.device_mesh.shape, p.placements, p.device_mesh.get_coordinate())]):
                if not place.is_replicate():  # from the right: FSDP cuts what tensor parallelism has cut
                    chunks = part.chunk(degree, place.dim)
                    part = chunks[coordinate] if coordinate < len(chunks) else part.narrow(place.dim, 0, 0)
        local.copy_(part)


def _fresh_store():
    """The store that torchrun announces, under a prefix that only the processes of this start have.

    torchrun keeps one store over restarts, and in it the addresses of processes that have ended (pytorch#135712). So each
    process comes with a name nobody had, and the first answers under that until all have understood it.
    """
    store, rank, world_size = next(dist.rendezvous('env://'))
    name = uuid.uuid4().hex
    if rank:
        store.set(f'hello/{rank}', name)
        prefix = store.get(f'welcome/{name}').decode()
        store.set(f'{prefix}/{rank}', '')
        return dist.PrefixStore(prefix, store)
    while missing := [r for r in range(1, world_size) if not store.check([f'{name}/{r}'])]:
        for r in missing:
            if store.check([f'hello/{r}']):
                store.set(f'welcome/{store.get(f"hello/{r}").decode()}', name)
        time.sleep(0.01)
    return dist.PrefixStore(name, store)


def _lost_connection(kind, error, trace):
    """sys.excepthook: where another process has ended, this one need not show a traceback of its own."""
    if re.search('gloo.*(closed by peer|reset by peer|Broken pipe|Timed out)', str(error)):
        print(f'error: rank {os.environ["RANK"]} lost its connection to another process: torchrun names the one that ended first',
              file=sys.stderr, flush=True)
        time.sleep(1)  # for torchrun to see that one first
        os._exit(1)
    sys.__excepthook__(kind, error, trace)


def _divisors(number):
    return ', '.join(str(d) for d in range(1, number + 1) if number % d == 0)


def cut(model, index, n_stages, block_size):
    """A copy of the model with only the parts of pipeline stage `index`; None where others were.

    Stages have as equal a cost as runs of whole blocks allow. A parameter costs a multiplication per token, attention T · C per
    block, and the embedding half of its size: its lookups are nearly free, but its memory and its update are not.
    """
    plan, C = model.split_plan, model.config.n_embd
    names = list(model.get_submodule(plan['blocks']))
    sizes = {name: sum(p.numel() for p in model.get_submodule(name).parameters()) for name in (*plan['last'], plan['blocks'])}
    first = sum(p.numel() for name, p in model.named_parameters(remove_duplicate=False) if name.startswith(plan['first']))
    block = sizes[plan['blocks']] // len(names) + block_size * C
    lengths = balance([first // 2, *[block] * len(names), sum(sizes[name] for name in plan['last'])], n_stages)
    start = sum(lengths[:index])  # of parts: the embedding is part 0, the head the last
    kept = {names[part - 1] for part in range(start, start + lengths[index]) if 1 <= part <= len(names)}
    stage = copy.deepcopy(model)
    blocks = stage.get_submodule(plan['blocks'])
    for name in names:
        if name not in kept:
            del blocks[name]
    for name in (*(plan['first'] if index else ()), *(plan['last'] if index < n_stages - 1 else ())):
        parent, _, child = name.rpartition('.')
        if child in stage.get_submodule(parent)._modules:
            stage.get_submodule(parent)._modules[child] = None
    return stage


def balance(costs, parts):
    """Lengths of `parts` non-empty runs of consecutive costs such that the dearest run is as cheap as can be."""
    @functools.cache
    def best(start, parts):  # (dearest run, sum of squares, lengths) for costs[start:]
        if parts == 1:
            total = sum(costs[start:])
            return total, total ** 2, (len(costs) - start,)
        options = []
        for length in range(1, len(costs) - start - parts + 2):
            run, (dearest, squares, lengths) = sum(costs[start:start + length]), best(start + length, parts - 1)
            options.append((max(run, dearest), run ** 2 + squares, (length, *lengths)))
        return min(options)

    return best(0, parts)[2]


def split_tensors(model, blocks, plan, mesh):
    """Tensor and sequence parallelism: DTensors on `mesh`, every parameter of them, as the model's plan says.

    Between blocks each rank has its part of the sequence. A norm's output is gathered once for all linears that read it, and a
    row-wise linear's is summed and scattered at once (Korthikanti et al. 2022, 4.2.2). The loss is computed on sharded logits.
    """
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.experimental import implicit_replication
    from torch.distributed.tensor.parallel import (ColwiseParallel, PrepareModuleInput, PrepareModuleOutput, RowwiseParallel,
                                                   SequenceParallel, loss_parallel, parallelize_module)
    styles = dict(
        colwise=[ColwiseParallel()],
        rowwise=[RowwiseParallel(output_layouts=Shard(1))],
        sequence=[SequenceParallel(), PrepareModuleOutput(output_layouts=Shard(1), desired_output_layouts=Replicate(),
                                                          use_local_output=False)],
        positions=[PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=Shard(0)),
                   SequenceParallel(sequence_dim=0, use_local_output=True)],
        heads=[SequenceParallel(sequence_dim=1, use_local_output=True)],
        embedding=[RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1))],
        head=[ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)],
    )
    for part in (model, *blocks):
        modules = dict(part.named_modules())
        for kind, steps in styles.items():
            for name in plan[kind]:
                if name in modules and list(modules[name].parameters()):
                    for style in steps:
                        parallelize_module(modules[name], mesh, style)
                    if kind == 'embedding':  # a compiled block would lose the gradient of an input that is still under way
                        modules[name].register_forward_hook(lambda module, inputs, output: output.clone())
    model.tie()  # each of the two was split apart
    for name, p in model.named_parameters():
        if not hasattr(p, 'placements'):
            raise ValueError(f'{name} is in no part of split_plan (model.py): say there how tp={mesh.size()} splits it, or set tp to 1')
    model.register_forward_hook(lambda module, inputs, output: output.to_local().clone() if hasattr(output, 'to_local') else output)
    if not hasattr(STAYING, 'entered'):  # cross-entropy on logits sharded by vocabulary, beside plain tensors
        STAYING.entered = STAYING.enter_context(loss_parallel()), STAYING.enter_context(implicit_replication())


def exchange_heads(attention, mesh):
    """Context parallelism around attention: each rank comes with its part of the sequence and attends with its part of the heads.

    q, k, v (B, heads, T / cp, D) become (B, heads / cp, T, D) by an all-to-all, and the result goes back by another. Key/value
    heads are repeated where there are too few to go round.
    """
    from torch.distributed.tensor import DTensor, Shard

    def redistribute(x, source, target):
        return DTensor.from_local(x, mesh, [Shard(source)], run_check=False).redistribute(placements=[Shard(target)]).to_local()

    def before(module, inputs):
        q, k, v = inputs
        repeats = mesh.size() // math.gcd(mesh.size(), k.size(1))
        if repeats > 1:
            k, v = k.repeat_interleave(repeats, dim=1), v.repeat_interleave(repeats, dim=1)
        return tuple(redistribute(x, 2, 1) for x in (q, k, v))

    attention.register_forward_pre_hook(before)
    attention.register_forward_hook(lambda module, inputs, output: redistribute(output, 1, 2))


# what selective activation checkpointing keeps: the outputs of matrix products and of attention
KEPT = ('mm', 'addmm', '_scaled_mm', '_scaled_dot_product_flash_attention_for_cpu', '_scaled_dot_product_flash_attention',
        '_scaled_dot_product_efficient_attention', '_scaled_dot_product_cudnn_attention')


def checkpoint_activations(block, mode):
    """Recompute a block's activations in the backward pass: all of them ('full', Chen et al. 2016), or all but KEPT ('selective')."""
    context = {}
    if mode == 'selective':
        kept = [getattr(torch.ops.aten, name).default for name in KEPT]
        context = dict(context_fn=functools.partial(create_selective_checkpoint_contexts, kept))
    block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False, **context)


def compile_failure(device):
    """Why torch.compile does not work on this machine (no compiler, no Triton), in a line; None where it does."""
    try:
        torch.compile(lambda x: x.sin() + 1)(torch.ones(8, device=device))
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # whatever TorchInductor and the compiler it calls raise
        return f'{type(error).__name__}: {(str(error).strip().splitlines() or [""])[0]}'
    torch._dynamo.config.suppress_errors = True  # code it cannot follow runs as it is
    torch._dynamo.config.optimize_ddp = False  # blocks are compiled one by one, so DDP's buckets need no more cuts (pytorch#104674)


def resolve_dtype(dtype, device, training=True):
    """'auto' is bfloat16 on GPUs that have it, float16 on those that do not. On CPUs it is bfloat16 to train with where they multiply
    in it (AVX512-BF16, AMX), else float32: its attention to a long text takes the time that reading half the bytes of weights saves."""
    if dtype == 'auto' and device.type == 'cpu':
        fast = any(getattr(torch.cpu, name, bool)() for name in ('_is_avx512_bf16_supported', '_is_amx_tile_supported'))
        return 'bfloat16' if training and fast else 'float32'
    if dtype == 'auto':
        return 'float32' if device.type != 'cuda' else 'bfloat16' if torch.cuda.is_bf16_supported() else 'float16'
    if dtype not in ('float32', 'bfloat16', 'float16'):
        raise ValueError(f'dtype is {dtype!r}: use auto, float32, bfloat16 or float16')
    return dtype


def autocast(dtype, device):
    """The context a forward pass runs in."""
    return contextlib.nullcontext() if dtype == 'float32' else torch.autocast(device.type, getattr(torch, dtype))
