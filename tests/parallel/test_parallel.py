"""A dozen layouts equal one process: runs over gloo, compared through metrics.jsonl and checkpoints.

Tolerances: float32 sums in another order differ by about 1e-7 in a loss of 4; AdamW's normalised updates
raise that over the iterations, most in weights whose gradients nearly cancel. 1e-4 (1e-3 relative of a norm)
is far above that, and far below what a wrong factor, a lost token, head, layer or a double-counted gradient
would do.
"""
import functools
import itertools
import json
import shutil

import numpy as np
import pytest
import torch

from data.datasets import read_meta
from data.loader import TokenLoader
from helpers import (FAULTS, ROOT, assert_near, assert_same_tensors, curve, newest_state, newest_weights,
                     run_forked, saved_iterations, side_by_side)
from kilogpt.configurator import config_of
from kilogpt.parallel.layout import CHECKED_KEYS, Layout, check_layout
from kilogpt.settings import check_settings
from model import GPT, GPTConfig

ITERATIONS = 4
BASE = ('--device=cpu --compile=False --dtype=float32 --n_layer=3 --n_head=4 --n_embd=32 --block_size=32 '
        '--batch_size=8 --gradient_accumulation_steps=3 --eval_iters=2 --log_interval=1 --lr_decay_iters=12 '
        '--warmup_iters=2 --learning_rate=2e-3 --min_lr=1e-3 --grad_clip=0.5 --comm_timeout=60 '
        f'--max_iters={ITERATIONS} --eval_interval={ITERATIONS}').split()
MODERN = '--n_kv_head=2 --pos=rope --norm=rmsnorm --mlp=swiglu --qk_norm --tie_weights=False --softcap=15 '\
         '--value_pattern=VN --attention_gate --attention_conv=3 --mlp_conv=4 --lr_factors=vector:50'
MODELS = dict(
    gpt2='--bias', shallow='--n_layer=2', modern=MODERN,
    muon=f'{MODERN} --optimizer=muon --lr_factors=embedding:3,head:0.5,vector:50',
    moe='--mlp=moe --n_experts=4 --n_active_experts=2 --n_shared_experts=1 --expert_hidden=16 '
        '--router_balance_rate=0.01 --router_z_loss=0.001 --mlp_conv=3 --lr_factors=vector:50')

# --- the layouts ----------------------------------------------------------------------------------------

# {processes: {layout: its arguments}}; a name may start with its model, else that is gpt2 (tied weights).
# These are examples. `kilogpt.prove --random` compares all layouts, with all models and kinds of data, few of
# them compiled (tests/prove/test_random_draws.py).
LAYOUTS = {
    2: {'ddp': '', 'modern zero3': '--zero_stage=3', 'tp2': '--tp=2', 'cp2': '--cp=2',
        'modern pp2 zbv': '--pp=2 --pp_schedule=zbv'},
}
SLOW_LAYOUTS = {
    1: {'modern zero3 full': '--zero_stage=3 --activation_checkpoint=full'},
    2: {'zero1': '--zero_stage=1', 'moe ep2': '--ep=2'},
    4: {'tp2 pp2 zbv': '--tp=2 --pp=2 --pp_schedule=zbv',
        'shallow pp4': '--pp=4'},  # the embedding is a stage, and so is the head
    8: {'pp2 tp2 dp2': '--pp=2 --tp=2'},
}
COMPILED_LAYOUTS = {  # test_data_layouts.py has one with zero2
    2: {'moe ep2 compiled': '--ep=2 --compile=True', 'modern tp2 compiled': '--tp=2 --compile=True',
        'modern pp2 compiled': '--pp=2 --compile=True'},
}


def by_name(layouts):
    """{(processes, layout): arguments} of a dict like LAYOUTS."""
    return {(nproc, name): text for nproc, named in layouts.items() for name, text in named.items()}


ARGUMENTS = by_name(LAYOUTS) | by_name(SLOW_LAYOUTS) | by_name(COMPILED_LAYOUTS)


def model_of(layout):
    return layout.split()[0] if layout.split()[0] in MODELS else 'gpt2'


def arguments_of(nproc, layout):
    """The arguments of a layout on top of BASE, its model's too. On one process a model's name is a layout."""
    return [*MODELS[model_of(layout)].split(), *ARGUMENTS.get((nproc, layout), '').split()]


