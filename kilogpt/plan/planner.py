"""Predict memory and time of layouts for one config, and search for the fastest layouts that fit.

`Planner` works by formulas: memory_model.py for memory, time_model.py for time. __main__.py prints its rows.
"""
import contextlib
import itertools

import torch
from tqdm import tqdm

from data.datasets import dataset_folder, find_shards, find_sources, read_meta
from data.mixtures import parse_mixture
from data.splits import open_training_split
from kilogpt.parallel.layout import CHECKED_KEYS, LAYOUT_KEYS, SPLIT_BACKWARD, Layout, check_layout
from kilogpt.plan import memory_model, time_model
from kilogpt.plan.models import model_config
from kilogpt.plan.shape import Shape
from kilogpt.run.metrics import flops_per_token
from model import GPT

SEARCHED_KEYS = (*LAYOUT_KEYS, 'batch_size', 'gradient_accumulation_steps', 'activation_checkpoint',
                 'cpu_offload')
DEFAULTS = dict(zero_stage=0, dp_replicate=1, tp=1, cp=1, pp=1, ep=1, pp_schedule='1f1b',
                cpu_offload=False)
# Each schedule that is left out waits as long as one of these, and holds no less memory.
SEARCHED_SCHEDULES = ('1f1b', 'interleaved1f1b', 'zbv')
MODES = ('none', 'selective', 'full')


