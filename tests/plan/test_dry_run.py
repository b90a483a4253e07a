"""The dry run predicts what real processes allocate and send, and refuses what they refuse."""
import json

import pytest
import torch

from helpers import FAULTS, TINY, run_forked
from test_models import formula_inputs
from kilogpt.plan import dry_run, memory_model
from kilogpt.plan.byte_counter import ByteCounter

# Large enough that activations and logits weigh as much as parameters.
SHAPE = ('--n_layer=4 --n_embd=64 --block_size=64 --max_iters=5 --eval_iters=0 --keep_checkpoints=0 '
         '--gradient_accumulation_steps=8 --batch_size=2').split()

# Every token goes to every expert: all experts have the same load, which the dry run assumes.
EXPERTS = '--mlp=moe --n_experts=4 --n_active_experts=4 --expert_hidden=64'
LAYOUTS = {
    'zero1 muon': (2, '--zero_stage=1 --optimizer=muon'),
    'full checkpointing': (2, '--zero_stage=3 --dtype=bfloat16 --activation_checkpoint=full'),
    'selective checkpointing': (2, '--zero_stage=2 --activation_checkpoint=selective'),
    'hsdp': (4, '--zero_stage=3 --dp_replicate=2'),
    'bf16 gradients': (2, '--grad_compress=bf16'),
    'tp': (4, '--tp=2 --gradient_accumulation_steps=4'),
    'cp zero3': (4, '--cp=2 --zero_stage=3 --gradient_accumulation_steps=4'),
    'tp 1f1b': (4, '--pp=2 --tp=2'),
    'zbv untied': (2, '--pp=2 --pp_schedule=zbv --tie_weights=False'),
    'experts ep zero3': (4, f'{EXPERTS} --ep=2 --zero_stage=3 --n_shared_experts=1'),
    'experts, selective checkpointing': (2, f'{EXPERTS} --ep=2 --activation_checkpoint=selective'),
}


def report_of(dataset, rank, world_size, *arguments):
    """The report of a rank by `python -m kilogpt.plan.dry_run`."""
    arguments = [*TINY, f'--dataset={dataset}', *arguments]
    done = run_forked('kilogpt.plan.dry_run', rank, world_size, *arguments)
    return json.loads(done.stdout.splitlines()[-1])


def bytes_by_kind(collectives):
    """{(kind, dtype): bytes}, without the sums of single numbers over all processes, which are float64."""
    sums = {}
    for row in collectives:
        if row['dtype'] != 'float64':
            key = row['kind'], row['dtype']
            sums[key] = sums.get(key, 0) + row['bytes']
    return sums


@pytest.mark.slow  # the first operator under a TorchDispatchMode imports the compiler, which takes seconds
def test_memory_counts_from_its_first_tensor_to_its_last():
    with ByteCounter() as counter:
        before = torch.zeros(10)
        counter.start()
        counter.phase = 'activations'
        whole, other = torch.zeros(100), torch.zeros(50)
        part = whole[:10]
        del whole, other
        after = torch.zeros(20)
        part.untyped_storage().resize_(0)
    peak, alive = counter.peak(), counter.bytes_alive()
    assert {name: size for name, size in peak.items() if size} == dict(other=40, activations=600)
    assert alive['activations'] == after.nbytes and alive['other'] == before.nbytes
    assert sum(counter.peak(left_out=['activations']).values()) == 40


@pytest.mark.parametrize('world_size, arguments', [
    (2, '--tp=2 --n_head=1'),
    pytest.param(2, '--tp=4', marks=pytest.mark.slow),
    pytest.param(2, '--zero_stage=1 --cpu_offload', marks=pytest.mark.slow),
    pytest.param(4, '--pp=4 --pp_schedule=zbv --n_layer=2', marks=pytest.mark.slow)])
def test_dry_run_refuses_with_the_message_of_a_run(world_size, arguments, train, dataset):
    run = train(*arguments.split(), nproc=world_size, check=False)
    dry = run_forked('kilogpt.plan.dry_run', 0, world_size, *TINY, f'--dataset={dataset}', *arguments.split(),
                     check=False)
    assert run.codes[0] == dry.returncode == 1
    assert dry.stderr.startswith('error: ') and dry.stderr in run.stderr, (run.stderr, dry.stderr)


