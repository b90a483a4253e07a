"""Every layout equals one process: run by processes over gloo, compared through metrics.jsonl and checkpoints.

Tolerances: float32 sums in another order differ by some 1e-7 in a loss of 4; AdamW's normalised updates raise that over eight
iterations, most in weights whose gradients nearly cancel. 1e-4 (1e-3 relative of a norm) is far above that, and far below what
a wrong factor, a lost token, head, layer or a double-counted gradient would do.
"""
import functools
import hashlib
import itertools
import json
import os
import re
import shutil
import signal
import warnings

import numpy as np
import pytest
import torch

from kilogpt import checkpoint
from conftest import forked, read_metrics, side_by_side, tensors, workers
from conftest import launch as launch_torchrun
from data.loader import TokenLoader, read_meta

pytestmark = pytest.mark.filterwarnings('ignore:torch.distributed is disabled')
BASE = ('--device=cpu --compile=False --dtype=float32 --n_layer=3 --n_head=4 --n_embd=32 --block_size=32 --batch_size=8 '
        '--gradient_accumulation_steps=3 --eval_iters=3 --eval_interval=8 --log_interval=1 --max_iters=8 --lr_decay_iters=12 '
        '--warmup_iters=2 --learning_rate=2e-3 --min_lr=1e-3 --grad_clip=0.5 --comm_timeout=60').split()
MODELS = dict(gpt2='--bias', shallow='--n_layer=2', deep='--bias --n_layer=7', modern='--n_kv_head=2 --pos=rope --norm=rmsnorm --mlp=swiglu --qk_norm --tie_weights=False --softcap=15')
MODELS['muon'] = f'{MODELS["modern"]} --optimizer=muon'
SCHEDULES = 'gpipe', '1f1b', 'interleaved1f1b', 'interleavedzb', 'zbv', 'dualpipev'

# {processes: {layout: its arguments}}; a name may start with its model, else that is gpt2 (tied weights)
LAYOUTS = {
    1: {'modern zero3 full': '--zero_stage=3 --activation_checkpoint=full'},
    2: {'ddp': '', 'zero1': '--zero_stage=1', 'zero2': '--zero_stage=2', 'modern zero3': '--zero_stage=3', 'tp2': '--tp=2', 'cp2': '--cp=2',
        **{f'pp2 {schedule}': f'--pp=2 --pp_schedule={schedule}' for schedule in SCHEDULES},
        'modern tp2': '--tp=2', 'modern pp2 zbv': '--pp=2 --pp_schedule=zbv', 'offload': '--zero_stage=2 --cpu_offload',
        'selective': '--tp=2 --activation_checkpoint=selective', 'modern full zero3': '--zero_stage=3 --activation_checkpoint=full',
        'zero2 compiled': '--zero_stage=2 --compile=True',
        'modern tp2 compiled': '--tp=2 --compile=True', 'muon ddp': '', 'muon zero1': '--zero_stage=1', 'muon tp2': '--tp=2'},
    3: {'zero1': '--zero_stage=1', 'modern zero2': '--zero_stage=2', 'zero3': '--zero_stage=3', 'muon zero3': '--zero_stage=3'},
    4: {'modern zero1': '--zero_stage=1', 'zero2': '--zero_stage=2', 'zero3': '--zero_stage=3',
        'hsdp': '--zero_stage=2 --dp_replicate=2', 'tp4': '--tp=4', 'modern cp4': '--cp=4',
        'shallow pp4': '--pp=4',  # the embedding is a stage, and so is the head
        **{f'deep pp4 {schedule}': f'--pp=4 --pp_schedule={schedule}' for schedule in SCHEDULES},
        'tp2 dp2': '--tp=2 --zero_stage=3', 'modern pp2 dp2': '--pp=2', 'cp2 dp2': '--cp=2', 'modern tp2 cp2': '--tp=2 --cp=2',
        'tp2 pp2 zbv': '--tp=2 --pp=2 --pp_schedule=zbv', 'muon tp2 dp2': '--tp=2 --zero_stage=3', 'muon hsdp': '--zero_stage=2 --dp_replicate=2',
        'muon tp2 pp2': '--tp=2 --pp=2'},
    8: {'pp2 tp2 dp2': '--pp=2 --tp=2', 'modern cp2 pp2 dp2 interleavedzb': '--cp=2 --pp=2 --pp_schedule=interleavedzb'},
}
MORE = {
    2: {'modern cp2 zero1': '--cp=2 --zero_stage=1', 'modern pp2 1f1b': '--pp=2', 'full pp2': '--pp=2 --activation_checkpoint=full'},
    4: {'modern hsdp zero3': '--zero_stage=3 --dp_replicate=2', 'cp4 zero3': '--cp=4 --zero_stage=3'},
}


