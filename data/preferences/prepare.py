"""Make a dataset of pairs of answers, of which one is preferred, to train a model on by DPO:

    python data/preferences/prepare.py --input='pairs/*.jsonl' --tokenizer=HuggingFaceTB/SmolLM2-135M-Instruct --out=mypairs

A line of a .jsonl file (or a row of a .parquet file) is a pair, in one of the forms that data/make/pairs.py lists, such as
{"prompt": "Name a colour.", "chosen": "Blue.", "rejected": "Monday."}.
"""
import os
import sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), '..', '..'))
from data.make.messages import conversation_splits
from data.make.pairs import PairEncoder, read_pairs
from data.make.prepare import check_unused, write_dataset
from data.make.readers import file_versions, find_files
from kilogpt.configurator import configure, exit_on_error
from kilogpt.devices.cpus import available_cpus
from kilogpt.weights.any_tokenizer import find_tokenizer

input = ''  # files, globs, folders of .jsonl or .parquet files, datasets on the hub (org/name); by commas
out = 'preferences'  # output folder: a name in data/, or a path; train.py's --dataset
overwrite = False  # replace the dataset in that folder even if it has other texts or another tokenizer
tokenizer = 'gpt2'  # that of the model to train: its folder, run or org/name, whose chat template is used
val_fraction = 0.1  # share of val: pairs drawn by their prompt, so that a prompt is in one split
num_proc = available_cpus()  # number of processes that tokenise
configure(globals())

if __name__ == '__main__':
    with exit_on_error():
        if not input:
            raise ValueError("no pairs given: set --input, such as --input='pairs/*.jsonl'")
        if not 0 <= val_fraction < 1:
            raise ValueError(f'val_fraction is {val_fraction}, but must be at least 0 and below 1')
        encoder = PairEncoder(find_tokenizer(tokenizer), 'assistant')
        check_unused(out, encoder, input, overwrite)
        paths = find_files(input)
        splits = conversation_splits(paths, val_fraction, read_pairs)
        write_dataset(out, encoder, splits, num_proc=num_proc, source=[file_versions(paths), val_fraction],
                      origin=input, overwrite=overwrite)
