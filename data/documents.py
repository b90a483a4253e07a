"""Documents in token files: where they begin, and rows in which most of them are whole.

A document begins with its separator, the tokenizer's end-of-text token, no matter whether prepare.py wrote it
at the end of the text before, as here and in nanoGPT, or at the beginning of a text, as in llm.c's shards. So
each text is predicted from its first token on, and its end too, and every token of a row is a target.
"""
import bisect
import functools
import math
import os

import numpy as np

from data.flags import begins_of, ids_of, targets_of
from data.loader import TokenLoader, shuffled
from data.tokens.tokenizer import get_tokenizer

GROUP = 128  # sequences whose documents are arranged anew
BLOCK = 64  # groups whose rows are shuffled together
SAMPLE = 256  # sequences in which documents are measured


def separator_of(folder, meta):
    """The token with which the documents of a dataset begin; ValueError if it is not known.

    meta: the content of the dataset's meta.json, with `separator`, or with a tokenizer that has one. If it has
    `flags`, documents begin where data.flags says, and the result is None.
    """
    if meta.get('flags'):
        return None
    separator = meta.get('separator')
    if separator is None and meta.get('tokenizer'):
        separator = get_tokenizer(meta).eot
    if type(separator) is not int or not 0 <= separator < meta['vocab_size']:
        raise ValueError(f'{folder} does not say which token separates documents (separator: {separator!r}, '
                         f'tokenizer: {meta.get("tokenizer")!r}): prepare it with a tokenizer that has an '
                         'end-of-text token, write the id of that token into its meta.json as '
                         '"separator", or set documents to stream')
    return separator


def document_starts(tokens, separator):
    """At which position of its row the document of each token begins. tokens (B, T): as in the file."""
    begins = np.where(begins_of(tokens, separator), np.arange(tokens.shape[1]), 0)
    return np.maximum.accumulate(begins, axis=1)


class DocumentLoader(TokenLoader):
    """A TokenLoader whose batches have a third array: at which position of its row a token's document begins.

    Of a document that begins before its row, the row has the rest, which begins at 0.
    """

    def __init__(self, *arguments):
        *arguments, self.separator = arguments
        super().__init__(*arguments)

    def more_arrays(self, tokens):
        return (document_starts(tokens, self.separator),)

    def begins_in(self, tokens):
        """Which of an array of tokens documents begin with."""
        return begins_of(tokens, self.separator)

    @functools.cached_property
    def sample(self):
        """(lengths of the documents in a sample of training sequences, share of documents that are whole).

        The share is None if no document begins in the sample.
        """
        inputs, following, starts = self.train_tokens(np.arange(SAMPLE))
        begins = np.flatnonzero(starts == np.arange(self.block_size))  # in the sequences, joined
        ends = np.append(begins[1:], starts.size)
        has_begin = self.begins_in(inputs.ravel()[begins])
        has_end = self.begins_in(following.ravel()[ends - 1])
        whole = (has_begin & has_end).sum() / has_begin.sum() if has_begin.any() else None
        return (ends - begins).tolist(), whole

    def document_lengths(self):
        return self.sample[0]

    def describe(self):
        lengths, whole = self.sample
        lines = super().describe()
        if whole is None:
            return [*lines, f'documents   none begins in {SAMPLE} training sequences: is {self.separator} the token that '
                    'separates them? (write it into meta.json as "separator")']
        return [*lines, f'documents   {np.mean(lengths):,.0f} tokens each within a sequence, {whole:.1%} of them whole; '
                'none cropped, none padded']


