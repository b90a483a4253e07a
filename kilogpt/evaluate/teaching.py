"""The probabilities that a model gives each next token of a dataset: the teacher of a smaller one, beside the data."""
import json
import os
import pathlib
import time

import numpy as np
import torch
from tqdm import tqdm

from data.datasets import NUMBERS, TEACHER_FILE, Source, find_dataset, fingerprint, join_tokenizers, read_meta
from data.flags import ids_of
from data.loader import TokenLoader
from data.storage import is_url, write_atomically
from kilogpt.layers.attention import starts_of
from kilogpt.layers.distillation import teacher_numbers
from kilogpt.parallel.scoring import Scoring
from kilogpt.weights.importing import describe_weights

MAX_LOGITS, MAX_TOKENS = 2 ** 26, 2 ** 13  # elements and tokens at a time
OTHER_TOKENIZER = 'a teacher needs the tokenizer of its student: choose another teacher, or prepare the data with its own'


def write_teacher(opened, dataset, top_k, temperature):
    """Write teacher_numbers of each token in the training split of a dataset, and teacher.json, into its folder.

    The model reads windows of block_size tokens, from each of which the second half counts. A command that was
    interrupted continues. opened: the OpenModel. All processes call this. ValueError if the dataset has another
    tokenizer than the model.
    """
    folder, processes = find_dataset(dataset), opened.parallel.processes
    if is_url(folder):
        raise ValueError(f'{folder} cannot be written to: copy the dataset into a folder on this machine')
    meta = read_meta(folder)
    join_tokenizers(opened.tokenizer.meta(), opened.path, meta, dataset, OTHER_TOKENIZER)
    loader = TokenLoader(folder, 'train', 1, meta['vocab_size'], meta, seed=0)
    top_k, path = min(top_k, opened.config.vocab_size), pathlib.Path(folder, NUMBERS)
    facts = describe_weights(opened.path) | dict(
        shards=fingerprint({'': Source(folder, {})}), top_k=top_k, temperature=temperature)
    partial, partial_facts = path.with_suffix('.teacher.partial'), path.with_suffix('.teacher.partial.json')
    stride, n_numbers = max(1, opened.config.block_size // 2), 2 * top_k + 1
    n_done = 0  # windows that an interrupted command has written
    if processes.is_main:
        (path.parent / TEACHER_FILE).unlink(missing_ok=True)  # does not describe what is written from here on
        if partial_facts.exists() and json.loads(partial_facts.read_text()) == facts:
            n_done = partial.stat().st_size // (4 * n_numbers * stride) if partial.exists() else 0
        with write_atomically(partial_facts) as file:
            file.write(json.dumps(facts).encode())
        with open(partial, 'ab') as file:
            file.truncate(4 * n_numbers * stride * n_done)
    n_done, began = processes.share(n_done), time.perf_counter()
    with Scoring(opened.parallel, opened.config, opened.dtype, wants_logits=True) as scoring, \
            tqdm(initial=n_done * stride, total=loader.n_tokens, unit='token', unit_scale=True,
                 disable=None if processes.is_main else True) as bar:
        reader = _Reader(scoring, opened, loader, stride, top_k, temperature)
        for first in range(n_done, -(-loader.n_tokens // stride), reader.n_windows):
            numbers = reader.read(first)
            if processes.is_main:
                with open(partial, 'ab') as file:
                    file.write(numbers.astype('<i4').tobytes())
            bar.update(len(numbers))
    if processes.is_main:
        os.replace(partial, path)
        partial_facts.unlink()
        with write_atomically(path.parent / TEACHER_FILE) as file:
            file.write(json.dumps(facts, indent=1).encode())
        print(f'wrote {path}: {loader.n_tokens:,} tokens, {top_k} of each, in {time.perf_counter() - began:.1f}s')


class _Reader:
    """Reads windows of a stream, n_windows at a time, of which each data-parallel rank has some."""

    def __init__(self, scoring, opened, loader, stride, top_k, temperature):
        self.scoring, self.loader, self.stride, self.top_k, self.temperature = scoring, loader, stride, top_k, temperature
        self.parallel, self.separator = opened.parallel, opened.separator
        self.length = scoring.length(min(2 * stride, opened.config.block_size))
        self.rows = scoring.height(max(1, min(MAX_TOKENS // self.length, MAX_LOGITS // (stride * opened.config.vocab_size))))
        self.n_windows = self.rows * self.parallel.layout.dp

    def read(self, first):
        """teacher_numbers (tokens of the windows from `first` on, 2 k + 1), on all processes."""
        n_tokens, stride = self.loader.n_tokens, self.stride
        begin, end = first * stride, min((first + self.n_windows) * stride, n_tokens)
        found = np.zeros((end - begin, 2 * self.top_k + 1))
        _, dp_rank, _, _ = self.parallel.layout.coordinates(self.parallel.processes.rank)
        x = np.zeros((self.rows, self.length), np.int64)
        y = np.full_like(x, -1)
        places = np.zeros_like(x)  # in `found`
        for row in range(self.rows):
            at = begin + (dp_rank * self.rows + row) * stride
            if at < end:
                context = min(at, stride, self.length - stride)
                tokens = ids_of(self.loader.read(at - context, min(at + stride, end) - at + context))
                x[row, :len(tokens)], y[row, context:len(tokens)] = tokens, 0  # any target
                places[row, context:len(tokens)] = np.arange(at, at + len(tokens) - context) - begin
        x, y = torch.from_numpy(x), torch.from_numpy(y)
        scores = self.scoring.run(x, y, starts_of(x, self.separator))
        if scores is not None:
            numbers = teacher_numbers(scores.logits, self.top_k, self.temperature).cpu().numpy()
            found[places[scores.row.cpu().numpy(), scores.place.cpu().numpy()]] = numbers
        sums = self.parallel.processes.sums(found.ravel().tolist())  # of bits, which float64 holds exactly
        return (np.array(sums) / self.parallel.layout.tp).reshape(found.shape).round().astype(np.int64)
