"""Training through the user's door: launch train.py, read metrics.jsonl, compare runs."""
import json
import os
import re
import shutil
import signal
import time

import numpy as np
import pytest
import torch

from kilogpt import checkpoint
from conftest import TINY, curve, launch, read_metrics, run, side_by_side, tensors
from data.loader import TokenLoader, read_meta
from model import GPT, GPTConfig

pytestmark = pytest.mark.filterwarnings('ignore:torch.distributed is disabled')  # DCP says that one process is one process
MODEL = dict(block_size=32, vocab_size=65, n_layer=2, n_head=4, n_embd=32, bias=False)  # TINY's


def saved(out_dir):
    """Iterations of the checkpoints in a run's folder; nothing else may be there."""
    folder = os.path.join(out_dir, 'ckpt')
    names = sorted(os.listdir(folder)) if os.path.exists(folder) else []
    assert all(re.fullmatch(r'iter_\d{8}', name) for name in names), names
    return [int(name[5:]) for name in names]


def state_of(a_run):
    return checkpoint.read_state(checkpoint.find(a_run.out_dir)[0])


def same_weights(a, b):
    a, b = (tensors(checkpoint.find(run.out_dir)[0]) for run in (a, b))
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def assert_near(a, b, loss=1e-4, grad_norm=1e-3):
    """Two runs agree: losses within `loss`, gradient norms within `grad_norm` of their size."""
    assert a.lines.keys() == b.lines.keys() and a.evals.keys() == b.evals.keys() and a.lines
    for i in a.lines:
        assert a.lines[i]['loss'] == pytest.approx(b.lines[i]['loss'], abs=loss), f'loss of iteration {i}'
        assert a.lines[i]['grad_norm'] == pytest.approx(b.lines[i]['grad_norm'], rel=grad_norm), f'norm of iteration {i}'
    for i in a.evals:
        for key in ('train_loss', 'val_loss'):
            assert a.evals[i][key] == pytest.approx(b.evals[i][key], abs=loss), f'{key} at iteration {i}'


VARIANTS = dict(
    base=[],
    other_evaluation=['--eval_interval=4', '--eval_iters=2', '--log_interval=5'],
    one_micro_batch=['--batch_size=12', '--gradient_accumulation_steps=1'],
    first_update=['--batch_size=12', '--gradient_accumulation_steps=1', '--max_iters=1', '--grad_clip=0.5'],
    dropout=['--dropout=0.1'],
    bfloat16=['--dtype=bfloat16'],
    float16=['--dtype=float16'],
    intervals=['--save_interval=5', '--keep_checkpoints=9', '--eval_interval=100', '--eval_iters=0', '--decay_lr=False'],
    no_checkpoints=['--keep_checkpoints=0', '--eval_iters=0', '--lr_schedule=linear'],
    # a learning rate that rises until the loss does: the best checkpoint is an early one
    diverging=['--learning_rate=0.6', '--warmup_iters=12', '--eval_interval=1', '--max_iters=8', '--keep_checkpoints=1'],
    only_improved=['--learning_rate=0.6', '--warmup_iters=12', '--eval_interval=1', '--max_iters=8', '--keep_checkpoints=9',
                   '--always_save_checkpoint=False'],
)


@pytest.fixture(scope='module')
def runs(train):
    """Runs by one process that several tests look at."""
    return dict(zip(VARIANTS, side_by_side(*(lambda a=arguments: train(*a) for arguments in VARIANTS.values()))))


# resuming

