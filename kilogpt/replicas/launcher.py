"""Starts the replicas of a run on one machine, and the lighthouse at which they meet.

    python -m kilogpt.replicas --replicas=3 train.py config/quickstart.py

The processes of a replica that loses one are started again, while those of the others go on.
"""
import argparse
import os
import signal
import socket
import subprocess
import sys
import time

from kilogpt.configurator import config_of, exit_on_error

# The lighthouse ends with the launcher, whose end of the pipe it reads. torchft_lighthouse is the same as a command.
LIGHTHOUSE = '''
import sys
from torchft.coordination import LighthouseServer
server = LighthouseServer(bind=sys.argv[1], min_replicas=1, join_timeout_ms=int(sys.argv[2]),
                          heartbeat_timeout_ms=1000, quorum_tick_ms=20)
sys.stdin.read()
'''
FAILS_TOGETHER = 2  # seconds within which all replicas end if the run itself has failed
GRACE = 10  # seconds that the other replicas have for their end after the first has ended


def parse_arguments():
    parser = argparse.ArgumentParser(prog='python -m kilogpt.replicas', description=__doc__.partition('\n')[0])
    parser.add_argument('--replicas', type=int, default=2, help='replicas of the model on this machine')
    parser.add_argument('--nproc_per_replica', type=int, default=1, help='processes of each replica')
    parser.add_argument('--max_restarts', type=int, default=10, help='how often each replica may be started again')
    parser.add_argument('script', help='train.py')
    parser.add_argument('arguments', nargs=argparse.REMAINDER, help='its config files and --key=value')
    options = parser.parse_args()
    for key, least in (('replicas', 1), ('nproc_per_replica', 1), ('max_restarts', 0)):
        if getattr(options, key) < least:
            raise ValueError(f'--{key} is {getattr(options, key)}: it must be at least {least}')
    return options


def free_port():
    with socket.socket() as probe:
        probe.bind(('', 0))
        return probe.getsockname()[1]


class Group:
    """The processes of one replica, each a child of this process."""

    def __init__(self, number, options, environment):
        self.number, self.options, self.environment = number, options, environment
        self.restarts = 0
        self.failed_at = None
        self.start()

    def start(self):
        count = self.options.nproc_per_replica
        environment = self.environment | dict(
            REPLICA_GROUP_ID=str(self.number), TORCHELASTIC_RESTART_COUNT=str(self.restarts), WORLD_SIZE=str(count),
            LOCAL_WORLD_SIZE=str(count), MASTER_ADDR='127.0.0.1', MASTER_PORT=str(free_port()))
        command = [sys.executable, self.options.script, *self.options.arguments, '--fault_tolerance=replicas']
        # A replica takes the GPUs that follow those of the replica before.
        self.processes = [subprocess.Popen(command, env=environment | dict(
            RANK=str(rank), LOCAL_RANK=str(self.number * count + rank))) for rank in range(count)]

    def exit_code(self):
        """None while all run, then the lowest exit code other than 0, or 0 if all have ended with it.

        The code of a process that was killed is negative. That of another, which noticed it, is not.
        """
        codes = [process.poll() for process in self.processes]
        return min((code for code in codes if code), default=None if None in codes else 0)

    def send(self, number):
        for process in self.processes:
            if process.poll() is None:
                process.send_signal(number)

    def restart(self):
        """Start all processes of the replica again; returns whether that was allowed."""
        self.send(signal.SIGKILL)
        for process in self.processes:
            process.wait()
        if self.restarts == self.options.max_restarts:
            return False
        self.restarts += 1
        self.failed_at = None
        self.start()
        return True


def start_lighthouse(port, timeout):
    """Start the lighthouse. timeout: the seconds that it waits for a replica, replica_timeout."""
    return subprocess.Popen([sys.executable, '-c', LIGHTHOUSE, f'0.0.0.0:{port}', str(int(1000 * timeout))],
                            stdin=subprocess.PIPE, env=dict(os.environ, RUST_LOG='error'))


def main():
    """Run train.py as replicas; ends with the exit code of the run."""
    with exit_on_error():
        options = parse_arguments()
        timeout = config_of(options.script, options.arguments)['replica_timeout']
    port, received = free_port(), []
    for name in ('SIGTERM', 'SIGINT'):
        signal.signal(getattr(signal, name), lambda number, frame: received.append(number))
    lighthouse = start_lighthouse(port, timeout)  # its clients find it, since they take longer to start
    # With stack traces of connections to a lost process, warnings of torch would hide the lines that matter.
    environment = dict(TORCH_CPP_LOG_LEVEL='ERROR') | os.environ | dict(
        NUM_REPLICA_GROUPS=str(options.replicas), REPLICAS_BEGAN=str(time.time()),
        TORCHFT_LIGHTHOUSE=f'http://127.0.0.1:{port}')
    groups = [Group(number, options, environment) for number in range(options.replicas)]
    codes, deadline, n_told = [], float('inf'), 0
    while groups and time.monotonic() < deadline:
        time.sleep(0.05)
        if lighthouse.poll() is not None and not codes:
            print('the lighthouse has ended: starting it again', file=sys.stderr, flush=True)
            lighthouse = start_lighthouse(port, timeout)
        for number in received[n_told:]:
            for group in groups:
                group.send(number)
        n_told = len(received)
        for group in list(groups):
            code = group.exit_code()
            if code is None:
                continue
            is_end = code in (0, 143) or received or codes
            if not is_end and code == 1:  # perhaps the run has failed, which ends all replicas
                group.failed_at = group.failed_at or time.monotonic()
                is_end = all(each.failed_at for each in groups)
                if not is_end and time.monotonic() - group.failed_at < FAILS_TOGETHER:
                    continue
            if not is_end:
                print(f'replica {group.number} has ended with exit code {code}', file=sys.stderr, flush=True)
                is_end = not group.restart()
            if is_end:
                groups.remove(group)
                if code in (0, 143):
                    codes.append(code)
                    deadline = min(deadline, time.monotonic() + GRACE)
                    lighthouse.kill()  # a replica that has not joined yet must not train alone
                elif not groups and not codes:
                    codes.append(1)
    for group in groups:
        group.send(signal.SIGKILL)
    lighthouse.kill()
    sys.exit(codes[0] if codes else 1)
