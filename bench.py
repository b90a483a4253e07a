"""Measure train.py by launching it: tables of speed and memory, and the parts of an iteration's time.

    python bench.py config/train_gpt2.py --random_tokens=50257 --sweep="batch_size=8,16 compile=True,False"
    python bench.py config/train_gpt2.py --random_tokens=50257 --layouts="dp8; zero3 dp8; tp2 pp2 dp2 zbv"
    python bench.py config/train_gpt2.py --random_tokens=50257 --layouts="dp8; zero3 dp8" --gpu=H100
    python bench.py config/train_gpt2.py --random_tokens=50257 --scaling=1,2,4,8 --zero_stage=2
    python bench.py config/train_gpt2.py --random_tokens=50257 --saves=10
    python bench.py config/quickstart.py --profile

All arguments that are not options listed below are passed to train.py.

A layout is a list of words: dpN, tpN, cpN, ppN, epN (number of processes of each kind), zeroN (zero_stage),
repN (dp_replicate), a pp_schedule, full or selective (activation_checkpoint), offload (cpu_offload), bf16 or
powersgd (grad_compress), and key=value for any other key. A layout with dpN has dp × tp × cp × pp processes,
other layouts have --nproc_per_node. A layout's row has the main process's memory. The line below the row has
the bytes that the main process communicates in an iteration: each collective counts with its whole tensor,
whatever its algorithm sends. "bubble" is the idle share of the pipeline: by formula for equal stages, then
measured on the main process without optimizer and data (on a CPU, Python between operators counts as idle).

With --gpu, a layout's row also has the memory and the time predicted by kilogpt.plan; "ratio" is measured
over predicted. On a CPU, the measured memory includes about 0.4 GB for Python and PyTorch.

MFU is the model's floating-point operations as a share of a GPU's peak, the maker's figure. CPUs have none.
With --profile, the row of one process also has a roofline: the time of its products at that peak (on a CPU at
the rate of the fastest of three products), and the time of its reads and writes (counted by
kilogpt/plan/time_model.py) at the bandwidth of a copy.
"""
import argparse
import functools
import itertools
import json
import math
import os
import re
import shutil
import statistics
import sys
import tempfile
from collections.abc import Callable
from typing import NamedTuple

from data.make.prepare import write_random_tokens
from kilogpt import launch_train
from kilogpt.configurator import expect_closed_pipe
from kilogpt.machines import Machine, write_machine
from kilogpt.plan.time_model import bubble


GPT2_VOCABULARY = 50257


def parse_sweep(text):
    """'batch_size=8,16 compile=True,False' -> the four combinations, each a list of train.py arguments."""
    axes = []
    for axis in text.split():
        key, _, values = axis.partition('=')
        if not key or not values:
            sys.exit(f'error: --sweep takes key=value,value ... separated by spaces, but has {axis!r}')
        axes.append([f'--{key}={value}' for value in values.split(',')])
    return [list(combination) for combination in itertools.product(*axes)]


def measure(arguments, processes, iters, warmup, profile=False, trace=None, gpu='', **keys):
    """A row: medians over `iters` iterations after `warmup`. RuntimeError with the run's error if it fails.

    profile: add the parts of an iteration's time and its bytes. trace: path where the trace is kept.
    gpu: add the predictions of kilogpt.plan with this --gpu. keys: further settings.
    """
    if profile:
        warmup = max(warmup, 9)  # tracing slows down iterations 6 to 9
    with tempfile.TemporaryDirectory() as out_dir:
        run = launch_train.train(arguments, out_dir, processes, max_iters=warmup + iters, profile=profile,
                                **keys)
        row = {key: run.median(key, warmup) for key in ('tokens_per_sec', 'dt_ms', 'mfu', 'mem_gb')}
        row['gradient_accumulation_steps'] = run.config['gradient_accumulation_steps']
        row['stalls_ms'] = run.stalls_ms[:-1]  # without the save at the end, which always blocks
        if profile:
            row |= profile_row(run)
        if gpu:
            row |= launch_train.predict(arguments, processes, gpu)
        if trace:
            row['trace'] = shutil.move(os.path.join(out_dir, 'trace.json'), trace)
            if processes == 1:
                row |= roofline(arguments, run.config)
    return row


