"""What an iteration holds under a layout: bytes on the fullest process, by part. `time_model.py` has its seconds.

Formulas alone, no torch, and they are those of this repository's code: `kilogpt/parallel/apply.py` says what is laid out,
`ddp.py`, `expert.py` and `pipeline.py` what is sent. Sources: activations Korthikanti et al. 2022 (4.1),
sharded state Rajbhandari et al. 2020.

    shape = Shape(model)             # any GPT, on the meta device too
    work = Work(micro_batch=2, micro_steps=16, block_size=4096)
    memory(shape, layout, work)      # {part: bytes} at the moment at which most is held
    times.seconds(shape, layout, work, machine)   # {part: seconds} of an iteration
"""
import functools
import itertools
import math
from dataclasses import dataclass
from typing import NamedTuple

from kilogpt.parallel.layout import Layout, stage_lengths

FLOAT32, INT64 = 4, 8  # bytes
CONTEXT = 1.5e9  # bytes that CUDA and NCCL take for themselves
LOAD_IMBALANCE = 1.2  # rows of the busiest of the processes that divide the experts, over their mean; a guess
GAPS = 0.06  # share of the bytes of tensors that is lost between them; fitted (docs/layouts.md)


@dataclass(frozen=True)
class Work:
    """What one data-parallel rank does in an iteration, and how: the keys of train.py of these names."""
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
    device: str = 'cuda'  # its type: on a CPU attention and norms keep other activations

    @classmethod
    def of(cls, config, layout, device, split=None):
        """The work of a run. config: the values of train.py's keys, dtype resolved. device: 'cuda' or 'cpu'.

        split: (micro_batch, micro_steps) where it is known.
        """
        batch_size = config['batch_size']
        split = split or layout.split_batch(batch_size * config['gradient_accumulation_steps'], batch_size)
        same = {key: config[key] for key in cls.__dataclass_fields__ if key in config and key != 'device'}
        return cls(*split, **same, device=device)

    @property
    def width(self):
        """Bytes of a number in matrix products, and of a parameter that is gathered for them."""
        return 4 if self.dtype == 'float32' else 2


class Stage(NamedTuple):
    """What a pipeline stage has: the embedding or not, blocks without and with experts, the head or not."""
    has_embedding: bool
    n_dense: int
    n_sparse: int
    has_head: bool

    @property
    def n_blocks(self):
        return self.n_dense + self.n_sparse

    @property
    def parts(self):
        """{part of a Shape: how often the stage has it}"""
        return dict(before=int(self.has_embedding), dense=self.n_dense, sparse=self.n_sparse,
                    experts=self.n_sparse, after=int(self.has_head))


class Numbers(NamedTuple):
    """How many numbers a part of the parameters has on a process."""
    split: int = 0  # after tp and ep
    held: int = 0  # of these on the fullest of the ranks that shard them
    gathered: int = 0  # from these ranks, which FSDP2 pads to equal lengths
    matrices: int = 0  # `split` and `held` of those in matrices
    held_in_matrices: int = 0

    def __add__(self, other):
        return Numbers(*map(sum, zip(self, other)))


