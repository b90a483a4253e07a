"""Everything once on a pretended GPU: models, dtypes, optimizers, configs, files and endings of a run.

Kernels do not run, so losses and norms mean nothing: each number that the host reads is 0. These tests see what the
host does: devices, dtypes, shapes, memory, compilation for the H100, files. Where a decision needs a number,
faults/norms.py says which.
"""
import pathlib

import pytest

from cuda_helpers import SHORT, SMALL, copies_from_pageable_memory, products_of
from gpu_checks import MODELS, RUNS
from helpers import FAULTS, ROOT, TINY, newest_tensors, run_forked, run_script, saved_iterations


def check(run):
    """A run of SHORT has gone to its end on the GPU, and nothing fell back to something else."""
    assert list(run.lines) == [1, 2, 3] and list(run.evals) == [0, 3]
    assert 'process(es) on cuda:0' in run.stdout and 'note ' not in run.stdout, run.stdout
    assert all(line['mem_gb'] > 0 for line in run.lines.values())


# --- models, in the settings in which gpu_checks.py compares their losses -----------------------------------

@pytest.mark.parametrize('model, settings', [
    (model, settings) for model, processes, settings, _ in RUNS if processes == 1])
def test_model_trains(dry_run, folders, model, settings):
    begins_with_base = model in ('adapters', 'int8 base', 'bfloat16 base', 'pairs')
    dataset = dict(answers=folders / 'answers', pairs=folders / 'pairs').get(model, folders)
    check(dry_run(*SMALL, *MODELS[model].split(), f'--dataset={dataset}', *SHORT, '--compile=True',
                  f'--init_from={folders / "base" if begins_with_base else "scratch"}', *settings.split()))


DTYPES = {'float32': 'product in float32', 'bfloat16': 'product in bfloat16', 'float16': 'product in float16'}


@pytest.mark.parametrize('dtype', DTYPES)
def test_products_have_the_dtype(dry_run, dtype):
    run = dry_run(*SHORT, f'--dtype={dtype}')
    check(run)
    assert products_of(run) == {DTYPES[dtype]}


@pytest.mark.parametrize('settings', [
    '--optimizer=muon', '--optimizer=muon --dtype=float16', '--activation_checkpoint=selective',
    '--activation_checkpoint=full', '--zero_stage=2 --optimizer=muon', '--zero_stage=3 --cpu_offload=True',
    '--dropout=0.1', '--deterministic=True', '--grad_clip=0', '--mlp=moe --n_experts=4', '--head_width=16 --bias=True'])
def test_setting_trains(dry_run, settings):
    check(dry_run(*SHORT, '--dtype=bfloat16', *settings.split()))


# --- configs ------------------------------------------------------------------------------------------------

ONE_GPU = '--tp=1 --pp=1 --ep=1 --dp_replicate=1 --wandb_log=False --compile=False'.split()


@pytest.mark.parametrize('name', sorted(path.stem for path in pathlib.Path(ROOT, 'config').glob('*.py')))
def test_config_runs_at_a_small_size(dry_run, folders, name):
    text = pathlib.Path(ROOT, 'config', f'{name}.py').read_text()
    settings = [f'--dataset={folders}', '--sample_prompts=\u0105']
    if 'init_from' in text:
        settings += [f'--init_from={folders / "base"}', f'--dataset={folders / ("pairs" if name == "dpo" else "")}']
    if 'head_width' in text:
        settings.append('--head_width=32')
    run = dry_run(*SMALL, *SHORT, *ONE_GPU, *settings, base=[f'{ROOT}/config/{name}.py'])
    if 'eval_only' in text:
        assert 'step 0: train loss' in run.stdout and 'process(es) on cuda:0' in run.stdout
    else:
        check(run)


# --- files and endings --------------------------------------------------------------------------------------