class Planner:
    """Predicts the cost of layouts of one config on a number of GPUs, and finds the fastest layouts that fit.

    config: the values of train.py's keys, dtype resolved. machine: a Machine. gpus: number of GPUs.
    tokens_per_iter: tokens of an iteration on all GPUs together; 0 = as in the config. load_imbalance: among
    the processes that share the experts, the rows of the busiest one over their mean.
    """

    def __init__(self, config, machine, gpus, tokens_per_iter=0, load_imbalance=memory_model.LOAD_IMBALANCE):
        # Without the dataset, documents are as long as sequences, and the vocabulary is GPT-2's.
        folders = [dataset_folder(name) for name in parse_mixture(config['dataset'])]
        meta = read_meta(folders[0])
        lengths = [config['block_size']]
        if config['documents'] != 'stream' and all(find_shards(folder, 'train') for folder in folders):
            sources = find_sources(config['dataset'])
            lengths = open_training_split(sources, meta['vocab_size'], config).document_lengths()
        self.machine, self.gpus = machine, gpus
        with torch.device('meta'):
            self.model = GPT(model_config(config), seed=None)
        self.shape = Shape(self.model)
        seen = self.model.config.mean_seen(lengths)  # once, and not for each layout of a search
        self.config = config | dict(load_imbalance=load_imbalance, seen=seen)
        self.flops_per_token = flops_per_token(self.model, lengths)
        self.global_batch = config['batch_size'] * config['gradient_accumulation_steps']
        if tokens_per_iter:
            self.global_batch = max(1, round(tokens_per_iter / config['block_size']))
        self.tokens = self.global_batch * config['block_size']

    def layout(self, keys):
        """The Layout of keys, checked as by train.py. ValueError with train.py's message if it is refused."""
        config = self.config | keys
        layout = Layout.of(self.gpus, config)
        check_layout(self.model, layout, **{key: config[key] for key in (*CHECKED_KEYS, 'dtype')})
        return layout

    def row(self, keys, layout=None, split=None):
        """The cost of an iteration with these keys, a row of --json. ValueError as in `layout`."""
        layout = layout or self.layout(keys)
        config = self.config | keys
        if layout.pp > 1 and layout.pp_schedule in SPLIT_BACKWARD:
            config['compile'] = False  # compiler.py refuses to compile with these schedules
        work = memory_model.Work.of(config, layout, self.machine.device, split)
        memory = memory_model.memory(self.shape, layout, work)
        memory['reserve'] = memory_model.reserve(memory, work, self.shape, layout)
        durations = time_model.seconds(self.shape, layout, work, self.machine)
        seconds = sum(durations.values())
        flops = self.flops_per_token * self.tokens / seconds
        on_gpu = self.machine.device != 'cpu'
        hours = seconds * config['max_iters'] / 3600
        return dict(
            keys=keys, memory_gb=sum(memory.values()) / 1e9, ms=1e3 * seconds,
            tokens_per_sec=self.tokens / seconds, mfu=flops / (self.gpus * self.machine.peak) if on_gpu else None,
            memory={part: count / 1e9 for part, count in memory.items()},
            milliseconds={part: 1e3 * value for part, value in durations.items()},
            dp=layout.dp, micro_batch=work.micro_batch, micro_steps=work.micro_steps,
            days=hours / 24, gpu_hours=hours * self.gpus)

    def row_as_given(self):
        """The row of the layout that the config names."""
        return self.row({key: self.config[key] for key in SEARCHED_KEYS})

    def rows_of(self, keys):
        """The rows of one layout with each size of micro-batch. ValueError as in `layout`."""
        keys = DEFAULTS | dict(activation_checkpoint='none') | keys
        layout = self.layout(keys)
        return [self.row(keys | batch, layout, split) for batch, split in self._batches(layout)]

    def fits(self, row):
        return row['memory_gb'] <= self.machine.memory / 1e9

    def search(self):
        """The rows of all layouts worth comparing: first those that fit, from the fastest to the slowest.

        The others follow, from the least memory to the most.
        """
        rows = self._rows([dict(cpu_offload=False)])
        if not any(map(self.fits, rows)):
            rows += self._rows([dict(cpu_offload=True, zero_stage=stage) for stage in (2, 3)])
        fitting = [row for row in rows if self.fits(row)]
        too_large = [row for row in rows if not self.fits(row)]
        return [*sorted(fitting, key=lambda row: (row['ms'], row['memory_gb'])),
                *sorted(too_large, key=lambda row: (row['memory_gb'], row['ms']))]

    def _rows(self, constants):
        layouts = []
        for constant, keys in itertools.product(constants, self._degrees()):
            if constant.get('zero_stage', keys['zero_stage']) == keys['zero_stage']:
                with contextlib.suppress(ValueError):
                    layouts.append((keys | constant, self.layout(keys | constant)))
        rows = []
        for keys, layout in tqdm(layouts, 'layouts', delay=1, leave=False, disable=None):
            for batch, split in self._batches(layout):
                for mode in MODES:
                    row = self.row(keys | batch | dict(activation_checkpoint=mode), layout, split)
                    if self.fits(row):
                        break  # more recomputation would only take longer
                rows.append(row)
        return rows

    def _degrees(self):
        """Yield the keys of every product of degrees, with tp within a node and replicas of whole nodes."""
        per_node = self.machine.per_node
        for tp, cp, pp in itertools.product(divisors(min(self.gpus, per_node)), divisors(self.gpus),
                                            divisors(self.gpus)):
            if self.gpus % (tp * cp * pp):
                continue
            dp = self.gpus // (tp * cp * pp)
            replicas = {1} | {dp * tp * cp // (per_node * nodes) for nodes in (1, 4)
                              if dp * tp * cp % (per_node * nodes) == 0}
            degrees = dict(tp=tp, cp=cp, pp=pp, ep=1)
            if tp * pp == 1:
                yield from (degrees | dict(zero_stage=stage, dp_replicate=1) for stage in (0, 1))
            schedules = SEARCHED_SCHEDULES if pp > 1 else ['1f1b']
            experts = divisors(self.model.config.n_experts) if self.model.config.mlp == 'moe' else [1]
            for stage, replicate, schedule, ep in itertools.product((2, 3), replicas, schedules, experts):
                if dp * cp // replicate % ep == 0:
                    yield degrees | dict(zero_stage=stage, dp_replicate=replicate, ep=ep,
                                         pp_schedule=schedule)

    def _batches(self, layout):
        """Yield (keys, (micro_batch, micro_steps)) for possible micro-batches of 1, 2, 4, ... sequences."""
        for exponent in range(10):
            batch_size = 2 ** exponent
            if self.global_batch % batch_size:
                break
            split = layout.split_batch(self.global_batch, batch_size)
            if split[0] < batch_size:
                break
            micro_batches = self.global_batch // batch_size
            yield dict(batch_size=batch_size, gradient_accumulation_steps=micro_batches), split


def divisors(number):
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]
