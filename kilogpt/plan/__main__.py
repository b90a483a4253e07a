r"""Rank the layouts for a model on a cluster by speed, with their memory, from formulas (memory_model.py).

    python -m kilogpt.plan config/gpt_70b_3d.py --gpus=1024 --gpu=H100
    python -m kilogpt.plan config/train_gpt2.py --n_layer=24 --gpus=8 --gpu='RTX 4090' --price=0.4
    python -m kilogpt.plan config/llama_7b_tp_fsdp.py --gpus=64 --gpu=A100 --as_given
    python -m kilogpt.plan config/gpt_70b_3d.py --gpus=1024 --check --ranks=0,511,1023
    python -m kilogpt.plan --calibrate=here.json
    python -m kilogpt.plan config/quickstart.py --gpus=2 --gpu=here.json

Config files and keys are those of train.py, and every layout shown has passed train.py's checks. Memory is
that of the fullest GPU. docs/layouts.md says which figures were compared with measurements.
"""
import argparse
import contextlib
import json
import os
import re
import sys
import tempfile
from unittest import mock

import torch

from kilogpt.configurator import announced, config_of, exit_on_error
from kilogpt.keys import initial_weights
from kilogpt.launch_train import ROOT
from kilogpt.machines import GPUS, find_machine
from kilogpt.plan import calibrate, failures
from kilogpt.plan.memory_model import LOAD_IMBALANCE
from kilogpt.plan.models import arguments_of_weights, missing_dataset
from kilogpt.plan.planner import Planner
from kilogpt.run.metrics import describe_size
from kilogpt.settings import check_settings

# --- printing -----------------------------------------------------------------------------------------------

HEADER = (f'{"":<58} {"GB":>6} {"state":>6} {"activ.":>6} {"ms":>10} {"comm.":>6} {"bubble":>6} '
          f'{"tokens/s":>12} {"MFU":>6} {"days":>8}')


def layout_text(row):
    """A row's layout in the words that bench.py --layouts accepts."""
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
    mfu = '-' if row['mfu'] is None else f'{row["mfu"]:.1%}'
    text = (f'{layout_text(row):<58} {row["memory_gb"]:>6.1f} {state:>6.1f} {activations:>6.1f} '
            f'{row["ms"]:>10,.1f} {communication / row["ms"]:>6.1%} {times["bubble"] / row["ms"]:>6.1%} '
            f'{row["tokens_per_sec"]:>12,.0f} {mfu:>6} {row["days"]:>8,.1f}')
    if price:
        text += f' {price * row["gpu_hours"]:>14,.0f}'
    return text


def reason_text(planner, keys, best):
    """Why a popular layout is not the best one."""
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
    """{name: keys} of the layouts that people often try first, for this number of GPUs."""
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
    """Print one layout with each part of its memory and time."""
    print(HEADER + (f' {"price":>14}' if price else ''))
    print(row_text(row, price), end='\n\n')
    print_parts(row)
    if not planner.fits(row):
        print(f'\ndoes not fit into the {planner.machine.memory / 1e9:.0f} GB of {planner.machine.name}')


def print_parts(row):
    for unit, parts in (('GB', row['memory']), ('ms', row['milliseconds'])):
        print(f'  {unit}: ' + ', '.join(f'{part} {value:,.2f}' for part, value in parts.items() if value))


def print_plan(planner, rows, arguments, price):
    """Print the ten fastest layouts, the command of the first, and why popular layouts are not the best."""
    print(HEADER + (f' {"price":>14}' if price else ''))
    for row in rows[:10]:
        print(row_text(row, price))
    best = rows[0]
    print(f'\nthe first in detail, on {planner.gpus} × {planner.machine.name}:')
    print_parts(best)
    print(f'\n{command(planner, best, arguments)}\n\npopular layouts:')
    for name, keys in popular(planner).items():
        print(f'  {name:<34} {reason_text(planner, keys, best)}')


