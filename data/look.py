"""What is in a dataset or a mixture: a page to read before a long run.

    python -m data.look shakespeare_char
    python -m data.look 'mybooks:0.7, mydocuments:0.3' --max_tokens=1e9 --samples=5

For each source and split: files, tokens, documents and their lengths, bytes of text per token, the documents
that occur most often, and random documents as text. Of a split with more than --max_tokens tokens (default
1e8), pieces from all over it are read, and documents that are cut at the ends of a piece are left out.
"""
import argparse
import collections
import hashlib
import os
import sys

import numpy as np

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), '..'))
from data.datasets import find_shards, find_sources
from data.documents import separator_of
from data.flags import REJECTED, begins_of, ids_of, pair_begins_of, targets_of
from data.loader import TokenLoader
from data.mixtures import parse_mixture
from data.names import prepared_datasets
from data.tokens.tokenizer import describe_tokenizer, get_tokenizer
from kilogpt.configurator import exit_on_error, expect_closed_pipe

PIECES = 64  # of a split that is not read as a whole
MOST_REPEATED = 10
WIDTH = 50  # characters of the longest bar
SHOWN = 400  # characters of a document
SAMPLED = 1000  # documents whose bytes are counted


def main():
    expect_closed_pipe()
    parser = argparse.ArgumentParser('python -m data.look', description=__doc__, allow_abbrev=False,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add('dataset', nargs='?', help='a dataset or a mixture, as in train.py (without: the names of those here)')
    add('--max_tokens', type=float, default=1e8, help='tokens to read of each split at most (1e8)')
    add('--samples', type=int, default=3, help='random documents to show of each split (3)')
    add('--seed', type=int, default=0, help='of the random documents (0)')
    options = parser.parse_args()
    if options.dataset is None:
        names = ', '.join(prepared_datasets()) or 'none is prepared: python data/shakespeare_char/prepare.py makes one'
        print(f'datasets in data/ and here: {names}')
        return
    with exit_on_error():
        if options.max_tokens < PIECES or options.samples < 0:
            raise ValueError(f'max_tokens is {options.max_tokens:g} and samples is {options.samples}: they '
                             f'must be at least {PIECES} and 0')
        mixture = parse_mixture(options.dataset)
        total = sum(mixture.values())
        for (name, source), weight in zip(find_sources(options.dataset).items(), mixture.values()):
            share = f', {float(weight / total):.2%} of the mixture' if len(mixture) > 1 else ''
            print(f'{name}: {source.folder}{share}\n  tokenizer {describe_tokenizer(source.meta)}, '
                  f'{source.meta["vocab_size"]:,} tokens')
            for split in ('train', 'val'):
                if find_shards(source.folder, split):
                    look(source, split, options)


def look(source, split, options):
    """Print what is in a split of a Source. options: those of the command."""
    loader = TokenLoader(source.folder, split, 1, source.meta['vocab_size'], source.meta, seed=0)
    print(f'\n  {split}: {loader.n_tokens:,} tokens in {len(loader.paths)} file(s)')
    pieces = read_pieces(loader, int(options.max_tokens))
    n_read = sum(map(len, pieces))
    if n_read < loader.n_tokens:
        print(f'    {n_read:,} of them are read, in {len(pieces)} pieces; what follows is about these')
    counts = sum(np.bincount(ids_of(piece), minlength=loader.vocab_size) for piece in pieces)
    print(f'    {(counts > 0).sum():,} different tokens')
    tokenizer = get_tokenizer(source.meta)
    try:
        separator = separator_of(*source)
    except ValueError:
        separator = None
    if loader.has_flags:
        n_targets = sum((targets_of(piece) >= 0).sum() for piece in pieces)
        print(f'    {n_targets / n_read:.1%} of the tokens are targets, the messages of: {source.meta.get("roles")}')
    is_pairs = source.meta.get('pairs', False)
    documents = [document for piece in pieces
                 for document in split_documents(piece, separator, loader.has_flags, is_pairs)]
    if is_pairs:
        print('    what follows is about pairs, of a chosen and a rejected document each')
    name = 'document'
    if documents:
        print_lengths(np.array([len(document) for document in documents]))
        print_repeated(documents, tokenizer)
    else:
        reason = f'the separator {separator} does not occur twice'
        print(f'    no documents: {"meta.json names no separator" if separator is None else reason}')
        name = 'piece'
        documents = [piece[begin:begin + SHOWN] for piece in pieces for begin in range(0, len(piece), SHOWN)]
    order = np.random.default_rng(options.seed).permutation(len(documents))
    if source.meta.get('tokenizer'):
        sample = [documents[i] for i in order[:SAMPLED]]
        n_bytes = sum(len(tokenizer.decode_bytes(ids_of(document).tolist())) for document in sample)
        print(f'    {n_bytes / sum(map(len, sample)):.3f} bytes per token, in {len(sample)} of the {name}s')
    for i in sorted(order[:options.samples].tolist()):
        print(f'    --- {name} {i}, {len(documents[i]):,} tokens\n{show(documents[i], tokenizer)}')


def read_pieces(loader, max_tokens):
    """Arrays of the tokens of a split: all in one, or pieces that begin at even distances."""
    if loader.n_tokens <= max_tokens:
        return [loader.read(0, loader.n_tokens)]
    length = max(1, max_tokens // PIECES)
    return loader.read_many(np.arange(PIECES) * loader.n_tokens // PIECES, length)


def split_documents(tokens, separator, has_flags=False, is_pairs=False):
    """The documents between two separators, without these, or between two flags (data.flags); or the pairs."""
    if has_flags:
        begins = pair_begins_of(tokens) if is_pairs else begins_of(tokens, None)
        places = np.append(np.flatnonzero(begins), len(tokens))
        return [tokens[begin:end] for begin, end in zip(places[:-1], places[1:])]
    places = np.flatnonzero(tokens == separator) if separator is not None else []
    return [tokens[begin + 1:end] for begin, end in zip(places[:-1], places[1:]) if end > begin + 1]


def print_lengths(lengths):
    """Print a table of lengths of documents, in powers of two, with bars."""
    quantiles = np.quantile(lengths, [0.1, 0.5, 0.9]).astype(int).tolist()
    print(f'    {len(lengths):,} documents of {lengths.mean():,.0f} tokens on average; 10%, 50% and 90% of '
          f'them have at most {quantiles[0]:,}, {quantiles[1]:,} and {quantiles[2]:,}, and the longest has '
          f'{lengths.max():,}')
    exponents = np.floor(np.log2(lengths)).astype(int)
    counts = np.bincount(exponents)
    for exponent, count in enumerate(counts):
        if counts[:exponent + 1].any():
            bar = '#' * round(WIDTH * count / counts.max())
            print(f'    {2 ** exponent:>9,} to {2 ** (exponent + 1) - 1:>9,} {count:>10,} {bar}')


def print_repeated(documents, tokenizer):
    """Print how many documents are copies of another, and those of which there are most."""
    copies = collections.Counter()
    first = {}
    for document in documents:
        key = hashlib.blake2b(document.tobytes(), digest_size=16).digest()
        copies[key] += 1
        first.setdefault(key, document)
    print(f'    {1 - len(copies) / len(documents):.2%} of the documents are copies of an earlier one')
    for key, count in copies.most_common(MOST_REPEATED):
        if count > 1:
            print(f'    {count:>9,} times: {shorten(first[key], tokenizer, 80)!r}')


def shorten(document, tokenizer, length=SHOWN):
    """The text of a document, up to `length` characters."""
    text = tokenizer.decode(ids_of(document[:length]).tolist())
    return text if len(text) <= length else f'{text[:length]}...'


def show(document, tokenizer):
    """The text of a document, of which the targets are green, or in brackets where nobody sees colours."""
    is_rejected = (document & REJECTED) > 0 if document.dtype.itemsize == 4 else np.zeros(len(document), bool)
    if is_rejected.any():
        return (f'    chosen:\n{show(document[~is_rejected], tokenizer)}\n'
                f'    rejected:\n{show(document[is_rejected] & ~REJECTED, tokenizer)}')
    is_target = targets_of(document) >= 0
    if is_target.all():
        return shorten(document, tokenizer)
    before, after = ('\033[32m', '\033[0m') if sys.stdout.isatty() else ('[', ']')
    ends = [*(np.flatnonzero(np.diff(is_target)) + 1).tolist(), len(document)]
    parts = [document[begin:end] for begin, end in zip([0, *ends], ends)]
    texts = [tokenizer.decode_bytes(ids_of(part).tolist()).decode(errors='replace') for part in parts]
    return ''.join(f'{before}{text}{after}' if targets_of(part)[0] >= 0 else text for part, text in zip(parts, texts))


if __name__ == '__main__':
    main()
