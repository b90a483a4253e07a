"""What bounds a run: the line at its end, and that of --profile, each for a cause that a test brings about."""
import importlib.util
import os
import re
import shutil
import statistics
import subprocess
import sys

import pytest

from helpers import FAULTS, ROOT, TINY
from kilogpt.configurator import config_of
from kilogpt.parallel.layout import Layout
from kilogpt.run.verdict import KINDS, Situation, judge

LONGER = '--max_iters=24', '--lr_decay_iters=24', '--eval_iters=0', '--keep_checkpoints=0'


def verdict(run):
    """(what bounds a run, {words: share in percent}, what to turn next) of its last such line."""
    line = [line for line in run.stdout.splitlines() if 'bound by: ' in line][-1]
    bound, figures, advice = re.fullmatch(r' *bound by: (.+?) \(((?:\d+% .+?)+)\)(?:\. Next: (.*)|.*)', line).groups()
    return bound, {words: int(share) for share, words in re.findall(r'(\d+)% ([a-z ]+)', figures)}, advice


@pytest.mark.parametrize('how', ['at the end', pytest.param('profile', marks=pytest.mark.slow)])
def test_slow_loader(train, how):
    run = train(*LONGER, '--gradient_accumulation_steps=1', f'--profile={how == "profile"}',
                faults=[FAULTS / 'slow_loader.py'])
    bound, figures, advice = verdict(run)
    assert bound == 'input' and figures['waiting for data'] >= 30, run.stdout
    assert advice.startswith('--dataset=PATH of a copy on a disk of this machine; or --batch_size=8')
    assert run.stdout.count('bound by') == 1


@pytest.mark.slow
def test_waits_for_data_are_in_the_log(train):
    """With three micro-batches in an iteration, each of which takes 60 ms to read, partly while another is in use."""
    slow = train('--max_iters=6', faults=[FAULTS / 'slow_loader.py'])
    fast = train('--max_iters=6')
    slow_ms, fast_ms = (statistics.median(line['data_ms'] for line in run.lines.values()) for run in (slow, fast))
    assert fast_ms < 60 < slow_ms < 250
    assert all(0 < line['optimizer_ms'] < line['dt_ms'] for line in fast.lines.values())
    assert 'bound by' not in fast.stdout  # too short to tell


def test_slow_link(train):
    run = train(*LONGER, '--gradient_accumulation_steps=2', nproc=2, faults=[FAULTS / 'slow_link.py'])
    bound, figures, advice = verdict(run)
    assert bound == 'network' and figures['waiting for communication'] >= 30, run.stdout
    assert advice == ('--gradient_accumulation_steps=4 (half as many exchanges for a token); '
                      'or --grad_compress=bf16 (half as many bytes)')


def test_communication_in_the_model_is_not_called_compute(train):
    bound, figures, _ = verdict(train(*LONGER, '--gradient_accumulation_steps=2', '--zero_stage=3', nproc=2))
    assert bound == 'nothing dominates' and figures['computing and communicating in the model'] >= 30
    assert 'waiting for communication' not in figures


def test_late_process(train):
    run = train(*LONGER, '--gradient_accumulation_steps=2', nproc=2, faults=[FAULTS / 'slow_rank.py'])
    bound, figures, advice = verdict(run)
    assert bound == 'a late process, rank 1' and figures['waiting for a late process'] >= 30, run.stdout
    assert 'rank 1' in advice and '--events=True' in advice


@pytest.mark.parametrize('how', ['at the end', pytest.param('profile', marks=pytest.mark.slow)])
def test_tiny_batch(train, how):
    run = train(*LONGER, '--n_layer=4', '--batch_size=1', '--gradient_accumulation_steps=4',
                f'--profile={how == "profile"}')
    bound, figures, advice = verdict(run)
    expected = {'at the end': 'small micro-batches of 32 tokens', 'profile': 'overhead of small operators'}
    assert bound == expected[how], run.stdout
    assert advice == ('--batch_size=2 --gradient_accumulation_steps=2 (the same batch, more work in each operator); '
                      'or --compile=True (fewer operators)')


def test_small_memory(train):
    """Memory that is nearly full, and activations that are computed twice."""
    run = train(*LONGER, '--activation_checkpoint=full', faults=[FAULTS / 'little_memory.py'])
    bound, _, advice = verdict(run)
    assert re.fullmatch(r'size of the memory, \d+% in use, activation_checkpoint=full computes .* twice', bound)
    assert advice.startswith('--activation_checkpoint=selective (computes less twice); or --batch_size=2 ')


def test_memory_that_is_saved_in_vain(train):
    bound, _, advice = verdict(train(*LONGER, '--activation_checkpoint=full'))
    assert re.fullmatch(r'saving of memory, \d% in use, activation_checkpoint=full computes activations twice', bound)
    assert advice.startswith('--activation_checkpoint=none; or --batch_size=8')


def test_large_matrices_are_compute(train):
    run = train(*LONGER, '--n_embd=192', '--batch_size=8', '--gradient_accumulation_steps=1')
    bound, figures, advice = verdict(run)
    assert bound == 'compute' and figures['in forward and backward passes'] >= 50, run.stdout
    assert advice == '--compile=True (fewer operators); or --dtype=bfloat16'