def matrix():
    """The larger matrix: every product of degrees on 4 and 8 processes, with every stage and mode that it allows."""
    yield from ((nproc, name, text) for nproc, layouts in MORE.items() for name, text in layouts.items())
    for nproc, tp, cp, pp, stage, mode in itertools.product((4, 8), (1, 2, 4), (1, 2, 4), (1, 2, 4), (2, 3),
                                                            ('none', 'selective', 'full')):
        for model in ('deep', 'modern'):
            if nproc % (tp * cp * pp) == 0 and tp * cp <= 4 and not (model == 'modern' and tp == 4):
                for schedule in SCHEDULES if pp > 1 and mode == 'none' else ['1f1b']:
                    yield nproc, f'{model} tp{tp} cp{cp} pp{pp} zero{stage} {mode} {schedule}', (
                        f'--tp={tp} --cp={cp} --pp={pp} --zero_stage={stage} --activation_checkpoint={mode} --pp_schedule={schedule}')


def launch(nproc, runs, abreast=False):
    """Make runs [(name, arguments, files to execute before ...)]; {name: {rank: what it said, and its exit code}}.

    abreast: two at a time, for runs that do not need each other.
    """
    def make(name, arguments, *before, again=True):
        done = forked('train.py', *arguments, nproc=nproc, before=before, check=False)
        said = {rank: f'{stdout}{stderr}\nexit code {code}\n'
                for rank, (stdout, stderr, code) in enumerate(zip(done.stdouts, done.stderrs, done.codes))}
        if min(done.codes) < 0 and again:
            # one process of some hundreds has been seen to die in malloc, in torch or gloo (LOG.md): such a run is made once more
            warnings.warn(f'ended by a signal, and made again: {name}, {said}')
            return make(name, arguments, *before, again=False)
        return said
    calls = [functools.partial(make, *run) for run in runs]
    return dict(zip([name for name, *_ in runs], side_by_side(*calls) if abreast else [call() for call in calls]))


def weights(out_dir):
    """The newest checkpoint's weights, whole."""
    return {name: tensor for name, tensor in tensors(checkpoint.find(out_dir)[0]).items() if name.startswith('model.')}


def model_of(name):
    return name.split()[0] if name.split()[0] in MODELS else 'gpt2'


@pytest.fixture(scope='session')
def runs(dataset, tmp_path_factory):
    """Function (processes, layout name) -> (out_dir, what its ranks said); at its first use all layouts of so many are run."""
    folder, said = tmp_path_factory.mktemp('layouts'), {}

    def run_all(nproc, layouts):
        wanted = {**(MODELS if nproc == 1 else {}), **layouts.get(nproc, {})}
        said[nproc] = launch(nproc, [(name, arguments(dataset, folder / str(nproc) / name, f'{MODELS[model_of(name)]} {text}'))
                                     for name, text in wanted.items()], abreast=True)

    def get(nproc, name, layouts=LAYOUTS):
        if nproc not in said:
            run_all(nproc, layouts)
        return folder / str(nproc) / name, said[nproc][name]

    return get


