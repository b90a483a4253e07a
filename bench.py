"""Measure train.py by launching it: a table of speed and memory for a sweep of settings, a profile, or a plot of runs.

    python bench.py config/train_gpt2.py --random_tokens=50257 --sweep="batch_size=8,16 compile=True,False"
    python bench.py config/quickstart.py --profile
    python bench.py --plot out-a out-b

Everything that is not an option below goes to train.py as it is.
"""
import argparse
import itertools
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile

HERE = os.path.dirname(os.path.abspath(__file__))


def parse_sweep(text):
    """'batch_size=8,16 compile=True,False' -> the four combinations, each a list of train.py arguments."""
    axes = []
    for axis in text.split():
        key, equals, values = axis.partition('=')
        if not key or not equals or not values:
            sys.exit(f'error: --sweep takes key=value,value ... separated by spaces, but has {axis!r}')
        axes.append([f'--{key}={value}' for value in values.split(',')])
    return [list(combination) for combination in itertools.product(*axes)]


def write_random_tokens(folder, vocab_size, count=2 ** 22):
    """A dataset of uniform random tokens: what speed is measured on where there is no data. Its loss means nothing."""
    import numpy as np
    dtype = 'uint16' if vocab_size <= 2 ** 16 else 'uint32'
    for split in ('train', 'val'):
        tokens = np.random.default_rng(0).integers(0, vocab_size, size=count, dtype=dtype)
        tokens.tofile(os.path.join(folder, f'{split}.bin'))
    with open(os.path.join(folder, 'meta.json'), 'w') as file:
        json.dump(dict(vocab_size=vocab_size, dtype=dtype, tokenizer='random'), file)


def measure(arguments, options, folder, trace):
    """One run of train.py: its medians over the settled iterations, or {'error': its last line}. trace: where one goes."""
    out_dir = os.path.join(folder, 'run')
    shutil.rmtree(out_dir, ignore_errors=True)
    launcher = [sys.executable]
    if options.nproc_per_node > 1:
        launcher += ['-m', 'torch.distributed.run', '--standalone', f'--nproc_per_node={options.nproc_per_node}']
    run = subprocess.run(
        [*launcher, os.path.join(HERE, 'train.py'), '--wandb_log=False', *arguments, f'--out_dir={out_dir}', '--log_interval=1',
         f'--max_iters={options.warmup + options.iters}', '--eval_iters=0', '--keep_checkpoints=0', '--init_from=scratch',
         f'--profile={options.profile}'], capture_output=True, text=True)
    if run.returncode:
        lines = run.stderr.splitlines() or ['no message']
        said = [line for line in lines if line.startswith('error:')] or [line for line in lines if 'Error' in line] or lines
        return dict(error=said[-1])
    with open(os.path.join(out_dir, 'metrics.jsonl')) as file:
        lines = [json.loads(line) for line in file][options.warmup:]
    row = {key: None if lines[0][key] is None else statistics.median(line[key] for line in lines)
           for key in ('tokens_per_sec', 'dt_ms', 'mfu', 'mem_gb')}
    if options.profile:
        with open(os.path.join(out_dir, 'profile.json')) as file:
            row['profile_ms'] = json.load(file)
        row['trace'] = shutil.move(os.path.join(out_dir, 'trace.json'), trace)
    return row


def print_row(label, row):
    if 'error' in row:
        print(f'{label:<48} {row["error"]}', flush=True)
        return
    mfu = 'n/a' if row['mfu'] is None else f'{100 * row["mfu"]:.1f}%'
    print(f'{label:<48} {row["tokens_per_sec"]:>12,.0f} {row["dt_ms"]:>10.2f} {mfu:>7} {row["mem_gb"]:>8.2f}', flush=True)
    if 'profile_ms' in row:
        total = sum(row['profile_ms'].values())
        for category, value in row['profile_ms'].items():
            print(f'    {category:<14}{value:>10.2f}ms {100 * value / total:>6.1f}%')
        print(f'    of {total:.2f}ms an iteration; open {row["trace"]} in https://ui.perfetto.dev or chrome://tracing')


