"""kilogpt.compare.recipes finds learning rates, and tells what is better from what is not."""
import pathlib
import re

import pytest

from helpers import ROOT, run_script

pytestmark = pytest.mark.slow
BASE = 'config/shakespeare_cpu.py --compile=False --dtype=float32 --learning_rate=0.03'
SIZE = 'tiny: n_layer=1 n_head=2 n_embd=32 block_size=64 batch_size=4 max_iters=30'


@pytest.fixture
def bench(dataset, tmp_path):
    """A function that runs the script on a tiny model: its output and the rows of the table."""
    def bench(*arguments, folder=tmp_path / 'runs', **options):
        done = run_script('kilogpt.compare.recipes', folder, f'--size={SIZE} dataset={dataset}', *arguments,
                          timeout=600, **options)
        lines = [line.split('|')[1:-1] for line in done.stdout.splitlines() if '|' in line]
        rows = [[cell.strip() for cell in line] for line in lines]
        return done, {row[0]: row for row in rows}
    return bench


def test_difference_is_told_from_noise(bench, tmp_path):
    """A recipe that only rounds otherwise, and one whose learning rate is a third."""
    recipes = [f'base={BASE}', f'halves={BASE} --batch_size=2 --gradient_accumulation_steps=2',
               f'slow={BASE} --learning_rate=0.01']
    done, rows = bench('--no_sweep', '--seeds=3', *recipes)
    assert done.stderr.count('learning rate') == 9
    *_, difference, p, tokens, seconds = rows['slow']
    assert float(p) < 0.01 and float(difference.split()[0]) > 0.05 and tokens == seconds == 'not reached'
    *_, difference, p, _, _ = rows['halves']
    assert p == '' or float(p) > 0.01 and abs(float(difference.split()[0])) < 0.01
    # With the worse one as the baseline, the other needs less.
    done, rows = bench('--no_sweep', '--seeds=3', recipes[2], recipes[0])
    assert done.stderr.count('learning rate') == 0  # all runs are there
    assert 0.2 < float(rows['base'][-2]) < 1
    assert (tmp_path / 'runs' / 'tiny.md').read_text() in done.stdout
    assert not [*tmp_path.glob('runs/tiny/*/*/ckpt')]


def test_learning_rate_is_looked_for_until_neighbours_are_worse(bench, tmp_path):
    done, rows = bench('--seeds=1', f'base={BASE} --learning_rate=0.01')
    found = re.findall(r'learning rate ([\d.]+), seed 1: ([\d.]+)', done.stderr)
    losses = {float(rate): float(loss) for rate, loss in found}
    best = float(rows['base'][1])
    assert losses[best] == min(losses.values()) and min(losses) < best < max(losses) and best > 0.01
    assert len(losses) > 4


def test_what_does_not_fit_is_one_sentence(bench, tmp_path):
    bench('--no_sweep', '--seeds=1', f'base={BASE}')
    done, _ = bench('--no_sweep', '--seeds=1', f'base={BASE} --beta2=0.9', check=False)
    assert done.returncode == 1 and 'was trained with another beta2: give the recipe another name' in done.stderr
    patch = tmp_path / 'other.diff'
    first_line = pathlib.Path(ROOT, 'train.py').read_text().splitlines()[0]
    patch.write_text('--- a/train.py\n+++ b/train.py\n@@ -1 +1,2 @@\n'
                     f'+raise SystemExit("the patched code")\n {first_line}\n')
    done, rows = bench('--no_sweep', '--seeds=1', f'base={BASE}', f'other={patch} {BASE}', check=False)
    assert done.returncode == 1 and done.stderr.startswith('error: other: ') and rows.keys() >= {'base'}
    assert done.stderr.endswith('the patched code\n')
    done, _ = bench(f'{tmp_path}/config.py', check=False)  # arguments without a name
    assert done.returncode == 1 and done.stderr.startswith(f"error: '{tmp_path}/config.py' is not a recipe: write NAME=")
    done, _ = bench(f'base={tmp_path}/none.diff {BASE}', check=False)
    assert done.returncode == 1
    assert done.stderr == f'error: the patch {tmp_path}/none.diff cannot be read: No such file or directory\n'
