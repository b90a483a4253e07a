"""bench.py as a user runs it."""
import json
import re

import pytest
from conftest import TINY, run

import bench
from kilogpt import trace
from model import GPT, GPTConfig

BENCH = [argument for argument in TINY if not argument.startswith(('--max_iters', '--eval', '--log'))]


def test_sweep_and_profile(dataset, tmp_path):
    done = run('bench.py', *BENCH, f'--dataset={dataset}', '--iters=8', '--warmup=2', '--sweep=batch_size=2,4 n_layer=1',
               '--profile', '--json', cwd=tmp_path)
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert [row['arguments'] for row in rows] == [['--batch_size=2', '--n_layer=1'], ['--batch_size=4', '--n_layer=1']]
    for row in rows:
        assert row['tokens_per_sec'] > 0 and row['dt_ms'] > 0 and row['mem_gb'] > 0 and row['mfu'] > 0
        assert set(row['profile_ms']) == set(trace.CATEGORIES)
        assert row['profile_ms']['matmul'] > 0 and row['profile_ms']['attention'] > 0 and row['profile_ms']['optimizer'] > 0
        assert json.loads((tmp_path / row['trace']).read_text())['traceEvents']


def test_random_tokens_table_and_failure(tmp_path):
    done = run('bench.py', *BENCH, '--random_tokens=100', '--iters=2', '--warmup=0', '--sweep=n_head=4,5', '--nproc_per_node=2',
               cwd=tmp_path, check=False)
    assert done.returncode == 1
    assert 'n_head=4' in done.stdout and 'n_embd=32 is not divisible by n_head=5' in done.stdout


def test_plot(tmp_path):
    for name in ('a', 'b'):
        (tmp_path / name).mkdir()
        (tmp_path / name / 'metrics.jsonl').write_text(''.join(json.dumps(line) + '\n' for line in (
            dict(iter=0, train_loss=4.0, val_loss=4.1), dict(iter=1, loss=3.9, tokens_per_sec=10.0),
            dict(iter=2, loss=3.5, tokens_per_sec=11.0), dict(iter=2, train_loss=3.4, val_loss=3.6))))
    run('bench.py', '--plot', 'a', 'b', '--out=plot.png', cwd=tmp_path)
    assert (tmp_path / 'plot.png').read_bytes().startswith(b'\x89PNG')
    done = run('bench.py', '--plot', 'c', cwd=tmp_path, check=False)
    assert done.returncode == 1 and 'c has no metrics.jsonl' in done.stderr and 'Traceback' not in done.stderr


def test_parse_layouts():
    assert bench.parse_layouts(' dp8; zero3 ;tp2 pp2  dp2 zbv full; cp=2 dp1 zero2 rep2 offload bf16 mlp=swiglu;', 4) == [
        ('dp8', 8, []), ('zero3', 4, ['--zero_stage=3']),
        ('tp2 pp2 dp2 zbv full', 8, ['--tp=2', '--pp=2', '--pp_schedule=zbv', '--activation_checkpoint=full']),
        ('cp=2 dp1 zero2 rep2 offload bf16 mlp=swiglu', 2, ['--cp=2', '--zero_stage=2', '--dp_replicate=2', '--cpu_offload=True',
                                                            '--grad_compress=bf16', '--mlp=swiglu'])]
    for text, message in (('dp2; zero3 zbw', "'zbw': a layout is words of dpN"), ('dp0', 'not 0'),
                          ('tp2 pp2', 'multiple of tp × cp × pp = 4 processes, not 2')):
        with pytest.raises(SystemExit, match=message):
            bench.parse_layouts(text, 2)


def test_bubble():
    """The textbook's share for every schedule, p ranks and m micro-batches."""
    for p in (2, 3, 4):
        for m in (2 * p, 3 * p, 5 * p):
            expected = dict.fromkeys(('gpipe', '1f1b'), (p - 1) / (m + p - 1))  # Huang et al. 2019
            expected['interleaved1f1b'] = (p - 1) / 2 / (m + (p - 1) / 2)  # Narayanan et al. 2021, 2.2
            # zero bubble (Qi et al. 2024): two stages of three units each, and p - 1 forwards to wait for the first micro-batch
            expected |= dict.fromkeys(('interleavedzb', 'zbv', 'dualpipev'), (p - 1) / (6 * m + p - 1))
            assert {name: bench.bubble(p, m, name) for name in expected} == pytest.approx(expected), (p, m)


