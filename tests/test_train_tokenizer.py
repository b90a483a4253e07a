"""train_tokenizer.py trains a byte-level BPE, the same each time, and says how good it is."""
import collections
import re

import pytest
import regex
from helpers import run_script

from data.tokens.bpe import PATTERNS, train_bpe
from data.tokens.json_tokenizer import JsonTokenizer

TEXT = "The cat's 1234 caps:\r\n  the cart, THE CARTS!\n\nÄrger im Café 🙂🙂\n" * 3


@pytest.mark.parametrize('pattern', PATTERNS)
def test_first_merge_joins_the_most_frequent_pair(pattern):
    """Later merges depend on which of several pairs of the same frequency comes first."""
    tokenizer = train_bpe(iter([TEXT]), 258, pattern, ['<|endoftext|>'])
    words = [word.encode() for word in regex.findall(PATTERNS[pattern], TEXT)]
    pairs = collections.Counter(pair for word in words for pair in zip(word, word[1:]))
    merged = tokenizer.decode_bytes([256])
    assert pairs[tuple(merged)] == max(pairs.values()) >= 2
    assert (tokenizer.vocab_size, tokenizer.eot) == (258, 257)


def test_training_is_deterministic_and_more_tokens_need_fewer():
    def encode(vocab_size):
        return train_bpe(iter([TEXT]), vocab_size, 'gpt4', ['<|endoftext|>']).encode(TEXT)

    assert encode(290) == encode(290)
    assert len(TEXT.encode()) > len(encode(270)) > len(encode(290)) > len(encode(310))


def test_command_writes_a_tokenizer_and_compares_it_on_held_out_text(tmp_path):
    (tmp_path / 'a.txt').write_text(TEXT * 20)
    command = ['data/text/train_tokenizer.py', f'--input={tmp_path}/a.txt', '--vocab_size=300']
    done = run_script(*command, f'--out={tmp_path}/mine', '--special_tokens=<|endoftext|>,<|user|>')
    tokenizer = JsonTokenizer(tmp_path / 'mine')
    assert (tokenizer.vocab_size, tokenizer.eot) == (300, 298)
    assert tokenizer.encode_prompt('<|user|>') == [299] and tokenizer.decode(tokenizer.encode(TEXT)) == TEXT
    held_out = (TEXT * 20).replace('\r\n', '\n')  # as it is read
    held_out = held_out[int(len(held_out) * 0.95):]
    ratio = len(held_out.encode()) / len(tokenizer.encode(held_out))
    found = re.search(r'/mine +([\d.]+)  \(300 tokens\)', done.stdout)
    assert float(found[1]) == pytest.approx(ratio, abs=0.001), done.stdout
    assert re.search(r'gpt2 +([\d.]+  \(50,257 tokens\)|not available)', done.stdout)
    again = run_script(*command, f'--out={tmp_path}/mine', check=False)
    assert f"error: out is '{tmp_path}/mine', which already exists: choose another folder\n" == again.stderr


def test_pattern_that_leaves_out_text_is_refused_and_leaves_no_folder(tmp_path):
    """tiktoken drops what the pattern does not match, and tokenizers keeps it."""
    (tmp_path / 'a.txt').write_text(TEXT * 20)
    command = ['data/text/train_tokenizer.py', f'--input={tmp_path}/a.txt', '--vocab_size=300', f'--out={tmp_path}/mine']
    refused = run_script(*command, r'--pattern=\w+', check=False)
    assert r"error: pattern is '\\w+', which does not match every part of" in refused.stderr
    assert not (tmp_path / 'mine').exists()
    run_script(*command, r'--pattern=\w+|\s+|\S')
    assert JsonTokenizer(tmp_path / 'mine').decode(JsonTokenizer(tmp_path / 'mine').encode(TEXT)) == TEXT


@pytest.mark.parametrize('arguments, message', [
    ([], 'no text files or no folder given: set --input'),
    (['--input=a', '--out=b', '--vocab_size=256'], 'vocab_size is 256, but the bytes and special'),
    (['--input=a', '--out=b', '--held_out=1.5'], 'held_out is 1.5, but must be above 0'),
    ([f'--input={__file__}', '--out=b', '--pattern=('], r"pattern is '\('.* not a regular expression"),
], ids=str)
def test_errors_are_one_sentence(arguments, message):
    done = run_script('data/text/train_tokenizer.py', *arguments, check=False)
    assert done.returncode == 1 and re.fullmatch(f'error: {message}.*\n', done.stderr), done.stderr
