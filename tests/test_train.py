"""Training as a user does it: run train.py, read metrics.jsonl, compare runs."""
import json
import re
import shutil
import signal
import socket
import time

import numpy as np
import pytest
import torch

from data.datasets import read_meta
from data.loader import TokenLoader
from kilogpt.run import checkpoint
from helpers import (FAULTS, TINY, assert_near, assert_same_tensors, curve, first_iterations, newest_state,
                     newest_tensors, read_lines, read_run, saved_iterations, start_script)
from model import GPT, GPTConfig

MODEL = dict(block_size=32, vocab_size=65, n_layer=2, n_head=4, n_embd=32, bias=False)  # TINY's

# The learning rate rises until the loss does, so that the best checkpoint is an early one.
DIVERGING = ['--learning_rate=0.6', '--warmup_iters=12', '--eval_interval=1', '--max_iters=8']
VARIANTS = dict(
    base=[],
    other_evaluation=['--eval_interval=4', '--eval_iters=2', '--log_interval=5'],
    one_micro_batch=['--batch_size=12', '--gradient_accumulation_steps=1'],
    still=['--learning_rate=0', '--min_lr=0'],
    first_update=['--batch_size=12', '--gradient_accumulation_steps=1', '--max_iters=1', '--grad_clip=0.5'],
    muon=['--optimizer=muon', '--max_iters=1'],
    less_momentum=['--optimizer=muon', '--max_iters=1', '--muon_momentum=0.5'],
    still_embedding=['--optimizer=muon', '--max_iters=1', '--lr_factors=embedding:0'],
    dropout=['--dropout=0.1'],
    bfloat16=['--dtype=bfloat16'],
    float16=['--dtype=float16'],
    wsd=['--lr_schedule=wsd', '--lr_decay_ratio=0.5'],
    intervals=['--save_interval=5', '--keep_checkpoints=9', '--eval_interval=100', '--eval_iters=0',
               '--decay_lr=False'],
    no_checkpoints=['--keep_checkpoints=0', '--eval_iters=0', '--lr_schedule=linear'],
    diverging=[*DIVERGING, '--keep_checkpoints=1'],
    only_improved=[*DIVERGING, '--keep_checkpoints=9', '--always_save_checkpoint=False'],
)


@pytest.fixture(scope='module')
def variants(train_all):
    """{name: run on one process} of VARIANTS, shared by several tests."""
    return train_all(VARIANTS)


# --- resuming -------------------------------------------------------------------------------------------

@pytest.mark.parametrize('nproc, first, then, optimizer', [
    pytest.param(1, 'scratch', 'resume', 'adamw', marks=pytest.mark.quick),
    (2, 'auto', 'auto', 'muon'),
    pytest.param(3, 'scratch', 'resume', 'adamw', marks=pytest.mark.slow)])
def test_resumed_run_equals_an_unbroken_one_to_the_last_bit(
        train, train_all, variants, nproc, first, then, optimizer):
    options = ['--dropout=0.1', f'--optimizer={optimizer}']
    first_six = [*options, '--max_iters=6', f'--init_from={first}']
    runs = train_all(dict(unbroken=options, part=first_six), nproc=nproc)
    unbroken, part = runs['unbroken'], runs['part']
    assert list(part.lines) == list(range(1, 7))
    resumed = train(*options, f'--init_from={then}', out_dir=part.out_dir, nproc=nproc)
    assert 'at iteration 6' in resumed.stdout and resumed.stdout.count('iter 7: loss') == 1
    assert 'iter 6: loss' not in resumed.stdout
    assert curve(resumed) == curve(unbroken) and list(unbroken.lines) == list(range(1, 13))
    assert resumed.evals == unbroken.evals
    assert_same_tensors(newest_tensors(resumed.out_dir), newest_tensors(unbroken.out_dir))
    state, expected_state = newest_state(resumed.out_dir), newest_state(unbroken.out_dir)
    del state['config'], expected_state['config']  # out_dir differs
    assert state == expected_state
    # Dropout is on in training, also after an evaluation, and off in evaluation.
    base = variants['base']
    assert unbroken.lines[1]['loss'] != pytest.approx(base.lines[1]['loss'], abs=1e-4)
    assert unbroken.evals[0] == pytest.approx(base.evals[0], abs=1e-5)