class Shape:
    """The parameters of a model and how a layout divides them. model: a GPT, on any device.

    parts: {part: [(name, shape, the dimension that tp cuts or None)]}. A block without experts is the part
    'dense', one with experts 'sparse' and 'experts'; 'before' and 'after' are what the blocks stand between.
    """

    def __init__(self, model):
        plan = model.split_plan
        blocks = model.get_submodule(plan['blocks'])
        self.model, self.config, self.n_blocks = model, model.config, len(blocks)
        self.is_sparse = [self.config.has_experts(int(number)) for number in blocks]
        self.parts = {part: [] for part in ('before', 'dense', 'sparse', 'experts', 'after')}
        # All blocks of a kind are alike.
        firsts = {f'{plan["blocks"]}.{self.is_sparse.index(kind)}.': kind for kind in set(self.is_sparse)}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            block = next((first for first in firsts if name.startswith(first)), '')
            short, found = name.removeprefix(block), (name, tuple(parameter.shape))
            module, _, kind = short.rpartition('.')
            if not parameter.requires_grad:
                continue
            if module == f'{plan["experts"]}.experts':
                self.parts['experts'].append((*found, 2 if kind == 'c_proj' else 1))
                continue
            cut = None
            if module in plan['colwise'] + plan['embedding'] + plan['head']:
                cut = 0
            elif module in plan['rowwise'] and kind == 'weight':
                cut = 1
            if block:
                self.parts['sparse' if firsts[block] else 'dense'].append((*found, cut))
            elif name.startswith(plan['before_blocks']):
                self.parts['before'].append((*found, cut))
            elif name.startswith(plan['after_blocks']):
                self.parts['after'].append((*found, cut))
        # What a search over thousands of layouts asks again and again.
        self._numbers = functools.cache(self._numbers_of_part)
        self._stages = functools.cache(self._stages_of_ranks)
        self._totals = functools.cache(self._totals_of_stages)
        self._held = functools.cache(self._held_of_stages)

    def numbers(self, part, layout):
        """The Numbers of a part under a layout."""
        return self._numbers(part, *_degrees(layout))

    def _numbers_of_part(self, part, tp, pp, ranks, ep, by_rows=False):
        total = Numbers()
        for name, shape, cut in self.parts[part]:
            if pp == 1 and name in self.model.tied:
                continue  # with pp the head is another copy
            sizes, shards, sharded = list(shape), ranks, 0
            if cut is not None:
                sizes[cut] = -(-sizes[cut] // tp)
            if part == 'experts':
                sizes[0] //= ep
                shards //= ep
                # as experts.shard_experts chooses; ZeRO-1 goes by rows
                sharded = int(sizes[0] % shards > 0 and sizes[1] % shards == 0 and not by_rows)
            split = math.prod(sizes)
            held = -(-sizes[sharded] // shards) * (split // sizes[sharded])  # as torch.chunk cuts
            is_matrix = len(shape) > 1
            total += Numbers(split, held, held * shards, is_matrix * split, is_matrix * held)
        return total

    def totals(self, stages, layout):
        """(Numbers of all parts of stages, those of embeddings, last norm and head alone)"""
        return self._totals(stages, *_degrees(layout))

    def _totals_of_stages(self, stages, *degrees):
        total, ends = Numbers(), Numbers()
        for stage in stages:
            for part, count in stage.parts.items():
                numbers = Numbers(*(count * number for number in self._numbers(part, *degrees)))
                total += numbers
                if part in ('before', 'after'):
                    ends += numbers
        return total, ends

    def held(self, stages, layout):
        """How many numbers the fullest process holds of stages: (all, those in matrices of blocks)."""
        return self._held(stages, *_degrees(layout))

    def updated(self, stages, layout):
        """The same of the numbers that a process updates: with ZeRO-1 its rows of whole parameters."""
        if layout.zero_stage != 1:
            return self.held(stages, layout)
        return self._held(stages, 1, 1, layout.dp_shard * layout.cp, 1, by_rows=True)

    def _held_of_stages(self, stages, *degrees, by_rows=False):
        held = in_blocks = 0
        for stage in stages:
            for part, count in stage.parts.items():
                numbers = self._numbers(part, *degrees, by_rows=by_rows)
                held += count * numbers.held
                in_blocks += count * numbers.held_in_matrices * (part not in ('before', 'after'))
        return held, in_blocks

    def stages(self, layout, block_size):
        """((Stage, ...) of each pipeline rank, ...)"""
        return self._stages(layout.pp, layout.pp_schedule, block_size)

    def _stages_of_ranks(self, pp, pp_schedule, block_size):
        layout = Layout(pp, pp=pp, pp_schedule=pp_schedule)
        lengths = [self.n_blocks + 2]
        if pp > 1:
            lengths = stage_lengths(self.model, layout.n_stages, block_size)
        stages, blocks = [], iter(self.is_sparse)
        for index, length in enumerate(lengths):
            is_first, is_last = index == 0, index == len(lengths) - 1
            n_blocks = length - is_first - is_last
            n_sparse = sum(itertools.islice(blocks, n_blocks))
            stages.append(Stage(is_first, n_blocks - n_sparse, n_sparse, is_last))
        return tuple(tuple(stages[index] for index in layout.stages_of(rank)) for rank in range(pp))


def _degrees(layout):
    """(tp, pp, ranks that shard a part, ep): all of a layout that the numbers of a part depend on."""
    return layout.tp, layout.pp, layout.dp_shard * layout.cp if layout.uses_fsdp else 1, layout.ep


# --- memory -------------------------------------------------------------------------------------------------

def memory(shape, layout, work):
    """{part: bytes} of tensors on the process and at the moment of an iteration where their sum is largest.

    Parts: parameters, gradients and moments (those that stay from one iteration to the next), gathered
    (FSDP2's or autocast's copies, and gradients on their way), activations, logits (the loss), buffers (of
    DDP and of pipelines). Without the allocator's reserve, for which see `reserve`.
    """
    n_blocks = [sum(stage.n_blocks for stage in stages) for stages in shape.stages(layout, work.block_size)]
    # The first ranks hold most micro-batches, the last one the head.
    ranks = {0, min(1, layout.pp - 1), n_blocks.index(max(n_blocks)), max(0, layout.pp - 2), layout.pp - 1}
    return max((parts for rank in ranks for parts in phases(shape, layout, work, rank).values()),
               key=lambda parts: sum(parts.values()))


def reserve(total, work):
    """Bytes that CUDA, NCCL and the gaps between tensors take besides `total` bytes of tensors."""
    return 0 if work.device == 'cpu' else CONTEXT + GAPS * total


def state(shape, layout, work, rank):
    """{'parameters', 'gradients', 'moments': bytes} of a pipeline rank's fullest process."""
    stages = shape.stages(layout, work.block_size)[rank]
    held, _ = shape.held(stages, layout)
    updated, updated_in_blocks = shape.updated(stages, layout)
    moments = 2 * updated
    if work.optimizer == 'muon':  # one for the matrices of blocks
        moments -= updated_in_blocks
    return dict(parameters=FLOAT32 * held, gradients=FLOAT32 * held, moments=FLOAT32 * moments)


def phases(shape, layout, work, rank):
    """{phase: {part: bytes}} of a pipeline rank, for the phases in one of which most is held.

    They are: the loss; the last block's backward pass, before and while its gradients are reduced; the end of
    the backward pass; and the update. In between, activations go as gradients come.
    """
    stages = shape.stages(layout, work.block_size)[rank]
    has_head = any(stage.has_head for stage in stages)
    of_part = {part: shape.numbers(part, layout) for part in shape.parts}
    all_parts, ends = shape.totals(stages, layout)
    kinds = dict(dense=sum(stage.n_dense for stage in stages), sparse=sum(stage.n_sparse for stage in stages))
    kinds = {kind: count for kind, count in kinds.items() if count}
    held = state(shape, layout, work, rank)
    accumulates = work.micro_steps > 1
    replicates = layout.world_size > 1 and not layout.uses_fsdp

    # What is held in addition to the shards while the model runs. FSDP2 gathers and reduces a block's experts
    # apart from its other parameters.
    gathered = reduced_unit = reduced_ends = 0
    largest_unit = max((of_part[part].gathered for kind in kinds
                        for part in (kind, *(['experts'] * (kind == 'sparse')))), default=0)
    gradients = FLOAT32 * all_parts.split  # whole ones
    if layout.uses_fsdp:
        blocks_gathered = all_parts.gathered - ends.gathered
        if layout.zero_stage == 3:  # those of two blocks, but of one block's experts
            two = {kind: 2 * of_part[kind].gathered for kind in kinds}
            if 'sparse' in kinds:
                two['sparse'] += of_part['experts'].gathered
            blocks_gathered = min(blocks_gathered, max(two.values(), default=0))
        gathered = work.width * (blocks_gathered + ends.gathered)
        reduced_unit = (work.width + FLOAT32) * largest_unit
        reduced_ends = (work.width + FLOAT32) * ends.gathered
        if layout.dp_shard * layout.cp == 1:
            reduced_unit, reduced_ends = FLOAT32 * largest_unit, FLOAT32 * ends.gathered
        gradients = held['gradients']
        if layout.pp > 1:  # whole until the last micro-batch
            gradients = FLOAT32 * all_parts.gathered
            reduced_unit, reduced_ends = FLOAT32 * largest_unit, FLOAT32 * ends.gathered
    elif work.width < FLOAT32:
        gathered = work.width * (all_parts.matrices - ends.matrices + ends.split)
    before = gradients if accumulates or replicates else 0  # gradients at the start of the backward pass

    of_kind = {kind: block_activations(shape.config, layout, work, kind == 'sparse') for kind in kinds}
    kept = sum(count * of_kind[kind].kept for kind, count in kinds.items())
    products = sum(count * of_kind[kind].products for kind, count in kinds.items())
    in_flight = micro_batches_in_flight(layout, work.micro_steps, rank)
    stream = tokens_of(layout, work) / layout.tp * shape.config.n_embd * work.width  # what blocks hand on
    activations = in_flight * (kept / layout.stages_per_rank + stream)
    # What is free of a block when its gradients are whole for the first time.
    decrease = min((costs.freed for costs in of_kind.values()), default=0)
    if layout.pp > 1:
        decrease = activations / in_flight
        if in_flight == work.micro_steps * layout.stages_per_rank:  # all forward passes come first
            before = 0
        # Between the two halves of a backward pass the gradients of all products' results are kept too.
        splits_backward = layout.splits_backward(work.activation_checkpoint)
        halves = {'interleavedzb': rank + 1, 'zbv': 1}.get(layout.pp_schedule, 0) if splits_backward else 0
        activations += halves * products / layout.stages_per_rank
        # zbv ends with the first halves of so many, before the second of any.
        if layout.pp_schedule == 'zbv' and splits_backward:
            last = 2 * rank + 1
            activations = max(activations, last * ((kept + products) / layout.stages_per_rank + stream))
    buffers = 0
    if layout.pp > 1:  # a tensor for each micro-batch that is received, forward and backward
        n_received = sum((not stage.has_embedding) + (not stage.has_head) for stage in stages)
        buffers = n_received * work.micro_steps * stream
    logits = loss_bytes(shape, layout, work) if has_head else 0
    recomputed = 0
    if work.activation_checkpoint != 'none':
        recomputed = max((costs.whole - costs.kept for costs in of_kind.values()), default=0)
    backward = max((costs.backward for costs in of_kind.values()), default=0)

    resident = dict(parameters=held['parameters'], moments=held['moments'], buffers=buffers)
    if work.cpu_offload and work.device != 'cpu':
        resident = dict(parameters=0, moments=0, buffers=buffers)
        before = gradients = 0
        held = dict.fromkeys(held, 0)
    return {
        'loss': resident | dict(gradients=before, gathered=gathered, activations=activations, logits=logits),
        'backward': resident | dict(
            gradients=before, gathered=gathered, logits=0, activations=activations + recomputed + backward),
        'reduce': resident | dict(gradients=gradients if layout.pp > 1 else before, logits=0,
                                  gathered=gathered + reduced_unit, activations=activations - decrease),
        'end': resident | dict(gradients=max(before, gradients), gathered=gathered + reduced_ends,
                               activations=0, logits=0),
        'step': resident | dict(gradients=held['gradients'], gathered=0, activations=0, logits=0),
    }


def tokens_of(layout, work):
    """Tokens of a micro-batch on a process, before tensor parallelism divides the sequence."""
    return work.micro_batch * work.block_size / layout.cp


def micro_batches_in_flight(layout, micro_steps, rank):
    """How many stages' activations of a micro-batch a pipeline rank holds at most.

    PyTorch's orders hold so many (tests/plan/test_models.py plays them); a rank of two stages counts each.
    """
    if layout.pp == 1:
        return 1
    most = {'gpipe': micro_steps, '1f1b': layout.pp - rank, 'interleaved1f1b': 3 * layout.pp - 1 - 2 * rank,
            'interleavedzb': 2 * layout.pp, 'zbv': 2 * layout.pp, 'dualpipev': 2 * layout.pp + 1}
    return min(most[layout.pp_schedule], micro_steps * layout.stages_per_rank)


class BlockActivations(NamedTuple):
    """Bytes of a block for a micro-batch."""
    kept: float  # for the backward pass
    whole: float  # the same without checkpointing
    backward: float  # more, in the backward pass
    products: float  # the results of its matrix products
    freed: float  # of `kept`, when the gradients of the block's first matrices are whole


def block_activations(config, layout, work, has_experts):
    """The BlockActivations of a block with experts or without."""
    s, width, tp = tokens_of(layout, work), work.width, layout.tp
    on_cpu = work.device == 'cpu'
    C, F = config.n_embd, config.n_hidden
    heads, kv_heads = config.n_head * config.head_width, config.n_kv_head * config.head_width
    if layout.cp > 1:  # key/value heads are repeated where the ranks are more
        kv_heads *= layout.cp // math.gcd(layout.cp, config.n_kv_head // tp)
    # The residual stream is float32 where autocast, and not FSDP2, turns weights into 16 bits.
    residual = work.width if layout.uses_fsdp else FLOAT32
    norm_input = residual * C
    if config.norm == 'rmsnorm' and on_cpu:  # not fused there: the input in float32, and normalized
        norm_input = 2 * FLOAT32 * C
    attention = width * (2 * heads + 2 * kv_heads) + FLOAT32 * config.n_head  # q, k, v, the result, its sums
    if on_cpu and (width < FLOAT32 or config.dropout) and work.block_size <= 1024:  # cpu.PlainAttention
        # A query's scores with the keys up to the end of its part of 256 queries, in the mean.
        keys = (work.block_size + min(work.block_size, 256)) / 2
        attention = width * (4 * heads + config.n_head / layout.cp * keys)
    if layout.cp > 1:
        attention += width * heads  # the result before and after it is exchanged
    if config.qk_norm:
        # Inputs are float32. Where FSDP2 gathers the weights in 16 bits, no kernel is fused on GPUs either.
        is_fused = not on_cpu and (width == FLOAT32 or not layout.uses_fsdp)
        attention += FLOAT32 * (heads + kv_heads) * (1 if is_fused else 2)
        attention += width * heads * (not is_fused)
    n_hidden = 4 if config.mlp_form == 'swiglu' else 2  # tensors of the width of an MLP; a half are products'
    if has_experts:
        mlp, mlp_products, mlp_selective = _of_experts(config, layout, work, n_hidden)
    else:
        mlp = width * (C + n_hidden * F / tp)
        # The results of row-wise products, here and in attention, are sums over tp, whole on each rank.
        mlp_products = mlp_selective = width * (C + n_hidden // 2 * F / tp)
    whole = 2 * norm_input / tp + width * C + attention / tp + mlp
    if config.dropout:
        whole += 2 * C / tp * (width if on_cpu else 1)
    products = width * ((heads + 2 * kv_heads) / tp + C) + mlp_products
    kept = whole
    if work.activation_checkpoint == 'full':
        kept = residual * C / tp
        if has_experts:  # the choice of experts
            kept += INT64 * config.n_active_experts
    elif work.activation_checkpoint == 'selective':  # the outputs of products and of attention
        kept = products - mlp_products + mlp_selective + (width * heads + FLOAT32 * config.n_head) / tp
        kept += residual * C / tp
        if has_experts:  # checkpointed are attention and experts, and not the norms
            kept += (2 * norm_input - residual * C) / tp + width * C
    elif work.compile:
        # The compiler's partitioner keeps what products read, and of SwiGLU not the activation's result.
        if not has_experts:
            mlp = width * (C + min(n_hidden, 3) * F / tp)
        kept = whole = residual * C / tp + width * C + (width * C + attention) / tp + mlp
    backward = 2 * residual * C / tp
    if has_experts:
        backward += 3 * width * C * config.n_active_experts  # gradients of rows, sorted and not
    else:
        backward += (n_hidden - 1) * width * F / tp
    freed = kept
    if has_experts and work.activation_checkpoint != 'full':
        freed = mlp_selective if work.activation_checkpoint == 'selective' else mlp
    return BlockActivations(*(s * count for count in (kept, whole, backward, products, freed)))


def _of_experts(config, layout, work, n_hidden):
    """Bytes of a mixture of experts for a token: (kept, results of products, kept by 'selective')."""
    width, tp, C, K = work.width, layout.tp, config.n_embd, config.n_active_experts
    rows = K * (work.load_imbalance if layout.ep > 1 else 1)  # that experts of this process have
    shared = config.n_shared_experts
    F = config.expert_hidden
    products = (rows + shared) * width * (C + n_hidden // 2 * F / tp)
    # The router's input and affinities in float32, each token's experts and their weights, the order of rows.
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
    """Bytes of the loss at its most: logits, in 16 bits and float32, their log-softmax and their gradient."""
    config = shape.config
    rows, vocabulary = int(tokens_of(layout, work)), config.padded_vocab_size
    per_logit = 2 * work.width if work.compile and layout.tp == 1 else 12
    per_logit += 8 if config.softcap else 0
    if layout.tp > 1:  # sharded, not in parts, and by DTensor's own formulas, which take a copy more
        return (per_logit + FLOAT32) * rows * vocabulary / layout.tp + work.width * rows * config.n_embd
    size = shape.model.loss.part_size(rows, vocabulary)
    if size == rows:
        return per_logit * rows * vocabulary
    gradients = (FLOAT32 + 2 * work.width) * vocabulary * config.n_embd + work.width * rows * config.n_embd
    return per_logit * size * vocabulary + gradients
