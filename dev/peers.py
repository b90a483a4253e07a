r"""Compare recipes of other repositories with ours: the same data and batches, each at its own best learning rate.

    python dev/peers.py out-peers --dataset=data4096 --nanogpt=../nanoGPT --nanochat=../nanochat \
        --modded=../modded-nanogpt --litgpt=../litgpt-packages --llmc=../llm.c

Each peer has the model, optimizer, schedule and precision that it documents (dev/peer_recipes.py), in a small
shape. Its code is imported from a checkout; --litgpt is a folder written by `pip install --target`. llm.c is its C
program for CPUs, train_gpt2.c, compiled as a library by $CC (cc). One loop feeds all of them the batches of our
loader, and evaluates them on the same sequences. kiloGPT is train.py itself.

For each peer, runs look for the learning rate: they begin at the documented one and go on by factors of 2 until
the best has a worse one on either side. --jobs of them run at the same time, so their seconds mean little. Then
all peers are timed, in turns and alone. The table counts seconds by these times, without start and evaluations.

All runs stay in FOLDER, and the same command trains what is missing. FOLDER/table.md has the table, and
`python -m kilogpt.plot FOLDER/curves/*` draws the runs at the best rates.
"""
import argparse
import concurrent.futures
import json
import math
import os
import shlex
import shutil
import statistics
import sys
import time

import numpy as np
import torch
from peer_recipes import PEERS, Peer

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, ROOT)
from data.datasets import dataset_folder, read_meta
from data.loader import TokenLoader
from kilogpt.compare import recipes
from kilogpt.compare.candidates import cost_of_reaching
from kilogpt.compare.report import table
from kilogpt.configurator import config_of
from kilogpt.launch_train import timed, train_command
from kilogpt.parallel.processes import resolve_dtype
from kilogpt.plot.sources import read_run
from kilogpt.run import metrics

CPU = torch.device('cpu')
EVALUATIONS = 15  # of a run, besides the one at its start
WARMUP = 5  # iterations of a timed run that are not counted
REFERENCES = ('nanogpt', 'nanochat', 'modded')  # whose last loss the others are to reach
OURS = 'kilogpt=config/words_cpu.py'


# --- one run of a peer, in a process of its own -------------------------------------------------------------

def train_peer(options, name, factor, out_dir):
    """Train a peer and write metrics.jsonl as train.py does. A timed run has options.timed iterations."""
    meta = read_meta(options.dataset)
    options.vocab_size = meta['vocab_size']
    torch.manual_seed(options.seed)
    recipe = PEERS[name].build(getattr(options, name, ''), options, factor)
    loader, val_loader = (TokenLoader(options.dataset, split, options.block_size, options.vocab_size, meta,
                                      options.seed) for split in ('train', 'val'))
    last = options.timed or options.iters
    os.makedirs(out_dir, exist_ok=True)
    with open(os.path.join(out_dir, 'config.json'), 'w', encoding='utf-8') as file:
        json.dump(dict(dataset=options.dataset, max_iters=options.iters, learning_rate=recipe.learning_rate,
                       dtype=recipe.dtype, seed=options.seed, peer=name), file, indent=1)

    def evaluate():
        starts = val_loader.eval_starts(options.eval_iters * options.batch_size)
        return statistics.mean(recipe.evaluate(*val_loader.batch(starts[first:first + options.batch_size]))
                               for first in range(0, len(starts), options.batch_size))

    seconds = 0.0  # of training, without evaluations
    with open(os.path.join(out_dir, 'metrics.jsonl'), 'w', encoding='utf-8') as log:
        def write(iteration, **line):
            print(json.dumps(dict(iter=iteration, tokens=iteration * options.tokens, seconds=seconds) | line),
                  file=log, flush=True)

        for iteration in range(last + 1):
            if not options.timed and (iteration % options.eval_interval == 0 or iteration == options.iters):
                write(iteration, val_loss=evaluate(), params=recipe.n_params)
            if iteration == last:
                break
            began = time.perf_counter()
            numbers = np.arange(iteration * options.batch_size, (iteration + 1) * options.batch_size)
            loss = recipe.train(iteration, *loader.train_batch(numbers))
            ms = 1000 * (time.perf_counter() - began)
            seconds += ms / 1000
            write(iteration + 1, loss=loss, dt_ms=ms, tokens_per_sec=1000 * options.tokens / ms,
                  mem_gb=metrics.peak_memory_gb(CPU))
            print(f'iter {iteration + 1}: loss {loss:.4f}, time {ms:.2f}ms', flush=True)


