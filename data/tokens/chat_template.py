"""The chat template that comes with a tokenizer: a conversation as text, as tokens, and which of these count.

A conversation is a list of messages {'role': ..., 'content': ...}, with `tool_calls` and other entries that a
template may read. A template is a program in Jinja, which runs in Jinja's sandbox, with the variables, filters and
extensions of Hugging Face's apply_chat_template.
"""
import datetime
import functools
import json
import os
import re

from data.tokens.special_tokens import read_json, roles_of

MAX_STEPS = 2 ** 20  # rounds of loops and calls in one rendering; a template with more is taken not to end
ROLES = 'system', 'user', 'assistant', 'tool', 'developer', 'function'  # of OpenAI's protocol
MAX_LENGTH = 2 ** 26  # characters of a rendered conversation
# Entries by which trainers say whether a message is learnt: OpenAI, axolotl (two), LLaMA-Factory and ms-swift.
LEARNT = 'weight', 'train', 'training', 'loss'
# Characters that Unicode reserves for the inside of programs. The first two enclose what looks like a special
# token within a message, the others what {% generation %} marks.
TEXT, END_TEXT, ANSWER, END_ANSWER = MARKS = '\ufdd0\ufdd1\ufdd2\ufdd3'

# For tokenizers without a template. Without an end-of-text token, a newline ends a message.
DEFAULT_TEMPLATE = """
{%- for message in messages %}
    {%- if message.role not in ('system', 'user', 'assistant') %}
        {{- raise_exception('the role ' ~ message.role ~ ' is not system, user or assistant') }}
    {%- endif %}
    {{- message.role | capitalize ~ ': ' }}
    {{- message.content if eos_token else message.content.split() | join(' ') }}
    {{- (eos_token if message.role == 'assistant' else '') ~ '\n' }}
{%- endfor %}
{{- 'Assistant:' if add_generation_prompt else '' }}"""


class WrittenAgain(ValueError):
    """A template writes a message differently once others follow."""


