"""Continues texts by a model: a batch that runs on, which requests join and leave.

    engine = Engine(ModelReader(model, rows=8))
    engine.submit(request)
    while engine.is_busy:
        for request, token in engine.step():
            ...

A text depends on its request alone, up to the rounding of the logits: not on the other requests, on what was read
before, or on the layout. What a row of the cache has read stays until the row is needed for another text, and a
request that begins with the same tokens does not read them again.

Prompts are read in pieces that begin at multiples of `piece`, so that other texts wait for one piece and not for a
whole prompt, and a text is read in the same pieces whatever was in the cache.
"""
from dataclasses import dataclass, field

import torch

from kilogpt.generate.draw import draw_tokens
from kilogpt.layers.precision import at_least_float32
from kilogpt.layers.rope import is_dynamic

PIECE = 512  # tokens of a prompt in one pass
MOST_TOKENS = dict(cpu=512)  # tokens in one pass that reads prompts
MOST_TOKENS_ON_GPU = 8192
SHORTEST_CACHE = 256  # tokens; a longer text takes a cache of twice that length, and so on
MIN_SHARED = 16  # tokens of another prompt that are worth waiting for
PASSES_PER_STEP = 4  # that read prompts while more texts wait for these than grow


@dataclass(eq=False)
class Request:
    """A text to continue. The engine fills in the last two fields.

    Past block_size, each token takes a new reading of the last block_size tokens.
    """
    ids: list  # of the prompt, at least one
    max_new_tokens: int
    temperature: float = 1.0  # these three as in draw_alike
    top_k: int | None = None
    top_p: float | None = None
    stop_ids: object = ()  # a token of these is the last one
    is_over: object = None  # a function of the new tokens (a list): whether the text ends with them
    seed: object = 0  # an integer or a tuple of integers
    tokens: list = field(default_factory=list)  # drawn so far
    reason: str | None = None  # why the text has ended: 'stop', 'length' or 'cancelled'

    def text_ids(self):
        """The drawn tokens without the one of stop_ids that ends them."""
        ends = self.tokens and self.tokens[-1] in self.stop_ids
        return self.tokens[:-1] if ends else list(self.tokens)


class Row:
    """A row of the cache: the text in it, and the request that the text belongs to."""

    def __init__(self, number):
        self.number = number
        self.request = None
        self.ids = []  # what the model sees of the text, also tokens that it has not read
        self.starts = []  # the position at which the document of each token begins, as far as it was asked for
        self.n_read = 0  # how many of them are in the cache
        self.n_in_pieces = 0  # how many of them were read in whole pieces
        self.since = 0  # the pass after which the present prompt was to be read

    def n_common(self, ids):
        """How many tokens of what the row has read, and is to read, ids begin with."""
        low, high = 0, min(len(self.ids), len(ids))
        while low < high:
            middle = (low + high + 1) // 2
            if self.ids[low:middle] == ids[low:middle]:
                low = middle
            else:
                high = middle - 1
        return low


    def starts_of(self, begin, end, separator):
        """The position at which the document of each of the tokens from begin to end begins."""
        for i in range(len(self.starts), end):
            self.starts.append(i if i == 0 or self.ids[i] == separator else self.starts[-1])
        return self.starts[begin:end]


