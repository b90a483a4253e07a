"""Make a dataset of many documents: filtered, without copies, shuffled, by many processes or machines.

    python data/corpus/prepare.py --input=documents --out=mycorpus
    python data/corpus/prepare.py --input='s3://bucket/crawl/*.jsonl.zst' --filter=data/corpus/keep.py --ray=auto --out=mycorpus

The same input gives the same files, whatever the number of processes, and after any interruption.
"""
import os
import sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), '..', '..'))
from data.make.corpus_job import prepare_corpus
from kilogpt.configurator import configure, exit_on_error
from kilogpt.devices.cpus import available_cpus
from kilogpt.weights.any_tokenizer import find_tokenizer

input = ''  # files, globs, folders, URLs, or datasets on the hub (org/name), as docs/data.md lists them; by commas
text_field = 'text'  # the field of .jsonl, or column of .parquet, that holds the text of a document
out = 'corpus'  # output folder: a name in data/, or a path; with Ray, all machines must share it
overwrite = False  # replace the dataset in that folder even if it has other texts or another tokenizer
tokenizer = 'gpt2'  # 'bytes', an encoding of tiktoken, or that of a folder, run, GGUF file or org/name
filter = ''  # a Python file whose keep(text) returns True or False, or the text to keep; '' = keep all
deduplicate = True  # leave out documents whose text has occurred before
shuffle = True  # put all documents into a random order, across files; False = the order of the files
val_fraction = 0.005  # share of documents for the validation split, chosen by their text; 0 = none
n_shards = 0  # train shards; 0 = one for each 256 MB of input files
seed = 1337  # determines the order of documents, and which are for validation
num_proc = available_cpus()  # processes on this machine; with Ray, tasks at a time, 0 = one for each processor
ray = ''  # '' = this machine; 'auto' = the Ray cluster that it belongs to; 'local', or HOST:PORT
configure(globals())

if __name__ == '__main__':
    with exit_on_error():
        prepare_corpus(input, text_field, out, find_tokenizer(tokenizer), filter, deduplicate, shuffle, val_fraction,
                       n_shards, seed, num_proc, ray, overwrite)
