"""How many parameters a model has, and how a layout divides them over processes. No bytes, no seconds.

`memory_model.py` turns these counts into bytes, `time_model.py` into seconds. Stages and shards are cut as
`kilogpt/parallel/` cuts them. Source of sharded state: Rajbhandari et al. 2020 (ZeRO).
"""
import functools
import itertools
import math
from typing import NamedTuple

from kilogpt.parallel.layout import Layout, stage_lengths


class Stage(NamedTuple):
    """The content of a pipeline stage."""
    has_embedding: bool
    n_dense: int  # blocks without experts
    n_sparse: int  # blocks with experts
    n_tables: int  # blocks with an embedding of their own
    n_recurrent: int  # blocks with a recurrence in the place of attention
    has_head: bool

    @classmethod
    def sum(cls, stages):
        """Several stages of one rank as a single Stage."""
        return cls(*map(sum, zip(*stages)))

    @property
    def n_blocks(self):
        return self.n_dense + self.n_sparse

    @property
    def n_mixers(self):
        """{letter of mixer_pattern: how many blocks of the stage have such a mixer}."""
        return dict(A=self.n_blocks - self.n_recurrent, D=self.n_recurrent)

    @property
    def parts(self):
        """{part of a Shape: how many of them the stage has}."""
        return dict(before=int(self.has_embedding), dense=self.n_dense, sparse=self.n_sparse,
                    experts=self.n_sparse, tables=self.n_tables, after=int(self.has_head), **self.n_mixers)


class Counts(NamedTuple):
    """Number of elements that a part of the parameters has on one process."""
    split: int = 0  # after tensor and expert parallelism
    sharded: int = 0  # on the fullest of the ranks that share these elements
    gathered: int = 0  # from all of those ranks, padded to equal lengths by FSDP2
    split_in_matrices: int = 0  # elements of `split` that belong to matrices
    sharded_in_matrices: int = 0  # elements of `sharded` that belong to matrices

    def __add__(self, other):
        return Counts(*map(sum, zip(self, other)))


