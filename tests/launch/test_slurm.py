"""launch/slurm.sh on a real Slurm: time limits, preemption and lost nodes do not change the curve."""
import time

import pytest
from helpers import FAULTS, TINY, assert_near, copy_repository, curve, read_run, saved_iterations
from launched import kill, logged_updates, slurm, wait_for, why_no_slurm

pytestmark = [pytest.mark.slow, pytest.mark.skipif(why_no_slurm() is not None, reason=str(why_no_slurm()))]

SLOW = FAULTS / 'slow_updates.py'
ENDLESS = ['--max_iters=100000', '--lr_decay_iters=1000', '--dropout=0.1', '--eval_interval=100000',
           '--save_interval=10', '--keep_checkpoints=2']


@pytest.fixture(scope='module')
def shared_cluster(tmp_path_factory):
    with slurm(copy_repository(tmp_path_factory.mktemp('slurm') / 'kiloGPT', 'launch')) as cluster:
        yield cluster


@pytest.fixture
def cluster(shared_cluster):
    yield shared_cluster
    shared_cluster.cancel_all()  # the job of a failed test would occupy the nodes


def test_job_on_two_nodes_follows_the_curve_of_one_process(cluster, train, dataset, tmp_path):
    job = cluster.submit(*TINY, f'--dataset={dataset}', f'--out_dir={tmp_path}')
    cluster.wait_for_state(job, 'COMPLETED')
    assert_near(read_run(tmp_path), train())
    names = sorted(path.name for path in cluster.checkout.glob(f'slurm-{job}*'))
    assert names == [f'slurm-{job}-node0.log', f'slurm-{job}-node1.log', f'slurm-{job}.log']
    assert f'nodes       all share {tmp_path}' in cluster.log(job), cluster.logs()


def test_bandwidth_is_measured_between_nodes(cluster):
    job = cluster.submit('launch/bandwidth.py', '--device=cpu', '--max_mb=0.1', '--repeats=2')
    cluster.wait_for_state(job, 'COMPLETED')
    log = cluster.log(job)
    assert 'all-reduce over 2 processes' in log and 'bus GB/s' in log, cluster.logs()


def test_container_runs_python_alone(cluster, dataset, tmp_path):
    """A stand-in for Apptainer notes the command that it would run in the image, and runs it here."""
    stand_in = tmp_path / 'apptainer'
    stand_in.write_text(f'#!/bin/bash\necho $PWD: $* >> {tmp_path}/calls.$SLURM_NODEID\nshift 5\nexec "$@"\n')
    stand_in.chmod(0o755)
    options = f'--export=ALL,CONTAINER=my.sif,PATH={tmp_path}:{cluster.environment["PATH"]}',
    job = cluster.submit(*TINY, f'--dataset={dataset}', f'--out_dir={tmp_path}/out', '--max_iters=2', options=options)
    cluster.wait_for_state(job, 'COMPLETED')
    assert list(read_run(tmp_path / 'out').lines) == [1, 2]
    for node in (0, 1):
        check, start = (tmp_path / f'calls.{node}').read_text().splitlines()
        begin = f'{cluster.checkout}: exec --nv --bind {cluster.checkout} my.sif '
        assert check.startswith(f'{begin}bash -c exec python launch/check_node.py'), check
        assert start.startswith(f'{begin}torchrun --nnodes=2') and 'train.py' in start, start


def test_container_without_apptainer_is_refused(cluster):
    job = cluster.submit('config/quickstart.py', options=['--export=ALL,CONTAINER=my.sif'])
    cluster.wait_for_state(job, 'FAILED')
    assert "CONTAINER is 'my.sif', but this node has neither apptainer nor singularity" in cluster.log(job)


# --- faults -----------------------------------------------------------------------------------------------

class Run:
    """An endless job. Measures the cost of each fault that the job survives."""

    def __init__(self, cluster, out_dir, dataset):
        self.cluster, self.out_dir = cluster, out_dir
        self.job = cluster.submit(SLOW, *TINY, *ENDLESS, f'--dataset={dataset}', f'--out_dir={out_dir}')

    def update(self, setting):
        self.cluster.run('scontrol', 'update', f'JobId={self.job}', setting)

    def train(self, updates):
        """Wait until the run has made that many more updates."""
        wanted = len(logged_updates(self.out_dir)) + updates
        wait_for(lambda: len(logged_updates(self.out_dir)) >= wanted, self.cluster.logs)

    def resumes(self):
        return self.cluster.log(self.job).count('resuming ')

    def lost(self):
        """How many updates the run has repeated."""
        updates = logged_updates(self.out_dir)
        return len(updates) - len(set(updates))

    def restarts(self):
        """How often Slurm has restarted the job."""
        return int(self.cluster.field(self.job, 'Restarts'))

    def killed(self):
        """How many starts a signal has ended. After each of them, slurm.sh requeues the job.

        After the loss of a node, Slurm may send SIGTERM and SIGKILL too late, so that they hit the next start.
        """
        return self.cluster.log(self.job).count('killed by a signal; another start')

    def survive(self, fault, strike, most_lost, restarts=1, mend=lambda: None):
        """Call strike(), and wait until the run has resumed and made an update.

        most_lost: number of updates that the run may lose. restarts: how often Slurm must restart the job,
        without restarts after such a signal. mend(): what the cluster's owner does after the fault.
        """
        self.train(12)
        resumes, lost = self.resumes(), self.lost()
        restarts += self.restarts() - self.killed()
        strike()
        struck = time.monotonic()
        mend()
        wait_for(lambda: self.resumes() > resumes, self.cluster.logs)
        last = max(logged_updates(self.out_dir))
        self.train(1)
        seconds = time.monotonic() - struck
        wait_for(lambda: max(logged_updates(self.out_dir)) > last, self.cluster.logs)
        assert self.restarts() == restarts + self.killed(), self.cluster.logs()
        lost = self.lost() - lost
        print(f'| {fault} | {lost} | {seconds:.0f} |', flush=True)
        assert lost <= most_lost, self.cluster.logs()