def test_checkpoint_from_pinned_copies_has_the_bytes_of_the_gpu(dry_run, train):
    """On the pretended GPU weights stay as they were made, and on the CPU they do at a learning rate of 0."""
    run = dry_run('--max_iters=5', '--save_interval=2', '--dtype=bfloat16')
    assert saved_iterations(run.out_dir) == [4, 5]
    assert copies_from_pageable_memory(run) == set()
    resumed = dry_run('--max_iters=7', '--init_from=resume', out_dir=run.out_dir)
    assert list(resumed.lines) == [1, 2, 3, 4, 5, 6, 7] and 'resuming' in resumed.stdout
    on_cpu = newest_tensors(train('--max_iters=1', '--learning_rate=0', '--min_lr=0').out_dir)
    saved = newest_tensors(resumed.out_dir)
    weights = [name for name in on_cpu if name.startswith('model')]
    assert weights and all((saved[name] == on_cpu[name]).all() for name in weights)


def test_replay_and_sampling_and_evaluation(dry_run, folders):
    questions = folders / 'questions.jsonl'
    run = dry_run(*SMALL, *SHORT, f'--dataset={folders}', '--dtype=bfloat16', f'--eval_tasks={questions}',
                  '--sample_interval=3', '--sample_prompts=\u0105', '--sample_tokens=5', '--save_interval=1')
    assert 'tasks at iteration 3' in run.stdout and 'sample at iteration 3' in run.stdout
    sampled = run_forked('sample.py', f'--out_dir={run.out_dir}', '--device=cuda', '--num_samples=1',
                         '--max_new_tokens=5', '--start=\u0105\u0107')
    assert sampled.stdout.startswith('\u0105\u0107' + 5 * '\u0100')
    scored = run_forked('kilogpt.evaluate', run.out_dir, f'--tasks={questions}', '--device=cuda')
    assert 'questions' in scored.stdout
    replayed = run_forked('kilogpt.replay', run.out_dir, '2')
    assert 'iterations agree with' in replayed.stdout


def test_profile_is_written(dry_run):
    run = dry_run(*SHORT, '--profile=True')
    assert 'profile of 3 iteration(s)' in run.stdout and (run.out_dir / 'trace.json').exists()


def test_update_that_is_not_finite_is_skipped_or_ends_the_run(dry_run):
    options = dict(faults=[FAULTS / 'norms.py'], env=dict(FAULT_ITERATIONS='2', FAULT_NORM='nan'))
    run = dry_run(*SHORT, '--dtype=bfloat16', **options)
    assert list(run.lines) == [1, 2, 3] and 'update skipped (1 so far)' in run.stdout
    run = dry_run(*SHORT, '--dtype=bfloat16', '--on_nonfinite=abort', check=False, **options)
    assert run.returncode == 1 and 'gradient norm of iteration 2 is nan' in run.stderr


def test_spikes_in_a_row_lead_back_to_a_checkpoint(dry_run):
    run = dry_run('--max_iters=26', '--lr_decay_iters=26', '--eval_iters=0', '--save_interval=18',
                  '--on_spike=rollback', faults=[FAULTS / 'norms.py'],
                  env=dict(FAULT_ITERATIONS='20 21 22 23', FAULT_NORM='100'))
    assert '4 spikes in a row: going back to' in run.stdout and list(run.lines)[-1] == 26


def test_sigterm_saves_and_ends_the_run(dry_run):
    run = dry_run('--max_iters=12', faults=[FAULTS / 'sigterm.py'], env=dict(FAULT_ITERATION='4'), check=False)
    assert run.returncode == 143 and saved_iterations(run.out_dir)[-1] == 4


def test_what_an_h100_cannot_hold_ends_the_run(dataset, tmp_path):
    run = run_script('train.py', *TINY, '--device=cuda', f'--dataset={dataset}', f'--out_dir={tmp_path}/out',
                     '--n_embd=32768', '--n_head=256', '--n_layer=40', check=False)
    assert run.returncode == 1 and 'error: GPU 0 is out of memory: ' in run.stderr and 'Traceback' not in run.stderr
