"""Text from a model in any layout, for samples during training and for lm-evaluation-harness.

sample.py is for people: it is faster, and shows a text as it grows.
"""
import numpy as np
import torch

from kilogpt.evaluate.scorer import left_padded_starts
from kilogpt.parallel.scoring import Scoring
from model import draw_token


def generate(scorer, prompts, n_tokens, draw, is_over=lambda texts: False):
    """Lists of up to n_tokens ids that continue prompts, non-empty lists of ids; None if poll ended it.

    All processes call this with the same prompts. A prompt keeps as many of its last ids as leave room for
    n_tokens in block_size.
    scorer: a Scorer. draw(logits, row, step): the id of the next token, from logits (vocabulary,).
    is_over(texts): whether the lists of ids so far are long enough.
    """
    parallel, block_size = scorer.parallel, scorer.config.block_size
    n_tokens = min(n_tokens, block_size - 1)
    prompts = [prompt[-(block_size - n_tokens):] for prompt in prompts]
    texts = [[] for _ in prompts]
    with Scoring(parallel, scorer.config, scorer.dtype, wants_logits=True) as scoring:
        longest = max(map(len, prompts))
        cache = scoring.new_cache(len(prompts), longest + n_tokens) if scoring.is_whole else None
        for step in range(n_tokens):
            if scorer.poll():
                return None
            if is_over(texts):
                break
            rows = [prompt + text for prompt, text in zip(prompts, texts)]
            scores = _read(scoring, rows, scorer.separator, cache, step)
            ids = [0] * len(rows)
            # Several processes may know the same logits, and one of them draws.
            _, dp_rank, _, tp_rank = parallel.layout.coordinates(parallel.processes.rank)
            if scores is not None and dp_rank == tp_rank == 0:
                for row, logits in zip(scores.row.tolist(), scores.logits):
                    if row < len(rows):
                        ids[row] = draw(logits, row, step)
            for text, token in zip(texts, parallel.processes.sums(ids)):
                text.append(int(token))
    return texts


def _read(scoring, rows, separator, cache, step):
    """The Scores, with logits, of what follows each of rows, lists of ids."""
    longest = max(map(len, rows))
    if cache is not None:  # all rows end together; after the first step, their last tokens are new
        padding = torch.tensor([longest - len(row) for row in rows])
        x = torch.tensor([[0] * (longest - len(row)) + row for row in rows])
        starts = left_padded_starts(x, padding, separator)
        n_new = 1 if step else longest
        y = torch.full((len(rows), n_new), -1)
        y[:, -1] = 0  # any token
        return scoring.run(x[:, -n_new:], y, starts if starts is None else starts[:, -n_new:], cache)
    height = -(-len(rows) // scoring.n_micro_batches) * scoring.n_micro_batches
    x = np.zeros((height, scoring.length(longest)), np.int64)
    y = np.full_like(x, -1)
    for i, row in enumerate(rows):
        x[i, :len(row)] = row
        y[i, len(row) - 1] = 0
    x = torch.from_numpy(x)
    return scoring.run(x, torch.from_numpy(y), left_padded_starts(x, torch.zeros(height, dtype=int), separator))


def seeded_draw(seed, temperature=0.8, top_k=200):
    """A `draw` whose tokens depend on the logits, the seed, the row and the step, and not on the layout."""
    def draw(logits, row, step):
        number = int(np.random.SeedSequence([seed, row, step]).generate_state(1)[0])
        generator = torch.Generator().manual_seed(number)
        return int(draw_token(logits.cpu()[None], temperature, top_k, None, generator))
    return draw
