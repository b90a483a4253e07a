"""launch/slurm.sh on a real Slurm: what time limits, preemption and lost nodes do to a run changes nothing."""
import os
import signal
import time

import pytest
from helpers import FAULTS, TINY, assert_near, curve, read_run, saved_iterations
from launched import copy_checkout, kill, last_iteration, logged_lines, slurm, wait_for, why_no_slurm

pytestmark = [pytest.mark.slow, pytest.mark.skipif(why_no_slurm() is not None, reason=str(why_no_slurm()))]

SLOW = FAULTS / 'slow_updates.py'
ENDLESS = ['--max_iters=100000', '--lr_decay_iters=1000', '--dropout=0.1', '--eval_interval=100000',
           '--save_interval=10', '--keep_checkpoints=2']


@pytest.fixture(scope='module')
def cluster(tmp_path_factory):
    with slurm(copy_checkout(tmp_path_factory.mktemp('slurm') / 'kiloGPT')) as cluster:
        yield cluster


def test_job_on_two_nodes_follows_the_curve_of_one_process(cluster, train, dataset, tmp_path):
    job = cluster.submit(*TINY, f'--dataset={dataset}', f'--out_dir={tmp_path}')
    cluster.wait_for_state(job, 'COMPLETED')
    assert_near(read_run(tmp_path), train())
    names = sorted(path.name for path in cluster.checkout.glob(f'slurm-{job}*'))
    assert names == [f'slurm-{job}-node0.log', f'slurm-{job}-node1.log', f'slurm-{job}.log']
    assert f'nodes       all share {tmp_path}' in cluster.log(job), cluster.logs()
