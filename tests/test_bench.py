"""bench.py as a user runs it, and the arithmetic of its layouts and tables."""
import json
import sys
import warnings

import pytest
from helpers import ROOT, TINY, run_script

import bench
from kilogpt import launch_train
from kilogpt.configurator import config_of
from kilogpt.run import profiler
from kilogpt.run.metrics import flops_per_token
from model import GPT, GPTConfig

ARGUMENTS = [argument for argument in TINY if not argument.startswith(('--max_iters', '--eval', '--log'))]


def rows_of(*arguments, **options):
    """The rows that bench.py prints with --json."""
    done = run_script('bench.py', *arguments, '--json', check=False, **options)
    if 'lost its connection' in done.stdout:  # one process in hundreds dies, as in run_forked (docs/log)
        warnings.warn(f'a process of this run died, so the run is repeated: {arguments}, {done.stdout}')
        done = run_script('bench.py', *arguments, '--json', check=False, **options)
    assert done.returncode == 0, f'{done.stdout}\n{done.stderr}'
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.slow
def test_sweep_measures_every_combination_and_profiles_it(dataset, tmp_path):
    rows = rows_of(*ARGUMENTS, f'--dataset={dataset}', '--iters=8', '--warmup=2',
                   '--sweep=batch_size=2,4 n_layer=1', '--profile', cwd=tmp_path)
    assert [row['arguments'] for row in rows] == [
        ['--batch_size=2', '--n_layer=1'], ['--batch_size=4', '--n_layer=1']]
    for row in rows:
        for figure in ('tokens_per_sec', 'dt_ms', 'mem_gb'):
            assert row[figure] > 0
        assert row['mfu'] is None  # a CPU has no peak
        assert set(row['profile_ms']) == set(profiler.CATEGORIES)
        for category in ('matmul', 'attention', 'optimizer'):
            assert row['profile_ms'][category] > 0
        assert json.loads((tmp_path / row['trace']).read_text())['traceEvents']
        assert row['products_ms'] > 0 and row['memory_ms'] > 0


@pytest.mark.slow
@pytest.mark.parametrize('changes', [[], ['--mlp=swiglu', '--pos=rope', '--n_kv_head=2', '--block_size=64']])
def test_roofline_counts_the_operations_of_the_model(dataset, changes):
    arguments = [*TINY, f'--dataset={dataset}', *changes]
    config = config_of('train.py', arguments)
    found = bench.roofline(arguments, config)
    fields = {key: config[key] for key in GPTConfig.__dataclass_fields__ if key in config}
    model = GPT(GPTConfig(vocab_size=65, **fields), seed=None)
    tokens = config['batch_size'] * config['gradient_accumulation_steps'] * config['block_size']
    of_matrices = tokens * flops_per_token(model, [])
    of_attention = tokens * flops_per_token(model, [config['block_size']]) - of_matrices
    # Fused attention computes the scores again in its backward pass: 7 products instead of 6.
    expected = of_matrices + of_attention * 7 / 6
    assert found['products_ms'] / 1e3 * found['products_rate'] == pytest.approx(expected, rel=1e-9)
    # Clipping and AdamW read and write ten float32 elements for each parameter; activations come on top.
    assert found['memory_ms'] / 1e3 * found['memory_rate'] > 40 * model.num_params()


@pytest.mark.slow
def test_failed_run_is_a_row_with_its_error(tmp_path):
    done = run_script('bench.py', *ARGUMENTS, '--random_tokens=100', '--iters=2', '--warmup=0',
                      '--sweep=n_head=4,5', '--nproc_per_node=2', cwd=tmp_path, check=False)
    assert done.returncode == 1
    assert 'n_head=4' in done.stdout and 'n_embd=32 is not divisible by n_head=5' in done.stdout


def test_error_of_a_failed_run_has_the_line_that_someone_may_have_edited():
    def traceback(*places):
        calls = [f'  File "{place}, in forward\n    code' for place in places]
        return '\n'.join(['Traceback (most recent call last):', *calls, 'RuntimeError: no'])

    loop, torch_call = f'{ROOT}/train.py", line 1', f'{ROOT}/.venv/lib/site-packages/torch/_ops.py", line 2'
    model, machinery = f'{ROOT}/model.py", line 3', f'{ROOT}/kilogpt/parallel/context.py", line 4'
    for places, expected in (
            ((loop, model, torch_call), ' (model.py, line 3, in forward)'),
            ((loop, machinery, model, torch_call, machinery), ' (model.py, line 3, in forward)'),
            ((loop, machinery, torch_call), ' (kilogpt/parallel/context.py, line 4, in forward)'),
            ((loop,), ' (train.py, line 1, in forward)'),
            ((torch_call,), '')):
        assert launch_train.last_error(traceback(*places)) == f'RuntimeError: no{expected}'
    assert launch_train.last_error(traceback(model) + '\nerror: a sentence') == 'error: a sentence'
    assert launch_train.last_error('') == 'no message'