@pytest.fixture(scope='module')
def layout_run(train):
    """Function (processes, layout) -> its run. On one process, a model's name is a layout."""
    done = {}

    def get(nproc, layout):
        if (nproc, layout) not in done:
            done[nproc, layout] = train(*arguments_of(nproc, layout), base=BASE, nproc=nproc)
        return done[nproc, layout]

    return get


def assert_equal_to_one_process(run, one, layout):
    assert list(one.lines) == list(range(1, ITERATIONS + 1)) and list(one.evals) == [0, ITERATIONS]
    assert all(line['grad_norm'] > 0.5 for line in one.lines.values())  # clipping is at work
    assert_near(run, one)
    found, expected = newest_weights(run.out_dir), newest_weights(one.out_dir)
    assert found.keys() == expected.keys()
    for name in expected:
        # A key's bias shifts all scores of a query alike: the gradient is zero but for rounding, which AdamW
        # makes steps of.
        if not name.endswith('c_k.bias') or layout.startswith('modern'):
            assert (found[name] - expected[name]).abs().max() < 1e-4, name


@pytest.mark.parametrize('nproc, layout', [
    *(pytest.param(*key, marks=pytest.mark.quick) for key in by_name(LAYOUTS)),
    *(pytest.param(*key, marks=pytest.mark.slow) for key in by_name(SLOW_LAYOUTS))])
def test_layout_equals_one_process(layout_run, nproc, layout):
    assert_equal_to_one_process(layout_run(nproc, layout), layout_run(1, model_of(layout)), layout)


@pytest.mark.slow
@pytest.mark.drawn(2)
@pytest.mark.parametrize('nproc, layout', by_name(COMPILED_LAYOUTS))
def test_compiled_layout_equals_one_process(layout_run, nproc, layout):
    assert_equal_to_one_process(layout_run(nproc, layout), layout_run(1, model_of(layout)), layout)


@pytest.mark.slow
@pytest.mark.parametrize('nproc, layout', [(2, 'modern pp2 zbv'), (2, 'ddp'), (2, 'modern zero3')])
def test_layout_with_the_loss_in_parts_equals_one_process(train, layout_run, nproc, layout):
    run = train(*arguments_of(nproc, layout), base=BASE, nproc=nproc, faults=[FAULTS / 'loss_in_parts.py'])
    assert_equal_to_one_process(run, layout_run(1, model_of(layout)), layout)


@pytest.mark.slow
def test_initial_weights_are_the_same_in_every_layout(train, train_all):
    """Equal to the bit, as saved after an update with a learning rate of 0."""
    still = '--bias --learning_rate=0 --min_lr=0 --max_iters=1 --eval_iters=0'.split()
    expected = newest_weights(train(*still, base=BASE).out_dir)
    assert len({tensor.numpy().tobytes() for tensor in expected.values()}) > 7
    texts = ('--zero_stage=1', '--zero_stage=3 --dp_replicate=2', '--tp=4', '--tp=2 --pp=2', '--pp=2 --pp_schedule=zbv')
    for run in train_all({text: [*still, *text.split()] for text in texts}, base=BASE, nproc=4).values():
        assert_same_tensors(newest_weights(run.out_dir), expected)


# --- other arithmetic: exact or near --------------------------------------------------------------------

@pytest.mark.slow
@pytest.mark.drawn(2)
@pytest.mark.parametrize('nproc, arguments', [
    (2, '--tp=2'), (4, '--tp=2 --pp=2'), (2, '--cp=2 --zero_stage=3 --dropout=0.1'),
    (2, '--pp=2 --pp_schedule=zbv'),
    (2, '--tp=2 --mlp=moe --n_experts=4 --value_pattern=V --attention_conv=2 --window=5')])
def test_every_part_is_in_the_mode_of_the_pass(train, nproc, arguments):
    """What replaces a part stays in the tree of modules, which model.train and model.eval walk."""
    train(*arguments.split(), '--max_iters=2', '--eval_iters=1', base=BASE, nproc=nproc, faults=[FAULTS / 'modes.py'])


@pytest.mark.slow
def test_offload_does_not_change_the_curve(train, layout_run):
    offloaded = train(*arguments_of(2, 'modern zero3'), '--cpu_offload', base=BASE, nproc=2)
    assert curve(offloaded) == curve(layout_run(2, 'modern zero3'))


