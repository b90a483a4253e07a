"""Rows of conversations and pairs, with fields that trainers know: their text is that of trl, or they are refused."""
import copy
import json
import random
import sys

import pytest

from data.make.messages import read_conversations
from data.make.pairs import read_pairs
from data.tokens.chat_template import ChatTemplate
from data.tokens.json_tokenizer import JsonTokenizer
from drawing import check_draws, counted
from helpers import ROOT

data_utils = pytest.importorskip('trl.data_utils', reason='trl is not installed')
PreTrainedTokenizerFast = pytest.importorskip('transformers').PreTrainedTokenizerFast
sys.path.insert(0, f'{ROOT}/tests')
from test_chat_template import write_folder  # noqa: E402

TEMPLATE = ('{% if tools %}{{ tools | tojson }}\n{% endif %}{{ date | default("") }}{% for m in messages %}<|{{ m.role }}|>'
            '{% if m.name %}{{ m.name }}: {% endif %}{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>'
            '{% endif %}{{ m.content or "" }}{% for call in m.tool_calls or [] %}{{ call | tojson }}{% endfor %}<|end|>'
            '{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}')
SPECIAL = '<|end|>', '<|user|>', '<|assistant|>', '<|system|>', '<|tool|>'
TOOLS = [dict(type='function', function=dict(name='rate', parameters=dict(type='object', properties={})))]
WORDS = 'fox', 'the quick', '12', 'ä', 'night\n', ' it was'


def draw(generator):
    """A row in one of the forms of both, with spellings, tools, variables of the template, and entries of messages."""
    def text():
        return ' '.join(generator.choice(WORDS) for _ in range(generator.choice([1, 2, 3])))

    def some(share):
        return generator.random() < share

    def answer():
        message = dict(role='assistant', content=text())
        if some(0.2):
            message['reasoning_content'] = text()
        if some(0.2):
            message['tool_calls'] = [dict(type='function', function=dict(name='rate', arguments=dict(of=text())))]
            message['content'] = generator.choice(['', None, text()])
        if some(0.2):
            message[generator.choice(['weight', 'train'])] = 1
        return message

    def question():
        return dict(role='user', content=text()) | (dict(name='bob') if some(0.1) else {})

    messages = [dict(role='system', content=text())] if some(0.3) else []
    messages.append(question())
    for _ in range(generator.choice([0, 0, 1, 2])):
        messages += [answer(), dict(role='tool', content=text())] if some(0.2) else [answer()]
        messages.append(question())
    last = [answer()]
    kind = generator.choice(['messages', 'conversations', 'completion', 'pair', 'implicit pair'])
    row = dict(messages=messages + last) if kind == 'messages' else dict(conversations=messages + last)
    if kind == 'completion':
        row = dict(prompt=messages, completion=last)
    if 'pair' in kind:
        other = [dict(role='assistant', content=f'{text()} no')]
        row = dict(prompt=messages, chosen=last, rejected=other)
        if kind == 'implicit pair':
            row = dict(chosen=messages + last, rejected=messages + other)
    if kind == 'conversations' or some(0.2):
        row = {key: [renamed(message) for message in value] for key, value in row.items()}
    if some(0.3):
        row['tools'] = TOOLS
    if some(0.2):
        row['chat_template_kwargs'] = dict(date='2026')
    if some(0.2):
        row['source'] = 'somewhere'
    return row


def renamed(message):
    return {dict(role='from', content='value').get(key, key): value for key, value in message.items()}


@pytest.fixture
def difference(tmp_path):
    """Function (row) -> what differs, or ''."""
    folder = write_folder(tmp_path / 'tokenizer', TEMPLATE, [*SPECIAL], None, '<|end|>')
    our_template = ChatTemplate(JsonTokenizer(str(folder)))
    their_tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)

    def texts_of_trl(row):
        if 'chosen' in row:
            others = {key: row[key] for key in ('tools', 'chat_template_kwargs') if key in row}
            row = data_utils.maybe_extract_prompt(row) | others
        row = data_utils.maybe_convert_to_chatml(row)
        found = data_utils.apply_chat_template(row, their_tokenizer, tools=row.get('tools'))
        if 'chosen' in found:
            return [found['prompt'] + found[key] for key in ('chosen', 'rejected')]
        return [found.get('text') or found['prompt'] + found['completion']]

    def our_texts(row):
        path = tmp_path / 'rows.jsonl'
        path.write_text(json.dumps(row) + '\n')
        read, = (read_pairs if 'chosen' in row else read_conversations)(str(path))
        parts = [read['messages']]
        if 'chosen' in row:
            parts = [read['messages'] + read[key] for key in ('chosen', 'rejected')]
        return [our_template.render(messages, more=read['more']) for messages in parts]

    def compare(row, theirs, ours):
        expected = theirs(lambda: texts_of_trl(copy.deepcopy(row)))
        found = ours(lambda: our_texts(row))
        return f'the text is {found}, in trl {expected}' if found != expected else ''

    yield from counted(compare)


@pytest.mark.slow
def test_drawn_rows_have_the_text_of_trl(difference):
    check_draws(draw, difference, seed=random.randrange(10 ** 6), seconds=15, at_least=300)
