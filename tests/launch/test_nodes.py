"""The checks of launch/ before a run starts: each problem is one sentence that names the node."""
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys

import pytest
from helpers import (ROOT, TINY, free_port, run_forked, run_script, saved_iterations, start_script, torchrun,
                     worker_pids)
from launched import WAIT, kill, logged_updates, wait_for

from kilogpt.machines import read_machine

pytestmark = pytest.mark.slow


def check_nodes(*arguments, processes=1, cwds=(ROOT, ROOT), envs=({}, {})):
    """Run launch/check_node.py on the nodes n1 and n2; returns [(exit code, stdout, stderr)]."""
    port = free_port()
    running = []
    for node in range(2):
        running.append(start_script(
            'launch/check_node.py', f'--node={node}', '--nodes=2', f'--name=n{node + 1}',
            f'--endpoint=127.0.0.1:{port}', f'--processes={processes}',
            'train.py', '--device=cpu', *arguments, cwd=cwds[node], env=envs[node]))
    results = []
    for process in running:
        stdout, stderr = process.communicate(timeout=WAIT)
        results.append((process.returncode, stdout, stderr))
    return results


def assert_refused(results, *sentences):
    """Assert that both nodes exit with code 1, and that the first prints one sentence for each problem."""
    assert [code for code, _, _ in results] == [1, 1], results
    lines = results[0][2].splitlines()
    assert len(lines) == len(sentences), results
    for line, sentence in zip(lines, sentences):
        assert re.fullmatch(f'error: {sentence}', line), results


def test_nodes_that_can_run_pass_and_leave_no_files(tmp_path):
    results = check_nodes(f'--out_dir={tmp_path / "out"}')
    assert results == [(0, '', '')] * 2
    assert os.listdir(tmp_path / 'out') == []


def test_node_without_gpus_is_named(tmp_path):
    hidden = dict(CUDA_VISIBLE_DEVICES='')
    results = check_nodes(f'--out_dir={tmp_path}', '--device=cuda', envs=[hidden, hidden], processes=8)
    sentence = 'has 0 GPUs that PyTorch .* can use, but must start 8 processes: .*'
    assert_refused(results, f'n1 {sentence}', f'n2 {sentence}')


def test_node_with_another_version_of_torch_is_named(tmp_path):
    (tmp_path / 'sitecustomize.py').write_text('import torch\ntorch.__version__ = "2.1.0"\n')
    results = check_nodes(f'--out_dir={tmp_path / "out"}', envs=[{}, dict(PYTHONPATH=str(tmp_path))])
    assert_refused(results, r'n2 has PyTorch 2\.1\.0, but n1 has 2\.\d+.*: install the same version .*')


def test_node_that_does_not_share_out_dir_is_named(tmp_path):
    for name in ('n1', 'n2'):
        (tmp_path / name).mkdir()
    results = check_nodes('--out_dir=out', cwds=[tmp_path / 'n1', tmp_path / 'n2'])
    assert_refused(results, f'n2 does not see in {tmp_path}/n2/out what n1 writes there: set --out_dir to .*')


def test_node_whose_port_is_in_use_is_named(tmp_path):
    with socket.create_server(('', 0)) as taken:
        port = taken.getsockname()[1]
        first = start_script('launch/check_node.py', '--node=0', '--nodes=2', '--name=n1', '--processes=1',
                             f'--endpoint=127.0.0.1:{port}', 'train.py', '--device=cpu',
                             f'--out_dir={tmp_path}')
        _, stderr = first.communicate(timeout=WAIT)
    assert first.returncode == 1 and stderr == f'error: port {port} of n1 is in use: set another port\n'


def test_init_from_that_restarts_would_repeat_is_refused():
    results = check_nodes('--init_from=gpt2')
    for code, _, stderr in results:
        assert code == 1 and stderr.startswith("error: init_from is 'gpt2'") and stderr.count('\n') == 1


def test_torchrun_forwards_sigusr1(dataset, tmp_path):
    """torchrun has the option of docs/faults.md, and Slurm signals every process of a job."""
    options = '--standalone', '--nproc_per_node=2', '--signals-to-handle=SIGTERM,SIGINT,SIGUSR1'
    out_dir = tmp_path / 'out'
    with torchrun(options, tmp_path, 'train.py', *TINY, '--max_iters=100000', f'--dataset={dataset}',
                  f'--out_dir={out_dir}') as process:
        wait_for(lambda: len(logged_updates(out_dir)) > 3, process.output)
        kill([process.pid, *worker_pids(process).values()], signal.SIGUSR1)
        process.wait(WAIT)
    assert 'stopped by SIGUSR1' in process.output() and saved_iterations(out_dir), process.output()


def test_bandwidth_is_measured_by_one_command():
    with start_script('launch/bandwidth.py', '--device=cpu', '--max_mb=1', '--repeats=3', nproc=2) as process:
        stdout, stderr = process.communicate(timeout=WAIT)
    assert process.returncode == 0, stderr
    _, header, *rows, pairs, hint = stdout.splitlines()
    assert header.split() == ['MB', 'ms', 'GB/s', 'bus', 'GB/s'] and len(rows) == 5
    for row in rows:
        megabytes, milliseconds, speed, bus_speed = map(float, row.split())
        assert speed == pytest.approx(megabytes / milliseconds, rel=0.1, abs=2e-3)
        assert bus_speed == pytest.approx(speed, rel=1e-3, abs=2e-3)  # 2 (n - 1) / n is 1 for two processes
    assert re.fullmatch(r'within a node: [0-9.]+ GB/s each way, the median of 1 pairs; the slowest [0-9.]+', pairs)
    page, heading = re.fullmatch(r'(\S+) says .*: "(.*)"', hint).groups()
    assert f'\n## {heading}\n' in open(f'{ROOT}/{page}', encoding='utf-8').read()