def test_words_of_a_layout_become_arguments_and_a_number_of_processes():
    text = ' dp8; zero3 ;tp2 pp2  dp2 zbv full; cp=2 dp1 zero2 rep2 offload bf16 mlp=swiglu;'
    assert launch_train.parse_layouts(text, 4) == [
        ('dp8', 8, []),
        ('zero3', 4, ['--zero_stage=3']),
        ('tp2 pp2 dp2 zbv full', 8, [
            '--tp=2', '--pp=2', '--pp_schedule=zbv', '--activation_checkpoint=full']),
        ('cp=2 dp1 zero2 rep2 offload bf16 mlp=swiglu', 2, [
            '--cp=2', '--zero_stage=2', '--dp_replicate=2', '--cpu_offload=True', '--grad_compress=bf16',
            '--mlp=swiglu'])]


@pytest.mark.parametrize('text, message', [
    ('dp2; zero3 zbw', "'zbw': the words of a layout are dpN"),
    ('dp0', 'not 0'),
    (' ; ', "--layouts=' ; ' names no layout"),
    ('tp2 pp2', 'multiple of tp × cp × pp = 4 processes, not 2'),
])
def test_wrong_layout_is_a_sentence(text, message):
    with pytest.raises(SystemExit, match=message):
        launch_train.parse_layouts(text, 2)


BYTES_TOLERANCE = 256  # losses, signals and gradient norms are summed over processes, too


def model_bytes():
    """Bytes of float32 gradients: (of the whole model, of its blocks, of the tied embedding)."""
    gpt = GPT(GPTConfig(block_size=32, vocab_size=65, n_layer=2, n_head=4, n_embd=32, bias=False))
    return [4 * sum(p.numel() for p in part.parameters())
            for part in (gpt, gpt.transformer.h, gpt.transformer.wte)]


@pytest.mark.slow
def test_layouts_communicate_the_bytes_that_theory_predicts(dataset, tmp_path):
    """An iteration has 12 sequences: DDP takes 2 micro-steps of 3 on each process, the pipeline 3 of 4."""
    ddp, pipeline = rows_of(*ARGUMENTS, f'--dataset={dataset}', '--iters=1', '--nproc_per_node=2',
                            '--layouts=dp2; pp2', cwd=tmp_path)
    assert ddp['processes'] == pipeline['processes'] == 2
    assert not list(tmp_path.iterdir())
    whole_model, _, tied = model_bytes()
    assert ddp['bytes'] == pytest.approx({'all_reduce': whole_model}, abs=BYTES_TOLERANCE)
    activations = 3 * 4 * 4 * 32 * 32
    assert pipeline['bytes'] == pytest.approx(
        {'send': activations, 'recv': activations, 'all_reduce': tied}, abs=BYTES_TOLERANCE)
    assert pipeline['bubble_theory'] == pytest.approx(1 / 4) and 'bubble_theory' not in ddp
    assert 0 < pipeline['bubble_measured'] < 1


@pytest.mark.slow
def test_sharded_layouts_communicate_the_bytes_that_theory_predicts(dataset):
    """Two processes take 2 micro-steps of 3 sequences each, the four of HSDP 3 micro-steps of 1."""
    zero1, fsdp, hsdp = rows_of(
        *ARGUMENTS, f'--dataset={dataset}', '--iters=1',
        '--layouts=zero1 dp2; zero3 dp2; zero2 rep2 dp4 batch_size=1 gradient_accumulation_steps=12')
    whole_model, blocks, _ = model_bytes()
    assert zero1['bytes'] == pytest.approx({'all_reduce': 0, 'reduce_scatter': whole_model,
                                            'all_gather': whole_model}, abs=BYTES_TOLERANCE)
    # Embeddings stay gathered until the update; blocks are gathered four times.
    assert fsdp['bytes'] == pytest.approx({'all_reduce': 0, 'reduce_scatter': 2 * whole_model,
                                           'all_gather': whole_model + 3 * blocks}, abs=BYTES_TOLERANCE)
    # Each group of two gathers once an iteration, and the replicas exchange their shards once.
    assert hsdp['bytes'] == pytest.approx({'all_gather': whole_model, 'reduce_scatter': 3 * whole_model,
                                           'all_reduce': whole_model / 2}, abs=BYTES_TOLERANCE)


@pytest.mark.slow
def test_layouts_have_the_predictions_of_the_planner(dataset):
    rows = rows_of(*ARGUMENTS, f'--dataset={dataset}', '--iters=1', '--layouts=dp1; dp2 zero3', '--gpu=T4')
    assert [row['layout'] for row in rows] == ['dp1', 'dp2 zero3']
    for row in rows:
        assert row['mem_gb'] > 0 and row['predicted_gb'] > 1.5  # CUDA's own memory
        assert row['dt_ms'] > 0 and row['predicted_ms'] > 0


@pytest.mark.slow
def test_scaling_is_relative_to_the_smallest_size(dataset, tmp_path):
    first, second = rows_of(*ARGUMENTS, f'--dataset={dataset}', '--iters=2', '--warmup=1', '--scaling=2,1',
                            cwd=tmp_path)
    assert first['processes'] == 1 and first['weak_efficiency'] == first['strong_efficiency'] == 1
    assert second['processes'] == 2
    for kind in ('weak', 'strong'):
        speed = second[f'{kind}_tokens_per_sec'] / first[f'{kind}_tokens_per_sec']
        assert second[f'{kind}_efficiency'] == pytest.approx(speed / 2)


