"""Predict the time of an iteration under a layout: seconds by part, from formulas.

`machines.py` has the speeds. Sources of the pipelines' idle time: Huang et al. 2019, Narayanan et al. 2021
and Qi et al. 2024.
"""
import math

from kilogpt.parallel.layout import SPLIT_BACKWARD
from kilogpt.plan.memory_model import FLOAT32, block_activations, state, tokens_of
from kilogpt.plan.shape import Stage


def bubble(pp, micro_steps, pp_schedule, splits_backward=True):
    """Idle share of a pipeline of pp ranks with equal stages.

    The formula assumes that a backward pass takes twice as long as a forward pass, and sending no time. Each
    rank waits while p - 1 others compute a micro-batch (Huang et al. 2019); with two stages on each rank, it
    waits half as long (Narayanan et al. 2021, 2.2). Schedules that split the backward pass wait for p - 1
    forward passes of half a rank's blocks (Qi et al. 2024). If they must not split the backward pass,
    interleavedzb waits as long as interleaved1f1b, and the V-shaped schedules wait for up to 3/4 of p - 1
    micro-batches, whose backward passes take three times as long as their forward passes ('full').
    """
    if pp == 1:
        return 0.0
    shares = {'gpipe': 1, '1f1b': 1, 'interleaved1f1b': 1 / 2, 'interleavedzb': 1 / 2, 'zbv': 3 / 4,
              'dualpipev': 3 / 4}
    if splits_backward:
        shares.update(dict.fromkeys(SPLIT_BACKWARD, 1 / 6))
    waits = shares[pp_schedule] * (pp - 1)
    return waits / (micro_steps + waits)


def seconds(shape, layout, work, machine):
    """{part: seconds} of an iteration: compute, tp, cp, ep, dp, pp, bubble, optimizer.

    Only communication that does not overlap with computation counts: tensor, context and expert parallelism
    in full (with async_tp, half of tensor parallelism), and the gathers and reductions of data parallelism as
    far as they take longer than the computation that they overlap with.
    """
    m = work.micro_steps
    machine = machine.with_processes(layout.world_size)
    # The set is small: ranks in the middle of a pipeline have at most two different lengths.
    rank_stages = {Stage.sum(stages) for stages in shape.stages(layout, work.block_size)}
    steps = [_step_seconds(shape, layout, work, machine, stage) for stage in rank_stages]
    slowest = max(steps, key=lambda step: step['total'])
    parts = dict(compute=m * (slowest['forward'] + slowest['backward']), tp=m * slowest['tp'],
                 cp=m * slowest['cp'], ep=m * slowest['ep'])
    parts['dp'] = _data_parallel_seconds(shape, layout, work, machine, slowest)
    parts['pp'] = 0.0
    if layout.pp > 1:
        sent = tokens_of(layout, work) * shape.config.n_embd * work.width / layout.tp
        stride = layout.world_size // layout.pp
        bandwidth = machine.network if stride >= machine.per_node else machine.node_link
        parts['pp'] = 2 * m * layout.stages_per_rank * (machine.latency + sent / bandwidth)
    splits_backward = layout.splits_backward(work.activation_checkpoint)
    idle = bubble(layout.pp, m, layout.pp_schedule, splits_backward)
    parts['bubble'] = m * slowest['total'] * idle / (1 - idle)
    parts['optimizer'] = _optimizer_seconds(shape, layout, work, machine)
    return parts


# {compiled: (forward, backward)}: how often a block's activations pass through memory, and how many operators
# a block has.
TRAFFIC = {False: (3, 5), True: (2, 3)}
OPERATORS = {False: (35, 55), True: (8, 12)}
ROUTED_OPERATORS = (40, 50)  # additional operators of a block with experts, whose products are grouped
REDISTRIBUTIONS = 4  # changes of a DTensor's placements in a block, for each pass, and for each of tp and cp
FSDP_OPERATORS = 150  # host time of a gather or reduction of FSDP2, in operators
HOST_LINK, HOST_UPDATE = 25e9, 15e9  # for each process: bytes/s of PCIe, and of AdamW in host memory


