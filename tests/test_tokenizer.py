"""Tokenizers convert to ids and back, and importing them is cheap."""
import subprocess
import sys

import pytest
from helpers import ROOT
from hypothesis import given, settings, strategies

import data.tokens.bpe
from data.tokens.tokenizer import CharTokenizer, get_tokenizer

pytestmark = pytest.mark.quick


@pytest.fixture(scope='session')
def gpt2(vocabulary):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv('TIKTOKEN_CACHE_DIR', vocabulary)
        yield get_tokenizer({'tokenizer': 'gpt2'})


@pytest.fixture(scope='session')
def gigatoken(gpt2):
    return get_tokenizer({'tokenizer': 'gpt2-gigatoken'})


@settings(max_examples=100, deadline=None)
@given(text=strategies.text(strategies.characters(exclude_categories=['Cs'])))
def test_tokenizers_round_trip(gpt2, text):
    char = CharTokenizer.from_text(text + 'x')
    for tokenizer in gpt2, char, get_tokenizer({'tokenizer': 'bytes'}), get_tokenizer(char.meta()):
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text
        assert b''.join(tokenizer.decode_bytes([i]) for i in ids).decode() == text  # as sample.py streams it
        assert all(0 <= i < tokenizer.vocab_size for i in ids)


def test_gpt2_is_gpt2(gpt2):
    assert gpt2.encode('Hello world') == [15496, 995]
    assert (gpt2.name, gpt2.vocab_size, gpt2.eot) == ('gpt2', 50257, 50256)
    assert gpt2.meta() == {'vocab_size': 50257, 'dtype': 'uint16', 'tokenizer': 'gpt2'}
    assert 50256 not in gpt2.encode('<|endoftext|>')  # ordinary text
    assert gpt2.encode_prompt('Hello<|endoftext|> world') == [15496, 50256, 995]
    pieces = [gpt2.decode_bytes([i]) for i in gpt2.encode('🙂')]
    assert len(pieces) > 1 and b''.join(pieces).decode() == '🙂'
    assert gpt2.decode(gpt2.encode('🙂')[:1]) == '\ufffd'


def test_char_and_byte_tokenizers():
    char = CharTokenizer.from_text('hello')
    assert char.meta() == {'vocab_size': 4, 'dtype': 'uint16', 'tokenizer': 'char', 'chars': 'ehlo'}
    assert char.encode('hello') == char.encode_prompt('hello') == [1, 0, 2, 2, 3] and char.eot is None
    from_list = get_tokenizer({'tokenizer': 'char', 'chars': ['e', 'h', 'l', 'o']})
    assert from_list.encode('hello') == [1, 0, 2, 2, 3]
    with pytest.raises(ValueError, match="'z' .* 4 "):
        char.encode('hz')
    assert get_tokenizer({'tokenizer': 'bytes'}).encode('é\ud800') == [0xC3, 0xA9, ord('?')]
    with pytest.raises(ValueError, match="'latin'.*'char', 'bytes'.*gpt2"):
        get_tokenizer({'tokenizer': 'latin'})
    with pytest.raises(ValueError, match="'char' needs its alphabet.*set tokenizer to a dataset"):
        get_tokenizer({'tokenizer': 'char'})


def test_importing_the_tokenizer_is_cheap():
    slow = 'tiktoken', 'gigatoken', 'numpy', 'torch'
    code = f'import sys, data.tokens.tokenizer; print([name for name in {slow} if name in sys.modules])'
    assert subprocess.check_output([sys.executable, '-c', code], cwd=ROOT, text=True) == '[]\n'


@settings(max_examples=200, deadline=None)
@given(text=strategies.text()
       | strategies.text(strategies.sampled_from("aZ1²Ⅷ .,'stlv\n\t\xa0_é日🙂\u0301\ud800")))
def test_arrays_hold_the_ids_of_lists(gpt2, gigatoken, text):
    for tokenizer in gpt2, gigatoken, get_tokenizer({'tokenizer': 'bytes'}):
        assert tokenizer.encode_to_numpy(text).tolist() == tokenizer.encode(text)


def test_gigatoken_encodes_a_dataset_of_gpt2(gpt2, gigatoken):
    assert gigatoken.meta() == gpt2.meta() and gigatoken.eot == gpt2.eot
    assert not gigatoken.gains_from_processes and gpt2.gains_from_processes


def test_cache_of_gigatoken_is_bounded(gigatoken, monkeypatch):
    monkeypatch.setattr(data.tokens.bpe, 'GIGATOKEN_BYTES', gigatoken.encoded_bytes + 5)
    for text, replaced in [('hélas', False), ('one', True), ('two', False)]:  # 6, 3 and 3 bytes
        former = gigatoken.gigatoken
        assert gigatoken.encode_to_numpy(text).tolist() == gigatoken.encode(text)
        assert (gigatoken.gigatoken is not former) == replaced


def test_missing_gigatoken_is_one_sentence(vocabulary, monkeypatch):
    monkeypatch.setenv('TIKTOKEN_CACHE_DIR', vocabulary)
    monkeypatch.setitem(sys.modules, 'gigatoken', None)
    with pytest.raises(ImportError, match="'gpt2-gigatoken' needs gigatoken: pip install gigatoken"):
        get_tokenizer({'tokenizer': 'gpt2-gigatoken'})
    assert get_tokenizer({'tokenizer': 'gpt2'}).encode_to_numpy('Hello world').tolist() == [15496, 995]
