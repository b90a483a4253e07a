"""Helpers for the tests of launch/: a checkout to launch from, and a Slurm of two nodes on this machine."""
import contextlib
import getpass
import os
import pathlib
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time

import pytest
from helpers import free_port

WAIT = 300  # seconds, enough for a loaded machine


def wait_for(condition, explain, seconds=WAIT):
    """Wait until condition() is true; returns its value. explain(): the message if it stays false."""
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline, explain()
        time.sleep(0.1)
    return found


def logged_updates(out_dir):
    """The iterations of a run's training lines so far, in the order of the lines, with repetitions."""
    path = pathlib.Path(out_dir, 'metrics.jsonl')
    return [int(i) for i in re.findall(r'"iter": (\d+), "loss"', path.read_text())] if path.exists() else []


def environments():
    """[(pid, its environment)] of every process."""
    found = []
    for pid in filter(str.isdigit, os.listdir('/proc')):
        with contextlib.suppress(OSError):
            text = pathlib.Path(f'/proc/{pid}/environ').read_bytes().decode(errors='replace')
            found.append((int(pid), dict(line.partition('=')[::2] for line in text.split('\0'))))
    return found


def end_of(path, n_lines=40):
    """The last lines of a log, without the lines of stack traces and of single iterations."""
    lines = path.read_text(errors='replace').splitlines()
    dull = re.compile(r'\s|frame #|iter \d|\{"|$')
    return '\n'.join([line[:300] for line in lines if not dull.match(line)][-n_lines:])


def kill(pids, number=signal.SIGKILL):
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


# --- Slurm ----------------------------------------------------------------------------------------------

PROGRAMS = 'munged', 'mungekey', 'slurmctld', 'slurmd', 'sbatch', 'srun', 'scontrol', 'squeue', 'scancel'
SEARCH_PATH = f'{os.path.dirname(sys.executable)}:{os.environ["PATH"]}:/usr/sbin:/sbin'  # daemons are in sbin

# Each of the two nodes has a GPU that exists only for Slurm. Jobs in the partition `urgent` preempt others.
# cred_expire is the time that a requeued job waits before Slurm starts it.
CONFIG = """
ClusterName=test
SlurmctldHost={host}
SlurmctldPort={ports[0]}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=10
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerParameters=batch_sched_delay=1,sched_interval=5,bf_interval=5
MpiDefault=none
ReturnToService=2
MinJobAge=100000
SlurmdTimeout=30
KillWait=120
MessageTimeout=60
BatchStartTimeout=120
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
StateSaveLocation={folder}/state
SlurmctldPidFile={folder}/slurmctld.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdSpoolDir={folder}/spool-%n
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmdLogFile={folder}/slurmd-%n.log
GresTypes=gpu
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=2 Gres=gpu:1
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=2 Gres=gpu:1
PartitionName=main Nodes=n1,n2 Default=YES PriorityTier=1
PartitionName=urgent Nodes=n1,n2 PriorityTier=2
"""


def why_no_slurm():
    """Why Slurm cannot be started on this machine; None if it can."""
    missing = [program for program in PROGRAMS if not shutil.which(program, path=SEARCH_PATH)]
    if missing:
        return f'{missing[0]} is not installed (apt-get install slurm-wlm munge)'
    if os.geteuid() != 0:
        return "only root can start Slurm's daemons in a folder of its own"
    try:
        socket.getaddrinfo(socket.gethostname(), None)
    except OSError:
        return f"this machine's own name, {socket.gethostname()}, has no address"


