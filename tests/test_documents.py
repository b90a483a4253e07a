"""Documents in sequences: a row gives what its documents give one by one, in the model and in runs."""
import itertools
import json

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from data.datasets import Source
from data.documents import DocumentLoader, PackedLoader, arrange, separator_of
from data.splits import open_loader
from helpers import continue_texts
from kilogpt.generate.draw import draw_alike, uniform
from kilogpt.layers.attention import build_mask, first_seen, starts_of
from model import GPT, GPTConfig

SMALL = dict(vocab_size=61, n_layer=2, n_head=4, n_embd=32, block_size=64)
MODELS = dict(
    gpt2=dict(),
    modern=dict(pos='rope', norm='rmsnorm', mlp='swiglu', n_kv_head=2, qk_norm=True, tie_weights=False),
    window=dict(pos='rope', window=5, window_pattern='SL', rope_theta_window=100.0),
    learned_window=dict(window=3),
    capped=dict(pos='rope', attention_softcap=2.0, window=7, window_pattern='LS'),
    yarn=dict(pos='rope', rope_scaling='yarn factor=4 original_max_position_embeddings=16'),
    convolution=dict(pos='rope', qk_norm=True, attention_conv=4, mlp_conv=3),
    moe=dict(pos='rope', mlp='moe', n_experts=4, n_active_experts=2, expert_hidden=16),
)


@pytest.fixture(autouse=True)
def in_double(monkeypatch):
    """The model casts to float32 in places, which keeps a wider dtype here."""
    cast = torch.Tensor.float
    monkeypatch.setattr(torch.Tensor, 'float',
                        lambda self: self if self.dtype == torch.float64 else cast(self))


models = pytest.mark.parametrize('options', MODELS.values(), ids=MODELS)


def build(options, dtype=torch.float64, seed=0):
    """A model whose attention is far from uniform."""
    model = GPT(GPTConfig(**SMALL | options), seed=seed).to(dtype)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if 'convolution' in name:
                parameter.copy_(torch.linspace(-1, 1, parameter.numel()))
            elif parameter.dim() > 1:
                parameter.mul_(8)
    return model