@pytest.mark.slow
def test_dry_run_of_several_ranks_on_gpus():
    """A pipeline on 64 GPUs: only the last rank has the logits."""
    shape = ('--n_layer=8 --n_embd=256 --n_head=4 --pp=4 --tp=2 --gradient_accumulation_steps=64 '
             '--batch_size=1')
    first, middle, last = results = dry_run.dry_run([*shape.split(), '--device=cuda'], 64)
    assert [result['coordinates']['pp'] for result in results] == [0, 1, 3]
    assert [result['peak_parts']['logits'] > 0 for result in results] == [False, False, True]
    # Four blocks of 12 C², divided by tp=2 and dp=8. Embedding and head are larger, and separate stages.
    assert middle['held']['parameters'] == pytest.approx(4 * 4 * 12 * 256 ** 2 / 2 / 8, rel=0.02)
    assert middle['held']['moments'] == pytest.approx(2 * middle['held']['parameters'], rel=0.001)
    text = '\n'.join(dry_run.table(results, first['peak_parts']))
    assert 'rank 31' in text and 'formula' in text
    with pytest.raises(ValueError, match=r'ranks is \[64\]'):
        dry_run.dry_run(shape.split(), 64, [64])


@pytest.mark.slow
@pytest.mark.drawn(1)
@pytest.mark.parametrize('key', ['--dropout=0.1', '--qk_norm'])
def test_dry_run_for_a_gpu_keeps_what_a_gpu_keeps(key):
    """A byte for each element of a dropout mask; queries and keys in float32 before their norm, not after it."""
    shape = ('--n_layer=4 --n_head=4 --n_embd=256 --block_size=512 --batch_size=8 --gradient_accumulation_steps=2 '
             '--device=cuda --dtype=bfloat16 --compile=False').split()
    measured, predicted = [], []
    for keys in ([], [key]):
        (report,) = dry_run.dry_run([*shape, *keys], 1)
        measured.append(report['peak_parts']['activations'])
        predicted.append(memory_model.memory(*formula_inputs(1, [*shape, *keys], 'cuda'))['activations'])
    assert measured[1] - measured[0] == pytest.approx(predicted[1] - predicted[0], rel=0.15)


def check_layout(train, dataset, nproc, arguments):
    run = train(*SHAPE, *arguments, nproc=nproc, faults=[FAULTS / 'record.py'])
    for rank in (0, nproc - 1) if '--pp=2' in arguments else (0,):
        recorded = json.load(open(f'{run.out_dir}.record.{rank}'))
        predicted = report_of(dataset, rank, nproc, *SHAPE, *arguments)
        assert bytes_by_kind(predicted['collectives']) == bytes_by_kind(recorded['collectives']), rank
        assert predicted['peak_bytes'] == pytest.approx(recorded['peak'], rel=0.03), (rank, predicted)


@pytest.mark.slow
@pytest.mark.drawn(4)
@pytest.mark.parametrize('layout', LAYOUTS)
def test_dry_run_predicts_memory_and_collectives(layout, train, dataset):
    nproc, arguments = LAYOUTS[layout]
    check_layout(train, dataset, nproc, arguments.split())


@pytest.mark.slow
def test_dry_run_of_experts_is_close_to_a_run_with_uneven_loads(train, dataset):
    """Tokens go to 2 of 8 experts, so one process gets more of them than the other."""
    arguments = [*SHAPE, '--mlp=moe', '--expert_hidden=64', '--ep=2']
    run = train(*arguments, nproc=2, faults=[FAULTS / 'record.py'])
    recorded = [json.load(open(f'{run.out_dir}.record.{rank}')) for rank in (0, 1)]
    predicted = report_of(dataset, 0, 2, *arguments)
    assert 'each expert gets the same number of tokens here' in predicted['notes']
    assert predicted['peak_bytes'] == pytest.approx(max(found['peak'] for found in recorded), rel=0.1)
    expected = bytes_by_kind(predicted['collectives'])
    for found in recorded:
        sent = bytes_by_kind(found['collectives'])
        assert sent.pop(('all_to_all', 'float32')) == pytest.approx(
            expected['all_to_all', 'float32'], rel=0.25)
        assert sent == {key: size for key, size in expected.items() if key in sent}


@pytest.mark.slow
@pytest.mark.drawn(1)
@pytest.mark.parametrize('layout', ['tp', 'experts ep zero3'])
def test_dry_run_predicts_the_bytes_of_the_profiler(layout, train, dataset):
    """PyTorch's profiler counts the bytes of a run independently of our ByteCounter."""
    nproc, arguments = LAYOUTS[layout]
    run = train(*SHAPE, '--max_iters=10', '--profile', *arguments.split(), nproc=nproc)
    profiled = json.loads((run.out_dir / 'profile.json').read_text())['bytes']
    predicted = {}
    for row in report_of(dataset, 0, nproc, *SHAPE, *arguments.split())['collectives']:
        predicted[row['kind']] = predicted.get(row['kind'], 0) + row['bytes']
    assert profiled == pytest.approx(predicted, abs=1000)  # sums of single numbers