class PackedLoader(DocumentLoader):
    """A DocumentLoader whose training sequences begin with documents and have them whole if they fit.

    The stream is cut into groups of about GROUP sequences, and the documents of a group are arranged in as
    many rows (`arrange`). So an epoch has each token once, as in a TokenLoader: none is cropped, and no row
    is padded. Rows are shuffled within the BLOCK groups of a block, and groups among all.
    """
    packs_rows = True

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.n_groups = max(1, self.per_epoch // GROUP)
        self.n_rows = self.per_epoch // self.n_groups  # of each group
        self.per_epoch = self.n_groups * self.n_rows
        self._order = functools.lru_cache(2)(self._order)
        self._group = functools.lru_cache(2 * BLOCK)(self._group)

    def train_batch(self, sequences):
        inputs, following, starts = self.train_tokens(sequences)
        x, y = ids_of(inputs).astype(np.int64), targets_of(following)
        y[sequences < 0] = -1
        return x, y, starts

    def train_tokens(self, sequences):
        shape = len(sequences), self.block_size
        inputs, following = np.zeros(shape, self.dtype), np.zeros(shape, self.dtype)
        starts = np.zeros(shape, np.int64)
        for row in np.flatnonzero(sequences >= 0):
            _, tokens, pieces = self._row(int(sequences[row]))
            places = np.concatenate([np.arange(begin, begin + length) for begin, length in pieces])
            inputs[row], following[row] = tokens[places], tokens[places + 1]
            lengths = [length for _, length in pieces]
            starts[row] = np.repeat(np.cumsum([0, *lengths[:-1]]), lengths)
        self._check(np.maximum(ids_of(inputs), ids_of(following)), os.path.dirname(self.paths[0]))
        return inputs, following, starts

    def train_starts(self, sequences):
        """Stream positions at which the first documents of training sequences begin; -1 stays -1."""
        starts = np.full(len(sequences), -1, dtype=np.int64)
        for row in np.flatnonzero(sequences >= 0):
            begin, _, pieces = self._row(int(sequences[row]))
            starts[row] = begin + pieces[0][0]
        return starts

    def _row(self, sequence):
        """(stream position of the group, its tokens, pieces (begin, length) of them) of a training sequence."""
        epoch, group, row = self._locate_row(sequence)
        tokens, rows = self._group(epoch, group)
        return self._begin(epoch, group), tokens, rows[row]

    def _locate_row(self, sequence):
        """(epoch, group, row of the group) of a training sequence."""
        epoch, place = divmod(sequence, self.per_epoch)
        block, place = divmod(place, BLOCK * self.n_rows)
        groups, places = self._order(epoch, block)
        group, row = divmod(int(places[place]), self.n_rows)
        return epoch, int(groups[group]), row

    def _order(self, epoch, block):
        """(groups of a block, places of its rows in the order in which they are read)."""
        groups = np.arange(block * BLOCK, min((block + 1) * BLOCK, self.n_groups))
        n_rows = len(groups) * self.n_rows
        return (shuffled(groups, self.n_groups, [self.seed, epoch]),
                shuffled(np.arange(n_rows), n_rows, [self.seed, epoch, block]))

    def _begin(self, epoch, group):
        return self.rotation(epoch) + group * self.n_rows * self.block_size

    def _group(self, epoch, group):
        """(the tokens of a group and the one that follows, its rows)."""
        size = self.n_rows * self.block_size
        tokens = self.read(self._begin(epoch, group), size + 1)
        return tokens, arrange(np.flatnonzero(self.begins_in(tokens[:size])), self.n_rows, self.block_size)


def arrange(separators, n_rows, block_size):
    """Arrange n_rows * block_size tokens in rows of block_size: for each row, its pieces (begin, length).

    A row begins with a document while there are any, the longest. Then comes the longest piece that fits
    (best fit, as in nanochat's loader, which crops where nothing fits). Where nothing fits, a piece is cut:
    one that does not begin with a document, if there is one. Longer ones than a row are cut into rows first.
    separators: positions of the tokens with which documents begin, in order.
    """
    documents, rests = [], []  # (length, begin) of pieces that begin with a document, and of others
    begins = [0, *separators.tolist()]
    for number, (begin, end) in enumerate(zip(begins, [*begins[1:], n_rows * block_size])):
        pieces = documents if number else rests
        while begin < end:
            length = min(block_size, end - begin)
            pieces.append((length, begin))
            begin, pieces = begin + length, rests
    documents.sort()
    rests.sort()
    rows = []
    for _ in range(n_rows):
        row, gap = [], block_size
        while gap:
            kinds = [documents] if documents and not row else [documents, rests]
            length, begin = _take_longest(kinds, gap) or _cut(rests or documents, gap, rests)
            row.append((begin, length))
            gap -= length
        rows.append(row)
    return rows


def _take_longest(kinds, most):
    """Remove and return the longest (length, begin) of sorted lists with length <= most; None if none is."""
    found = [(bisect.bisect_right(pieces, (most, math.inf)) - 1, pieces) for pieces in kinds]
    found = [(pieces[i], i, pieces) for i, pieces in found if i >= 0]
    if not found:
        return None
    piece, i, pieces = max(found)
    del pieces[i]
    return piece


def _cut(pieces, length, rests):
    """Remove the longest of sorted pieces, which is longer than `length`; its rest goes to rests."""
    whole, begin = pieces.pop()
    bisect.insort(rests, (whole - length, begin + length))
    return length, begin
