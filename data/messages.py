"""Conversations in files, and their tokens: which belong to answers, and where a conversation begins.

The forms of a line, of which the first that fits counts:

    {"messages": [{"role": "user", "content": ...}, {"role": "assistant", "content": ...}, ...]}
    {"conversations": [{"from": "human", "value": ...}, {"from": "gpt", "value": ...}, ...]}    ShareGPT's
    {"prompt": ..., "completion": ...}    texts, or lists of messages
    {"instruction": ..., "input": ..., "output": ...}    Alpaca's; `input` may be empty or missing
"""
import hashlib
import itertools
import json

import numpy as np

from data.tokenizer_base import Tokenizer
from data.chat_template import ChatTemplate
from data.flags import flag_document
from data.readers import read_rows

SHAREGPT_ROLES = dict(human='user', gpt='assistant', system='system', user='user', assistant='assistant')


def to_messages(row):
    """The messages of a row in one of the forms; ValueError if it has none of them."""
    if 'messages' in row:
        return row['messages']
    if 'conversations' in row:
        turns = row['conversations']
        if not isinstance(turns, list) or not all(
                isinstance(turn, dict) and turn.get('from') in SHAREGPT_ROLES for turn in turns):
            raise ValueError(f'conversations must be a list of {{"from": ..., "value": ...}}, from one of '
                             f'{", ".join(SHAREGPT_ROLES)}')
        return [dict(role=SHAREGPT_ROLES[turn['from']], content=turn.get('value')) for turn in turns]
    if 'prompt' in row and 'completion' in row:
        prompt, completion = row['prompt'], row['completion']
        if isinstance(prompt, list) and isinstance(completion, list):
            return prompt + completion
        return [dict(role='user', content=prompt), dict(role='assistant', content=completion)]
    if 'instruction' in row and 'output' in row:
        request = f'{row["instruction"]}\n\n{row["input"]}' if row.get('input') else row['instruction']
        return [dict(role='user', content=request), dict(role='assistant', content=row['output'])]
    raise ValueError(f'no conversation, only {", ".join(row) or "nothing"}: give messages, conversations, prompt '
                     'and completion, or instruction and output')


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
            messages = to_messages(row)
        except ValueError as error:
            raise ValueError(f'{place} has {error}') from None
        yield dict(place=place, messages=messages)


class ConversationEncoder(Tokenizer):
    """Encodes what conversation_splits reads, with the flags of data.flags. Otherwise as its tokenizer.

    roles: those whose messages are targets, separated by commas.
    """

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
            documents = self.template.documents(conversation['messages'], self.roles)
        except ValueError as error:
            raise ValueError(f'{conversation["place"]}: {error}') from None
        if not any(any(counted) for _, counted in documents):
            raise ValueError(f'{conversation["place"]} has no message of {", ".join(self.roles)}: leave it out, or '
                             'set roles')
        return np.concatenate([flag_document(ids, counted) for ids, counted in documents])

    def __getstate__(self):  # a template is not for other processes
        return dict(tokenizer=self.tokenizer, roles=self.roles)

    def __setstate__(self, state):
        self.__init__(state['tokenizer'], ','.join(state['roles']))
