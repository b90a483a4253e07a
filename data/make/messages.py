"""Conversations in files, and their tokens: which belong to answers, and where a conversation begins.

The forms of a line, of which the first that fits counts:

    {"messages": [{"role": "user", "content": ...}, {"role": "assistant", "content": ...}, ...]}
    {"conversations": [{"from": "human", "value": ...}, {"from": "gpt", "value": ...}, ...]}    ShareGPT's; any list
                                                            of messages may be written like this
    {"prompt": ..., "completion": ...}    texts, or lists of messages
    {"instruction": ..., "input": ..., "output": ...}    Alpaca's; `input` may be empty or missing

Each may have `tools` (a list, or its JSON), `system` (a text), `history` (pairs of texts) and `chat_template_kwargs`.
"""
import functools
import hashlib
import itertools
import json
import sys

import numpy as np

from data.flags import flag_document
from data.make.readers import read_rows
from data.tokens import Tokenizer
from data.tokens.chat_template import ChatTemplate

SHAREGPT_ROLES = dict(human='user', gpt='assistant', system='system', user='user', assistant='assistant',
                      tool='tool', observation='tool')
# Fields of a row that are used, and those that describe a row without changing what is trained.
USED = {'messages', 'conversations', 'prompt', 'completion', 'instruction', 'input', 'output', 'chosen', 'rejected',
        'tools', 'system', 'history', 'chat_template_kwargs'}
DESCRIBE = {'id', 'idx', 'index', 'uuid', 'conversation_id', 'prompt_id', 'source', 'dataset', 'split', 'origin',
            'category', 'domain', 'topic', 'task', 'type', 'tags', 'difficulty', 'language', 'lang', 'model', 'score',
            'score_chosen', 'score_rejected', 'rating', 'quality', 'license', 'url', 'title', 'timestamp', 'created',
            'date', 'hash', 'metadata', 'meta', 'text', 'num_tokens', 'num_turns'}


def to_messages(row):
    """The messages of a row in one of the forms, its `system` and `history` included; ValueError if it has none."""
    messages = _turns_of(row)
    history = [dict(role=role, content=text) for turns in row.get('history') or ()
               for role, text in zip(('user', 'assistant'), turns)]
    return with_system(row, history + messages if history else messages)


def with_system(row, messages):
    """The messages of a row after its `system` text, if it has one and they do not begin with another."""
    if row.get('system') and isinstance(messages, list) and messages[:1] and messages[0].get('role') != 'system':
        return [dict(role='system', content=row['system']), *messages]
    return messages


def more_of(row):
    """{variable of the template: value} of a row beside its messages: `tools`, and what chat_template_kwargs has."""
    found = {}
    for field, kind in (('chat_template_kwargs', dict), ('tools', list)):
        value = row.get(field)
        if isinstance(value, str):  # as some datasets have it, since tools have no common schema
            try:
                value = json.loads(value) if value.strip() else None
            except ValueError:
                raise ValueError(f'{field} that are no JSON: {value[:40]!r}') from None
        if value is not None and not isinstance(value, kind):
            raise ValueError(f'{field} that are {value!r:.60}: they must be a {kind.__name__}')
        found |= (dict(tools=value) if field == 'tools' else value) if value else {}
    return found


def name_unused_fields(path, row):
    """Print once for a file which fields of unknown meaning its rows have."""
    for field in row.keys() - USED - DESCRIBE:
        _say_unused(path, field)


@functools.cache
def _say_unused(path, field):
    print(f'{path}: the field {field!r} of its rows is not used', file=sys.stderr, flush=True)


def _turns_of(row):
    for key in ('messages', 'conversations'):
        if key in row:
            return renamed_turns(row[key])
    if 'prompt' in row and 'completion' in row:
        prompt, completion = row['prompt'], row['completion']
        if isinstance(prompt, list) and isinstance(completion, list):
            return renamed_turns(prompt + completion)
        return [dict(role='user', content=prompt), dict(role='assistant', content=completion)]
    if 'instruction' in row and 'output' in row:
        request = f'{row["instruction"]}\n\n{row["input"]}' if row.get('input') else row['instruction']
        return [dict(role='user', content=request), dict(role='assistant', content=row['output'])]
    raise ValueError(f'no conversation, only {", ".join(row) or "nothing"}: give messages, conversations, prompt '
                     'and completion, or instruction and output')


