"""Distillation: the loss against a slow reference in float64, teachers beside the data and in memory, and runs."""
import pytest
import torch

from kilogpt.layers.distillation import DIVERGENCES, Distillation, teacher_numbers
from kilogpt.layers.losses import use_loss
from model import GPT, GPTConfig, Loss

V = 11
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
