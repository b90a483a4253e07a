"""How processes divide into a layout, which slice of the batch each takes, and which layouts cannot be.

This is arithmetic alone, without torch, devices and communication. `processes.py` makes the device mesh of a
layout, and `apply.py` lays the model out on the mesh.
"""
import functools
import itertools
from dataclasses import dataclass

import numpy as np

# {pp_schedule: (class in torch.distributed.pipelining.schedules, stages on each pipeline rank)}
SCHEDULES = {
    'gpipe': ('ScheduleGPipe', 1),
    '1f1b': ('Schedule1F1B', 1),
    'interleaved1f1b': ('ScheduleInterleaved1F1B', 2),
    'interleavedzb': ('ScheduleInterleavedZeroBubble', 2),
    'zbv': ('ScheduleZBVZeroBubble', 2),
    'dualpipev': ('ScheduleDualPipeV', 2),
}
V_SHAPED = ('zbv', 'dualpipev')  # pipeline rank r holds stages r and 2 pp - 1 - r; otherwise r and pp + r
# These compute the gradients of weights apart from those of inputs (see Layout.splits_backward).
SPLIT_BACKWARD = ('interleavedzb', 'zbv', 'dualpipev')
LAYOUT_KEYS = ('zero_stage', 'dp_replicate', 'tp', 'cp', 'pp', 'pp_schedule', 'ep')  # the fields of a Layout