def test_config_json_repeats_the_run(train, variants):
    path = variants['dropout'].out_dir / 'config.json'
    assert json.loads(path.read_text())['dropout'] == 0.1
    repeated = train(base=[path])
    assert curve(repeated) == curve(variants['dropout']) and repeated.evals == variants['dropout'].evals


def test_float16_resumes_with_its_gradient_scaler(train, variants):
    part = train('--dtype=float16', '--max_iters=6')
    resumed = train('--dtype=float16', '--init_from=resume', out_dir=part.out_dir)
    unbroken = variants['float16']
    assert curve(resumed) == curve(unbroken)
    assert_same_tensors(newest_tensors(resumed.out_dir), newest_tensors(unbroken.out_dir))
    assert newest_state(resumed.out_dir)['scaler'] == newest_state(unbroken.out_dir)['scaler']
    assert newest_state(resumed.out_dir)['scaler']['_growth_tracker'] == 12


# --- layouts and batches --------------------------------------------------------------------------------

def test_two_processes_train_as_one_and_one_of_them_prints(train, variants):
    two = train(nproc=2)
    assert_near(two, variants['base'])
    for line in ('iter 1: loss', 'step 6: train loss', 'tokens per iteration'):
        assert two.stdout.count(line) == 1, two.stdout
    # A single process is not told about layouts.
    assert '  layout      pp 1 × dp 2 (1 × 2) × cp 1 × tp 1 = 2; zero_stage 0 (DDP)\n' in two.stdout
    alone = variants['base'].stdout
    assert 'tokens per iteration' in alone and [word for word in ('pp 1', 'rank') if word in alone] == []


@pytest.mark.slow
def test_three_processes_train_as_one_and_one_resumes_their_checkpoint(train, variants):
    three = train('--max_iters=6', nproc=3)
    one = train('--init_from=resume', out_dir=three.out_dir)
    assert one.evals[6] == pytest.approx(three.evals[6], abs=1e-4)
    assert_near(one, variants['base'])


@pytest.mark.slow
def test_batch_that_the_processes_do_not_divide_is_trained_on_completely(train):
    five = ['--batch_size=5', '--gradient_accumulation_steps=1', '--max_iters=6']
    one = train(*five)
    assert_near(train(*five, nproc=2), one)
    # evaluated on the same sequences, eval_iters * batch_size
    one_by_one = ['--batch_size=1', '--gradient_accumulation_steps=5', '--eval_iters=20', '--max_iters=6']
    assert_near(train(*one_by_one, nproc=3), one)


def test_another_batch_size_on_resume_neither_repeats_nor_skips_a_token(train, tmp_path):
    """An epoch of 20,000 tokens is 625 sequences of 32: 2 batches of 100, then 17 of 25."""
    def starts(name, iterations, *arguments, **options):
        run = train('--gradient_accumulation_steps=1', '--eval_iters=0', *arguments, **options,
                    faults=[FAULTS / 'record_starts.py'], env=dict(STARTS=str(tmp_path / name)))
        lines = (tmp_path / name).read_text().splitlines()  # includes a batch that was read ahead
        return run, sum((json.loads(line) for line in lines[:iterations]), [])

    first, former = starts('first', 2, '--batch_size=100', '--max_iters=2')
    resumed, later = starts('then', 17, '--batch_size=25', '--max_iters=19', '--init_from=resume',
                            out_dir=first.out_dir)
    found = sorted(former + later)
    assert found == list(range(found[0], found[0] + 625 * 32, 32))
    assert resumed.lines[19]['tokens'] == 625 * 32


@pytest.mark.quick
def test_accumulated_micro_batches_equal_one_batch(variants):
    accumulated, whole = curve(variants['base']), curve(variants['one_micro_batch'])
    assert list(accumulated) == list(whole) == list(range(1, 13))
    for i in whole:
        assert accumulated[i] == pytest.approx(whole[i], abs=1e-5)


