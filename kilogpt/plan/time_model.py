"""How long an iteration takes under a layout: seconds by part, from formulas.

What `memory_model.py` is for memory; `machines.py` has the speeds. Sources: pipelines Huang et al. 2019, Narayanan
et al. 2021 and Qi et al. 2024.
"""
import math

from kilogpt.parallel.layout import SPLIT_BACKWARD
from kilogpt.plan.memory_model import FLOAT32, Stage, block_activations, state, tokens_of


def bubble(pp, micro_steps, pp_schedule, splits_backward=True):
    """Idle share of a pipeline of pp ranks with equal stages.

    Backward takes twice as long as forward, and sending nothing. Each rank waits while p - 1 others compute a
    micro-batch (Huang et al. 2019), with two stages on each rank half as long (Narayanan et al. 2021, 2.2).
    Schedules that split the backward pass wait for p - 1 forward passes of half a rank's blocks (Qi et al.
    2024). Where they may not split it, interleavedzb waits as interleaved1f1b does, and the V-shaped ones
    wait for up to 3/4 of p - 1 micro-batches, with backward three times as long as forward ('full').
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

    The communication is what does not run beside computation: that of tensor, context and expert parallelism
    in full (async_tp: half), gathers and reductions of data parallelism where they take longer.
    """
    m = work.micro_steps
    machine = machine.with_processes(layout.world_size)
    # Ranks in the middle of a pipeline have stages of one of two lengths.
    ranks = {Stage(*map(sum, zip(*stages))) for stages in shape.stages(layout, work.block_size)}
    steps = [_step_seconds(shape, layout, work, machine, stage) for stage in ranks]
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


# How often the activations of a block pass through memory, forward and backward, and how many operators it
# has: {compiled: ...}
TRAFFIC = {False: (3, 5), True: (2, 3)}
OPERATORS = {False: (35, 55), True: (8, 12)}
REDISTRIBUTIONS = 4  # of a block's DTensors, forward and again backward, by tp and by cp each
ROUTED_OPERATORS = (40, 50)  # more of them where a block has experts, whose products are grouped
FSDP_OPERATORS = 150  # on the host, for each gather and reduction of FSDP2: as long as that many operators
HOST_LINK, HOST_UPDATE = 25e9, 15e9  # bytes/s of a GPU's PCIe, and of AdamW in host memory, for each process


def _step_seconds(shape, layout, work, machine, stage):
    """{part: seconds} of a micro-batch on the process with a Stage: forward, backward, tp, cp, ep, total."""
    config, s, tp = shape.config, tokens_of(layout, work), layout.tp
    forward = backward = 0.0
    for has_experts, count in enumerate((stage.n_dense, stage.n_sparse)):
        if count:
            once = _block_seconds(shape, layout, work, machine, bool(has_experts))
            forward, backward = forward + count * once[0], backward + count * once[1]
    if stage.has_head:
        vocabulary = config.padded_vocab_size / tp
        rate = machine.rate(work.dtype, min(s, config.n_embd, vocabulary))
        head = 2 * s * config.n_embd * vocabulary / rate
        forward += head + 8 * s * vocabulary / machine.bandwidth
        backward += 2 * head + 12 * s * vocabulary / machine.bandwidth
    again = 1 if work.activation_checkpoint == 'none' else 1.375  # 11 collectives for 8
    stream = s * config.n_embd * work.width
    tp_seconds = stage.n_blocks * 8 * again * machine.ring(stream, 1, tp)
    if work.async_tp:
        tp_seconds /= 2
    heads, kv_heads = config.n_head * config.head_width, config.n_kv_head * config.head_width
    exchanged = s * work.width * (2 * heads + 2 * kv_heads) / tp  # q, k, v, and the result
    if machine.device == 'cpu':  # gloo gathers, and takes its own
        exchanged *= layout.cp
    again = 1.5 if work.activation_checkpoint == 'full' else 1
    cp_seconds = 2 * again * stage.n_blocks * machine.all_to_all(exchanged, tp, layout.cp)
    if layout.cp > 1:
        cp_seconds += 6 * again * stage.n_blocks * machine.latency  # the other six of eight exchanges
    ep_seconds = 0.0
    if layout.ep > 1:  # rows there and back, and their gradients; the host waits for the numbers of rows
        rows = stream * config.n_active_experts * work.load_imbalance
        once = 4 * again * machine.all_to_all(rows, tp, layout.ep) + 3 * (2 * again - 1) * machine.latency
        ep_seconds = stage.n_sparse * once
    return dict(forward=forward, backward=backward, tp=tp_seconds, cp=cp_seconds, ep=ep_seconds,
                total=forward + backward + tp_seconds + cp_seconds + ep_seconds)