def test_run_survives_what_happens_on_a_cluster(cluster, train, dataset, tmp_path):
    """One job survives eight faults, with bit for bit the curve of a run without faults."""
    run = Run(cluster, tmp_path / 'out', dataset)

    def reach_time_limit():
        """Leave the current start one to two minutes, less than the 120 seconds of slurm.sh's signal."""
        minutes = int(cluster.run('squeue', '-h', '-j', run.job, '-O', 'TimeUsed').partition(':')[0])
        run.update(f'TimeLimit={minutes + 2}')

    def grant_a_day():
        cluster.wait_for_state(run.job, 'PENDING')
        run.update('TimeLimit=1440')

    def preempt():
        urgent = cluster.run('sbatch', '--parsable', '--partition=urgent', '--nodes=2', '--exclusive',
                             '--output=/dev/null', '--wrap=true')
        cluster.wait_for_state(urgent, 'COMPLETED')

    def lose(name):
        return lambda: cluster.lose_node(name)

    def bring_back(name):
        def mend():
            cluster.wait_for_state(run.job, 'PENDING')
            cluster.start_node(name)
        return mend

    # Faults that signal the run lose nothing. Faults that kill it lose at most the updates since the last but
    # one save.
    run.survive('second node lost', lose('n2'), 20, mend=bring_back('n2'))
    run.survive('first node lost', lose('n1'), 20, mend=bring_back('n1'))
    run.survive('time limit', reach_time_limit, 0, mend=grant_a_day)
    run.survive('process killed', lambda: kill([cluster.workers(run.out_dir)[1]]), 20, restarts=0)
    run.survive('torchrun killed', lambda: kill([cluster.torchruns(run.out_dir)['n2']]), 20, restarts=0)
    run.survive('`scontrol requeue`', lambda: cluster.run('scontrol', 'requeue', run.job), 0)
    run.survive('preemption', preempt, 0)
    cluster.run('scontrol', 'update', 'PartitionName=main', 'GraceTime=60')
    run.survive('preemption with a grace period', preempt, 0)
    run.train(5)
    cluster.run('scancel', run.job)
    cluster.wait_for_state(run.job, 'CANCELLED')
    last, = saved_iterations(run.out_dir)[-1:]
    assert f'stopped by SIGTERM at iteration {last};' in cluster.log(run.job), cluster.logs()
    unbroken = train(*ENDLESS, f'--max_iters={max(logged_updates(run.out_dir))}', nproc=2)
    assert curve(read_run(run.out_dir)) == curve(unbroken)


def test_array_trains_each_seed_in_its_own_folder(cluster, train, dataset):
    jobs = cluster.submit(*TINY, f'--dataset={dataset}', options=['--array=1-3', '--job-name=tiny'])
    for seed in (1, 2, 3):
        cluster.wait_for_state(f'{jobs}_{seed}', 'COMPLETED')
    for seed in (1, 3):
        assert_near(read_run(cluster.checkout / f'out-tiny-seed-{seed}'), train(f'--seed={seed}'))
    assert (cluster.checkout / 'out-tiny-seed-2' / 'ckpt' / 'iter_00000012').exists()


def test_job_that_cannot_run_fails_with_one_sentence_and_is_not_restarted(cluster, tmp_path):
    job = cluster.submit('--device=cuda', f'--out_dir={tmp_path}')
    cluster.wait_for_state(job, 'FAILED')
    sentences = [line for line in cluster.log(job).splitlines() if line.startswith('error: ')]
    assert [line.partition(' GPUs')[0] for line in sentences] == ['error: n1 has 0', 'error: n2 has 0']
    assert cluster.field(job, 'Restarts') == '0' and 'torchrun' not in cluster.log(job)


def test_run_that_fails_twice_in_the_same_place_is_not_restarted_again(cluster, dataset, tmp_path):
    script = tmp_path / 'slurm.sh'  # without torchrun's three restarts, which would take minutes
    script.write_text((cluster.checkout / 'launch/slurm.sh').read_text().replace('--max-restarts=3', ''))
    # A save in the background might not be complete at iteration 15.
    job = cluster.submit(FAULTS / 'fail_at_15.py', *TINY, *ENDLESS, '--async_checkpoint=False',
                         f'--dataset={dataset}', f'--out_dir={tmp_path}', script=script)
    cluster.wait_for_state(job, 'FAILED')
    assert cluster.field(job, 'Restarts') == '1', cluster.logs()
    assert saved_iterations(tmp_path) == [10]
    assert cluster.log(job).count('AssertionError: planted') >= 2