def test_layouts(dataset, tmp_path):
    """Two processes, 12 sequences in an iteration: 2 micro-steps of 3 each, or in the pipeline 3 of 4."""
    done = run('bench.py', *BENCH, f'--dataset={dataset}', '--iters=1', '--layouts=dp2; zero3 dp2; pp2', '--nproc_per_node=2', '--json',
               cwd=tmp_path)
    ddp, fsdp, pipeline = [json.loads(line) for line in done.stdout.splitlines()]
    assert [row['processes'] for row in (ddp, fsdp, pipeline)] == [2, 2, 2] and not list(tmp_path.iterdir())
    gpt = GPT(GPTConfig(block_size=32, vocab_size=65, n_layer=2, n_head=4, n_embd=32, bias=False))
    psi, of_blocks = (4 * sum(p.numel() for p in part.parameters()) for part in (gpt, gpt.transformer.h))
    numbers = 256  # bytes: the loss, the stop flag and the gradient's norm are summed too, number by number
    assert ddp['bytes'] == pytest.approx({'all_reduce': psi}, abs=numbers)
    assert fsdp['bytes'] == pytest.approx({'all_reduce': 0, 'reduce_scatter': 2 * psi, 'all_gather': 2 * (psi + of_blocks)}, abs=numbers)
    activations, tied = 3 * 4 * 4 * 32 * 32, 4 * gpt.transformer.wte.weight.numel()
    assert pipeline['bytes'] == pytest.approx({'send': activations, 'recv': activations, 'all_reduce': tied}, abs=numbers)
    assert pipeline['bubble_theory'] == pytest.approx(1 / 4) and 0 < pipeline['bubble_measured'] < 1 and 'bubble_theory' not in ddp


def test_scaling(dataset, tmp_path):
    arguments = *BENCH, f'--dataset={dataset}', '--iters=2', '--warmup=1', '--scaling=2,1', '--json'
    first, second = [json.loads(line) for line in run('bench.py', *arguments, cwd=tmp_path).stdout.splitlines()]
    assert first['processes'] == 1 and first['weak_efficiency'] == first['strong_efficiency'] == 1
    for kind in ('weak', 'strong'):
        speed = second[f'{kind}_tokens_per_sec'] / first[f'{kind}_tokens_per_sec']
        assert second['processes'] == 2 and second[f'{kind}_efficiency'] == pytest.approx(speed / 2)
    done = run('bench.py', *arguments, '--profile', cwd=tmp_path, check=False)
    assert done.returncode == 1 and '--scaling makes a table of its own' in done.stderr and 'Traceback' not in done.stderr


def test_saves(dataset):
    """Rows of blocking and background saves; too few to tell the first from the others are a sentence."""
    tiny = [f'--dataset={dataset}', '--device=cpu', '--compile=False', *'--n_layer=1 --n_head=1 --n_embd=16 --block_size=16 --batch_size=2'.split(),
            '--gradient_accumulation_steps=1', '--json', '--warmup=0', '--saves=3']
    done = run('bench.py', *tiny, '--iters=10')
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert [row['async_checkpoint'] for row in rows] == [False, True] and rows[0]['later_ratio'] == 1
    for row in rows:
        assert row['first_ms'] > 0 and row['later_ratio'] == row['later_ms'] / rows[0]['later_ms'] > 0 and row['dt_ms'] > 0
    few = run('bench.py', *tiny, '--iters=4', check=False)
    assert few.returncode == 1 and 'there were 1 saves before the last: set --iters to 9 at least' in few.stdout


PEER = """
import os, pickle, sys
import numpy as np
dataset = 'openwebtext'
n_embd, max_iters = 768, 10
for argument in sys.argv[1:]:
    key, value = argument[2:].split('=')
    globals()[key] = value
    assert key not in ('pos', 'norm')
data = os.path.join('data', dataset)
assert pickle.load(open(data + '/meta.pkl', 'rb')) == dict(vocab_size=128) and len(np.memmap(data + '/train.bin', '<u2')) == 20_000
for i in range(int(max_iters) + 1):
    print(f'iter {i}: loss 4.0, time {50.0 if i < 2 else 8.0 + i % 2}ms, mfu -100.00%')
"""


def test_versus(dataset, tmp_path):
    """A peer that prints nanoGPT's lines: the keys that it has, the same data, medians of the settled iterations, a ratio."""
    (tmp_path / 'train.py').write_text(PEER)
    arguments = [f'--versus={tmp_path}', '--theirs=max_iters=7', *BENCH, f'--dataset={dataset}', '--pos=rope', '--iters=5', '--warmup=2', '--rounds=2']
    lines = run('bench.py', *arguments).stdout.splitlines()
    assert len(lines) == 3 and all(line.split()[1] in ('8.00', '9.00') for line in lines) and lines[-1].startswith('medians')
    theirs, ours = float(lines[-1].split()[1]), float(lines[-1].split()[4])
    assert float(lines[-1].split()[7]) == pytest.approx(theirs / ours, abs=0.01)
    memory = re.search(r'memory from ([\d.]+) to ([\d.]+) GB$', lines[-1])
    assert 0.1 < float(memory[1]) < float(memory[2]) < 10  # the peer imports torch, and no more
    (tmp_path / 'train.py').write_text('raise ValueError("not today")')
    broken = run('bench.py', *arguments, check=False)
    assert broken.returncode == 1 and 'not today' in broken.stdout


