"""Processes that mpirun, srun or another launcher starts train as those of torchrun do."""
import os
import shutil
import signal
import subprocess
import sys

import pytest
from helpers import ROOT, TINY, assert_near, read_run, saved_iterations, side_by_side
from launched import WAIT, logged_updates, slurm, wait_for, why_no_slurm

from kilogpt.parallel import launchers
from kilogpt.parallel.processes import LAUNCHED

SHORT = '--max_iters=3', '--eval_iters=0', '--keep_checkpoints=0'
OPEN_MPI = dict(OMPI_COMM_WORLD_RANK='{rank}', OMPI_COMM_WORLD_SIZE='2', OMPI_COMM_WORLD_LOCAL_RANK='{rank}',
                OMPI_COMM_WORLD_LOCAL_SIZE='2')
MPICH = dict(PMI_RANK='{rank}', PMI_SIZE='2', MPI_LOCALRANKID='{rank}', MPI_LOCALNRANKS='2')
CRAY = dict(PMI_RANK='{rank}', PMI_SIZE='2', PMI_LOCAL_RANK='{rank}', PMI_LOCAL_SIZE='2')
SRUN = dict(SLURM_PROCID='{rank}', SLURM_NTASKS='2', SLURM_STEP_NUM_TASKS='2', SLURM_LOCALID='{rank}',
            SLURM_STEP_TASKS_PER_NODE='2', SLURM_NODEID='0', SLURM_STEP_NODELIST='localhost', SLURM_JOB_ID='77',
            SLURM_STEP_ID='0')


def of_rank(variables, rank):
    return {name: value.format(rank=rank) for name, value in variables.items()}


@pytest.fixture
def adopted(monkeypatch):
    """A function that says what torchrun's variables are after `adopt`, given a launcher's."""
    def adopted(**variables):
        monkeypatch.setattr(launchers.socket, 'getaddrinfo', lambda host, port: None)
        # one thread, as in the tests of other files in this process
        monkeypatch.setattr(os, 'environ', variables | dict(OMP_NUM_THREADS='1'))
        launchers.adopt()
        return {name: os.environ[name] for name in ('RANK', 'WORLD_SIZE', 'LOCAL_RANK', 'LOCAL_WORLD_SIZE',
                                                    'MASTER_ADDR') if name in os.environ}
    return adopted


# --- two processes with the variables set by hand ---------------------------------------------------------

@pytest.fixture(scope='module')
def one_process(train):
    return train(*SHORT)


@pytest.mark.parametrize('variables', [OPEN_MPI, MPICH, CRAY, SRUN], ids=['mpirun', 'mpich', 'cray', 'srun'])
def test_two_processes_of_a_launcher_train_as_one(train, one_process, tmp_path, variables):
    fault = tmp_path / 'without_address.py'  # which the tests otherwise give to every run
    fault.write_text('import os\ndel os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]\n')
    job = dict(PMI_JOBID=str(tmp_path))  # another port for each test
    calls = [lambda rank=rank: train(*SHORT, out_dir=tmp_path / 'out', faults=[fault], timeout=60,
                                     env=of_rank(variables, rank) | job) for rank in (0, 1)]
    first, second = side_by_side(*calls)
    assert '2 process(es) on cpu' in first.stdout and not second.stdout
    assert_near(first, one_process)


@pytest.mark.quick
def test_run_looks_for_each_launcher():
    assert {count for _, count, _, _ in launchers.VARIABLES.values()} == {*LAUNCHED}


# --- which variables count --------------------------------------------------------------------------------

@pytest.mark.quick
def test_tasks_of_srun_on_several_nodes_find_the_first(adopted):
    task = SRUN | dict(SLURM_PROCID='5', SLURM_STEP_NUM_TASKS='6', SLURM_LOCALID='1', SLURM_NODEID='2',
                       SLURM_STEP_TASKS_PER_NODE='1,3,2', SLURM_STEP_NODELIST='gpu[07-08,11]')
    assert adopted(**task) == dict(RANK='5', WORLD_SIZE='6', LOCAL_RANK='1', LOCAL_WORLD_SIZE='2', MASTER_ADDR='gpu07')
    assert [launchers.first_host(text) for text in ('n1', 'a,b[1-2]', 'r[1,3]n[05-09]-x,c')] == ['n1', 'a', 'r1n05-x']
    assert [launchers.tasks_of_node('2(x3),1', node) for node in range(4)] == [2, 2, 2, 1]