def assert_equal_to_one_process(runs, nproc, name, **options):
    out_dir, said = runs(nproc, name, **options)
    one_dir, _ = runs(1, model_of(name), **options)
    assert said[0].endswith('exit code 0\n'), '\n'.join(said.values())
    (lines, evals), (expected_lines, expected_evals) = read_metrics(out_dir), read_metrics(one_dir)
    assert list(lines) == list(expected_lines) == list(range(1, 9)) and list(evals) == list(expected_evals) == [0, 8]
    for i, expected in expected_lines.items():
        assert lines[i]['loss'] == pytest.approx(expected['loss'], abs=1e-4), f'loss of iteration {i}'
        assert lines[i]['grad_norm'] == pytest.approx(expected['grad_norm'], rel=1e-3), f'gradient norm of iteration {i}'
        assert expected['grad_norm'] > 0.5  # clipping is at work
    for i, expected in expected_evals.items():
        for key in ('train_loss', 'val_loss'):
            assert evals[i][key] == pytest.approx(expected[key], abs=1e-4), f'{key} at iteration {i}'
    ours, theirs = weights(out_dir), weights(one_dir)
    assert ours.keys() == theirs.keys()
    for key in theirs:
        # a key's bias shifts all scores of a query alike: its gradient is zero but for rounding, which AdamW makes steps of
        if not key.endswith('c_k.bias') or name.startswith('modern'):
            assert (ours[key] - theirs[key]).abs().max() < 1e-4, key


@pytest.mark.parametrize('nproc, name', [(nproc, name) for nproc, layouts in LAYOUTS.items() for name in layouts])
def test_layout_equals_one_process(runs, nproc, name):
    assert_equal_to_one_process(runs, nproc, name)


@pytest.mark.matrix
@pytest.mark.parametrize('nproc, name', [(nproc, name) for nproc, name, _ in matrix()])
def test_matrix(runs, nproc, name):
    layouts = {}
    for processes, key, arguments in matrix():
        layouts.setdefault(processes, {})[key] = arguments
    assert_equal_to_one_process(runs, nproc, name, layouts=layouts)


def arguments(dataset, out_dir, text=''):
    return [*BASE, *text.split(), f'--dataset={dataset}', f'--out_dir={out_dir}']


def test_initial_weights_are_the_same_in_every_layout(dataset, tmp_path):
    """A hash of each parameter, gathered; saved after an update of no size."""
    still = '--learning_rate=0 --min_lr=0 --max_iters=1 --eval_iters=0 '
    layouts = {1: [''], 4: ['--zero_stage=1', '--zero_stage=3 --dp_replicate=2', '--tp=4', '--pp=2 --pp_schedule=zbv', '--tp=2 --pp=2']}
    hashes = []
    for nproc, texts in layouts.items():
        said = launch(nproc, [(f'{i}', arguments(dataset, tmp_path / f'{nproc}-{i}', still + '--bias ' + text))
                              for i, text in enumerate(texts)], abreast=True)
        for i in range(len(texts)):
            assert said[f'{i}'][0].endswith('exit code 0\n'), said[f'{i}'][0]
            hashes.append({name: hashlib.sha256(value.numpy().tobytes()).hexdigest()
                           for name, value in weights(tmp_path / f'{nproc}-{i}').items()})
    assert all(found == hashes[0] for found in hashes) and len(set(hashes[0].values())) > 7


# counts what tensors hold: at an optimizer step, and where the backward pass begins
PROBE = '''
import gc, json, os, sys, torch
from torch.optim.optimizer import register_optimizer_step_pre_hook
path = next(a for a in sys.argv if a.startswith('--out_dir='))[10:] + '.bytes.' + os.environ.get('RANK', '0')
def count(moment):
    storages = {}
    for tensor in [t for t in gc.get_objects() if isinstance(t, torch.Tensor)]:
        for t in (tensor, tensor.grad if tensor.is_leaf else None):
            if t is not None and not t.is_meta:
                t = t.to_local() if hasattr(t, 'to_local') else t
                storages[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
    with open(path, 'a') as file:
        print(json.dumps([moment, sum(storages.values())]), file=file)
register_optimizer_step_pre_hook(lambda *_: count('step'))
backward = torch.Tensor.backward
def counted(self, *args, **options):
    count('backward')
    backward(self, *args, **options)
torch.Tensor.backward = counted
'''


