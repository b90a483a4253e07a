"""Every layout equals one process: launched under torchrun over gloo, compared through metrics.jsonl and checkpoints.

Tolerances: float32 sums in another order differ by some 1e-7 in a loss of 4; AdamW's normalised updates raise that over eight
iterations, most in weights whose gradients nearly cancel. 1e-4 (1e-3 relative of a norm) is far above that, and far below what
a wrong factor, a lost token, head, layer or a double-counted gradient would do.
"""
import hashlib
import itertools
import json
import os
import re
import socket
import subprocess
import sys

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp

import checkpoint
from conftest import ROOT, read_metrics

pytestmark = pytest.mark.filterwarnings('ignore:torch.distributed is disabled')
BASE = ('--device=cpu --compile=False --dtype=float32 --n_layer=7 --n_head=4 --n_embd=32 --block_size=32 --batch_size=4 '
        '--gradient_accumulation_steps=6 --eval_iters=3 --eval_interval=5 --log_interval=1 --max_iters=8 --lr_decay_iters=12 '
        '--warmup_iters=2 --learning_rate=2e-3 --min_lr=1e-3 --grad_clip=0.5 --comm_timeout=60').split()
MODELS = dict(gpt2='--bias', modern='--n_kv_head=2 --pos=rope --norm=rmsnorm --mlp=swiglu --qk_norm --tie_weights=False --softcap=15')
SCHEDULES = 'gpipe', '1f1b', 'interleaved1f1b', 'interleavedzb', 'zbv', 'dualpipev'

# {processes: {layout: its arguments}}; a name that starts with 'modern' trains that model, else it is GPT-2 with tied weights
LAYOUTS = {
    1: {'zero3': '--zero_stage=3', 'modern full': '--activation_checkpoint=full'},
    2: {'zero1': '--zero_stage=1', 'zero2': '--zero_stage=2', 'modern zero3': '--zero_stage=3', 'tp2': '--tp=2', 'cp2': '--cp=2',
        **{f'pp2 {schedule}': f'--pp=2 --pp_schedule={schedule}' for schedule in SCHEDULES},
        'modern tp2': '--tp=2', 'modern cp2 zero1': '--cp=2 --zero_stage=1', 'modern pp2 1f1b': '--pp=2',
        'modern pp2 zbv': '--pp=2 --pp_schedule=zbv', 'offload': '--zero_stage=2 --cpu_offload',
        'selective': '--tp=2 --activation_checkpoint=selective', 'modern full zero3': '--zero_stage=3 --activation_checkpoint=full',
        'full pp2': '--pp=2 --activation_checkpoint=full', 'zero2 compiled': '--zero_stage=2 --compile=True',
        'modern tp2 compiled': '--tp=2 --compile=True'},
    3: {'zero1': '--zero_stage=1', 'modern zero2': '--zero_stage=2', 'zero3': '--zero_stage=3'},
    4: {'modern zero1': '--zero_stage=1', 'zero2': '--zero_stage=2', 'zero3': '--zero_stage=3',
        'hsdp': '--zero_stage=2 --dp_replicate=2', 'modern hsdp zero3': '--zero_stage=3 --dp_replicate=2', 'tp4': '--tp=4',
        'modern cp4': '--cp=4', 'cp4 zero3': '--cp=4 --zero_stage=3',
        **{f'pp4 {schedule}': f'--pp=4 --pp_schedule={schedule}' for schedule in SCHEDULES},
        'tp2 dp2': '--tp=2 --zero_stage=3', 'modern pp2 dp2': '--pp=2', 'cp2 dp2': '--cp=2', 'modern tp2 cp2': '--tp=2 --cp=2',
        'tp2 pp2 zbv': '--tp=2 --pp=2 --pp_schedule=zbv', 'modern tp2 pp2': '--tp=2 --pp=2 --zero_stage=3'},
    8: {'pp2 tp2 dp2': '--pp=2 --tp=2', 'modern cp2 pp2 dp2 interleavedzb': '--cp=2 --pp=2 --pp_schedule=interleavedzb',
        'modern tp2 cp2 pp2': '--tp=2 --cp=2 --pp=2'},
}


def matrix():
    """The larger matrix: every product of degrees on 4 and 8 processes, with every stage and mode that it allows."""
    for nproc, tp, cp, pp, stage, mode in itertools.product((4, 8), (1, 2, 4), (1, 2, 4), (1, 2, 4), (2, 3),
                                                            ('none', 'selective', 'full')):
        for model in MODELS:
            if nproc % (tp * cp * pp) == 0 and tp * cp <= 4 and not (model == 'modern' and tp == 4):
                for schedule in SCHEDULES if pp > 1 and mode == 'none' else ['1f1b']:
                    yield nproc, f'{model} tp{tp} cp{cp} pp{pp} zero{stage} {mode} {schedule}', (
                        f'--tp={tp} --cp={cp} --pp={pp} --zero_stage={stage} --activation_checkpoint={mode} --pp_schedule={schedule}')