class ChatTemplate:
    """The chat template of a Tokenizer; DEFAULT_TEMPLATE if it does not come with one.

    Its methods raise ValueError, in one sentence, for messages that are not well-formed, for those that the
    template refuses, and for a template that fails or does not end.
    """

    def __init__(self, tokenizer):
        if not tokenizer.name:
            raise ValueError('the tokenizer is not known, but a conversation needs text: set tokenizer')
        self.tokenizer = tokenizer
        self.source = source = find_template(tokenizer.files)
        self.where = f'the chat template in {tokenizer.folder}' if source else 'the default chat template'
        self.variables = roles_of(tokenizer.files)
        if not source and tokenizer.eot is not None:
            self.variables['eos_token'] = _text_of(tokenizer, tokenizer.eot)
        self.environment, self.template = _compile(source or DEFAULT_TEMPLATE, self.where)
        self.has_marks = bool(re.search(r'\{%-?\s*generation\s*-?%\}', source or ''))
        special = {_text_of(tokenizer, i) for i in tokenizer.special_ids} - {''}
        longest_first = sorted(special, key=len, reverse=True)
        special = '|'.join(map(re.escape, longest_first)) or '(?!)'  # which matches nothing
        self.to_mark = re.compile(f'({special})|[{MARKS}]')
        self.marked = re.compile(f'{TEXT}({special}){END_TEXT}')

    def render(self, messages, add_generation_prompt=False, more=None):
        """The text of a conversation. add_generation_prompt: end with what begins an answer.

        more: variables of the template beside the messages, such as a list of `tools`.
        """
        text = self._render(messages, add_generation_prompt, more)
        return re.sub(f'[{MARKS}]', '', text)

    def encode(self, messages, add_generation_prompt=False, more=None):
        """The ids of a conversation. What looks like a special token within a message is ordinary text.

        In an answer, which is the model's own or training data, these are those that end answers alone: a thought
        between special tokens keeps them.
        """
        return self._encode(self._render(messages, add_generation_prompt, more))[0]

    def documents(self, messages, roles=('assistant',), more=None):
        """[(ids, counted)] as in `tokens_and_counted`: the conversation, or one for each of its answers.

        If a template writes an answer differently once others follow (Qwen3's leaves its thoughts out), each
        answer is the end of a document of its own, whose text is what the model would read and write there.
        """
        try:
            return [self.tokens_and_counted(messages, roles, more=more)]
        except WrittenAgain:
            return [self.tokens_and_counted(messages[:i + 1], roles, first=i, more=more)
                    for i, message in enumerate(messages) if message['role'] in roles and is_learnt(message)]

    def tokens_and_counted(self, messages, roles=('assistant',), first=0, more=None):
        """(ids, counted): counted says of each token whether it is of an answer, or is the one that ends it.

        If the template marks answers by {% generation %}, those tokens are counted. Otherwise an answer is
        what the text has beyond that of the messages before it with the generation prompt, up to the first
        of stop_ids.
        roles: those whose messages are counted, from number `first` on, unless they say otherwise (LEARNT). Other
        messages than answers are counted with their header. more: as in `render`. Raises WrittenAgain if the end of
        an answer cannot be found.
        """
        roles = tuple(roles)
        for i, message in enumerate(check_messages(messages)):
            if not self._knows(message['role'], roles):
                raise ValueError(f'message {i} has the role {message["role"]!r}, which {self.where} does not name: '
                                 'correct it, or set roles to have it among those that are counted')
            if message['role'] in roles and not ((message.get('content') or '').strip() or message.get('tool_calls')):
                raise ValueError(f'message {i}, of the role {message["role"]}, is empty: leave it out')
        text = self._render(messages, more=more)
        ids, places, marked = self._encode(text)
        if self.has_marks and roles == ('assistant',):
            answers = [message for message in messages if message['role'] == 'assistant']
            if len(marked) == len(answers):
                marked = [span for span, message in zip(marked, answers) if is_learnt(message)]
            elif not all(map(is_learnt, answers)):
                raise ValueError(f'{self.where} marks {len(marked)} answers of {len(answers)}, so that single ones '
                                 f'cannot be left out: leave {", ".join(LEARNT)} out')
            return ids, [_overlaps(place, marked) for place in places]
        counted = [False] * len(ids)
        text = re.sub(f'[{MARKS}]', '', text)
        for i, message in enumerate(messages):
            if message['role'] not in roles or i < first or not is_learnt(message):
                continue
            span, is_whole = self._span_of(messages, i, text, more)
            inside = [j for j, place in enumerate(places) if _overlaps(place, [span])]
            end = next((j for j in inside if ids[j] in self.stop_ids), None)
            if end is None and not is_whole:
                raise WrittenAgain(f'{self.where} writes message {i} differently when others follow')
            for j in inside:
                counted[j] = end is None or j <= end
            after = inside[-1] + 1 if end is None and inside else len(ids) + 1
            if after < len(ids):  # the mark of the next message, if it ends an answer, as in GLM-4.5's template
                counted[after] = ids[after] in self.stop_ids
            elif after == len(ids) and self.next_mark is not None:
                ids, counted, places = [*ids, self.next_mark], [*counted, True], [*places, (len(text), len(text))]
        return ids, counted

    def _knows(self, role, roles):
        """Whether a role is a usual one, or one of `roles`, or named by the template.

        Templates such as ChatML write any role, also one with an error in it. The default template refuses it.
        """
        return not self.source or role in ROLES + roles or self.reads(role)

    def reads(self, variable):
        """Whether the template has a variable of that name."""
        return bool(re.search(rf'\b{re.escape(variable)}\b', self.source or ''))

    @functools.cached_property
    def stop_ids(self):
        """The ids that end an answer: those of generation_config.json, end-of-text, and the end of a turn."""
        found = set(self.tokenizer.end_ids)
        probe = [dict(role='user', content='question'), dict(role='assistant', content='answer')]
        try:
            text = self.render(probe)
            ids, places, _ = self._encode(text)
        except ValueError:  # a template that wants other messages, or an alphabet without these letters
            text, ids, places = '', [], []
        after = [i for i, (start, _) in zip(ids, places) if start >= text.rfind('answer')]
        found.add(next((i for i in after if i in self.tokenizer.special_ids), None))
        found.discard(None)
        if not found and text.endswith('\n'):
            found.add(ids[-1])
        return frozenset(found)

    @functools.cached_property
    def endings(self):
        """The texts of stop_ids."""
        return {_text_of(self.tokenizer, i) for i in self.stop_ids}

    @functools.cached_property
    def next_mark(self):
        """The id that begins the message after an answer, if it ends answers and nothing in them does; else None."""
        probe = [dict(role='user', content='question'), dict(role='assistant', content='answer')]
        try:
            before, text = self.render(probe), self.render([*probe, dict(role='user', content='more')])
            ids, places, _ = self._encode(text)
        except ValueError:
            return None
        if not text.startswith(before) or not before.endswith('answer'):
            return None
        following = next((i for i, (start, _) in zip(ids, places) if start >= len(before)), None)
        return following if following in self.stop_ids else None

    def _span_of(self, messages, i, text, more):
        """(start, end) of message i in the text, and whether it ends there without later messages too.

        Otherwise the end is where the text without later messages becomes another one.
        """
        is_answer = messages[i]['role'] == 'assistant'
        if is_answer and i == 0:
            raise ValueError('message 0 is an answer, but no message comes before it: leave it out')
        before = self.render(messages[:i], is_answer, more) if i else ''
        until = self.render(messages[:i + 1], more=more)
        if not (text.startswith(before) and until.startswith(before)):
            raise ValueError(f'{self.where} writes what comes before message {i} differently without it: '
                             'mark its answers by {% generation %} and {% endgeneration %}, or leave out the '
                             'system message if it moves')
        end = len(until) if text.startswith(until) else len(os.path.commonprefix([text, until]))
        return (len(before), end), end == len(until)

    def _render(self, messages, add_generation_prompt=False, more=None):
        """The text of a conversation with MARKS in it."""
        import jinja2
        marked = []
        for message in check_messages(messages):
            mark = self._mark_answer if message['role'] == 'assistant' else self._mark
            marked.append({key: each_text(value, mark) for key, value in message.items() if value is not None})
        variables = dict(tools=None, documents=None) | self.variables | each_text(more or {}, self._mark)
        self.environment.steps, length, pieces = 0, 0, []
        try:
            for piece in self.template.generate(
                    **variables | dict(messages=marked, add_generation_prompt=add_generation_prompt)):
                pieces.append(piece)
                length += len(piece)
                if length > MAX_LENGTH:
                    raise ValueError(f'it writes more than {MAX_LENGTH:,} characters')
        except jinja2.TemplateError as error:
            raise ValueError(f'{self.where} refuses these messages: {error}') from None
        except Exception as error:  # whatever else a program that comes with weights can raise
            raise ValueError(f'{self.where} fails: {error}') from None
        return ''.join(pieces).encode(errors='replace').decode()  # JSON can carry lone surrogates

    def _mark(self, value):
        """A text of a message or tool, with what looks like a special token enclosed in TEXT and END_TEXT."""
        return self.to_mark.sub(lambda match: f'{TEXT}{match[1]}{END_TEXT}' if match[1] else '', value)

    def _mark_answer(self, value):
        """The same for a text of an answer: of special tokens, those that end answers."""
        if not self.to_mark.search(value):
            return value  # the probes of stop_ids are such answers
        return self.to_mark.sub(
            lambda match: f'{TEXT}{match[1]}{END_TEXT}' if match[1] in self.endings else match[1] or '', value)

    def _encode(self, text):
        """(ids, [(start, end)] of the ids in the text, [(start, end)] of the answers) of a text with MARKS.

        Places are counted in the text without MARKS.
        """
        answers, plain = [], ''
        for part in re.split(f'([{ANSWER}{END_ANSWER}])', text):
            place = sum(character not in MARKS for character in plain)
            if part == ANSWER:
                start = place
            elif part == END_ANSWER:
                answers.append((start, place))
            else:
                plain += part
        ids, places, offset = [], [], 0
        for number, piece in enumerate(self.marked.split(plain)):
            piece = re.sub(f'[{MARKS}]', '', piece)  # a template that cuts a text can leave one
            new_ids, new_places = self._encode_piece(piece, is_first=not ids, is_text=number % 2 == 1)
            ids += new_ids
            places += [(start + offset, end + offset) for start, end in new_places]
            offset += len(piece)
        return ids, places, answers

    def _encode_piece(self, piece, is_first, is_text):
        """(ids, places) of a part of a text. is_text: special tokens in the piece are ordinary text."""
        if not is_first and piece:
            # SentencePiece puts a space before a text. After a newline it does not.
            newline = self.tokenizer.encode_places('\n', is_text)[0]
            ids, places = self.tokenizer.encode_places(f'\n{piece}', is_text)
            if ids[:len(newline)] == newline:
                return ids[len(newline):], [(start - 1, end - 1) for start, end in places[len(newline):]]
        return self.tokenizer.encode_places(piece, is_text)