def renamed_turns(turns):
    """Turns with `role` and `content` in place of ShareGPT's `from` and `value`. ValueError for a role it does not know."""
    if not isinstance(turns, list):
        return turns
    found = []
    for turn in turns:
        if isinstance(turn, dict) and 'from' in turn:
            if turn['from'] not in SHAREGPT_ROLES:
                raise ValueError(f'a turn from {turn["from"]!r}: it must be from one of {", ".join(SHAREGPT_ROLES)}')
            others = {key: value for key, value in turn.items() if key not in ('from', 'value')}
            turn = dict(role=SHAREGPT_ROLES[turn['from']], content=turn.get('value')) | others
        found.append(turn)
    return found


def conversation_splits(paths, val_fraction, read_file=None):
    """The splits of write_dataset: {'val': read, 'train': read}, of which val is missing if val_fraction is 0.

    read_file: what reads a file, `read_conversations` by default. What it yields is drawn by its `messages`.
    """
    def reader(is_val):
        def read(start):
            conversations = itertools.chain.from_iterable(map(read_file or read_conversations, paths))
            of_split = (each for each in conversations if _is_val(each['messages'], val_fraction) == is_val)
            for conversation in itertools.islice(of_split, start, None):
                yield json.dumps(conversation), True
        return read
    return {'val': reader(True), 'train': reader(False)} if val_fraction else {'train': reader(False)}


def _is_val(messages, val_fraction):
    digest = hashlib.blake2b(json.dumps(messages).encode(), digest_size=4).digest()
    return int.from_bytes(digest) < val_fraction * 2 ** 32


def read_conversations(path):
    """Yield each conversation of a file: a dict of its `messages`, and of its `place` for an error."""
    for number, row in enumerate(read_rows(path), 1):
        place = f'{path}, conversation {number}'
        try:
            messages, more = to_messages(row), more_of(row)
        except ValueError as error:
            raise ValueError(f'{place} has {error}') from None
        name_unused_fields(path, row)
        yield dict(place=place, messages=messages, more=more)


class ConversationEncoder(Tokenizer):
    """Encodes what conversation_splits reads, with the flags of data.flags. Otherwise as its tokenizer.

    roles: those whose messages are targets, separated by commas.
    """
    document_end = []  # flags say where a conversation begins

    def __init__(self, tokenizer, roles):
        self.tokenizer = tokenizer
        self.roles = [role.strip() for role in roles.split(',') if role.strip()]
        self.template = ChatTemplate(tokenizer)
        if not self.roles:
            raise ValueError(f'roles is {roles!r}: name at least one, such as assistant')

    @property
    def files(self):
        return self.tokenizer.files

    def meta(self):
        return self.tokenizer.meta() | dict(dtype='uint32', flags=True, roles=','.join(self.roles))

    def bytes_of_tokens(self):
        return self.tokenizer.bytes_of_tokens()

    def encode_to_numpy(self, text):
        conversation = json.loads(text)
        try:
            documents = self.template.documents(conversation['messages'], self.roles, conversation.get('more'))
        except ValueError as error:
            raise ValueError(f'{conversation["place"]}: {error}') from None
        if not any(any(counted) for _, counted in documents):
            raise ValueError(f'{conversation["place"]} has no message of {", ".join(self.roles)} that is learnt: leave '
                             'it out, or set roles')
        return np.concatenate([flag_document(ids, counted) for ids, counted in documents])

    def __getstate__(self):  # a template is not for other processes
        return dict(tokenizer=self.tokenizer, roles=self.roles)

    def __setstate__(self, state):
        self.__init__(state['tokenizer'], ','.join(state['roles']))