@pytest.mark.quick
def test_evaluation_leaves_training_alone_and_uses_the_same_set_each_time(train, variants, tmp_path):
    base, other = variants['base'], variants['other_evaluation']
    assert curve(other) == {i: curve(base)[i] for i in (5, 10)}
    assert list(other.evals) == [0, 4, 8, 12] and other.evals[12] != base.evals[12]
    # A model that does not change has the same losses at any iteration.
    still = [line | dict(iter=None) for line in variants['still'].evals.values()]
    assert len(still) == 3 and still[0] == still[1] == still[2]
    # eval_only finds the same losses as the run, and does not save a checkpoint.
    out_dir = shutil.copytree(base.out_dir, tmp_path / 'copy')
    (out_dir / 'metrics.jsonl').unlink()
    files = sorted(out_dir.rglob('*'))
    evaluated = train('--init_from=resume', '--eval_only', out_dir=out_dir)
    assert evaluated.evals == {12: base.evals[12]} and not evaluated.lines
    assert sorted(out_dir.rglob('*')) == sorted([*files, out_dir / 'metrics.jsonl'])


# --- what a run does and says ---------------------------------------------------------------------------

@pytest.mark.quick
def test_metrics_and_console_show_every_iteration(variants):
    base = variants['base']
    assert list(base.lines) == list(range(1, 13)) and list(base.evals) == [0, 6, 12]
    assert saved_iterations(base.out_dir) == [6, 12]
    for i, line in base.lines.items():
        assert list(line) == ('iter loss grad_norm lr dt_ms tokens_per_sec mfu mem_gb tokens seconds '
                              'data_ms optimizer_ms').split()
        assert line['tokens'] == i * 12 * 32
        assert line['tokens_per_sec'] == pytest.approx(384e3 / line['dt_ms'])
        assert line['mfu'] is None and line['mem_gb'] > 0
    assert all(list(line) == ['iter', 'train_loss', 'val_loss', 'val_bpb'] for line in base.evals.values())
    assert base.lines[12]['loss'] < base.lines[1]['loss'] - 0.5  # it learns
    # The console shows the same numbers in nanoGPT's format.
    val_loss, val_bpb = base.evals[6]['val_loss'], base.evals[6]['val_bpb']
    assert re.search(rf'^step 6: train loss \d\.\d{{4}}, val loss {val_loss:.4f}, val bpb {val_bpb:.4f}$',
                     base.stdout, re.M)
    shape = r'^iter (\d+): loss (\d+\.\d{4}), time \d+\.\d\dms, [\d,]+ tok/s'
    expected = [(str(i), f'{line["loss"]:.4f}') for i, line in base.lines.items()]
    assert re.findall(shape, base.stdout, re.M) == expected


def test_first_update_equals_plain_pytorch(variants, dataset):
    # The update in plain PyTorch, on the same batch.
    model = GPT(GPTConfig(**MODEL), seed=1337)
    loader = TokenLoader(str(dataset), 'train', 32, 65, read_meta(dataset), seed=1337)
    x, y = map(torch.from_numpy, loader.train_batch(np.arange(12)))
    loss = torch.nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten())
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() == 1]
    groups = [dict(params=matrices, weight_decay=0.1), dict(params=vectors, weight_decay=0.0)]
    torch.optim.AdamW(groups, lr=1e-2 / 3, betas=(0.9, 0.95)).step()  # the first of two iterations of warm-up
    # The update of the run.
    run = variants['first_update']
    assert run.lines[1]['loss'] == pytest.approx(loss.item(), abs=1e-6)
    assert norm > 0.5
    assert run.lines[1]['grad_norm'] == pytest.approx(norm.item(), rel=1e-5)  # as it was before clipping
    assert run.lines[1]['lr'] == pytest.approx(1e-2 / 3) and saved_iterations(run.out_dir) == [1]
    weights = newest_tensors(run.out_dir)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(weights[f'model.{name}'], parameter.data, atol=1e-6, rtol=0)


def test_muon_takes_its_momentum_from_the_settings(variants):
    """After the first update a momentum is (1 - muon_momentum) times the gradient."""
    usual, less = (newest_tensors(variants[name].out_dir) for name in ('muon', 'less_momentum'))
    momenta = [name for name in usual if 'momentum' in name]
    assert momenta
    for name in momenta:
        torch.testing.assert_close(less[name] / 0.5, usual[name] / 0.05)


