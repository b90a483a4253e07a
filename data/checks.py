"""Cheap looks at token files when a run starts: what is odd about them, in one sentence each."""
import codecs
import os

import numpy as np

from data import storage
from data.flags import ids_of

# A split is judged by this many samples, spread evenly over it, of this many tokens each.
SAMPLES, SAMPLE_TOKENS = 64, 4096
# A split with fewer tokens is not judged.
FEWEST_TOKENS = 1024


def refuse_other_formats(path, head):
    """Raise ValueError if the first bytes of a token file, `head`, are those of another kind of file."""
    if head.startswith(b'\x93NUMPY'):
        raise ValueError(f'{path} is a .npy file, not bare token ids: write the array with its method '
                         'tofile, not with numpy.save')
    try:
        text = codecs.getincrementaldecoder('utf-8')().decode(head)  # the last character may be cut
    except UnicodeDecodeError:
        return
    if len(text) >= 64 and all(char.isprintable() or char.isspace() for char in text):
        raise ValueError(f'{path} is text that begins with {text[:20]!r}, not token ids: make these from '
                         'text with python data/text/prepare.py --input=FILES')


def find_oddities(folder, meta, loaders):
    """Return [sentence]: what makes a dataset unlike one that its owner wants to train on.

    loaders: the TokenLoaders of its splits, the training split first.
    ValueError if token ids have more bytes than are read, and there is no meta.json that names their dtype.
    """
    loaders = [loader for loader in loaders if loader.n_tokens >= FEWEST_TOKENS]
    samples = [_read_samples(loader, _sample_starts(loader)) for loader in loaders]
    for loader, tokens in zip(loaders, samples):
        factor = _width_factor(tokens)
        if factor > 1:
            sentence = _describe_width(loader.paths[0], meta['dtype'], factor)
            if not storage.exists(os.path.join(folder, 'meta.json')):
                raise ValueError(sentence)
            return [sentence]
    sentences = []
    for loader, tokens in zip(loaders, samples):
        sentences += _describe_repetition(loader, tokens)
    if sentences or not loaders:
        return sentences
    largest = max(int(tokens.max()) for tokens in samples)
    if meta['vocab_size'] > 4 * (largest + 1):
        sentences.append(
            f'vocab_size is {meta["vocab_size"]:,}, but the largest token seen in {folder} is {largest:,}: '
            f'set vocab_size and tokenizer in {os.path.join(folder, "meta.json")} (without this file they '
            "are GPT-2's), unless the model will need the other tokens")
    if len(loaders) == 2:
        sentences += _describe_overlap(folder, *loaders)
    return sentences


def _sample_starts(loader):
    """Stream positions at which the samples of a split begin, multiples of 4."""
    last = loader.n_tokens - min(loader.n_tokens, SAMPLE_TOKENS)
    return np.unique(np.linspace(0, last, SAMPLES).astype(np.int64) // 4 * 4)


def _read_samples(loader, starts):
    """Tokens (samples, tokens) of a split from each of the stream positions `starts` on."""
    length = min(loader.n_tokens, SAMPLE_TOKENS)
    return ids_of(np.stack(loader.read_many(starts, length)))


def _width_factor(tokens):
    """How many of the numbers that were read seem to be one token: 1, 2 or 4.

    The upper parts of an integer are zero, or small in a large vocabulary.
    """
    are_small = [bool((tokens[:, i::4] < 4).all()) for i in range(4)]
    return {(False, True, False, True): 2, (False, True, True, True): 4}.get(tuple(are_small), 1)


def _describe_width(path, dtype, factor):
    width = factor * np.dtype(dtype).itemsize
    advice = 'write them as uint16 or uint32'
    if width == 4:
        meta = os.path.join(os.path.dirname(path), 'meta.json')
        advice = f'write "dtype": "uint32" and the vocab_size into {meta}'
    return (f'{path} is read as {dtype}, but only one of {factor} numbers is above 3: '
            f'its tokens seem to have {width} bytes each: {advice}')


def _describe_repetition(loader, tokens):
    is_repeated = (tokens == tokens[:, :1]).all(axis=1)
    if not is_repeated.any():
        return []
    first = int(is_repeated.argmax())
    (path, position), = loader.where(_sample_starts(loader)[[first]])
    return [f'{path} has nothing but the token {tokens[first, 0]} in {is_repeated.sum()} of {len(tokens)} '
            f'samples, first from position {position:,} on: if its preparation or copy was interrupted, '
            'prepare it again']


def _describe_overlap(folder, train, val):
    starts = _sample_starts(val)
    tokens = _read_samples(val, starts)
    for place, offset in ('end', train.n_tokens - val.n_tokens), ('beginning', 0):
        if offset >= 0 and (_read_samples(train, starts + offset)[:, :tokens.shape[1]] == tokens).all():
            what = 'is the same as' if train.n_tokens == val.n_tokens else f'is also the {place} of'
            return [f'the val split of {folder} {what} the train split: its loss says nothing about new '
                    'text, so prepare the dataset again with a val split of its own']
    return []