def test_memory_falls_as_zero_says(dataset, tmp_path):
    """Bytes that the tensors of a rank hold, of 4, against 4 Ψ + 4 Ψ + 8 Ψ with N for what a stage shards (float32)."""
    (tmp_path / 'probe.py').write_text(PROBE)
    model = '--n_layer=4 --n_embd=256 --max_iters=3 --eval_iters=0 --keep_checkpoints=0 --gradient_accumulation_steps=4'
    launch(4, [(f'zero{stage}', arguments(dataset, tmp_path / f'zero{stage}', f'{model} --zero_stage={stage}'),
                tmp_path / 'probe.py') for stage in range(4)], abreast=True)
    psi = 4 * 12 * 256 ** 2 + (128 + 32) * 256 + 9 * 256
    rest = (128 + 32) * 256 + 256  # embeddings and the last norm stay whole in forward and backward, blocks do not with stage 3
    at_step = {0: 16 * psi, 1: 8 * psi + 8 * psi / 4, 2: 16 * psi / 4, 3: 16 * psi / 4}
    # where backward begins: shards of parameters and moments, and on top the parameters that stay gathered
    at_backward = {2: 12 * psi / 4 + 4 * psi, 3: 12 * psi / 4 + 4 * rest}
    found = {(stage, rank): dict(json.loads(line) for line in (tmp_path / f'zero{stage}.bytes.{rank}').read_text().splitlines())
             for stage in range(4) for rank in range(4)}
    activations = found[0, 0]['backward'] - 16 * psi  # the same for all stages
    for (stage, rank), bytes_at in found.items():
        assert bytes_at['step'] == pytest.approx(at_step[stage], rel=0.1), f'stage {stage}, rank {rank}, at the step'
        if stage in at_backward:
            assert bytes_at['backward'] - activations == pytest.approx(at_backward[stage], rel=0.1), f'stage {stage}, rank {rank}'


FAULT = '''
import os, torch
from torch.nn import functional as F
calls, cross_entropy = 0, F.cross_entropy
def faulty(*args, **options):
    global calls
    calls += torch.is_grad_enabled()
    loss = cross_entropy(*args, **options)
    return loss * float('nan') if calls == {call} and os.environ['RANK'] == '{rank}' and torch.is_grad_enabled() else loss
F.cross_entropy = faulty
'''


@pytest.mark.parametrize('layout, rank', [('--optimizer=muon --log_interval=3', 1), ('--dtype=float16', 0), ('--zero_stage=3 --log_interval=3', 0),
                                          ('--pp=2', 1)])
def test_one_process_with_a_nan_decides_for_all(dataset, tmp_path, layout, rank):
    """The fourth iteration: none is updated; 'skip' goes on, 'abort' saves what was before and ends. Without a line to log it shows late."""
    per_iteration = 3 if '--pp' in layout else 2  # micro-batches; the first iteration comes after a pass that is thrown away
    call = per_iteration * 3 + (3 if '--pp' in layout else 1) + 2
    (tmp_path / 'fault.py').write_text(FAULT.format(call=call, rank=rank))
    text = f'{layout} --eval_iters=0 --max_iters=6'
    said = launch(2, [(choice, arguments(dataset, tmp_path / choice, f'{text} --on_nonfinite={choice}'), tmp_path / 'fault.py')
                      for choice in ('skip', 'abort')] +
                  [('none', arguments(dataset, tmp_path / 'none', f'{layout} --eval_iters=0 --max_iters=3'))], abreast=True)
    what = 'loss' if 'float16' in layout else 'gradient norm'  # float16's gradients may overflow, which its scaler mends
    assert said['skip'][0].count(f'the {what} of iteration 4 is nan: update skipped (1 so far), its batch is in {tmp_path}/skip/nonfinite') == 1
    assert checkpoint.read_state(checkpoint.find(tmp_path / 'skip')[0])['skipped'] == [1, 0]
    for choice in ('skip', 'abort'):
        dump = json.loads((tmp_path / choice / 'nonfinite_00000004.json').read_text())
        loader = TokenLoader(str(dataset), 'train', dump['block_size'], 65, read_meta(dataset), seed=1337)
        count = len(dump['sequences'])
        assert [position for path, position in dump['sequences']] == (loader.train_starts(3 * count + np.arange(count)) % 20_000).tolist()
        assert {path for path, _ in dump['sequences']} == {str(dataset / 'train.bin')} and len(dump['losses']) == 2 and dump['lr'] > 0
    lines, _ = read_metrics(tmp_path / 'skip')
    every = 3 if 'log_interval' in layout else 1
    assert sorted(lines) == [*range(every, 7, every)] and lines[6]['loss'] < lines[every]['loss']
    assert every == 3 or lines[4]['grad_norm'] is None
    assert f'error: the {what} of iteration 4 is nan' in said['abort'][0]
    assert all(text.endswith('exit code 1\n') for text in said['abort'].values())
    before, expected = weights(tmp_path / 'abort'), weights(tmp_path / 'none')
    assert checkpoint.find(tmp_path / 'abort')[0].endswith('iter_00000003')
    assert all(torch.equal(before[name], expected[name]) for name in expected)