def test_lr_factors_leave_the_embedding_as_it_was(variants):
    usual, still = (newest_tensors(variants[name].out_dir) for name in ('muon', 'still_embedding'))
    for name, value in GPT(GPTConfig(**MODEL), seed=1337).named_parameters():  # the head is the embedding
        is_still = name in ('transformer.wte.weight', 'transformer.wpe.weight')
        assert torch.equal(still[f'model.{name}'], value) == is_still, name
        assert torch.equal(still[f'model.{name}'], usual[f'model.{name}']) != is_still, name


@pytest.mark.parametrize('dtype', ['bfloat16', 'float16'])
def test_16_bit_training_is_near_float32(variants, dtype):
    assert_near(variants[dtype], variants['base'], loss=0.02, grad_norm=0.05)
    assert curve(variants[dtype]) != curve(variants['base'])
    assert f'on cpu, {dtype},' in variants[dtype].stdout


@pytest.mark.quick
def test_learning_rate_follows_its_schedule(variants):
    warmup = [1e-2 / 3, 2e-2 / 3]
    expected = dict(
        base=warmup + [1e-3 + 9e-3 * (1 + np.cos(np.pi * i / 10)) / 2 for i in range(10)],
        no_checkpoints=warmup + [1e-2 - 9e-4 * i for i in range(10)],  # linear
        wsd=warmup + [1e-2] * 4 + [1e-3 + 9e-3 * (12 - i) / 6 for i in range(6, 12)],
        intervals=[1e-2] * 12)  # decay_lr=False
    for name, rates in expected.items():
        assert [line['lr'] for line in variants[name].lines.values()] == pytest.approx(rates), name


# --- compiling ------------------------------------------------------------------------------------------

@pytest.mark.slow  # a minute with an empty cache
def test_compiled_run_equals_an_eager_one(train, variants):
    compiled = train('--compile=True', '--dropout=0.1', '--max_iters=6', faults=[FAULTS / 'terminal.py'])
    eager = first_iterations(variants['dropout'], 6)  # its random numbers are the same
    assert 'torch.compile does not work' not in compiled.stdout
    # The terminal says what takes so long, and nothing stays there.
    for text in ('trying torch.compile', 'compiling the model'):
        assert text in compiled.stderr and text not in compiled.stdout
    assert compiled.stderr.endswith('\033[K')
    assert curve(compiled) != curve(eager)  # it did compile: sums in another order
    assert_near(compiled, eager)


@pytest.mark.slow
@pytest.mark.parametrize('nproc', [1, 2])
def test_run_without_a_compiler_says_so_and_trains_on(train, variants, tmp_path, nproc):
    env = dict(CXX='/nonexistent', PATH=str(tmp_path), TORCHINDUCTOR_CACHE_DIR=str(tmp_path / 'cache'))
    fallback = train('--compile=True', env=env, nproc=nproc)
    assert fallback.stdout.count('torch.compile does not work here') == 1
    assert_near(fallback, variants['base'])


# --- checkpoints ----------------------------------------------------------------------------------------

@pytest.mark.quick
def test_due_checkpoints_are_saved_and_the_best_is_kept(variants):
    assert saved_iterations(variants['intervals'].out_dir) == [5, 10, 12] and not variants['intervals'].evals
    assert saved_iterations(variants['no_checkpoints'].out_dir) == []
    # validation losses fall, then rise
    diverging, only_improved = variants['diverging'], variants['only_improved']
    val_loss = {i: line['val_loss'] for i, line in diverging.evals.items()}
    improved = [i for i in range(1, 9) if val_loss[i] < min(val_loss[j] for j in range(i))]
    best = improved[-1]
    assert 0 < best < 7  # else these runs test nothing
    assert diverging.stdout.count('checkpoint ') == 8 and saved_iterations(diverging.out_dir) == [best, 8]
    assert only_improved.stdout.count('checkpoint ') == len(improved) + 1
    assert saved_iterations(only_improved.out_dir) == [*improved, 8]