@pytest.mark.parametrize('nproc, init_from, optimizer', [(1, 'resume', 'adamw'), (2, 'auto', 'muon'), (3, 'resume', 'adamw')])
def test_resumed_run_equals_an_unbroken_one_to_the_last_bit(train, runs, nproc, init_from, optimizer):
    first = 'auto' if init_from == 'auto' else 'scratch'
    options = '--dropout=0.1', f'--optimizer={optimizer}'
    straight, part = side_by_side(lambda: train(*options, nproc=nproc),
                                  lambda: train(*options, '--max_iters=6', f'--init_from={first}', nproc=nproc))
    assert list(part.lines) == list(range(1, 7))
    resumed = train(*options, f'--init_from={init_from}', out_dir=part.out_dir, nproc=nproc)
    assert 'at iteration 6' in resumed.stdout and resumed.stdout.count('iter 7: loss') == 1
    assert 'iter 6: loss' not in resumed.stdout
    assert curve(resumed) == curve(straight) and list(straight.lines) == list(range(1, 13))
    assert resumed.evals == straight.evals
    base = runs['base']  # dropout: in training, also after an evaluation; not in evaluation
    assert straight.lines[1]['loss'] != pytest.approx(base.lines[1]['loss'], abs=1e-4)
    assert straight.evals[0] == pytest.approx(base.evals[0], abs=1e-5)
    assert same_weights(resumed, straight)
    assert {**state_of(resumed), 'config': 0} == {**state_of(straight), 'config': 0}
    if nproc == 1:
        with open(straight.out_dir / 'config.json') as file:
            assert json.load(file)['dropout'] == 0.1
        again = train(base=[straight.out_dir / 'config.json'])
        assert curve(again) == curve(straight) and again.evals == straight.evals


def test_float16_resumes_with_its_gradient_scaler(train, runs):
    part = train('--dtype=float16', '--max_iters=6')
    resumed = train('--dtype=float16', '--init_from=resume', out_dir=part.out_dir)
    assert curve(resumed) == curve(runs['float16']) and same_weights(resumed, runs['float16'])
    assert state_of(resumed)['scaler'] == state_of(runs['float16'])['scaler']
    assert state_of(resumed)['scaler']['_growth_tracker'] == 12


# layouts and batches

def test_two_processes_train_as_one(train, runs):
    two = train(nproc=2, launcher=run)
    assert_near(two, runs['base'])
    for line in ('iter 1: loss', 'step 6: train loss', 'tokens per iteration'):
        assert two.stdout.count(line) == 1, two.stdout


def test_three_processes_train_as_one_and_one_goes_on_from_their_checkpoint(train, runs):
    three = train('--max_iters=6', nproc=3)
    one = train('--init_from=resume', out_dir=three.out_dir)
    assert one.evals[6] == pytest.approx(three.evals[6], abs=1e-4)
    assert_near(one, runs['base'])


def test_a_batch_that_the_processes_do_not_divide(train):
    five = ['--batch_size=5', '--gradient_accumulation_steps=1', '--max_iters=6']
    one = train(*five)
    assert_near(train(*five, nproc=2), one)
    # evaluated on the same sequences, eval_iters * batch_size
    assert_near(train('--batch_size=1', '--gradient_accumulation_steps=5', '--eval_iters=20', '--max_iters=6', nproc=3), one)


def test_accumulated_micro_batches_equal_one_batch(runs):
    a, b = curve(runs['base']), curve(runs['one_micro_batch'])
    assert all(a[i] == pytest.approx(b[i], abs=1e-5) for i in range(1, 13))


def test_evaluation_leaves_training_alone_and_uses_the_same_set_each_time(train, runs, tmp_path):
    base, other = runs['base'], runs['other_evaluation']
    assert curve(other) == {i: curve(base)[i] for i in (5, 10)}
    assert list(other.evals) == [0, 4, 8, 12] and other.evals[12] != base.evals[12]
    out_dir = shutil.copytree(base.out_dir, tmp_path / 'copy')
    os.remove(out_dir / 'metrics.jsonl')
    files = sorted(out_dir.rglob('*'))
    again = train('--init_from=resume', '--eval_only', out_dir=out_dir)
    assert again.evals == {12: base.evals[12]} and not again.lines
    assert sorted(out_dir.rglob('*')) == sorted([*files, out_dir / 'metrics.jsonl'])  # no checkpoint


# what a run does and says