class ModelReader:
    """Reads tokens by a model that is in this process, into a cache."""

    def __init__(self, model, rows, cache=None, is_exact=True):
        """cache: one of full length, of which each step passes all rows; None = one that grows with the texts.

        is_exact: whether a token that is read alone gives the logits that it gives in a piece, up to the rounding
        of float32. If not, only whole pieces of earlier prompts are used again.
        """
        self.model, self.config, self.rows, self.is_exact = model, model.config, rows, is_exact
        self.is_static = cache is not None
        self.cache = cache or model.new_cache(rows, SHORTEST_CACHE)
        self.device = self.cache.lengths.device
        self.most_tokens = MOST_TOKENS.get(self.device.type, MOST_TOKENS_ON_GPU)

    def make_room(self, length, rows):
        """Take a longer cache with the same content if the present one is shorter than `length` tokens."""
        size = self.cache.size
        if size >= length:
            return
        while size < length:
            size *= 2
        longer = self.model.new_cache(self.rows, size)
        for row in rows:
            longer.copy_row(row.number, row.number, row.n_read, self.cache)
        self.cache = longer

    size = property(lambda self: self.cache.size)
    can_go_back = property(lambda self: self.cache.can_go_back)

    def read(self, numbers, ids, starts, lengths):
        """Read ids, lists of tokens, in rows of these ascending numbers.

        Returns (places in `numbers` of the rows whose logits this process knows, their logits (rows, V) in float32).
        starts: lists like ids, as in GPT.forward, or None. lengths: of the texts in all rows of the cache so far.
        """
        T = max(map(len, ids))
        passed = self._rows_to_pass(numbers, T)
        of_row = dict(zip(numbers, ids))
        idx = [of_row.get(number, []) for number in passed]
        counts, befores = [len(of_row) for of_row in idx], [lengths[number] for number in passed]
        part = slice(passed[0], passed[-1] + 1) if isinstance(passed, range) else self._tensor(passed)
        ends = None if self.is_static else (max(befores), max(map(sum, zip(befores, counts))))
        has_padding = self.is_static or min(counts) < T
        cache = self.cache.part(part, self._tensor(counts) if has_padding else None, ends)
        if starts is not None:
            of_row = dict(zip(numbers, starts))
            starts = self._padded([of_row.get(number, []) for number in passed], T)
        # A call of the module is what compile() compiles, and only steps of one token have one shape.
        forward = self.model if T == 1 else self.model.forward
        with torch.inference_mode(self.device.type == 'cpu'), torch.no_grad():
            self.cache.lengths[part] = self._tensor(befores)
            logits = at_least_float32(forward(self._padded(idx, T), starts=starts, cache=cache)[:, -1])
            if len(passed) > len(numbers):
                logits = logits[[passed.index(number) for number in numbers]]
        return range(len(numbers)), logits

    def _rows_to_pass(self, numbers, T):
        """The rows of a pass. A range may have others in between, which costs less than to copy keys."""
        if T == 1 and self.is_static:
            return range(self.rows)
        between = range(numbers[0], numbers[-1] + 1)
        return between if len(between) == len(numbers) or T == 1 and len(between) <= 2 * len(numbers) else numbers

    def _padded(self, lists, T):
        return self._tensor([numbers + [0] * (T - len(numbers)) for numbers in lists])

    def _tensor(self, numbers):
        return torch.tensor(numbers, device=self.device)

    def copy(self, source, target, length):
        """Let a row begin with the first `length` tokens of another, by their numbers."""
        self.cache.copy_row(source, target, length)

    def agree(self, tokens):
        """What was drawn, as it is known to all processes. A token is 0 where its logits are not known."""
        return tokens