def test_versus_loader(tmp_path):
    """The function of their train.py, which alone is executed, on the tokens that ours has."""
    (tmp_path / 'train.py').write_text("raise ValueError('executed')\ndef get_batch(split):\n    global calls\n    calls = globals().get('calls', 0) + 1\n"
                                       "    if calls == 512:\n        tokens = np.memmap(os.path.join(data_dir, f'{split}.bin'), np.uint16)\n"
                                       "        print(len(tokens), tokens.max(), batch_size, block_size, device_type, device)\n    return torch.zeros(1)\n")
    arguments = [f'--versus={tmp_path}', '--part=loader', '--rounds=1']
    said, row = run('bench.py', *arguments, '--json').stdout.splitlines()
    row = json.loads(row)
    assert said == f'{2 ** 25} 50256 64 1024 cpu cpu' and row['theirs_ms'] > 0 and row['ours_ms'] > 0
    (tmp_path / 'train.py').write_text('')
    for wrong, message in ((arguments, 'train.py has no function get_batch'), (arguments[1:], '--part=loader needs a nanoGPT checkout'),
                           (['--part=loader', '--versus=nowhere'], 'there is no nowhere/train.py'),
                           (['--part=start', '--rounds=0'], '--rounds must be at least 1')):
        done = run('bench.py', *wrong, check=False)
        assert done.returncode == 1 and message in done.stderr and 'Traceback' not in done.stderr


def test_versus_tokenize(tmp_path, vocabulary):
    """Whole commands on one text; tokens that differ are no comparison."""
    (tmp_path / 'data/shakespeare').mkdir(parents=True)
    script = tmp_path / 'data/shakespeare/prepare.py'
    source = ("import numpy as np, tiktoken\ntext = open('input.txt').read()[:900]\n"
              "np.array(tiktoken.get_encoding('gpt2').encode_ordinary(text), np.uint16).tofile('train.bin')\n")
    script.write_text(source)
    (tmp_path / 'words.txt').write_text('ten chars\n' * 100)
    arguments, env = [f'--versus={tmp_path}', '--part=tokenize', '--rounds=1', f'--input={tmp_path}/words.txt'], {'TIKTOKEN_CACHE_DIR': vocabulary}
    first, medians = run('bench.py', *arguments, env=env).stdout.splitlines()
    assert first.startswith('nanoGPT') and medians.startswith('medians') and medians.endswith('MB/s')
    script.write_text(source.replace('900', '899'))
    done = run('bench.py', *arguments, env=env, check=False)
    assert done.returncode == 1 and 'the two have written different tokens' in done.stdout
    done = run('bench.py', *arguments[:-1], check=False)
    assert done.returncode == 1 and 'as --input' in done.stderr and 'Traceback' not in done.stderr


@pytest.mark.matrix  # half a minute of launches
def test_versus_sample_and_start(tmp_path):
    """The same random weights, exported, and a prompt that their vocabulary has; a first iteration beside a bare process."""
    (tmp_path / 'sample.py').write_text(
        "import os, pickle, sys, torch\narguments = dict(a[2:].split('=') for a in sys.argv[1:])\n"
        "content = torch.load(arguments['out_dir'] + '/ckpt.pt', weights_only=True)\n"
        "meta = pickle.load(open(os.path.join('data', content['config']['dataset'], 'meta.pkl'), 'rb'))\n"
        "row = content['model']['transformer.wte.weight'][meta['stoi'][arguments['start']]]\n"
        "print(len(row), len(meta['itos']), arguments['max_new_tokens'], arguments['device'], file=open('calls', 'a'))\n")
    tiny = ['--device=cpu', '--compile=False', *'--n_layer=1 --n_head=1 --n_embd=16 --block_size=16'.split(), '--rounds=1', '--json']
    row = json.loads(run('bench.py', f'--versus={tmp_path}', '--part=sample', '--new_tokens=3', *tiny).stdout)
    assert set(row) == {'theirs_ms', 'ours_ms'}
    assert (tmp_path / 'calls').read_text() == '16 50257 3 cpu\n16 50257 1 cpu\n'
    start = ['--part=start', '--random_tokens=65', '--gradient_accumulation_steps=1', *tiny]
    row = json.loads(run('bench.py', *start).stdout)
    assert row['theirs_ms'] > 0 and row['ours_ms'] > 0