@pytest.mark.quick
def test_port_is_that_of_the_job(adopted):
    ports = []
    for changed in ({}, {}, dict(SLURM_STEP_ID='1'), dict(SLURM_JOB_ID='78')):
        adopted(**of_rank(SRUN, 1) | changed)
        ports.append(int(os.environ['MASTER_PORT']))
    assert ports[0] == ports[1] and len(set(ports)) == 3 and min(ports) >= 20_000 and max(ports) < 30_000
    adopted(**of_rank(SRUN, 1), MASTER_PORT='1234')
    assert os.environ['MASTER_PORT'] == '1234'


@pytest.mark.quick
@pytest.mark.parametrize('variables', [
    dict(SLURM_NTASKS='8', SLURM_PROCID='0', SLURM_LOCALID='0', SLURM_NODEID='0'),  # the script of sbatch
    dict(SLURM_NTASKS='8', SLURM_JOB_ID='1'),  # the shell of salloc
    SRUN | dict(SLURM_PROCID='0', SLURM_NTASKS='8', SLURM_STEP_NUM_TASKS='1', SLURM_PTY_PORT='1'),  # srun --pty bash
    dict(OMPI_COMM_WORLD_RANK='0', OMPI_COMM_WORLD_SIZE='1', OMPI_COMM_WORLD_LOCAL_RANK='0',
         OMPI_COMM_WORLD_LOCAL_SIZE='1'), {}])
def test_process_that_nothing_was_started_beside_is_alone(adopted, variables):
    assert adopted(**variables) == {}


@pytest.mark.quick
def test_torchrun_within_a_launcher_counts(adopted):
    inner = dict(RANK='3', WORLD_SIZE='4', LOCAL_RANK='1', LOCAL_WORLD_SIZE='2', MASTER_ADDR='n1')
    for outer in (OPEN_MPI, MPICH, SRUN):
        assert adopted(**of_rank(outer, 1), **inner) == inner


@pytest.mark.quick
def test_task_with_a_rank_of_its_own_is_a_run_of_its_own(adopted):
    assert adopted(**of_rank(SRUN, 1), RANK='0') == dict(RANK='0')


@pytest.mark.quick
def test_mpirun_within_a_job_of_slurm_counts(adopted):
    helper = SRUN | dict(SLURM_PROCID='1', SLURM_LOCALID='0', SLURM_STEP_TASKS_PER_NODE='1(x2)', SLURM_NODEID='1')
    found = adopted(**helper, **of_rank(OPEN_MPI, 0))
    assert found == dict(RANK='0', WORLD_SIZE='2', LOCAL_RANK='0', LOCAL_WORLD_SIZE='2', MASTER_ADDR='127.0.0.1')


@pytest.mark.quick
@pytest.mark.parametrize('variables, sentence', [
    (OPEN_MPI | dict(OMPI_COMM_WORLD_SIZE='4'), 'mpirun has started 4 processes on several nodes .* MASTER_ADDR'),
    (MPICH | dict(PMI_SIZE='4'), 'mpiexec has started 4 processes on several nodes .* export MASTER_ADDR'),
    (dict(PMI_RANK='1', PMI_SIZE='4'), 'PMI_SIZE is 4, but .* export LOCAL_RANK'),
    (SRUN | dict(SLURM_PTY_PORT='1'), 'one of 2 tasks of srun --pty')])
def test_what_is_missing_is_said(adopted, variables, sentence):
    with pytest.raises(ValueError, match=sentence):
        adopted(**of_rank(variables, 1))


# --- real launchers ---------------------------------------------------------------------------------------