def _block_seconds(shape, layout, work, machine, has_experts):
    """Seconds of computation of a block for a micro-batch: (forward, backward)."""
    config, s, tp = shape.config, tokens_of(layout, work), layout.tp
    dtype = 'float8' if work.fp8 else work.dtype
    products = 0.0
    for _, sizes, cut in shape.parts['sparse' if has_experts else 'dense']:
        if len(sizes) > 1:
            sizes = [size / tp if dimension == cut else size for dimension, size in enumerate(sizes)]
            products += 2 * s * math.prod(sizes) / machine.rate(dtype, min(s, *sizes))
    operators = OPERATORS[work.compile]
    if has_experts:
        n_experts = config.n_experts / layout.ep  # of this process, each a product with its rows
        n_rows = s * config.n_active_experts * (work.load_imbalance if layout.ep > 1 else 1)
        for _, (_, *sizes), cut in shape.parts['experts']:
            sizes = [size / tp if dimension == cut else size for dimension, size in enumerate(sizes, start=1)]
            rate = machine.rate(work.dtype, min(n_rows / n_experts, *sizes))
            products += 2 * n_rows * math.prod(sizes) / rate
        operators = [count + more for count, more in zip(operators, ROUTED_OPERATORS)]
    heads = config.n_head * config.head_width
    attention = 2 * s * work.block_size * heads / tp / machine.attention[work.dtype]
    whole = block_activations(config, layout, work, has_experts).whole
    pointwise = [passes * whole / machine.bandwidth for passes in TRAFFIC[work.compile]]
    forward = products + attention + pointwise[0]
    backward = 2 * products + 2.5 * attention + pointwise[1]
    if work.activation_checkpoint == 'full':
        backward += forward
    elif work.activation_checkpoint == 'selective':
        backward += pointwise[0]
    launch = machine.launch if tp == 1 else machine.dtensor_launch
    host = [count * launch for count in operators]
    if not work.compile:
        redistributions = REDISTRIBUTIONS * ((tp > 1) + (layout.cp > 1))
        host = [seconds + redistributions * machine.redistribute for seconds in host]
    if machine.device == 'cpu':  # computes itself
        return forward + host[0], backward + host[1]
    return max(forward, host[0]), max(backward, host[1])


def _data_parallel_seconds(shape, layout, work, machine, step):
    """Seconds in which gathers and reductions of data parallelism keep the slowest process waiting."""
    m, world = work.micro_steps, layout.world_size
    forward, backward = machine.overlap * step['forward'], machine.overlap * step['backward']
    stages = max(shape.stages(layout, work.block_size),
                 key=lambda stages: sum(stage.n_blocks for stage in stages))
    stage = Stage(*map(sum, zip(*stages)))
    n_blocks = stage.n_blocks
    shards, stride = layout.dp_shard * layout.cp, layout.tp
    if not layout.uses_fsdp:
        numbers = sum(count * shape.numbers(part, layout).split for part, count in stage.parts.items())
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

    def sharing(byte_count, apart=1):
        """Seconds of a gather, which is copied out of its buffer, or of a reduction, which is copied in.

        apart: how many ranks that have other parameters lie between two that share these.
        """
        host = FSDP_OPERATORS * machine.launch * (machine.device == 'cpu')
        copies = 2 * byte_count / machine.bandwidth
        return machine.ring(byte_count, stride * apart, shards // apart) + copies + host

    of_part = {part: shape.numbers(part, layout).gathered for part in shape.parts}

    def of_blocks(width):
        once = dict(dense=sharing(width * of_part['dense']), sparse=sharing(width * of_part['sparse']),
                    experts=sharing(width * of_part['experts'], layout.ep))
        return sum(stage.parts[part] * value for part, value in once.items())

    ends = sum(stage.parts[part] * of_part[part] for part in ('before', 'after'))
    gather, reduce = of_blocks(work.width), of_blocks(FLOAT32)
    gather_ends, reduce_ends = sharing(work.width * ends), sharing(FLOAT32 * ends)
    shard_bytes = FLOAT32 * shape.held(stages, layout)[0]
    replicas = 2 * machine.ring(shard_bytes, stride * shards, layout.dp_replicate)

    def exposed(communication, computation):
        """What does not fit beside computation, and the first or last block, beside which there is none."""
        return max(communication / max(1, n_blocks), communication - computation)

    if layout.pp > 1:  # gathered with the first micro-batch, reduced after the last one
        gathers = m if layout.zero_stage == 3 else 1
        waits = gathers * exposed(gather, forward) + gather_ends
        if layout.zero_stage == 3:
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
    """Seconds of clipping, which passes 12 bytes a number through memory, and of the update, for AdamW 28."""
    moments = max(state(shape, layout, work, rank)['moments'] for rank in {0, layout.pp // 2, layout.pp - 1})
    updated = moments / FLOAT32 / (2 if work.optimizer == 'adamw' else 1)
    total = 40 * updated / machine.bandwidth + 4 * machine.latency * (layout.world_size > 1)
    if work.cpu_offload and machine.device != 'cpu':
        total = 8 * updated / HOST_LINK + 40 * updated / HOST_UPDATE
    if work.optimizer == 'muon':  # 5 steps of Newton and Schulz on each matrix, on one of all processes
        flops = matrix_bytes = 0
        whole = Stage(False, shape.is_sparse.count(False), shape.is_sparse.count(True), False)
        for part, count in whole.parts.items():
            for _, sizes, _ in shape.parts[part]:
                if count and len(sizes) > 1:
                    short, long = sorted(sizes[-2:])
                    n_matrices = count / layout.pp * math.prod(sizes[:-2])
                    flops += n_matrices * 5 * (4 * short ** 2 * long + 2 * short ** 3)
                    matrix_bytes += n_matrices * work.width * short * long
        sharing = layout.world_size / layout.pp
        total += flops / sharing / machine.rate(work.dtype, shape.config.n_embd)
        if not layout.uses_fsdp:  # each process computes some of the updates, and all gather them
            total += machine.ring(matrix_bytes, 1, layout.world_size)
    return total