def test_resumed_run_keeps_the_best_checkpoint(train, variants, tmp_path):
    before = variants['diverging']
    best = saved_iterations(before.out_dir)[0]
    after = train(*VARIANTS['diverging'], '--max_iters=10', '--init_from=resume',
                  out_dir=shutil.copytree(before.out_dir, tmp_path / 'copy'))
    assert saved_iterations(after.out_dir) == [best, 10]
    assert newest_state(after.out_dir)['best_val_loss'] == before.evals[best]['val_loss']


@pytest.mark.quick
def test_run_from_scratch_moves_an_earlier_one_aside(train):
    first = train('--max_iters=2')
    second = train('--max_iters=3', '--seed=1', out_dir=first.out_dir)
    assert list(second.lines) == [1, 2, 3] and second.lines[1] != first.lines[1]
    assert saved_iterations(second.out_dir) == [3]
    (earlier,) = first.out_dir.glob('earlier-*')
    assert read_lines(earlier) == (first.lines, first.evals) and saved_iterations(earlier) == [2]
    assert json.loads((earlier / 'config.json').read_text())['seed'] == 1337


def test_weights_of_another_run_come_from_its_best_checkpoint(train, variants, tmp_path):
    diverging = variants['diverging']
    best = saved_iterations(diverging.out_dir)[0]
    new = train(f'--init_from={diverging.out_dir}', '--eval_only', out_dir=tmp_path / 'not' / 'there')
    assert list(new.evals) == [0] and new.evals[0]['val_loss'] == diverging.evals[best]['val_loss']
    latest = checkpoint.find(diverging.out_dir)[0]
    new = train(f'--init_from={latest}', '--eval_only')
    assert new.evals[0]['val_loss'] == diverging.evals[checkpoint.iteration_of(latest)]['val_loss']


def test_gpt2_weights_from_a_hugging_face_folder_are_finetuned(train_all, dataset, tmp_path):
    transformers = pytest.importorskip('transformers')
    torch.manual_seed(0)
    config = transformers.GPT2Config(vocab_size=65, n_positions=32, n_layer=2, n_head=4, n_embd=32,
                                     initializer_range=0.2)
    theirs = transformers.GPT2LMHeadModel(config).eval()
    theirs.save_pretrained(tmp_path / 'hf')

    def their_loss(split, starts_of):
        loader = TokenLoader(str(dataset), split, 32, 65, read_meta(dataset), seed=1337)
        x, y = map(torch.from_numpy, loader.batch(starts_of(loader)))
        with torch.no_grad():
            return torch.nn.functional.cross_entropy(theirs(x).logits.flatten(0, 1), y.flatten()).item()

    init = f'--init_from={tmp_path}/hf'
    runs = train_all(dict(evaluated=[init, '--eval_only'], finetuned=[init, '--max_iters=2']))
    evaluated, finetuned = runs['evaluated'], runs['finetuned']
    their_val_loss = their_loss('val', lambda loader: loader.eval_starts(16))
    assert evaluated.evals[0]['val_loss'] == pytest.approx(their_val_loss, abs=1e-4)
    assert saved_iterations(evaluated.out_dir) == [] and saved_iterations(finetuned.out_dir) == [2]
    their_first_batch = their_loss('train', lambda loader: loader.train_starts(np.arange(12)))
    assert finetuned.lines[1]['loss'] == pytest.approx(their_first_batch, abs=1e-4)
    assert finetuned.evals[0] == evaluated.evals[0]
    assert finetuned.evals[2]['val_loss'] < finetuned.evals[0]['val_loss']
    keys = json.loads((finetuned.out_dir / 'config.json').read_text())
    assert keys['bias'] is True and keys['mlp'] == 'gelu_tanh'
    assert f"the model is that of {tmp_path}/hf: bias=True (not False), mlp='gelu_tanh' (not 'gelu')" in (
        finetuned.stdout)


# --- stopping -------------------------------------------------------------------------------------------

