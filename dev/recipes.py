r"""Compare recipes of training: each at its own best learning rate, over seeds, at several sizes.

    python dev/recipes.py FOLDER --dataset=DATA --sizes=1M,5M 'base=config/shakespeare_cpu.py' \
        'relu2=config/shakespeare_cpu.py --mlp=relu2' 'smear=smear.diff config/shakespeare_cpu.py --smear=0.1'

A recipe is NAME=ARGUMENTS of train.py. With a patch, whose name ends in .diff, it trains with a copy of the last
commit to which the patch is applied. For each size and recipe, runs with the first seed look for the
learning rate: they begin at that of the arguments and go on by steps of 1.5 until the best has a worse one on
either side. The other seeds train at the best. Then the last losses of a recipe are compared with those of the
first one, seed by seed, as `python -m kilogpt.compare` does.

The logs of all runs stay in FOLDER. The same command goes on where it was ended, and one with more recipes, sizes or
seeds trains what is missing. FOLDER/SIZE.md has the table.
"""
import argparse
import concurrent.futures
import hashlib
import json
import math
import os
import shlex
import shutil
import statistics
import subprocess
import sys

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, ROOT)

from kilogpt.compare.candidates import cost_of_reaching, last_value  # noqa: E402
from kilogpt.compare.noise import paired  # noqa: E402
from kilogpt.compare.report import mean_text, table  # noqa: E402
from kilogpt.plot.sources import read_run  # noqa: E402

# About so many parameters, with a vocabulary of 4,096 tokens and an embedding and a head of their own.
SIZES = {'tiny': dict(n_layer=1, n_head=2, n_embd=32, block_size=64, batch_size=4),
         '1M': dict(n_layer=3, n_head=4, n_embd=128),
         '5M': dict(n_layer=4, n_head=4, n_embd=256),
         '20M': dict(n_layer=8, n_head=6, n_embd=384)}
STEP = 1.5  # from one learning rate to the next
EVALUATIONS, EVAL_SEQUENCES = 10, 160


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('folder', help='where the logs of the runs are kept')
    parser.add_argument('recipes', nargs='+', metavar='NAME=ARGUMENTS', help='the others are compared with the first')
    parser.add_argument('--dataset', required=True, help='as for train.py')
    parser.add_argument('--sizes', default='1M', help=f'some of {",".join(SIZES)} (1M)')
    parser.add_argument('--iters', type=int, default=500, help='iterations, unless a recipe sets max_iters (500)')
    parser.add_argument('--seeds', type=int, default=3, help='how many (3)')
    parser.add_argument('--no_sweep', action='store_true', help='train at the given learning rates alone')
    parser.add_argument('--jobs', type=int, default=1, help='recipes that train at the same time (1)')
    options = parser.parse_args()
    recipes = [Recipe(argument, options) for argument in options.recipes]
    is_whole = True
    for size in options.sizes.split(','):
        with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
            results = [result for result in pool.map(lambda recipe: train(recipe, size), recipes) if result]
        is_whole = is_whole and len(results) == len(recipes)
        report = f'{size}:\n\n{describe(results)}\n' if results else ''
        print(report)
        with open(os.path.join(options.folder, f'{size}.md'), 'w', encoding='utf-8') as file:
            file.write(report)
    sys.exit(0 if is_whole else 1)


def train(recipe, size):
    """What `Recipe.train` returns, or None if it fails, which is said at once while the others go on."""
    try:
        return recipe.train(size)
    except RuntimeError as error:
        print(f'error: {recipe.name}: {error}', file=sys.stderr, flush=True)


