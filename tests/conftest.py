"""What tests share: a small dataset, and launching scripts as a user does."""
import json
import os
import subprocess
import sys

import numpy as np
import pytest

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, ROOT)

# a model and a batch that train in milliseconds; 12 sequences divide over 1, 2 and 3 processes
TINY = ('--device=cpu --compile=False --dtype=float32 --n_layer=2 --n_head=4 --n_embd=32 --block_size=32 --batch_size=4 '
        '--gradient_accumulation_steps=3 --eval_iters=4 --eval_interval=6 --log_interval=1 --max_iters=12 '
        '--lr_decay_iters=12 --warmup_iters=2 --learning_rate=1e-2 --min_lr=1e-3').split()


@pytest.fixture(scope='session')
def dataset(tmp_path_factory):
    """Folder of a prepared character-like dataset: 20,000 training and 3,000 validation tokens of a vocabulary of 65."""
    folder = tmp_path_factory.mktemp('data')
    rng = np.random.default_rng(0)
    chain = rng.integers(0, 65, size=(65, 3))  # three likely successors each: something to learn
    for split, count in (('train', 20_000), ('val', 3_000)):
        tokens = [0]
        for choice in rng.integers(0, 3, size=count - 1):
            tokens.append(chain[tokens[-1], choice])
        np.array(tokens, dtype='<u2').tofile(folder / f'{split}.bin')
    chars = '\n' + ''.join(chr(c) for c in range(ord(' '), ord(' ') + 64))
    (folder / 'meta.json').write_text(json.dumps(dict(vocab_size=65, dtype='uint16', tokenizer='char', chars=list(chars))))
    return folder


def run(script, *arguments, nproc=1, env=None, cwd=None, check=True, timeout=300, stdin=None):
    """Launch a script of the repository as a user does, under torchrun where nproc > 1; the finished process.

    check: fail the test, with the script's output, where the exit code is not 0.
    """
    launcher = [sys.executable]
    if nproc > 1:
        launcher += ['-m', 'torch.distributed.run', '--standalone', f'--nproc_per_node={nproc}']
    environment = dict(os.environ, OMP_NUM_THREADS='1', **(env or {}))
    done = subprocess.run([*launcher, os.path.join(ROOT, script), *map(str, arguments)], capture_output=True, text=True,
                          env=environment, cwd=cwd or ROOT, timeout=timeout, input=stdin)
    assert done.returncode == 0 or not check, f'exit {done.returncode}\n{done.stdout}\n{done.stderr}'
    return done


def read_metrics(out_dir):
    """(training lines, evaluation lines) of a run: {iter: line}; of lines for the same iteration the last counts."""
    with open(os.path.join(out_dir, 'metrics.jsonl')) as file:
        lines = [json.loads(line) for line in file]
    return ({line['iter']: line for line in lines if 'loss' in line},
            {line['iter']: line for line in lines if 'val_loss' in line})