# --- all runs -----------------------------------------------------------------------------------------------

def start(options, name, factor, out_dir, timed_iters=0, **environment):
    """Run a peer, or train.py for a recipe of ours; returns the seconds until its first iteration was over."""
    if name in options.recipes:
        arguments = options.recipes[name]
        rate = factor * config_of(os.path.join(ROOT, 'train.py'), arguments)['learning_rate']
        command = train_command(
            arguments, out_dir, dataset=options.dataset, n_layer=options.layers, n_head=options.heads,
            n_embd=options.width, block_size=options.block_size, batch_size=options.batch_size,
            gradient_accumulation_steps=1, learning_rate=f'{rate:g}', lr_decay_iters=options.iters,
            max_iters=timed_iters or options.iters, eval_iters=0 if timed_iters else options.eval_iters,
            eval_interval=options.eval_interval, seed=options.seed, device='cpu')
    else:
        command = [os.path.abspath(__file__), *sys.argv[1:], f'--run={name}', f'--factor={factor}',
                   f'--out_dir={out_dir}', f'--timed={timed_iters}']
    milliseconds, _ = timed(command, os.getcwd(), until='iter 1:', **environment)
    return milliseconds / 1000


def find_rate(options, name):
    """Train a peer at rates whose best has a worse one on either side; returns the best one's factor."""
    losses = {}

    def loss_at(factor):
        if factor not in losses:
            losses[factor] = last_loss(options, name, factor)
        return losses[factor]

    if options.rates:
        return min(options.rates, key=loss_at)
    best = 1.0
    for step in (2.0, 0.5):
        while loss_at(best * step) < loss_at(best):
            best *= step
    return best