def plot(out_dirs, path):
    """Loss (validation solid, training faint) and throughput of runs over iterations, from their metrics.jsonl, to a PNG."""
    try:
        import matplotlib
    except ImportError:
        sys.exit('error: --plot needs matplotlib: pip install matplotlib')
    matplotlib.use('Agg')
    from matplotlib import pyplot
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4))
    for i, out_dir in enumerate(out_dirs):
        try:
            with open(os.path.join(out_dir, 'metrics.jsonl')) as file:
                lines = [json.loads(line) for line in file]
        except OSError:
            sys.exit(f'error: {out_dir} has no metrics.jsonl: give folders that train.py wrote')
        # a resumed run writes the iterations since its checkpoint again: the last line of each counts
        train = sorted({line['iter']: line for line in lines if 'loss' in line}.items())
        evals = sorted({line['iter']: line for line in lines if 'val_loss' in line}.items())
        name, color = os.path.basename(os.path.normpath(out_dir)), f'C{i}'
        left.plot([n for n, _ in train], [line['loss'] for _, line in train], color=color, alpha=0.3, linewidth=1)
        left.plot([n for n, _ in evals], [line['val_loss'] for _, line in evals], color=color, marker='.', label=f'{name} (val)')
        right.plot([n for n, _ in train], [line['tokens_per_sec'] for _, line in train], color=color, label=name)
    left.set(xlabel='iteration', ylabel='loss (nats per token)')
    right.set(xlabel='iteration', ylabel='tokens per second', ylim=(0, None))
    for axes in (left, right):
        axes.grid(alpha=0.3)
        axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    print(f'wrote {path}')


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
                                     allow_abbrev=False)
    parser.add_argument('--iters', type=int, default=20, help='iterations measured; the table gives their medians (20)')
    parser.add_argument('--warmup', type=int, default=5, help='iterations before those (5)')
    parser.add_argument('--sweep', default='', metavar='"KEY=A,B ..."', help='train.py keys; every combination is a row')
    parser.add_argument('--nproc_per_node', type=int, default=1, help='processes under torchrun (1)')
    parser.add_argument('--random_tokens', type=int, metavar='VOCAB_SIZE',
                        help='train on random tokens of a vocabulary of this size rather than on a dataset')
    parser.add_argument('--profile', action='store_true', help='also say where the time of an iteration goes; leaves a trace')
    parser.add_argument('--json', action='store_true', help='print JSON, one object a row, instead of the table')
    parser.add_argument('--plot', nargs='+', metavar='OUT_DIR', help='instead: draw loss and throughput of runs to --out')
    parser.add_argument('--out', default='plot.png', help="--plot's file (plot.png)")
    options, train_arguments = parser.parse_known_args()
    if options.plot:
        plot(options.plot, options.out)
        return
    if options.iters < 1 or options.warmup < 0 or (options.profile and options.warmup + options.iters < 9):
        sys.exit('error: --iters must be at least 1 and --warmup at least 0; --profile takes 9 iterations in all')
    failed = False
    with tempfile.TemporaryDirectory() as folder:
        if options.random_tokens:
            write_random_tokens(folder, options.random_tokens)
            train_arguments.append(f'--dataset={folder}')
        if not options.json:
            print(f'{"":<48} {"tokens/s":>12} {"ms/iter":>10} {"MFU":>7} {"GB":>8}')
        for number, combination in enumerate(parse_sweep(options.sweep)):
            row = measure([*train_arguments, *combination], options, folder, f'trace-{number}.json')
            failed |= 'error' in row
            if options.json:
                print(json.dumps(dict(arguments=combination, **row)), flush=True)
            else:
                print_row(' '.join(combination).replace('--', '') or 'as given', row)
    sys.exit(1 if failed else 0)


if __name__ == '__main__':
    main()
