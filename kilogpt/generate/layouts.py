"""Text from a model in any layout, without gathering the model: evaluation, samples during training, rollouts.

All processes call `generate_in_layout` with the same requests, and all get the same texts:

    scorer = Scorer(parallel, config, dtype)  # of kilogpt/evaluate/scorer.py
    requests = [Request(ids, 64, temperature=1.0, seed=(seed, number)) for number, ids in enumerate(prompts)]
    texts = generate_in_layout(scorer, requests)
"""
import dataclasses
import functools
from collections import ChainMap

import torch

from kilogpt.devices import cpu_step
from kilogpt.generate.engine import Engine, ModelReader
from kilogpt.parallel.scoring import Scoring
from model import GPT, GPTConfig


class LayoutReader:
    """Reads tokens by a model in a layout, as engine.ModelReader does. Each process of the layout has one.

    A process has a cache for its layers and heads. Stages of a pipeline read one after the other, and processes
    that divide sequences in training (cp) read whole ones.
    """

    def __init__(self, scoring, scorer, rows, length, is_alone):
        """scoring: a Scoring that is entered. length: of the longest text. is_alone: whether this process has texts of
        its own."""
        self.scoring, self.config, self.rows, self.is_alone = scoring, scorer.config, rows, is_alone
        self.is_exact = scorer.dtype == 'float32'
        self.most_tokens, self.size = scorer.most_tokens, length
        self.cache = scoring.new_cache(rows, length)
        self.can_go_back = self.cache.can_go_back
        self.processes = scoring.parallel.processes
        _, *coordinates = scoring.parallel.layout.coordinates(self.processes.rank)
        self.draws = is_alone or not any(coordinates)  # several processes may know the same logits

    def make_room(self, length, rows):
        """The cache has its full length from the beginning."""

    def read(self, numbers, ids, starts, lengths):
        """As ModelReader.read."""
        tp = self.scoring.parallel.layout.tp
        counts, length = [len(of_row) for of_row in ids], -(-max(map(len, ids)) // tp) * tp
        x, y = torch.zeros(len(ids), length, dtype=torch.long), torch.full((len(ids), length), -1)
        for place, of_row in enumerate(ids):
            x[place, :len(of_row)] = torch.tensor(of_row)
            y[place, len(of_row) - 1] = 0  # the target may be any token, since its logits are what is wanted
        if starts is not None:
            starts = torch.tensor([of_row + [0] * (length - len(of_row)) for of_row in starts])
        device, befores = self.cache.lengths.device, [lengths[number] for number in numbers]
        part = slice(0, self.rows) if len(numbers) == self.rows else torch.tensor(numbers, device=device)
        self.cache.lengths[part] = torch.tensor(befores, device=device)
        cache = self.cache.part(part, torch.tensor(counts, device=device) if min(counts) < length else None,
                                (max(befores), max(map(sum, zip(befores, counts)))))
        scores = self.scoring.run(x, y, starts, cache)
        if scores is None or not self.draws:
            return [], None
        return scores.row.tolist(), scores.logits.cpu()

    def copy(self, source, target, length):
        """As ModelReader.copy."""
        self.cache.copy_row(source, target, length)

    def agree(self, tokens):
        """As ModelReader.agree."""
        return tokens if self.is_alone else [int(token) for token in self.processes.sums(tokens)]


TOLERANCES = dict(float32=1e-4, bfloat16=0.05)  # of the largest logit: what rounding does


@functools.cache
def is_computed(**arguments):
    """Whether cpu_step.cpp computes a GPT of these arguments of GPTConfig."""
    with torch.device('meta'):
        model = GPT(GPTConfig(**arguments), seed=None)
    return cpu_step.is_computed(model)


def fast_reader(parallel, scorer, reader, ids):
    """A ModelReader of a copy of the model that is fast at text on a CPU; None if there is none.

    The copy has the weights of now, and the parts of model.py. A model that someone has changed since it was built
    gives other logits for ids than `reader`, the LayoutReader, and then the copy is not used.
    """
    parameters, config = dict(parallel.named_parameters()), scorer.config
    if (parallel.device.type != 'cpu' or scorer.dtype not in TOLERANCES or cpu_step.problem()
            or any(parameter.dtype != torch.float32 for parameter in parameters.values())
            or not is_computed(**dataclasses.asdict(config))):
        return None
    with torch.device('meta'):
        model = GPT(config, seed=None)
    weights = {name: parameter.detach() for name, parameter in parameters.items()}
    model.load_state_dict(weights, strict=False, assign=True)  # a tied head is not among them
    model.tie()
    cpu_step.prepare_for_text(model, getattr(torch, scorer.dtype))
    fast = ModelReader(model, reader.rows, is_exact=reader.is_exact)
    last = ids[-8:]
    starts = None if scorer.separator is None else [[0] * len(last)]
    (_, expected), (_, found) = (each.read([0], [last], starts, [0] * reader.rows) for each in (reader, fast))
    is_same = (found - expected).abs().max() <= TOLERANCES[scorer.dtype] * expected.abs().max()
    return fast if is_same else None


def generate_in_layout(scorer, requests, is_shared=True):
    """Continue the Requests, the same on all processes; returns a list of new ids for each, on all of them.

    A text depends on its request alone, up to rounding: not on the layout, or on the other requests. A prompt keeps
    as many of its last tokens as leave room for max_new_tokens in block_size.
    is_shared: where each process has the whole model, each continues its part of the requests. Otherwise all
    continue all of them together, a pass at a time, and scorer.poll may end that; the result is then None.
    """
    parallel, block_size = scorer.parallel, scorer.config.block_size
    for request in requests:
        request.max_new_tokens = min(request.max_new_tokens, block_size - 1)
        request.ids = request.ids[-(block_size - request.max_new_tokens):]
    layout, processes = parallel.layout, parallel.processes
    is_shared = is_shared and layout.dp * layout.cp == layout.world_size and not layout.uses_fsdp
    mine = requests[processes.rank::layout.world_size] if is_shared else requests
    with Scoring(parallel, scorer.config, scorer.dtype, wants_logits=True) as scoring:
        length = max((len(request.ids) + request.max_new_tokens for request in mine), default=1)
        rows = min(len(mine), max(1, scorer.most_tokens // length))
        if mine:
            reader = LayoutReader(scoring, scorer, rows, length, is_shared)
            if is_shared:
                reader = fast_reader(parallel, scorer, reader, mine[0].ids) or reader
            engine = Engine(reader, scorer.separator)
            for request in mine:
                engine.submit(request)
            while engine.is_busy:
                if not is_shared and scorer.poll():
                    return None
                engine.step()
    texts = {number: request.tokens for number, request in enumerate(requests)}
    if is_shared:
        texts = dict(ChainMap(*(processes.share(
            {number: tokens for number, tokens in texts.items() if number % layout.world_size == rank}, rank)
            for rank in range(layout.world_size))))
    return [texts[number] for number in range(len(requests))]