def find_template(files):
    """The chat template of a tokenizer's files: chat_template.jinja, or an entry of tokenizer_config.json."""
    template = read_json(files, 'tokenizer_config.json').get('chat_template')
    if isinstance(template, list) and template and 'chat_template.jinja' not in files:  # several with names
        named = {entry['name']: entry['template'] for entry in template}
        if 'default' not in named:
            raise ValueError(f'tokenizer_config.json has the chat templates {", ".join(named)}, of which none is called '
                             'default: rename the one that is meant, or save it as chat_template.jinja')
        template = named['default']
    return files.get('chat_template.jinja') or template or None


def is_learnt(message):
    """Whether the entries LEARNT of a message allow to learn it. ValueError if they are neither 0 nor 1."""
    for key in LEARNT:
        if message.get(key) not in (None, 0, 1):
            raise ValueError(f'a message of the role {message["role"]} has the {key} {message[key]!r}: it must be 1 or '
                             '0, true or false')
    return all(message.get(key) in (None, 1) for key in LEARNT)


def check_messages(messages):
    """Return the messages. ValueError if they are not a list of dicts with the texts `role` and `content`.

    A message with `tool_calls` may be without content.
    """
    if not isinstance(messages, (list, tuple)) or not messages:
        raise ValueError(f'messages is {_shorten(messages)}: it must be a list of at least one '
                         '{"role": ..., "content": ...}')
    for i, message in enumerate(messages):
        entries = [message.get(key) for key in ('role', 'content')] if isinstance(message, dict) else [None]
        if entries[-1] is None and entries[0] and message.get('tool_calls'):
            entries[-1] = ''
        if not all(isinstance(entry, str) for entry in entries):
            raise ValueError(f'message {i} is {_shorten(message)}: it must be '
                             '{"role": ..., "content": ...} with two texts')
    return messages