def test_ten_skips_in_a_row_end_the_run(dataset, tmp_path):
    said = launch(1, [('skip', arguments(dataset, tmp_path / 'skip', '--learning_rate=1e30 --on_nonfinite=skip --eval_iters=0 '
                                         '--max_iters=50'))])
    assert said['skip'][0].count('update skipped') == 9 and 'after 9 that were skipped' in said['skip'][0]
    assert checkpoint.read_state(checkpoint.find(tmp_path / 'skip')[0])['skipped'] == [9, 9]


REFUSED = {
    'degrees': ('--tp=3', 'tp=3 × cp=1 × pp=1 is 3', 'one of 1, 2'),
    'no degree': ('--pp=0', 'pp is 0', 'at least 1'),
    'heads': ('--tp=2 --n_head=3 --n_embd=48', 'n_head=3 cannot be split over tp=2', 'tp=1 cp=1'),
    'heads over cp': ('--cp=2 --n_head=1', 'n_head=1 cannot be split', 'tp=1 cp=1'),
    'kv heads': ('--tp=2 --n_kv_head=1', 'n_kv_head=1 cannot be split over tp=2', 'tp=1 cp=2'),
    'block_size': ('--cp=2 --block_size=31', 'block_size=31 cannot be split', 'tp=1 cp=1'),
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
    'nonfinite': ('--on_nonfinite=ignore', "on_nonfinite is 'ignore'", 'abort or skip'),
    'optimizer': ('--optimizer=lion', "optimizer is 'lion'", 'adamw or muon'),
    'fp8': ('--fp8=True', 'fp8=True goes with dtype=bfloat16', 'set fp8 to False'),
    'timeout': ('--comm_timeout=0', 'comm_timeout is 0', 'at least 1'),
}


def test_what_cannot_be_is_refused_in_exit_on_error(dataset, tmp_path):
    said = launch(2, [(name, arguments(dataset, tmp_path / 'out', text)) for name, (text, *_) in REFUSED.items()], abreast=True)
    for name, (_, *parts) in REFUSED.items():
        sentence = re.search('^error: .*', said[name][0], re.M)
        assert sentence and said[name][0].endswith('exit code 1\n') and 'Traceback' not in said[name][0], said[name][0]
        assert all(part in sentence[0] for part in parts), sentence[0]
    assert not (tmp_path / 'out').exists()


def test_a_dead_process_ends_the_run_and_is_named(dataset, tmp_path):
    with launch_torchrun('train.py', *arguments(dataset, tmp_path, '--max_iters=100000 --eval_iters=0 --comm_timeout=30'), nproc=2) as run:
        while 'iter 3:' not in run.stdout.readline():
            pass
        os.kill(workers(run)[1], signal.SIGKILL)
        _, stderr = run.communicate(timeout=30)
    cause = stderr[stderr.index('Root Cause'):]
    assert run.returncode == 1 and re.search(r'rank\s*: 1 ', cause) and 'Signal 9 (SIGKILL)' in cause, stderr


