"""python dev/peers.py as a user runs it, with a stand-in for nanoGPT that has our model."""
import json
import re
import sys

import pytest
from helpers import run_script

import peers as program

SHAPE = ('--layers=1 --heads=2 --width=32 --block_size=32 --batch_size=4 --iters=12 --eval_iters=2 --rates=1 '
         '--iterations=3 --rounds=1').split()
# nanoGPT's recipe, by train.py
SAME = ('same=--optimizer=adamw --beta2=0.99 --weight_decay=0.1 --learning_rate=1e-3 --min_lr=1e-4 '
        '--warmup_iters=1 --dtype=float32 --compile=False')
MODEL = """
import torch
from model import GPT as Ours, GPTConfig

class GPT(Ours):
    def __init__(self, config):
        super().__init__(config, seed=1)

    def forward(self, x, y):
        return None, super().forward(x, y) / y.numel()

    def configure_optimizers(self, weight_decay, learning_rate, betas, device_type):
        matrices = [parameter for parameter in self.parameters() if parameter.dim() >= 2]
        vectors = [parameter for parameter in self.parameters() if parameter.dim() < 2]
        groups = [dict(params=matrices, weight_decay=weight_decay), dict(params=vectors, weight_decay=0.0)]
        return torch.optim.AdamW(groups, lr=learning_rate, betas=betas)
"""
TRAIN = """
raise ValueError('executed')
def get_lr(it):
    if it < warmup_iters:
        return learning_rate * (it + 1) / (warmup_iters + 1)
    share = (it - warmup_iters) / (lr_decay_iters - warmup_iters)
    return min_lr + (1 + math.cos(math.pi * share)) / 2 * (learning_rate - min_lr)
"""


def peers(*arguments, **options):
    return run_script('dev/peers.py', *arguments, env=dict(TORCHDYNAMO_DISABLE='1'), **options)


def rows_of(text):
    """{name: [cells]} of each table, the header's name being 'peer'."""
    tables = []
    for part in text.strip().split('\n\n'):
        rows = [[cell.strip() for cell in line.strip('|').split('|')] for line in part.splitlines()]
        tables.append({row[0]: dict(zip(rows[0][1:], row[1:])) for row in rows[2:]})
    return tables


def evaluations(folder):
    lines = map(json.loads, (folder / 'metrics.jsonl').read_text().splitlines())
    return {line['iter']: line['val_loss'] for line in lines if 'val_loss' in line}


@pytest.mark.slow
def test_table_is_what_the_runs_logged_and_the_same_recipe_has_the_same_losses(dataset, tmp_path):
    """Our model in the place of nanoGPT's, in the loop of peers, learns what it learns in train.py."""
    nanogpt, folder = tmp_path / 'nanoGPT', tmp_path / 'out'
    nanogpt.mkdir()
    (nanogpt / 'model.py').write_text(MODEL)
    (nanogpt / 'train.py').write_text(TRAIN)
    arguments = [folder, *SHAPE, f'--dataset={dataset}', f'--ours={SAME}', f'--nanogpt={nanogpt}']
    printed = peers(*arguments).stdout
    assert printed.strip() == (folder / 'table.md').read_text().strip()
    table, shares = rows_of(printed)
    assert list(table) == list(shares) == ['same', 'nanogpt', 'transformers']
    for name, row in table.items():
        losses = evaluations(folder / 'runs' / name / 'x1')
        assert list(losses) == list(range(13)) and losses[12] < losses[0]
        times = json.loads((folder / 'times' / name / 'round-1.json').read_text())
        assert row['last val_loss'] == f'{losses[12]:.4f}' and row['ms/iteration'] == f'{times["ms"]:.1f}'
        assert row['memory'] == f'{times["gb"]:.2f} GB' and row['tokens/s'] == f'{128_000 / times["ms"]:,.0f}'
        assert row['first start'] == row['later'] == f'{times["start"]:.1f} s' and times["start"] > 0
        curve = (folder / 'curves' / name / 'metrics.jsonl').read_text().splitlines()
        assert json.loads(curve[-1])['seconds'] == pytest.approx(12 * times['ms'] / 1000)
        assert json.loads((folder / 'curves' / name / 'config.json').read_text())['seed'] == 1
    ours, theirs = (evaluations(folder / 'runs' / name / 'x1') for name in ('same', 'nanogpt'))
    assert list(ours.values()) == pytest.approx(list(theirs.values()), abs=1e-4)
    title = next(iter(shares['same']))
    assert title == f'tokens to nanogpt: {theirs[12]:.4f}' and float(shares['nanogpt'][title]) == 1

    before = (folder / 'runs' / 'same' / 'x1' / 'metrics.jsonl').stat().st_mtime
    assert peers(*arguments).stdout == printed
    assert (folder / 'runs' / 'same' / 'x1' / 'metrics.jsonl').stat().st_mtime == before
    other = peers(*arguments, '--seed=2', check=False)
    assert other.returncode == 1
    assert other.stderr == f'error: the runs in {folder} have seed 1, not 2: give another folder\n'


@pytest.mark.parametrize('arguments, message', [
    (['--peers=nanochat'], 'the peer nanochat needs --nanochat=FOLDER, a checkout of https://github.com/karpathy'),
    (['--nanochat=nowhere'], 'there is no nowhere/scripts/base_train.py: give --nanochat a checkout of'),
    (['--peers=llama'], "--peers has 'llama': the peers are kilogpt, nanogpt, transformers"),
    (['--rounds=0'], '--rounds must be at least 1, not 0'),
    (['--iters=20'], '--iterations=20 and 5 before them are more than --iters=20'),
])
def test_wrong_arguments_are_one_sentence(tmp_path, monkeypatch, arguments, message):
    monkeypatch.setattr(sys, 'argv', ['peers.py', str(tmp_path / 'out'), '--dataset=none', *arguments])
    with pytest.raises(SystemExit, match=re.escape(f'error: {message}')):
        program.main()
    assert not (tmp_path / 'out').exists()


def test_the_search_for_a_rate_goes_on_while_the_best_is_at_the_edge(monkeypatch):
    tried = []

    def last_loss(options, name, factor):
        tried.append(factor)
        return abs(factor - 8)

    monkeypatch.setattr(program, 'last_loss', last_loss)
    options = program.argparse.Namespace(rates=[])
    assert program.find_rate(options, 'any') == 8 and tried == [2, 1, 4, 8, 16]
    options.rates = [1.0, 4.0]
    assert program.find_rate(options, 'any') == 4
