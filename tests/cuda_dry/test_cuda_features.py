"""Everything once on a pretended GPU: each model, dtype, optimizer and ending of a run goes to its end.

Kernels do not run, so losses and norms mean nothing; each number that the host reads is 0, or what
faults/cuda_numbers.py says. What these tests see is all that the host does: devices, dtypes, shapes, memory,
streams, compilation for the H100, files.
"""
import json
import shutil

import pytest
from gpu_checks import BLOCKS, RUNS, write_data
from helpers import FAULTS, newest_tensors, run_forked, run_script, saved_iterations

# With cpu_offload the host computes with what the memory of gradients holds.
SHORT = '--max_iters=3 --eval_interval=3 --eval_iters=1 --on_nonfinite=skip'.split()
SMALL = '--n_layer=2 --n_head=4 --n_embd=64 --block_size=64 --batch_size=4 --gradient_accumulation_steps=2'.split()


@pytest.fixture(scope='session')
def folders(tmp_path_factory):
    """Data of each kind, and a trained model on which adapters and DPO build."""
    data = tmp_path_factory.mktemp('data')
    write_data(data)
    base = data / 'base'
    run_forked('train.py', '--device=cpu', '--compile=False', f'--dataset={data}', f'--out_dir={base}', *SMALL,
               *SHORT, *BLOCKS.split())
    run_forked('kilogpt.evaluate', base, f'--reference={data / "pairs"}', '--device=cpu')
    return data


def settings_of(model, folders):
    """The arguments of one of gpu_checks.MODELS."""
    from gpu_checks import MODELS
    needs_base = model in ('adapters', 'int8 base', 'bfloat16 base', 'pairs')
    dataset = dict(answers=folders / 'answers', pairs=folders / 'pairs').get(model, folders)
    return [*SMALL, *MODELS[model].split(), f'--dataset={dataset}',
            *([f'--init_from={folders / "base"}'] if needs_base else [])]


@pytest.mark.parametrize('model, settings', [
    (model, settings) for model, processes, settings, _ in RUNS if processes == 1])
def test_run_of_gpu_checks_goes_to_its_end(dry_run, folders, model, settings):
    run = dry_run(*settings_of(model, folders), *SHORT, '--compile=True', *settings.split())
    assert list(run.lines) == [1, 2, 3] and list(run.evals) == [0, 3]
    assert 'process(es) on cuda:0' in run.stdout and 'note' not in run.stdout, run.stdout
    assert all(line['mem_gb'] > 0 for line in run.lines.values())