def _compile(source, where):
    """(environment, template) of a template's text. `environment.steps` counts rounds of loops and calls."""
    import jinja2
    import jinja2.ext
    import jinja2.sandbox

    class Environment(jinja2.sandbox.ImmutableSandboxedEnvironment):
        steps = 0

        def count(self, steps):
            self.steps += steps
            if self.steps > MAX_STEPS:
                raise ValueError(f'it takes more than {MAX_STEPS:,} steps')

        def call(self, context, function, *args, **kwargs):
            self.count(1)
            return super().call(context, function, *args, **kwargs)

    class Generation(jinja2.ext.Extension):
        """{% generation %} ... {% endgeneration %}, which encloses an answer in ANSWER and END_ANSWER."""
        tags = {'generation'}

        def parse(self, parser):
            line = next(parser.stream).lineno
            body = parser.parse_statements(('name:endgeneration',), drop_needle=True)
            return jinja2.nodes.CallBlock(self.call_method('enclose'), [], [], body).set_lineno(line)

        def enclose(self, caller):
            return f'{ANSWER}{caller()}{END_ANSWER}'

    def counted(items):
        items = list(items)
        environment.count(len(items))
        return items

    def raise_exception(message):
        raise jinja2.TemplateError(message)

    def to_json(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
        # Jinja's own filter escapes characters of HTML.
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators,
                          sort_keys=sort_keys)

    environment = Environment(trim_blocks=True, lstrip_blocks=True,
                              extensions=[Generation, 'jinja2.ext.loopcontrols'])
    environment.filters |= dict(tojson=to_json, counted=counted)
    environment.globals |= dict(raise_exception=raise_exception,
                                strftime_now=lambda form: datetime.datetime.now().strftime(form))
    try:
        tree = environment.parse(source)
        for loop in tree.find_all(jinja2.nodes.For):
            loop.iter = jinja2.nodes.Filter(loop.iter, 'counted', [], [], None, None)
        return environment, environment.from_string(tree)
    except jinja2.TemplateSyntaxError as error:
        raise ValueError(f'{where} is not valid Jinja (line {error.lineno}: {error.message})') from None


def each_text(value, change):
    """A value of JSON with change(text) in place of each text in it, but for names of entries."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {key: each_text(inner, change) for key, inner in value.items()}
    return [each_text(inner, change) for inner in value] if isinstance(value, list) else value


def _text_of(tokenizer, token):
    return tokenizer.decode_bytes([token]).decode()


def _overlaps(place, spans):
    """Whether a place (start, end) has characters of a span."""
    return any(place[0] < end and place[1] > start for start, end in spans)


def _shorten(value):
    text = repr(value)
    return text if len(text) <= 80 else f'{text[:80]}...'