def test_metrics_and_console(runs):
    base = runs['base']
    assert list(base.lines) == list(range(1, 13)) and list(base.evals) == [0, 6, 12] and saved(base.out_dir) == [6, 12]
    for i, line in base.lines.items():
        assert list(line) == 'iter loss grad_norm lr dt_ms tokens_per_sec mfu mem_gb tokens'.split()
        assert line['tokens'] == i * 12 * 32 and line['tokens_per_sec'] == pytest.approx(384e3 / line['dt_ms'])
        assert line['mfu'] > 0 and line['mem_gb'] > 0
    assert all(list(line) == ['iter', 'train_loss', 'val_loss'] for line in base.evals.values())
    assert base.lines[12]['loss'] < base.lines[1]['loss'] - 0.5  # it learns
    val_loss = base.evals[6]['val_loss']
    assert re.search(rf'^step 6: train loss \d\.\d{{4}}, val loss {val_loss:.4f}$', base.stdout, re.M)
    console = re.findall(r'^iter (\d+): loss (\d+\.\d{4}), time \d+\.\d\dms, mfu \d+\.\d\d%', base.stdout, re.M)
    assert console == [(str(i), f'{line["loss"]:.4f}') for i, line in base.lines.items()]


def test_first_update_equals_plain_pytorch(runs, dataset):
    model = GPT(GPTConfig(**MODEL), seed=1337)
    loader = TokenLoader(str(dataset), 'train', 32, 65, read_meta(dataset), seed=1337)
    x, y = loader.batch(loader.train_starts(np.arange(12)))
    loss = torch.nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten())
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    matrices, vectors = ([p for p in model.parameters() if (p.dim() > 1) == wanted] for wanted in (True, False))
    torch.optim.AdamW([dict(params=matrices, weight_decay=0.1), dict(params=vectors, weight_decay=0.0)],
                      lr=1e-2 / 3, betas=(0.9, 0.95)).step()  # the first of two iterations of warm-up
    run = runs['first_update']
    assert run.lines[1]['loss'] == pytest.approx(loss.item(), abs=1e-6)
    assert run.lines[1]['grad_norm'] == pytest.approx(norm.item(), rel=1e-5) and norm > 0.5  # logged as it was before clipping
    assert run.lines[1]['lr'] == pytest.approx(1e-2 / 3) and saved(run.out_dir) == [1]
    weights = tensors(checkpoint.find(run.out_dir)[0])
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(weights[f'model.{name}'], parameter.data, atol=1e-6, rtol=0)


@pytest.mark.parametrize('dtype', ['bfloat16', 'float16'])
def test_16_bit_training_is_near_float32(runs, dtype):
    assert_near(runs[dtype], runs['base'], loss=0.02, grad_norm=0.05)
    assert curve(runs[dtype]) != curve(runs['base'])
    assert f'on cpu, {dtype},' in runs[dtype].stdout


def test_learning_rate_schedules(train, runs):
    wsd = train('--lr_schedule=wsd')
    lr = {name: [line['lr'] for line in run.lines.values()] for name, run in (*runs.items(), ('wsd', wsd))}
    warmup = [1e-2 / 3, 2e-2 / 3]
    assert lr['base'] == pytest.approx(warmup + [1e-3 + 9e-3 * (1 + np.cos(np.pi * i / 10)) / 2 for i in range(10)])
    assert lr['no_checkpoints'] == pytest.approx(warmup + [1e-2 - 9e-4 * i for i in range(10)])  # linear
    assert lr['wsd'] == pytest.approx(warmup + [1e-2] * 8 + [1e-3 + 9e-3 * (12 - i) / 2.4 for i in (10, 11)])
    assert lr['intervals'] == [1e-2] * 12  # decay_lr=False


