"""Predict the memory of an iteration under a layout: bytes on the fullest process, by part.

This file has formulas; what latent attention and recurrences keep is measured by measured.py. The formulas
follow this repository's code: `kilogpt/parallel/apply.py` decides what each process holds; `ddp.py`, `expert.py`
and `pipeline.py` decide what it sends. Source of the activations: Korthikanti et al. 2022 (4.1).

    shape = Shape(model)             # shape.py: any GPT, on the meta device too
    work = Work(micro_batch=2, micro_steps=16, block_size=4096)
    memory(shape, layout, work)      # {part: bytes} at the moment when their sum is largest
    time_model.seconds(shape, layout, work, machine)   # {part: seconds} of an iteration
"""
import math
from dataclasses import dataclass
from typing import NamedTuple

from kilogpt.devices import cpu
from kilogpt.layers.options import find_targets
from kilogpt.plan.shape import Stage, gathered_in_blocks

FLOAT32, INT64 = 4, 8  # bytes
FROZEN_BYTES = dict(float32=4, bfloat16=2, int8=1)  # of an element of a FrozenLinear's weight, by lora_base_dtype
CONTEXT = 1.5e9  # bytes that CUDA and NCCL take for themselves
# Among the processes that share the experts, the rows of the busiest one over their mean. A guess.
LOAD_IMBALANCE = 1.2
GAPS = 0.06  # memory lost between tensors, as a share of their bytes; fitted (docs/layouts.md)
# The same for processes on CPUs, fitted to the runs in docs/log of 2026-11-25.
CPU_PROCESS = 0.34e9  # bytes of Python and PyTorch, and of what they load before the first iteration
CPU_COMPILER = 0.13e9  # bytes of torch.compile
# glibc keeps what is freed (host.keep_freed_memory), and a tensor that fits into none of the gaps takes new
# memory. The largest tensors are logits: a hole of their size stays once a small tensor lies in it, and
# another one if copies for saves are allocated beside the training.
CPU_GAPS = 0.13  # as a share of the bytes of all tensors
CPU_HOLE = 0.4  # as a share of the bytes of logits
# The same for several processes, fitted to the runs in docs/log of 2026-11-27. Parameters and gradients that are
# gathered and freed in every iteration, and gloo's copies of them, leave holes between what stays.
CPU_PEERS = 0.08e9  # bytes of torch.distributed and gloo
CPU_HOLES_OF_ZERO1 = 1.7  # as a share of the bytes of whole parameters
CPU_HOLES_OF_FSDP = 2.7


@dataclass(frozen=True)
class Work:
    """The work of one data-parallel rank in an iteration. Most fields are keys of train.py."""
    micro_batch: int
    micro_steps: int
    block_size: int
    dtype: str = 'bfloat16'
    activation_checkpoint: str = 'none'
    optimizer: str = 'adamw'
    compile: bool = False
    fp8: bool = False
    cpu_offload: bool = False
    grad_compress: str = 'none'
    async_tp: bool = False
    load_imbalance: float = LOAD_IMBALANCE
    seen: float = 0.0  # positions that attention sees from one, on average; 0 = those of whole sequences
    device: str = 'cuda'  # or 'cpu', where attention and norms keep other activations
    saves_in_background: bool = False  # the checkpoint's copy is in the memory that is predicted

    @classmethod
    def of(cls, config, layout, device, split=None):
        """The work of a run. config: the values of train.py's keys, dtype resolved. device: 'cuda' or 'cpu'.

        split: (micro_batch, micro_steps) if known; otherwise computed from the layout and the config.
        """
        batch_size = config['batch_size']
        split = split or layout.split_batch(batch_size * config['gradient_accumulation_steps'], batch_size)
        same = {key: config[key] for key in cls.__dataclass_fields__ if key in config and key != 'device'}
        saves_in_background = False
        if device == 'cpu':  # as in train.py; with a GPU, the copy is in host memory
            saves = (config['keep_checkpoints'] > 0 or config['eval_iters'] > 0) and not config['eval_only']
            saves_in_background = saves and config['async_checkpoint'] and not config['cpu_offload']
        return cls(*split, **same, device=device, saves_in_background=saves_in_background)

    @property
    def width(self):
        """Bytes of an element in matrix products, and of a parameter gathered for these products."""
        return 4 if self.dtype == 'float32' else 2

    def residual(self, layout):
        """Bytes of an element of the residual stream: FSDP2 casts the weights, and the stream follows them.

        Under autocast it stays float32.
        """
        return self.width if layout.uses_fsdp else FLOAT32


