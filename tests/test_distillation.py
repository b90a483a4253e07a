"""Distillation: the loss against a slow reference in float64, teachers beside the data and in memory, and runs."""
import json
import shutil
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from data.datasets import NUMBERS, TEACHER_FILE, find_sources, fingerprint
from data.splits import open_loader
from helpers import curve, run_forked
import kilogpt
from kilogpt.layers.distillation import Distillation, teacher_numbers
from kilogpt.layers.losses import use_loss
from kilogpt.learn.loaders import StoredTeacher, TaughtLoader
from kilogpt.prove import data
from model import GPT, GPTConfig, Loss

V = 11
DIVERGENCES = ('forward', 'reverse', 'js')
LOSS = Loss(GPTConfig(vocab_size=V))
KEYS = dict(loss='distill', distill_divergence='forward', distill_temperature=1.0, distill_share=0.5)


def slow_loss(logits, teacher, labels, divergence, top_k, temperature, share):
    """The loss of one token after another, from probabilities."""
    total = torch.zeros((), dtype=torch.float64)
    for z, t, label in zip(logits, teacher, labels):
        if label < 0:
            continue
        p, q = (torch.exp(x / temperature) / torch.exp(x / temperature).sum() for x in (t, z))
        likeliest = sorted(range(V), key=lambda i: -float(t[i]))
        buckets = [[i] for i in likeliest[:top_k]] + ([likeliest[top_k:]] if top_k < V else [])
        p, q = (torch.stack([x[bucket].sum() for bucket in buckets]) for x in (p, q))
        mean = (p + q) / 2
        found = dict(forward=(p * (p / q).log()).sum(), reverse=(q * (q / p).log()).sum(),
                     js=(p * (p / mean).log() + q * (q / mean).log()).sum() / 2)[divergence]
        total += share * temperature ** 2 * found - (1 - share) * torch.log(torch.exp(z[label]) / torch.exp(z).sum())
    return total


def random_targets(generator, n, top_k, temperature):
    """(teacher's logits (n, V), labels of which one is ignored, targets as Distillation takes them)."""
    teacher = 3 * torch.randn(n, V, generator=generator, dtype=torch.float64)
    labels = torch.randint(V, (n,), generator=generator)
    labels[1] = -1
    return teacher, labels, torch.cat((labels[:, None].int(), teacher_numbers(teacher, top_k, temperature)), dim=1)