def test_compiled_run_equals_an_eager_one_and_goes_on_without_a_compiler(train, runs, tmp_path):
    no_compiler = dict(CXX='/nonexistent', PATH=str(tmp_path), TORCHINDUCTOR_CACHE_DIR=str(tmp_path / 'cache'))
    compiled, fallback = side_by_side(lambda: train('--compile=True', '--dropout=0.1', '--max_iters=6', launcher=run),
                                      lambda: train('--compile=True', env=no_compiler, launcher=run))
    assert 'torch.compile does not work' not in compiled.stdout and 'compiling' in compiled.stdout
    eager = runs['dropout']  # whose random numbers are the same
    assert curve(compiled) != {i: curve(eager)[i] for i in range(1, 7)}  # it did compile: sums in another order
    compiled.lines |= {i: eager.lines[i] for i in range(7, 13)}
    compiled.evals |= {12: eager.evals[12]}
    assert_near(compiled, eager)
    two = train('--compile=True', env=no_compiler, nproc=2, launcher=run)
    for a_run in (fallback, two):
        assert a_run.stdout.count('torch.compile does not work here') == 1
        assert_near(a_run, runs['base'])


# checkpoints

def test_which_checkpoints_are_saved_and_kept(runs):
    assert saved(runs['intervals'].out_dir) == [5, 10, 12] and not runs['intervals'].evals
    assert saved(runs['no_checkpoints'].out_dir) == []
    val_loss = {i: line['val_loss'] for i, line in runs['diverging'].evals.items()}
    improved = [i for i in range(1, 9) if val_loss[i] < min(val_loss[j] for j in range(i))]
    best = improved[-1]
    assert 0 < best < 7  # else this run tests nothing
    assert runs['diverging'].stdout.count('saving ') == 8 and saved(runs['diverging'].out_dir) == [best, 8]
    assert runs['only_improved'].stdout.count('saving ') == len(improved) + 1
    assert saved(runs['only_improved'].out_dir) == [*improved, 8]


def test_resuming_does_not_forget_the_best(train, runs, tmp_path):
    before = runs['diverging']
    best = saved(before.out_dir)[0]
    after = train(*VARIANTS['diverging'], '--max_iters=10', '--init_from=resume',
                  out_dir=shutil.copytree(before.out_dir, tmp_path / 'copy'))
    assert saved(after.out_dir) == [best, 10]
    assert state_of(after)['best_val_loss'] == before.evals[best]['val_loss']


def test_a_run_from_scratch_moves_an_earlier_one_aside(train):
    first = train('--max_iters=2')
    second = train('--max_iters=3', '--seed=1', out_dir=first.out_dir)
    assert list(second.lines) == [1, 2, 3] and second.lines[1] != first.lines[1] and saved(first.out_dir) == [3]
    (earlier,) = first.out_dir.glob('earlier-*')
    assert read_metrics(earlier) == (first.lines, first.evals) and saved(earlier) == [2]
    with open(earlier / 'config.json') as file:
        assert json.load(file)['seed'] == 1337


def test_weights_of_another_run(train, runs, tmp_path):
    best = saved(runs['diverging'].out_dir)[0]
    new = train(f'--init_from={runs["diverging"].out_dir}', '--eval_only', out_dir=tmp_path / 'not' / 'there')
    assert list(new.evals) == [0] and new.evals[0]['val_loss'] == runs['diverging'].evals[best]['val_loss']


def test_gpt2_weights_from_a_hugging_face_folder(train, dataset, tmp_path):
    transformers = pytest.importorskip('transformers')
    torch.manual_seed(0)
    theirs = transformers.GPT2LMHeadModel(transformers.GPT2Config(
        vocab_size=65, n_positions=32, n_layer=2, n_head=4, n_embd=32, initializer_range=0.2)).eval()
    theirs.save_pretrained(tmp_path / 'hf')

    def their_loss(split, starts_of):
        loader = TokenLoader(str(dataset), split, 32, 65, read_meta(dataset), seed=1337)
        x, y = loader.batch(starts_of(loader))
        with torch.no_grad():
            return torch.nn.functional.cross_entropy(theirs(x).logits.flatten(0, 1), y.flatten()).item()

    evaluated, finetuned = side_by_side(
        lambda: train(f'--init_from={tmp_path}/hf', '--eval_only'),
        lambda: train(f'--init_from={tmp_path}/hf', '--max_iters=2'))
    assert evaluated.evals[0]['val_loss'] == pytest.approx(their_loss('val', lambda l: l.eval_starts(16)), abs=1e-4)
    assert saved(evaluated.out_dir) == [] and saved(finetuned.out_dir) == [2]
    first_batch = their_loss('train', lambda l: l.train_starts(np.arange(12)))
    assert finetuned.lines[1]['loss'] == pytest.approx(first_batch, abs=1e-4)
    assert finetuned.evals[0] == evaluated.evals[0] and finetuned.evals[2]['val_loss'] < finetuned.evals[0]['val_loss']