@pytest.mark.slow
def test_saves_are_relative_to_blocking_ones(dataset):
    rows = rows_of(*ARGUMENTS, f'--dataset={dataset}', '--iters=10', '--warmup=0', '--saves=3')
    assert [row['async_checkpoint'] for row in rows] == [False, True] and rows[0]['later_ratio'] == 1
    for row in rows:
        assert row['first_ms'] > 0 and row['dt_ms'] > 0
        assert row['later_ratio'] == row['later_ms'] / rows[0]['later_ms'] > 0


def test_too_few_saves_are_a_sentence():
    """With one save, there are no later saves to compare the first one with."""
    def one_save(*arguments, **keys):
        return dict(stalls_ms=[1.0])
    for _, row in bench.saves(one_save, [], processes=1, interval=3):
        assert row['error'] == 'only 1 save(s) before the last one: set --iters to at least 9'


@pytest.mark.parametrize('arguments, expected', [
    ([], dict(random_tokens=None, profile=False, arguments=['config/quickstart.py'])),
    (['--real_data=False', '--profile=False', '--batch_size=8'],  # as nanoGPT writes it
     dict(random_tokens=50257, profile=False, arguments=['--gradient_accumulation_steps=1', '--batch_size=8'])),
    (['--profile', '--batch_size=8'], dict(random_tokens=None, profile=True, arguments=['--batch_size=8']))])
def test_options_are_nanogpts_too_and_no_argument_is_needed(monkeypatch, arguments, expected):
    monkeypatch.setattr(sys, 'argv', ['bench.py', *arguments])
    options, rest = bench.parse_arguments()
    assert dict(random_tokens=options.random_tokens, profile=options.profile, arguments=rest) == expected


@pytest.mark.parametrize('arguments, message', [
    (['--scaling=1,2', '--profile'], '--scaling prints a table of its own'),
    (['--saves=3', '--sweep=batch_size=1,2'], '--saves prints a table of its own'),
    (['--gpu=H100', '--sweep=batch_size=1,2'], '--gpu needs layouts to predict: add --layouts'),
    (['--scaling=1,0'], '--scaling takes numbers of processes such as 1,2,4'),
    (['--iters=0'], '--iters must be at least 1'),
    (['--sweep=batch_size'], "--sweep takes key=value,value ... separated by spaces, but has 'batch_size'"),
])
def test_wrong_arguments_are_a_sentence(monkeypatch, arguments, message):
    monkeypatch.setattr(sys, 'argv', ['bench.py', *arguments])
    with pytest.raises(SystemExit, match=message):
        bench.main()


def test_tables_line_up(capsys):
    """In each mode, figures are aligned with the header, and a failed row has its error instead."""
    measured = dict(tokens_per_sec=12345.6, dt_ms=12.345, mfu=0.1234, mem_gb=1.5)
    profiled = dict(measured, mfu=None, layout='pp2', bytes=dict(send=2e6, all_reduce=400),
                    bubble_theory=0.25, bubble_measured=0.5)
    tables = (
        (bench.SWEEP, 'n_head=4', dict(measured, layout='')),
        (bench.LAYOUTS, 'pp2', profiled),
        (bench.PREDICTED, 'pp2', dict(profiled, predicted_gb=1.2, predicted_ms=10.0)),
        (bench.SCALING, '2', dict(weak_tokens_per_sec=2e4, weak_efficiency=0.9, strong_tokens_per_sec=1e4,
                                  strong_efficiency=0.5)),
        (bench.SAVES, 'True', dict(first_ms=100.0, first_ratio=0.5, later_ms=10.0, later_ratio=0.1,
                                   dt_ms=12.5)),
    )
    printed = []
    for table, label, row in tables:
        assert bench.print_rows([(label, row)], table, as_json=False)
        printed.append(capsys.readouterr().out.splitlines())
    for (header, line, *_), end in zip(printed, ('GB', 'bubble', 'ratio', 'efficiency', 'ms/iter')):
        assert len(line) == header.rindex(end) + len(end)
    assert printed[0][1].split() == ['n_head=4', '12,346', '12.35', '12.3%', '1.50']
    assert printed[1][1].split() == ['pp2', '12,346', '12.35', '-', '1.50', '25.0%', '/', '50.0%']
    assert printed[1][2] == '    communicates send 2.00MB'
    assert printed[2][1].split()[-4:] == ['1.20', '1.25', '10.00', '1.23']
    assert printed[3][1].split() == ['2', '20,000', '90.0%', '10,000', '50.0%']
    assert printed[4][1].split() == ['True', '100.0', '50.0%', '10.0', '10.0%', '12.50']
    assert not bench.print_rows([('n_head=5', dict(error='error: no'))], bench.SWEEP, as_json=False)
    assert capsys.readouterr().out.splitlines()[1].split() == ['n_head=5', 'error:', 'no']
