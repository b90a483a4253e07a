"""Flags in the highest bits of the uint32 token ids of conversations and pairs. Ids of other datasets have none.

CONTEXT: the token is read, but it is not a target: what a user says, for example.
BEGIN: a document begins with this token.
REJECTED: the token is of the rejected answer of a pair, or of the prompt before it. A pair is two documents, of
which the chosen one comes first.
"""
import numpy as np

CONTEXT, BEGIN, REJECTED = np.uint32(1 << 31), np.uint32(1 << 30), np.uint32(1 << 29)


def flag_document(ids, is_target):
    """The tokens of a document with flags, from its ids and which of them are targets."""
    tokens = np.array(ids, dtype=np.uint32)
    tokens[~np.array(is_target)] |= CONTEXT
    tokens[0] |= BEGIN
    return tokens


def ids_of(tokens):
    """The ids of an array of tokens, without their flags."""
    return tokens & (REJECTED - np.uint32(1)) if tokens.dtype.itemsize == 4 else tokens


def targets_of(tokens):
    """The ids of an array of tokens, int64, with -1 for those that are context."""
    ids = ids_of(tokens).astype(np.int64)
    if tokens.dtype.itemsize == 4:
        ids[(tokens & CONTEXT) > 0] = -1
    return ids


def begins_of(tokens, separator):
    """Which of an array of tokens documents begin with: those with the flag if the separator is None."""
    return (tokens & BEGIN) > 0 if separator is None else ids_of(tokens) == separator


def pair_begins_of(tokens):
    """Which of an array of tokens pairs begin with."""
    return tokens & (BEGIN | REJECTED) == BEGIN
