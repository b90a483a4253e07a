"""Make a dataset of your own files of text or of documents:

    python data/text/prepare.py --input='books/*.txt' --tokenizer=gpt2 --out=mybooks
    python data/text/prepare.py --input=documents --text_field=content --out=mydocuments
"""
import itertools
import os
import sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), '..', '..'))
from data.make.prepare import check_unused, text_splits, write_dataset
from data.make.readers import DOCUMENTS, file_versions, find_files, form_of, measure, read_texts
from data.tokens.tokenizer import CharTokenizer
from kilogpt.configurator import configure, exit_on_error
from kilogpt.devices.cpus import available_cpus
from kilogpt.weights.any_tokenizer import find_tokenizer

input = ''  # files, globs, folders of .txt, .md, .jsonl or .parquet, datasets on the hub (org/name); by commas
text_field = 'text'  # the field of .jsonl, or column of .parquet, that holds the text of a document
out = 'text'  # output folder: a name in data/, or a path; train.py's --dataset
overwrite = False  # replace the dataset in that folder even if it has other texts or another tokenizer
tokenizer = 'gpt2'  # 'char', 'bytes', an encoding of tiktoken, or that of a folder, run, GGUF file or org/name
val_fraction = 0.1  # share of val: the end of each file; 0 = no val
shard_tokens = 0  # tokens in a train shard; 0 = one train.bin, which a killed run starts again
num_proc = available_cpus()  # number of processes that tokenise
configure(globals())

if __name__ == '__main__':
    with exit_on_error():
        if not input:
            raise ValueError("no text files given: set --input, such as --input='books/*.txt'")
        if not 0 <= val_fraction < 1:
            raise ValueError(f'val_fraction is {val_fraction}, but must be at least 0 and below 1')
        encoder = None if tokenizer == 'char' else find_tokenizer(tokenizer)
        if encoder:
            check_unused(out, encoder, input, overwrite)
        paths = find_files(input)
        sizes = measure(paths, text_field)
        has_documents = len(sizes) > 1 or any(form_of(path) in DOCUMENTS for path in sizes)
        if not any(sizes.values()):
            field = f' in the field text_field={text_field!r}' if has_documents else ''
            raise ValueError(f'{input} has no text{field}')
        if tokenizer == 'char':
            texts = itertools.chain.from_iterable(read_texts(sizes, text_field))
            encoder = CharTokenizer.from_text(itertools.chain(texts, '\n' * has_documents))
        if has_documents and encoder.eot is None:
            print(f'{tokenizer} has no end-of-text token: each document ends with a line break')
        splits = text_splits(sizes, val_fraction, text_field, encoder.can_cut)
        source = [file_versions(paths), val_fraction, text_field]
        write_dataset(out, encoder, splits, shard_tokens, num_proc, source, input, overwrite)