def _step_seconds(shape, layout, work, machine, stage):
    """{part: seconds} of a micro-batch on a rank with this Stage: forward, backward, tp, cp, ep, total."""
    config, s, tp = shape.config, tokens_of(layout, work), layout.tp
    forward = backward = 0.0
    for has_experts, count in enumerate((stage.n_dense, stage.n_sparse)):
        for mixer, of_mixer in stage.n_mixers.items():
            if count and of_mixer:  # as if blocks with experts and without had the same mixers
                of_block = _block_seconds(shape, layout, work, machine, bool(has_experts), mixer)
                forward += count * of_mixer / stage.n_blocks * of_block[0]
                backward += count * of_mixer / stage.n_blocks * of_block[1]
    if stage.has_head:
        vocabulary = config.padded_vocab_size / tp
        rate = machine.rate(work.dtype, min(s, config.n_embd, vocabulary))
        head = 2 * s * config.n_embd * vocabulary / rate
        forward += head + 8 * s * vocabulary / machine.bandwidth
        backward += (1 if config.lora_rank else 2) * head + 12 * s * vocabulary / machine.bandwidth
    repeats = 1 if work.activation_checkpoint == 'none' else 1.375  # 11 collectives instead of 8
    stream = s * config.n_embd * work.width
    tp_seconds = stage.n_blocks * 8 * repeats * machine.ring(stream, 1, tp)
    if work.async_tp:
        tp_seconds /= 2
    heads, kv_heads = config.n_head * config.head_width, config.n_kv_head * config.head_width
    exchanged = s * work.width * (2 * heads + 2 * kv_heads) / tp  # q, k, v, and the result
    if machine.device == 'cpu':  # gloo has no all-to-all: each rank gathers everything and keeps its share
        exchanged *= layout.cp
    repeats = 1.5 if work.activation_checkpoint == 'full' else 1
    cp_seconds = 2 * repeats * stage.n_blocks * machine.all_to_all(exchanged, tp, layout.cp)
    if layout.cp > 1:
        cp_seconds += 6 * repeats * stage.n_blocks * machine.latency  # the other six of eight exchanges
    ep_seconds = 0.0
    if layout.ep > 1:
        # Rows go to the experts and back, and so do their gradients. The host waits for the numbers of rows.
        rows = stream * config.n_active_experts * work.load_imbalance
        waits = 3 * (2 * repeats - 1) * machine.latency
        ep_seconds = stage.n_sparse * (4 * repeats * machine.all_to_all(rows, tp, layout.ep) + waits)
    return dict(forward=forward, backward=backward, tp=tp_seconds, cp=cp_seconds, ep=ep_seconds,
                total=forward + backward + tp_seconds + cp_seconds + ep_seconds)


