"""What an iteration costs under a layout: bytes on the fullest process and seconds, each by part.

Formulas alone, no torch, and they are those of this repository's code: `parallel.py` says what is laid out,
`ddp.py` and `pipeline.py` what is sent. `machines.py` has the speeds. Sources: activations Korthikanti et al.
2022 (4.1), sharded state Rajbhandari et al. 2020, pipelines Huang et al. 2019, Narayanan et al. 2021 and Qi
et al. 2024.

    shape = Shape(model)             # any GPT, on the meta device too
    work = Work(micro_batch=2, micro_steps=16, block_size=4096)
    memory(shape, layout, work)      # {part: bytes} at the moment at which most is held
    seconds(shape, layout, work, machine)   # {part: seconds} of an iteration
"""
import functools
import math
from dataclasses import dataclass

from kilogpt.layout import Layout, stage_lengths

FLOAT32 = 4  # bytes
CONTEXT = 1.5e9  # bytes that CUDA and NCCL take for themselves
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
        # What a search over thousands of layouts asks again and again.
        self.numbers = functools.cache(self._numbers)
        self.held = functools.cache(self._held)
        self._stages = functools.cache(self._stages_of_ranks)

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

    def _held(self, stages, tp, ranks, pp):
        """How many numbers the fullest of `ranks` holds of stages: (all, those in matrices of blocks)."""
        held = in_blocks = 0
        for stage in stages:
            for part, count in _parts_of(stage):
                numbers = self.numbers(part, tp, ranks, pp)
                held += count * numbers[1]
                in_blocks += count * numbers[4] * (part == 'block')
        return held, in_blocks

    def stages(self, layout, block_size):
        """[[(has the embedding, its number of blocks, has the head) of each stage] of each pipeline rank]."""
        return self._stages(layout.pp, layout.pp_schedule, block_size)

    def _stages_of_ranks(self, pp, pp_schedule, block_size):
        if pp == 1:
            return [[(True, self.n_blocks, True)]]
        layout = Layout(pp, pp=pp, pp_schedule=pp_schedule)
        lengths = stage_lengths(self.model, layout.n_stages, block_size)
        last = len(lengths) - 1
        stages = [(index == 0, length - (index == 0) - (index == last), index == last)
                  for index, length in enumerate(lengths)]
        return [[stages[index] for index in layout.stages_of(rank)] for rank in range(pp)]


# --- memory -------------------------------------------------------------------------------------------------

def memory(shape, layout, work):
    """{part: bytes} of tensors on the process and at the moment of an iteration where their sum is largest.

    Parts: parameters, gradients and moments (those that stay from one iteration to the next), gathered
    (FSDP2's or autocast's copies, and gradients on their way), activations, logits (the loss), buffers (of
    DDP and of pipelines). Without the allocator's reserve, for which see `reserve`.
    """
    n_blocks = [sum(stage[1] for stage in stages) for stages in shape.stages(layout, work.block_size)]
    # The first ranks hold most micro-batches, the last one the head.
    ranks = {0, min(1, layout.pp - 1), n_blocks.index(max(n_blocks)), max(0, layout.pp - 2), layout.pp - 1}
    return max((parts for rank in ranks for parts in phases(shape, layout, work, rank).values()),
               key=lambda parts: sum(parts.values()))


def reserve(total, work):
    """Bytes that CUDA, NCCL and the gaps between tensors take besides `total` bytes of tensors."""
    return 0 if work.device == 'cpu' else CONTEXT + GAPS * total


def state(shape, layout, work, rank):
    """{'parameters', 'gradients', 'moments': bytes} of a pipeline rank's fullest process."""
    shards = layout.dp_shard * layout.cp
    stages = tuple(shape.stages(layout, work.block_size)[rank])
    held, in_blocks = shape.held(stages, layout.tp, shards if layout.uses_fsdp else 1, layout.pp)
    updated, updated_in_blocks = held, in_blocks
    if layout.zero_stage == 1:  # whole parameters, of which a process updates its rows
        updated, updated_in_blocks = shape.held(stages, 1, shards, 1)
    moments = 2 * updated
    if work.optimizer == 'muon':  # one for the matrices of blocks
        moments -= updated_in_blocks
    return dict(parameters=FLOAT32 * held, gradients=FLOAT32 * held, moments=FLOAT32 * moments)


def _parts_of(stage):
    has_embedding, n_blocks, has_head = stage
    return [('before', int(has_embedding)), ('block', n_blocks), ('after', int(has_head))]