@pytest.mark.parametrize('model, arguments', [
    ('gpt2', '--dtype=float16'),
    pytest.param('gpt2', '--dtype=bfloat16 --zero_stage=2 --fp8=True', marks=pytest.mark.slow),
    pytest.param('moe', '--dtype=bfloat16 --zero_stage=2 --ep=2 --fp8=True', marks=pytest.mark.slow)])
def test_half_precision_is_near(train, layout_run, model, arguments):
    """bf16 parameters round each product to 8 bits, fp8 to 4 or 3: a loss of 4 within 0.03."""
    run = train(*MODELS[model].split(), *arguments.split(), base=BASE, nproc=2)
    expected = layout_run(1, model)
    assert list(run.lines) == list(expected.lines)
    errors = [abs(run.lines[i]['loss'] - expected.lines[i]['loss']) for i in expected.lines]
    assert 1e-6 < max(errors) < 0.03  # float32 in another order errs by 5e-7


@pytest.mark.slow
def test_compressed_gradients_follow_the_curve(train_all):
    """bf16 keeps 8 bits of a gradient (2%), rank 4 of 32 the largest directions and the rest later (5%)."""
    longer = '--bias --max_iters=16 --lr_decay_iters=24'.split()  # PowerSGD begins at the tenth iteration
    kinds = 'none', 'bf16', 'powersgd', 'bf16 --zero_stage=1', 'powersgd --zero_stage=1'
    variants = {kind: [*longer, *f'--grad_compress={kind}'.split()] for kind in kinds}
    runs = train_all(variants, base=BASE, nproc=2)
    expected = runs['none'].lines
    for kind in kinds[1:]:
        lines, bound = runs[kind].lines, 0.02 if 'bf16' in kind else 0.05
        assert list(lines) == list(expected) == list(range(1, 17))
        assert 0 < max(abs(lines[i]['loss'] / expected[i]['loss'] - 1) for i in expected) < bound, kind


@pytest.mark.slow
def test_compiler_that_fails_on_one_process_is_used_by_none(train_all):
    """The curve is that of eager processes, to the bit, which the compiler's is not."""
    options = ['--bias', '--eval_iters=0', '--keep_checkpoints=0']
    eager, compiled = train_all({choice: [*options, f'--compile={choice}'] for choice in (False, True)},
                                base=BASE, nproc=2).values()
    run = train_all({0: [*options, '--compile=True']}, base=BASE, nproc=2,
                    faults=[FAULTS / 'compiler_fails.py'])[0]
    note = 'compile=False on all processes: the compiler failed on rank 1 ('
    assert run.stdout.count(note) == 1 and 'a planted fault' in run.stdout, run.outputs
    assert 'compile=False' not in compiled.stdout
    assert curve(run) == curve(eager) != curve(compiled)


# --- memory ---------------------------------------------------------------------------------------------

def counted_bytes(run, rank=0):
    """{moment: bytes that tensors of a rank held at its last time} of a run with count_bytes.py."""
    return dict(json.loads(line) for line in open(f'{run.out_dir}.bytes.{rank}'))


@pytest.mark.slow
def test_memory_falls_as_zero_says(train_all):
    """Bytes of a rank's tensors: 4 Ψ + 4 Ψ + 8 Ψ in float32, of which a stage divides its shards by N."""
    nproc = 2
    shape = '--n_layer=4 --n_embd=256 --max_iters=2 --eval_iters=0 --keep_checkpoints=0'.split()
    one_micro_step = f'--gradient_accumulation_steps={nproc}'
    stages = {stage: [*shape, one_micro_step, f'--zero_stage={stage}'] for stage in range(4)}
    runs = train_all(stages, base=BASE, nproc=nproc, faults=[FAULTS / 'count_bytes.py'])
    psi = 4 * 12 * 256 ** 2 + (128 + 32) * 256 + 9 * 256
    # embeddings and the last norm stay whole in forward and backward; with stage 3 blocks do not
    rest = (128 + 32) * 256 + 256
    at_step = {0: 16 * psi, 1: 8 * psi + 8 * psi / nproc, 2: 16 * psi / nproc, 3: 16 * psi / nproc}
    # where backward begins: shards of parameters and moments, and on top the parameters that stay gathered
    at_backward = {2: 12 * psi / nproc + 4 * psi, 3: 12 * psi / nproc + 4 * rest}
    activations = counted_bytes(runs[0])['backward'] - 16 * psi  # the same for all stages
    for stage, rank in itertools.product(range(4), range(nproc)):
        found = counted_bytes(runs[stage], rank)
        assert found['step'] == pytest.approx(at_step[stage], rel=0.1), (stage, rank)
        if stage in at_backward:
            held = found['backward'] - activations
            assert held == pytest.approx(at_backward[stage], rel=0.1), (stage, rank)


