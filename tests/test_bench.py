"""bench.py as a user runs it, and the arithmetic of its profile."""
import json

import pytest
from conftest import TINY, run

import metrics

BENCH = [argument for argument in TINY if not argument.startswith(('--max_iters', '--eval', '--log'))]


def test_sweep_and_profile(dataset, tmp_path):
    done = run('bench.py', *BENCH, f'--dataset={dataset}', '--iters=8', '--warmup=2', '--sweep=batch_size=2,4 n_layer=1',
               '--profile', '--json', cwd=tmp_path)
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert [row['arguments'] for row in rows] == [['--batch_size=2', '--n_layer=1'], ['--batch_size=4', '--n_layer=1']]
    for row in rows:
        assert row['tokens_per_sec'] > 0 and row['dt_ms'] > 0 and row['mem_gb'] > 0 and row['mfu'] > 0
        assert set(row['profile_ms']) == set(metrics.CATEGORIES)
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


@pytest.mark.parametrize('kind', ['cpu', 'gpu'])
def test_breakdown(tmp_path, kind):
    """A trace made by hand, one iteration of 100 ms: what overlaps is counted once, what no one fills is idle."""
    def event(cat, name, start, duration, tid=1):
        return dict(ph='X', cat=cat, name=name, ts=1000 * start, dur=1000 * duration, tid=tid)
    events = [event('user_annotation', 'ProfilerStep#6', 0, 100)]
    if kind == 'cpu':
        events += [event('user_annotation', 'data', 0, 5), event('cpu_op', 'aten::to', 1, 2),
                   event('cpu_op', 'aten::linear', 10, 30), event('cpu_op', 'aten::addmm', 12, 20),
                   event('cpu_op', 'aten::scaled_dot_product_attention', 40, 20), event('cpu_op', 'aten::bmm', 45, 10),
                   event('cpu_op', 'aten::relu', 60, 10), event('user_annotation', 'optimizer', 80, 10),
                   event('cpu_op', 'aten::mul', 82, 3), event('cpu_op', 'gloo:all_reduce', 65, 10, tid=2),
                   event('cpu_op', 'aten::mm', 0, 50, tid=3)]  # another thread's work is not this one's time
    else:
        events += [event('gpu_memcpy', 'Memcpy HtoD (Pinned -> Device)', 0, 5), event('kernel', 'nvjet_hsh_128x', 10, 30),
                   event('kernel', 'pytorch_flash::flash_fwd_kernel', 40, 20), event('kernel', 'triton_poi_fused_relu', 60, 10),
                   event('kernel', 'multi_tensor_apply_kernel<FusedAdam>', 80, 10),
                   event('kernel', 'ncclDevKernel_AllReduce', 65, 10, tid=2), event('cpu_op', 'aten::mm', 0, 100)]
    (tmp_path / 'trace.json').write_text(json.dumps(dict(traceEvents=events)))
    expected = {'matmul': 30, 'attention': 20, 'other compute': 10, 'optimizer': 10, 'collectives': 5, 'data': 5, 'idle': 20}
    assert metrics.breakdown(tmp_path / 'trace.json') == pytest.approx(expected)