def phases(shape, layout, work, rank):
    """{phase: {part: bytes}} of a pipeline rank, for the phases in one of which most is held.

    They are: the loss; the last block's backward pass, before and while its gradients are reduced; the end of
    the backward pass; and the update. In between, activations go as gradients come.
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
            reduced_block, reduced_ends = FLOAT32 * block[2], FLOAT32 * ends[2]
        gradients = held['gradients']
        if layout.pp > 1:  # whole until the last micro-batch
            gradients = FLOAT32 * (block[2] * n_blocks + ends[2])
            reduced_block, reduced_ends = FLOAT32 * block[2], FLOAT32 * ends[2]
    elif work.width < FLOAT32:
        gathered = work.width * (block[3] * n_blocks + ends[0])
    before = gradients if accumulates or replicates else 0  # gradients at the start of the backward pass

    kept, whole, backward, products = block_activations(shape.config, layout, work)
    in_flight = micro_batches_in_flight(layout, work.micro_steps, rank)
    stream = _tokens(layout, work) / layout.tp * shape.config.n_embd * work.width  # what blocks hand on
    activations = in_flight * (kept * n_blocks / layout.stages_per_rank + stream)
    decrease = kept  # of activations, until gradients are whole for the first time
    if layout.pp > 1:
        decrease = activations / in_flight
        if in_flight == work.micro_steps * layout.stages_per_rank:  # all forward passes come first
            before = 0
        # Between the two halves of a backward pass the gradients of all products' results are kept.
        halves = {'interleavedzb': rank + 1, 'zbv': 1}.get(layout.pp_schedule, 0)
        activations += halves * products * n_blocks / layout.stages_per_rank
    buffers = 0
    if layout.pp > 1:  # a tensor for each micro-batch that is received, forward and backward
        n_received = sum((not first) + (not last) for first, _, last in stages)
        buffers = n_received * work.micro_steps * stream
    logits = loss_bytes(shape, layout, work) if has_head else 0
    recomputed = whole - kept if work.activation_checkpoint != 'none' else 0

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
                                  gathered=gathered + reduced_block, activations=activations - decrease),
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
    """Bytes of a block for a micro-batch: (kept for the backward pass, without checkpointing, more in the
    backward pass, the results of its matrix products).
    """
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
    # The results of the two row-wise products are sums over tp, whole on each rank.
    products = s * width * ((heads + 2 * kv_heads + F * (n_hidden // 2)) / tp + 2 * C)
    kept = whole
    if work.activation_checkpoint == 'full':
        kept = s * residual * C / tp
    elif work.activation_checkpoint == 'selective':  # the outputs of products and of attention
        kept = products + s * (residual * C + width * heads + FLOAT32 * config.n_head) / tp
    elif work.compile:
        # The compiler's partitioner keeps what products read, and of SwiGLU not the activation's result.
        kept = whole = s * (residual * C / tp + 2 * width * C
                            + (width * C + attention + min(n_hidden, 3) * width * F) / tp)
    backward = s * (2 * residual * C / tp + (n_hidden - 1) * width * F / tp)
    return kept, whole, backward, products


def loss_bytes(shape, layout, work):
    """Bytes of the loss at its most: logits, in 16 bits and float32, their log-softmax and their gradient."""
    config = shape.config
    rows, vocabulary = int(_tokens(layout, work)), config.padded_vocab_size
    per_logit = 2 * work.width if work.compile and layout.tp == 1 else 12
    per_logit += 8 if config.softcap else 0
    if layout.tp > 1:  # sharded, not in parts, and by DTensor's own formulas, which take a copy more
        return (per_logit + FLOAT32) * rows * vocabulary / layout.tp + work.width * rows * config.n_embd
    size = shape.model.loss.part_size(rows, vocabulary)
    if size == rows:
        return per_logit * rows * vocabulary
    gradients = (FLOAT32 + 2 * work.width) * vocabulary * config.n_embd + work.width * rows * config.n_embd
    return per_logit * size * vocabulary + gradients


# --- time ---------------------------------------------------------------------------------------------------

def bubble(pp, micro_steps, pp_schedule):
    """Idle share of a pipeline of pp ranks with equal stages.

    Backward takes twice as long as forward, and sending nothing. Each rank waits while p - 1 others compute a
    micro-batch (Huang et al. 2019), with two stages on each rank half as long (Narayanan et al. 2021, 2.2).
    Schedules that split the backward pass wait for p - 1 forward passes of half a rank's blocks (Qi et al.
    2024).
    """
    if pp == 1:
        return 0.0
    waits = {'gpipe': pp - 1, '1f1b': pp - 1, 'interleaved1f1b': (pp - 1) / 2}.get(pp_schedule, (pp - 1) / 6)
    return waits / (micro_steps + waits)


def seconds(shape, layout, work, machine):
    """{part: seconds} of an iteration: compute, tp, cp, dp, pp, bubble, optimizer.

    The communication is what does not run beside computation: that of tensor and context parallelism in full
    (async_tp: half), gathers and reductions of data parallelism where they take longer.
    """
    m = work.micro_steps
    # Ranks in the middle of a pipeline have stages of one of two lengths.
    ranks = {tuple(map(sum, zip(*stages))) for stages in shape.stages(layout, work.block_size)}
    steps = [_step_seconds(shape, layout, work, machine, n_blocks, heads) for _, n_blocks, heads in ranks]
    slowest = max(steps, key=lambda step: step['total'])
    parts = dict(compute=m * (slowest['forward'] + slowest['backward']), tp=m * slowest['tp'],
                 cp=m * slowest['cp'])
    parts['dp'] = _data_parallel_seconds(shape, layout, work, machine, slowest)
    parts['pp'] = 0.0
    if layout.pp > 1:
        sent = _tokens(layout, work) * shape.config.n_embd * work.width / layout.tp
        stride = layout.world_size // layout.pp
        bandwidth = machine.network if stride >= machine.per_node else machine.node_link
        parts['pp'] = 2 * m * layout.stages_per_rank * (machine.latency + sent / bandwidth)
    idle = bubble(layout.pp, m, layout.pp_schedule)
    parts['bubble'] = m * slowest['total'] * idle / (1 - idle)
    parts['optimizer'] = _optimizer_seconds(shape, layout, work, machine)
    if machine.cores and layout.world_size > machine.cores:  # processes share cores
        parts = {part: value * layout.world_size / machine.cores for part, value in parts.items()}
    return parts


# How often the activations of a block pass through memory, forward and backward, and how many operators it
# has: {compiled: ...}
TRAFFIC = {False: (3, 5), True: (2, 3)}
OPERATORS = {False: (35, 55), True: (8, 12)}
FSDP_OPERATORS = 150  # on the host, for each gather and reduction of FSDP2: as long as that many operators
HOST_LINK, HOST_UPDATE = 25e9, 15e9  # bytes/s of a GPU's PCIe, and of AdamW in host memory, for each process


def _step_seconds(shape, layout, work, machine, n_blocks, has_head):
    """{part: seconds} of a micro-batch on the process with these parts: forward, backward, tp, cp, total."""
    config, s, tp = shape.config, _tokens(layout, work), layout.tp
    products = 0.0
    dtype = 'float8' if work.fp8 else work.dtype
    for _, (rows, *columns), cut in shape.block:
        if columns:
            flops = 2 * s * rows * columns[0] / tp
            products += flops / machine.rate(dtype, min(s, (rows, columns[0])[cut] / tp, rows, columns[0]))
    heads = config.n_head * config.head_width
    attention = 2 * s * work.block_size * heads / tp / machine.attention[work.dtype]
    _, whole, _, _ = block_activations(config, layout, work)
    pointwise = [passes * whole / machine.bandwidth for passes in TRAFFIC[work.compile]]
    forward = n_blocks * (products + attention + pointwise[0])
    backward = n_blocks * (2 * products + 2.5 * attention + pointwise[1])
    if work.activation_checkpoint == 'full':
        backward += forward
    elif work.activation_checkpoint == 'selective':
        backward += n_blocks * pointwise[0]
    launch = machine.launch if tp == 1 else machine.dtensor_launch
    host = [count * n_blocks * launch for count in OPERATORS[work.compile]]
    if machine.device == 'cpu':  # computes itself
        forward, backward = forward + host[0], backward + host[1]
    else:
        forward, backward = max(forward, host[0]), max(backward, host[1])
    if has_head:
        vocabulary = config.padded_vocab_size / tp
        rate = machine.rate(work.dtype, min(s, config.n_embd, vocabulary))
        head = 2 * s * config.n_embd * vocabulary / rate
        forward += head + 8 * s * vocabulary / machine.bandwidth
        backward += 2 * head + 12 * s * vocabulary / machine.bandwidth
    again = 1 if work.activation_checkpoint == 'none' else 1.375  # 11 collectives for 8
    stream = s * config.n_embd * work.width
    tp_seconds = n_blocks * 8 * again * machine.ring(stream, 1, tp)
    if work.async_tp:
        tp_seconds /= 2
    kv_heads = config.n_kv_head * config.head_width
    exchanged = s * work.width * (2 * heads + 2 * kv_heads) / tp  # q, k, v, and the result
    if machine.device == 'cpu':  # gloo gathers, and takes its own
        exchanged *= layout.cp
    again = 1.5 if work.activation_checkpoint == 'full' else 1
    cp_seconds = 2 * again * n_blocks * machine.ring(exchanged, tp, layout.cp)
    if layout.cp > 1:
        cp_seconds += 6 * again * n_blocks * machine.latency  # the other six of eight exchanges
    return dict(forward=forward, backward=backward, tp=tp_seconds, cp=cp_seconds,
                total=forward + backward + tp_seconds + cp_seconds)


def _data_parallel_seconds(shape, layout, work, machine, step):
    """Seconds in which gathers and reductions of data parallelism keep the slowest process waiting."""
    m, world = work.micro_steps, layout.world_size
    forward, backward = machine.overlap * step['forward'], machine.overlap * step['backward']
    stages = max(shape.stages(layout, work.block_size), key=lambda stages: sum(stage[1] for stage in stages))
    n_blocks = sum(stage[1] for stage in stages)
    shards, stride = layout.dp_shard * layout.cp, layout.tp
    if not layout.uses_fsdp:
        numbers = sum(count * shape.numbers(part, 1, 1, 1)[0] for part, count in _parts_of(stages[0]))
        sent = numbers * {'none': 4, 'bf16': 2, 'powersgd': 0.2}[work.grad_compress]
        last_bucket = min(1.0, 25 * 2 ** 20 / sent)
        reduced = machine.ring(sent, 1, world)
        if layout.zero_stage == 0:
            reduced *= 2
        exposed = min(reduced, max(0.0, reduced - backward) + last_bucket * reduced)
        if layout.zero_stage == 1:  # both ways through other buffers
            buckets = math.ceil(FLOAT32 * numbers / (25 * 2 ** 20))
            exposed += machine.ring(FLOAT32 * numbers, 1, world) + 4 * FLOAT32 * numbers / machine.bandwidth
            exposed += 2 * buckets * FSDP_OPERATORS * machine.launch
        return exposed

    block = shape.numbers('block', layout.tp, shards, layout.pp)
    ends = sum(count * shape.numbers(part, layout.tp, shards, layout.pp)[2]
               for stage in stages for part, count in _parts_of(stage) if part != 'block')

    def sharing(byte_count):
        """Seconds of a gather, which is copied out of its buffer, or of a reduction, which is copied in."""
        host = FSDP_OPERATORS * machine.launch * (machine.device == 'cpu')
        return machine.ring(byte_count, stride, shards) + 2 * byte_count / machine.bandwidth + host

    gather, reduce = sharing(work.width * block[2]), sharing(FLOAT32 * block[2])
    gather_ends, reduce_ends = sharing(work.width * ends), sharing(FLOAT32 * ends)
    shard_bytes = FLOAT32 * (block[2] * n_blocks + ends) / shards
    replicas = 2 * machine.ring(shard_bytes, stride * shards, layout.dp_replicate)

    def exposed(communication, computation):
        """What does not fit beside computation, and the first or last block, beside which there is none."""
        return max(communication / max(1, n_blocks), communication - computation)

    if layout.pp > 1:  # gathered with the first micro-batch, reduced after the last one
        gathers = m if layout.zero_stage == 3 else 1
        waits = gathers * exposed(n_blocks * gather, forward) + gather_ends
        if layout.zero_stage == 3:
            waits += m * exposed(n_blocks * gather, backward)
        return waits + n_blocks * reduce + reduce_ends + replicas
    if layout.zero_stage == 3:
        waits = m * exposed(n_blocks * gather, forward)
        waits += (m - 1) * exposed(n_blocks * (gather + reduce), backward)
        waits += exposed(n_blocks * (gather + reduce) + replicas, backward)
    else:
        waits = exposed(n_blocks * gather, forward) + (m - 1) * exposed(n_blocks * reduce, backward)
        waits += exposed(n_blocks * reduce + replicas, backward)
    return waits + gather_ends + m * reduce_ends


def _optimizer_seconds(shape, layout, work, machine):
    """Seconds of clipping, which passes 12 bytes a number through memory, and of the update, for AdamW 28."""
    moments = max(state(shape, layout, work, rank)['moments'] for rank in {0, layout.pp // 2, layout.pp - 1})
    updated = moments / FLOAT32 / (2 if work.optimizer == 'adamw' else 1)
    total = 40 * updated / machine.bandwidth + 4 * machine.latency * (layout.world_size > 1)
    if work.cpu_offload and machine.device != 'cpu':
        total = 8 * updated / HOST_LINK + 40 * updated / HOST_UPDATE
    if work.optimizer == 'muon':  # 5 steps of Newton and Schulz on each matrix, on one of all processes
        flops = matrix_bytes = 0
        for _, (rows, *columns), _ in shape.block:
            if columns:
                short, long = sorted((rows, columns[0]))
                flops += 5 * (4 * short ** 2 * long + 2 * short ** 3)
                matrix_bytes += work.width * rows * columns[0]
        sharing = layout.world_size / layout.pp
        n_blocks = shape.n_blocks / layout.pp
        total += n_blocks * flops / sharing / machine.rate(work.dtype, shape.config.n_embd)
        if not layout.uses_fsdp:  # each process computes some of the updates, and all gather them
            total += machine.ring(n_blocks * matrix_bytes, 1, layout.world_size)
    return total