@dataclass
class Layout:
    """The degrees of a run: pp × dp_replicate × dp_shard × cp × tp = world_size.

    tp is the innermost dimension of the ranks, so that the processes that communicate most share a node. Data
    parallelism takes the processes that tp, cp and pp leave: dp = dp_replicate × dp_shard.
    Raises ValueError for degrees that do not fit the number of processes.
    """
    world_size: int = 1
    zero_stage: int = 0
    dp_replicate: int = 1
    tp: int = 1
    cp: int = 1
    pp: int = 1
    pp_schedule: str = '1f1b'
    ep: int = 1

    @classmethod
    def of(cls, world_size, config):
        """The layout that the keys of train.py ask for."""
        return cls(world_size, *(config[key] for key in LAYOUT_KEYS))

    def __post_init__(self):
        for key in ('tp', 'cp', 'pp', 'ep', 'dp_replicate'):
            if getattr(self, key) < 1:
                raise ValueError(f'{key} is {getattr(self, key)}: it must be at least 1')
        if self.zero_stage not in (0, 1, 2, 3):
            raise ValueError(f'zero_stage is {self.zero_stage}: choose 0, 1, 2 or 3')
        if self.pp_schedule not in SCHEDULES:
            raise ValueError(f'pp_schedule is {self.pp_schedule!r}: choose one of {", ".join(SCHEDULES)}')
        model_parallel = self.tp * self.cp * self.pp
        if self.world_size % model_parallel:
            raise ValueError(
                f'tp={self.tp} × cp={self.cp} × pp={self.pp} is {model_parallel}, which does not divide the '
                f'{self.world_size} process(es): set tp, cp and pp so that their product is one of '
                f'{_divisors(self.world_size)}, or start a multiple of {model_parallel} processes')
        self.dp = self.world_size // model_parallel
        if self.dp % self.dp_replicate:
            raise ValueError(
                f'dp_replicate={self.dp_replicate} does not divide the data-parallel degree, {self.dp}: '
                f'set it to one of {_divisors(self.dp)}')
        if self.dp_replicate > 1 and self.zero_stage < 2:
            raise ValueError(
                f'dp_replicate={self.dp_replicate} groups the replicas of sharded parameters, but '
                f'zero_stage is {self.zero_stage}: set zero_stage to 2 or 3, or dp_replicate to 1')
        self.dp_shard = self.dp // self.dp_replicate
        self.gradient_ranks = self.dp * self.cp  # the ranks over which gradients are averaged
        self.stages_per_rank = SCHEDULES[self.pp_schedule][1] if self.pp > 1 else 1
        self.n_stages = self.pp * self.stages_per_rank
        self.notes = []  # one line for each choice that differs from the request, with the reason
        if self.tp * self.pp * self.ep > 1 and self.zero_stage < 2:
            self.notes.append(f'zero_stage={self.zero_stage} runs as 2: '
                              'with tp, pp or ep above 1 the data-parallel part is FSDP2')
            self.zero_stage = 2
        if self.dp_shard * self.cp % self.ep:
            raise ValueError(
                f'ep={self.ep} does not divide the {self.dp_shard * self.cp} ranks that shard the parameters '
                f'(dp × cp / dp_replicate): set it to one of {_divisors(self.dp_shard * self.cp)}')

    @property
    def uses_fsdp(self):
        """Whether FSDP2 shards the parameters (ZeRO stages 2 and 3) rather than DDP replicates them."""
        return self.zero_stage >= 2

    @property
    def is_v_shaped(self):
        """Whether the first and the last pipeline stage are on the same rank."""
        return self.pp > 1 and self.pp_schedule in V_SHAPED

    def splits_backward(self, activation_checkpoint):
        """Return whether the pipeline computes the gradients of weights apart from those of inputs.

        With activation checkpointing it does not: PyTorch computes the gradients of weights in one backward
        pass for each weight, and each of those passes would recompute the whole block.
        """
        return self.pp > 1 and self.pp_schedule in SPLIT_BACKWARD and activation_checkpoint == 'none'

    def coordinates(self, rank):
        """(pp, dp, cp, tp) coordinates of a rank."""
        return tuple(int(i) for i in np.unravel_index(rank, (self.pp, self.dp, self.cp, self.tp)))

    def stages_of(self, pp_rank):
        """The pipeline stages of a pipeline rank, in the order of the model."""
        second = 2 * self.pp - 1 - pp_rank if self.is_v_shaped else self.pp + pp_rank
        return [pp_rank, second][:self.stages_per_rank]

    def split_batch(self, global_batch, batch_size):
        """(micro_batch, micro_steps) in which a data-parallel rank takes its share of global_batch sequences.

        micro_batch is at most batch_size, and micro_steps is a number that the pipeline's schedule can run.
        The cheapest of these pairs is taken. A micro-step costs as much as its sequences and an eighth of
        batch_size more. Beyond the share, micro-batches are padded with sequences that do not count.
        """
        share = -(-global_batch // self.dp)
        most = next(n for n in itertools.count(share) if self._pipeline_runs(n))  # of one sequence each
        possible = [n for n in range(-(-share // batch_size), most + 1) if self._pipeline_runs(n)]
        micro_steps = min(possible, key=lambda n: n * (-(-share // n) + batch_size / 8))
        return -(-share // micro_steps), micro_steps

    def split_notes(self, global_batch, batch_size, islands=1):
        """A sentence for each way in which `split_batch` differs from micro-batches of batch_size.

        global_batch: sequences of one of the islands.
        """
        notes, (micro_batch, micro_steps) = [], self.split_batch(global_batch, batch_size)
        steps_that_fit = -(-global_batch // (self.dp * batch_size))
        steps_that_fit = next(n for n in itertools.count(steps_that_fit) if self._pipeline_runs(n))
        advice = f'gradient_accumulation_steps={islands * self.dp * steps_that_fit} would fit'
        if micro_batch != batch_size:
            reason = f'{self.dp} data-parallel rank(s) divide {global_batch} sequences'
            if self.pp > 1:
                reason += f' and the pipeline of {self.n_stages} stages ({self.pp_schedule}) '
                reason += f'runs {micro_steps} micro-batches'
            notes.append(f'micro-batch {micro_batch} rather than {batch_size}, since {reason}: {advice}')
        n_computed = self.dp * micro_batch * micro_steps
        n_idle = self.dp - min(self.dp, -(-global_batch // micro_batch))
        n_padding = n_computed - global_batch
        if n_idle:
            least = islands * -(-self.dp // batch_size)
            notes.append(f'{n_idle} of {self.dp} data-parallel ranks are without any of {global_batch} '
                         'sequences: start fewer processes, or set gradient_accumulation_steps to '
                         f'{least} or more')
        elif n_padding:
            notes.append(f'{n_padding} of the {n_computed} sequences that an iteration computes are padding, '
                         f'which counts for nothing: {advice}')
        return notes

    def _pipeline_runs(self, micro_steps):
        """Whether the schedule can run that many micro-batches.

        Every schedule needs one per stage; interleaved schedules run them in rounds of pp.
        """
        interleaved = self.pp_schedule.startswith('interleaved')
        return micro_steps >= self.n_stages and (not interleaved or micro_steps % self.pp == 0)

    def rows(self, rank, total, micro_batch, micro_step):
        """Which of `total` sequences form a rank's micro-batch: integers (micro_batch,), -1 for padding."""
        _, dp_rank, _, _ = self.coordinates(rank)
        rows = (micro_step * self.dp + dp_rank) * micro_batch + np.arange(micro_batch)
        return np.where(rows < total, rows, -1)

    def positions(self, rank, block_size):
        """The slice of each sequence that a rank takes: all, or a part if cp ranks share sequences."""
        _, _, cp_rank, _ = self.coordinates(rank)
        length = block_size // self.cp
        return slice(cp_rank * length, (cp_rank + 1) * length)

    def first_head(self, rank, n_head):
        """The first head that a rank computes in attention: tp divides all heads, and cp each part."""
        _, _, cp_rank, tp_rank = self.coordinates(rank)
        return (tp_rank * self.cp + cp_rank) * n_head // (self.tp * self.cp)

    def describe(self):
        """The layout in one line."""
        schedule = f' ({self.pp_schedule})' if self.pp > 1 else ''
        data_parallel = f'FSDP2 over {self.dp_shard * self.cp}' if self.uses_fsdp else 'DDP'
        experts = f', ep {self.ep}' if self.ep > 1 else ''
        return (f'pp {self.pp}{schedule} × dp {self.dp} ({self.dp_replicate} × {self.dp_shard}) '
                f'× cp {self.cp} × tp {self.tp} = {self.world_size}{experts}; '
                f'zero_stage {self.zero_stage} ({data_parallel})')


# --- the stages of a pipeline -------------------------------------------------------------------------------

def stage_lengths(model, n_stages, block_size):
    """How many parts each pipeline stage has: part 0 comes before the blocks, the last part after them.

    The costs of the stages are as equal as whole parts allow. A parameter costs one multiplication per token,
    attention T · C per block, and an embedding half of its size, since lookups are nearly free, but memory
    and updates are not.
    """
    plan = model.split_plan
    blocks = model.get_submodule(plan['blocks']).values()

    def size_of(name):
        return sum(p.numel() for p in model.get_submodule(name).parameters())

    tables = []  # elements of the embeddings in each block
    for block in blocks:
        tables.append(sum(module.weight.numel() for name, module in block.named_modules()
                          if name in plan['tables']))
    block_cost = (size_of(plan['blocks']) - sum(tables)) // len(blocks) + block_size * model.config.n_embd
    first_cost = 0
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if name.startswith(plan['before_blocks']):
            first_cost += parameter.numel()
    last_cost = sum(size_of(name) for name in plan['after_blocks'])
    return balance([first_cost // 2, *(block_cost + table // 2 for table in tables), last_cost], n_stages)


def balance(costs, parts):
    """Lengths of `parts` non-empty runs of costs, whose most expensive run is as cheap as possible."""
    @functools.cache
    def best(start, parts):  # (most expensive run, sum of squares, lengths) of costs[start:]
        if parts == 1:
            total = sum(costs[start:])
            return total, total ** 2, (len(costs) - start,)
        options = []
        for length in range(1, len(costs) - start - parts + 2):
            run = sum(costs[start:start + length])
            most_expensive, squares, lengths = best(start + length, parts - 1)
            options.append((max(run, most_expensive), run ** 2 + squares, (length, *lengths)))
        return min(options)

    return best(0, parts)[2]


# --- impossible layouts -------------------------------------------------------------------------------------

# The keys that `check_layout` takes besides dtype
CHECKED_KEYS = ('block_size', 'activation_checkpoint', 'cpu_offload', 'grad_compress', 'fp8', 'async_tp')


def check_layout(model, layout, *, block_size, dtype, activation_checkpoint, cpu_offload, grad_compress, fp8,
                 async_tp=False):
    """Raise ValueError, with the keys to change, if a model cannot run under a Layout with these options.

    model: any module with the `split_plan` and `config` of model.py's GPT.
    """
    n_parts = len(model.get_submodule(model.split_plan['blocks'])) + 2  # embedding, blocks, head
    sizes = _sizes_to_split(model)
    if obstacle := _split_obstacle(sizes, block_size, layout.tp, layout.cp):
        processes = layout.world_size // layout.pp
        fits = []
        for tp in range(1, processes + 1):
            for cp in range(1, processes // tp + 1):
                if processes % (tp * cp) == 0 and not _split_obstacle(sizes, block_size, tp, cp):
                    fits.append(f'tp={tp} cp={cp}')
        raise ValueError(f'{obstacle} cannot be split over tp={layout.tp} cp={layout.cp}: '
                         f'on these processes this model can have {", ".join(fits)}')
    for key in model.config.CONVOLUTIONS:
        n_before = model.config.n_before(key)
        if layout.cp > 1 and block_size // layout.cp < n_before:
            raise ValueError(f'{key}={getattr(model.config, key)} reads {n_before} positions before each, '
                             f'but cp={layout.cp} leaves a process {block_size // layout.cp} of '
                             f'block_size={block_size}: set cp or {key} lower, or block_size higher')
    if layout.ep > 1 and model.config.mlp != 'moe':
        raise ValueError(f'ep={layout.ep} divides experts, but mlp is {model.config.mlp!r}: set mlp to moe, '
                         'or ep to 1')
    if layout.ep > 1 and model.config.n_experts % layout.ep:
        raise ValueError(f'ep={layout.ep} does not divide n_experts={model.config.n_experts}: set ep to one '
                         f'of {_divisors(model.config.n_experts)}')
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
    if async_tp and layout.tp == 1:
        raise ValueError('async_tp=True runs collectives of tensor parallelism beside products, but tp is '
                         '1: set tp above 1, or async_tp to False')
    if fp8 and model.config.lora_rank:
        raise ValueError('fp8=True would take the place of linears with adapters: set fp8 to False, or '
                         'lora_rank to 0')
    if fp8 and (dtype != 'bfloat16' or layout.tp > 1):
        raise ValueError(f'fp8=True goes with dtype=bfloat16 and tp=1, but they are {dtype} and {layout.tp}: '
                         'change those, or set fp8 to False')


@functools.lru_cache(1)  # the planner asks thousands of times about one model
def _sizes_to_split(model):
    """[(name, size)] of what tensor parallelism divides; 'n_head' comes first."""
    config, plan = model.config, model.split_plan
    sizes = [('n_head', config.n_head), ('n_kv_head', config.n_kv_head)]
    if 'D' in config.mixer_pattern:
        sizes += [('delta_heads', config.delta_heads), ('delta_key_heads', config.delta_key_heads)]
    for block in model.get_submodule(plan['blocks']).values():
        for name, module in block.named_modules():
            if name in plan['colwise']:
                sizes.append((name, module.out_features))
    if config.mlp == 'moe':
        sizes.append(('expert_hidden', config.expert_hidden))
    for name in plan['embedding']:
        sizes.append((f'{name} (rows)', model.get_submodule(name).weight.size(0)))
    return list(dict.fromkeys(sizes))  # most blocks have the same sizes


def _split_obstacle(sizes, block_size, tp, cp):
    """The first size of a model that tp × cp or tp ranks do not divide, such as 'n_head=25', or None."""
    n_head, *others = sizes
    for name, size in (n_head, ('block_size', block_size), *others):
        # Context parallelism divides the heads of queries and of states further, and those of keys only if it can.
        ranks = tp * cp if name in ('n_head', 'delta_heads', 'block_size') else tp
        if size % ranks:
            return f'{name}={size}'
    return None


def _divisors(number):
    return ', '.join(str(divisor) for divisor in range(1, number + 1) if number % divisor == 0)