@pytest.mark.parametrize('divergence', DIVERGENCES)
@pytest.mark.parametrize('top_k, temperature, share', [(3, 1.0, 0.5), (V, 2.0, 1.0), (1, 0.7, 0.9), (V, 1.0, 0.3)])
def test_loss_and_gradient_are_those_of_the_formulas(divergence, top_k, temperature, share):
    """In float64, except that the teacher's log-probabilities are float32: hence 1e-6. With k = V it is the full one."""
    generator = torch.Generator().manual_seed(top_k)
    teacher, labels, targets = random_targets(generator, 6, top_k, temperature)
    logits = torch.randn(6, 16, generator=generator, dtype=torch.float64).requires_grad_()  # five are padding
    loss = Distillation(LOSS, divergence, temperature, share)(logits, targets, V)
    gradient, = torch.autograd.grad(loss, logits)
    expected = slow_loss(logits[:, :V], teacher, labels, divergence, top_k, temperature, share)
    slow_gradient, = torch.autograd.grad(expected, logits)
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(gradient, slow_gradient, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize('divergence', DIVERGENCES)
@pytest.mark.parametrize('top_k', [4, V])
def test_student_that_is_its_teacher_has_no_gradient(divergence, top_k):
    teacher, _, targets = random_targets(torch.Generator().manual_seed(0), 6, top_k, 1.5)
    logits = teacher.clone().requires_grad_()
    loss = Distillation(LOSS, divergence, 1.5, 1.0)(logits, targets, V)
    gradient, = torch.autograd.grad(loss, logits)
    assert abs(loss.item()) < 1e-5 and gradient.abs().max() < 1e-6  # the teacher's float32


def test_model_takes_targets_with_a_teacher_in_parts_too(monkeypatch):
    import model as model_module
    gpt = GPT(GPTConfig(block_size=8, vocab_size=V, n_layer=1, n_head=2, n_embd=16))
    use_loss(gpt, KEYS)
    generator = torch.Generator().manual_seed(0)
    _, _, targets = random_targets(generator, 16, 3, 1.0)
    x, y, losses = torch.randint(V, (2, 8), generator=generator), targets.view(2, 8, -1), []
    for limit in (2 ** 28, 64 * 4):
        monkeypatch.setattr(model_module, 'MAX_LOGITS', limit)
        gpt.zero_grad()
        loss = gpt(x, y)
        loss.backward()
        losses.append((loss.item(), gpt.lm_head.weight.grad.clone()))
    assert losses[0][0] == pytest.approx(losses[1][0], rel=1e-5)
    torch.testing.assert_close(losses[0][1], losses[1][1], rtol=1e-4, atol=1e-6)
    assert gpt(x, y[..., 0].long()).item() == pytest.approx(torch.nn.functional.cross_entropy(
        gpt(x).flatten(0, 1), y[..., 0].long().flatten(), ignore_index=-1, reduction='sum').item(), rel=1e-5)


# --- teachers and runs ------------------------------------------------------------------------------------

TOP_K = 5


def teach(teacher, folder, *arguments, **options):
    return run_forked('kilogpt.evaluate', teacher, f'--teach={folder}', f'--top_k={TOP_K}', '--device=cpu',
                      '--dtype=float32', *arguments, **options)


@pytest.fixture(scope='module')
def taught(train, dataset, tmp_path_factory):
    """(the folder of a trained run, that of a dataset with its numbers)."""
    base = train('--eval_iters=0').out_dir
    folder = shutil.copytree(dataset, tmp_path_factory.mktemp('taught') / 'data')
    teach(base, folder)
    return base, folder


def read_numbers(folder):
    """(ids, log-probabilities with those of all others last) of each token."""
    values = np.fromfile(folder / NUMBERS, '<i4').reshape(-1, 2 * TOP_K + 1)
    return values[:, :TOP_K], values[:, TOP_K:].view('<f4')


def test_numbers_are_what_the_teacher_gives_a_window(taught):
    base, folder = taught
    tokens = torch.from_numpy(np.fromfile(folder / 'train.bin', '<u2').astype(np.int64))
    ids, log_p = read_numbers(folder)
    assert len(ids) == len(tokens)
    np.testing.assert_allclose(np.exp(log_p).sum(axis=1), 1, rtol=1e-5)
    logits = kilogpt.load(str(base), device='cpu').model(torch.stack([tokens[:32], tokens[96:128]]))
    for row, places in ((0, slice(0, 32)), (1, slice(112, 128))):  # of the second window, the second half
        expected = logits[row, -(places.stop - places.start):].log_softmax(dim=-1).detach()
        found = expected.gather(1, torch.from_numpy(ids[places].astype(np.int64)))
        torch.testing.assert_close(found, torch.from_numpy(log_p[places, :TOP_K].copy()), rtol=0, atol=1e-5)
        torch.testing.assert_close(found, expected.topk(TOP_K).values, rtol=0, atol=1e-5)


@pytest.mark.parametrize('nproc, arguments', [
    (2, '--cp=2'), *(pytest.param(*case, marks=pytest.mark.slow) for case in (
        (3, '--zero_stage=3'), (2, '--pp=2'), (4, '--tp=2')))])
def test_numbers_are_the_same_in_every_layout(taught, dataset, tmp_path, nproc, arguments):
    base, folder = taught
    copy = shutil.copytree(dataset, tmp_path / 'data')
    teach(base, copy, *arguments.split(), nproc=nproc)
    assert (copy / TEACHER_FILE).read_text() == (folder / TEACHER_FILE).read_text()
    (ids, log_p), (expected_ids, expected) = read_numbers(copy), read_numbers(folder)
    np.testing.assert_allclose(log_p, expected, rtol=0, atol=1e-4)
    assert (ids != expected_ids).mean() < 1e-3  # tokens that are equally likely, but for rounding


def test_command_that_was_interrupted_continues_unless_its_arguments_are_others(taught, dataset, tmp_path):
    base, folder = taught
    copy, numbers = shutil.copytree(dataset, tmp_path / 'data'), (folder / NUMBERS).read_bytes()
    facts = json.dumps(json.loads((folder / TEACHER_FILE).read_text()))
    for content, expected in ((facts, b'\1' * 4), (facts.replace('1.0', '2.0'), numbers[:4])):
        # A first number that no teacher gives shows whether the windows before are kept.
        (copy / 'train.teacher.partial').write_bytes(b'\1' * 4 + numbers[4:4 * (2 * TOP_K + 1) * 16 * 1000 + 7])
        (copy / 'train.teacher.partial.json').write_text(content)
        teach(base, copy)
        found = (copy / NUMBERS).read_bytes()
        assert found[:4] == expected and len(found) == len(numbers)
        assert not list(copy.glob('*.partial*'))


@pytest.mark.parametrize('documents', ['stream', 'pack'])
def test_batches_have_the_numbers_of_their_tokens(documents, tmp_path):
    """The teacher here says of each token its place in the stream."""
    folder = data.write_text(str(tmp_path / 'text'))
    source = find_sources(folder)[folder]
    loader = open_loader(source, 'train', data.VOCABULARY, dict(documents=documents, block_size=16, seed=1))
    numbers = np.zeros((loader.n_tokens, 2 * TOP_K + 1), '<i4')
    numbers[:, 0] = np.arange(loader.n_tokens)
    numbers.tofile(f'{folder}/{NUMBERS}')
    facts = dict(source='', digest='', top_k=TOP_K, temperature=1.0, shards=fingerprint({'': source}))
    with open(f'{folder}/{TEACHER_FILE}', 'w') as file:
        json.dump(facts, file)
    config = dict(dataset=folder, distill_top_k=TOP_K, distill_temperature=1.0)
    run = SimpleNamespace(config=config, data=SimpleNamespace(train=loader, sources={'': source}),
                          processes=SimpleNamespace(say=print))
    sequences = np.array([3, -1, loader.per_epoch + 5, 70])
    x, y, *_ = TaughtLoader(loader, StoredTeacher(run).numbers).train_batch(sequences)
    tokens = np.fromfile(f'{folder}/train.bin', '<u2')
    for row in (0, 2, 3):
        np.testing.assert_array_equal(tokens[y[row, :, 1]], x[row])
        np.testing.assert_array_equal(tokens[(y[row, :, 1] + 1) % len(tokens)], y[row, :, 0])
    assert (y[1, :, 0] == -1).all()


@pytest.mark.parametrize('teacher', ['beside the data', 'in memory'])
def test_student_learns_and_resumes_to_the_bit(train, taught, teacher):
    base, folder = taught
    arguments = [f'--dataset={folder}', '--loss=distill', f'--distill_top_k={TOP_K}', '--n_layer=1', '--distill_share=1.0']
    if teacher == 'in memory':
        arguments += [f'--teacher={base}', '--distill_divergence=js', '--distill_temperature=2.0']
    whole = train(*arguments)
    assert whole.evals[12]['val_loss'] < whole.evals[0]['val_loss'] - 0.3 and 'the teacher is' in whole.stdout
    part = train(*arguments, '--max_iters=6')
    rest = train(*arguments, '--init_from=resume', out_dir=part.out_dir)
    assert curve(rest) == curve(whole)


def test_teacher_that_does_not_fit_is_refused_in_a_sentence(train, taught, dataset, tmp_path):
    base, folder = taught
    other = shutil.copytree(dataset, tmp_path / 'other')
    meta = json.loads((other / 'meta.json').read_text())
    (other / 'meta.json').write_text(json.dumps(meta | dict(chars=meta['chars'][::-1])))
    cases = [
        ([f'--dataset={dataset}'], f'has no {TEACHER_FILE}: run python -m kilogpt.evaluate TEACHER --teach={dataset}'),
        ([f'--dataset={folder}', '--distill_top_k=6'], 'has top_k=5 and temperature=1.0, but distill_top_k is 6'),
        ([f'--dataset={other}', f'--teacher={base}'], 'a teacher needs the tokenizer of its student'),
        ([f'--dataset={folder}', f'--teacher={base}', '--block_size=64'], 'set block_size to that of the teacher or less'),
        ([f'--dataset={folder}', '--distill_share=2'], 'distill_share is 2.0: it must be from 0 to 1')]
    for arguments, sentence in cases:
        run = train('--loss=distill', f'--distill_top_k={TOP_K}', *arguments, check=False)
        assert run.returncode == 1 and sentence in run.stderr and 'Traceback' not in run.stderr, run.stderr
    refused = teach(base, other, check=False)
    assert refused.returncode == 1 and 'a teacher needs the tokenizer of its student' in refused.stderr
    changed = shutil.copytree(folder, tmp_path / 'changed')
    tokens = np.fromfile(changed / 'train.bin', '<u2')
    tokens[::2].tofile(changed / 'train.bin')
    run = train('--loss=distill', f'--distill_top_k={TOP_K}', f'--dataset={changed}', check=False)
    assert 'have changed since its teacher read them' in run.stderr
