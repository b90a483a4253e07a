"""Two flags in the highest bits of the uint32 token ids of conversations. Ids of other datasets have none.

CONTEXT: the token is read, but it is not a target: what a user says, for example.
BEGIN: a document begins with this token.
"""
import numpy as np

CONTEXT, BEGIN = np.uint32(1 << 31), np.uint32(1 << 30)


def ids_of(tokens):
    """The ids of an array of tokens, without their flags."""
    return tokens & (BEGIN - np.uint32(1)) if tokens.dtype.itemsize == 4 else tokens


def targets_of(tokens):
    """The ids of an array of tokens, int64, with -1 for those that are context."""
    ids = ids_of(tokens).astype(np.int64)
    if tokens.dtype.itemsize == 4:
        ids[(tokens & CONTEXT) > 0] = -1
    return ids


def begins_of(tokens, separator):
    """Which of an array of tokens documents begin with: those with the flag if the separator is None."""
    return (tokens & BEGIN) > 0 if separator is None else ids_of(tokens) == separator
