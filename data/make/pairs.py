"""Pairs of answers in files, of which one is preferred, and their tokens: two documents, the chosen one first.

The forms of a line, in which an answer is a text or a list of messages:

    {"prompt": ..., "chosen": ..., "rejected": ...}    prompt: a text or a list of messages
    {"chosen": [...], "rejected": [...]}    whole conversations that begin alike, with or without "prompt"
    {"chosen": "\\n\\nHuman: ...\\n\\nAssistant: ...", "rejected": ...}    the same as texts, as HH-RLHF has them
"""
import itertools
import json
import os
import re

import numpy as np

from data.flags import REJECTED, flag_document
from data.make.messages import ConversationEncoder, more_of, name_unused_fields, renamed_turns, with_system
from data.make.readers import read_rows
from data.tokens.chat_template import check_messages

HH_TURN = re.compile(r'\n\n(Human|Assistant):')
HH_ROLES = dict(Human='user', Assistant='assistant')
TEXTS = 'role', 'content', 'tool_calls', 'name', 'tool_call_id', 'reasoning_content', 'thinking'  # of a message


def to_pair(row):
    """(prompt, chosen, rejected), three lists of messages, of a row; ValueError if it has none of the forms."""
    missing = [key for key in ('chosen', 'rejected') if key not in row]
    if missing:
        raise ValueError(f'it has no {" and no ".join(missing)}, only {", ".join(row) or "nothing"}: give prompt, '
                         'chosen and rejected')
    prompt = row.get('prompt') or []
    if isinstance(prompt, str):
        prompt = [dict(role='user', content=prompt)]
    chosen, rejected = (_conversation(row[key], _plain(prompt), key) for key in ('chosen', 'rejected'))
    both = zip(chosen, rejected)
    shared = [message for message, _ in itertools.takewhile(lambda pair: pair[0] == pair[1], both)]
    if chosen == rejected:
        raise ValueError('chosen and rejected are the same: leave the pair out')
    if not shared:
        raise ValueError(f'chosen begins with {chosen[0]} and rejected with {rejected[0]}: give both the same prompt')
    if len(shared) in (len(chosen), len(rejected)):
        raise ValueError('one of the conversations continues the other: give each an answer of its own')
    return with_system(row, shared), chosen[len(shared):], rejected[len(shared):]


def _conversation(answer, prompt, key):
    """The messages of a prompt and its answer. The answer may be a text, and it may have the prompt in it."""
    if isinstance(answer, str):
        _, *turns = HH_TURN.split(answer)
        if prompt or not turns:
            return [*prompt, dict(role='assistant', content=answer)]
        return [dict(role=HH_ROLES[role], content=text.strip()) for role, text in zip(turns[::2], turns[1::2])]
    answer = _plain(answer) or check_messages(answer)
    if answer[0]['role'] == 'assistant':
        return prompt + answer
    if answer[:len(prompt)] != prompt:
        raise ValueError(f'{key} begins with {answer[0]}, but prompt with {prompt[0]}: leave prompt out, or let '
                         f'{key} be the answer alone')
    return answer


def _plain(messages):
    """Messages without entries that a text does not have, such as ids, which may differ where the texts do not."""
    messages = check_messages(renamed_turns(messages)) if messages else []
    return [{key: message[key] for key in TEXTS if message.get(key) is not None} for message in messages]


def read_pairs(path):
    """Yield each pair of a file: a dict of `chosen`, `rejected`, their common `messages`, and its `place`."""
    for number, row in enumerate(read_rows(path), 1):
        place = f'{path}, pair {number}'
        try:
            (shared, chosen, rejected), more = to_pair(row), more_of(row)
        except ValueError as error:
            raise ValueError(f'{place}: {error}') from None
        name_unused_fields(path, row)
        yield dict(place=place, messages=shared, chosen=chosen, rejected=rejected, more=more)


class PairEncoder(ConversationEncoder):
    """Encodes what conversation_splits reads of `read_pairs`, with the flags of data.flags."""

    def meta(self):
        return super().meta() | dict(pairs=True)

    def encode_to_numpy(self, text):
        pair = json.loads(text)
        documents = []
        for key in ('chosen', 'rejected'):
            try:
                ids, counted = self.template.tokens_and_counted(
                    pair['messages'] + pair[key], self.roles, first=len(pair['messages']), more=pair.get('more'))
            except ValueError as error:
                raise ValueError(f'{pair["place"]}, {key}: {error}') from None
            documents.append((ids, counted))
        # The tokens with which both begin count alike in both, so that they cancel in the loss.
        n_shared = len(os.path.commonprefix([ids for ids, _ in documents]))
        flagged = []
        for key, (ids, counted) in zip(('chosen', 'rejected'), documents):
            if not any(counted[n_shared:]):
                raise ValueError(f'{pair["place"]}, {key}: the answer has no token of its own: leave the pair out')
            flagged.append(flag_document(ids, [False] * n_shared + counted[n_shared:]))
        chosen, rejected = flagged
        return np.concatenate([chosen, rejected | REJECTED])
