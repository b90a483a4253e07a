r"""The best layouts for a model on a cluster, with their memory and speed, from formulas (memory_model.py).

    python -m kilogpt.plan config/gpt_70b_3d.py --gpus=1024 --gpu=H100
    python -m kilogpt.plan config/train_gpt2.py --n_layer=24 --gpus=8 --gpu='RTX 4090' --price=0.4
    python -m kilogpt.plan config/llama_7b_tp_fsdp.py --gpus=64 --gpu=A100 --as_given
    python -m kilogpt.plan config/gpt_70b_3d.py --gpus=1024 --check --ranks=0,511,1023
    python -m kilogpt.plan --calibrate=here.json
    python -m kilogpt.plan config/quickstart.py --gpus=2 --gpu=here.json

Config files and keys are those of train.py, whose checks every layout here has passed. Memory is that of the
fullest GPU. docs/layouts.md says what was compared with measurements.
"""
import argparse
import contextlib
import dataclasses
import itertools
import json
import os
import re
import sys

import torch
from tqdm import tqdm

from data.datasets import DATA, read_meta
from kilogpt.plan import calibrate, memory_model, time_model
from kilogpt.configurator import config_of, exit_on_error
from kilogpt.script_runs import ROOT
from kilogpt.parallel.layout import SPLIT_BACKWARD, Layout, check_layout
from kilogpt.machines import GPUS, find_machine
from kilogpt.settings import check_settings
from model import GPT, GPTConfig

LAYOUT_KEYS = ('zero_stage', 'dp_replicate', 'tp', 'cp', 'pp', 'pp_schedule', 'ep')
SEARCHED_KEYS = (*LAYOUT_KEYS, 'batch_size', 'gradient_accumulation_steps', 'activation_checkpoint',
                 'cpu_offload')
DEFAULTS = dict(zero_stage=0, dp_replicate=1, tp=1, cp=1, pp=1, ep=1, pp_schedule='1f1b',
                cpu_offload=False)
# The schedules left out wait as long as one of these and hold no less.
SEARCHED_SCHEDULES = ('1f1b', 'interleaved1f1b', 'zbv')
MODES = ('none', 'selective', 'full')