def memory(shape, layout, work):
    """{part: bytes} of tensors on the fullest process, at the moment when their sum is largest.

    Parts: parameters, gradients and moments (those kept from one iteration to the next), gathered (copies by
    FSDP2 or autocast, and gradients before their reduction), activations, logits (all of the loss), buffers
    (of pipelines), copies (of the state, on CPUs, for saves in the background), other (of the optimizer's
    step). The allocator's reserve is not included: see `reserve`.
    """
    n_blocks = [Stage.sum(stages).n_blocks for stages in shape.stages(layout, work.block_size)]
    # The first ranks hold the most micro-batches, and the last rank has the head.
    ranks = {0, min(1, layout.pp - 1), n_blocks.index(max(n_blocks)), max(0, layout.pp - 2), layout.pp - 1}
    candidates = []
    for rank in ranks:
        candidates += phases(shape, layout, work, rank).values()
    return max(candidates, key=lambda parts: sum(parts.values()))


def reserve(parts, work, shape, layout):
    """Bytes that a process takes in addition to those of its tensors, the result of `memory`.

    On GPUs these are CUDA, NCCL and the gaps between tensors; on CPUs Python, PyTorch, gloo and such gaps.
    """
    total = sum(parts.values())
    if work.device == 'cpu':
        holes = 2 if work.saves_in_background else 1
        gaps = CPU_GAPS * total + holes * CPU_HOLE * parts['logits']
        if layout.world_size > 1:
            share = CPU_HOLES_OF_FSDP if layout.uses_fsdp else CPU_HOLES_OF_ZERO1 * (layout.zero_stage == 1)
            whole = max(shape.totals(stages, layout)[0].split for stages in shape.stages(layout, work.block_size))
            gaps += CPU_PEERS + share * FLOAT32 * whole
        return CPU_PROCESS + CPU_COMPILER * work.compile + gaps
    return CONTEXT + GAPS * total


def state(shape, layout, work, rank):
    """{'parameters', 'gradients', 'moments': bytes} on the fullest process of a pipeline rank."""
    stages = shape.stages(layout, work.block_size)[rank]
    sharded, trained = (each.sharded(stages, layout)[0] for each in (shape, shape.trained))
    updated, updated_in_block_matrices = shape.trained.updated(stages, layout)
    moments = 2 * updated
    if work.optimizer == 'muon':  # keeps one moment of a block's matrix, AdamW two
        moments -= updated_in_block_matrices
    frozen = shape.frozen.sharded(stages, layout)[0]
    parameters = FLOAT32 * (sharded - frozen) + FROZEN_BYTES[shape.config.lora_base_dtype] * frozen
    return dict(parameters=parameters, gradients=FLOAT32 * trained, moments=FLOAT32 * moments)