def test_compressed_gradients_follow_the_curve(runs, dataset, tmp_path):
    """bf16 keeps 8 bits of a gradient, rank 4 of 32 keeps its largest directions and makes up for the rest later: within 2% and 5%."""
    longer = '--bias --max_iters=16 --lr_decay_iters=24'
    said = launch(2, [('none', arguments(dataset, tmp_path / 'none', longer))] + [
        (kind, arguments(dataset, tmp_path / kind, f'{longer} --grad_compress={kind}')) for kind in ('bf16', 'powersgd')],
                  abreast=True)
    expected, _ = read_metrics(tmp_path / 'none')
    for kind, bound in dict(bf16=0.02, powersgd=0.05).items():
        lines, _ = read_metrics(tmp_path / kind)
        assert len(lines) == 16, said[kind][0]
        errors = [abs(lines[i]['loss'] / expected[i]['loss'] - 1) for i in expected]
        assert 0 < max(errors) < bound, (kind, errors)


def test_offload_is_exact_and_half_precision_is_near(dataset, tmp_path):
    """Offload moves tensors, it changes none. bf16 parameters round each product to 8 bits, fp8 to 4 or 3: a loss of 4 within 0.03."""
    said = launch(2, [(name, arguments(dataset, tmp_path / name, text)) for name, text in {
        'zero3': '--zero_stage=3', 'offload': '--zero_stage=3 --cpu_offload',
        'zero3-bf16': '--zero_stage=3 --dtype=bfloat16', 'pp2-bf16': '--pp=2 --dtype=bfloat16', 'tp2-bf16': '--tp=2 --dtype=bfloat16',
        'zero2-fp8': '--zero_stage=2 --dtype=bfloat16 --fp8=True',
        'ddp-fp16': '--dtype=float16'}.items()], abreast=True)
    expected, _ = read_metrics(tmp_path / 'zero3')
    for name in said:
        lines, _ = read_metrics(tmp_path / name)
        assert len(lines) == 8, said[name][0]
        errors = [abs(lines[i]['loss'] - expected[i]['loss']) for i in expected]
        assert max(errors) == 0 if name in ('zero3', 'offload') else 0 < max(errors) < 0.03, (name, errors)


@pytest.mark.parametrize('nproc, name', [(2, 'zero2'), (2, 'pp2 zbv'), (2, 'pp2 1f1b')])
def test_a_loss_in_parts_equals_one_process(runs, dataset, tmp_path, nproc, name):
    (tmp_path / 'parts.py').write_text('import model; model.LOGITS = 50 * 128')
    said = launch(nproc, [('parts', arguments(dataset, tmp_path / 'parts', f'{MODELS["gpt2"]} {LAYOUTS[nproc][name]}'), tmp_path / 'parts.py')])
    assert_equal_to_one_process(lambda n, _: (tmp_path / 'parts', said['parts']) if n == nproc else runs(1, 'gpt2'), nproc, name)


def test_checkpointing_activations_saves_memory(dataset, tmp_path):
    """What a block keeps for its backward pass, in B·T·C floats: the difference of nine blocks and one."""
    (tmp_path / 'probe.py').write_text(PROBE)
    shape = '--n_embd=128 --max_iters=1 --eval_iters=0 --keep_checkpoints=0 --gradient_accumulation_steps=1'
    launch(1, [(f'{mode}-{layers}', arguments(dataset, tmp_path / f'{mode}-{layers}', f'{shape} --n_layer={layers} --activation_checkpoint={mode}'),
                tmp_path / 'probe.py') for mode in ('none', 'selective', 'full') for layers in (1, 9)], abreast=True)

    def kept(mode):
        one, nine = (dict(json.loads(line) for line in (tmp_path / f'{mode}-{layers}.bytes.0').read_text().splitlines())['backward']
                     for layers in (1, 9))
        return (nine - one - 8 * 4 * (12 * 128 ** 2 + 2 * 128)) / (8 * 4 * 8 * 32 * 128)  # less eight blocks' parameters

    assert kept('full') == pytest.approx(1, rel=0.1)  # its input
    # its input and the outputs of q, k, v, attention, both projections (6) and the hidden layer (4)
    assert kept('selective') == pytest.approx(11, rel=0.1)
    # inputs of: two norms, q k v at once, attention (3) and its output, both projections (1 + 4), GELU (4)
    assert kept('none') == pytest.approx(16, rel=0.1)


