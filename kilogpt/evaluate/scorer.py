"""Log-likelihoods of texts under a model in any layout, for tasks and for lm-evaluation-harness."""
import numpy as np
import torch
from tqdm import tqdm

from kilogpt.evaluate.batches import Group, find_groups, pack_groups
from kilogpt.layers.attention import starts_of
from kilogpt.parallel.scoring import Scoring


class Scorer:
    """Scores texts under a model. All processes of a run call it with the same texts.

    parallel, config, dtype: as in Scoring. separator: the token at which documents begin, for a model that
    was trained on documents one by one; None = a text is one document. most_tokens: of a forward pass.
    poll(): is called before each pass, and ends the scoring if it returns something true.
    shows_progress: whether the main process draws bars, if it writes to a terminal.
    """

    def __init__(self, parallel, config, dtype, separator=None, most_tokens=0, poll=lambda: False,
                 shows_progress=False):
        self.parallel, self.config, self.dtype, self.separator = parallel, config, dtype, separator
        self.most_tokens = most_tokens or (2 ** 12 if parallel.device.type == 'cpu' else 2 ** 15)
        self.poll = poll
        # None: tqdm draws no bar where there is no terminal.
        self.hides_progress = None if shows_progress and parallel.processes.is_main else True

    def progress(self, items, name):
        """The items one by one, with a bar of that name."""
        return tqdm(items, name, leave=False, disable=self.hides_progress)

    def score(self, requests):
        """(log-likelihood in nats, whether each token was the likeliest) of each Request.

        None if poll ended the scoring. A request reads at most block_size tokens.
        """
        with Scoring(self.parallel, self.config, self.dtype) as scoring:
            groups = [Group([number], 0) for number in range(len(requests))]
            if scoring.is_whole:
                groups = find_groups(requests, self.most_tokens)
            is_shared = [group.n_shared > 0 for group in groups]
            passes = []
            for read, chosen in ((self._read_shared, True), (self._read_alone, False)):
                of_this_kind = [group for group, shares in zip(groups, is_shared) if shares == chosen]
                batches = pack_groups(of_this_kind, requests, self.most_tokens, self.config.block_size)
                passes += [(read, batch) for batch in self._of_this_process(batches)]
            nats, misses = np.zeros(len(requests)), np.zeros(len(requests))
            for read, batch in self.progress(passes, 'passes'):
                if self.poll():
                    return None
                for numbers, scores in read(scoring, batch, requests) if batch is not None else ():
                    if scores is not None:
                        rows = np.array(numbers)[scores.row.cpu().numpy()]
                        np.add.at(nats, rows, scores.nats.double().cpu().numpy())
                        np.add.at(misses, rows, (~scores.is_likeliest).double().cpu().numpy())
        sums = self.parallel.processes.sums([*nats, *misses])
        nats, misses = np.array(sums).reshape(2, -1) / self.parallel.layout.tp  # whose ranks have the same
        return [(-float(nat), bool(miss == 0)) for nat, miss in zip(nats, misses)]

    def score_tokens(self, requests):
        """The log-likelihood in nats of each token from `begin` on, and 0 before: an array for each Request."""
        ends = np.cumsum([len(request.tokens) for request in requests])
        begins = np.array([0, *ends[:-1]])
        nats = np.zeros(ends[-1])
        groups = [Group([number], 0) for number in range(len(requests))]
        batches = pack_groups(groups, requests, self.most_tokens, self.config.block_size)
        with Scoring(self.parallel, self.config, self.dtype) as scoring:
            for batch in self._of_this_process(batches):
                for numbers, scores in self._read_alone(scoring, batch, requests) if batch is not None else ():
                    if scores is not None:
                        begins_here = begins[np.array(numbers)[scores.row.cpu().numpy()]]
                        nats[begins_here + scores.place.cpu().numpy() + 1] = -scores.nats.double().cpu().numpy()
        total = np.array(self.parallel.processes.sums(nats.tolist())) / self.parallel.layout.tp
        return np.split(total, ends[:-1])

    def _of_this_process(self, batches):
        """The batches of this data-parallel rank: as many on each, with empty ones or None at the end."""
        layout = self.parallel.layout
        _, dp_rank, _, _ = layout.coordinates(self.parallel.processes.rank)
        count = -(-len(batches) // layout.dp)
        # Processes with a part of the parameters or experts of others must take part in each pass.
        nothing = [] if layout.uses_fsdp else None
        mine = batches[dp_rank::layout.dp]
        return mine + [nothing] * (count - len(mine))

    def _read_alone(self, scoring, batch, requests):
        """Read each text as a row. Yields (numbers of the rows' requests, Scores)."""
        numbers = [number for group in batch for number in group.numbers]
        length = scoring.length(max((requests[number].length for number in numbers), default=1))
        height = scoring.height(max(1, len(numbers)))
        x, y = arrange([requests[number] for number in numbers], height, length)
        yield numbers, scoring.run(x, y, starts_of(x, self.separator))

    def _read_shared(self, scoring, batch, requests):
        """Read what the texts of each group share as a row, and then each text's own part."""
        groups = batch or [Group([], 1)]  # an empty batch takes part in both passes
        n_shared = max(group.n_shared for group in groups)
        numbers = [number for group in batch for number in group.numbers]
        n_own = max((group.longest(requests) for group in batch), default=1)
        source = [i for i, group in enumerate(groups) for _ in group.numbers or [None]]  # of each row
        x, y = arrange([requests[number] for number in numbers], len(source), n_shared + n_own)
        starts = starts_of(x, self.separator)
        first_rows = [source.index(i) for i in range(len(groups))]
        cache = scoring.new_cache(len(groups), n_shared + n_own)
        counts = torch.tensor([group.n_shared for group in groups], device=cache.lengths.device)
        shared_x = x[first_rows, :n_shared]
        shared_starts = None if starts is None else starts[first_rows, :n_shared]
        scoring.run(shared_x, torch.full_like(shared_x, -1), shared_starts, cache.part(slice(0, len(groups)), counts))
        cache.take_rows(source)
        # Each row continues where what it shares ends.
        places = torch.tensor([groups[i].n_shared for i in source])[:, None] + torch.arange(n_own)
        own_starts = None if starts is None else starts.gather(1, places)
        yield numbers, scoring.run(x.gather(1, places), y.gather(1, places), own_starts, cache)


def arrange(requests, rows, length):
    """Inputs and targets (rows, length), int64: a request in each row, targets -1 where nothing is scored."""
    x, y = np.zeros((rows, length), np.int64), np.full((rows, length), -1, np.int64)
    for row, request in enumerate(requests):
        tokens = np.asarray(request.tokens)
        x[row, :request.length] = tokens[:-1]
        y[row, request.begin - 1:request.length] = tokens[request.begin:]
    return torch.from_numpy(x), torch.from_numpy(y)
