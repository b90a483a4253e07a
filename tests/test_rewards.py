"""Learning from rewards: the loss against a slow reference and TRL's, texts as data, rewards of others' code, and runs."""
import numpy as np
import pytest
import torch

from kilogpt.layers.losses import use_loss
from kilogpt.layers.rewards import RewardLoss
from kilogpt.learn.loaders import TextLoader
from kilogpt.learn.rollouts import Text, set_advantages
from model import GPT, GPTConfig

V, T = 13, 12
KEYS = dict(loss='rl', rl_kl=0.0, rl_clip=0.2, rl_updates=1)
CONFIG = dict(block_size=T, batch_size=8, gradient_accumulation_steps=1, rl_updates=1)


def some_texts(seed=0, n_prompts=2, n_samples=4):
    rng, texts = np.random.default_rng(seed), []
    for _ in range(n_prompts):
        prompt = rng.integers(0, V, rng.integers(2, 5)).tolist()
        group = [Text(prompt, rng.integers(0, V, rng.integers(1, 6)).tolist(), False, float(rng.integers(0, 3)))
                 for _ in range(n_samples)]
        set_advantages(group, False)
        texts += group
    return texts


def batch_of(texts, config=CONFIG):
    loader = TextLoader(config, None)
    loader.texts = dict(enumerate(texts))
    numbers = np.arange(len(texts))
    return [torch.from_numpy(array) for array in loader.train_batch(numbers)], loader.count_targets(None, numbers)


def build(**keys):
    gpt = GPT(GPTConfig(block_size=T, vocab_size=V, n_layer=1, n_head=2, n_embd=16)).double()
    use_loss(gpt, KEYS | keys)
    return gpt


def slow_loss(gpt, texts, kl=0.0, clip=0.0):
    """The loss of one token after another, each from a forward pass of its own."""
    total = torch.zeros((), dtype=torch.float64)
    for number, text in enumerate(texts):
        for place, token in enumerate(text.ids):
            log_p = gpt(torch.tensor([text.prompt + text.ids[:place]]))[0, -1].log_softmax(dim=-1)[token]
            gain = text.advantage
            if kl:
                gain = gain - kl * (log_p.detach() - text.reference[place])
            if not clip:
                total = total - gain * (log_p - log_p.detach() + 1)  # of the value -gain
            else:
                ratio = torch.exp(log_p - text.old[place])
                total = total - torch.minimum(ratio * gain, ratio.clamp(1 - clip, 1 + clip) * gain)
    return total


def gradients(gpt, loss):
    return torch.autograd.grad(loss, list(gpt.parameters()))


@pytest.fixture(autouse=True)
def in_float64(monkeypatch):
    cast = torch.Tensor.float  # the model casts to float32 in places
    monkeypatch.setattr(torch.Tensor, 'float', lambda self: self if self.dtype == torch.float64 else cast(self))


@pytest.mark.parametrize('keys', [{}, dict(rl_kl=0.3), dict(rl_updates=2), dict(rl_updates=2, rl_kl=0.1)])
def test_loss_and_gradient_are_those_of_the_formulas(keys):
    """In float64, except that advantages and known log-probabilities are float32: hence 1e-6."""
    gpt, texts, rng = build(**keys), some_texts(), np.random.default_rng(1)
    for text in texts:
        text.reference = rng.normal(-2.5, 1, len(text.ids)).tolist()
        text.old = rng.normal(-2.5, 0.3, len(text.ids)).tolist()
    batch, n_targets = batch_of(texts)
    assert n_targets == sum(len(text.ids) for text in texts) == (batch[1] >= 0).sum()
    loss = gpt(*batch)
    expected = slow_loss(gpt, texts, keys.get('rl_kl', 0.0), 0.2 if 'rl_updates' in keys else 0.0)
    assert loss.item() == pytest.approx(expected.item(), abs=1e-6)
    for found, slow in zip(gradients(gpt, loss), gradients(gpt, expected)):
        torch.testing.assert_close(found, slow, rtol=1e-6, atol=1e-6)


def test_tokens_of_a_prompt_never_count():
    texts = some_texts()
    (x, y, _, advantages, known), _ = batch_of(texts)
    for row, text in enumerate(texts):
        places = torch.nonzero(y[row] >= 0)[:, 0].tolist()
        assert places == list(range(len(text.prompt) - 1, len(text.prompt) + len(text.ids) - 1))
        assert x[row, :len(text.prompt)].tolist() == text.prompt and y[row, places].tolist() == text.ids
        others = [place for place in range(T) if place not in places]
        assert not advantages[row, others].any() and not known[row, others].any()


def test_prompt_token_that_counts_would_be_seen():
    """A planted mistake: the last token of each prompt is a target too.

    By itself it gives no gradient, since the advantages of a group, whose texts have one prompt, add up to 0. It shows
    in the number of targets, and with a divergence from a reference.
    """
    gpt, texts = build(rl_kl=0.3), some_texts()
    for text in texts:
        text.reference = [-2.0] * len(text.ids)
    (x, y, starts, advantages, known), _ = batch_of(texts)
    for row, text in enumerate(texts):
        place = len(text.prompt) - 2
        y[row, place], advantages[row, place] = text.prompt[-1], text.advantage
    wrong, right = gpt(x, y, starts, advantages, known), slow_loss(gpt, texts, 0.3)
    assert any(not torch.allclose(found, slow, rtol=1e-3, atol=1e-5)
               for found, slow in zip(gradients(gpt, wrong), gradients(gpt, right)))


@pytest.mark.parametrize('is_scaled', [False, True])
@pytest.mark.parametrize('rewards', [[1.0] * 4, [0.0] * 4, [None] * 4, [2.0, None, None, None]])
def test_equal_rewards_give_no_gradient_and_no_nan(rewards, is_scaled):
    gpt, texts = build(), some_texts(n_prompts=1)
    for text, reward in zip(texts, rewards):
        text.reward, text.advantage = reward, 0.0
    set_advantages(texts, is_scaled)
    batch, _ = batch_of(texts)
    loss = gpt(*batch)
    assert loss.item() == 0 and all(not gradient.any() for gradient in gradients(gpt, loss))