def phases(shape, layout, work, rank):
    """{phase: {part: bytes}} of a pipeline rank, for the phases whose memory can be the peak.

    The phases are: the loss; the last block's backward pass, before its gradients are reduced and while they
    are; the end of the backward pass; and the optimizer's step. Between these phases, gradients take the
    place of activations.
    """
    stages = shape.stages(layout, work.block_size)[rank]
    merged = Stage.sum(stages)
    kinds = {}  # {(has experts, letter of the mixer): blocks}, as if experts and mixers were independent
    for has_experts, count in enumerate((merged.n_dense, merged.n_sparse)):
        for mixer, of_mixer in merged.n_mixers.items():
            if count and of_mixer:
                kinds[has_experts, mixer] = count * of_mixer / merged.n_blocks
    sharded = state(shape, layout, work, rank)
    accumulates = work.micro_steps > 1
    replicates = layout.world_size > 1 and not layout.uses_fsdp

    gradients, gathered, reduced_unit, reduced_ends = _whole_bytes(shape, layout, work, stages)
    gradients_before = gradients if accumulates or replicates else 0  # at the start of the backward pass

    of_kind = {kind: block_activations(shape.config, layout, work, *kind) for kind in kinds}
    kept = sum(count * of_kind[kind].kept for kind, count in kinds.items())
    products = sum(count * of_kind[kind].products for kind, count in kinds.items())
    in_flight = micro_batches_in_flight(layout, work.micro_steps, rank)
    # The output of a block.
    stream = tokens_of(layout, work) / layout.tp * shape.config.n_embd * work.residual(layout)
    activations = in_flight * (kept / layout.stages_per_rank + stream)
    # Activations of a block that are free again when its gradients are whole for the first time.
    decrease = min((costs.freed for costs in of_kind.values()), default=0)
    if layout.pp > 1:
        decrease = activations / in_flight
        if in_flight == work.micro_steps * layout.stages_per_rank:  # all forward passes come first
            gradients_before = 0
        # Between the two halves of a backward pass, the gradients of the products' results are kept too.
        splits_backward = layout.splits_backward(work.activation_checkpoint)
        halves = {'interleavedzb': rank + 1, 'zbv': 1}.get(layout.pp_schedule, 0) if splits_backward else 0
        activations += halves * products / layout.stages_per_rank
        # At its end, zbv computes this many first halves before any of their second halves.
        if layout.pp_schedule == 'zbv' and splits_backward:
            last = 2 * rank + 1
            activations = max(activations, last * ((kept + products) / layout.stages_per_rank + stream))
    buffers = 0
    if layout.pp > 1:  # one tensor for each micro-batch received, forward and backward
        n_received = sum((not stage.has_embedding) + (not stage.has_head) for stage in stages)
        buffers = n_received * work.micro_steps * stream
    logits = loss_bytes(shape, layout, work) if merged.has_head else 0
    recomputed = 0
    if work.activation_checkpoint != 'none':
        recomputed = max((costs.whole - costs.kept for costs in of_kind.values()), default=0)
    backward = max((costs.backward for costs in of_kind.values()), default=0)

    if work.cpu_offload and work.device != 'cpu':  # the state is in host memory
        sharded = dict.fromkeys(sharded, 0)
        gradients_before = gradients = 0
    # A checkpoint holds the trained parameters alone, of which each has a gradient of its size.
    copies = _copied_bytes(sharded, layout) if work.saves_in_background else 0
    resident = dict(parameters=sharded['parameters'], moments=sharded['moments'], buffers=buffers,
                    copies=copies)
    # FSDP2 reduces the head's gradient, the first one, at the end, with those of the embeddings.
    head = work.width * shape.config.padded_vocab_size * shape.config.n_embd / layout.tp
    head *= merged.has_head and layout.uses_fsdp and layout.pp == 1 and not shape.config.lora_rank
    return {
        'loss': resident | dict(
            gradients=gradients_before, gathered=gathered, activations=activations, logits=logits),
        'backward': resident | dict(
            gradients=gradients_before, gathered=gathered + head, logits=0,
            activations=activations + recomputed + backward),
        'reduce': resident | dict(
            gradients=gradients if layout.pp > 1 else gradients_before, logits=0,
            gathered=gathered + head + reduced_unit, activations=activations - decrease),
        'end': resident | dict(
            gradients=max(gradients_before, gradients), gathered=gathered + reduced_ends, activations=0,
            logits=0),
        'step': resident | dict(gradients=sharded['gradients'], gathered=0, activations=0, logits=0,
                                other=_muon_bytes(shape, layout, work, stages)),
    }


def _muon_bytes(shape, layout, work, stages):
    """Bytes of temporary tensors while Muon, on a CPU, updates the largest list of optim.muon_groups."""
    config = shape.config
    if work.optimizer != 'muon' or work.device != 'cpu':
        return 0
    hidden = config.n_experts * config.expert_hidden if config.mlp == 'moe' else config.n_hidden
    attention = 2 * (config.n_head + config.n_kv_head) * config.head_width
    together = 2 if config.is_gated else 1  # c_fc and c_gate have one shape
    share = together * hidden / ((together + 1) * hidden + attention)
    elements = min(2 ** 26, share * shape.trained.updated(stages, layout)[1])
    # float32: gradient, direction, the matrix before and after a step of Newton-Schulz, three Gram matrices
    # of about a third of its size. bfloat16: gradient and direction before the cast have the peak.
    return elements * (19 if work.width == FLOAT32 else 12)


