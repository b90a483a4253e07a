"""The log-probabilities that a model gives the tokens of pairs of answers: the reference of DPO, beside a dataset."""
import json
import pathlib
import time

import numpy as np
from tqdm import tqdm

from data.datasets import (
    REFERENCE, REFERENCE_FILE, Source, find_dataset, find_shards, fingerprint, join_tokenizers, read_meta)
from data.storage import write_atomically
from data.flags import begins_of, ids_of, targets_of
from data.loader import TokenLoader
from data.storage import is_url
from kilogpt.evaluate.batches import Request
from kilogpt.weights.importing import describe_weights

TOKENS_AT_A_TIME = 2 ** 16  # of the documents that are scored together


def write_reference(scorer, opened, dataset):
    """Write the log-probabilities of the targets in a dataset of pairs, and reference.json, into its folder.

    scorer: a Scorer of the model. opened: the OpenModel. All processes call this. ValueError if the dataset does
    not have pairs, or if it has another tokenizer than the model.
    """
    folder, processes = find_dataset(dataset), opened.parallel.processes
    meta = read_meta(folder)
    if not meta.get('pairs'):
        raise ValueError(f'{folder} does not have pairs of answers: make some with data/preferences/prepare.py')
    if is_url(folder):
        raise ValueError(f'{folder} cannot be written to: compute the reference in a folder on this machine, and '
                         f'copy its files *{REFERENCE} and {REFERENCE_FILE} there')
    join_tokenizers(opened.tokenizer.meta(), opened.path, meta, dataset,
                    'prepare the pairs with the tokenizer of this model, or evaluate the model that they are for')
    path = pathlib.Path(folder, REFERENCE_FILE)
    if processes.is_main:  # an earlier one does not describe what is written from here on
        path.unlink(missing_ok=True)
    for split in ('train', 'val'):
        if find_shards(folder, split):
            began = time.perf_counter()
            loader = TokenLoader(folder, split, 1, meta['vocab_size'], meta, seed=0)
            with tqdm(desc=split, total=loader.n_tokens, unit='token', unit_scale=True,
                      disable=None if processes.is_main else True) as bar:
                values = reference_of(loader.read(0, loader.n_tokens), scorer, opened.config.block_size, bar)
            if processes.is_main:
                for tokens, part in zip(loader.paths, np.split(values, loader.ends[:-1])):
                    with write_atomically(tokens + REFERENCE) as file:
                        file.write(part.tobytes())
            processes.say(f'{split}: {loader.n_tokens:,} tokens in {time.perf_counter() - began:.1f}s')
    if processes.is_main:
        content = describe_weights(opened.path) | dict(shards=fingerprint({dataset: Source(folder, {})}))
        with write_atomically(path) as file:
            file.write(json.dumps(content, indent=1).encode())
        print(f'wrote {path}')


def reference_of(tokens, scorer, block_size, bar):
    """The log-probabilities (N,), float32, of tokens (N,) as in the file; 0 for those that are not targets.

    Each document is read from its beginning. One of more than block_size tokens cannot be in a row, and has 0.
    bar: shows how many tokens are done.
    """
    values, is_target = np.zeros(len(tokens), '<f4'), targets_of(tokens) >= 0
    begins = np.flatnonzero(begins_of(tokens, None))
    spans = [(begin, end) for begin, end in zip(begins, [*begins[1:], len(tokens)])
             if end - begin <= block_size + 1 and is_target[begin + 1:end].any()]
    n_parts = min(len(spans), -(-len(tokens) // TOKENS_AT_A_TIME))
    for some in np.array_split(spans, n_parts) if spans else ():
        requests = [Request(ids_of(tokens[begin:end]).tolist(), 1 + int(is_target[begin + 1:end].argmax()))
                    for begin, end in some]
        for (begin, end), found in zip(some, scorer.score_tokens(requests)):
            values[begin:end] = np.where(is_target[begin:end], found, 0.0)
            bar.update(end - begin)
    return values