class Shape:
    """The parameters of a model and how a layout divides them. model: a GPT, on any device.

    parts: {part: [(name, shape, dimension that tp splits, or None)]}. The parts are 'before' and 'after' (the
    parameters before and after the blocks), 'dense' (one block without experts), 'sparse' and 'experts' (one
    block with experts: the experts' matrices, and everything else in it), 'tables' (the embedding of a
    block that has one, which is in no other part), and 'A' and 'D' (the mixer of a block by its letter in
    mixer_pattern, which is in no other part either).
    trained: the Shape of the trained parameters alone, which is another one if the model has adapters (LoRA).
    frozen: the Shape of the weights of FrozenLinears, which lora_base_dtype may make narrow.
    counts(parameter): whether a parameter counts; all do if it is None.
    """

    def __init__(self, model, counts=None):
        if not counts:
            self.trained = Shape(model, lambda parameter: parameter.requires_grad)
            frozen = set()
            if model.config.lora_rank:
                from kilogpt.layers.lora import FrozenLinear
                frozen = {id(module.weight) for module in model.modules() if isinstance(module, FrozenLinear)}
            self.frozen = Shape(model, lambda parameter: id(parameter) in frozen)
        plan = model.split_plan
        blocks = model.get_submodule(plan['blocks'])
        self.model, self.config, self.n_blocks = model, model.config, len(blocks)
        self.is_sparse = [self.config.has_experts(int(number)) for number in blocks]
        self.has_table = [any(name in plan['tables'] for name, _ in block.named_modules())
                          for block in blocks.values()]
        self.is_recurrent = [self.config.mixer_of(int(number)) == 'D' for number in blocks]
        self.parts = {part: [] for part in ('before', 'dense', 'sparse', 'experts', 'tables', 'A', 'D', 'after')}
        # Blocks of one kind have the same parameters, so the first block of each kind is enough.
        first_blocks = {}  # {prefix of the names of its parameters: whether it has experts}
        for kind in set(self.is_sparse):
            first_blocks[f'{plan["blocks"]}.{self.is_sparse.index(kind)}.'] = kind
        mixers = {}  # {prefix of the names of its parameters: letter}
        for is_recurrent in set(self.is_recurrent):
            first = self.is_recurrent.index(is_recurrent)
            mixers[f'{plan["blocks"]}.{first}.attn.'] = 'D' if is_recurrent else 'A'
        for name, parameter in model.named_parameters(remove_duplicate=False):
            mixer = next((prefix for prefix in mixers if name.startswith(prefix)), '')
            block = next((prefix for prefix in first_blocks if name.startswith(prefix)), mixer[:-len('attn.')])
            entry = name, tuple(parameter.shape)
            module, _, kind = name.removeprefix(block).rpartition('.')
            if counts and not counts(parameter):
                continue
            if module.endswith(plan['tables']):
                self.parts['tables'] = [(*entry, 1)]
                continue
            if module == f'{plan["experts"]}.experts':
                width_dimension = dict(c_proj=2, c_proj_bias=None).get(kind, 1)
                self.parts['experts'].append((*entry, width_dimension))
                continue
            tp_dimension = None
            if kind == 'lora_A':  # dtensor.py does not split it
                pass
            elif module in plan['colwise'] + plan['across'] + plan['embedding'] + plan['head']:
                tp_dimension = 0
            elif module in plan['rowwise'] and kind == 'weight':
                tp_dimension = 1
            if module.startswith('attn.'):
                if mixer:
                    self.parts[mixers[mixer]].append((*entry, tp_dimension))
            elif block:
                self.parts['sparse' if first_blocks[block] else 'dense'].append((*entry, tp_dimension))
            elif name.startswith(plan['before_blocks']):
                self.parts['before'].append((*entry, tp_dimension))
            elif name.startswith(plan['after_blocks']):
                self.parts['after'].append((*entry, tp_dimension))
        # A search over thousands of layouts asks for the same counts again and again.
        self._counts = functools.cache(self._counts_of_part)
        self._stages = functools.cache(self._stages_of_ranks)
        self._totals = functools.cache(self._totals_of_stages)
        self._sharded = functools.cache(self._sharded_of_stages)

    def counts(self, part, layout):
        """The Counts of a part under a layout."""
        return self._counts(part, *_degrees(layout))

    def _counts_of_part(self, part, tp, pp, ranks, ep, by_rows=False):
        total = Counts()
        for name, shape, tp_dimension in self.parts[part]:
            if pp == 1 and name in self.model.tied:
                continue  # a tied head has memory of its own only in a pipeline
            sizes, n_shards, shard_dimension = list(shape), ranks, 0
            if tp_dimension is not None:
                sizes[tp_dimension] = -(-sizes[tp_dimension] // tp)
            if part == 'experts':
                sizes[0] //= ep
                n_shards //= ep
                # FSDP2 shards as kilogpt/parallel/expert.py chooses, ZeRO-1 always by rows.
                if sizes[0] % n_shards > 0 and sizes[1] % n_shards == 0 and not by_rows:
                    shard_dimension = 1
            split = math.prod(sizes)
            length = -(-sizes[shard_dimension] // n_shards)  # of the longest chunk of torch.chunk
            sharded = length * (split // sizes[shard_dimension])
            is_matrix = len(shape) > 1
            total += Counts(split, sharded, sharded * n_shards, is_matrix * split, is_matrix * sharded)
        return total

    def totals(self, stages, layout):
        """(Counts of all parts of the stages, Counts of embeddings, last norm and head alone)."""
        return self._totals(stages, *_degrees(layout))

    def _totals_of_stages(self, stages, *degrees):
        total, ends = Counts(), Counts()
        for stage in stages:
            for part, count in stage.parts.items():
                counts = Counts(*(count * each for each in self._counts(part, *degrees)))
                total += counts
                if part in ('before', 'after'):
                    ends += counts
        return total, ends

    def sharded(self, stages, layout):
        """Elements of the stages on the fullest process: (all of them, those in the blocks' matrices)."""
        return self._sharded(stages, *_degrees(layout))

    def updated(self, stages, layout):
        """The same of the elements that a process updates: with ZeRO-1, its rows of whole parameters."""
        if layout.zero_stage != 1:
            return self.sharded(stages, layout)
        return self._sharded(stages, 1, 1, layout.dp_shard * layout.cp, 1, by_rows=True)

    def _sharded_of_stages(self, stages, *degrees, by_rows=False):
        total = in_block_matrices = 0
        for stage in stages:
            for part, count in stage.parts.items():
                counts = self._counts(part, *degrees, by_rows=by_rows)
                total += count * counts.sharded
                if part not in ('before', 'tables', 'after'):  # AdamW has these under Muon too
                    in_block_matrices += count * counts.sharded_in_matrices
        return total, in_block_matrices

    def stages(self, layout, block_size):
        """((Stage, ...) of each pipeline rank, ...)."""
        return self._stages(layout.pp, layout.pp_schedule, block_size)

    def _stages_of_ranks(self, pp, pp_schedule, block_size):
        layout = Layout(pp, pp=pp, pp_schedule=pp_schedule)
        lengths = [self.n_blocks + 2]
        if pp > 1:
            lengths = stage_lengths(self.model, layout.n_stages, block_size)
        stages, blocks = [], iter(zip(self.is_sparse, self.has_table, self.is_recurrent))
        for index, length in enumerate(lengths):
            is_first, is_last = index == 0, index == len(lengths) - 1
            n_blocks = length - is_first - is_last
            kinds = [*itertools.islice(blocks, n_blocks)]
            n_sparse, n_tables, n_recurrent = (sum(kind) for kind in zip(*kinds)) if kinds else (0, 0, 0)
            stages.append(Stage(is_first, n_blocks - n_sparse, n_sparse, n_tables, n_recurrent, is_last))
        stages_of_ranks = []
        for rank in range(pp):
            stages_of_ranks.append(tuple(stages[index] for index in layout.stages_of(rank)))
        return tuple(stages_of_ranks)


def _degrees(layout):
    """(tp, pp, number of ranks that shard a part, ep): everything that Counts depend on."""
    ranks = layout.dp_shard * layout.cp if layout.uses_fsdp else 1
    return layout.tp, layout.pp, ranks, layout.ep


def gathered_in_blocks(shape, layout, stages, splits_backward):
    """Elements of the blocks' parameters that FSDP2 has gathered at a time on a pipeline rank.

    With ZeRO-3 these are two blocks of each stage: one that runs, and the next one, which FSDP2 prefetches.
    Schedules that split the backward pass gather all blocks of one stage.
    """
    in_stages = []
    in_two_blocks = []
    for stage in stages:
        all_parts, ends = shape.totals((stage,), layout)
        in_stages.append(all_parts.gathered - ends.gathered)
        in_two_blocks.append(min(in_stages[-1], _gathered_in_two_blocks(shape, layout, stage)))
    if layout.zero_stage < 3:
        return sum(in_stages)
    rest = [whole - two_blocks for whole, two_blocks in zip(in_stages, in_two_blocks)]
    return sum(in_two_blocks) + (max(rest) if splits_backward else 0)


def _gathered_in_two_blocks(shape, layout, stage):
    """The most elements of two successive blocks of a stage, but the experts of only one."""
    dense, sparse, experts, table = (shape.counts(part, layout).gathered
                                     for part in ('dense', 'sparse', 'experts', 'tables'))
    of_mixers = [shape.counts(mixer, layout).gathered for mixer, count in stage.n_mixers.items() if count]
    two_blocks = [0]
    if stage.n_dense:
        two_blocks.append(2 * dense)
    if stage.n_sparse:
        two_blocks.append(2 * sparse + experts)
    n_tables = max(map(sum, itertools.pairwise(shape.has_table)), default=sum(shape.has_table))
    return max(two_blocks) + 2 * max(of_mixers, default=0) + min(n_tables, stage.n_tables) * table
