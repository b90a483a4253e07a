"""Draws a token from logits: by temperature, top-k and nucleus. Imports torch alone."""
import torch


def draw_token(logits, temperature, top_k, top_p, generator):
    """Draw a token (B,) from logits (B, V)."""
    if temperature == 0:
        return logits.argmax(dim=-1)
    use_nucleus = top_p and top_p < 1
    tokens = None
    if top_k or use_nucleus:  # sorted, the likeliest first; top_k makes the steps below much shorter
        logits, tokens = logits.topk(min(top_k or logits.size(-1), logits.size(-1)))
    probabilities = (logits / temperature).softmax(dim=-1)
    if use_nucleus:
        likelier = probabilities.cumsum(dim=-1) - probabilities
        probabilities = probabilities.masked_fill(likelier >= top_p, 0.0)  # the likeliest token always stays
    drawn = torch.multinomial(probabilities, 1, generator=generator)
    return (drawn if tokens is None else tokens.gather(-1, drawn))[:, 0]
