"""Draws the next tokens of texts from their logits, by temperature, top-k and nucleus.

A token depends on its logits, the seed of its text and its number in the text, and on nothing else.
"""
import hashlib

import torch


def uniform(seed, number):
    """A number from 0 to 1, 1 excluded. seed: an integer or a tuple of these. number: of the token in its text."""
    digest = hashlib.blake2b(f'{seed} {number}'.encode(), digest_size=4).digest()
    return int.from_bytes(digest) / 2 ** 32


def draw_tokens(logits, requests):
    """The next token of each of the Requests, a list of ids, from logits (B, V) in float32."""
    groups = {}
    for i, request in enumerate(requests):
        groups.setdefault((request.temperature, request.top_k, request.top_p), []).append(i)
    tokens = [0] * len(requests)
    for sampling, numbers in groups.items():
        of_group = logits if len(groups) == 1 else logits[numbers]
        places = [uniform(requests[i].seed, len(requests[i].tokens)) for i in numbers]
        for i, token in zip(numbers, draw_alike(of_group, places, *sampling)):
            tokens[i] = token
    return tokens


def draw_alike(logits, places, temperature, top_k, top_p):
    """A token for each row of logits (B, V): the one in whose share of the probability the row's place is.

    places: numbers from 0 to 1. temperature 0 takes the likeliest token; top_k keeps the k likeliest; top_p the
    fewest of these that reach that probability (nucleus sampling, Holtzman et al. 2020).
    """
    if temperature == 0:
        return logits.argmax(dim=-1).tolist()
    uses_nucleus = top_p and top_p < 1
    tokens = None
    if top_k or uses_nucleus:
        logits, tokens = logits.topk(min(top_k or logits.size(-1), logits.size(-1)))
    probabilities = (logits / temperature).softmax(dim=-1)
    if uses_nucleus:
        likelier = probabilities.cumsum(dim=-1) - probabilities
        probabilities = probabilities.masked_fill(likelier >= top_p, 0.0)  # the likeliest token always stays
    if tokens is not None:  # by their ids, since the order of tokens that are equally likely is that of rounding
        tokens, order = tokens.sort(dim=-1)
        probabilities = probabilities.gather(-1, order)
    sums = probabilities.cumsum(dim=-1, dtype=torch.float64 if logits.device.type != 'mps' else None)
    places = torch.tensor(places, dtype=sums.dtype, device=sums.device)[:, None]
    drawn = (sums <= places * sums[:, -1:]).sum(dim=-1, keepdim=True).clamp(max=sums.size(-1) - 1)
    drawn = (drawn if tokens is None else tokens.gather(-1, drawn))[:, 0]
    drawn = drawn.masked_fill(sums[:, -1].isnan(), -1).tolist()
    if -1 in drawn:
        raise ValueError('the model gives no probabilities for the next token, but NaN: its weights are broken, or '
                         'dtype has too small a range')
    return drawn
