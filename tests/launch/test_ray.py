"""launch/ray_train.py on a Ray cluster of two nodes with room for one process each."""
import contextlib
import os
import pathlib
import re
import signal
import subprocess
import sys
import time
import urllib.request

import pytest
from helpers import ROOT, TINY, curve, first_iterations, read_run, run_script

SCRIPT = 'launch/ray_train.py'
SAVE_INTERVAL = 10
OPTIONS = ['--eval_interval=100', '--lr_decay_iters=1000', '--learning_rate=1e-3', '--comm_timeout=60',
           f'--save_interval={SAVE_INTERVAL}']


@pytest.mark.slow
def test_missing_ray_is_one_sentence(tmp_path):
    (tmp_path / 'ray.py').write_text('raise ModuleNotFoundError("No module named \'ray\'")')
    refused = run_script(SCRIPT, '--', '--max_iters=1', check=False, env=dict(PYTHONPATH=str(tmp_path)))
    assert refused.returncode == 1
    assert refused.stderr == ("error: launch/ray_train.py needs Ray Train (No module named 'ray'): "
                              'pip install "ray[train]"\n')


@pytest.fixture
def cluster(monkeypatch):
    """A Ray cluster of two nodes with one CPU each: ray.cluster_utils.Cluster, and `second`, a node."""
    pytest.importorskip('ray.train', reason='ray[train] is not installed')
    pytest.importorskip('aiohttp_cors', reason='ray[default], which exports metrics, is not installed')
    from ray.cluster_utils import Cluster
    monkeypatch.setenv('RAY_metrics_report_interval_ms', '1000')
    size = dict(num_cpus=1, object_store_memory=100_000_000)
    cluster = Cluster()
    try:
        cluster.first = add_node(cluster, **size, include_dashboard=False)
        cluster.second = add_node(cluster, **size)
        yield cluster
    finally:
        cluster.shutdown()


def add_node(cluster, **options):
    """Add a node to a cluster. Ray gives up after 30 seconds, which is too short on a busy machine."""
    for _ in range(4):
        with contextlib.suppress(Exception):
            return cluster.add_node(**options)
    return cluster.add_node(**options)


@contextlib.contextmanager
def launched(cluster, folder, options, *arguments):
    """A context with the Popen of launch/ray_train.py; its `output()` is what it has printed so far."""
    log = folder / 'ray_train.log'
    command = [sys.executable, SCRIPT, *options, '--', *TINY, *OPTIONS, *arguments]
    with open(log, 'w') as file:
        process = subprocess.Popen(command, cwd=ROOT, stdout=file, stderr=file, start_new_session=True,
                                   env=dict(os.environ, RAY_ADDRESS=cluster.address, PYTHONUNBUFFERED='1'))
    process.output = log.read_text
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def wait_for(condition, process=None, seconds=600):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, process.output() if process else 'too late'
        assert process is None or process.poll() is None, process.output()
        time.sleep(0.1)


def trainings(out_dir):
    """{rank: (pid of train.py, pid of the Ray worker that started it)} of a run."""
    found = {}
    for folder in pathlib.Path('/proc').glob('[0-9]*'):
        with contextlib.suppress(OSError):
            if f'--out_dir={out_dir}'.encode() in (folder / 'cmdline').read_bytes().split(b'\0'):
                variables = dict(line.partition('=')[::2]
                                 for line in (folder / 'environ').read_text().split('\0'))
                if 'RANK' in variables:  # not the launcher itself
                    parent = (folder / 'stat').read_text().rpartition(')')[2].split()[1]
                    found[int(variables['RANK'])] = int(folder.name), int(parent)
    return found


def logged(out_dir):
    return max(read_run(out_dir).lines, default=0) if (out_dir / 'metrics.jsonl').exists() else 0


def count_lines(out_dir):
    return len((out_dir / 'metrics.jsonl').read_text().splitlines())


