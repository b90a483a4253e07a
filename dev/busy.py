r"""Compare checkouts of this repository on a machine that other processes keep busy.

    python dev/busy.py ../base . --loads=0,2,4,8

Prints a row for each number of busy processes: milliseconds of an iteration (median) and of a sampled token,
and seconds of `python -m kilogpt.prove --quick`, in each checkout. Needs data/shakespeare_char in each.
"""
import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time

PARTS = ('train', 'sample', 'prove')
ITERATIONS, WARMUP, NEW_TOKENS = 30, 5, 100


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('checkouts', nargs='+', help='folders of checkouts')
    parser.add_argument('--loads', default='0,2,4,8', help='numbers of busy processes')
    parser.add_argument('--parts', default=','.join(PARTS), help=f'what to measure, of {", ".join(PARTS)}')
    arguments = parser.parse_args()
    parts = arguments.parts.split(',')
    with tempfile.TemporaryDirectory() as folder:
        out_dirs = [os.path.join(folder, str(i)) for i in range(len(arguments.checkouts))]
        for checkout, out_dir in zip(arguments.checkouts, out_dirs):
            train(checkout, out_dir, '--max_iters=20', '--lr_decay_iters=20')  # a checkpoint to sample from
        for load in map(int, arguments.loads.split(',')):
            for part in parts:
                with busy_processes(load):
                    figures = [measure(part, checkout, out_dir)
                               for checkout, out_dir in zip(arguments.checkouts, out_dirs)]
                print(f'{load} busy, {part}: ' + ', '.join(f'{figure:,.1f}' for figure in figures), flush=True)


@contextlib.contextmanager
def busy_processes(count):
    """Keep `count` processes busy, each with one thread that never waits."""
    processes = [subprocess.Popen([sys.executable, '-c', 'while True: pass']) for _ in range(count)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def measure(part, checkout, out_dir):
    """Milliseconds of an iteration ('train') or a token ('sample'), or seconds of a whole command ('prove')."""
    if part == 'train':
        with tempfile.TemporaryDirectory() as folder:
            train(checkout, folder, f'--max_iters={ITERATIONS}', f'--lr_decay_iters={ITERATIONS}',
                  '--eval_iters=0', '--keep_checkpoints=0', '--log_interval=1')
            with open(os.path.join(folder, 'metrics.jsonl'), encoding='utf-8') as file:
                lines = [json.loads(line) for line in file]
        return statistics.median([line['dt_ms'] for line in lines if 'dt_ms' in line][WARMUP:])
    if part == 'sample':
        def sample(tokens):
            return seconds(checkout, 'sample.py', f'--out_dir={out_dir}', '--num_samples=1',
                           f'--max_new_tokens={tokens}')
        return 1000 * (sample(NEW_TOKENS + 1) - sample(1)) / NEW_TOKENS
    return seconds(checkout, '-m', 'kilogpt.prove', '--quick')


def train(checkout, out_dir, *arguments):
    seconds(checkout, 'train.py', 'config/quickstart.py', f'--out_dir={out_dir}', *arguments)


def seconds(checkout, *command):
    """Seconds that a Python command takes in a checkout. CalledProcessError if it fails."""
    began = time.perf_counter()
    subprocess.run([sys.executable, *command], cwd=checkout, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - began


if __name__ == '__main__':
    main()
