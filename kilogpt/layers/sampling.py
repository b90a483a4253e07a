"""Continues texts by a GPT: each token is drawn from its logits by temperature, top-k and nucleus."""
import torch

from kilogpt.layers.attention import starts_of
from kilogpt.layers.precision import at_least_float32


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


@torch.no_grad()
def generate_tokens(model, idx, max_new_tokens, temperature=1.0, top_k=None, top_p=None, stop_tokens=(),
                    generator=None, cache=None, separator=None):
    """Continue idx (B, T) by a GPT: yield the next token of each row (B,), up to max_new_tokens times.

    temperature 0 takes the likeliest token; top_k keeps the k likeliest; top_p the fewest that reach that
    probability (nucleus sampling, Holtzman et al. 2020). A row that has drawn one of stop_tokens repeats one,
    and the text ends once all rows have. Past block_size, each token takes a new reading of the window.
    cache: from new_cache; its content is replaced. An idx (1, T) is continued in every row.
    separator: the token at which a document begins, for a model that was trained on documents one by one.
    """
    block_size = model.config.block_size
    cache = cache or model.new_cache(idx.size(0), idx.size(1) + max_new_tokens)
    rows = len(cache.lengths)
    idx = idx.expand(rows, -1)
    stopped = torch.zeros(rows, dtype=torch.bool, device=idx.device)
    stops = torch.tensor(sorted(stop_tokens), device=idx.device)
    window, token, filled = idx[:, -block_size:], None, 0
    for _ in range(max_new_tokens):
        starts = starts_of(window, separator)
        if token is None or filled == block_size:
            cache.lengths.zero_()
            logits = model.forward(window, starts=starts, cache=cache)
            filled = window.size(1)
        else:  # a call of the module, since compile() compiles this step, which always has one shape
            logits = model(token[:, None], starts=None if starts is None else starts[:, -1:], cache=cache)
            filled += 1
        logits = at_least_float32(logits[:, -1]).expand(rows, -1)
        token = draw_token(logits, temperature, top_k, top_p, generator)
        if len(stops):
            token = torch.where(stopped, stops[0], token)
            stopped |= torch.isin(token, stops)
        yield token
        if len(stops) and stopped.all():
            return
        window = torch.cat((window.expand(rows, -1), token[:, None]), dim=1)[:, -block_size:]


def generate(model, idx, max_new_tokens, **sampling):
    """idx (B, T) with up to max_new_tokens tokens appended; the arguments of generate_tokens."""
    tokens = generate_tokens(model, idx, max_new_tokens, **sampling)
    return torch.cat((idx, *(token[:, None] for token in tokens)), dim=1)