# stopping

def interrupt(dataset, out_dir, number, *arguments, again=0, nproc=1):
    """Launch a run without end, send it a signal once it has logged 3 more lines, and `again` times after; (exit code, stdout)."""
    path = out_dir / 'metrics.jsonl'
    lines = lambda: path.read_text().count('"loss"') if path.exists() else 0
    wanted = lines() + 3
    with launch('train.py', *TINY, '--dropout=0.1', '--max_iters=1000000', f'--dataset={dataset}', f'--out_dir={out_dir}',
                *arguments, nproc=nproc) as process:
        while lines() < wanted and process.poll() is None:
            time.sleep(0.02)
        process.send_signal(number)
        while again and process.poll() is None:  # Slurm signals every process, and torchrun then its workers once more
            time.sleep(0.002)
            process.send_signal(number)
            again -= 1
        stdout, stderr = process.communicate(timeout=120)
    assert 'iter ' in stdout and f'stopped by {number.name}' in stdout, stderr
    return process.returncode, stdout


def test_signals_save_and_the_run_goes_on_as_if_there_had_been_none(train, dataset, tmp_path):
    code, _ = interrupt(dataset, tmp_path, signal.SIGUSR1)
    assert code == 143
    stopped = saved(tmp_path)[-1]
    code, stdout = interrupt(dataset, tmp_path, signal.SIGINT, '--init_from=resume', again=200)
    assert code in (143, -2)  # Python, once it shuts down, dies of a signal
    assert f'iter {stopped + 1}: loss' in stdout and f'iter {stopped}: loss' not in stdout
    lines, evals = read_metrics(tmp_path)
    last = saved(tmp_path)[-1]
    assert list(lines) == list(range(1, last + 1)) and 0 < stopped < last
    unbroken = train('--dropout=0.1', f'--max_iters={last}')
    assert curve(unbroken) == {i: (line['loss'], line['grad_norm']) for i, line in lines.items()}
    assert evals.items() <= unbroken.evals.items()


def test_torchrun_stopped_by_sigterm_saves_and_goes_on(train, dataset, tmp_path):
    code, stdout = interrupt(dataset, tmp_path, signal.SIGTERM, nproc=2)
    assert code != 0 and stdout.count('stopped by SIGTERM') == 1
    last = saved(tmp_path)[-1] + 2
    resumed = train('--dropout=0.1', f'--max_iters={last}', '--init_from=resume', out_dir=tmp_path, nproc=2)
    unbroken = train('--dropout=0.1', f'--max_iters={last}', nproc=2)
    assert curve(resumed) == curve(unbroken) and len(curve(resumed)) == last


# logging elsewhere

def test_wandb_run_goes_on_under_its_id(train):
    pytest.importorskip('wandb')
    arguments = ['--wandb_log=True', '--wandb_project=p', '--wandb_run_name=r']
    options = dict(env=dict(WANDB_MODE='offline'), launcher=run)
    first = train(*arguments, '--max_iters=2', **options)
    second = train(*arguments, '--max_iters=4', '--init_from=resume', out_dir=first.out_dir, **options)
    folders = list((first.out_dir / 'wandb').glob('offline-run-*'))
    identity = state_of(second)['wandb_id']
    assert identity and len(folders) == 2 and all(folder.name.endswith(identity) for folder in folders)
    assert list(second.lines) == [1, 2, 3, 4]
