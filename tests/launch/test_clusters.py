"""Checkpoints on several nodes: outdated listings, folders that are not shared, and who writes what."""
import json
import os
import shutil

import pytest

from helpers import (FAULTS, ROOT, assert_same_tensors, curve, newest_tensors, run_forked, saved_iterations)
from kilogpt.run import checkpoint

# --- outdated listings ----------------------------------------------------------------------------------

OPTIONS = '--eval_iters=0', '--save_interval=4', '--keep_checkpoints=9'


@pytest.fixture(scope='module')
def unbroken(train):
    """A run that left checkpoints at 4, 8 and 12."""
    return train(*OPTIONS, nproc=2)


def resume_with_stale_listing(train, unbroken, folder, opens):
    """Resume the run from its checkpoint at 8, where rank 1 fails `opens` times to open a file."""
    out_dir = shutil.copytree(unbroken.out_dir, folder)
    shutil.rmtree(out_dir / 'ckpt' / 'iter_00000012')
    return train(*OPTIONS, '--init_from=resume', nproc=2, out_dir=out_dir, check=False, timeout=60,
                 faults=[FAULTS / 'stale_listing.py'], env=dict(FAULT_OPENS=str(opens)))


def test_processes_resume_from_the_same_checkpoint_although_one_sees_it_late(train, unbroken, tmp_path):
    resumed = resume_with_stale_listing(train, unbroken, tmp_path / 'out', opens=5)
    assert 'iter_00000008 at iteration 8' in resumed.stdout and resumed.codes == [0, 0], resumed.outputs
    assert curve(resumed) == curve(unbroken)
    assert_same_tensors(newest_tensors(resumed.out_dir), newest_tensors(unbroken.out_dir))


@pytest.mark.slow
def test_checkpoint_that_one_process_never_sees_ends_the_run_in_one_sentence(train, unbroken, tmp_path):
    refused = resume_with_stale_listing(train, unbroken, tmp_path / 'out', opens=1000)
    assert refused.codes == [1, 1], refused.outputs
    for line in refused.stderr.splitlines():
        assert line.startswith(f'error: {refused.out_dir}/ckpt/iter_00000008/.metadata of host ')
        assert line.endswith('this folder must be on storage that all nodes share')


# --- folders that are not shared ------------------------------------------------------------------------

TWO_NODES = """
import os, socket, sys
sys.path[0] = sys.argv[1]
import torch
from kilogpt.configurator import exit_on_error
from kilogpt.parallel.layout import Layout
from kilogpt.parallel.processes import Processes
from kilogpt.run import checkpoint, checkpoint_files

processes = Processes('cpu')
node = f'node{processes.rank}'
socket.gethostname = lambda: node
if sys.argv[2] == 'separate':
    os.makedirs(node, exist_ok=True)
    os.chdir(node)
    checkpoint_files.PATIENCE = 1
processes.join(Layout(processes.world_size))
with exit_on_error():
    if sys.argv[3] == 'start':
        checkpoint.check_shared('out', processes)
saver = checkpoint.Saver('out', 1)
for iteration in (1, 2):
    named = [(name, torch.nn.Parameter(torch.ones(8, 8))) for name in 'abcd']
    saver.save(iteration, named, None, dict(val_loss=None), background=True)
    saver.wait()
    print(saver.problem)
"""


def run_on_two_nodes(folder, *arguments):
    (folder / 'two_nodes.py').write_text(TWO_NODES)
    return run_forked(folder / 'two_nodes.py', ROOT, *arguments, nproc=2, cwd=folder, check=False)


def test_folder_that_is_not_shared_is_refused_at_the_start(tmp_path):
    refused = run_on_two_nodes(tmp_path, 'separate', 'start')
    assert refused.codes == [1, 1] and refused.stdout == '', refused.outputs
    for line in refused.stderr.splitlines():
        assert line.startswith(f'error: {tmp_path}/node') and 'of host node0 is not visible on node1' in line
    assert os.listdir(tmp_path / 'node0' / 'out') == []


@pytest.mark.slow
def test_save_into_a_folder_that_is_not_shared_fails(tmp_path):
    failed = run_on_two_nodes(tmp_path, 'separate', 'save')
    problem = ('host node0 does not see out/ckpt/iter_{:08d}.tmp/__1_0.distcp as host node1 wrote it: '
               'out_dir must be on storage that all nodes share')
    assert failed.stdout.splitlines() == [problem.format(1), problem.format(2)] * 2, failed.outputs
    assert saved_iterations(tmp_path / 'node0' / 'out') == []


def test_shared_folder_is_accepted(tmp_path):
    done = run_on_two_nodes(tmp_path, 'together', 'start')
    assert done.stdout.splitlines() == ['None'] * 4, done.outputs
    assert saved_iterations(tmp_path / 'out') == [2] and os.listdir(tmp_path / 'out') == ['ckpt']


# --- who writes what ------------------------------------------------------------------------------------

def test_plan_is_made_once_and_later_checkpoints_are_complete(train_all):
    """The last of six checkpoints that follow one plan equals that of a run that saves once."""
    options = ['--zero_stage=3', '--eval_iters=0', '--max_iters=6']
    runs = train_all(dict(often=[*options, '--save_interval=1'], once=options), nproc=2,
                     faults=[FAULTS / 'count_plans.py'])
    for run in runs.values():
        assert [len(output.split('plan made')) - 1 for output in run.outputs] == [1, 0], run.outputs
    assert saved_iterations(runs['often'].out_dir) == [5, 6] and saved_iterations(runs['once'].out_dir) == [6]
    for path in checkpoint.find(runs['often'].out_dir):
        assert checkpoint.damage(path) is None
    assert_same_tensors(newest_tensors(runs['often'].out_dir), newest_tensors(runs['once'].out_dir))


@pytest.mark.parametrize('nproc, layout', [
    (2, '--zero_stage=0'), pytest.param(4, '--zero_stage=2 --dp_replicate=2', marks=pytest.mark.slow)])
def test_processes_divide_what_they_copy_for_a_save(train, nproc, layout):
    run = train(*layout.split(), '--eval_iters=0', '--max_iters=2', nproc=nproc,
                faults=[FAULTS / 'count_staged.py'])
    total = sum(tensor.nbytes for tensor in newest_tensors(run.out_dir).values())
    staged = [json.loads(open(f'{run.out_dir}.staged.{rank}').read()) for rank in range(nproc)]
    assert sum(staged) == total
    assert max(staged) < 1.2 * total / nproc, staged
