"""`python -m kilogpt.prove --random`: draws of models, data, optimizers and layouts, compared with one process."""
import ast
import collections
import concurrent.futures
import functools
import importlib
import multiprocessing
import os
import pkgutil
import statistics
import sys
import tempfile
import time

from tqdm import tqdm

import kilogpt.layers
import kilogpt.parallel
from kilogpt.configurator import config_of
from kilogpt.launch_train import ROOT
from kilogpt.prove import forked, trial
from kilogpt.prove.draws import Drawer, keys_not_plain, pairs_of, shrink, without
from kilogpt.prove.space import DRAWN, LAYOUT, count_processes, plain

WORKERS = 2  # draws at a time
MORE_MODULES = (  # that draws import with some keys
    'data.documents', 'data.mixture_loader', 'data.pair_loader', 'kilogpt.weights.importing', 'kilogpt.devices.cpu',
    'kilogpt.devices.cpu_attention', 'kilogpt.devices.grouped_products')


class Draws:
    """Runs draws, prints what fails, and counts.

    options: those of the command: seed, random (number of draws, 0 = any), minutes, nproc, exitfirst, pairs.
    """

    def __init__(self, options, folder):
        self.options = options
        self.base = config_of(os.path.join(ROOT, 'train.py'), [])
        self.datasets = os.path.join(folder, 'data')
        os.mkdir(self.datasets)
        trial.write_data(self.datasets)
        self.counts, self.sentences = collections.Counter(), collections.Counter()
        self.seconds = collections.defaultdict(list)  # {processes: [seconds of a draw]}
        self.largest = {}  # {(precision, what): largest relative error}
        self.proved, self.failures = set(), []
        self.number = 0
        import_modules_of_train()
        forked.prepare()
        self.pool = concurrent.futures.ProcessPoolExecutor(WORKERS, multiprocessing.get_context('fork'))

    def submit(self, draw):
        self.number += 1
        return self.pool.submit(trial.run_draw, draw, self.number, self.datasets, self.base)

    def run(self):
        """Run draws until there are enough, or the time is over."""
        options, began = self.options, time.perf_counter()
        drawer = Drawer(options.seed, functools.partial(trial.refusal_of, base=self.base), options.nproc)
        bar = tqdm(total=options.random or None, unit='draw', leave=False, disable=None)
        running, n_drawn = {}, 0
        while True:
            elapsed = time.perf_counter() - began
            is_over = n_drawn >= options.random if options.random else elapsed > 60 * options.minutes
            is_over |= options.exitfirst and bool(self.failures)
            if not is_over and len(running) < WORKERS:
                draw, _ = drawer.draw()
                running[self.submit(draw)] = draw
                n_drawn += 1
                continue
            if not running:
                break
            done, _ = concurrent.futures.wait(running, return_when=concurrent.futures.FIRST_COMPLETED)
            for future in done:
                bar.update()
                self._count(running.pop(future), future.result())
        bar.close()
        self.drawer, self.elapsed = drawer, time.perf_counter() - began

    def _count(self, draw, outcome):
        self.counts[outcome.kind] += 1
        if outcome.kind == 'same':
            in_bfloat16 = 'precision', 'bfloat16'  # where only the first gradients are compared
            self.proved |= {pair for pair in pairs_of(draw)
                            if draw['precision'] != 'bfloat16' or in_bfloat16 in pair}
        if outcome.kind == 'refused':
            self.sentences[outcome.text] += 1
        else:
            self.seconds[count_processes(draw)].append(outcome.seconds)
        for what, error in outcome.errors.items():
            key = draw['precision'], what
            self.largest[key] = max(self.largest.get(key, 0.0), error)
        if outcome.kind in trial.FAILURES:
            self.failures.append(draw)
            tqdm.write(f'{outcome.kind.upper()}: {outcome.text}\n    {command_of(draw)}')
            sys.stdout.flush()

    def shrink_failures(self, limit):
        """Print the smallest draws that still fail, of the first failures."""
        for draw in self.failures[:limit]:
            if not self._which_fail([draw])[0]:
                print(f'DID NOT FAIL AGAIN:\n    {command_of(draw)}', flush=True)
                continue
            smallest = shrink(draw, self._which_fail)
            outcome = self.submit(smallest).result()
            print(f'SMALLEST: {outcome.text}\n    {command_of(smallest)}', flush=True)

    def _which_fail(self, draws):
        outcomes = [future.result() for future in [self.submit(draw) for draw in draws]]
        return [outcome.kind in trial.FAILURES for outcome in outcomes]

    def report(self):
        """Print what the draws have shown."""
        counts = ', '.join(f'{count} {kind}' for kind, count in self.counts.items())
        n_draws = sum(self.counts.values())
        print(f'{n_draws} draws of seed {self.options.seed} in {self.elapsed:.0f} s '
              f'({60 * n_draws / self.elapsed:.1f} a minute): {counts}')
        for processes, seconds in sorted(self.seconds.items()):
            median = statistics.median(seconds)
            print(f'    {processes} processes: {len(seconds)} draws, median {median:.1f} s')
        for (precision, what), error in sorted(self.largest.items()):
            print(f'    {precision}: {what} within {error:.1e}')
        n_refused = len(self.drawer.refused)
        possible = {*self.drawer.pairs} - self.drawer.refused.keys()
        n_proved, n_possible = len(self.proved & possible), len(possible)
        print(f'pairs of values: {n_proved} of {n_possible} proved, {n_refused} refused')
        if self.options.pairs:
            print(self.describe_pairs())

    def describe_pairs(self):
        """What the draws have proved of each layout, as a table, and the sentences that refuse pairs."""
        proved, possible = collections.Counter(), collections.Counter()
        refused = collections.defaultdict(list)
        for pair in self.drawer.pairs:
            for this, other in (pair, pair[::-1]):
                if pair in self.drawer.refused:
                    refused[this].append('='.join(map(str, other)))
                else:
                    possible[this] += 1
                    proved[this] += pair in self.proved
        lines = ['| key | value | proved with | refused with |', '| --- | --- | --- | --- |']
        for key in ('dp', *LAYOUT, 'then', 'data', 'precision', 'optimizer'):
            for value in DRAWN[key].values:
                this = key, value
                others = ', '.join(f'`{other}`' for other in refused[this])
                shares = f'{proved[this]} of {possible[this]} values'
                lines.append(f'| `{key}` | `{value}` | {shares} | {others} |')
        lines.append('')
        for pair, sentence in self.drawer.refused.items():
            lines.append(f'{" and ".join("=".join(map(str, each)) for each in pair)}: {sentence}')
        return '\n'.join(lines)


