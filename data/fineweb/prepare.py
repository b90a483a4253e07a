"""Prepare FineWeb in GPT-2's tokens: by default 10 billion tokens of 2 bytes, 20 GB.

The subset 'default' is the whole dataset: 15 trillion tokens of fineweb (30 TB, and 44 TB to download) or 1.3
trillion tokens of fineweb-edu (2.6 TB, and about 4 TB to download).
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
out = 'fineweb'  # output folder: a name in data/, or a path
repository = 'HuggingFaceFW/fineweb'  # on the hub; or 'HuggingFaceFW/fineweb-edu', with the same subsets
subset = 'sample-10BT'  # or 'sample-100BT', 'sample-350BT', 'CC-MAIN-2024-10', ... or 'default' (all)
streaming = True  # tokenise during the download and keep no text; False = download first (30 GB)
val_documents = 10_000  # number of documents for val, taken from the beginning
overwrite = False  # replace the dataset in that folder even if it has other texts or another tokenizer
tokenizer = 'gpt2'  # 'bytes', an encoding of tiktoken, or that of a folder, run, GGUF file or org/name
shard_tokens = 100_000_000  # tokens in a train shard; 0 = one train.bin, which a killed run starts again
num_proc = available_cpus()  # number of processes that tokenise
configure(globals())

if __name__ == '__main__':
    with exit_on_error():
        encoder = find_tokenizer(tokenizer)
        origin = input or f'{repository}, {subset}'
        check_unused(out, encoder, origin, overwrite)
        paths = find_files(input) if input else []
        rows = load_rows(paths, repository, name=subset, streaming=streaming)
        count = val_documents if streaming else min(val_documents, len(rows))
        splits = {'val': row_split(rows.take(count)), 'train': row_split(rows.skip(count))}
        source = [file_versions(paths), repository, subset, val_documents]
        write_dataset(out, encoder, splits, shard_tokens, num_proc, source, origin, overwrite, 'val_documents')
