"""Text from a model in any layout, for samples during training and for lm-evaluation-harness.

sample.py is for people: it is faster, and shows a text as it grows.
"""
import numpy as np
import torch

from kilogpt.evaluate.batches import Request
from kilogpt.evaluate.scorer import arrange
from kilogpt.layers.attention import starts_of
from kilogpt.layers.sampling import draw_token
from kilogpt.parallel.scoring import Scoring


def generate(scorer, prompts, n_tokens, draw, is_over=lambda ids: False, alone=False):
    """Lists of up to n_tokens ids that continue prompts, non-empty lists of ids; None if poll ended it.

    All processes call this with the same prompts. A prompt keeps as many of its last ids as leave room for
    n_tokens in block_size.
    scorer: a Scorer. draw(logits, row, step): the id of the next token of a prompt, by its number `row`, from
    logits (vocabulary,). is_over(ids): whether a text, the ids so far, ends here.
    alone: this process continues prompts of its own, which works where it `has_whole_model`.
    """
    parallel, block_size = scorer.parallel, scorer.config.block_size
    n_tokens = min(n_tokens, block_size - 1)
    prompts = [prompt[-(block_size - n_tokens):] for prompt in prompts]
    texts = [[] for _ in prompts]
    growing = list(range(len(prompts)))  # rows whose texts are not over
    longest = max(map(len, prompts))
    _, dp_rank, _, tp_rank = parallel.layout.coordinates(parallel.processes.rank)
    with Scoring(parallel, scorer.config, scorer.dtype, wants_logits=True) as scoring:
        cache = scoring.new_cache(len(prompts), longest + n_tokens) if scoring.is_whole else None
        for step in range(n_tokens):
            if scorer.poll():
                return None
            rows = [prompts[row] + texts[row] for row in growing]
            scores = _read(scoring, rows, step == 0, scorer.separator, cache)
            ids = [0] * len(rows)
            # Several processes may know the same logits, and one of them draws.
            if scores is not None and (alone or dp_rank == tp_rank == 0):
                for i, logits in zip(scores.row.tolist(), scores.logits):
                    if i < len(rows):
                        ids[i] = draw(logits, growing[i], step)
            for row, token in zip(growing, ids if alone else parallel.processes.sums(ids)):
                texts[row].append(int(token))
            staying = [i for i, row in enumerate(growing) if not is_over(texts[row])]
            if not staying:
                break
            if cache is not None and len(staying) < len(growing):
                cache.take_rows(staying)
            growing = [growing[i] for i in staying]
    return texts


def has_whole_model(layout):
    """Whether each process has all of the model, so that it does not need others to read a text."""
    return layout.dp == layout.world_size and not layout.uses_fsdp


def _read(scoring, rows, is_first, separator, cache):
    """The Scores, with logits, of what follows each of rows, lists of ids. A cache has all but the last ones,
    unless this is the first reading."""
    requests = [Request([*row, 0], len(row)) for row in rows]  # the target may be any token
    longest = max(map(len, rows))
    if cache is None:
        x, y = arrange(requests, scoring.height(len(rows)), scoring.length(longest))
        return scoring.run(x, y, starts_of(x, separator))
    x, y = arrange(requests, len(rows), longest)
    starts = starts_of(x, separator)
    if is_first:
        counts = torch.tensor([len(row) for row in rows], device=cache.lengths.device)
        return scoring.run(x, y, starts, cache.part(slice(0, len(rows)), counts))
    last = torch.tensor([[len(row) - 1] for row in rows])
    starts = None if starts is None else starts.gather(1, last)
    return scoring.run(x.gather(1, last), y.gather(1, last), starts, cache)


def seeded_draw(seed, temperature=0.8, top_k=200, top_p=None):
    """A `draw` whose tokens depend on the logits, the seed, the row and the step, and not on the layout."""
    def draw(logits, row, step):
        number = int(np.random.SeedSequence([seed, row, step]).generate_state(1)[0])
        generator = torch.Generator().manual_seed(number)
        return int(draw_token(logits.cpu()[None], temperature, top_k, top_p, generator))
    return draw