@pytest.mark.slow
@pytest.mark.skipif(not (hasattr(os, 'geteuid') and os.geteuid() == 0 and shutil.which('tc')), reason='needs root')
@pytest.mark.parametrize('how', ['at the end', 'profile'])
def test_thin_link_between_two_namespaces(dataset, tmp_path, how):
    """The link of dev/thin_wire.py at 10 Mbit/s."""
    spec = importlib.util.spec_from_file_location('thin_wire', f'{ROOT}/dev/thin_wire.py')
    thin_wire = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(thin_wire)
    try:
        thin_wire.connect_machines()
        nodes = []
        for rank, (name, _) in enumerate(thin_wire.MACHINES):
            thin_wire.run_command(f'ip netns exec {name} tc qdisc replace dev {name} root '
                                  'tbf rate 10mbit burst 32kb latency 400ms')
            nodes.append(subprocess.Popen(
                ['ip', 'netns', 'exec', name, sys.executable, '-m', 'torch.distributed.run', '--nnodes=2',
                 f'--node_rank={rank}', '--nproc_per_node=1', f'--master_addr={thin_wire.MACHINES[0][1]}',
                 '--master_port=29611', 'train.py', *TINY, *LONGER,
                 '--n_embd=64', '--gradient_accumulation_steps=2',
                 f'--profile={how == "profile"}', f'--dataset={dataset}', f'--out_dir={tmp_path}/out'],
                cwd=ROOT, env=dict(os.environ, OMP_NUM_THREADS='1'), text=True, stdout=subprocess.PIPE))
        outputs = [node.communicate(timeout=300)[0] for node in nodes]
    finally:
        for name, _ in thin_wire.MACHINES:
            subprocess.run(['ip', 'netns', 'del', name])
    assert re.search(r'bound by: network.* \(.*[5-9]\d% waiting for communication', outputs[0]), outputs


# --- the rules ------------------------------------------------------------------------------------------

CONFIG = dict(dataset='x', data_cache_gb=0.0, documents='stream', batch_size=8, gradient_accumulation_steps=8,
              block_size=1024, n_embd=1024, n_layer=12, compile=True, fp8=False, log_interval=10, optimizer='adamw',
              activation_checkpoint='none', cpu_offload=False, tp=1, cp=1, zero_stage=0, grad_compress='none',
              eval_interval=100, eval_iters=10, async_checkpoint=True)


def situation(world_size=1, memory=0.5, dtype='bfloat16', **keys):
    config = CONFIG | keys
    return Situation(config, Layout(world_size, config['zero_stage']), True, dtype, memory)


@pytest.mark.parametrize('shares, keys, bound, advice', [
    (dict(input=0.2, network=0.2, compute=0.6), dict(world_size=8), 'compute', '--fp8=True (on an H100 and newer)'),
    (dict(input=0.29, products=0.3, traffic=0.27), {}, 'nothing dominates', ''),
    (dict(input=0.1, products=0.3, traffic=0.5), dict(compile=False), 'memory traffic', '--compile=True'),
    (dict(input=0.4, compute=0.6), dict(dataset='s3://b/x'), 'input', '--data_cache_gb=100'),
    (dict(network=0.5, compute=0.5), dict(world_size=8, zero_stage=3), 'network', '--zero_stage=2'),
    (dict(optimizer=0.5, compute=0.4), dict(world_size=8), 'memory traffic of the optimizer',
     '--zero_stage=1 (each process updates a part)'),
    (dict(input=0.0, compute=1.0), dict(memory=0.95, cpu_offload=True, zero_stage=3, world_size=8),
     'size of the memory', '--batch_size=4 --gradient_accumulation_steps=16'),
    (dict(compute=1.0), dict(memory=0.95, batch_size=1, block_size=64), 'size of the memory',
     'Next: more GPUs, or GPUs with more memory'),
    (dict(pauses=0.6), dict(eval_iters=0), 'pauses for evaluation and saving', 'a larger --save_interval or --save_minutes'),
    (dict(pauses=0.6), dict(eval_iters=1), 'pauses for evaluation and saving', 'Next: --eval_interval=200'),
    (dict(pauses=0.6), {}, 'pauses for evaluation and saving', '--eval_interval=200; or --eval_iters=5')])
def test_rules(shares, keys, bound, advice):
    sentence = judge(shares, situation(**keys))
    assert sentence.startswith(f'bound by: {bound}') and advice in sentence, sentence


def test_advice_is_keys_that_exist():
    keys = config_of(f'{ROOT}/train.py', [])
    states = [situation(world_size=world_size, memory=memory, dtype=dtype, **changes)
              for world_size in (1, 8) for memory in (0.1, 0.95) for dtype in ('float32', 'bfloat16')
              for changes in ({}, dict(compile=False), dict(activation_checkpoint='full', documents='pack'),
                              dict(cpu_offload=True, zero_stage=3, dataset='s3://b/x', optimizer='muon'))]
    found = {key for state in states for _, advice in KINDS.values() for text in advice(state)
             for key in re.findall(r'--(\w+)=', text)}
    assert len(found) > 15 and found <= keys.keys()