class Planner:
    """Judges layouts of one config on a number of machines, and finds the fastest that fit.

    config: train.py's, with its dtype resolved. machine: a Machine. gpus: their number.
    tokens_per_iter: of an iteration on all GPUs together; 0 = those of the config. load_imbalance: rows of
    the busiest process among those that divide experts, as a multiple of their mean.
    """

    def __init__(self, config, machine, gpus, tokens_per_iter=0, load_imbalance=memory_model.LOAD_IMBALANCE):
        self.config = config | dict(load_imbalance=load_imbalance)
        self.machine, self.gpus = machine, gpus
        fields = {field.name: config[field.name] for field in dataclasses.fields(GPTConfig)
                  if field.name in config}
        vocab_size = read_meta(os.path.join(DATA, config['dataset']))['vocab_size']  # GPT-2's if not here
        with torch.device('meta'):
            self.model = GPT(GPTConfig(vocab_size=vocab_size, **fields), seed=None)
        self.shape = memory_model.Shape(self.model)
        self.flops_per_token = self.model.flops_per_token(config['block_size'])
        self.global_batch = config['batch_size'] * config['gradient_accumulation_steps']
        if tokens_per_iter:
            self.global_batch = max(1, round(tokens_per_iter / config['block_size']))
        self.tokens = self.global_batch * config['block_size']

    def layout(self, keys):
        """The Layout of keys that train.py accepts; ValueError with train.py's own sentence otherwise."""
        config = self.config | keys
        layout = Layout(self.gpus, *(config[key] for key in LAYOUT_KEYS))
        options = ('dtype', 'activation_checkpoint', 'cpu_offload', 'grad_compress', 'fp8', 'async_tp')
        check_layout(self.model, layout, block_size=config['block_size'],
                     **{key: config[key] for key in options})
        return layout

    def row(self, keys, layout=None, split=None):
        """What an iteration costs with these keys, a row of --json; ValueError as of `layout`."""
        layout = layout or self.layout(keys)
        config = self.config | keys
        if layout.pp > 1 and layout.pp_schedule in SPLIT_BACKWARD:
            config['compile'] = False  # as compiler.py does
        work = memory_model.Work.of(config, layout, self.machine.device, split)
        memory = memory_model.memory(self.shape, layout, work)
        memory['reserve'] = memory_model.reserve(sum(memory.values()), work)
        durations = time_model.seconds(self.shape, layout, work, self.machine)
        seconds = sum(durations.values())
        flops = self.flops_per_token * self.tokens / seconds
        hours = seconds * config['max_iters'] / 3600
        return dict(
            keys=keys, memory_gb=sum(memory.values()) / 1e9, ms=1e3 * seconds,
            tokens_per_sec=self.tokens / seconds, mfu=flops / (self.gpus * self.machine.peak),
            memory={part: count / 1e9 for part, count in memory.items()},
            milliseconds={part: 1e3 * value for part, value in durations.items()},
            dp=layout.dp, micro_batch=work.micro_batch, micro_steps=work.micro_steps,
            days=hours / 24, gpu_hours=hours * self.gpus)

    def row_as_given(self):
        """The row of the layout that the config names."""
        return self.row({key: self.config[key] for key in SEARCHED_KEYS})

    def rows_of(self, keys):
        """The rows of some layout with every micro-batch. Raises ValueError as `layout` does."""
        keys = DEFAULTS | dict(activation_checkpoint='none') | keys
        layout = self.layout(keys)
        return [self.row(keys | batch, layout, split) for batch, split in self._batches(layout)]

    def fits(self, row):
        return row['memory_gb'] <= self.machine.memory / 1e9

    def search(self):
        """The rows of all layouts that are worth a comparison, the fastest of those that fit first.

        Behind these are those that do not fit, those of least memory first.
        """
        rows = self._rows([dict(cpu_offload=False)])
        if not any(map(self.fits, rows)):
            rows += self._rows([dict(cpu_offload=True, zero_stage=stage) for stage in (2, 3)])
        return sorted(rows, key=lambda row: (0, row['ms'], row['memory_gb']) if self.fits(row)
                      else (1, row['memory_gb'], row['ms']))

    def _rows(self, constants):
        layouts = []
        for constant, keys in itertools.product(constants, self._degrees()):
            if constant.get('zero_stage', keys['zero_stage']) == keys['zero_stage']:
                with contextlib.suppress(ValueError):
                    layouts.append((keys | constant, self.layout(keys | constant)))
        rows = []
        for keys, layout in tqdm(layouts, 'layouts', delay=1, leave=False):
            for batch, split in self._batches(layout):
                for mode in MODES:
                    row = self.row(keys | batch | dict(activation_checkpoint=mode), layout, split)
                    if self.fits(row):
                        break  # to compute activations twice would only take longer
                rows.append(row)
        return rows

    def _degrees(self):
        """Keys of every product of degrees, within reason: tp in a node, replicas of whole nodes."""
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
        """(keys, (micro_batch, micro_steps)) of micro-batches of 1, 2, 4 ... sequences that a layout has."""
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


# --- what is printed ----------------------------------------------------------------------------------------

HEADER = (f'{"":<58} {"GB":>6} {"state":>6} {"activ.":>6} {"ms":>10} {"comm.":>6} {"bubble":>6} '
          f'{"tokens/s":>12} {"MFU":>6} {"days":>8}')


def layout_text(row):
    """A row's layout in words, as bench.py --layouts takes them."""
    keys = row['keys']
    words = [f'{key}{keys[key]}' for key in ('tp', 'cp', 'pp', 'ep') if keys[key] > 1]
    words += [f'dp{row["dp"]}', f'zero{keys["zero_stage"]}']
    if keys['dp_replicate'] > 1:
        words.append(f'rep{keys["dp_replicate"]}')
    if keys['pp'] > 1:
        words.append(keys['pp_schedule'])
    if keys['activation_checkpoint'] != 'none':
        words.append(keys['activation_checkpoint'])
    if keys['cpu_offload']:
        words.append('offload')
    return ' '.join([*words, f'batch_size={row["micro_batch"]}'])


def row_text(row, price):
    memory, times = row['memory'], row['milliseconds']
    state = memory['parameters'] + memory['gradients'] + memory['moments']
    activations = memory['activations'] + memory['logits']
    communication = sum(times[kind] for kind in ('tp', 'cp', 'ep', 'dp', 'pp'))
    text = (f'{layout_text(row):<58} {row["memory_gb"]:>6.1f} {state:>6.1f} {activations:>6.1f} '
            f'{row["ms"]:>10,.1f} {communication / row["ms"]:>6.1%} {times["bubble"] / row["ms"]:>6.1%} '
            f'{row["tokens_per_sec"]:>12,.0f} {row["mfu"]:>6.1%} {row["days"]:>8,.1f}')
    if price:
        text += f' {price * row["gpu_hours"]:>14,.0f}'
    return text


