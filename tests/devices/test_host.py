import os
import subprocess
import sys

import pytest
from helpers import ROOT, TINY, run_script

from kilogpt.devices.cpus import available_cpus
from kilogpt.run.metrics import read_metrics

LINUX = pytest.mark.skipif(not os.path.exists('/proc/self/schedstat'), reason='needs Linux and its schedstat')

# Prints the CPU seconds of 100 short operations with a pause after each, during which threads may spin.
SPINNING = '''
import time, torch
from kilogpt.devices.host import IdleTeam
x = torch.randn(200, 512)
def cpu_seconds():
    torch.tanh(x)
    began = time.process_time()
    for _ in range(100):
        torch.tanh(x)
        time.sleep(0.002)
    return time.process_time() - began
print(cpu_seconds())
team = IdleTeam()
print(cpu_seconds())
team.end()
print(cpu_seconds())
'''


@pytest.mark.slow
@LINUX
@pytest.mark.skipif(available_cpus() < 2, reason='needs two CPUs')
def test_threads_spin_only_without_an_idle_team():
    output = subprocess.run([sys.executable, '-c', SPINNING], capture_output=True, text=True, check=True,
                            cwd=ROOT, env=dict(os.environ, OMP_NUM_THREADS='2'))
    spinning, sleeping, spinning_again = map(float, output.stdout.split())
    assert sleeping < spinning / 2 and sleeping < spinning_again / 2


@pytest.mark.slow
@LINUX
@pytest.mark.skipif(available_cpus() < 2, reason='needs two CPUs')
def test_busy_machine_is_named_and_changes_no_loss(dataset, tmp_path):
    losses = {}
    for load in (0, 6):
        others = [subprocess.Popen([sys.executable, '-c', 'while True: pass']) for _ in range(load)]
        try:
            run = run_script('train.py', *TINY, f'--dataset={dataset}', f'--out_dir={tmp_path / str(load)}',
                             env=dict(OMP_NUM_THREADS='2'))
        finally:
            for other in others:
                other.kill()
                other.wait()
        training, _ = read_metrics(tmp_path / str(load))
        losses[load] = [line['loss'] for line in training.values()]
    assert 'the machine is busy: this process waits for a core ' in run.stdout
    assert losses[0] == losses[6] and len(losses[0]) == 12


@pytest.mark.parametrize('files, expected', [
    ({'job/cpu.max': '150000 100000'}, 2),
    ({'job/cpu.max': 'max 100000'}, None),
    ({'cpu.max': '100000 100000', 'job/cpu.max': 'max 100000'}, 1),  # the limit of the group around it
    ({'cpu,cpuacct/job/cpu.cfs_quota_us': '50000', 'cpu,cpuacct/job/cpu.cfs_period_us': '100000'}, 1),
    ({'cpu,cpuacct/job/cpu.cfs_quota_us': '-1', 'cpu,cpuacct/job/cpu.cfs_period_us': '100000'}, None),
], ids=['version 2', 'version 2 without limit', 'parent', 'version 1', 'version 1 without limit'])
def test_quota_of_a_container_limits_the_cpus(tmp_path, monkeypatch, files, expected):
    monkeypatch.setattr(os, 'sched_getaffinity', lambda _: set(range(64)))
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(content + '\n')
    membership = tmp_path / 'membership'
    membership.write_text('3:cpu,cpuacct:/job\n2:memory:/other\n0::/job\n')
    assert available_cpus(tmp_path, membership) == (expected or 64)