def interrupt(dataset, out_dir, number, *arguments, repeats=0, nproc=1):
    """Signal an endless run once it has logged 3 more lines; returns (exit code, stdout).

    repeats: signals that follow the first, 2 ms apart: Slurm signals every process, and torchrun then its
    workers once more.
    """
    def logged():
        path = out_dir / 'metrics.jsonl'
        return path.read_text().count('"loss"') if path.exists() else 0

    wanted = logged() + 3
    options = [*TINY, '--dropout=0.1', '--max_iters=1000000', f'--dataset={dataset}', f'--out_dir={out_dir}']
    with start_script('train.py', *options, *arguments, nproc=nproc) as process:
        while logged() < wanted and process.poll() is None:
            time.sleep(0.02)
        process.send_signal(number)
        for _ in range(repeats):
            time.sleep(0.002)
            if process.poll() is None:
                process.send_signal(number)
        stdout, stderr = process.communicate(timeout=120)
    assert 'iter ' in stdout and f'stopped by {number.name}' in stdout, stderr
    return process.returncode, stdout


@pytest.mark.slow
def test_run_stopped_by_signals_saves_and_resumes_to_the_bit(train, dataset, tmp_path):
    code, _ = interrupt(dataset, tmp_path, signal.SIGUSR1)
    assert code == 143
    stopped = saved_iterations(tmp_path)[-1]
    code, stdout = interrupt(dataset, tmp_path, signal.SIGINT, '--init_from=resume', repeats=200)
    assert code in (143, -signal.SIGINT)  # Python dies of a signal once it shuts down
    assert f'iter {stopped + 1}: loss' in stdout and f'iter {stopped}: loss' not in stdout
    found, last = read_run(tmp_path), saved_iterations(tmp_path)[-1]
    assert list(found.lines) == list(range(1, last + 1)) and 0 < stopped < last
    unbroken = train('--dropout=0.1', f'--max_iters={last}')
    assert curve(found) == curve(unbroken)
    assert found.evals.items() <= unbroken.evals.items()


@pytest.mark.slow
def test_torchrun_stopped_by_sigterm_saves_and_resumes(train, dataset, tmp_path):
    """Processes of a torchrun: their curve is that of two forked processes, and one of them prints."""
    code, stdout = interrupt(dataset, tmp_path, signal.SIGTERM, nproc=2)
    assert code != 0 and stdout.count('stopped by SIGTERM') == stdout.count('iter 1: loss') == 1
    last = saved_iterations(tmp_path)[-1] + 2
    resumed = train('--dropout=0.1', f'--max_iters={last}', '--init_from=resume', out_dir=tmp_path, nproc=2)
    unbroken = train('--dropout=0.1', f'--max_iters={last}', nproc=2)
    assert curve(resumed) == curve(unbroken) and len(curve(resumed)) == last


# --- logging elsewhere ----------------------------------------------------------------------------------

@pytest.mark.slow
def test_resumed_run_continues_its_wandb_run(train):
    pytest.importorskip('wandb')
    arguments = ['--wandb_log=True', '--wandb_project=p', '--wandb_run_name=r']
    env = dict(WANDB_MODE='offline')
    first = train(*arguments, '--max_iters=2', env=env)
    second = train(*arguments, '--max_iters=4', '--init_from=resume', out_dir=first.out_dir, env=env)
    folders = list((first.out_dir / 'wandb').glob('offline-run-*'))
    identity = newest_state(second.out_dir)['wandb_id']
    assert identity and len(folders) == 2 and all(folder.name.endswith(identity) for folder in folders)
    assert list(second.lines) == [1, 2, 3, 4]


@pytest.mark.slow
@pytest.mark.parametrize('server', ['silent', 'refuses'])
def test_run_trains_without_the_server_of_wandb(train, server):
    pytest.importorskip('wandb')
    with socket.create_server(('127.0.0.1', 0)) as listener:  # accepts, but never answers
        address = f'http://127.0.0.1:{listener.getsockname()[1]}'
        if server == 'refuses':
            listener.close()
        run = train('--wandb_log=True', '--wandb_project=p', '--wandb_run_name=r', '--max_iters=2',
                    env=dict(WANDB_BASE_URL=address, WANDB_API_KEY='a' * 40, WANDB_INIT_TIMEOUT='3'))
    assert 'warning: Weights & Biases does not answer' in run.stderr and list(run.lines) == [1, 2]
    assert len(list((run.out_dir / 'wandb').glob('offline-run-*'))) == 1