def reason_text(planner, keys, best):
    """Why a layout that people try first is not the one to take."""
    tp, per_node = keys.get('tp', 1), planner.machine.per_node
    try:
        rows = planner.rows_of(keys)
    except ValueError as error:
        return str(error).partition(':')[0]
    fitting = [row for row in rows if planner.fits(row)]
    if not fitting:
        least = min(row['memory_gb'] for row in rows)
        return f'needs {least:,.1f} GB of {planner.machine.memory / 1e9:.0f}, with one sequence at a time'
    fastest = min(fitting, key=lambda row: row['ms'])
    crossing = f'tp={tp} crosses nodes of {per_node}: ' if tp > per_node else ''
    slower = fastest['ms'] / best['ms']
    return f'{crossing}takes {slower:.2f} times as long' if slower >= 1.005 else 'is as fast'


def popular(planner):
    """{name: keys} of the layouts that people try first, for this number of GPUs."""
    per_node, gpus = min(planner.machine.per_node, planner.gpus), planner.gpus
    checkpointed = dict(zero_stage=3, activation_checkpoint='full')
    found = {'DDP': dict(zero_stage=0), 'ZeRO-1': dict(zero_stage=1),
             'FSDP, zero_stage 2': dict(zero_stage=2), 'FSDP, zero_stage 3': dict(zero_stage=3),
             'the same with full checkpointing': checkpointed}
    if gpus > per_node:
        found['a replica in each node (HSDP)'] = dict(zero_stage=3, dp_replicate=gpus // per_node)
    if gpus >= per_node > 1:
        found[f'tp={per_node}'] = dict(zero_stage=3, tp=per_node)
    if gpus >= 2 * per_node:
        found[f'tp={2 * per_node}'] = dict(zero_stage=3, tp=2 * per_node)
        found[f'tp={per_node} pp={gpus // per_node}'] = dict(zero_stage=2, tp=per_node, pp=gpus // per_node)
    if planner.model.config.mlp == 'moe' and per_node > 1:
        found[f'ep={per_node}'] = dict(zero_stage=2, ep=per_node)
    if gpus > 1:
        pp = min(gpus, 8)
        found[f'pp={pp}'] = dict(zero_stage=2, pp=pp)
    return found


def print_row(planner, row, price):
    """One layout, and each part of its memory and time."""
    print(HEADER + (f' {"price":>14}' if price else ''))
    print(row_text(row, price), end='\n\n')
    print_parts(row)
    if not planner.fits(row):
        print(f'\ndoes not fit into the {planner.machine.memory / 1e9:.0f} GB of {planner.machine.name}')


def print_parts(row):
    for unit, parts in (('GB', row['memory']), ('ms', row['milliseconds'])):
        print(f'  {unit}: ' + ', '.join(f'{part} {value:,.2f}' for part, value in parts.items() if value))


def print_plan(planner, rows, arguments, price):
    """The ten fastest, the command of the first, and why the usual layouts fall out."""
    print(HEADER + (f' {"price":>14}' if price else ''))
    for row in rows[:10]:
        print(row_text(row, price))
    best = rows[0]
    print('\nof the first:')
    print_parts(best)
    print(f'\n{command(planner, best, arguments)}\n\nwhat is often tried:')
    for name, keys in popular(planner).items():
        print(f'  {name:<34} {reason_text(planner, keys, best)}')


def command(planner, row, arguments):
    """The command line that runs a row, to paste."""
    per_node = min(planner.machine.per_node, planner.gpus)
    launcher = f'torchrun --standalone --nproc_per_node={per_node}'
    if planner.gpus > per_node:
        launcher = (f'torchrun --nnodes={planner.gpus // per_node} --nproc_per_node={per_node} '
                    '--rdzv_backend=c10d --rdzv_endpoint=FIRST_NODE:29500')
    changed = [f'--{key}={value}' for key, value in row['keys'].items() if planner.config[key] != value]
    lines = [f'{launcher} \\', f'    train.py {" ".join([*arguments, *changed])}']
    return '\n'.join(lines)


# --- the command --------------------------------------------------------------------------------------------

def parse_arguments():
    """(options of this command, arguments for train.py)"""
    parser = argparse.ArgumentParser(prog='python -m kilogpt.plan', description=__doc__, allow_abbrev=False,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add('--gpus', type=int, default=8, help='how many (8)')
    add('--gpu', default='H100', help=f'{", ".join(GPUS)}, or a file of --calibrate (H100)')
    add('--gpus_per_node', type=int, default=8, help='how many share fast links (8)')
    add('--link', type=float, default=400, help='Gb/s of the network between nodes, for each GPU (400)')
    add('--tokens_per_iter', type=float, default=0, help="tokens of an iteration on all GPUs (the config's)")
    add('--load_imbalance', type=float, default=memory_model.LOAD_IMBALANCE,
        help='of experts: rows of the busiest of the processes that divide them, over the mean '
             f'({memory_model.LOAD_IMBALANCE})')
    add('--price', type=float, default=0, help='of a GPU for an hour: adds the price of max_iters iterations')
    add('--as_given', action='store_true', help='judge the layout that config and keys name, alone')
    add('--json', action='store_true', help='print a JSON list of rows, with --check of reports')
    add('--check', action='store_true', help='run one iteration of some ranks on tensors without memory')
    add('--ranks', default='', metavar='R,R', help='those of --check (the first, a middle and the last one)')
    add('--calibrate', nargs='?', const='machine.json', metavar='FILE',
        help='measure this machine into a file that --gpu takes (machine.json)')
    options, arguments = parser.parse_known_args()
    if options.tokens_per_iter and (options.as_given or options.check):
        sys.exit("error: --as_given and --check take the config's batch: leave out --tokens_per_iter")
    if options.gpus < 1 or options.gpus_per_node < 1 or options.link <= 0 or options.tokens_per_iter < 0:
        sys.exit('error: --gpus and --gpus_per_node are at least 1, --link and --tokens_per_iter positive')
    if options.load_imbalance < 1:
        sys.exit(f'error: --load_imbalance is {options.load_imbalance}, but the busiest process has at least '
                 'the mean: set it to 1 or more')
    if not re.fullmatch(r'(\d+(,\d+)*)?', options.ranks):
        sys.exit(f'error: --ranks takes numbers such as 0,511,1023, but is {options.ranks!r}')
    if options.gpus > options.gpus_per_node and options.gpus % options.gpus_per_node:
        sys.exit(f'error: {options.gpus} GPUs are not whole nodes of {options.gpus_per_node}: '
                 'set --gpus or --gpus_per_node')
    return options, arguments


def check(planner, options, arguments):
    """Run an iteration of some ranks on tensors without memory, and print what each holds and sends."""
    with exit_on_error():
        from kilogpt.plan import dry_run  # slow
        ranks = [int(rank) for rank in options.ranks.split(',')] if options.ranks else None
        arguments = [*arguments, f'--dtype={planner.config["dtype"]}']  # the GPU's
        results = dry_run.dry_run(arguments, options.gpus, ranks)
    if options.json:
        print(json.dumps(results))
        return
    planner.config['compile'] = False  # as the dry run
    memory = planner.row_as_given()['memory']
    foretold = {part: 1e9 * count for part, count in memory.items() if part != 'reserve'}
    print('\n'.join(dry_run.table(results, foretold)))


def main():
    options, arguments = parse_arguments()
    with exit_on_error():
        if options.calibrate:
            calibrate.measure_into(options.calibrate)
            return
        config = config_of(os.path.join(ROOT, 'train.py'), arguments)
        check_settings(config)
        machine = find_machine(options.gpu, options.link, options.gpus_per_node)
        if config['dtype'] == 'auto':
            config['dtype'] = machine.dtype
        planner = Planner(config, machine, options.gpus, options.tokens_per_iter, options.load_imbalance)
        is_given = options.as_given or options.check
        rows = [planner.row_as_given()] if is_given else planner.search()
        if not rows:
            raise ValueError(f'no layout of {options.gpus} GPUs divides this model and '
                             f'{planner.global_batch} sequences: set --gpus or --tokens_per_iter')
    if options.check:
        check(planner, options, arguments)
        return
    if options.json:
        print(json.dumps([row for row in rows if planner.fits(row)] or rows[:1]))
        return
    if options.as_given:
        print_row(planner, rows[0], options.price)
        return
    if not planner.fits(rows[0]):
        sys.exit(f'error: no layout of {options.gpus} × {machine.name} fits; '
                 f'closest is {layout_text(rows[0])}, which needs {rows[0]["memory_gb"]:,.1f} GB of '
                 f'{machine.memory / 1e9:.0f}: take more GPUs, or GPUs with more memory')
    print_plan(planner, rows, arguments, options.price)