def launch(nproc, runs, folder, timeout=600):
    """Make runs [(name, arguments, files to execute before ...)] one after another in one launch; {name: {rank: what it said}}."""
    path = folder / f'runs-{nproc}'
    sockets = [socket.create_server(('127.0.0.1', 0)) for _ in runs]
    path.write_text(json.dumps([[name.replace(' ', '_'), one.getsockname()[1], *rest] for one, (name, *rest) in zip(sockets, runs)]))
    for one in sockets:
        one.close()
    launcher = [sys.executable, '-m', 'torch.distributed.run', '--standalone', f'--nproc_per_node={nproc}']
    done = subprocess.run([*launcher, os.path.join(ROOT, 'tests', 'several.py'), str(path)], capture_output=True, text=True,
                          env=dict(os.environ, OMP_NUM_THREADS='1'), timeout=timeout)
    assert done.returncode == 0, done.stderr
    return {name: {rank: (folder / f'runs-{nproc}.{name.replace(" ", "_")}.{rank}').read_text() for rank in range(nproc)}
            for name, *_ in runs}


def weights(out_dir):
    """The newest checkpoint's weights, whole."""
    reader = dcp.FileSystemReader(checkpoint.find(out_dir)[0])
    state = {name: torch.empty(stored.size) for name, stored in reader.read_metadata().state_dict_metadata.items()
             if name.startswith('model.')}
    dcp.load(state, storage_reader=reader)
    return state


@pytest.fixture(scope='session')
def runs(dataset, tmp_path_factory):
    """Function (processes, layout name) -> (out_dir, what its rank 0 said); all layouts of that many processes run at first use."""
    folder, said = tmp_path_factory.mktemp('layouts'), {}

    def get(nproc, name, layouts=LAYOUTS):
        if nproc not in said:
            wanted = {**(MODELS if nproc == 1 else {}), **layouts.get(nproc, {})}
            said[nproc] = launch(nproc, [
                (key, [*BASE, *MODELS['modern' if key.startswith('modern') else 'gpt2'].split(), *arguments.split(),
                       f'--dataset={dataset}', f'--out_dir={folder}/{nproc}/{key}']) for key, arguments in wanted.items()], folder,
                timeout=60 + 30 * len(wanted))
        return folder / str(nproc) / name, said[nproc][name]

    return get


def assert_equal_to_one_process(runs, nproc, name, **options):
    one_dir, _ = runs(1, 'modern' if name.startswith('modern') else 'gpt2')
    out_dir, said = runs(nproc, name, **options)
    assert said[0].endswith('exit code 0\n'), '\n'.join(said.values())
    (lines, evals), (expected_lines, expected_evals) = read_metrics(out_dir), read_metrics(one_dir)
    assert list(lines) == list(expected_lines) == list(range(1, 9)) and list(evals) == list(expected_evals) == [0, 5, 8]
    for i, expected in expected_lines.items():
        assert lines[i]['loss'] == pytest.approx(expected['loss'], abs=1e-4), f'loss of iteration {i}'
        assert lines[i]['grad_norm'] == pytest.approx(expected['grad_norm'], rel=1e-3), f'gradient norm of iteration {i}'
        assert expected['grad_norm'] > 0.5  # clipping is at work
    for i, expected in expected_evals.items():
        for key in ('train_loss', 'val_loss'):
            assert evals[i][key] == pytest.approx(expected[key], abs=1e-4), f'{key} at iteration {i}'
    ours, theirs = weights(out_dir), weights(one_dir)
    assert ours.keys() == theirs.keys()
    for key in theirs:
        # a key's bias shifts all scores of a query alike: its gradient is zero but for rounding, which AdamW makes steps of
        if not key.endswith('c_k.bias') or name.startswith('modern'):
            assert (ours[key] - theirs[key]).abs().max() < 1e-4, key


@pytest.mark.parametrize('nproc, name', [(nproc, name) for nproc, layouts in LAYOUTS.items() for name in layouts])
def test_layout_equals_one_process(runs, nproc, name):
    assert_equal_to_one_process(runs, nproc, name)


@pytest.mark.matrix
@pytest.mark.parametrize('nproc, name', [(nproc, name) for nproc, name, _ in matrix()])
def test_matrix(runs, nproc, name):
    layouts = {}
    for processes, key, arguments in matrix():
        layouts.setdefault(processes, {})[key] = arguments
    assert_equal_to_one_process(runs, nproc, name, layouts=layouts)