class Recipe:
    """Arguments of train.py, the code they are for, and the training of both."""

    def __init__(self, argument, options):
        self.name, _, arguments = argument.partition('=')
        self.options, self.root = options, ROOT
        self.files, self.keys = [], []  # config files, and --key=value
        for argument in shlex.split(arguments):
            if argument.endswith('.diff'):
                self.root = patched_code(argument, options.folder)
            else:
                (self.keys if argument.startswith('--') else self.files).append(argument)

    def train(self, size):
        """Find the learning rate and train all seeds at it: (name, learning rate, [Run of each seed])."""
        config = self._config(size)
        given = config['learning_rate']
        rate = given if self.options.no_sweep else self._best_rate(size, config, given)
        seeds = range(1, self.options.seeds + 1)
        return self.name, rate, [self._run(size, config, rate, seed) for seed in seeds]

    def _best_rate(self, size, config, given):
        """The learning rate with the lowest last loss of seed 1, whose two neighbours were tried too."""
        losses, step, best = {}, None, 0
        while step != best:
            step = best
            for neighbour in (step, step - 1, step + 1):
                if neighbour not in losses:
                    losses[neighbour] = last_loss(self._run(size, config, rate_of(given, neighbour), 1))
            best = min(losses, key=losses.get)
        return rate_of(given, best)

    def _config(self, size):
        """All keys of train.py, by the code of the recipe: those of its config files, of the size, its own."""
        of_size = dict(batch_size=16, block_size=256, max_iters=self.options.iters, lr_decay_iters=0) | SIZES[size]
        arguments = [*self.files, *(f'--{key}={value}' for key, value in of_size.items()), *self.keys]
        code = ('import json, sys; from kilogpt.configurator import config_of; '
                'print(json.dumps(config_of("train.py", sys.argv[1:])))')
        done = self._python('-c', code, *arguments)
        if done.returncode:
            raise RuntimeError(done.stderr.strip()[-2000:])
        return json.loads(done.stdout)

    def _run(self, size, config, rate, seed):
        """The log of a run, which is trained if it is not there. RuntimeError if it cannot be."""
        folder = os.path.abspath(os.path.join(self.options.folder, size, self.name, f'lr{rate:g}-s{seed}'))
        iterations = config['max_iters']
        config = config | dict(
            learning_rate=rate, seed=seed, out_dir=folder, dataset=self.options.dataset, init_from='auto',
            eval_interval=math.ceil(iterations / EVALUATIONS), keep_checkpoints=1,
            eval_iters=math.ceil(EVAL_SEQUENCES / config['batch_size']))
        path = f'{folder}.json'
        if os.path.exists(path):
            with open(path, encoding='utf-8') as file:
                before = json.load(file)
            different = [key for key in config if before.get(key) != config[key]]
            if different:
                raise RuntimeError(f'{folder} was trained with another {", ".join(different)}: choose another name')
        if not is_over(folder, iterations):
            os.makedirs(os.path.dirname(path), exist_ok=True)
            with open(path, 'w', encoding='utf-8') as file:
                json.dump(config, file, indent=1)
            done = self._python('train.py', path)
            if not is_over(folder, iterations):
                raise RuntimeError(f'the run {folder} did not come to its end: {done.stderr.strip()[-2000:]}')
            shutil.rmtree(os.path.join(folder, 'ckpt'), ignore_errors=True)
            loss = last_loss(read_run(folder))
            print(f'{size} {self.name}: learning rate {rate:g}, seed {seed}: {loss:.4f}', file=sys.stderr, flush=True)
        return read_run(folder)

    def _python(self, *arguments):
        return subprocess.run([sys.executable, *arguments], cwd=self.root, text=True, capture_output=True)


def rate_of(given, step):
    """The learning rate some steps from the given one, with two digits."""
    return float(f'{given * STEP ** step:.2g}') if step else given


def patched_code(patch, folder):
    """The folder of a copy of the last commit with a patch applied."""
    commit = subprocess.run(['git', '-C', ROOT, 'rev-parse', 'HEAD'], check=True, stdout=subprocess.PIPE).stdout
    with open(patch, 'rb') as file:
        content = file.read()
    tree = os.path.abspath(os.path.join(folder, 'code', hashlib.sha256(commit + content).hexdigest()[:16]))
    if not os.path.exists(tree):
        unfinished = tree + '.tmp'
        shutil.rmtree(unfinished, ignore_errors=True)
        os.makedirs(unfinished)
        archive = subprocess.run(['git', '-C', ROOT, 'archive', 'HEAD'], check=True, stdout=subprocess.PIPE).stdout
        subprocess.run(['tar', 'x', '-C', unfinished], check=True, input=archive)
        subprocess.run(['patch', '-p1', '-s', '-d', unfinished], check=True, input=content)
        os.rename(unfinished, tree)
    return tree


def is_over(folder, iterations):
    """Whether a run has its last evaluation, or has diverged."""
    if not os.path.exists(os.path.join(folder, 'metrics.jsonl')):
        return False
    run = read_run(folder)
    return has_diverged(run) or bool(run.evals) and run.evals[-1]['iter'] == iterations


def has_diverged(run):
    return any(name.startswith('nonfinite') for name in os.listdir(run.path))


def last_loss(run):
    """The validation loss after the last iteration, infinite if the run has diverged."""
    return math.inf if has_diverged(run) else last_value(run, 'loss')


def describe(results):
    """A table of results, [(name, learning rate, [Run of each seed])], of which the first is the baseline."""
    rows = [['recipe', 'learning rate', 'parameters', 'last val_loss', 'difference (95% interval)', 'p',
             'tokens to the same loss', 'seconds']]
    _, _, base_runs = results[0]
    base = [last_loss(run) for run in base_runs]
    for name, rate, runs in results:
        losses = [last_loss(run) for run in runs]
        row = [name, f'{rate:g}', f'{runs[0].evals[-1]["params"]:,}', mean_text(losses, '.4f')]
        if runs is base_runs:
            rows.append(row + [''] * 4)
            continue
        difference, p = '', ''
        if len(losses) > 1 and losses != base:
            tested = paired(base, losses)
            difference, p = f'{tested.mean:+.4f} ({tested.low:+.4f} to {tested.high:+.4f})', f'{tested.p:.2g}'
        rows.append(row + [difference, p, *(share_of_cost(cost, base_runs, runs) for cost in ('tokens', 'seconds'))])
    return table(rows)


def share_of_cost(cost, base_runs, runs):
    """What runs need to reach the mean last loss of others, as a share of what those needed."""
    target = statistics.mean(last_loss(run) for run in base_runs)
    costs = [cost_of_reaching(run, 'loss', target) for run in runs]
    if None in costs:
        return 'not reached'
    whole = statistics.mean(run.evals[-1][cost] for run in base_runs)
    return f'{statistics.mean(costs_of_run[cost] for costs_of_run in costs) / whole:.3f}'


if __name__ == '__main__':
    main()
