"""Random data of each kind that train.py reads: texts, perhaps with a teacher, conversations, and pairs of answers."""
import json
import os

import numpy as np
import torch

from data.datasets import NUMBERS, REFERENCE, REFERENCE_FILE, TEACHER_FILE, Source, fingerprint
from data.flags import BEGIN, CONTEXT, REJECTED
from data.make.prepare import write_random_tokens
from kilogpt.layers.distillation import teacher_numbers
from kilogpt.weights.importing import describe_weights

VOCABULARY = 61  # three of the embedding's 64 rows are padding
N_TOKENS = 2 ** 14
DOCUMENT_LENGTH = 9  # tokens in a document, on average: a few documents in a sequence, and some of one token
SHARE_OF_TARGETS = 1 / 3  # of the tokens of conversations


def write_text(folder, has_documents=True, seed=0):
    """Write a dataset of random texts; returns its folder."""
    os.mkdir(folder)
    length = DOCUMENT_LENGTH if has_documents else 0
    write_random_tokens(folder, VOCABULARY, N_TOKENS, length, draws_lengths=has_documents, seed=seed)
    return folder


def write_teacher_of(folder, top_k=6):
    """Write the numbers of a random teacher of a text; returns the folder."""
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(N_TOKENS, VOCABULARY, generator=generator)
    teacher_numbers(logits, top_k, 1.0).numpy().tofile(os.path.join(folder, NUMBERS))
    facts = dict(source='random', digest='', top_k=top_k, temperature=1.0, shards=fingerprint({'': Source(folder, {})}))
    with open(os.path.join(folder, TEACHER_FILE), 'w', encoding='utf-8') as file:
        json.dump(facts, file)
    return folder


def write_conversations(folder):
    """Write a dataset of random conversations, whose targets come in runs; returns its folder."""
    os.mkdir(folder)
    for split, generator in _splits():
        ids = generator.integers(1, VOCABULARY, N_TOKENS).astype('<u4')
        is_target = np.repeat(generator.random(N_TOKENS // 4) < SHARE_OF_TARGETS, 4)
        begins = generator.random(N_TOKENS) < 1 / DOCUMENT_LENGTH
        ids[~is_target | begins] |= CONTEXT
        ids[begins] |= BEGIN
        ids.tofile(os.path.join(folder, f'{split}.bin'))
    return _write_meta(folder)


def write_pairs(folder):
    """Write a dataset of random pairs, with 2 to 6 targets in each answer, and random log-probabilities."""
    os.mkdir(folder)
    for split, generator in _splits():
        documents = []
        for number in range(N_TOKENS // DOCUMENT_LENGTH * 2):
            n_prompt, n_targets = generator.integers(1, 4), generator.integers(2, 7)
            tokens = generator.integers(0, VOCABULARY, n_prompt + n_targets).astype('<u4')
            tokens[:n_prompt] |= CONTEXT
            tokens[0] |= BEGIN
            documents.append(tokens | REJECTED if number % 2 else tokens)
        tokens = np.concatenate(documents)
        path = os.path.join(folder, f'{split}.bin')
        tokens.tofile(path)
        generator.normal(-4, 1, len(tokens)).astype('<f4').tofile(path + REFERENCE)
    return _write_meta(folder, pairs=True)


def pairs_of_reference(pairs, folder, weights):
    """Make a copy of a dataset of pairs that claims other weights as its reference; returns its folder."""
    os.mkdir(folder)
    for name in os.listdir(pairs):
        os.symlink(os.path.join(pairs, name), os.path.join(folder, name))
    shards = fingerprint({'pairs': Source(folder, {})})
    with open(os.path.join(folder, REFERENCE_FILE), 'w', encoding='utf-8') as file:
        json.dump(describe_weights(weights) | dict(shards=shards), file)
    return folder


def _splits():
    return [(split, np.random.default_rng(seed)) for seed, split in enumerate(('train', 'val'))]


def _write_meta(folder, **entries):
    meta = dict(vocab_size=VOCABULARY, dtype='uint32', flags=True, **entries)
    with open(os.path.join(folder, 'meta.json'), 'w', encoding='utf-8') as file:
        json.dump(meta, file)
    return folder
