"""Train a tokenizer, a byte-level BPE, on your own text, and compare it with others on held-out text:

    python data/text/train_tokenizer.py --input='books/*.txt' --vocab_size=32768 --out=mytokenizer
    python data/text/prepare.py --input='books/*.txt' --tokenizer=mytokenizer --out=mybooks
"""
import os
import shutil
import sys
import tempfile

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), '..', '..'))
from data.make.prepare import text_splits
from data.make.readers import find_files, measure
from data.tokens.bpe import train_bpe
from data.tokens.json_tokenizer import JsonTokenizer
from data.tokens.tokenizer import get_tokenizer
from kilogpt.configurator import announced, configure, exit_on_error

input = ''  # files or globs, or folders with .txt, .md, .jsonl or .parquet files; separated by commas
text_field = 'text'  # the field of .jsonl, or column of .parquet, that holds the text of a document
out = ''  # a new folder for tokenizer.json; the key tokenizer of prepare.py
vocab_size = 32768  # tokens, with the 256 bytes and the special tokens
pattern = 'gpt4'  # how text is split into words: 'gpt2', 'gpt4', or a regular expression
special_tokens = '<|endoftext|>'  # separated by commas; '<|endoftext|>' ends documents
held_out = 0.05  # share of each file, at its end, for the comparison
configure(globals())
special_tokens = [token for token in special_tokens.split(',') if token]

OTHERS = 'gpt2', 'cl100k_base', 'o200k_base'


def check_keys():
    if not input or not out:
        raise ValueError("no text files or no folder given: set --input, such as --input='books/*.txt', and "
                         '--out')
    if os.path.exists(out):
        raise ValueError(f'out is {out!r}, which already exists: choose another folder')
    if not 0 < held_out < 1:
        raise ValueError(f'held_out is {held_out}, but must be above 0 and below 1')
    fewest = 256 + len(special_tokens)
    if vocab_size < fewest:
        raise ValueError(f'vocab_size is {vocab_size}, but the bytes and special tokens alone are {fewest}')


def check_written(tokenizer, folder, texts):
    """ValueError if the tokenizer loses a part of a text, or the file that was written gives it other ids."""
    written = JsonTokenizer(folder)
    for text in texts:
        if tokenizer.decode(tokenizer.encode(text)) != text:
            raise ValueError(f'pattern is {pattern!r}, which does not match every part of {text[:40]!r}...: what it '
                             r"does not match is lost, so let it end in |\s+|\S")
        if written.encode(text) != tokenizer.encode(text):
            raise ValueError(f'{folder} splits {text[:40]!r}... differently than the training did: the '
                             'libraries read the pattern differently, so choose another pattern')


def print_comparison(tokenizer, texts):
    """Print how many bytes of the texts a token has on average. More is better for the same vocab_size."""
    n_bytes = sum(len(text.encode()) for text in texts)

    def print_row(name, tokenizer):
        n_tokens = sum(len(tokenizer.encode(text)) for text in texts)
        print(f'  {name:<20} {n_bytes / max(n_tokens, 1):.3f}  ({tokenizer.vocab_size:,} tokens)')

    print(f'bytes per token, of {n_bytes:,} bytes that were not trained on:')
    print_row(out, tokenizer)
    for name in OTHERS:
        try:
            print_row(name, get_tokenizer({'tokenizer': name}))
        except OSError:
            print(f'  {name:<20} not available: its vocabulary could not be downloaded')


if __name__ == '__main__':
    with exit_on_error():
        check_keys()
        sizes = measure(find_files(input), text_field)
        splits = text_splits(sizes, held_out, text_field)
        with announced('training'):
            texts = (text for text, _ in splits['train'](0))
            tokenizer = train_bpe(texts, vocab_size, pattern, special_tokens)
        if tokenizer.vocab_size < vocab_size:
            print(f'warning: the text has words for only {tokenizer.vocab_size} tokens: use more text, or '
                  'set vocab_size lower')
        unseen = [text for text, _ in splits['val'](0)]
        with tempfile.TemporaryDirectory() as folder:  # what is refused leaves nothing behind
            tokenizer.save(folder, block_size=int(1e30))  # no limit, as transformers writes it
            check_written(tokenizer, folder, unseen)
            shutil.copytree(folder, out)
        print(f'wrote {os.path.join(out, JsonTokenizer.name)} with {tokenizer.vocab_size} tokens')
        print_comparison(tokenizer, unseen)