def _block_seconds(shape, layout, work, machine, has_experts, mixer):
    """Seconds of computation of a block for a micro-batch: (forward, backward). mixer: its letter."""
    config, s, tp = shape.config, tokens_of(layout, work), layout.tp
    dtype = 'float8' if work.fp8 else work.dtype
    products = of_frozen = 0.0
    part = 'sparse' if has_experts else 'dense'
    trained = {name for each in (part, mixer, 'experts') for name, *_ in shape.trained.parts[each]}
    for name, sizes, tp_dimension in shape.parts[part] + shape.parts[mixer]:
        if len(sizes) > 1:
            sizes = _divided(sizes, tp_dimension, tp)
            seconds = 2 * s * math.prod(sizes) / machine.rate(dtype, min(s, *sizes))
            products += seconds
            of_frozen += seconds * (name not in trained)
    operators = OPERATORS[work.compile]
    if has_experts:
        n_experts = config.n_experts / layout.ep  # experts of this process: a product for each one's rows
        n_rows = s * config.n_active_experts * (work.load_imbalance if layout.ep > 1 else 1)
        for name, sizes, tp_dimension in shape.parts['experts']:
            _, *sizes = _divided(sizes, tp_dimension, tp)
            rate = machine.rate(work.dtype, min(n_rows / n_experts, *sizes))
            products += 2 * n_rows * math.prod(sizes) / rate
            of_frozen += 2 * n_rows * math.prod(sizes) / rate * (name not in trained)
        operators = [count + routed for count, routed in zip(operators, ROUTED_OPERATORS)]
    heads = config.n_head * config.head_width
    seen = work.seen or config.mean_seen([work.block_size])
    if mixer == 'D':  # three products with a state for each token, as step by step
        states = config.delta_heads * config.delta_key_width * config.delta_value_width
        attention = 6 * s * states / tp / machine.attention[work.dtype]
    else:  # `seen` is a mean over all blocks, of which some do not have attention
        seen *= config.n_layer / config.n_layer_of('A')
        attention = 4 * s * seen * heads / tp / machine.attention[work.dtype]
    whole = block_activations(config, layout, work, has_experts, mixer).whole
    pointwise = [passes * whole / machine.bandwidth for passes in TRAFFIC[work.compile]]
    forward = products + attention + pointwise[0]
    backward = 2 * products - of_frozen + 2.5 * attention + pointwise[1]
    if work.activation_checkpoint == 'full':
        backward += forward
    elif work.activation_checkpoint == 'selective':
        backward += pointwise[0]
    launch = machine.launch if tp == 1 else machine.dtensor_launch
    host = [count * launch for count in operators]
    if not work.compile:
        redistributions = REDISTRIBUTIONS * ((tp > 1) + (layout.cp > 1))
        host = [seconds + redistributions * machine.redistribute for seconds in host]
    if machine.device == 'cpu':  # the host computes, too: its times add up
        return forward + host[0], backward + host[1]
    return max(forward, host[0]), max(backward, host[1])


def _divided(sizes, tp_dimension, tp):
    """The sizes of a parameter's part on a rank of tensor parallelism. tp_dimension: None = not divided."""
    sizes = list(sizes)
    if tp_dimension is not None:
        sizes[tp_dimension] /= tp
    return sizes


