"""The planner's memory against that of PyTorch's allocator, which is the real one on a pretended GPU."""
import json

import pytest
from helpers import FAULTS

# GPT-2's width, so that the 67 MB of cuBLAS's workspaces are a small part.
WIDE = ('--n_layer=4 --n_head=12 --n_embd=768 --block_size=1024 --batch_size=6 --dtype=bfloat16 --max_iters=3 '
        '--eval_iters=0 --keep_checkpoints=0 --log_interval=1 --on_nonfinite=skip').split()
LAYOUTS = {'': 1, '--activation_checkpoint=selective': 1, '--activation_checkpoint=full': 1, '--optimizer=muon': 1,
           '--zero_stage=3': 2, '--tp=2': 2}


@pytest.fixture(scope='session')
def tokens(tmp_path_factory):
    from data.make.prepare import write_random_tokens
    folder = tmp_path_factory.mktemp('tokens')
    write_random_tokens(folder, 50257, 2 ** 16)
    return folder


@pytest.mark.parametrize('settings', LAYOUTS)
def test_tensors_of_an_iteration_are_as_predicted(dry_run, tokens, settings):
    run = dry_run(*WIDE, f'--dataset={tokens}', '--gradient_accumulation_steps=4', *settings.split(),
                  nproc=LAYOUTS[settings], faults=[FAULTS / 'cuda_memory.py'])
    with open(f'{run.out_dir}.memory.0', encoding='utf-8') as file:
        found = json.load(file)
    assert sum(found['predicted'].values()) == pytest.approx(found['allocated'], rel=0.05)


def test_memory_of_a_graph_is_logged(dry_run, tokens):
    """A graph is recorded before AdamW has its state, and its tensors do not count as allocated afterwards."""
    memory = {}
    for cuda_graph in (True, False):
        run = dry_run(*WIDE, f'--dataset={tokens}', '--gradient_accumulation_steps=2', '--compile=True',
                      f'--cuda_graph={cuda_graph}')
        memory[cuda_graph] = run.lines[3]['mem_gb']
    assert memory[True] == pytest.approx(memory[False], rel=0.08)