def last_loss(options, name, factor):
    """The last validation loss of a run, which is trained if it is not there; infinite if it has diverged."""
    out_dir = folder_of_run(options, name, factor)
    if recipes.read_if_over(out_dir) is None:
        threads = max(1, os.cpu_count() // options.jobs)
        try:
            start(options, name, factor, out_dir, OMP_NUM_THREADS=str(threads))
        except RuntimeError:
            if recipes.read_if_over(out_dir) is None:  # it has not diverged
                raise
    loss = recipes.last_loss(read_run(out_dir))
    print(f'{name}: {factor:g} times the documented learning rate: {loss}', file=sys.stderr, flush=True)
    return loss


def folder_of_run(options, name, factor):
    return os.path.join(options.folder, 'runs', name, f'x{factor:g}')


def measure(options, factors):
    """Time each peer alone, in turns: {name: dict with ms, gb, and the seconds of both starts}."""
    rounds = {name: [] for name in factors}
    for number in range(1, options.rounds + 1):
        for name, factor in factors.items():
            folder = os.path.join(options.folder, 'times', name)
            out_dir, path = os.path.join(folder, f'round-{number}'), os.path.join(folder, f'round-{number}.json')
            if not os.path.exists(path):
                cache = os.path.abspath(os.path.join(folder, 'compiled'))
                if number == 1:  # torch.compile begins without what it has compiled before
                    shutil.rmtree(cache, ignore_errors=True)
                seconds = start(options, name, factor, out_dir, WARMUP + options.iterations,
                                TORCHINDUCTOR_CACHE_DIR=cache)
                lines = read_run(out_dir).train
                ms = statistics.median(line['dt_ms'] for line in lines[WARMUP:])
                with open(path, 'w', encoding='utf-8') as file:
                    json.dump(dict(ms=ms, gb=lines[-1]['mem_gb'], start=seconds), file)
            with open(path, encoding='utf-8') as file:
                rounds[name].append(json.load(file))
    return {name: dict(ms=min(row['ms'] for row in rows), gb=max(row['gb'] for row in rows),
                       starts=(rows[0]['start'], rows[-1]['start'])) for name, rows in rounds.items()}


def write_curve(options, name, factor, ms):
    """Copy the log of a run, with seconds of `ms` for each iteration; returns the Run."""
    source, folder = folder_of_run(options, name, factor), os.path.join(options.folder, 'curves', name)
    os.makedirs(folder, exist_ok=True)
    shutil.copy(os.path.join(source, 'config.json'), folder)
    with open(os.path.join(source, 'metrics.jsonl'), encoding='utf-8') as file:
        lines = [json.loads(line) for line in file]
    with open(os.path.join(folder, 'metrics.jsonl'), 'w', encoding='utf-8') as file:
        for line in lines:
            line |= dict(seconds=line['iter'] * ms / 1000)
            if 'loss' in line:
                line |= dict(dt_ms=ms, tokens_per_sec=1000 * options.tokens / ms)
            file.write(json.dumps(line) + '\n')
    return read_run(folder)


def describe(options, factors, times):
    """Two tables: what each peer is and reaches, and what it needs to reach the last losses of others."""
    runs = {name: write_curve(options, name, factor, times[name]['ms']) for name, factor in factors.items()}
    rows = [['peer', 'precision', 'parameters', 'learning rate', 'last val_loss', 'ms/iteration', 'tokens/s',
             'memory', 'first start', 'later']]
    for name, run in runs.items():
        row, last = times[name], run.evals[-1]
        first, later = row['starts']
        rows.append([
            name, resolve_dtype(run.config['dtype'], CPU), f'{last["params"]:,}',
            f'{run.config["learning_rate"]:g} ({factors[name]:g} × documented)', f'{last["val_loss"]:.4f}',
            f'{row["ms"]:.1f}', f'{1000 * options.tokens / row["ms"]:,.0f}', f'{row["gb"]:.2f} GB',
            f'{first:.1f} s', f'{later:.1f} s'])
    references = [name for name in REFERENCES if name in runs]
    shares = [['peer', *(f'{cost} to {name}: {runs[name].evals[-1]["val_loss"]:.4f}'
                         for name in references for cost in ('tokens', 'seconds'))]]
    for name, run in runs.items():
        cells = []
        for reference in references:
            last = runs[reference].evals[-1]
            costs = cost_of_reaching(run, 'loss', last['val_loss'])
            for cost in ('tokens', 'seconds'):
                cells.append(f'{costs[cost] / last[cost]:.3f}' if costs else 'not reached')
        shares.append([name, *cells])
    return '\n\n'.join(map(table, [rows, shares] if references else [rows]))


def keep_settings(options):
    """Write the settings of a folder, or exit if its runs were made with others."""
    path = os.path.join(options.folder, 'settings.json')
    settings = {key: getattr(options, key) for key in ('dataset', 'layers', 'heads', 'width', 'block_size',
                                                       'batch_size', 'iters', 'eval_iters', 'seed')}
    settings |= {f'ours {name}': shlex.join(arguments) for name, arguments in options.recipes.items()}
    before = {}
    if os.path.exists(path):
        with open(path, encoding='utf-8') as file:
            before = json.load(file)
    for key, value in before.items():
        if settings.get(key, value) != value:
            sys.exit(f'error: the runs in {options.folder} have {key} {value!r}, not {settings[key]!r}: '
                     'give another folder')
    os.makedirs(options.folder, exist_ok=True)
    with open(path, 'w', encoding='utf-8') as file:
        json.dump(before | settings, file, indent=1)


def parse_arguments():
    parser = argparse.ArgumentParser('python dev/peers.py', description=__doc__, allow_abbrev=False,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('folder', help='where all runs are kept')
    parser.add_argument('--dataset', required=True, help='as for train.py')
    parser.add_argument('--ours', action='append', metavar='NAME=ARGUMENTS',
                        help=f'a recipe of train.py; may be repeated ({OURS!r})')
    parser.add_argument('--peers', default='', help='names, separated by commas (all whose folders are given)')
    for name, peer in PEERS.items():
        if peer.file:
            parser.add_argument(f'--{name}', default='', metavar='FOLDER', help=peer.source)
    numbers = dict(layers=3, heads=3, width=192, block_size=256, batch_size=16, iters=500, seed=1)
    for name, default in numbers.items():
        parser.add_argument(f'--{name}', type=int, default=default, help=f'({default})')
    parser.add_argument('--eval_iters', type=int, default=8, help='batches of an evaluation (8)')
    parser.add_argument('--rates', default='', help='factors of the documented rates (the best is looked for)')
    parser.add_argument('--jobs', type=int, default=2, help='runs at the same time (2)')
    parser.add_argument('--rounds', type=int, default=2, help='times that each peer is timed (2)')
    parser.add_argument('--iterations', type=int, default=20, help='iterations that are timed (20)')
    for name, kind in dict(run=str, factor=float, out_dir=str, timed=int).items():  # of one run, see `start`
        parser.add_argument(f'--{name}', type=kind, help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.dataset = os.path.abspath(dataset_folder(options.dataset))
    options.rates = [float(factor) for factor in options.rates.split(',') if factor]
    options.tokens = options.batch_size * options.block_size  # of an iteration
    options.warmup = max(1, round(0.04 * options.iters))  # of peers that document it for much longer runs
    options.eval_interval = max(1, math.ceil(options.iters / EVALUATIONS))
    ours = [recipe.partition('=') for recipe in options.ours or [OURS]]
    options.recipes = {name: shlex.split(arguments) for name, _, arguments in ours}
    return options


def choose_peers(options):
    """Names of peers. Exits with a sentence if one is unknown or its folder is not what it has to be."""
    known = [*options.recipes, *PEERS]
    given = [name for name in known if not (name in PEERS and PEERS[name].file and not getattr(options, name))]
    names = options.peers.split(',') if options.peers else given
    if WARMUP + options.iterations > options.iters:
        sys.exit(f'error: --iterations={options.iterations} and {WARMUP} before them are more than '
                 f'--iters={options.iters}')
    if options.rounds < 1:
        sys.exit(f'error: --rounds must be at least 1, not {options.rounds}')
    for name in names:
        if name not in known:
            sys.exit(f'error: --peers has {name!r}: the peers are {", ".join(known)}')
        peer = PEERS.get(name, Peer(None))
        if peer.file and not getattr(options, name):
            sys.exit(f'error: the peer {name} needs --{name}=FOLDER, {peer.source}')
        if peer.file and not os.path.exists(os.path.join(getattr(options, name), peer.file)):
            sys.exit(f'error: there is no {os.path.join(getattr(options, name), peer.file)}: give --{name} '
                     f'{peer.source}')
    return names


def main():
    options = parse_arguments()
    if options.run:
        return train_peer(options, options.run, options.factor, options.out_dir)
    names = choose_peers(options)
    keep_settings(options)
    try:
        with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
            factors = dict(zip(names, pool.map(lambda name: find_rate(options, name), names)))
        report = describe(options, factors, measure(options, factors))
    except RuntimeError as error:
        sys.exit(str(error))  # as the run has said it
    print(report)
    with open(os.path.join(options.folder, 'table.md'), 'w', encoding='utf-8') as file:
        file.write(report + '\n')


if __name__ == '__main__':
    main()
