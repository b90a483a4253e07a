"""Continue texts of which each usually begins with the last one, as the turns of a conversation do."""
import os

import torch

from kilogpt.layers.attention import starts_of
from kilogpt.layers.sampling import draw_token

SHORTEST_CACHE = 1024  # tokens; a longer text takes a cache of twice that length, and so on


class Conversation:
    """A model with the keys and values of the text that it has read last.

    reason: why the last text ended, 'stop' (a token that ends texts) or 'length' (enough tokens, or no room).
    """

    def __init__(self, model, template, separator=None, cache=None):
        """template: a ChatTemplate. separator: as in layers.sampling.generate_tokens. cache: one of full length."""
        self.model, self.template, self.separator = model, template, separator
        self.tokenizer = template.tokenizer
        self.block_size = model.config.block_size
        self.cache = cache or model.new_cache(1, SHORTEST_CACHE)
        self.read_ids = []  # the text in the cache
        self.reason = None

    def fit(self, messages, room):
        """(ids, messages) of the prompt for an answer: without the oldest turns if `room` would not be left.

        A system message stays. ValueError if even the last turn is too long.
        """
        messages = list(messages)
        while True:
            ids = self.template.encode(messages, add_generation_prompt=True)
            if len(ids) + room <= self.block_size:
                return ids, messages
            first = int(messages[0]['role'] == 'system')
            turns = [i for i, message in enumerate(messages) if message['role'] == 'user' and i > first]
            if not turns:
                raise ValueError(f'the message takes {len(ids)} tokens, but the model sees {self.block_size} '
                                 f'and needs {room} for the answer: shorten the message')
            del messages[first:turns[0]]

    def generate(self, ids, max_new_tokens, temperature, top_k, top_p, generator, stop_ids):
        """Yield the ids that continue a text, without the one of stop_ids that ends it.

        The arguments are those of layers.sampling.generate_tokens. The text ends where the model's context is full.
        """
        n_tokens = min(max_new_tokens, self.block_size - len(ids))
        self._make_room(len(ids) + n_tokens)
        new_ids = ids[self._keep_common(ids):]
        self.reason = 'length'
        for _ in range(n_tokens):
            logits = self._read(new_ids)
            token = int(draw_token(logits, temperature, top_k, top_p, generator))
            if token in stop_ids:
                self.reason = 'stop'
                return
            yield token
            new_ids = [token]

    def decode(self, ids):
        """Yield the text of each of the ids, '' where a character is not complete, and then the rest."""
        text_of = self.tokenizer.text_stream()
        yield from map(text_of, ids)
        yield text_of()

    def _make_room(self, length):
        """Replace the cache by a longer one with the same content if it is shorter than `length` tokens."""
        size = self.cache.size
        if size >= length:
            return
        while size < length:
            size *= 2
        longer = self.model.new_cache(1, size)
        longer.copy_row(0, 0, len(self.read_ids), self.cache)
        self.cache = longer

    def _keep_common(self, ids):
        """Keep of the cache what the text of ids begins with; returns how many of the ids that is."""
        common = len(os.path.commonprefix([self.read_ids, ids[:-1]]))  # the last one gives the next logits
        if common < len(self.read_ids) and not self.cache.can_go_back:
            common = 0  # what the earlier text needs has been replaced by what came later
        del self.read_ids[common:]
        self.cache.lengths.fill_(common)
        return common

    def _read(self, ids):
        """Read ids after those in the cache; returns logits (1, vocab_size) of the next token, in float32."""
        text, device = self.read_ids + ids, self.cache.lengths.device
        if not self.cache.can_go_back:
            self.read_ids = []  # if Ctrl-C comes in between, some layers have lost what others have not
        starts = None
        if self.separator is not None:
            starts = starts_of(torch.tensor([text], device=device), self.separator)[:, -len(ids):]
        idx = torch.tensor([ids], device=device)
        # Only the step of a single token has the shape that compile() compiles.
        forward = self.model if len(ids) == 1 else self.model.forward
        with torch.inference_mode(device.type == 'cpu'), torch.no_grad():
            logits = forward(idx, starts=starts, cache=self.cache)[:, -1].float()
        self.read_ids = text
        return logits