def import_modules_of_train():
    """Import what train.py imports, always or with some keys, so that forked processes need not."""
    with open(os.path.join(ROOT, 'train.py'), encoding='utf-8') as file:
        modules = [node.module for node in ast.walk(ast.parse(file.read())) if isinstance(node, ast.ImportFrom)]
    for room in (kilogpt.layers, kilogpt.parallel):
        modules += [f'{room.__name__}.{module.name}' for module in pkgutil.iter_modules(room.__path__)]
    for module in (*modules, *MORE_MODULES):
        importlib.import_module(module)


def command_of(draw):
    """The command that repeats a draw: the keys that are not plain."""
    words = [f'{key}={draw[key]}' for key in keys_not_plain(draw)]
    return f'python -m kilogpt.prove --draw="{"; ".join(words)}"'


def parse_draw(text):
    """The draw of a text such as 'tp=2; mlp=moe'. Exits with one sentence if a key or value is not drawn."""
    draw = plain()
    for word in filter(None, (word.strip() for word in text.split(';'))):
        key, _, text = word.partition('=')
        if key not in DRAWN:
            sys.exit(f'error: --draw has {word!r}: choose from the keys {", ".join(DRAWN)}')
        found = {str(value): value for value in DRAWN[key].values}
        if text not in found:
            sys.exit(f'error: --draw has {word!r}: choose from {", ".join(found)}')
        draw[key] = found[text]
    return without(draw, ())


def main(options):
    with tempfile.TemporaryDirectory() as folder:
        draws = Draws(options, folder)
        # A process that was forked itself, as in tests, would wait for these workers without end.
        with draws.pool:
            has_failed = run_one(draws, options.draw) if options.draw is not None else run_many(draws, options)
    sys.exit(has_failed)


def run_one(draws, text):
    """Run one draw; returns whether it failed."""
    outcome = draws.submit(parse_draw(text)).result()
    print(f'{outcome.kind}: {outcome.text or outcome.errors}')
    return outcome.kind in trial.FAILURES


def run_many(draws, options):
    """Run random draws, and shrink the first that fail; returns whether one failed."""
    draws.run()
    draws.report()
    draws.shrink_failures(options.shrink)
    return bool(draws.failures)
