"""How the processes of a run divide into a layout, and which slice of the global batch each of them takes.

Plain arithmetic: no torch, no device, no communication. `processes.py` makes the device mesh of a layout and
`parallel.py` lays the model out on it.
"""
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
# These compute the gradients of weights apart from those of inputs.
SPLIT_BACKWARD = ('interleavedzb', 'zbv', 'dualpipev')


@dataclass
class Layout:
    """The degrees of a run: pp × dp_replicate × dp_shard × cp × tp = world_size.

    Ranks count with tp innermost, so that the processes that communicate most share a node. Data parallelism
    takes the processes that tp, cp and pp leave: dp = dp_replicate × dp_shard.
    Raises ValueError for degrees that do not fit the number of processes.
    """
    world_size: int = 1
    zero_stage: int = 0
    dp_replicate: int = 1
    tp: int = 1
    cp: int = 1
    pp: int = 1
    pp_schedule: str = '1f1b'

    def __post_init__(self):
        for key in ('tp', 'cp', 'pp', 'dp_replicate'):
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
        self.notes = []  # one line for each choice that differs from what was asked for, with the reason
        if self.tp * self.pp > 1 and self.zero_stage < 2:
            self.notes.append(f'zero_stage={self.zero_stage} runs as 2: '
                              'with tp or pp above 1 the data-parallel part is FSDP2')
            self.zero_stage = 2

    @property
    def uses_fsdp(self):
        """Whether FSDP2 shards the parameters (ZeRO stages 2 and 3), rather than DDP replicating them."""
        return self.zero_stage >= 2

    @property
    def is_v_shaped(self):
        """Whether the first and the last pipeline stage are on the same rank."""
        return self.pp > 1 and self.pp_schedule in V_SHAPED

    def coordinates(self, rank):
        """(pp, dp, cp, tp) coordinates of a rank."""
        return tuple(int(i) for i in np.unravel_index(rank, (self.pp, self.dp, self.cp, self.tp)))

    def stages_of(self, pp_rank):
        """The pipeline stages that a pipeline rank holds, in the order of the model."""
        second = 2 * self.pp - 1 - pp_rank if self.is_v_shaped else self.pp + pp_rank
        return [pp_rank, second][:self.stages_per_rank]

    def split_batch(self, global_batch, batch_size):
        """(micro_batch, micro_steps) in which a data-parallel rank takes its share of global_batch sequences.

        micro_batch is the largest size up to batch_size that divides the share into a number of micro-batches
        that the pipeline's schedule can run. Where there is none, the last micro-batches are padded with
        sequences that count for nothing.
        """
        share = -(-global_batch // self.dp)
        largest = min(batch_size, share)
        micro_steps = next(n for n in itertools.count(-(-share // largest)) if self._pipeline_runs(n))
        micro_batch = -(-share // micro_steps)
        if global_batch % self.dp == 0:
            for size in range(largest, 0, -1):
                if share % size == 0 and self._pipeline_runs(share // size):
                    micro_batch, micro_steps = size, share // size
                    break
        if self.pp > 1 and micro_batch < largest:
            self.notes.append(f'micro-batch {micro_batch} rather than {largest}: the pipeline of '
                              f'{self.n_stages} stages ({self.pp_schedule}) runs {micro_steps} of them')
        return micro_batch, micro_steps

    def _pipeline_runs(self, micro_steps):
        """Whether the schedule can run that many micro-batches.

        Every schedule needs one per stage; interleaved schedules run them in rounds of pp.
        """
        interleaved = self.pp_schedule.startswith('interleaved')
        return micro_steps >= self.n_stages and (not interleaved or micro_steps % self.pp == 0)

    def rows(self, rank, total, micro_batch, micro_step):
        """Which of `total` sequences are a rank's micro-batch: integers (micro_batch,), -1 for padding."""
        _, dp_rank, _, _ = self.coordinates(rank)
        rows = (micro_step * self.dp + dp_rank) * micro_batch + np.arange(micro_batch)
        return np.where(rows < total, rows, -1)

    def positions(self, rank, block_size):
        """The slice of each sequence that a rank takes: all, or a part where cp ranks share sequences."""
        _, _, cp_rank, _ = self.coordinates(rank)
        length = block_size // self.cp
        return slice(cp_rank * length, (cp_rank + 1) * length)

    def describe(self):
        """The layout in one line."""
        schedule = f' ({self.pp_schedule})' if self.pp > 1 else ''
        data_parallel = f'FSDP2 over {self.dp_shard * self.cp}' if self.uses_fsdp else 'DDP'
        return (f'pp {self.pp}{schedule} × dp {self.dp} ({self.dp_replicate} × {self.dp_shard}) '
                f'× cp {self.cp} × tp {self.tp} = {self.world_size}; '
                f'zero_stage {self.zero_stage} ({data_parallel})')


def _divisors(number):
    return ', '.join(str(divisor) for divisor in range(1, number + 1) if number % divisor == 0)