MPIRUN = next(filter(shutil.which, ('mpirun.openmpi', 'mpirun')), '')
MPIEXEC = shutil.which('mpiexec.mpich')
without_mpirun = pytest.mark.skipif(not MPIRUN, reason='mpirun is not installed (apt-get install openmpi-bin)')
without_mpich = pytest.mark.skipif(not MPIEXEC, reason='mpiexec.mpich is not installed (apt-get install mpich)')
MPIRUN_TWO = [MPIRUN, '--allow-run-as-root', '--oversubscribe', '-n', '2']
COMMANDS = [pytest.param(MPIRUN_TWO, marks=without_mpirun, id='mpirun'),
            pytest.param([MPIEXEC, '-n', '2'], marks=without_mpich, id='mpiexec')]


@pytest.mark.slow
@pytest.mark.parametrize('launcher', COMMANDS)
def test_real_launcher_trains_and_reports_an_error(dataset, train, tmp_path, launcher):
    command = [*launcher, sys.executable, 'train.py', *TINY, f'--dataset={dataset}', f'--out_dir={tmp_path}/out']
    environment = {name: value for name, value in os.environ.items() if name != 'OMP_NUM_THREADS'}
    done = subprocess.run(command, cwd=ROOT, timeout=WAIT, capture_output=True, text=True, env=environment)
    assert done.returncode == 0 and '2 process(es) on cpu' in done.stdout, done.stdout + done.stderr
    assert_near(read_run(tmp_path / 'out'), train())
    failed = subprocess.run([*command, '--tp=3'], cwd=ROOT, timeout=WAIT, capture_output=True, text=True)
    assert failed.returncode != 0 and 'error: tp' in failed.stderr, failed.stdout + failed.stderr
    measured = subprocess.run([*launcher, sys.executable, 'launch/bandwidth.py', '--device=cpu', '--max_mb=0.1'],
                              cwd=ROOT, timeout=WAIT, capture_output=True, text=True)
    assert 'all-reduce over 2 processes' in measured.stdout, measured.stderr


@pytest.mark.slow
@without_mpirun
def test_sigusr1_to_mpirun_saves_the_run(dataset, tmp_path):
    out_dir, log = tmp_path / 'out', tmp_path / 'log'
    command = [*MPIRUN_TWO, sys.executable, 'train.py', *TINY, '--max_iters=100000', f'--dataset={dataset}',
               f'--out_dir={out_dir}']
    with open(log, 'w') as file, subprocess.Popen(command, cwd=ROOT, stdout=file, stderr=file) as process:
        wait_for(lambda: len(logged_updates(out_dir)) > 3, log.read_text)
        process.send_signal(signal.SIGUSR1)
        process.wait(WAIT)
    assert 'stopped by SIG' in log.read_text() and saved_iterations(out_dir), log.read_text()


@pytest.mark.slow
@pytest.mark.skipif(why_no_slurm() is not None, reason=str(why_no_slurm()))
def test_srun_trains_with_a_process_for_each_task_and_sbatch_with_one(dataset, train, tmp_path):
    keys = *TINY, f'--dataset={dataset}', f'--out_dir={tmp_path}/out'
    program = sys.executable, f'{ROOT}/train.py', *keys
    with slurm(tmp_path) as cluster:
        launch = 'srun', '--nodes=2', '--ntasks=4', '--overcommit', '--kill-on-bad-exit=1'
        done = subprocess.run([*launch, *program], env=cluster.environment, capture_output=True, text=True,
                              timeout=WAIT)
        assert done.returncode and "rank 0 is on Slurm's node n1, a name that has no address" in done.stderr, done
        output = cluster.run('env', 'MASTER_ADDR=127.0.0.1', *launch, *program, '--batch_size=1',
                             '--gradient_accumulation_steps=12')
        assert '4 process(es) on cpu' in output and 'nodes       all share' in output
        assert_near(read_run(tmp_path / 'out'), train('--batch_size=1', '--gradient_accumulation_steps=12'))
        (tmp_path / 'job.sh').write_text(f'#!/bin/sh\n{" ".join(program)}\n')
        job = cluster.submit(options=['--nodes=1', '--ntasks=2', '--output=batch.log'], script='job.sh')
        cluster.wait_for_state(job, 'COMPLETED')
        assert '1 process(es) on cpu' in (tmp_path / 'batch.log').read_text()
