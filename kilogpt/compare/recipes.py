r"""Compare recipes of training: each at its own best learning rate, over seeds, and at several sizes.

    python -m kilogpt.compare.recipes out-recipes 'base=config/quickstart.py' \
        'relu2=config/quickstart.py --mlp=relu2' 'mine=mine.diff config/quickstart.py' \
        --size='small: n_embd=64' --size='large: n_embd=192'

A recipe is NAME=ARGUMENTS of train.py. Runs use the code of the last commit, after applying the patch among the
arguments, if there is one (a file that ends in .diff). For each size and recipe, the search for a learning rate
uses the first seed. It starts at the rate in the arguments, and multiplies and divides by 1.5 until both neighbours
of the best rate are worse. The other seeds train at the best rate. Then the last losses of each recipe are compared
with those of the first recipe, seed by seed, as `python -m kilogpt.compare` does.

The logs of all runs stay in FOLDER. If the command was interrupted, the same command continues. With more recipes,
sizes or seeds it trains what is missing. FOLDER/SIZE.md has the table.
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

from data.datasets import dataset_folder
from kilogpt.compare.candidates import cost_of_reaching, last_value
from kilogpt.compare.noise import paired
from kilogpt.compare.report import mean_text, table
from kilogpt.configurator import exit_on_error
from kilogpt.keys import with_resuming
from kilogpt.plot.sources import read_run

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
STEP = 1.5  # from one learning rate to the next
EVALUATIONS = 10  # of a run at least, so that the costs of reaching a loss are known


def main():
    parser = argparse.ArgumentParser('python -m kilogpt.compare.recipes', description=__doc__, allow_abbrev=False,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('folder', help='where the logs of the runs are kept')
    parser.add_argument('recipes', nargs='+', metavar='NAME=ARGUMENTS', help='others are compared with the first')
    parser.add_argument('--size', action='append', dest='sizes', metavar="'NAME: KEY=VALUE ...'",
                        help='keys of train.py, before those of the recipes; may be repeated (as the recipes say)')
    parser.add_argument('--seeds', type=int, default=3, help='how many (3)')
    parser.add_argument('--no_sweep', action='store_true', help='train at the given learning rates alone')
    parser.add_argument('--jobs', type=int, default=1, help='recipes that train at the same time (1)')
    options = parser.parse_args()
    with exit_on_error():
        recipes = [Recipe(argument, options) for argument in options.recipes]
    is_whole = True
    for size in map(Size, options.sizes or ['given:']):
        with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
            jobs = [pool.submit(train, recipe, size) for recipe in recipes]
            try:
                first, *others = [job.result() for job in jobs]
            except KeyboardInterrupt:  # the runs are interrupted too, and save
                pool.shutdown(cancel_futures=True)
                sys.exit('interrupted: the same command continues')
        is_whole = is_whole and all([first, *others])
        if first:  # without it there is nothing to compare with
            report = f'{size.name}:\n\n{describe([first, *filter(None, others)])}\n'
            print(report)
            with open(os.path.join(options.folder, f'{size.name}.md'), 'w', encoding='utf-8') as file:
                file.write(report)
    sys.exit(0 if is_whole else 1)


class Size:
    """The name of a size and its arguments, of 'NAME: KEY=VALUE ...'."""

    def __init__(self, argument):
        self.name, _, keys = argument.partition(':')
        self.arguments = [f'--{key}' for key in shlex.split(keys)]


def train(recipe, size):
    """Return what `Recipe.train` returns, or print its error and return None, so that other recipes continue."""
    try:
        return recipe.train(size)
    except RuntimeError as error:
        print(f'error: {recipe.name}: {error}', file=sys.stderr, flush=True)


class Recipe:
    """Arguments of train.py, and the copy of the code that they run with."""

    def __init__(self, argument, options):
        self.name, equals, arguments = argument.partition('=')
        if not equals or '/' in self.name or self.name.startswith('-'):
            raise ValueError(f'{argument!r} is not a recipe: write NAME=ARGUMENTS, such as "base={argument}"')
        arguments = shlex.split(arguments)
        patches = [argument for argument in arguments if argument.endswith('.diff')]
        self.options, self.root = options, copy_of_code(patches, options.folder)
        self.keys = [argument for argument in arguments if argument.startswith('--')]
        self.files = [os.path.abspath(argument) if os.path.exists(argument) else argument
                      for argument in arguments if argument not in patches + self.keys]

    def train(self, size):
        """Find the learning rate and train all seeds at it: (name, learning rate, [Run of each seed])."""
        config = self._config(size)
        given = config['learning_rate']
        rate = given if self.options.no_sweep else self._best_rate(size, config, given)
        runs = [self._run(size, config, rate, seed) for seed in range(1, self.options.seeds + 1)]
        if math.inf in map(last_loss, runs):
            raise RuntimeError(f'it diverges at a learning rate of {rate:g}: lower learning_rate')
        return self.name, rate, runs

    def _best_rate(self, size, config, given):
        """Find the learning rate with the lowest last loss of seed 1, whose two neighbours are both worse."""
        losses, step, best = {}, None, 0
        while step != best:
            step = best
            for neighbour in (step, step - 1, step + 1):
                if neighbour not in losses:
                    losses[neighbour] = last_loss(self._run(size, config, rate_of(given, neighbour), 1))
            best = min(losses, key=losses.get)
        return rate_of(given, best)

    def _config(self, size):
        """All keys of train.py with their values, as the code of the recipe reads its arguments.

        The keys of the size override those of config files, and the recipe's own keys override both.
        """
        arguments = [*self.files, *size.arguments, *self.keys]
        code = ('import json, sys; from kilogpt.configurator import config_of; '
                'print(json.dumps(config_of("train.py", sys.argv[1:])))')
        done = self._python('-c', code, *arguments)
        if done.returncode:
            raise RuntimeError(done.stderr.strip()[-2000:])
        config = json.loads(done.stdout)
        return config | dict(dataset=dataset_folder(config['dataset']))  # the copy of the code has no datasets

    def _run(self, size, config, rate, seed):
        """Read the log of a run, after training it if necessary. RuntimeError if the training fails."""
        folder = os.path.abspath(os.path.join(self.options.folder, size.name, self.name, f'lr{rate:g}-s{seed}'))
        config = config | dict(
            learning_rate=rate, seed=seed, out_dir=folder, keep_checkpoints=1,
            eval_interval=min(config['eval_interval'], math.ceil(config['max_iters'] / EVALUATIONS)),
            init_from=with_resuming(config['init_from']))
        path = f'{folder}.json'
        if os.path.exists(path):
            with open(path, encoding='utf-8') as file:
                before = json.load(file)
            different = [key for key in config if before.get(key) != config[key]]
            if different:
                raise RuntimeError(f'{folder} was trained with another {", ".join(different)}: '
                                   'give the recipe another name')
        run = read_if_over(folder)
        if run is None:
            os.makedirs(os.path.dirname(path), exist_ok=True)
            with open(path, 'w', encoding='utf-8') as file:
                json.dump(config, file, indent=1)
            done = self._python('train.py', path)
            run = read_if_over(folder)
            if run is None:
                raise RuntimeError(f'the run {folder} did not finish: {done.stderr.strip()[-2000:]}')
            shutil.rmtree(os.path.join(folder, 'ckpt'), ignore_errors=True)
            print(f'{size.name} {self.name}: learning rate {rate:g}, seed {seed}: {last_loss(run):.4f}',
                  file=sys.stderr, flush=True)
        return run

    def _python(self, *arguments):
        return subprocess.run([sys.executable, *arguments], cwd=self.root, text=True, capture_output=True)


def rate_of(given, step):
    """The learning rate `step` steps from the given one, rounded to two digits."""
    return float(f'{given * STEP ** step:.2g}') if step else given


def copy_of_code(patches, folder):
    """Copy the last commit and apply patches, unless the copy exists already; returns its folder.

    Without patches and outside a git repository, the code runs where it is.
    """
    if not patches and not os.path.exists(os.path.join(ROOT, '.git')):
        return ROOT
    commit = run_git('rev-parse', 'HEAD').decode().strip()
    contents = []
    for patch in patches:
        try:
            with open(patch, 'rb') as file:
                contents.append(file.read())
        except OSError as error:
            raise ValueError(f'the patch {patch} cannot be read: {error.strerror}') from None
    name = '-'.join([commit[:12], *(hashlib.sha256(content).hexdigest()[:12] for content in contents)])
    tree = os.path.abspath(os.path.join(folder, 'code', name))
    if not os.path.exists(tree):
        unfinished = f'{tree}.unfinished'
        shutil.rmtree(unfinished, ignore_errors=True)
        os.makedirs(unfinished)
        subprocess.run(['tar', 'x', '-C', unfinished], check=True, input=run_git('archive', 'HEAD'))
        for patch, content in zip(patches, contents):
            if subprocess.run(['patch', '-p1', '-s', '-d', unfinished], input=content).returncode:
                raise ValueError(f'{patch} does not fit the last commit: write it again, with git diff')
        os.rename(unfinished, tree)
    return tree


def run_git(*arguments):
    """Run git and return what it prints."""
    done = subprocess.run(['git', '-C', ROOT, *arguments], capture_output=True)
    if done.returncode:
        raise ValueError(f'recipes train with the last commit of {ROOT}, but git says: '
                         f'{done.stderr.decode().strip()}')
    return done.stdout


def read_if_over(folder):
    """The Run of a folder if it has its last evaluation or has diverged, otherwise None."""
    if not os.path.exists(os.path.join(folder, 'metrics.jsonl')):
        return None
    run = read_run(folder)
    has_diverged = run.config.get('on_nonfinite') == 'abort' and any(
        name.startswith('nonfinite') for name in os.listdir(folder))
    return run if has_diverged or has_ended(run) else None


def has_ended(run):
    return bool(run.evals) and run.evals[-1]['iter'] == run.config['max_iters']


def last_loss(run):
    """The validation loss after the last iteration, infinite if the run has diverged."""
    loss = last_value(run, 'loss') if has_ended(run) else None
    return math.inf if loss is None else loss


def describe(results):
    """Format results, [(name, learning rate, [Run of each seed])], as a table. The first is the baseline."""
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
        if len(losses) > 1:
            tested = paired(base, losses)
            difference, p = f'{tested.mean:+.4f} ({tested.low:+.4f} to {tested.high:+.4f})', f'{tested.p:.2g}'
        costs = [share_of_cost(cost, base_runs, runs) for cost in ('tokens', 'seconds')]
        rows.append(row + [difference, p, *costs])
    return table(rows)


def share_of_cost(cost, base_runs, runs):
    """The cost of reaching the mean last loss of base_runs, divided by the mean cost of base_runs."""
    target = statistics.mean(last_loss(run) for run in base_runs)
    costs = [cost_of_reaching(run, 'loss', target) for run in runs]
    if None in costs:
        return 'not reached'
    whole = statistics.mean(run.evals[-1][cost] for run in base_runs)
    return f'{statistics.mean(costs_of_run[cost] for costs_of_run in costs) / whole:.3f}'


if __name__ == '__main__':
    main()