@pytest.mark.slow
def test_gradients_accumulate_in_the_buckets_that_ddp_sends(train_all):
    """Separate memory for gradients would take 4 bytes more for each parameter."""
    variants = {stage: ['--bias', '--max_iters=2', '--eval_iters=0', '--keep_checkpoints=0',
                        '--gradient_accumulation_steps=6', f'--zero_stage={stage}'] for stage in (0, 1)}
    runs = train_all(variants, base=BASE, nproc=2, faults=[FAULTS / 'count_bytes.py'])
    for run in runs.values():
        lines = [json.loads(line) for line in open(f'{run.out_dir}.bytes.0')]
        counts = [number for moment, number in lines if moment == 'gradient storages']
        # a warm-up pass of one micro-step, another one with new buckets, then two iterations of three
        assert len(counts) == 8 and counts[:2] == [0, 0] and set(counts[2:]) == {1}, counts


@pytest.mark.slow
def test_activation_checkpointing_saves_memory(train_all):
    """What a block keeps for its backward pass, in B·T·C floats: the difference of nine blocks and one."""
    shape = ['--n_embd=128', '--gradient_accumulation_steps=1', '--max_iters=1', '--eval_iters=0',
             '--keep_checkpoints=0']
    variants = {(mode, layers): [*shape, f'--n_layer={layers}', f'--activation_checkpoint={mode}']
                for mode in ('none', 'selective', 'full') for layers in (1, 9)}
    runs = train_all(variants, base=BASE, faults=[FAULTS / 'count_bytes.py'])

    def kept_per_block(mode):
        eight_blocks = counted_bytes(runs[mode, 9])['backward'] - counted_bytes(runs[mode, 1])['backward']
        parameters = 8 * 4 * (12 * 128 ** 2 + 2 * 128)
        return (eight_blocks - parameters) / (8 * 4 * 8 * 32 * 128)

    assert kept_per_block('full') == pytest.approx(1, rel=0.1)  # its input
    # its input and the outputs of q, k, v, attention, both projections (6) and the hidden layer (4)
    assert kept_per_block('selective') == pytest.approx(11, rel=0.1)
    # inputs of: two norms, q k v at once, attention (3) and its output, both projections (1 + 4), GELU (4)
    assert kept_per_block('none') == pytest.approx(16, rel=0.1)


@pytest.mark.slow
@pytest.mark.parametrize('schedule', ['zbv', 'interleavedzb'])
def test_activation_checkpointing_saves_memory_under_schedules_that_split_the_backward_pass(train_all,
                                                                                            schedule):
    shape = ['--n_layer=6', '--n_embd=128', '--gradient_accumulation_steps=4', '--max_iters=3',
             '--eval_iters=0', '--keep_checkpoints=0', '--pp=2', f'--pp_schedule={schedule}']
    variants = {mode: [*shape, f'--activation_checkpoint={mode}'] for mode in ('none', 'selective', 'full')}
    runs = train_all(variants, base=BASE, nproc=2, faults=[FAULTS / 'peak_bytes.py'])
    peaks = {mode: json.load(open(f'{run.out_dir}.peak.1'))['peak'] for mode, run in runs.items()}
    assert peaks['full'] < 0.85 * peaks['none'] and peaks['selective'] < 0.95 * peaks['none'], peaks
    assert peaks['full'] < peaks['selective'], peaks
    note = f'pp_schedule={schedule} does not split the backward pass'
    assert {mode: note in run.stdout for mode, run in runs.items()} == dict(
        none=False, selective=True, full=True)


