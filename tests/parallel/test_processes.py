"""What processes need before they train: a dtype, open files, a network, deterministic arithmetic."""
import os
import shutil
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from helpers import FAULTS, ROOT, TINY, assert_same_tensors, curve, free_port, newest_tensors
from kilogpt.parallel import network, processes

TORCHRUN = [sys.executable, '-m', 'torch.distributed.run']
SHORT = [*TINY, '--eval_iters=0', '--keep_checkpoints=0', '--max_iters=1']


# --- dtype ----------------------------------------------------------------------------------------------

@pytest.mark.quick
@pytest.mark.parametrize('gpu, major, expected', [
    ('V100', 7, 'float16'), ('T4', 7, 'float16'), ('A100', 8, 'bfloat16'), ('H100', 9, 'bfloat16')])
def test_gpus_that_only_emulate_bfloat16_get_float16(monkeypatch, gpu, major, expected):
    monkeypatch.setattr(torch.cuda, 'is_available', lambda: True)
    monkeypatch.setattr(torch.cuda, 'current_device', lambda: 0)
    monkeypatch.setattr(torch.cuda, 'get_device_properties', lambda device: SimpleNamespace(major=major))
    monkeypatch.setattr(torch.cuda, '_check_bf16_tensor_supported', lambda device: True)  # or emulated
    assert processes.resolve_dtype('auto', torch.device('cuda', 0)) == expected


# --- open files -----------------------------------------------------------------------------------------

def test_few_open_files_do_not_keep_processes_from_joining(train):
    run = train('--eval_iters=0', '--max_iters=1', nproc=2, timeout=60,
                faults=[FAULTS / 'few_files.py'])
    assert list(run.lines) == [1]


@pytest.mark.slow
def test_few_open_files_do_not_keep_torchrun_from_serving_the_store(dataset, tmp_path):
    """With four processes, the torchrun that serves the store needs 33 files."""
    command = [*TORCHRUN, '--standalone', '--nproc_per_node=4', 'train.py', *SHORT, f'--dataset={dataset}',
               f'--out_dir={tmp_path}']
    done = subprocess.run(['bash', '-c', 'ulimit -Sn 29; exec "$@"', '-', *command], cwd=ROOT, timeout=100)
    assert done.returncode == 0


# --- networks -------------------------------------------------------------------------------------------

@pytest.mark.quick
@pytest.mark.parametrize('environment, routes, expected', [
    (dict(LOCAL_WORLD_SIZE='2'), dict(node0='eth0'), None),  # one node
    (dict(GLOO_SOCKET_IFNAME='ib0'), dict(node0='eth0'), 'ib0'),
    ({}, {'node0': 'eth0', '192.0.2.1': 'eth1'}, 'eth0'),
    ({}, {'192.0.2.1': 'eth1'}, 'eth1'),  # node0 is this node, and its name the loopback interface's
    ({}, {}, None)])
def test_gloo_listens_where_the_first_node_is_reached(monkeypatch, environment, routes, expected):
    environment = dict(WORLD_SIZE='2', LOCAL_WORLD_SIZE='1', MASTER_ADDR='node0') | environment
    monkeypatch.setattr(os, 'environ', environment)
    monkeypatch.setattr(network, 'interface_to', routes.get)
    network.choose_gloo_interface()
    assert environment.get('GLOO_SOCKET_IFNAME') == expected


@pytest.mark.quick
def test_loopback_and_unknown_hosts_do_not_have_an_interface():
    assert '127.0.0.1' in map(str, network.find_interfaces()['lo'])
    assert network.interface_to('127.0.1.1') is None
    assert network.interface_to('no-such-host.invalid') is None


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which('ip') or os.geteuid() != 0, reason='needs root for network namespaces')
@pytest.mark.parametrize('first_node', ['node0', '10.77.0.1'])
def test_nodes_with_loopback_addresses_for_names_find_each_other(two_nodes, dataset, tmp_path, first_node):
    port, started = free_port(), []
    for node in (0, 1):
        command = [*TORCHRUN, '--nnodes=2', f'--node_rank={node}', '--nproc_per_node=1',
                   f'--master_addr={first_node}', f'--master_port={port}', 'train.py', *SHORT,
                   '--gradient_accumulation_steps=4', f'--dataset={dataset}', f'--out_dir={tmp_path}/out']
        started.append(subprocess.Popen(two_nodes(node, command), cwd=ROOT))
    assert [process.wait(100) for process in started] == [0, 0]
    assert (tmp_path / 'out' / 'metrics.jsonl').exists()


# --- deterministic arithmetic ---------------------------------------------------------------------------

@pytest.fixture
def restored_settings(monkeypatch):
    """Undo make_deterministic after the test."""
    monkeypatch.setattr(torch.utils.deterministic, 'fill_uninitialized_memory', True)
    monkeypatch.delenv('CUBLAS_WORKSPACE_CONFIG', raising=False)
    yield
    torch.use_deterministic_algorithms(False)  # which Inductor's config follows


def test_deterministic_settings_are_in_force(restored_settings):
    processes.make_deterministic()
    assert torch.are_deterministic_algorithms_enabled()
    assert not torch.is_deterministic_algorithms_warn_only_enabled()
    assert os.environ['CUBLAS_WORKSPACE_CONFIG'] == ':4096:8'
    assert torch._inductor.config.deterministic
    assert not torch.utils.deterministic.fill_uninitialized_memory


def test_deterministic_run_resumes_to_the_bit(train):
    options = ['--deterministic', '--dropout=0.1']
    begun = train(*options, '--max_iters=6')
    resumed = train(*options, '--init_from=resume', out_dir=begun.out_dir)
    unbroken = train(*options)
    assert curve(resumed) == curve(unbroken) and list(unbroken.lines) == list(range(1, 13))
    assert_same_tensors(newest_tensors(resumed.out_dir), newest_tensors(unbroken.out_dir))


@pytest.mark.slow
@pytest.mark.drawn(3)
@pytest.mark.parametrize('nproc, layout', [
    (1, '--compile=True'), (2, '--compile=True --zero_stage=2'), (2, '--tp=2'), (2, '--cp=2'),
    (2, '--pp=2 --pp_schedule=zbv'), (2, '--optimizer=muon --zero_stage=1'), (2, '--dtype=bfloat16')])
def test_every_operation_has_a_deterministic_implementation(train_all, nproc, layout):
    """PyTorch raises RuntimeError for an operation without one. On a CPU, the key does not change any bit."""
    options = [*layout.split(), '--dropout=0.1', '--gradient_accumulation_steps=4', '--max_iters=3']
    runs = train_all({key: [*options, f'--deterministic={key}'] for key in (True, False)}, nproc=nproc)
    assert curve(runs[True]) == curve(runs[False]) and len(runs[True].lines) == 3