def exported(cluster):
    """The metrics that the nodes export for Prometheus and for Ray's dashboard."""
    time.sleep(1)
    text = ''
    for node in (cluster.first, cluster.second):
        with contextlib.suppress(OSError):
            address = f'http://127.0.0.1:{node.metrics_export_port}/metrics'
            with urllib.request.urlopen(address, timeout=30) as answer:
                text += answer.read().decode()
    return text


def check_loss(name, out_dir, process, fault):
    """Call fault(), wait for the next update, print the number of lost iterations and check it."""
    began = time.monotonic()
    fault()
    reached, lines = logged(out_dir), count_lines(out_dir)
    resumed = re.compile(r'resuming \S+ at iteration (\d+)\n')
    wait_for(lambda: resumed.search(process.output()), process)
    wait_for(lambda: count_lines(out_dir) > lines + 1, process)
    lost = reached - int(resumed.search(process.output())[1])
    print(f'{name}: {lost} iterations lost, {time.monotonic() - began:.1f} s until the next update')
    # A save may have been in progress when the fault came.
    assert lost <= 2 * SAVE_INTERVAL + 2


@pytest.mark.slow
def test_killed_worker_is_replaced_and_the_run_continues_to_the_bit(train, dataset, cluster, tmp_path):
    out_dir = tmp_path / 'out'
    with launched(cluster, tmp_path, ['--num_workers=2'], f'--dataset={dataset}', f'--out_dir={out_dir}',
                  '--dropout=0.1', '--max_iters=1000000') as process:
        wait_for(lambda: logged(out_dir) >= 25, process)
        wait_for(lambda: 'ray_kilogpt_loss' in exported(cluster), process)
        orphan, worker = trainings(out_dir)[1]
        check_loss('worker killed', out_dir, process, lambda: os.kill(worker, signal.SIGKILL))
        assert not os.path.exists(f'/proc/{orphan}')
        last = logged(out_dir)
    wait_for(lambda: not trainings(out_dir))  # no process is left after the launcher is killed
    found, unbroken = read_run(out_dir), train(*OPTIONS, '--dropout=0.1', f'--max_iters={last}', nproc=2)
    assert curve(first_iterations(found, last)) == curve(unbroken)


@pytest.mark.slow
def test_run_continues_on_the_remaining_node(train, dataset, cluster, tmp_path):
    """Two workers, then one, follow the curve of one process. The run ends, and Ray has its last report."""
    out_dir = tmp_path / 'out'
    with launched(cluster, tmp_path, ['--num_workers=1:2'], f'--dataset={dataset}',
                  f'--out_dir={out_dir}', '--max_iters=300') as process:
        wait_for(lambda: logged(out_dir) >= 25, process)
        check_loss('node removed', out_dir, process,
                   lambda: cluster.remove_node(cluster.second, allow_graceful=False))
        assert process.wait(600) == 0, process.output()
        output = process.output()
    assert 'dp 2 (1 × 2)' in output and '1 process(es) on cpu' in output
    logs = pathlib.Path(cluster.first.get_session_dir_path(), 'logs')
    text = ''.join(path.read_text(errors='replace') for path in logs.rglob('*') if path.is_file())
    assert re.search(r"metrics=\{'iter': 300, [^}]*'val_loss'", text)
    found, alone = read_run(out_dir), train(*OPTIONS, '--max_iters=300')
    assert list(found.lines) == list(alone.lines)
    differences = [abs(found.lines[i]['loss'] - alone.lines[i]['loss']) for i in alone.lines]
    print(f'largest difference of losses: {max(differences):.1e}')
    assert max(differences) < 1e-3


@pytest.mark.slow
def test_failure_that_repeats_ends_the_run(cluster, tmp_path):
    with launched(cluster, tmp_path, ['--num_workers=2', '--max_failures=0'], '--dataset=nowhere',
                  f'--out_dir={tmp_path / "out"}') as process:
        assert process.wait(600) == 1, process.output()
        output = process.output()
    assert 'train.py of rank' in output and 'ended with exit code 1' in output