@pytest.mark.slow
@pytest.mark.parametrize('schedule, saved_blocks', [('1f1b', 6), ('zbv', 3)])
def test_pipelines_with_zero3_free_blocks_after_each_pass(train_all, schedule, saved_blocks):
    """ZeRO-2 holds the 8 blocks of a rank, ZeRO-3 two of them, or with zbv the blocks of one of two stages."""
    shape = ['--n_layer=16', '--n_embd=128', '--batch_size=1', '--gradient_accumulation_steps=8',
             '--max_iters=3', '--eval_iters=0', '--keep_checkpoints=0', '--pp=2', f'--pp_schedule={schedule}']
    variants = {stage: [*shape, f'--zero_stage={stage}'] for stage in (2, 3)}
    runs = train_all(variants, base=BASE, nproc=2, faults=[FAULTS / 'peak_bytes.py'])
    peaks = {stage: json.load(open(f'{run.out_dir}.peak.0'))['peak'] for stage, run in runs.items()}
    block = 4 * (12 * 128 ** 2 + 2 * 128)
    assert (peaks[2] - peaks[3]) / block == pytest.approx(saved_blocks, abs=1), peaks


@pytest.mark.slow
def test_long_context_over_four_processes_equals_one(train, tmp_path):
    """16,384 tokens: attention scores would take 4.3 GB. Each process has a quarter, then a head of four."""
    for split in ('train', 'val'):
        np.random.default_rng(0).integers(0, 64, 40_000).astype('<u2').tofile(tmp_path / f'{split}.bin')
    (tmp_path / 'meta.json').write_text(json.dumps(dict(vocab_size=64, dtype='uint16', tokenizer='random')))
    long = [f'--dataset={tmp_path}', *'--block_size=16384 --n_layer=1 --n_embd=32 --batch_size=1'.split(),
            *'--gradient_accumulation_steps=1 --max_iters=1 --eval_iters=0 --keep_checkpoints=0'.split()]
    one = train(*long, base=BASE)
    four = train(*long, '--cp=4', base=BASE, nproc=4)
    assert_near(four, one)
    assert one.lines[1]['mem_gb'] < 2 and four.lines[1]['mem_gb'] < 2


# --- checkpoints ----------------------------------------------------------------------------------------

@pytest.mark.slow
def test_checkpoint_of_a_layout_resumes_under_the_next_one(train, layout_run, tmp_path):
    """Weights, moments, data order: two more iterations, on the curve of one process that never stopped."""
    layouts, last = [(1, 'gpt2'), (2, 'zero1'), (2, 'cp2'), (4, 'tp2 pp2 zbv')], ITERATIONS + 2
    longer = [f'--max_iters={last}', '--eval_iters=0']
    unbroken = train(*arguments_of(*layouts[0]), *longer, base=BASE)
    assert list(unbroken.lines) == list(range(1, last + 1))
    longer += ['--init_from=resume', '--keep_checkpoints=0']
    calls = []
    for source, target in zip(layouts, [*layouts[1:], layouts[0]]):
        out_dir = shutil.copytree(layout_run(*source).out_dir, tmp_path / f'{source[1]} on {target[1]}')
        calls.append(functools.partial(train, *arguments_of(*target), *longer, base=BASE, out_dir=out_dir,
                                       nproc=target[0]))
    for run in side_by_side(*calls):
        assert f'iter_{ITERATIONS:08d} at iteration {ITERATIONS}' in run.stdout
        run.evals = {}  # of the first iterations
        assert_near(run, unbroken)


def test_one_process_samples_from_a_layouts_checkpoint(layout_run):
    options = ['--device=cpu', '--which=latest', '--temperature=0', '--max_new_tokens=40', '--num_samples=1',
               '--start=A']
    runs = layout_run(1, 'modern'), layout_run(2, 'modern pp2 zbv')
    texts = [run_forked('sample.py', f'--out_dir={run.out_dir}', *options).stdout for run in runs]
    assert texts[0] == texts[1] and len(texts[0]) > 40


# --- updates that are not finite ------------------------------------------------------------------------

@pytest.mark.parametrize('arguments, rank', [
    ('--pp=2', 1), pytest.param('--optimizer=muon --log_interval=3', 1, marks=pytest.mark.slow),
    pytest.param('--dtype=float16', 0, marks=pytest.mark.slow),
    pytest.param('--zero_stage=3 --log_interval=3', 0, marks=pytest.mark.slow)])
