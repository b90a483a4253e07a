"""What a client of the server asks for, checked, and what it gets, in the forms of OpenAI's protocol."""
import json
import time
import uuid
from dataclasses import dataclass, field

from data.tokens.chat_template import check_messages

USED = {'model', 'max_tokens', 'max_completion_tokens', 'temperature', 'top_p', 'seed', 'stop', 'stream',
        'stream_options', 'n'}
OF_CHAT, OF_TEXT = {'messages', 'tools', 'tool_choice', 'chat_template_kwargs'}, {'prompt'}
# Entries of OpenAI's protocol, and of llama.cpp's, that do not change the text.
HARMLESS = {'user', 'metadata', 'store', 'service_tier', 'prompt_cache_key', 'prompt_cache_retention',
            'prompt_cache_options', 'safety_identifier', 'parallel_tool_calls', 'prediction', 'cache_prompt'}
# Values of all other entries, besides what is empty or False, that say what this server does anyway.
AS_IS = dict(response_format={'type': 'text'}, function_call='none', best_of=1, modalities=['text'],
             verbosity='medium', repetition_penalty=1, repeat_penalty=1)
MAX_STOPS, MAX_STOP_LENGTH = 16, 256
COMPLETION_TOKENS = 16  # of /v1/completions, without max_tokens, as in OpenAI's


class RequestError(ValueError):
    """A request that gets a status and a sentence instead of a text."""

    def __init__(self, status, message, code=None):
        super().__init__(message)
        self.status, self.code = status, code

    def body(self):
        kind = 'server_error' if self.status >= 500 else 'invalid_request_error'
        return dict(error=dict(message=str(self), type=kind, param=None, code=self.code))


@dataclass
class TextRequest:
    """A text that a client asks for: messages to answer, or a prompt (a text, or ids) to continue."""
    model: str
    messages: list | None
    prompt: str | list | None
    max_tokens: int
    temperature: float
    top_p: float
    seed: int | None
    stop: list
    is_streamed: bool
    wants_usage: bool  # at the end of a stream
    more: dict  # variables of the chat template, such as tools
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    created: int = field(default_factory=lambda: int(time.time()))

    def full(self, text, reason, usage):
        """The body of an answer that comes as a whole."""
        content = dict(text=text)
        if self.messages is not None:
            content = dict(message=dict(role='assistant', content=text))
        return self._body(content | dict(finish_reason=reason)) | dict(usage=usage)

    def chunk(self, text, reason=None, is_first=False):
        """The body of a part of a stream."""
        content = dict(text=text)
        if self.messages is not None:
            delta = dict(role='assistant') if is_first else {}
            content = dict(delta=delta | (dict(content=text) if text else {}))
        return self._body(content | dict(finish_reason=reason), is_chunk=True)

    def last_chunk(self, usage):
        """The body that ends a stream if the client wants to know the numbers of tokens."""
        return self._body(None, is_chunk=True) | dict(usage=usage)

    def _body(self, choice, is_chunk=False):
        is_chat = self.messages is not None
        kind = ('chat.completion.chunk' if is_chunk else 'chat.completion') if is_chat else 'text_completion'
        choices = [] if choice is None else [dict(index=0, logprobs=None) | choice]
        return dict(id=('chatcmpl-' if is_chat else 'cmpl-') + self.id, object=kind, created=self.created,
                    model=self.model, choices=choices)


def parse(body, is_chat, model, defaults):
    """The TextRequest of a body, bytes of JSON. RequestError, in one sentence, if the body is not one.

    model: the name of the only model. defaults: dict of max_tokens, temperature and top_p.
    """
    try:
        content = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise RequestError(400, f'the body is not JSON ({error})') from None
    if not isinstance(content, dict):
        raise RequestError(400, 'the body is not a JSON object')
    content = {key: value for key, value in content.items() if value is not None}
    check_model(content.get('model', model), model)
    used = USED | (OF_CHAT if is_chat else OF_TEXT)
    for key in sorted(content.keys() - used - HARMLESS):
        wants_figures = key == 'logprobs' and not is_chat and content[key] is not False  # 0: of the drawn tokens alone
        if content[key] and content[key] != AS_IS.get(key) or wants_figures:
            raise RequestError(400, f'{key} is not supported: leave it out')
    options = content.get('stream_options', {})
    max_tokens = content.get('max_completion_tokens', content.get('max_tokens'))
    if max_tokens is None:
        max_tokens = defaults['max_tokens'] if is_chat else COMPLETION_TOKENS
    request = TextRequest(
        model=model, messages=read_messages(content) if is_chat else None,
        prompt=None if is_chat else read_prompt(content), max_tokens=max_tokens,
        temperature=content.get('temperature', defaults['temperature']),
        top_p=content.get('top_p', defaults['top_p']), seed=content.get('seed'),
        stop=read_stops(content.get('stop', [])), is_streamed=content.get('stream', False),
        wants_usage=isinstance(options, dict) and options.get('include_usage') is True,
        more=read_more(content) if is_chat else {})
    check('n', content.get('n', 1) == 1, content.get('n'), '1: one text for each request')
    check('max_tokens', is_int(max_tokens) and max_tokens >= 1, max_tokens, 'an integer of at least 1')
    check('temperature', is_number(request.temperature) and 0 <= request.temperature <= 2,
          request.temperature, 'a number from 0 to 2')
    check('top_p', is_number(request.top_p) and 0 < request.top_p <= 1, request.top_p,
          'a number above 0 and at most 1')
    check('seed', request.seed is None or is_int(request.seed) and abs(request.seed) < 2 ** 63, request.seed,
          'an integer of 64 bits')
    check('stream', isinstance(request.is_streamed, bool), request.is_streamed, 'true or false')
    return request


