"""Compare islands with DDP: validation loss and bytes sent, for several seeds. Run by hand:

    python dev/loss_and_bytes.py DATASET FOLDER 1337 1 2

FOLDER keeps the runs; runs that have ended are not repeated. Prints the table of docs/islands.md and draws
assets/islands.png. A run takes one to five minutes on two cores.
"""
import json
import os
import pathlib
import statistics
import sys

import matplotlib

matplotlib.use('Agg')
from matplotlib import pyplot

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from kilogpt import launch_train

PARAMETERS = 64_752
ISLANDS, ITERATIONS = 4, 2600
SHAPE = ('--device=cpu --compile=False --dtype=float32 --n_layer=2 --n_head=4 --n_embd=48 --block_size=64 '
         '--batch_size=4 --gradient_accumulation_steps=4 --warmup_iters=50 --learning_rate=3e-3 '
         f'--min_lr=3e-4 --beta2=0.99 --eval_interval={ITERATIONS} --lr_decay_iters={ITERATIONS}').split()
MEAN = '--outer_lr=1 --outer_momentum=0'  # with these keys, the outer optimizer averages the islands
# {columns of the table: options without the number of islands}
MODES = {
    ('20', '0.7, 0.9', 'int8'): '--outer_interval=20 --outer_compress=int8',
    ('26', '0.7, 0.9', 'int4'): '--outer_interval=26 --outer_compress=int4',
    ('26, 2 fragments, delay 2', '0.7, 0.9', 'int4'):
        '--outer_interval=26 --outer_compress=int4 --outer_fragments=2 --outer_delay=2',
    ('100', '0.7, 0.9', 'int8'): '--outer_interval=100 --outer_compress=int8',
    ('5', '1, 0', 'float32'): f'--outer_interval=5 {MEAN}',
    ('1', '1, 0', 'float32'): f'--outer_interval=1 {MEAN}',
}


def train(dataset, out_dir, seed, options, nproc):
    """(final validation loss, bytes that an island sent) of a run."""
    delay = 2 if 'delay' in options else 0  # iterations until the last exchange ends
    if not (out_dir / 'ended').exists():
        launch_train.train([*SHAPE, *options.split()], out_dir, nproc, log_interval=100, eval_iters=100,
                          seed=seed, max_iters=ITERATIONS + delay, dataset=os.path.abspath(dataset))
        (out_dir / 'ended').touch()
    with open(out_dir / 'metrics.jsonl', encoding='utf-8') as file:
        lines = [json.loads(line) for line in file]
    losses = [line['val_loss'] for line in lines if 'val_loss' in line]
    return losses[-1], sum(line.get('bytes_sent', 0) for line in lines)


def percents_above(runs, reference):
    """[percentage by which a seed's loss is above that of DDP]."""
    return [100 * (loss / base - 1) for (loss, _), (base, _) in zip(runs, reference)]


def reduction(runs):
    """Bytes sent by a process of DDP (formula of docs/islands.md) over the bytes sent by an island."""
    by_ddp = 8 * (ISLANDS - 1) / ISLANDS * PARAMETERS * ITERATIONS
    return by_ddp / runs[0][1]


def print_table(results, reference):
    losses = ', '.join(f'{loss:.3f}' for loss, _ in reference)
    print(f'| DDP | | float32 | | {losses} | |')
    for columns, runs in results.items():
        losses = ', '.join(f'{loss:.3f}' for loss, _ in runs)
        percents = percents_above(runs, reference)
        print(f'| {" | ".join(columns)} | {reduction(runs):.3g} | {losses} '
              f'| {statistics.mean(percents):+.1f}% |')


def draw(results, reference, dataset, path):
    figure, axes = pyplot.subplots(figsize=(7, 3.5), layout='constrained')
    for (interval, _, sent_as), runs in results.items():
        percents = percents_above(runs, reference)
        mean = statistics.mean(percents)
        spread = [[mean - min(percents)], [max(percents) - mean]]
        axes.errorbar(reduction(runs), mean, spread, marker='o', capsize=3, color='#0072b2')
        is_crowded = 'fragments' in interval or reduction(runs) > 150
        every, *more = interval.split(', ')
        iterations = 'iteration' if every == '1' else f'{every} iterations'
        later = [', in 2 parts, 2 iterations late'] if more == ['2 fragments', 'delay 2'] else []
        label = ''.join([f'every {iterations}, as {sent_as}', *later])
        axes.annotate(label, (reduction(runs), mean), (-8 if is_crowded else 8, 0),
                      fontsize=8, ha='right' if is_crowded else 'left', va='center',
                      textcoords='offset points')
    axes.axhline(0, color='grey', linewidth=0.8)
    axes.set(xscale='log', xlim=(0.3, 2000), xlabel='bytes sent by data parallelism (DDP) / bytes sent by an island',
             ylabel='validation loss above that of DDP, %',
             title=f'What it costs to exchange less: {ISLANDS} islands (groups that train apart and\n'
                   f'exchange parameters at times), {PARAMETERS:,} parameters, {ITERATIONS:,} iterations on {dataset}')
    axes.xaxis.set_major_formatter('{x:g}')
    axes.title.set_size('medium')
    axes.text(0.02, 0.25, 'labels: how often, and in which numbers, parameters are exchanged\n'
              'points and bars: mean and range of the seeds', fontsize=8, transform=axes.transAxes)
    figure.savefig(path, dpi=120)


def main():
    os.environ['OMP_NUM_THREADS'] = '1'
    dataset, folder, *seeds = sys.argv[1:]
    folder = pathlib.Path(folder).resolve()
    results = {}  # {columns: [(loss, bytes) of each seed]}
    for seed in seeds:
        for columns, options in {'DDP': '', **MODES}.items():
            name = columns if columns == 'DDP' else '-'.join(columns).replace(' ', '')
            islands = 1 if columns == 'DDP' else ISLANDS
            out_dir = folder / f'{name}-{seed}'
            result = train(dataset, out_dir, seed, f'{options} --islands={islands}', islands)
            results.setdefault(columns, []).append(result)
            print(seed, name, *result, file=sys.stderr, flush=True)
    reference = results.pop('DDP')
    print_table(results, reference)
    draw(results, reference, pathlib.Path(dataset).name, ROOT / 'assets' / 'islands.png')


if __name__ == '__main__':
    main()