def test_one_process_with_a_nan_decides_for_all(train, train_all, dataset, arguments, rank):
    """In the fourth iteration none is updated: 'skip' continues, 'abort' saves the state before and ends.

    Between iterations that are logged the NaN is noticed late.
    """
    # calls of the loss: in the warm-up, which DDP makes twice, in three iterations, and two in the fourth
    passes = 3 if '--pp' in arguments else 2
    call = (1 if '--zero' in arguments else passes) + 3 * passes + 2
    options = [*arguments.split(), '--eval_iters=0', '--max_iters=6']
    runs = train_all({choice: [*options, f'--on_nonfinite={choice}'] for choice in ('skip', 'abort')},
                     base=BASE, nproc=2, check=False, faults=[FAULTS / 'nan_loss.py'],
                     env=dict(FAULT_CALL=str(call), FAULT_RANK=str(rank)))
    skip, abort = runs['skip'], runs['abort']
    # skip: the update is reported once and counted, and the loss continues to fall.
    assert skip.codes == [0, 0], skip.outputs
    said = f'the loss of iteration 4 is nan: update skipped (1 so far), its batch is in {skip.out_dir}/'
    assert skip.stdout.count(said) == 1, skip.outputs
    assert newest_state(skip.out_dir)['skipped'] == [1, 0]
    interval = 3 if 'log_interval' in arguments else 1
    assert sorted(skip.lines) == [*range(interval, 7, interval)]
    assert skip.lines[6]['loss'] < skip.lines[interval]['loss']
    assert interval == 3 or skip.lines[4]['grad_norm'] is None

    # abort: every process ends with 1, and the last checkpoint is the one of three iterations
    assert abort.codes == [1, 1] and 'error: the loss of iteration 4 is nan' in abort.stderr, abort.outputs
    assert saved_iterations(abort.out_dir) == [3]
    before = train(*arguments.split(), '--eval_iters=0', '--max_iters=3', base=BASE, nproc=2)
    assert_same_tensors(newest_weights(abort.out_dir), newest_weights(before.out_dir))

    # both leave the batch: the fourth one's sequences
    for run in (skip, abort):
        dump = json.loads((run.out_dir / 'nonfinite_00000004.json').read_text())
        loader = TokenLoader(str(dataset), 'train', dump['block_size'], 65, read_meta(dataset), seed=1337)
        count = len(dump['sequences'])
        starts = loader.train_starts(3 * count + np.arange(count)) % 20_000
        assert dump['sequences'] == [[str(dataset / 'train.bin'), start] for start in starts.tolist()]
        assert len(dump['losses']) == 2 and dump['lr'] > 0


@pytest.mark.parametrize('arguments', [
    '', pytest.param('--dtype=float16', marks=pytest.mark.slow),
    pytest.param('--zero_stage=1', marks=pytest.mark.slow)])
def test_powersgd_loses_one_update_to_a_nan(train, arguments):
    """In iteration 13 on one process: neither the error feedback nor the factors keep the NaN."""
    run = train('--grad_compress=powersgd', '--on_nonfinite=skip', '--max_iters=20', '--lr_decay_iters=24',
                '--eval_iters=0', *arguments.split(), base=BASE, nproc=2, faults=[FAULTS / 'nan_loss.py'],
                env=dict(FAULT_CALL=str(2 + 2 * 12 + 1), FAULT_RANK='1'))
    assert list(run.lines) == list(range(1, 21))
    bad = [i for i, line in run.lines.items() if line['loss'] is None or line['grad_norm'] is None]
    assert bad == [13] and newest_state(run.out_dir)['skipped'] == [1, 0]
    assert run.lines[20]['loss'] < run.lines[12]['loss']


@pytest.mark.quick
def test_ten_skips_in_a_row_end_the_run(train):
    run = train('--learning_rate=1e30', '--on_nonfinite=skip', '--eval_iters=0', '--max_iters=50', base=BASE,
                check=False)
    assert run.returncode == 1
    assert run.stdout.count('update skipped') == 9 and 'after 9 that were skipped' in run.stderr
    assert newest_state(run.out_dir)['skipped'] == [9, 9]


# --- what is refused ------------------------------------------------------------------------------------

