"""The turns of a conversation: what of it the model sees, and its answers."""
from kilogpt.generate.engine import Request


class Conversation:
    """A model that answers. reason: why the last answer ended, as in Request.

    A turn usually continues the text of the last one, which the engine then does not read again.
    """

    def __init__(self, engine, template):
        """engine: an Engine. template: a ChatTemplate."""
        self.engine, self.template, self.tokenizer = engine, template, template.tokenizer
        self.block_size = engine.block_size
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

    def generate(self, ids, max_new_tokens, temperature, top_k, top_p, seed):
        """Yield the ids that continue a text, without the one that ends it. The other arguments are a Request's.

        The text ends where the model's context is full.
        """
        request = Request(ids, min(max_new_tokens, self.block_size - len(ids)), temperature, top_k, top_p,
                          self.template.stop_ids, seed=seed)
        for token in self.engine.generate(request):
            if token not in request.stop_ids:
                yield token
        self.reason = request.reason

    def decode(self, ids):
        """Yield the text of each of the ids, '' where a character is not complete, and then the rest."""
        text_of = self.tokenizer.text_stream()
        yield from map(text_of, ids)
        yield text_of()
