"""What an iteration costs under a layout: bytes on the fullest process and seconds, each by part.

Formulas alone, no torch, and they are those of this repository's code: `parallel.py` says what is laid out,
`ddp.py` and `pipeline.py` what is sent. `machines.py` has the speeds. Sources: activations Korthikanti et al.
2022 (4.1), sharded state Rajbhandari et al. 2020, pipelines Huang et al. 2019, Narayanan et al. 2021 and Qi et
al. 2024.

    shape = Shape(model)             # any GPT, on the meta device too
    work = Work(micro_batch=2, micro_steps=16, block_size=4096)
    memory(shape, layout, work)      # {part: bytes} at the moment at which most is held
    seconds(shape, layout, work, machine)   # {part: seconds} of an iteration
"""
import functools
import math
from dataclasses import dataclass

from kilogpt.layout import stage_lengths

FLOAT32 = 4  # bytes


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
    device: str = 'cuda'  # its type: on a CPU attention and norms keep other activations

    @property
    def width(self):
        """Bytes of a number in matrix products, and of a parameter that is gathered for them."""
        return 4 if self.dtype == 'float32' else 2


class Shape:
    """The parameters of a model and how a layout divides them. model: a GPT, on any device."""

    def __init__(self, model):
        plan = model.split_plan
        blocks = model.get_submodule(plan['blocks'])
        self.model, self.config, self.n_blocks = model, model.config, len(blocks)
        self.block, self.before, self.after = [], [], []  # (name, shape, the dimension that tp cuts or None)
        first_block = f'{plan["blocks"]}.{next(iter(blocks))}.'
        for name, parameter in model.named_parameters(remove_duplicate=False):
            short = name.removeprefix(first_block)
            module, _, kind = short.rpartition('.')
            cut = None
            if module in plan['colwise'] + plan['embedding'] + plan['head']:
                cut = 0
            elif module in plan['rowwise'] and kind == 'weight':
                cut = 1
            if short != name:
                self.block.append((short, tuple(parameter.shape), cut))
            elif name.startswith(plan['before_blocks']):
                self.before.append((name, tuple(parameter.shape), cut))
            elif name.startswith(plan['after_blocks']):
                self.after.append((name, tuple(parameter.shape), cut))
        self.stage_lengths = functools.cache(functools.partial(stage_lengths, model))
        self.numbers = functools.cache(self._numbers)

    def _numbers(self, part, tp, ranks, pp):
        """How many numbers a `part` ('block', 'before' or 'after') has: (after tp, on the fullest of `ranks`,
        gathered from them, those of the first two that are in matrices).

        FSDP2 cuts the first dimension as torch.chunk does, and gathers what it pads to equal lengths.
        """
        split = held = gathered = matrices = held_in_matrices = 0
        for name, shape, cut in getattr(self, part):
            if pp == 1 and name in self.model.tied:
                continue  # with pp the head is another copy
            rows, *rest = shape
            columns = math.prod(rest)
            if cut == 0:
                rows = -(-rows // tp)
            elif cut == 1:
                columns = -(-columns // tp)
            most_rows = -(-rows // ranks)
            split += rows * columns
            held += most_rows * columns
            gathered += most_rows * columns * ranks
            if rest:
                matrices += rows * columns
                held_in_matrices += most_rows * columns
        return split, held, gathered, matrices, held_in_matrices

    def stages(self, layout, block_size):
        """[[(has the embedding, its number of blocks, has the head) of each stage] of each pipeline rank]."""
        if layout.pp == 1:
            return [[(True, self.n_blocks, True)]]
        lengths = self.stage_lengths(layout.n_stages, block_size)
        last = len(lengths) - 1
        stages = [(index == 0, length - (index == 0) - (index == last), index == last)
                  for index, length in enumerate(lengths)]
        return [[stages[index] for index in layout.stages_of(rank)] for rank in range(layout.pp)]


# --- memory -------------------------------------------------------------------------------------------------

def memory(shape, layout, work):
    """{part: bytes} of tensors on the process and at the moment of an iteration where their sum is largest.

    Parts: parameters, gradients and moments (those that stay from one iteration to the next), gathered
    (FSDP2's or autocast's copies, and gradients on their way), activations, logits (the loss), buffers (of
    DDP and of pipelines). Without the allocator's reserve, for which see `reserve`.
    """
    ranks = {0, min(1, layout.pp - 1), layout.pp - 1}  # the first two hold most micro-batches, the last the head
    return max((moment for rank in ranks for moment in moments(shape, layout, work, rank).values()),
               key=lambda parts: sum(parts.values()))


def reserve(total, work):
    """Bytes that CUDA, NCCL and the gaps between tensors take besides `total` bytes of tensors.

    A context and NCCL's buffers take 1 to 2 GB; expandable segments leave few gaps.
    """
    return 0 if work.device == 'cpu' else 1.5e9 + 0.04 * total


def state(shape, layout, work, rank):
    """{'parameters', 'gradients', 'moments': bytes} of a pipeline rank's fullest process."""
    shards = layout.dp_shard * layout.cp
    held = in_matrices = 0
    for stage in shape.stages(layout, work.block_size)[rank]:
        for part, count in _parts_of(stage):
            numbers = shape.numbers(part, layout.tp, shards if layout.uses_fsdp else 1, layout.pp)
            held += count * numbers[1]
            if part == 'block':
                in_matrices += count * numbers[4]
    updated, updated_matrices = held, in_matrices
    if layout.zero_stage == 1:  # whole parameters, of which a process updates its rows
        updated = sum(count * shape.numbers(part, 1, shards, 1)[1]
                      for part, count in _parts_of((True, shape.n_blocks, True)))
        updated_matrices = shape.n_blocks * shape.numbers('block', 1, shards, 1)[4]
    moments = 2 * updated
    if work.optimizer == 'muon':  # one for the matrices of blocks
        moments -= updated_matrices
    return dict(parameters=FLOAT32 * held, gradients=FLOAT32 * held, moments=FLOAT32 * moments)


def _parts_of(stage):
    has_embedding, n_blocks, has_head = stage
    return [('before', int(has_embedding)), ('block', n_blocks), ('after', int(has_head))]


def moments(shape, layout, work, rank):
    """{moment: {part: bytes}} of a pipeline rank: the loss, the last block's backward pass, the end, the step.

    Between these moments no more is held, since activations go as gradients come.
    """
    shards = layout.dp_shard * layout.cp if layout.uses_fsdp else 1
    stages = shape.stages(layout, work.block_size)[rank]
    n_blocks, has_head = sum(stage[1] for stage in stages), any(stage[2] for stage in stages)
    block = shape.numbers('block', layout.tp, shards, layout.pp)
    ends = [0, 0, 0]  # as `block`, of embeddings, last norm and head
    for stage in stages:
        for part, count in _parts_of(stage):
            if part != 'block':
                numbers = shape.numbers(part, layout.tp, shards, layout.pp)
                ends = [total + count * number for total, number in zip(ends, numbers)]
    held = state(shape, layout, work, rank)
    accumulates = work.micro_steps > 1
    replicates = layout.world_size > 1 and not layout.uses_fsdp

    # What is held in addition to the shards while the model runs.
    gathered = reduced_block = reduced_ends = 0
    gradients = FLOAT32 * (block[0] * n_blocks + ends[0])  # whole ones
    if layout.uses_fsdp:
        blocks_gathered = n_blocks if layout.zero_stage == 2 else min(n_blocks, 2)
        gathered = work.width * (block[2] * blocks_gathered + ends[2])
        reduced_block = (work.width + FLOAT32) * block[2]
        reduced_ends = (work.width + FLOAT32) * ends[2]
        if shards == 1:
            gathered = work.width * (block[2] * blocks_gathered + ends[2]) if work.width < FLOAT32 else 0
            reduced_block, reduced_ends = work.width * block[2], work.width * ends[2]
        gradients = held['gradients']
        if layout.pp > 1:  # whole until the last micro-batch
            gradients = FLOAT32 * (block[2] * n_blocks + ends[2])
            reduced_block, reduced_ends = FLOAT32 * block[2], FLOAT32 * ends[2]
    elif work.width < FLOAT32:
        gathered = work.width * (block[3] * n_blocks + ends[0])
    before = gradients if accumulates or replicates else 0  # gradients at the start of the backward pass

    kept, whole, backward = block_activations(shape.config, layout, work)
    in_flight = micro_batches_in_flight(layout, work.micro_steps, rank) * n_blocks / layout.stages_per_rank
    stream = _tokens(layout, work) / layout.tp * shape.config.n_embd * work.width
    activations = kept * in_flight + stream * (layout.pp == 1)
    buffers = 0
    if layout.pp > 1:  # a tensor for each micro-batch that is received, forward and backward
        n_received = sum((not first) + (not last) for first, _, last in stages)
        buffers = n_received * work.micro_steps * stream
    logits = loss_bytes(shape, layout, work) if has_head else 0
    recomputed = whole - kept if work.activation_checkpoint != 'none' else 0

    resident = dict(parameters=held['parameters'], moments=held['moments'], buffers=buffers)
    if work.cpu_offload:
        resident = dict(parameters=0, moments=0, buffers=buffers)
        before = 0
        held = dict.fromkeys(held, 0)
    return {
        'loss': resident | dict(gradients=before, gathered=gathered, activations=activations, logits=logits),
        'backward': resident | dict(
            gradients=before, gathered=gathered + reduced_block, logits=0,
            activations=activations + recomputed + backward),
        'end': resident | dict(gradients=max(before, gradients), gathered=gathered + reduced_ends,
                               activations=0, logits=0),
        'step': resident | dict(gradients=held['gradients'], gathered=0, activations=0, logits=0),
    }


def _tokens(layout, work):
    return work.micro_batch * work.block_size / layout.cp


def micro_batches_in_flight(layout, micro_steps, rank):
    """How many stages' activations of a micro-batch a pipeline rank holds at most.

    PyTorch's orders hold so many (tests/test_costs.py plays them); a rank of two stages counts each.
    """
    if layout.pp == 1:
        return 1
    most = {'gpipe': micro_steps, '1f1b': layout.pp - rank, 'interleaved1f1b': 3 * layout.pp - 1 - 2 * rank,
            'interleavedzb': 2 * layout.pp, 'zbv': 2 * layout.pp, 'dualpipev': 2 * layout.pp + 1}
    return min(most[layout.pp_schedule], micro_steps * layout.stages_per_rank)


def block_activations(config, layout, work):
    """Bytes of a block for a micro-batch: (kept for the backward pass, without checkpointing, more in it)."""
    s, width, tp = _tokens(layout, work), work.width, layout.tp
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
        attention = width * (4 * heads + config.n_head / layout.cp * work.block_size)
    if layout.cp > 1:
        attention += width * heads  # the result before and after it is exchanged
    if config.qk_norm:
        attention += FLOAT32 * (heads + kv_heads) * (2 if on_cpu else 1)
        attention += width * heads * on_cpu
    n_hidden = 4 if config.mlp == 'swiglu' else 2
    whole = s * (2 * norm_input / tp + 2 * width * C + (attention + n_hidden * width * F) / tp)
    if config.dropout:
        whole += s * 2 * C / tp * (width if on_cpu else 1)
    kept = whole
    if work.activation_checkpoint == 'full':
        kept = s * residual * C / tp
    elif work.activation_checkpoint == 'selective':  # the outputs of products and of attention
        products = heads + 2 * kv_heads + F * (n_hidden // 2)
        kept = s * (residual * C / tp + 2 * width * C
                    + (width * (products + heads) + FLOAT32 * config.n_head) / tp)
    elif work.compile:
        # The compiler computes norms and the MLP's products with its activation again (min-cut partitioner).
        kept = s * (2 * residual * C + attention + (n_hidden // 2) * width * F) / tp
        whole = kept
    backward = s * (2 * residual * C / tp + (n_hidden - 1) * width * F / tp)
    return kept, whole, backward


def loss_bytes(shape, layout, work):
    """Bytes of the loss at its most: logits, in 16 bits and float32, their log-softmax and their gradient."""
    config = shape.config
    rows, vocabulary = int(_tokens(layout, work)), config.padded_vocab_size
    per_logit = 6 if work.compile and layout.tp == 1 else 12
    per_logit += 8 if config.softcap else 0
    if layout.tp > 1:  # sharded, and whole
        return per_logit * rows * vocabulary / layout.tp + work.width * rows * config.n_embd
    size = shape.model.loss.part_size(rows, vocabulary)
    if size == rows:
        return per_logit * rows * vocabulary
    head = vocabulary * config.n_embd
    return per_logit * size * vocabulary + (FLOAT32 + 2 * work.width) * head + work.width * rows * config.n_embd