class Cluster:
    """A Slurm of two nodes on this machine, with its files in `folder`. checkout: the folder of its jobs."""

    def __init__(self, checkout):
        self.checkout = checkout
        self.folder = pathlib.Path(tempfile.mkdtemp(prefix='slurm-'))  # a socket's path must be short
        self.config = self.folder / 'slurm.conf'
        self.environment = dict(os.environ, PATH=SEARCH_PATH, SLURM_CONF=str(self.config),
                                OMP_NUM_THREADS='1')
        self.daemons = {}  # {name: Popen}

    def start(self):
        self.config.write_text(CONFIG.format(host=socket.gethostname(), folder=self.folder,
                                             ports=[free_port() for _ in range(3)]))
        (self.folder / 'gres.conf').write_text('Name=gpu File=/dev/null\n')
        key = self.folder / 'munge.key'
        self.run('mungekey', '--create', f'--keyfile={key}')
        files = [f'--{kind}-file={self.folder}/munge.{kind}' for kind in ('pid', 'log', 'seed')]
        self.start_daemon('munged', '--foreground', '--force', f'--key-file={key}',
                          f'--socket={self.folder}/munge.socket', *files)
        wait_for((self.folder / 'munge.socket').exists, self.logs)
        self.start_daemon('slurmctld', '-D')
        for name in ('n1', 'n2'):
            self.start_node(name)
        self.wait_for_nodes()

    def start_daemon(self, name, *options, **environment):
        with open(self.folder / f'{name}.stderr', 'a') as file:
            program = shutil.which(name.partition(' ')[0], path=SEARCH_PATH)
            self.daemons[name] = subprocess.Popen(
                [program, *options], stdin=subprocess.DEVNULL, stdout=file, stderr=file,
                env=self.environment | environment)

    def start_node(self, name):
        self.start_daemon(f'slurmd {name}', '-D', '-N', name, SLURMD_NODENAME=name)

    def wait_for_nodes(self):
        wait_for(lambda: self.run('sinfo', '-h', '-p', 'main', '-t', 'idle', '-o', '%D') == '2', self.logs)

    def lose_node(self, name):
        """Kill all processes of a node, as a power failure would."""
        self.daemons[f'slurmd {name}'].kill()
        kill(pid for pid, environment in self.processes() if environment.get('SLURMD_NODENAME') == name)
        self.daemons[f'slurmd {name}'].wait()

    def processes(self):
        """[(pid, environment)] of the processes of this cluster."""
        return [(pid, environment) for pid, environment in environments()
                if environment.get('SLURM_CONF') == str(self.config)]

    def processes_of(self, out_dir):
        """[(pid, environment, command line)] of the processes of a run and of their torchruns."""
        found = []
        for pid, environment in self.processes():
            with contextlib.suppress(OSError):  # it has ended
                command = pathlib.Path(f'/proc/{pid}/cmdline').read_text()
                if f'--out_dir={out_dir}\0' in command:
                    found.append((pid, environment, command))
        return found

    def workers(self, out_dir):
        """{rank: pid} of the processes of a run."""
        return {int(environment['RANK']): pid for pid, environment, _ in self.processes_of(out_dir)
                if 'RANK' in environment}

    def torchruns(self, out_dir):
        """{name of the node: pid} of the torchrun processes of a run."""
        return {environment['SLURMD_NODENAME']: pid
                for pid, environment, command in self.processes_of(out_dir)
                if '/torchrun\0' in command and 'RANK' not in environment}

    def run(self, *command):
        """Run a command of Slurm, which must succeed; returns its output."""
        done = subprocess.run([*map(str, command)], env=self.environment, cwd=self.checkout, text=True,
                              capture_output=True)
        assert done.returncode == 0, f'{command}\n{done.stdout}\n{done.stderr}\n{self.logs()}'
        return done.stdout.strip()

    def submit(self, *arguments, options=(), script='launch/slurm.sh'):
        """Submit a script as a job on two nodes; returns the job's number. options: of sbatch."""
        options = '--parsable', '--gpus-per-node=1', '--cpus-per-task=1', *options
        return self.run('sbatch', *options, script, *arguments)

    def field(self, job, name):
        """A field that Slurm shows for a job, such as JobState: PENDING, RUNNING, COMPLETED, ..."""
        fields = self.run('scontrol', '--oneliner', 'show', 'job', job).split()
        return next(field.partition('=')[2] for field in fields if field.startswith(f'{name}='))

    def log(self, job):
        """The output of a job and of its nodes so far."""
        return '\n'.join(path.read_text() for path in sorted(self.checkout.glob(f'slurm-{job}[.-]*log')))

    def logs(self):
        """The ends of all logs, for the message of a failed test."""
        paths = [*self.folder.glob('*.stderr'), *self.folder.glob('*.log'),
                 *sorted(self.checkout.glob('slurm-*.log'))]
        return '\n'.join(f'--- {path}\n{end_of(path)}' for path in paths)

    def wait_for_state(self, job, wanted):
        def is_wanted():
            state = self.field(job, 'JobState')
            has_ended = state in ('CANCELLED', 'COMPLETED', 'FAILED', 'NODE_FAIL', 'TIMEOUT')
            assert state == wanted or not has_ended, f'job {job} is {state}, not {wanted}\n{self.logs()}'
            return state == wanted

        wait_for(is_wanted, self.logs)

    def cancel_all(self):
        """Cancel all jobs, and wait until their processes have ended."""
        self.run('scancel', '--user', getpass.getuser())
        wait_for(lambda: not self.run('squeue', '-h'), self.logs)

    def end(self):
        for daemon in self.daemons.values():
            daemon.kill()
            daemon.wait()
        while remaining := self.processes():  # jobs and slurmstepd, which are not children of this process
            kill(pid for pid, _ in remaining)
            time.sleep(0.1)
        shutil.rmtree(self.folder, ignore_errors=True)


@contextlib.contextmanager
def slurm(checkout):
    """A context with a running Cluster. Skips the tests if Slurm does not start."""
    cluster = Cluster(checkout)
    try:
        try:
            cluster.start()
        except AssertionError:
            print(cluster.logs())
            pytest.skip('Slurm is installed, but does not start here: python -m pytest -rs -s says why')
        yield cluster
    finally:
        cluster.end()