def profile_row(run):
    """The entries that --profile adds to a row."""
    with open(os.path.join(run.out_dir, 'profile.json'), encoding='utf-8') as file:
        profiled = json.load(file)
    milliseconds = profiled['milliseconds']
    row = dict(profile_ms=milliseconds, bytes=profiled['bytes'])
    row['mem_gb'] = run.train_lines[2]['mem_gb']  # before tracing, which needs memory itself
    if run.config['pp'] > 1:
        micro_steps = int(re.search(r'(\d+) micro-step', run.stdout)[1])
        row['bubble_theory'] = bubble(run.config['pp'], micro_steps, run.config['pp_schedule'])
        in_pipeline = sum(milliseconds.values()) - milliseconds['optimizer'] - milliseconds['data']
        row['bubble_measured'] = (milliseconds['idle'] + milliseconds['collectives']) / in_pipeline
    return row


def roofline(arguments, config):
    """The time of an iteration on one process at this machine's best rates (Williams et al. 2009).

    arguments: of train.py. config: of the run. Returns products_ms, the time of matrix products and attention
    at products_rate (FLOP/s), and memory_ms, the time of all other reads and writes at memory_rate (bytes/s);
    {} if the device's peak is unknown.
    """
    # These modules import torch, which takes seconds.
    from kilogpt.parallel.processes import find_device, resolve_dtype
    from kilogpt.plan import calibrate
    from kilogpt.run.metrics import peak_flops
    device = find_device(config['device'])
    dtype = resolve_dtype(config['dtype'], device)
    peak = peak_flops(device, dtype)
    if device.type == 'cpu':
        peak = max(calibrate.best_flops(dtype) for _ in range(5))  # other programs only make it slower
    if not peak:
        return {}
    bandwidth = max(calibrate.memory_rate(device) for _ in range(4))

    def predicted_ms(rate):
        """Milliseconds of an iteration if memory has a bandwidth of `rate` bytes/s."""
        machine = Machine('the best rates', device.type, memory=math.inf, dtype=dtype, peak=peak, launch=0.0,
                          products={name: [(1, peak)] for name in (dtype, 'float8')},
                          attention={dtype: peak}, bandwidth=rate, node_link=rate, network=rate)
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, 'machine.json')
            write_machine(machine, path)
            return launch_train.predict(arguments, 1, path)['predicted_ms']

    products_ms = predicted_ms(math.inf)
    return dict(products_ms=products_ms, products_rate=peak, memory_ms=predicted_ms(bandwidth) - products_ms,
                memory_rate=bandwidth)


# The modes. Each yields (label, row), where the row is a dict, with 'error' if the measurement failed.
# run(arguments, processes) is `measure` with its options already set.

def sweep(run, arguments, layouts, combinations, keep_traces):
    """Yield speed and memory of each layout with each combination of settings."""
    for number, (layout, combination) in enumerate(itertools.product(layouts, combinations)):
        name, processes, layout_arguments = layout
        settings = [*layout_arguments, *combination]
        row = dict(layout=name, processes=processes, arguments=settings)
        trace = f'trace-{number}.json' if keep_traces else None
        try:
            row |= run([*arguments, *settings], processes, trace=trace)
        except RuntimeError as error:
            row['error'] = str(error)
        yield f'{name} {" ".join(combination).replace("--", "")}'.strip() or 'as given', row


def scaling(run, arguments, sizes):
    """Yield weak scaling (same batch for each process) and strong scaling (same global batch).

    Efficiency is tokens per second and process, relative to the smallest number of processes.
    """
    first = None
    for processes in sizes:
        row = dict(processes=processes)
        try:
            strong = weak = run(arguments, processes)
            if processes > 1:
                accumulation = processes * strong['gradient_accumulation_steps']
                weak = run([*arguments, f'--gradient_accumulation_steps={accumulation}'], processes)
            speeds = dict(weak=weak['tokens_per_sec'], strong=strong['tokens_per_sec'])
            first = first or {kind: speed / processes for kind, speed in speeds.items()}
            for kind, speed in speeds.items():
                row[f'{kind}_tokens_per_sec'] = speed
                row[f'{kind}_efficiency'] = speed / processes / first[kind]
        except RuntimeError as error:
            row['error'] = str(error)
        yield str(processes), row


def saves(run, arguments, processes, interval):
    """Yield how long training waits for a save every `interval` iterations, blocking or not."""
    blocking = None
    for background in (False, True):
        row = dict(async_checkpoint=background)
        try:
            measured = run(arguments, processes, keep_checkpoints=1, save_interval=interval,
                           async_checkpoint=background)
            stalls = measured['stalls_ms']
            if len(stalls) < 2:
                raise RuntimeError(f'only {len(stalls)} save(s) before the last one: '
                                   f'set --iters to at least {3 * interval}')
            first, later = stalls[0], statistics.median(stalls[1:])
            blocking = blocking or (first, later)
            row |= dict(first_ms=first, later_ms=later, first_ratio=first / blocking[0],
                        later_ratio=later / blocking[1], dt_ms=measured['dt_ms'])
        except RuntimeError as error:
            row['error'] = str(error)
        yield str(background), row


