"""The loss in one kernel. It needs a GPU, or Triton's interpreter: TRITON_INTERPRET=1."""
import os

import pytest
import torch
from torch.nn import functional as F

from kilogpt.devices.cuda import is_cross_entropy
from model import GPTConfig, Loss

INTERPRETS = os.environ.get('TRITON_INTERPRET') == '1'
DEVICE = 'cpu' if INTERPRETS else 'cuda'


@pytest.mark.skipif(not torch.cuda.is_available() and not INTERPRETS,
                    reason='needs a GPU, or TRITON_INTERPRET=1')
@pytest.mark.parametrize('V, vocab_size, block', [
    (128, 65, 2 ** 15), (128, 65, 32), (1024, 1000, 256), (50304, 50257, 2 ** 15)])
def test_loss_and_gradients_are_those_of_cross_entropy(monkeypatch, V, vocab_size, block):
    """In float64 up to 1e-5. Targets of -1 are ignored, and gradients of padding are 0."""
    kernel = pytest.importorskip('kilogpt.devices.loss_kernel')
    monkeypatch.setattr(kernel, 'MAX_BLOCK', block)
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(rows, 16, generator=generator).to(DEVICE).requires_grad_() for rows in (9, V))
    targets = torch.randint(vocab_size, (9,), generator=generator)
    targets[::4] = -1
    loss = kernel.FusedLoss(None, vocab_size)(x, weight, targets.to(DEVICE))
    (0.5 * loss).backward()
    x64, weight64 = (tensor.detach().cpu().double().requires_grad_() for tensor in (x, weight))
    expected = F.cross_entropy((x64 @ weight64.T)[:, :vocab_size], targets, ignore_index=-1, reduction='sum')
    (0.5 * expected).backward()
    for actual, wanted in ((loss, expected), (x.grad, x64.grad), (weight.grad, weight64.grad)):
        torch.testing.assert_close(actual.detach().cpu().double(), wanted.detach(), atol=1e-5, rtol=1e-5)
    assert not weight.grad[vocab_size:].any()
    x.grad = None
    (0.5 * kernel.FusedLoss(None, vocab_size)(x, weight.detach(), targets.to(DEVICE))).backward()  # frozen
    torch.testing.assert_close(x.grad.cpu().double(), x64.grad, atol=1e-5, rtol=1e-5)


def loss_of(**keys):
    return Loss(GPTConfig(n_layer=1, n_head=2, n_embd=8, vocab_size=65, **keys))


@pytest.mark.quick
def test_only_the_unedited_loss_of_plain_logits_is_replaced():
    plain, smoothed = loss_of(), loss_of()
    smoothed.cross_entropy = lambda logits, targets, vocab_size: F.cross_entropy(
        logits[:, :vocab_size], targets, ignore_index=-1, reduction='sum', label_smoothing=0.1)
    assert is_cross_entropy(plain.of_hidden, plain.config)
    in_training = loss_of()
    in_training.cross_entropy = lambda logits, targets, vocab_size: (1 + torch.is_grad_enabled()) * F.cross_entropy(
        logits[:, :vocab_size], targets, ignore_index=-1, reduction='sum')
    for other in (smoothed, in_training, loss_of(softcap=30.0), loss_of(logit_scale=0.5)):
        assert not is_cross_entropy(other.of_hidden, other.config)
