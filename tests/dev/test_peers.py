"""python dev/peers.py as a user runs it, with a stand-in for nanoGPT that has our model.

llm.c itself is in $LLMC, by default beside the repository.
"""
import json
import os
import re
import shutil
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers import ROOT, run_script

import peer_recipes
import peers as program
from data.datasets import read_meta
from data.loader import TokenLoader
from model import GPT, GPTConfig

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

LLMC = os.environ.get('LLMC', os.path.join(ROOT, '..', 'llm.c'))


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


def train_as_llmc(dataset, weights, learning_rate, batch_size, iters):
    """Train our GPT-2 with PyTorch's AdamW from weights of llm.c; returns the losses and validation losses."""
    model = GPT(GPTConfig(block_size=32, vocab_size=65, n_layer=2, n_head=2, n_embd=32, mlp='gelu_tanh'))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            weight = weights[re.sub(r'\.c_[qkv]\.', '.c_attn.', name)]
            if found := re.search(r'\.c_([qkv])\.', name):
                weight = weight.chunk(3)['qkv'.index(found[1])]
            parameter[:len(weight)] = weight  # the embedding's other rows are padding
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, betas=(0.9, 0.999), weight_decay=0.0)
    meta = read_meta(dataset)
    loader, val_loader = (TokenLoader(dataset, split, 32, 65, meta, 1) for split in ('train', 'val'))

    def loss_of(x, y):
        return model(torch.from_numpy(x), torch.from_numpy(y)) / y.size

    losses, val_losses = [], []
    for iteration in range(iters + 1):
        with torch.no_grad():
            val_losses.append(loss_of(*val_loader.batch(val_loader.eval_starts(batch_size))).item())
        if iteration < iters:
            loss = loss_of(*loader.train_batch(np.arange(iteration * batch_size, (iteration + 1) * batch_size)))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    return losses, val_losses


@pytest.mark.skipif(not os.path.exists(os.path.join(LLMC, 'train_gpt2.c')), reason=f'there is no llm.c in {LLMC}')
@pytest.mark.skipif(not shutil.which(os.environ.get('CC', 'cc')), reason='a C compiler is not installed')
@pytest.mark.filterwarnings('ignore:`torch.jit')  # train_gpt2.py imports optimizers that use it
def test_llmc_learns_what_gpt2_and_adamw_of_pytorch_learn(dataset, tmp_path):
    """llm.c's C program at 8 times its documented rate. Its checkpoint has 128 rows for the 65 tokens."""
    out_dir = tmp_path / 'run'
    peers(tmp_path, *SHAPE, '--layers=2', '--eval_iters=1', f'--dataset={dataset}', f'--llmc={LLMC}', '--run=llmc',
          '--factor=8', f'--out_dir={out_dir}', '--timed=0')
    lines = list(map(json.loads, (out_dir / 'metrics.jsonl').read_text().splitlines()))
    shape = SimpleNamespace(layers=2, heads=2, width=32, block_size=32, vocab_size=65, seed=1)
    weights = dict(peer_recipes.write_llmc_checkpoint(LLMC, shape, tmp_path / 'model.bin').named_parameters())
    losses, val_losses = train_as_llmc(dataset, weights, learning_rate=8e-4, batch_size=4, iters=12)
    assert [line['loss'] for line in lines if 'loss' in line] == pytest.approx(losses, abs=1e-5)
    assert list(evaluations(out_dir).values()) == pytest.approx(val_losses, abs=1e-5)
    assert val_losses[-1] < val_losses[0] - 0.1
    assert lines[0]['params'] == sum(weight.numel() for weight in weights.values()) + (128 - 65) * 32


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
