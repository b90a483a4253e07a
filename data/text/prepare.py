"""Make a dataset of your own text files:

    python data/text/prepare.py --input='books/*.txt' --tokenizer=gpt2 --out=mybooks
"""
import itertools
import os
import sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), '..', '..'))
from kilogpt.configurator import configure, exit_on_error
from kilogpt.machines import available_cpus
from data.prepare import find_files, fingerprint, read_text, text_splits, write_dataset
from data.tokenizer import CharTokenizer, get_tokenizer

input = ''  # the text files: globs, separated by commas
out = 'text'  # output folder, in data/ or absolute; train.py's --dataset
tokenizer = 'gpt2'  # 'char', 'bytes' or an encoding of tiktoken; 'gpt2-gigatoken' is a faster gpt2
val_fraction = 0.1  # share of val: the end of each file
shard_tokens = 0  # tokens in a train shard; 0 = one train.bin, which a killed run starts again
num_proc = available_cpus()  # number of processes that tokenise
configure(globals())

if __name__ == '__main__':
    with exit_on_error():
        if not input:
            raise ValueError("no text files given: set --input, such as --input='books/*.txt'")
        paths = find_files(input)
        if tokenizer == 'char':
            encoder = CharTokenizer.from_text(itertools.chain.from_iterable(map(read_text, paths)))
        else:
            encoder = get_tokenizer({'tokenizer': tokenizer})
        splits = text_splits(paths, val_fraction)
        write_dataset(out, encoder, splits, shard_tokens, num_proc, [fingerprint(input), val_fraction])