def sweep_text(row):
    """A row as text, with the lines that a profile adds below it."""
    mfu = '-' if row['mfu'] is None else f'{row["mfu"]:.1%}'
    lines = [f'{row["tokens_per_sec"]:>12,.0f} {row["dt_ms"]:>10.2f} {mfu:>7} {row["mem_gb"]:>8.2f}']
    if row['layout']:
        shares = '-'
        if 'bubble_theory' in row:
            shares = f'{row["bubble_theory"]:.1%} / {row["bubble_measured"]:.1%}'
        lines[0] += f' {shares:>15}'
    if 'predicted_gb' in row:
        for measured, predicted in (('mem_gb', 'predicted_gb'), ('dt_ms', 'predicted_ms')):
            lines[0] += f' {row[predicted]:>12,.2f} {row[measured] / row[predicted]:>7.2f}'
    if 'bytes' in row:
        moved = [f'{name} {count / 1e6:,.2f}MB' for name, count in row['bytes'].items() if count >= 5000]
        lines.append(f'    communicates {", ".join(moved) or "almost nothing"}')
    if 'trace' in row:
        total = sum(row['profile_ms'].values())
        for category, value in row['profile_ms'].items():
            lines.append(f'    {category:<14}{value:>10.2f}ms {100 * value / total:>6.1f}%')
        lines.append(f'    of {total:.2f}ms per iteration; '
                     f'open {row["trace"]} in https://ui.perfetto.dev or chrome://tracing')
    if 'products_ms' in row:
        lines.append(
            f'    roofline: products {row["products_ms"]:.2f}ms at {row["products_rate"] / 1e12:.2f} '
            f'TFLOP/s, memory {row["memory_ms"]:.2f}ms at {row["memory_rate"] / 1e9:.1f} GB/s')
    return '\n'.join(lines)


def scaling_text(row):
    return ' '.join(f'{row[f"{kind}_tokens_per_sec"]:>14,.0f} {row[f"{kind}_efficiency"]:>11.1%}'
                    for kind in ('weak', 'strong'))


def saves_text(row):
    return (f'{row["first_ms"]:>12.1f} {row["first_ratio"]:>7.1%} {row["later_ms"]:>12.1f} '
            f'{row["later_ratio"]:>7.1%} {row["dt_ms"]:>10.2f}')


class Table(NamedTuple):
    """The format of a mode's rows."""
    header: str
    label_format: str
    text: Callable  # the text of a row, to the right of its label


SWEEP = Table(f'{"":<48} {"tokens/s":>12} {"ms/iter":>10} {"MFU":>7} {"GB":>8}', '<48', sweep_text)
LAYOUTS = SWEEP._replace(header=f'{SWEEP.header} {"bubble":>15}')
PREDICTED = LAYOUTS._replace(header=f'{LAYOUTS.header} {"GB predicted":>12} {"ratio":>7} '
                                    f'{"ms predicted":>12} {"ratio":>7}')
SCALING = Table(f'{"processes":>9} {"weak":>14} {"efficiency":>11} {"strong":>14} {"efficiency":>11}'
                '   (tokens/s)', '>9', scaling_text)
SAVES = Table(f'{"async_checkpoint":<16} {"first save":>12} {"ratio":>7} {"later saves":>12} {"ratio":>7} '
              f'{"ms/iter":>10}   (training waits, ms)', '<16', saves_text)


def print_rows(rows, table, as_json):
    """Print each row as soon as it is measured; returns whether all measurements succeeded."""
    complete = True
    if not as_json:
        print(table.header, flush=True)
    for label, row in rows:
        complete = complete and 'error' not in row
        if as_json:
            print(json.dumps(row), flush=True)
        else:
            print(f'{label:{table.label_format}} {row.get("error") or table.text(row)}', flush=True)
    return complete


def yes_or_no(text):
    """The value of an option that nanoGPT writes as --profile=True."""
    if text.lower() not in ('true', 'false'):
        raise argparse.ArgumentTypeError(f'{text!r} is neither True nor False')
    return text.lower() == 'true'


