"""launch/ssh.sh over a real sshd, whose two hosts are two addresses of this machine."""
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import tempfile

import pytest
from helpers import FAULTS, TINY, assert_near, copy_repository, curve, free_port, read_run, saved_iterations
from launched import SEARCH_PATH, logged_updates, wait_for

HOSTS = '127.0.0.1', '127.0.0.2'
PROGRAMS = 'ssh', 'sshd', 'ssh-keygen'
MISSING = [program for program in PROGRAMS if not shutil.which(program, path=SEARCH_PATH)]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != 'linux', reason='127.0.0.2 is this machine on Linux alone'),
    pytest.mark.skipif(bool(MISSING), reason=f'{MISSING} not installed (apt-get install openssh-server)')]


@pytest.fixture(scope='module')
def launch(tmp_path_factory):
    """Function that starts launch/ssh.sh; returns a Popen whose `output()` is the text printed so far."""
    with tempfile.TemporaryDirectory(prefix='sshd-') as folder:  # sshd refuses folders that others can write
        folder = pathlib.Path(folder)
        checkout = copy_repository(tmp_path_factory.mktemp('ssh') / 'kiloGPT', 'launch')
        environment, sshd = start_sshd(folder)
        (checkout / 'hosts.txt').write_text('# two hosts\n' + '\n'.join(HOSTS) + '\n')
        started = []

        def launch(*arguments):
            log = folder / f'{len(started)}.log'
            with open(log, 'w') as file:
                process = subprocess.Popen(
                    ['bash', 'launch/ssh.sh', *map(str, arguments)], cwd=checkout, stdin=subprocess.DEVNULL,
                    stdout=file, stderr=file, start_new_session=True, preexec_fn=restore_sigint,
                    env=environment | dict(processes='1', port=free_port(), python=sys.executable,
                                           setup='export OMP_NUM_THREADS=1'))
            process.output = log.read_text
            started.append(process)
            return process

        yield launch
        for process in started:
            process.kill()
            process.wait()
        sshd.kill()
        sshd.wait()


def restore_sigint():
    """Handle Ctrl-C's signal as in a terminal, even if the tests run in the background of a shell."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def start_sshd(folder):
    """Start an sshd that accepts this user; returns (environment for ssh, Popen of sshd)."""
    port = free_port()
    for name in ('host_key', 'user_key'):
        subprocess.run(['ssh-keygen', '-q', '-t', 'ed25519', '-N', '', '-f', folder / name], check=True)
    shutil.copy(folder / 'user_key.pub', folder / 'authorized_keys')
    (folder / 'sshd_config').write_text(
        f'Port {port}\nListenAddress 0.0.0.0\nHostKey {folder}/host_key\nPidFile {folder}/pid\nUsePAM no\n'
        f'AuthorizedKeysFile {folder}/authorized_keys\nStrictModes no\nPermitRootLogin yes\n')
    (folder / 'ssh_config').write_text(
        f'Host *\nPort {port}\nIdentityFile {folder}/user_key\nIdentitiesOnly yes\n'
        f'StrictHostKeyChecking no\nUserKnownHostsFile {folder}/known_hosts\nLogLevel ERROR\n')
    (folder / 'bin').mkdir()
    ssh = folder / 'bin' / 'ssh'
    ssh.write_text(f'#!/bin/sh\nexec {shutil.which("ssh")} -F {folder}/ssh_config "$@"\n')
    ssh.chmod(0o755)
    os.makedirs('/run/sshd', exist_ok=True)  # sshd needs this folder, which Debian creates at boot
    with open(folder / 'sshd.log', 'w') as file:
        program = shutil.which('sshd', path=SEARCH_PATH)  # sshd requires a full path
        sshd = subprocess.Popen([program, '-D', '-e', '-f', folder / 'sshd_config'],
                                stdin=subprocess.DEVNULL, stdout=file, stderr=file)
    environment = dict(os.environ, PATH=f'{folder}/bin:{SEARCH_PATH}')
    wait_for(lambda: subprocess.run(['ssh', '-o', 'BatchMode=yes', HOSTS[0], 'true'], env=environment,
                                    capture_output=True).returncode == 0, (folder / 'sshd.log').read_text)
    return environment, sshd


def test_run_on_two_hosts_follows_the_curve_of_one_process(launch, train, dataset, tmp_path):
    process = launch('hosts.txt', *TINY, f'--dataset={dataset}', f'--out_dir={tmp_path}',
                     "--wandb_run_name=it's $1")
    assert process.wait(300) == 0, process.output()
    assert '2 process(es) on cpu' in process.output() and f'all share {tmp_path}' in process.output()
    run = read_run(tmp_path)
    assert_near(run, train())
    assert '"wandb_run_name": "it\'s $1"' in (tmp_path / 'config.json').read_text()


@pytest.mark.parametrize('number', [signal.SIGINT, signal.SIGKILL], ids=lambda number: number.name)
def test_run_is_saved_and_ended_on_all_hosts_when_the_script_ends(launch, train, dataset, tmp_path, number):
    """Ctrl-C or SIGKILL ends the script. The same command then continues the run, bit for bit."""
    options = ['--dropout=0.1', '--eval_interval=100000', '--lr_decay_iters=1000']
    command = ['hosts.txt', FAULTS / 'slow_updates.py', *TINY, *options, f'--dataset={dataset}',
               f'--out_dir={tmp_path}']
    process = launch(*command, '--max_iters=100000')
    wait_for(lambda: len(logged_updates(tmp_path)) >= 5, process.output)
    if number == signal.SIGINT:
        os.killpg(process.pid, number)  # as a terminal does
    else:
        process.kill()
    assert process.wait(300) != 0
    wait_for(lambda: 'stopped by SIGTERM' in process.output(), process.output)
    wait_for(lambda: runs_of(tmp_path) == [], process.output)
    last, = saved_iterations(tmp_path)
    assert f'stopped by SIGTERM at iteration {last};' in process.output()
    resumed = launch(*command, f'--max_iters={last + 5}')
    assert resumed.wait(300) == 0, resumed.output()
    unbroken = train(*options, f'--max_iters={last + 5}', nproc=2)
    assert curve(read_run(tmp_path)) == curve(unbroken)


def runs_of(out_dir):
    """Pids of the processes with this folder in their command, without ssh.sh and its clients."""
    found = []
    for pid in filter(str.isdigit, os.listdir('/proc')):
        try:
            command = pathlib.Path(f'/proc/{pid}/cmdline').read_text()
        except OSError:
            continue
        if f'--out_dir={out_dir}\0' in command and 'train.py\0' in command and 'ssh' not in command:
            found.append(pid)
    return found


def test_host_that_cannot_run_ends_the_launch_with_one_sentence(launch, tmp_path):
    process = launch('hosts.txt', '--device=cuda', f'--out_dir={tmp_path}')
    assert process.wait(300) == 1, process.output()
    named = re.findall('^error: (127.*?) has 0 GPUs', process.output(), re.M)
    assert named == list(HOSTS), process.output()
    assert 'torch.distributed' not in process.output()


@pytest.mark.parametrize('arguments', [[], ['nohosts.txt'], ['config/quickstart.py', '--seed=1']])
def test_missing_file_of_hosts_is_one_sentence(launch, arguments):
    process = launch(*arguments)
    assert process.wait(300) == 1, process.output()
    name = arguments[0] if arguments else ''
    assert process.output().startswith(f"error: '{name}' is not a file of hosts: ")
    assert process.output().count('\n') == 1