def _data_parallel_seconds(shape, layout, work, machine, step):
    """Seconds that the slowest process waits for the gathers and reductions of data parallelism.

    step: the result of _step_seconds for the slowest rank.
    """
    m, world = work.micro_steps, layout.world_size
    forward, backward = machine.overlap * step['forward'], machine.overlap * step['backward']
    stages = max(shape.stages(layout, work.block_size), key=lambda stages: Stage.sum(stages).n_blocks)
    stage = Stage.sum(stages)
    n_blocks = stage.n_blocks
    n_shards, stride = layout.dp_shard * layout.cp, layout.tp
    if not layout.uses_fsdp:
        elements = sum(count * shape.trained.counts(part, layout).split
                       for part, count in stage.parts.items())
        sent = elements * {'none': 4, 'bf16': 2, 'powersgd': 0.2}[work.grad_compress]
        last_bucket = min(1.0, 25 * 2 ** 20 / sent)
        reduced = machine.ring(sent, 1, world)
        if layout.zero_stage == 0:
            reduced *= 2
        exposed = min(reduced, max(0.0, reduced - backward) + last_bucket * reduced)
        if layout.zero_stage == 1:  # gathers the updated parameters; both collectives copy through buffers
            buckets = math.ceil(FLOAT32 * elements / (25 * 2 ** 20))
            exposed += machine.ring(FLOAT32 * elements, 1, world)
            exposed += 4 * FLOAT32 * elements / machine.bandwidth
            exposed += 2 * buckets * FSDP_OPERATORS * machine.launch
        return exposed

    def collective_seconds(byte_count, spacing=1):
        """Seconds of a gather or of a reduction, with the copies from or into its buffer.

        spacing: 1 if neighbouring shards of data parallelism share these bytes, n if every n-th does.
        """
        host = FSDP_OPERATORS * machine.launch * (machine.device == 'cpu')
        copies = 2 * byte_count / machine.bandwidth
        return machine.ring(byte_count, stride * spacing, n_shards // spacing) + copies + host

    def gathered_elements(shape):
        return {part: shape.counts(part, layout).gathered for part in shape.parts}

    def of_blocks(gathered, width):
        """Seconds of the collectives of all blocks. gathered: {part: elements}. width: of an element."""
        mixer = sum(count * gathered[letter] for letter, count in stage.n_mixers.items()) / max(1, n_blocks)
        of_part = dict(dense=collective_seconds(width * (gathered['dense'] + mixer)),
                       sparse=collective_seconds(width * (gathered['sparse'] + mixer)),
                       experts=collective_seconds(width * gathered['experts'], spacing=layout.ep),
                       tables=collective_seconds(width * gathered['tables']))
        return sum(stage.parts[part] * seconds for part, seconds in of_part.items())

    whole, trained = gathered_elements(shape), gathered_elements(shape.trained)
    ends, trained_ends = (sum(stage.parts[part] * elements[part] for part in ('before', 'after'))
                          for elements in (whole, trained))
    gather, reduce = of_blocks(whole, work.width), of_blocks(trained, FLOAT32)
    gather_ends = collective_seconds(work.width * ends)
    reduce_ends = collective_seconds(FLOAT32 * trained_ends)
    shard_bytes = FLOAT32 * shape.trained.sharded(stages, layout)[0]
    replicas = 2 * machine.ring(shard_bytes, stride * n_shards, layout.dp_replicate)

    def exposed(communication, computation):
        """Seconds that do not overlap; the first or last block's communication never overlaps."""
        return max(communication / max(1, n_blocks), communication - computation)

    if layout.pp > 1:  # gathers with the first micro-batch, reduces after the last
        gathers = m if layout.zero_stage == 3 else 1
        waits = gathers * exposed(gather, forward) + gather_ends
        if layout.zero_stage == 3 and layout.splits_backward(work.activation_checkpoint):
            waits += 2 * m * gather  # a stage gathers all of its blocks before each half of a backward pass
        elif layout.zero_stage == 3:
            waits += m * exposed(gather, backward)
        return waits + reduce + reduce_ends + replicas
    if layout.zero_stage == 3:
        waits = m * exposed(gather, forward)
        waits += (m - 1) * exposed(gather + reduce, backward)
        waits += exposed(gather + reduce + replicas, backward)
    else:
        waits = exposed(gather, forward) + (m - 1) * exposed(reduce, backward)
        waits += exposed(reduce + replicas, backward)
    return waits + gather_ends + m * reduce_ends


def _optimizer_seconds(shape, layout, work, machine):
    """Seconds of clipping and the update: for AdamW, 12 + 28 bytes of memory traffic for each parameter."""
    moments = max(state(shape, layout, work, rank)['moments'] for rank in {0, layout.pp // 2, layout.pp - 1})
    updated = moments / FLOAT32 / (2 if work.optimizer == 'adamw' else 1)
    total = 40 * updated / machine.bandwidth + 4 * machine.latency * (layout.world_size > 1)
    if work.cpu_offload and machine.device != 'cpu':
        total = 8 * updated / HOST_LINK + 40 * updated / HOST_UPDATE
    if work.optimizer == 'muon':  # five Newton-Schulz steps on each matrix, which one process computes
        flops = matrix_bytes = 0
        # AdamW updates the embeddings in blocks, which are therefore not among the matrices.
        n_recurrent = shape.is_recurrent.count(True)
        n_dense, n_sparse = (shape.is_sparse.count(kind) for kind in (False, True))
        all_blocks = Stage(False, n_dense, n_sparse, 0, n_recurrent, False)
        for part, count in all_blocks.parts.items():
            for _, sizes, _ in shape.trained.parts[part]:
                if count and len(sizes) > 1:
                    short, long = sorted(sizes[-2:])
                    n_matrices = count / layout.pp * math.prod(sizes[:-2])
                    flops += n_matrices * 5 * (4 * short ** 2 * long + 2 * short ** 3)
                    matrix_bytes += n_matrices * work.width * short * long
        n_processes = layout.world_size / layout.pp
        total += flops / n_processes / machine.rate(work.dtype, shape.config.n_embd)
        if not layout.uses_fsdp:  # each process computes some updates, then all processes gather them
            total += machine.ring(matrix_bytes, 1, layout.world_size)
    return total
