"""Prepare OpenWebText in GPT-2's tokens: 9 billion tokens, 18 GB, and 54 GB of text in Hugging Face's cache.

The documents are split as in nanoGPT: train 9,035,582,198 tokens, val 4,434,897.
"""
import os
import sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), '..', '..'))
from data.make.prepare import check_unused, load_rows, row_split, write_dataset
from data.make.readers import file_versions, find_files
from kilogpt.configurator import configure, exit_on_error
from kilogpt.devices.cpus import available_cpus
from kilogpt.weights.any_tokenizer import find_tokenizer

input = ''  # .jsonl, .parquet or .txt files to use instead of the hub's; or a folder, or globs
out = 'openwebtext'  # output folder: a name in data/, or a path
revision = 'main'  # revision of the hub's repository; 'refs/convert/parquet' if it has "dataset scripts"
overwrite = False  # replace the dataset in that folder even if it has other texts or another tokenizer
tokenizer = 'gpt2'  # 'bytes', an encoding of tiktoken, or that of a folder, run, GGUF file or org/name
shard_tokens = 100_000_000  # tokens in a train shard; 0 = one train.bin, which a killed run starts again
num_proc = available_cpus()  # number of processes that download and tokenise
configure(globals())

if __name__ == '__main__':
    with exit_on_error():
        encoder = find_tokenizer(tokenizer)
        origin = input or 'OpenWebText'
        check_unused(out, encoder, origin, overwrite)
        paths = find_files(input) if input else []
        rows = load_rows(paths, 'Skylion007/openwebtext', revision=revision, num_proc=num_proc)
        rows = rows.train_test_split(test_size=0.0005, seed=2357, shuffle=True)
        splits = {'val': row_split(rows['test']), 'train': row_split(rows['train'])}
        write_dataset(out, encoder, splits, shard_tokens, num_proc, [file_versions(paths), revision],
                      origin, overwrite, share='')