def check_model(wanted, model):
    """RequestError unless a client wants the only model."""
    if wanted != model:
        raise RequestError(404, f'the model {wanted!r} is not here: the only model is {model!r} (--served_name)',
                           'model_not_found')


def read_messages(content):
    """The messages of a body; a content in parts, of which each is a text, as one text."""
    messages = content.get('messages')
    for message in messages if isinstance(messages, list) else []:
        parts = message.get('content') if isinstance(message, dict) else None
        if isinstance(parts, list):
            texts = [part.get('text') if isinstance(part, dict) else None for part in parts]
            if not all(isinstance(text, str) for text in texts):
                raise RequestError(400, 'a content in parts has a part that is not a text')
            message['content'] = ''.join(texts)
        for call in (message.get('tool_calls') or [] if isinstance(message, dict) else []):
            read_arguments(call)
    try:
        return check_messages(messages)
    except ValueError as error:
        raise RequestError(400, str(error)) from None


def read_arguments(call):
    """Make a dict of a call's arguments, which are JSON in OpenAI's protocol, and a dict in chat templates."""
    function = call.get('function') if isinstance(call, dict) else None
    if isinstance(function, dict) and isinstance(function.get('arguments'), str):
        try:
            function['arguments'] = json.loads(function['arguments'])
        except ValueError:
            raise RequestError(400, f'the arguments of a tool call are no JSON: {function["arguments"]!r:.60}') from None


def read_more(content):
    """The variables that a body gives to the chat template: `tools`, and what chat_template_kwargs has."""
    more, tools = content.get('chat_template_kwargs', {}), content.get('tools', [])
    check('chat_template_kwargs', isinstance(more, dict), more, 'an object')
    check('tools', isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools), tools, 'a list of objects')
    choice = content.get('tool_choice', 'auto')
    check('tool_choice', choice in ('auto', 'none'), choice, 'auto or none: the model decides')
    return more | (dict(tools=tools) if tools and choice == 'auto' else {})


def read_prompt(content):
    """The prompt of a body: a text, or a list of ids. A list with one of them is this one."""
    prompt = content.get('prompt', '')
    if isinstance(prompt, list) and len(prompt) == 1 and not is_int(prompt[0]):
        prompt = prompt[0]
    is_ids = isinstance(prompt, list) and all(is_int(token) for token in prompt)
    check('prompt', isinstance(prompt, str) or is_ids, prompt, 'one text, or one list of token ids')
    return prompt


def read_stops(stops):
    """The list of texts that end the answer."""
    stops = [stops] if isinstance(stops, str) else stops
    is_right = isinstance(stops, list) and len(stops) <= MAX_STOPS
    is_right = is_right and all(isinstance(stop, str) and 0 < len(stop) <= MAX_STOP_LENGTH for stop in stops)
    check('stop', is_right, stops, f'up to {MAX_STOPS} texts of 1 to {MAX_STOP_LENGTH} characters')
    return stops


def check(key, is_right, value, allowed):
    if not is_right:
        value = repr(value)
        value = value if len(value) <= 80 else f'{value[:80]}...'
        raise RequestError(400, f'{key} is {value}: it must be {allowed}')


def is_int(value):
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value):
    return is_int(value) or isinstance(value, float)


class CutAtStops:
    """Takes a text in pieces, up to the first of the stops. is_over: whether there was one."""

    def __init__(self, stops):
        self.stops, self.held, self.is_over = stops, '', False

    def add(self, piece, is_last=False):
        """What the text so far certainly goes on with; what may be the beginning of a stop waits for more."""
        if self.is_over:
            return ''
        self.held += piece
        places = [self.held.find(stop) for stop in self.stops if stop in self.held]
        self.is_over = bool(places)
        end = len(self.held)
        if places:
            end = min(places)
        elif not is_last:
            end -= max((begun_length(self.held, stop) for stop in self.stops), default=0)
        text, self.held = self.held[:end], self.held[end:]
        return text


def begun_length(text, stop):
    """The length of the longest beginning of stop with which the text ends."""
    return next((length for length in range(len(stop) - 1, 0, -1) if text.endswith(stop[:length])), 0)