def test_slow_pair_is_named(tmp_path):
    fault = tmp_path / 'slow_pair.py'
    fault.write_text("""
import os, time
import torch.distributed as dist
exchange = dist.batch_isend_irecv
def slow(operations):
    if {int(os.environ['RANK']), operations[0].peer} == {1, 3}:
        time.sleep(0.3)
    return exchange(operations)
dist.batch_isend_irecv = slow
""")
    done = run_forked('launch/bandwidth.py', '--device=cpu', '--max_mb=1', '--repeats=1', nproc=4, faults=[fault])
    slow = [line for line in done.stdout.splitlines() if 'slow: ' in line]
    host = socket.gethostname()
    assert any(line.startswith(f'  slow: rank 1 on {host} and rank 3 on {host}, 0.00') for line in slow), done.stdout
    assert 'the median of 6 pairs' in done.stdout


def test_ranks_that_alternate_between_nodes_are_refused():
    """Four processes as mpirun --map-by node places them on two nodes."""
    calls = []
    port = free_port()
    for rank in range(4):
        environment = dict(RANK=str(rank), WORLD_SIZE='4', LOCAL_RANK=str(rank // 2), LOCAL_WORLD_SIZE='2',
                           MASTER_ADDR='127.0.0.1', MASTER_PORT=port, GLOO_SOCKET_IFNAME='lo')
        options = '--device=cpu', '--max_mb=0.01', '--repeats=1'
        calls.append(start_script('launch/bandwidth.py', *options, env=environment))
    errors = [process.communicate(timeout=WAIT)[1] for process in calls]
    assert all('whose ranks follow one another (mpirun --map-by slot' in error for error in errors), errors


@pytest.mark.parametrize('path, sentence', [
    ('cluster', "--save is 'cluster', but --gpu takes a file whose name ends in .json: --save=cluster.json"),
    ('no/folder/here.json', '--save=no/folder/here.json: there is no folder no/folder')])
def test_file_that_cannot_be_written_is_refused_before_the_measurement(path, sentence):
    with start_script('launch/bandwidth.py', '--device=cpu', f'--save={path}', nproc=2) as process:
        stdout, stderr = process.communicate(timeout=WAIT)
    assert f'error: {sentence}\n' in stderr and not stdout


@pytest.mark.skipif(not shutil.which('tc') or os.geteuid() != 0, reason='needs root, and tc of iproute2')
def test_saved_links_are_those_of_a_slow_wire(two_nodes, tmp_path):
    """Two nodes of two processes, whose wire carries 25 MB/s; the processes of a node share it."""
    path, port, started = tmp_path / 'cluster.json', free_port(), []
    for node in (0, 1):
        limit = f'tc qdisc replace dev veth{node} root tbf rate 200mbit burst 32kb latency 400ms'
        subprocess.run(two_nodes(node, limit.split()), check=True)
        command = [sys.executable, '-m', 'torch.distributed.run', '--nnodes=2', f'--node_rank={node}',
                   '--nproc_per_node=2', '--master_addr=10.77.0.1', f'--master_port={port}', 'launch/bandwidth.py',
                   '--device=cpu', '--max_mb=1', '--repeats=1', f'--save={path}']
        started.append(subprocess.Popen(two_nodes(node, command), cwd=ROOT, stdout=subprocess.PIPE, text=True,
                                        env=dict(os.environ, OMP_NUM_THREADS='1')))
    printed = [process.communicate(timeout=WAIT)[0] for process in started]
    assert [process.returncode for process in started] == [0, 0]
    between = re.search(r'between nodes: ([0-9.]+) GB/s each way, the median of 2 pairs', printed[0])
    assert 0.004 < float(between[1]) < 0.026, printed
    machine = read_machine(path)
    assert (machine.nodes, machine.per_node) == (2, 2)
    assert 4e6 < machine.network < 17e6 and machine.node_link > 2 * machine.network, machine
    plan = ['config/quickstart.py', '--as_given', '--json', '--gpus=4', '--device=cpu', '--dtype=float32',
            f'--gpu={path}']
    measured, = json.loads(run_script('kilogpt.plan', *plan).stdout)
    faster, = json.loads(run_script('kilogpt.plan', *plan, '--link=10').stdout)
    assert measured['ms'] > 1.2 * faster['ms']


@pytest.mark.skipif(not shutil.which('shellcheck'), reason='shellcheck is not installed')
def test_shell_files_pass_shellcheck():
    files = [f'launch/{name}' for name in sorted(os.listdir(f'{ROOT}/launch')) if name.endswith('.sh')]
    done = subprocess.run(['shellcheck', *files], cwd=ROOT, capture_output=True, text=True)
    assert len(files) >= 2 and done.returncode == 0, done.stdout
