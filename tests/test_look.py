"""python -m data.look: what it prints of datasets whose content is known."""
import json
import re

import numpy as np
import pytest
from helpers import ROOT, run_forked, run_script

from data.flags import REJECTED, flag_document
from data.look import show
from data.tokens.tokenizer import get_tokenizer

META = dict(vocab_size=256, dtype='uint16', tokenizer='bytes', separator=0)


def write(folder, texts, **meta):
    folder.mkdir()
    tokens = np.frombuffer(''.join(f'\0{text}' for text in texts).encode() + b'\0', np.uint8)
    tokens.astype('<u2').tofile(folder / 'train.bin')
    (folder / 'meta.json').write_text(json.dumps(META | meta))
    return folder


def look(*arguments, **options):
    return run_forked('data.look', *arguments, **options).stdout


def test_names_of_prepared_datasets_are_listed_and_suggested(tmp_path):
    here = dict(cwd=tmp_path, env=dict(PYTHONPATH=ROOT))
    write(tmp_path / 'mybooks', ['one'])
    (tmp_path / 'nothing').mkdir()
    title, _, names = run_script('data.look', **here).stdout.partition(': ')
    names = names.strip().split(', ')
    assert title == 'datasets in data/ and here' and 'mybooks' in names and 'nothing' not in names
    done = run_script('data.look', 'mybook', check=False, **here)
    assert done.returncode == 1 and done.stderr.rstrip().endswith('. Or did you mean mybooks?')


def test_command_works_as_a_script_too():
    assert run_script('data/look.py').stdout.startswith('datasets in data/ and here: ')


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
    texts = [f'{number:03} {"x" * number}' for number in range(1, 101)] + ['twice'] * 2 + ['again'] * 9
    return write(tmp_path_factory.mktemp('look') / 'texts', texts)


def test_lengths_copies_and_bytes_are_those_of_the_documents(folder):
    page = look(folder, '--samples=2')
    n_tokens = sum(number + 4 + 1 for number in range(1, 101)) + 11 * 6 + 1
    assert f'train: {n_tokens:,} tokens in 1 file(s)' in page and 'val:' not in page
    assert '111 documents of 50 tokens on average' in page and 'the longest has 104' in page
    rows = re.findall(r'^ +(\d+) to +\d+ +(\d+) ', page, re.MULTILINE)
    assert {int(low): int(count) for low, count in rows} == {4: 3 + 11, 8: 8, 16: 16, 32: 32, 64: 41}
    assert f'{9 / 111:.2%} of the documents are copies' in page
    assert "9 times: 'again'" in page and "2 times: 'twice'" in page
    assert '1.000 bytes per token' in page
    assert page.count('--- document ') == 2
    assert look(folder, '--samples=2') == page != look(folder, '--samples=2', '--seed=1')


def test_large_splits_are_read_in_pieces_and_mixtures_have_shares(folder, tmp_path):
    other = write(tmp_path / 'other', ['one', 'two'], separator=None)
    page = look(f'{folder}:3, {other}:1', '--max_tokens=640')
    assert '640 of them are read, in 64 pieces' in page
    assert '75.00% of the mixture' in page and '25.00% of the mixture' in page
    assert 'no documents: meta.json names no separator' in page
    assert 'of the pieces' in page and '--- piece 0' in page


def test_answers_are_green_on_a_terminal_and_in_brackets_elsewhere(monkeypatch):
    tokenizer = get_tokenizer(META)
    document = flag_document(list(b'ask answer.'), [False] * 4 + [True] * 7)
    assert show(document, tokenizer) == 'ask [answer.]'
    monkeypatch.setattr('sys.stdout.isatty', lambda: True)
    assert show(document, tokenizer) == 'ask \033[32manswer.\033[0m'
    assert show(document | REJECTED, tokenizer).endswith('rejected:\nask \033[32manswer.\033[0m')


def test_bad_options_are_one_sentence(folder):
    done = run_forked('data.look', folder, '--max_tokens=1', check=False)
    assert done.returncode == 1 and done.stderr.startswith('error: max_tokens is 1 and')
