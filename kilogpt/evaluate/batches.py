"""Which texts a model reads together, so that it reads what they share once. Arithmetic alone.

A request is a list of token ids and `begin`: the ids from there on are to be scored, given those before. The
model reads all but the last id, and a text's length is what it reads.
"""
import os
from typing import NamedTuple

MIN_SHARED = 16  # tokens at the beginning that are worth a pass of their own


class Request(NamedTuple):
    """tokens: ids of a text, of which those from `begin` on are scored; begin is at least 1."""
    tokens: list
    begin: int

    @property
    def length(self):
        return len(self.tokens) - 1


class Group(NamedTuple):
    """Numbers of requests whose first n_shared tokens are the same and are read once; alone, it is 0."""
    numbers: list
    n_shared: int

    def longest(self, requests):
        """Tokens of the longest text that come after the shared ones."""
        return max(requests[number].length for number in self.numbers) - self.n_shared


def find_groups(requests, most_tokens):
    """The Groups of all requests: neighbours in the order of their ids share a beginning if that saves work.

    most_tokens: of the texts of a group, all together.
    """
    groups = []
    for number in sorted(range(len(requests)), key=lambda number: requests[number].tokens):
        if groups and (joined := _join(groups[-1], number, requests, most_tokens)):
            groups[-1] = joined
        else:
            groups.append(Group([number], 0))
    return groups


def _join(group, number, requests, most_tokens):
    """The group with one more request, or None if that does not save work."""
    first, last = requests[group.numbers[0]], requests[number]
    # What predicts the first scored token belongs to the text's own part.
    most = min(requests[number].begin - 1 for number in (*group.numbers, number))
    shared = min(len(os.path.commonprefix([first.tokens, last.tokens])), most)
    size = len(group.numbers)
    if size > 1:
        shared = min(shared, group.n_shared)
    longest = max(requests[number].length for number in (*group.numbers, number))
    # A group of `size` texts reads its shared tokens once rather than `size` times.
    is_cheaper = size * shared > (size - 1) * group.n_shared and 4 * shared >= longest
    if shared < MIN_SHARED or not is_cheaper or (size + 1) * longest > most_tokens:
        return None
    return Group([*group.numbers, number], shared)


def pack_groups(groups, requests, most_tokens, block_size):
    """Lists of Groups to be read together: of similar lengths, the longest first.

    The shared parts of a list are padded on the right to one length, and so are the other parts.
    most_tokens: of all texts in a list, with padding. block_size: of a text, with padding.
    """
    batches, rows, n_shared, n_own = [], 0, 0, 0
    for group in sorted(groups, key=lambda group: (-group.n_shared, -group.longest(requests))):
        rows += len(group.numbers)
        n_shared, n_own = max(n_shared, group.n_shared), max(n_own, group.longest(requests))
        if not batches or rows * (n_shared + n_own) > most_tokens or n_shared + n_own > block_size:
            batches.append([])
            rows, n_shared, n_own = len(group.numbers), group.n_shared, group.longest(requests)
        batches[-1].append(group)
    return batches