def test_a_long_context_over_four_processes(tmp_path):
    """16,384 tokens: attention's scores would take 4.3 GB; each process has a quarter of the sequence, then one of four heads."""
    for split in ('train', 'val'):
        np.random.default_rng(0).integers(0, 64, 40_000).astype('<u2').tofile(tmp_path / f'{split}.bin')
    (tmp_path / 'meta.json').write_text(json.dumps(dict(vocab_size=64, dtype='uint16', tokenizer='random')))
    text = ('--block_size=16384 --n_layer=1 --n_embd=32 --batch_size=1 --gradient_accumulation_steps=1 --max_iters=1 --eval_iters=0 '
            '--keep_checkpoints=0')
    found = []
    for nproc, layout in ((1, ''), (4, '--cp=4')):
        said = launch(nproc, [('long', arguments(tmp_path, tmp_path / f'out-{nproc}', f'{text} {layout}'))])
        lines, _ = read_metrics(tmp_path / f'out-{nproc}')
        assert lines, said['long'][0]
        assert lines[1]['mem_gb'] < 2
        found.append((lines[1]['loss'], lines[1]['grad_norm']))
    assert found[1][0] == pytest.approx(found[0][0], abs=1e-4) and found[1][1] == pytest.approx(found[0][1], rel=1e-3)


RESHARDED = dict(gpt2={1: ['gpt2'], 2: ['ddp', 'zero2', 'tp2', 'pp2 1f1b'], 3: ['zero3'], 8: ['pp2 tp2 dp2']},
                 muon={1: ['muon'], 3: ['muon zero3'], 4: ['muon tp2 dp2']})


@pytest.mark.parametrize('model', RESHARDED)
def test_a_checkpoint_of_any_layout_goes_on_under_any_other(runs, dataset, tmp_path, model):
    """Weights, moments, data order: two more iterations after eight, on the curve of one process that was never stopped."""
    saved = {name: runs(nproc, name)[0] for nproc, names in RESHARDED[model].items() for name in names}
    before = read_metrics(saved[model])[0]
    forked('train.py', *arguments(dataset, tmp_path / 'unbroken', f'{MODELS[model]} --max_iters=10 --eval_iters=0'))
    expected = read_metrics(tmp_path / 'unbroken')[0]
    assert all(before[i]['loss'] == expected[i]['loss'] for i in before) and len(expected) == 10
    for nproc, names in RESHARDED[model].items():
        continuations = []
        for source in saved:
            for name in names:
                out_dir = tmp_path / f'{source} on {name}'
                shutil.copytree(saved[source], out_dir)
                text = (f'{MODELS[model]} --max_iters=10 --eval_iters=0 --keep_checkpoints=0 --init_from=resume '
                        f'{LAYOUTS.get(nproc, {}).get(name, "")}')
                continuations.append((out_dir.name, arguments(dataset, out_dir, text)))
        said = launch(nproc, continuations, abreast=True)
        for name, _ in continuations:
            lines = read_metrics(tmp_path / name)[0]
            assert 'iter_00000008 at iteration 8' in said[name][0] and len(lines) == 10, said[name][0]
            for i in (9, 10):
                assert lines[i]['loss'] == pytest.approx(expected[i]['loss'], abs=1e-4), name
                assert lines[i]['grad_norm'] == pytest.approx(expected[i]['grad_norm'], rel=1e-3), name


def test_any_layouts_checkpoint_serves_one_process(runs):
    """Saved by pp2 tp2 dp2: one process samples from it as from its own."""
    one, _ = runs(1, 'gpt2')
    eight, _ = runs(8, 'pp2 tp2 dp2')
    texts = [forked('sample.py', f'--out_dir={path}', '--which=latest', '--temperature=0', '--max_new_tokens=40', '--num_samples=1',
                    '--device=cpu', '--start=A').stdout for path in (one, eight)]
    assert texts[0] == texts[1] and len(texts[0]) > 40