# arguments of two processes on top of BASE, and words that the sentence must hold
REFUSED = {
    'degrees': ('--tp=3', 'tp=3 × cp=1 × pp=1 is 3', 'one of 1, 2'),
    'no degree': ('--pp=0', 'pp is 0', 'at least 1'),
    'heads': ('--tp=2 --n_head=3 --n_embd=48', 'n_head=3 cannot be split over tp=2', 'tp=1 cp=1'),
    'heads over cp': ('--cp=2 --n_head=1', 'n_head=1 cannot be split', 'tp=1 cp=1'),
    'heads of states': ('--cp=2 --mixer_pattern=DA --delta_heads=3', 'delta_heads=3 cannot be split over tp=1 cp=2',
                        'tp=1 cp=1'),
    'kv heads': ('--tp=2 --n_kv_head=1', 'n_kv_head=1 cannot be split over tp=2', 'tp=1 cp=2'),
    'block_size': ('--cp=2 --block_size=31', 'block_size=31 cannot be split', 'tp=1 cp=1'),
    'convolution': ('--cp=2 --block_size=4 --attention_conv=4', 'attention_conv=4 reads 3 positions', 'block_size higher'),
    'convolution before the MLP': ('--cp=2 --block_size=4 --mlp_conv=4', 'mlp_conv=4 reads 3 positions',
                                   'set cp or mlp_conv'),
    'layers': ('--pp=2 --pp_schedule=zbv --n_layer=1', 'makes 4 stages', 'n_layer to at least 2'),
    'schedule': ('--pp=2 --pp_schedule=2f2b', "pp_schedule is '2f2b'", 'dualpipev'),
    'stage': ('--zero_stage=4', 'zero_stage is 4', 'choose 0, 1, 2 or 3'),
    'replicas of nothing': ('--dp_replicate=2', 'zero_stage is 0', 'set zero_stage to 2 or 3'),
    'replicas': ('--dp_replicate=3 --zero_stage=2', 'dp_replicate=3 does not divide', 'one of 1, 2'),
    'offload': ('--cpu_offload --zero_stage=1', 'cpu_offload=True', 'set zero_stage to 2 or 3'),
    'compression': ('--grad_compress=bf16 --tp=2', 'grad_compress=bf16', 'set grad_compress to none'),
    'no compression': ('--grad_compress=zip', "grad_compress is 'zip'", 'powersgd'),
    'float16': ('--dtype=float16 --zero_stage=2', 'dtype=float16', 'set dtype to bfloat16 or float32'),
    'checkpointing': ('--activation_checkpoint=some', "activation_checkpoint is 'some'", 'selective'),
    'spike': ('--on_spike=ignore', "on_spike is 'ignore'", 'none, skip, rollback'),
    'momentum': ('--optimizer=muon --muon_momentum=1', 'muon_momentum is 1.0', 'below 1'),
    'spike factor': ('--on_spike=skip --spike_factor=1', 'spike_factor is 1.0', 'above 1'),
    'no way back': ('--on_spike=rollback --keep_checkpoints=0', 'keep_checkpoints is 0', 'at least 1'),
    'nonfinite': ('--on_nonfinite=ignore', "on_nonfinite is 'ignore'", 'abort, skip'),
    'optimizer': ('--optimizer=lion', "optimizer is 'lion'", 'adamw, muon'),
    'async_tp': ('--async_tp=True', 'tp is 1', 'async_tp to False'),
    'fp8': ('--fp8=True', 'fp8=True goes with dtype=bfloat16', 'set fp8 to False'),
    'timeout': ('--comm_timeout=0', 'comm_timeout is 0', 'at least 1'),
}


def refusal_of(name):
    """The sentence with which two processes refuse a case of REFUSED, without starting them."""
    config = config_of(f'{ROOT}/train.py', [*BASE, *REFUSED[name][0].split()])
    with pytest.raises(ValueError) as refusal, torch.device('meta'):
        check_settings(config)
        fields = {key: config[key] for key in GPTConfig.__dataclass_fields__ if key in config}
        model = GPT(GPTConfig(vocab_size=65, **fields), seed=None)
        check_layout(model, Layout.of(2, config), dtype=config['dtype'],
                     **{key: config[key] for key in CHECKED_KEYS})
    return str(refusal.value)


@pytest.mark.parametrize('name', REFUSED)
def test_impossible_layout_is_refused_with_the_key_to_change(name):
    sentence = refusal_of(name)
    assert [part for part in REFUSED[name][1:] if part not in sentence] == [], sentence
    assert '\n' not in sentence


@pytest.mark.parametrize('name', ['degrees', 'heads', 'compression', 'optimizer'])
def test_each_process_refuses_in_the_same_sentence(train, name):
    refused = train(*REFUSED[name][0].split(), base=BASE, nproc=2, check=False)
    assert refused.codes == [1, 1] and 'Traceback' not in refused.stderr, refused.outputs
    sentences = [line for line in refused.outputs[0].splitlines() if line.startswith('error: ')]
    assert sentences == [f'error: {refusal_of(name)}'] and not refused.out_dir.exists(), refused.outputs