def _copied_bytes(sharded, layout):
    """Bytes that a process copies for a checkpoint. Processes that hold the same tensors share the work."""
    replicas = layout.dp_replicate if layout.uses_fsdp else layout.dp * layout.cp
    of_moments = 1 if layout.zero_stage == 1 else replicas  # ZeRO-1 has divided the moments already
    return sharded['gradients'] / replicas + sharded['moments'] / of_moments


class WholeBytes(NamedTuple):
    """Bytes of gradients, and of whole parameters and gradients in addition to the shards."""
    gradients: float  # at the end of the backward pass
    gathered: float  # copies of parameters while the model runs
    reduced_unit: float  # whole gradients of the largest unit of FSDP2 (a block, its experts) in a reduction
    reduced_ends: float  # whole gradients of embeddings, last norm and head in a reduction


def _whole_bytes(shape, layout, work, stages):
    """The WholeBytes of the stages of a pipeline rank."""
    all_parts, ends = shape.totals(stages, layout)
    trained_parts, trained_ends = shape.trained.totals(stages, layout)
    merged = Stage.sum(stages)
    if not layout.uses_fsdp:
        gathered = 0
        if work.width < FLOAT32:  # autocast's copies, which a FrozenLinear does not keep
            in_blocks = all_parts.split_in_matrices - ends.split_in_matrices
            in_blocks -= shape.frozen.totals(stages, layout)[0].split
            in_blocks -= merged.n_tables * shape.counts('tables', layout).split  # whose rows alone are cast
            if work.compile and work.activation_checkpoint != 'none':  # copied again in the backward pass
                in_blocks = 0
            gathered = work.width * (in_blocks + ends.split)
        return WholeBytes(FLOAT32 * trained_parts.split, gathered, 0, 0)
    # FSDP2 gathers and reduces a block's experts and its other parameters as separate units.
    units = ['dense'] * (merged.n_dense > 0) + ['sparse', 'experts'] * (merged.n_sparse > 0)
    table = shape.trained.counts('tables', layout).gathered if merged.n_tables else 0
    table += max((shape.trained.counts(mixer, layout).gathered for mixer, count in merged.n_mixers.items() if count),
                 default=0)
    largest_unit = max((shape.trained.counts(unit, layout).gathered + table * (unit != 'experts')
                        for unit in units), default=0)
    splits_backward = layout.splits_backward(work.activation_checkpoint)
    gathered, frozen = (gathered_in_blocks(each, layout, stages, splits_backward)
                        for each in (shape, shape.frozen))
    frozen_width = work.width  # FSDP2 casts what it gathers to 16 bits, or leaves it as it is
    if work.width == FLOAT32:
        frozen_width = FROZEN_BYTES[shape.config.lora_base_dtype]
    gathered = work.width * (gathered - frozen + ends.gathered) + frozen_width * frozen
    gradients, width = FLOAT32 * shape.trained.sharded(stages, layout)[0], work.width + FLOAT32
    if layout.pp > 1:  # gradients stay whole until the last micro-batch
        gradients = FLOAT32 * trained_parts.gathered
    if layout.pp > 1 or layout.dp_shard * layout.cp == 1:
        width = FLOAT32
    return WholeBytes(gradients, gathered, width * largest_unit, width * trained_ends.gathered)


def tokens_of(layout, work):
    """Tokens of a micro-batch on a process, before tensor parallelism divides the sequence."""
    return work.micro_batch * work.block_size / layout.cp


def micro_batches_in_flight(layout, micro_steps, rank):
    """The largest number of micro-batches whose activations a pipeline rank holds at the same time.

    On a rank with two stages, each stage counts. tests/plan/test_models.py simulates PyTorch's schedules and
    compares.
    """
    if layout.pp == 1:
        return 1
    most = {'gpipe': micro_steps, '1f1b': layout.pp - rank, 'interleaved1f1b': 3 * layout.pp - 1 - 2 * rank,
            'interleavedzb': 2 * layout.pp, 'zbv': 2 * layout.pp, 'dualpipev': 2 * layout.pp + 1}
    return min(most[layout.pp_schedule], micro_steps * layout.stages_per_rank)