def print_failures(row, options):
    """Print what failures of nodes cost in a row's layout, with --mtbf."""
    if options.mtbf:
        print('\n' + '\n'.join(failures.describe(row, options.gpus, options.gpus_per_node, options)))


def command(planner, row, arguments):
    """The command line that trains with a row's layout."""
    per_node = min(planner.machine.per_node, planner.gpus)
    launcher = f'torchrun --standalone --nproc_per_node={per_node}'
    if planner.gpus > per_node:
        launcher = (f'torchrun --nnodes={planner.gpus // per_node} --nproc_per_node={per_node} '
                    '--rdzv_backend=c10d --rdzv_endpoint=FIRST_NODE:29500')
    changed = [f'--{key}={value}' for key, value in row['keys'].items() if planner.config[key] != value]
    lines = [f'{launcher} \\', f'    train.py {" ".join([*arguments, *changed])}']
    return '\n'.join(lines)


# --- command line -------------------------------------------------------------------------------------------

def parse_arguments():
    """(options of this command, arguments for train.py)."""
    parser = argparse.ArgumentParser(prog='python -m kilogpt.plan', description=__doc__, allow_abbrev=False,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add('--gpus', type=int, default=8, help='number of GPUs (8)')
    add('--gpu', default='H100', help=f'{", ".join(GPUS)}, or a file written by --calibrate or by '
        'launch/bandwidth.py --save (H100)')
    add('--gpus_per_node', type=int, default=8, help='number of GPUs that share fast links (8)')
    add('--link', type=float,
        help='Gb/s of the network between nodes, for each GPU (400, or as a file of several nodes has it)')
    add('--tokens_per_iter', type=float, default=0,
        help='tokens of an iteration on all GPUs together (as in the config)')
    add('--load_imbalance', type=float, default=LOAD_IMBALANCE,
        help='rows of the busiest process over the mean of the processes that share the experts '
             f'({LOAD_IMBALANCE})')
    add('--price', type=float, default=0,
        help='price of a GPU for an hour: adds a column with the price of max_iters iterations')
    add('--mtbf', type=float, default=0,
        help='mean hours between failures of a node: adds the best time between saves, and what failures cost')
    add('--save_seconds', type=float, default=2, help='with --mtbf: for how long a save holds training (2)')
    add('--restart_seconds', type=float, default=180,
        help='with --mtbf: from a failure until the processes train again (180)')
    add('--as_given', action='store_true', help='predict only the layout given by config and keys')
    add('--json', action='store_true', help='print a JSON list of rows (with --check: of reports)')
    add('--check', action='store_true', help='run one iteration of some ranks on tensors without memory')
    add('--ranks', default='', metavar='R,R',
        help='ranks for --check (the first, a middle and the last rank)')
    add('--calibrate', nargs='?', const='machine.json', metavar='FILE',
        help='measure this machine and write a file for --gpu (machine.json)')
    options, arguments = parser.parse_known_args()
    if options.tokens_per_iter and (options.as_given or options.check):
        sys.exit("error: --as_given and --check use the config's batch: leave out --tokens_per_iter")
    if options.gpus < 1 or options.gpus_per_node < 1 or (options.link or 1) <= 0 or options.tokens_per_iter < 0:
        sys.exit('error: --gpus and --gpus_per_node must be at least 1, --link positive, and '
                 '--tokens_per_iter not negative')
    if options.mtbf < 0 or options.save_seconds <= 0 or options.restart_seconds < 0:
        sys.exit('error: --mtbf and --restart_seconds cannot be negative, and --save_seconds must be positive')
    if options.load_imbalance < 1:
        sys.exit(f'error: --load_imbalance is {options.load_imbalance}, but the busiest process has at least '
                 'the mean: set it to 1 or more')
    if not re.fullmatch(r'(\d+(,\d+)*)?', options.ranks):
        sys.exit(f'error: --ranks takes numbers such as 0,511,1023, but is {options.ranks!r}')
    if options.gpus > options.gpus_per_node and options.gpus % options.gpus_per_node:
        sys.exit(f'error: {options.gpus} GPUs do not fill whole nodes of {options.gpus_per_node}: '
                 'set --gpus or --gpus_per_node')
    return options, arguments


def config_on(machine, arguments):
    """train.py's config as config files give it on a Machine: they may ask PyTorch for its device."""
    has_gpu = machine.device == 'cuda'
    answers = dict(is_available=has_gpu, device_count=has_gpu * machine.per_node, get_device_name=machine.name,
                   is_bf16_supported=machine.dtype == 'bfloat16')
    with contextlib.ExitStack() as patches:
        for name, answer in answers.items():
            patches.enter_context(mock.patch.object(torch.cuda, name, lambda *_, answer=answer: answer))
        config = config_of(os.path.join(ROOT, 'train.py'), arguments)
    if config['dtype'] == 'auto':
        config['dtype'] = machine.dtype
    check_settings(config)
    return config


def check(planner, options, config):
    """Run one iteration of some ranks on tensors without memory; print what each rank holds and sends."""
    with exit_on_error(), tempfile.NamedTemporaryFile('w', suffix='.json') as file:
        from kilogpt.plan import dry_run  # here, since the import takes seconds
        ranks = [int(rank) for rank in options.ranks.split(',')] if options.ranks else None
        json.dump(config, file)
        file.flush()
        with announced('running an iteration on tensors without memory'):
            results = dry_run.dry_run([file.name], options.gpus, ranks)
    if options.json:
        print(json.dumps(results))
        return
    planner.config |= dict(compile=False, async_checkpoint=False)  # the dry run neither compiles nor saves
    memory = planner.row_as_given()['memory']
    predicted = {part: 1e9 * count for part, count in memory.items() if part != 'reserve'}
    print('\n'.join(dry_run.table(results, predicted)))


def main():
    options, arguments = parse_arguments()
    with exit_on_error():
        if options.calibrate:
            calibrate.measure_into(options.calibrate)
            return
        machine = find_machine(options.gpu, options.link, options.gpus_per_node)
        config = config_on(machine, arguments)
        weights = initial_weights(config['init_from'])
        if arguments_of_weights(weights):
            print(f'the model is that of {weights}', file=sys.stderr)
        elif weights:
            print(f'init_from is {config["init_from"]!r}, which is not here: the model is that of the keys',
                  file=sys.stderr)
        elif missing := missing_dataset(config):
            print(f'{missing} is not prepared: the vocabulary is GPT-2\'s', file=sys.stderr)
        planner = Planner(dict(config), machine, options.gpus, options.tokens_per_iter, options.load_imbalance)
        is_given = options.as_given or options.check
        rows = [planner.row_as_given()] if is_given else planner.search()
        if not rows:
            raise ValueError(f'no layout on {options.gpus} GPUs divides this model and '
                             f'{planner.global_batch} sequences: set --gpus or --tokens_per_iter')
    if options.check:
        check(planner, options, config)
        return
    if options.json:
        print(json.dumps([row for row in rows if planner.fits(row)] or rows[:1]))
        return
    sequences, length = planner.global_batch, config['block_size']
    print(f'{describe_size(planner.model)} on {planner.gpus} × {machine.name}, {sequences:,} sequences of {length:,} '
          f'tokens an iteration, {config["dtype"]}\n')
    if options.as_given:
        print_row(planner, rows[0], options.price)
        print_failures(rows[0], options)
        return
    if not planner.fits(rows[0]):
        sys.exit(f'error: no layout on {options.gpus} × {machine.name} fits; '
                 f'the closest is {layout_text(rows[0])}, which needs {rows[0]["memory_gb"]:,.1f} GB of '
                 f'{machine.memory / 1e9:.0f}: use more GPUs, or GPUs with more memory')
    print_plan(planner, rows, arguments, options.price)
    print_failures(rows[0], options)


if __name__ == '__main__':
    main()