class Engine:
    def __init__(self, reader, separator=None):
        """reader: a ModelReader or LayoutReader.

        separator: the token at which a document begins, for a model that was trained on documents one by one.
        """
        self.reader, self.separator, self.block_size = reader, separator, reader.config.block_size
        self.rows = [Row(number) for number in range(reader.rows)]
        self.waiting = []  # Requests without a row
        self.n_passes = 0
        # A dynamic scaling turns a key by the length at which it was read.
        self.reuses = not is_dynamic(reader.config.rope_scaling)
        self.piece = PIECE if self.reuses else self.block_size

    @property
    def is_busy(self):
        return bool(self.waiting) or any(row.request for row in self.rows)

    def submit(self, request):
        """Continue the text of a Request, as soon as a row is free. ValueError if it cannot be."""
        if not request.ids or request.max_new_tokens < 1:
            raise ValueError(f'a request has {len(request.ids)} tokens and max_new_tokens={request.max_new_tokens}: '
                             'both must be at least 1')
        self.waiting.append(request)

    def cancel(self, request):
        """End the text of a request, which frees its row; nothing if it has ended."""
        if request.reason is None:
            request.reason = 'cancelled'
            self.waiting = [other for other in self.waiting if other is not request]
            for row in self.rows:
                if row.request is request:
                    self._free(row)

    def generate(self, request):
        """Yield the tokens of a request as they come. Other requests continue meanwhile."""
        self.submit(request)
        try:
            while request.reason is None:
                yield from [token for other, token in self.step() if other is request]
        finally:
            self.cancel(request)

    def complete(self, requests):
        """Continue the texts of requests to their ends; returns them."""
        for request in requests:
            self.submit(request)
        while any(request.reason is None for request in requests):
            self.step()
        return requests

    def step(self):
        """Read a piece or a few, and a token for each text that grows; returns [(request, token that was drawn)]."""
        drawn = []
        for _ in range(PASSES_PER_STEP):
            self._admit()
            reading = [row for row in self.rows if row.request and len(row.ids) > row.n_read + 1]
            growing = [row for row in self.rows if row.request and len(row.ids) == row.n_read + 1]
            if reading:
                drawn += self._read(self._choose(reading))
            if len(reading) <= len(growing):
                break
        growing = [row for row in self.rows if row.request and len(row.ids) == row.n_read + 1]
        return drawn + (self._read(growing) if growing else [])

    # --- rows ---------------------------------------------------------------------------------------------------

    def _admit(self):
        """Give free rows to waiting requests, but not to one whose beginning another row is about to have read."""
        for request in list(self.waiting):
            row = self._find_free_row()
            if row is None:
                return
            ids = request.ids[-self.block_size:]
            source, n_shared = max(((row, self._n_reusable(row, ids)) for row in self.rows), key=lambda found: found[1])
            if any(self._will_share(row, ids) > n_shared + MIN_SHARED for row in self.rows if row.request):
                continue
            if source.request is None and 2 * n_shared >= source.n_read > 0:
                row = source  # little of its text is lost
            self._give(row, request, source, n_shared)

    def _find_free_row(self):
        """The free row that has waited longest; None without one."""
        free = [row for row in self.rows if row.request is None]
        return min(free, key=lambda row: row.since, default=None)

    def _give(self, row, request, source, n_shared):
        """Let a free row continue a request, of which it takes the first tokens from a source row."""
        self.reader.make_room(min(len(request.ids) + request.max_new_tokens, self.block_size), self.rows)
        if n_shared and row is not source:
            self.reader.copy(source.number, row.number, n_shared)
        row.n_in_pieces = min(source.n_in_pieces, n_shared)
        row.request, row.ids, row.starts = request, request.ids[-self.block_size:], []
        row.n_read, row.since = n_shared, self.n_passes
        self.waiting.remove(request)

    def _free(self, row):
        row.request = None
        if row.n_read == self.reader.size:  # passes of other rows write at the position after the text
            row.n_read = row.n_read - 1 if self.reader.can_go_back else 0

    def _n_reusable(self, row, ids):
        """How many tokens of a text need not be read again, since the row has read them."""
        # The last token is read in any case, since it gives the next logits.
        n_shared = min(row.n_common(ids[:-1]), row.n_read) if self.reuses else 0
        if not self.reader.is_exact:
            n_shared = min(n_shared, row.n_in_pieces) // self.piece * self.piece
        return n_shared if n_shared == row.n_read or self.reader.can_go_back else 0

    def _will_share(self, row, ids):
        """How many tokens of a text a row will have read that is reading its prompt."""
        if row.request.tokens:
            return 0
        if row.ids == ids:  # then even the logits are shared
            return len(ids) + MIN_SHARED
        n_shared = row.n_common(ids[:-1]) if self.reuses and self.reader.can_go_back else 0
        return n_shared if self.reader.is_exact else n_shared // self.piece * self.piece

    # --- passes -------------------------------------------------------------------------------------------------

    def _end(self, row):
        """Where the next piece of a row's text ends."""
        return min(len(row.ids), (row.n_read // self.piece + 1) * self.piece)

    def _choose(self, reading):
        """The rows that read a piece in the next pass: those that have waited longest."""
        chosen, longest = [], 0
        for row in sorted(reading, key=lambda row: row.since):
            longest = max(longest, self._end(row) - row.n_read)
            if chosen and longest * (len(chosen) + 1) > self.reader.most_tokens:
                break
            chosen.append(row)
        return sorted(chosen, key=lambda row: row.number)

    def _read(self, rows):
        """Read the next piece in each of the rows, or its last token; returns what was drawn, as in step."""
        self.n_passes += 1
        ends, lengths = [self._end(row) for row in rows], [row.n_read for row in self.rows]
        ids = [row.ids[row.n_read:end] for row, end in zip(rows, ends)]
        starts = None
        if self.separator is not None:
            starts = [row.starts_of(row.n_read, end, self.separator) for row, end in zip(rows, ends)]
        if not self.reader.can_go_back:  # an error in between leaves some layers without what others have
            for row in rows:
                row.n_read = 0
        known, logits = self.reader.read([row.number for row in rows], ids, starts, lengths)
        for row, end in zip(rows, ends):
            row.n_read = end
            if end == row.n_in_pieces + self.piece:
                row.n_in_pieces = end
        drawing = [(row, i) for i, row in enumerate(rows) if row.n_read == len(row.ids)]
        for row, i in list(drawing):
            drawing += [(other, i) for other in self._fork(row)]
        known = {i: place for place, i in enumerate(known)}
        here = [n for n, (_, i) in enumerate(drawing) if i in known]
        tokens = [0] * len(drawing)
        if here:
            places = [known[drawing[n][1]] for n in here]
            chosen = logits if places == [*range(len(logits))] else logits[places]
            for n, token in zip(here, draw_tokens(chosen, [drawing[n][0].request for n in here])):
                tokens[n] = token
        if drawing:
            tokens = self.reader.agree(tokens)
        return [self._append(row, token) for (row, _), token in zip(drawing, tokens)]

    def _fork(self, row):
        """Give free rows to requests with the prompt that a row has read; returns these rows."""
        rows = []
        for request in [] if row.request.tokens else list(self.waiting):
            if request.ids == row.request.ids and (free := self._find_free_row()):
                self._give(free, request, row, row.n_read)
                rows.append(free)
        return rows

    def _append(self, row, token):
        """Let a drawn token continue the text of a row, or end it; returns (request, token)."""
        request = row.request
        request.tokens.append(token)
        row.ids.append(token)
        if token in request.stop_ids or request.is_over is not None and request.is_over(request.tokens):
            request.reason = 'stop'
        elif len(request.tokens) == request.max_new_tokens:
            request.reason = 'length'
        if request.reason is not None:
            self._free(row)
        elif len(row.ids) > self.block_size:
            row.ids, row.starts = row.ids[-self.block_size:], []
            row.n_read, row.n_in_pieces, row.since = 0, 0, self.n_passes
        return request, token