def parse_arguments():
    """(options of bench.py, arguments for train.py)."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    add = parser.add_argument
    add('--iters', type=int, default=20, help='iterations measured; their medians are printed (20)')
    add('--warmup', type=int, default=5, help='iterations before these (5; at least 9 with a profile)')
    add('--sweep', default='', metavar='"KEY=A,B ..."', help='keys of train.py: each combination is a row')
    add('--layouts', default='', metavar='"LAYOUT; ..."',
        help='layouts, as above: each one is a row (for each combination of --sweep)')
    add('--gpu', default='', metavar='GPU',
        help='with --layouts: add the predictions of kilogpt.plan for this GPU, or for a file that its '
        '--calibrate has written')
    add('--scaling', metavar='N,N...',
        help='another table: weak scaling (gradient_accumulation_steps times the number of processes) and '
        'strong scaling, for these numbers of processes, of OMP_NUM_THREADS threads each (1)')
    add('--saves', type=int, metavar='N',
        help='another table: how long training waits for a checkpoint every N iterations, blocking and in '
        'the background: for the first checkpoint, and the median for the others')
    add('--nproc_per_node', type=int, default=1, help='number of processes under torchrun (1)')
    add('--random_tokens', type=int, metavar='VOCAB_SIZE',
        help='train on random tokens of a vocabulary of this size instead of a dataset')
    add('--real_data', type=yes_or_no, default=True, metavar='True|False',
        help="False, as nanoGPT's: one micro-batch of random tokens of GPT-2's vocabulary in each iteration")
    add('--document_length', type=int, default=0, metavar='N',
        help='with --random_tokens: a document every N tokens, for documents=mask and documents=pack (0: none)')
    add('--profile', type=yes_or_no, nargs='?', const=True, default=False, metavar='True|False',
        help="also print the parts of an iteration's time; writes a trace")
    add('--json', action='store_true', help='print one JSON object for each row instead of a table')
    options, arguments = parser.parse_known_args()
    if not options.real_data:
        options.random_tokens = options.random_tokens or GPT2_VOCABULARY
        arguments = ['--gradient_accumulation_steps=1', *arguments]
    elif not arguments and not options.random_tokens:
        arguments = ['config/quickstart.py']
        print('of config/quickstart.py: name another config, or keys of train.py', file=sys.stderr)
    if options.iters < 1 or options.warmup < 0:
        sys.exit('error: --iters must be at least 1 and --warmup at least 0')
    if options.scaling and not re.fullmatch(r'[1-9]\d*(,[1-9]\d*)*', options.scaling):
        sys.exit(f'error: --scaling takes numbers of processes such as 1,2,4, but is {options.scaling!r}')
    if options.gpu and not options.layouts:
        sys.exit('error: --gpu needs layouts to predict: add --layouts')
    if options.document_length and not options.random_tokens:
        sys.exit('error: --document_length cuts random tokens into documents: add --random_tokens')
    for mode in ('scaling', 'saves'):
        if getattr(options, mode) and (options.layouts or options.sweep or options.profile):
            sys.exit(f'error: --{mode} prints a table of its own: '
                     'remove --layouts, --sweep and --profile')
    return options, arguments


def main():
    expect_closed_pipe()
    options, arguments = parse_arguments()
    layouts = launch_train.parse_layouts(options.layouts, options.nproc_per_node)
    layouts = layouts or [('', options.nproc_per_node, [])]
    combinations = parse_sweep(options.sweep)
    run = functools.partial(measure, iters=options.iters, warmup=options.warmup,
                            profile=bool(options.profile or options.layouts), gpu=options.gpu)
    with tempfile.TemporaryDirectory() as folder:
        if options.random_tokens:
            write_random_tokens(folder, options.random_tokens, document_length=options.document_length)
            arguments += [f'--dataset={folder}', '--mixture_phases=', '--max_epochs=0']
        if options.scaling:
            # By default one process would have threads on all cores, and two processes half of them each.
            os.environ.setdefault('OMP_NUM_THREADS', '1')
            sizes = sorted({int(size) for size in options.scaling.split(',')})
            rows, table = scaling(run, arguments, sizes), SCALING
        elif options.saves:
            rows, table = saves(run, arguments, options.nproc_per_node, options.saves), SAVES
        else:
            rows = sweep(run, arguments, layouts, combinations, keep_traces=options.profile)
            table = SWEEP
            if options.layouts:
                table = PREDICTED if options.gpu else LAYOUTS
        complete = print_rows(rows, table, options.json)
    sys.exit(0 if complete else 1)


if __name__ == '__main__':
    main()