def rows_of(lengths, T):
    """(B, T): the starts of documents of these lengths, one after the other in rows of T; the last is cut."""
    begins = np.cumsum([0, *lengths])
    count = -(-begins[-1] // T)
    starts = np.zeros((count, T), np.int64)
    for begin in begins[:-1]:
        starts[begin // T, begin % T:] = begin % T
    return torch.from_numpy(starts)


def pieces_of(starts):
    """[(row, begin, end)] of the documents in rows."""
    found = []
    for row, of_row in enumerate(starts.tolist()):
        begins = sorted(set(of_row))
        found += [(row, begin, end) for begin, end in zip(begins, [*begins[1:], len(of_row)])]
    return found


DRAWS = dict(random=None, one_token_each=[1] * 8 + [56], whole=[64, 64], first_of_one=[1, 63, 63, 1],
             rest=[40, 24, 60])


@models
@pytest.mark.parametrize('draw, dtype, tolerance', [
    *((draw, torch.float64, 1e-12) for draw in DRAWS), ('random', torch.float32, 1e-5)])
def test_a_row_gives_what_its_documents_give_alone(options, draw, dtype, tolerance):
    """Logits, the loss and each gradient, relative to the largest value.

    Some gradients are 0 up to rounding, as that of a key's bias: all are compared with the largest of any.
    """
    generator = torch.Generator().manual_seed(1)
    lengths = DRAWS[draw] or torch.randint(1, 30, (14,), generator=generator).tolist()
    starts = rows_of(lengths, 64)
    idx, targets = (torch.randint(61, starts.shape, generator=generator) for _ in range(2))
    # The expert of a token may change with the last bit of a router's logit in float32.
    if dtype == torch.float32 and options.get('mlp') == 'moe':
        pytest.skip('compared in float64 alone')
    packed, alone = build(options, dtype), build(options, dtype)
    logits = packed(idx, starts=starts)
    loss = packed(idx, targets, starts)
    loss.backward()
    expected, expected_loss = torch.empty_like(logits), 0
    for row, begin, end in pieces_of(starts):
        part = slice(row, row + 1), slice(begin, end)
        expected[part] = alone(idx[part])
        expected_loss = expected_loss + alone(idx[part], targets[part])
    expected_loss.backward()
    assert_near(logits, expected, tolerance)
    assert loss.item() == pytest.approx(expected_loss.item(), rel=tolerance)
    gradients = {name: p.grad for name, p in alone.named_parameters() if p.requires_grad}
    floor = 1e-2 * max(gradient.abs().max() for gradient in gradients.values())
    for name, expected in gradients.items():
        parameter = packed.get_parameter(name)
        size = max(expected.abs().max(), floor)
        assert (parameter.grad - expected).abs().max() <= tolerance * size, name


def assert_near(found, expected, tolerance):
    assert (found - expected).abs().max() <= tolerance * expected.abs().max()


@given(st.data())
@settings(deadline=None, max_examples=50)
def test_a_mask_has_what_the_definition_says(data):
    T = data.draw(st.integers(1, 20))
    window = data.draw(st.integers(0, 25))
    tokens = torch.tensor(data.draw(st.lists(st.lists(st.integers(0, 3), min_size=T, max_size=T), min_size=1,
                                             max_size=3)))
    starts = starts_of(tokens, 0) if data.draw(st.booleans()) else None
    first = first_seen(T, window, starts, tokens.device)
    seen = torch.ones(T, T, dtype=torch.bool).tril() if first is None else build_mask(first)
    seen = seen.expand(len(tokens), 1, T, T)
    for row, i, j in itertools.product(range(len(tokens)), range(T), range(T)):
        is_same_document = starts is None or not (tokens[row, j + 1:i + 1] == 0).any()
        is_seen = j <= i and is_same_document and (not window or i - j < window)
        assert seen[row, 0, i, j] == is_seen


@models
@torch.no_grad()
def test_cache_restarts_at_documents_and_holds_a_window(options):
    """Read in parts of any length, across separators."""
    model, generator = build(options), torch.Generator().manual_seed(2)
    idx = torch.randint(12, (3, 64), generator=generator)  # every twelfth token is 0
    starts = starts_of(idx, 0)
    expected = model(idx, starts=starts)
    for lengths in ([64], [1] * 64, [9, 1, 1, 20, 4, 1, 28], [63, 1]):
        cache, position = model.new_cache(3), 0
        for length in lengths:
            part = slice(None), slice(position, position + length)
            position += length
            logits = model(idx[part], starts=starts[part], cache=cache)
            assert_near(logits[:, 0], expected[:, position - 1], 1e-12)
    sizes = {config_window or 64 for config_window in map(model.config.window_of, range(2))}
    assert {layer[0].size(2) for layer in cache.layers.values()} == sizes


@models
@pytest.mark.parametrize('prompt', [1, 70])
@torch.no_grad()
def test_text_restarts_at_each_separator_that_is_drawn(options, prompt):
    """Before and past block_size, against a loop that reads the last document of the window anew."""
    model = build(options | dict(vocab_size=12))
    idx = torch.randint(12, (3, prompt), generator=torch.Generator().manual_seed(3))
    drawn = continue_texts(model, idx, 20, seed=4, separator=0, temperature=9.0)
    naive = idx
    for number in range(20):
        window = naive[:, -64:]
        logits = []
        for row in window:
            separators = (row == 0).nonzero().flatten().tolist()
            logits.append(model(row[None, separators[-1] if separators else 0:])[:, -1])
        places = [uniform((4, row), number) for row in range(3)]
        token = draw_alike(torch.cat(logits), places, 9.0, None, None)
        naive = torch.cat((naive, torch.tensor(token)[:, None]), dim=1)
    assert drawn.equal(naive)
    assert (drawn[:, prompt:] == 0).any()


# --- the loaders --------------------------------------------------------------------------------------------

def write(folder, tokens, separator=0, **meta):
    for split in ('train', 'val'):
        np.asarray(tokens, dtype='uint16').tofile(folder / f'{split}.bin')
    meta = dict(vocab_size=60_000, dtype='uint16', separator=separator) | meta
    (folder / 'meta.json').write_text(json.dumps(meta))
    return str(folder), meta


def documents(lengths, seed=0):
    """Tokens of documents of these lengths, each of which begins with 0 and has no other token twice."""
    tokens = 1 + np.arange(sum(lengths)) % 59_998
    tokens[np.cumsum([0, *lengths[:-1]])] = 0
    return tokens


@given(st.data())
@settings(deadline=None, max_examples=200)
def test_arranged_rows_have_each_token_once_and_are_full(data):
    block_size, n_rows = data.draw(st.integers(1, 30)), data.draw(st.integers(1, 12))
    size = n_rows * block_size
    separators = np.array(sorted(data.draw(st.sets(st.integers(0, size - 1), max_size=30))), dtype=np.int64)
    rows = arrange(separators, n_rows, block_size)
    assert len(rows) == n_rows
    seen = np.concatenate([np.arange(begin, begin + length) for row in rows for begin, length in row])
    assert sorted(seen.tolist()) == list(range(size))
    borders = sorted({0, *separators.tolist(), size})
    for row in rows:
        assert sum(length for _, length in row) == block_size
        for begin, length in row:  # within one document
            end = begin + length
            assert np.searchsorted(borders, begin, 'right') == np.searchsorted(borders, end, 'left')
    # Once a row does not begin with a document, no document is left.
    begins = [row[0][0] in set(separators.tolist()) for row in rows]
    if False in begins:
        late = [begin for row in rows[begins.index(False):] for begin, _ in row]
        assert not set(late) & set(separators.tolist())


def test_documents_that_fit_are_whole():
    """These fill four rows of 12 without a cut."""
    lengths = [6, 4, 4, 6, 4, 12, 5, 7]
    rows = arrange(np.cumsum([0, *lengths[:-1]]), 4, 12)
    assert sorted(length for row in rows for _, length in row) == sorted(lengths)


@pytest.mark.parametrize('block_size', [7, 16, 64])
def test_a_packed_epoch_has_each_token_once_and_rows_say_their_documents(tmp_path, block_size):
    lengths = np.random.default_rng(0).integers(1, 90, size=700).tolist()
    folder, meta = write(tmp_path, documents(lengths))
    loader = PackedLoader(folder, 'train', block_size, 60_000, meta, 5, 0)
    per_epoch, n = loader.n_groups * loader.n_rows, loader.n_tokens
    assert n - per_epoch * block_size < (loader.n_groups + 1) * block_size
    successor = dict(zip(loader.read(0, n).tolist(), loader.read(1, n).tolist()))
    for epoch in (0, 1):
        x, y, starts = loader.train_batch(epoch * per_epoch + np.arange(per_epoch))
        others = x[x != 0].tolist()
        assert len(others) == len(set(others))
        for token, target in zip(x.flatten().tolist(), y.flatten().tolist()):
            assert token == 0 or target == successor[token]
        # Within a document tokens follow one another; where one begins, it is a separator or the rest of one.
        follows = np.diff(starts, axis=1) == 0
        assert (y[:, :-1][follows] == x[:, 1:][follows]).all()
        assert (starts <= np.arange(block_size)).all() and (starts[x == 0] == np.nonzero(x == 0)[1]).all()
    first, second = (loader.train_batch(epoch * per_epoch + np.arange(20))[0] for epoch in (0, 1))
    assert not (first == second).all()


def test_packed_rows_are_a_pure_function_of_their_numbers(tmp_path):
    folder, meta = write(tmp_path, documents(np.random.default_rng(1).integers(1, 50, size=2000).tolist()))
    one, two = (PackedLoader(folder, 'train', 16, 60_000, meta, 5, 0) for _ in range(2))
    numbers = np.random.default_rng(2).permutation(5000)[:64]
    numbers[3] = -1
    rows = [one.train_batch(numbers[i:i + 1]) for i in range(64)]
    expected = [np.concatenate(arrays) for arrays in zip(*rows)]
    for found, array in zip(two.train_batch(numbers), expected):
        assert (found == array).all()
    assert (expected[1][3] == -1).all()
    positions = two.train_starts(numbers)
    assert positions[3] == -1
    for position, row in zip(np.delete(positions, 3), np.delete(expected[0], 3, axis=0)):
        assert two.read(int(position), 1)[0] == row[0]


def test_masked_rows_are_those_of_the_stream_and_say_where_documents_begin(tmp_path):
    lengths = np.random.default_rng(3).integers(1, 40, size=300).tolist()
    folder, meta = write(tmp_path, documents(lengths))
    def opened(documents, split='train'):
        return open_loader(Source(folder, meta), split, 60_000, dict(block_size=16, seed=5, documents=documents))

    stream, masked = opened('stream'), opened('mask')
    (x, y), (x2, y2, starts) = (loader.train_batch(np.arange(50)) for loader in (stream, masked))
    assert (x == x2).all() and (y == y2).all()
    assert starts.tolist() == starts_of(torch.from_numpy(x), 0).tolist()
    assert sum(masked.document_lengths()) == 256 * 16
    assert type(opened('pack', 'val')) is DocumentLoader


def test_separator_is_that_of_the_meta_or_of_its_tokenizer(tmp_path):
    assert separator_of('d', dict(vocab_size=50257, tokenizer='gpt2')) == 50256
    assert separator_of('d', dict(vocab_size=50257, tokenizer='gpt2', separator=3)) == 3
    char = dict(vocab_size=3, tokenizer='char', chars='abc')
    for meta in (char, dict(vocab_size=3), dict(vocab_size=3, separator=7)):
        with pytest.raises(ValueError, match='d does not say which token separates documents .*set documents to'):
            separator_of('d', meta)