class BlockActivations(NamedTuple):
    """Bytes of the activations of a block for a micro-batch."""
    kept: float  # kept for the backward pass
    whole: float  # kept for the backward pass if nothing is checkpointed
    backward: float  # additional memory during the backward pass
    products: float  # results of matrix products
    freed: float  # share of `kept` that is free once the gradients of the block's first matrices are whole


def block_activations(config, layout, work, has_experts, mixer='A'):
    """The BlockActivations of a block with experts or without, by the letter of its mixer in mixer_pattern."""
    s, width, tp = tokens_of(layout, work), work.width, layout.tp
    on_cpu = work.device == 'cpu'
    C, F = config.n_embd, config.n_hidden
    heads, kv_heads = config.n_head * config.head_width, config.n_kv_head * config.head_width
    if layout.cp > 1:  # key/value heads are repeated if there are more ranks than heads
        kv_heads *= layout.cp // math.gcd(layout.cp, config.n_kv_head // tp)
    residual = work.residual(layout)
    norm_input = residual * C
    if config.norm == 'rmsnorm' and on_cpu:  # not fused: keeps the float32 input and the normalized input
        norm_input = 2 * FLOAT32 * C
    # Beside adapters, what gradients of frozen weights would need is not kept: normalized inputs, and inputs
    # of linears without an adapter.
    is_frozen, targets = config.lora_rank > 0, find_targets(config.lora_targets)
    if is_frozen:
        norm_input = min(norm_input, FLOAT32 * C)
    keeps_input = not is_frozen or targets & {'attn.c_q', 'attn.c_k', 'attn.c_v'}
    # q, k, v, the result, and a log-sum-exp for each head
    attention = width * (2 * heads + 2 * kv_heads) + FLOAT32 * config.n_head
    if on_cpu and (width < FLOAT32 or config.dropout) and work.block_size <= 1024:  # cpu.PlainAttention
        # The mean number of scores of a query: keys up to the end of its chunk of 256 queries.
        keys = (work.block_size + min(work.block_size, 256)) / 2
        attention = width * (4 * heads + config.n_head / layout.cp * keys)
    if config.attention_softcap or config.attention_sinks:  # keeps the capped scores and their softmax
        scores = config.n_head * work.block_size
        attention += scores * (2 * FLOAT32 + (width if width < FLOAT32 else 0))
    if layout.cp > 1:
        attention += width * heads  # the result both before and after its exchange
    if config.attention_conv and not is_frozen:  # queries, keys and values before it, too
        attention += width * (heads + 2 * config.n_kv_head * config.head_width)
    if config.attention_gate:
        attention += width * heads  # and before and after its gate
    if config.qk_norm:
        # Inputs are float32. If FSDP2 gathers the weights in 16 bits, the norm is not fused on GPUs either.
        is_fused = not on_cpu and (width == FLOAT32 or not layout.uses_fsdp)
        attention += FLOAT32 * (heads + kv_heads) * (1 if is_fused or is_frozen else 2)
        attention += width * heads * (not is_fused)
    mixer_products, result = width * ((heads + 2 * kv_heads) / tp + C), width * heads + FLOAT32 * config.n_head
    if mixer == 'D' or config.kv_latent:
        from kilogpt.plan.measured import mixer_activations
        attention, mixer_products, result = mixer_activations(config, layout, work.width, mixer, attention)
    # Tensors of the width of an MLP's hidden layer; half of them are results of products.
    n_hidden = 4 if config.is_gated else 2
    if has_experts:
        mlp, mlp_products, mlp_selective = _expert_activations(config, layout, work, n_hidden)
    else:
        mlp = width * (C + n_hidden * F / tp)
        if is_frozen:
            mlp -= width * C * targets.isdisjoint({'mlp.c_fc', 'mlp.c_gate'})
            mlp -= width * F / tp * ('mlp.c_proj' not in targets)
        # The result of a row-wise product, here and in attention, is summed over tp and whole on each rank.
        mlp_products = mlp_selective = width * (C + n_hidden // 2 * F / tp)
    if config.mlp_conv and not is_frozen:  # the MLP's input before it, too
        mlp += residual * C
    n_norms = 4 if config.norm_place == 'both' else 2
    whole = n_norms * norm_input / tp + width * C * bool(keeps_input) + attention / tp + mlp
    if config.dropout:
        whole += 2 * C / tp * (width if on_cpu else 1)
    products = mixer_products + mlp_products
    kept = whole
    if work.activation_checkpoint == 'full':
        kept = residual * C / tp
        if has_experts:  # the indices of the experts that each token goes to
            kept += INT64 * config.n_active_experts
    elif work.activation_checkpoint == 'selective':  # keeps the results of products and of attention
        kept = mixer_products + mlp_selective + result / tp
        kept += residual * C / tp
        if has_experts:  # attention and experts are checkpointed, the norms are not
            kept += (2 * norm_input - residual * C) / tp + width * C
        elif work.compile and config.norm_place == 'before':
            # The compiler keeps the result of the first norm, but not those of both c_proj, which are only added.
            kept -= width * C
    elif work.compile:
        # The compiler's partitioner keeps the inputs of products, but not the result of SwiGLU's activation.
        if not has_experts:
            mlp = width * (C + min(n_hidden, 3) * F / tp)
        kept = whole = residual * C / tp + width * C + (width * C + attention) / tp + mlp
    backward = 2 * residual * C / tp
    if has_experts:
        backward += 3 * width * C * config.n_active_experts  # gradients of rows, sorted and unsorted
    else:
        backward += (n_hidden - 1) * width * F / tp
    freed = kept
    if has_experts and work.activation_checkpoint != 'full':
        freed = mlp_selective if work.activation_checkpoint == 'selective' else mlp
    return BlockActivations(*(s * count for count in (kept, whole, backward, products, freed)))


def _expert_activations(config, layout, work, n_hidden):
    """Bytes of a mixture of experts for a token: (kept, results of products, kept with 'selective')."""
    width, tp, C, K = work.width, layout.tp, config.n_embd, config.n_active_experts
    rows = K * (work.load_imbalance if layout.ep > 1 else 1)  # for the experts of this process
    shared = config.n_shared_experts
    F = config.expert_hidden
    products = (rows + shared) * width * (C + n_hidden // 2 * F / tp)
    # The router's float32 input and affinities, each token's experts and their weights, the order of rows.
    router = FLOAT32 * (C + config.n_experts + 2 * K) + INT64 * K * (3 if layout.ep > 1 else 2)
    if config.router_z_loss:
        router += FLOAT32 * config.n_experts
    if shared and width < FLOAT32:
        router += width * C
    inputs = rows * width * C
    outputs = K * width * C
    kept = router + inputs + outputs + (rows + shared) * n_hidden * width * F / tp
    return kept, products, router + inputs + outputs + products


def loss_bytes(shape, layout, work):
    """Peak bytes of the loss: logits in 16 bits and in float32, their log-softmax and their gradient."""
    config = shape.config
    rows, vocabulary = int(tokens_of(layout, work)), config.padded_vocab_size
    per_logit = 12
    if work.compile and layout.tp == 1:
        changes_logits = config.softcap or config.logit_scale != 1
        in_place = work.device == 'cuda' and not changes_logits  # loss_kernel.py: logits become gradients
        per_logit = work.width if in_place else 2 * work.width
    per_logit += 8 if config.softcap else 0
    if layout.tp > 1:  # sharded logits, all at once; DTensor's loss makes one more copy
        return (per_logit + FLOAT32) * rows * vocabulary / layout.tp + work.width * rows * config.n_embd
    size = shape.model.loss.part_size(
        rows, vocabulary, cpu.MAX_LOGITS if work.device == 'cpu' else math.inf)
    hidden = (work.residual(layout) + work.width) * rows * config.n_embd  # what the last norm gives; gradients
    if size == rows:
        return per_logit * rows * vocabulary + hidden
    of_weight = vocabulary * config.n_embd
    if config.lora_rank:  # the head is frozen, and at most cast
        return per_logit * size * vocabulary + hidden + work.width * (work.width < FLOAT32) * of_weight
    # The sum of the weight's gradients, and that of a part beside the gradients of its logits.
    of_part = max(per_logit * size * vocabulary, work.width * (size * vocabulary + of_weight))
    return of_part + hidden + FLOAT32 * of_weight
