"""Chat templates and conversations from a grammar: text, ids and answers are those of transformers, or it is refused."""
import copy
import random
import sys

import pytest

from data.tokens.chat_template import ChatTemplate
from data.tokens.json_tokenizer import JsonTokenizer
from drawing import check_draws
from helpers import ROOT

PreTrainedTokenizerFast = pytest.importorskip('transformers').PreTrainedTokenizerFast
sys.path.insert(0, f'{ROOT}/tests')
from test_chat_template import FAMILIES, write_folder  # noqa: E402

SPECIAL = ['<|end|>', '<s>', '<|user|>', '<|assistant|>', '<|system|>', '<|tool|>', '<think>', '</think>', '<unk>']
WORDS = 'fox', 'the quick brown', '12345', ' it was', 'night\n', '\n\na', "fox's", 'ÄÖ 🙂', '{{ x }}', 'user', ' ', 'a\tb'
TOOL = dict(type='function', function=dict(name='rate', description='ä & <b>', parameters=dict(
    type='object', properties=dict(of=dict(type='string')), required=['of'])))
# {part of a template: its alternatives}, of which the first is the plainest
PARTS = dict(
    begin=['', '{{ bos_token }}', '{%- if bos_token is defined %}{{ bos_token }}{% endif %}', '{{- bos_token -}}\n\n',
           '{{ strftime_now("%Y") }}{% if date is not defined %}{% set date = "today" %}{% endif %}{{ date }}\n',
           '{{ messages | selectattr("role", "equalto", "user") | map(attribute="content") | first | upper }}\n',
           '{%- set first = messages[0] if messages[0].role == "system" else none -%}{{ first.content | default("x") }}\n'],
    system=['', "{% if messages[0].role != 'system' %}<|system|>You are kind.<|end|>\n{% endif %}",
            "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system') }}{% endif %}",
            "{%- set sys = namespace(text='') %}{% for m in messages if m.role == 'system' %}"
            "{% set sys.text = sys.text ~ m.content %}{% endfor %}<|system|>{{ sys.text | trim }}<|end|>\n"],
    tools=['', '{% if tools %}<|system|>{{ tools | tojson }}<|end|>{% endif %}',
           '{% if tools is not none and tools is defined %}<|system|>{% for tool in tools %}{{ tool | tojson(indent=4) }}'
           '{{ "\\n" if not loop.last }}{% endfor %}<|end|>{% endif %}',
           '{% for tool in tools | default([], true) %}{% for key, value in tool.function.items() %}{{ key }}={{ value }};'
           '{% endfor %}{% endfor %}', '{{ tools | tojson(sort_keys=true, separators=(",", ":")) if tools }}',
           '{% for tool in tools or [] %}{{ tool.function.name }}({{ tool.function.parameters.required | join(", ") }})'
           '{% endfor %}'],
    check=['', "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}",
           "{% if m.role not in ['system', 'user', 'assistant', 'tool'] %}{{ raise_exception('role ' ~ m.role) }}{% endif %}",
           "{% if m.role == 'system' %}{% continue %}{% endif %}"],
    header=['<|{{ m.role }}|>', "{{ '<|' + m['role'] + '|>\\n' }}", '### {{ m.role | capitalize }}:\n',
            '{%- set names = {"user": "<|user|>", "assistant": "<|assistant|>"} %}{{ names[m.role] | default("<|tool|>") }}',
            '{{ "\\n" if loop.previtem is defined and loop.previtem.role == m.role }}<|{{ m.role | lower | e }}|>',
            "{% if loop.first %}[{% endif %}{{ '<|assistant|>' if m.role == 'assistant' else '<|user|>' }}"],
    content=['{{ m.content or "" }}', '{{ m.content }}', '{{ m.content | trim }}', "{{ m['content'].strip() + '' }}",
             "{% if m.content is string %}{{ m.content }}{% else %}{{ m.content | tojson }}{% endif %}",
             "{{ m.content.split('</think>')[-1] if not loop.last else m.content }}",
             "{% set c = m.content or '' %}{% if m.role == 'assistant' %}{{ c.split('</think>') | last }}{% else %}"
             "{{ c | replace('fox', 'cat') }}{% endif %}"],
    thoughts=['', '{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}',
              '{% if m.reasoning_content is defined and loop.last %}<think>\n{{ m.reasoning_content }}\n</think>\n{% endif %}'],
    calls=['', '{% for call in m.tool_calls or [] %}{{ call.function.name }}{{ call.function.arguments | tojson }}{% endfor %}',
           '{% if m.tool_calls is defined and m.tool_calls %}{% for call in m.tool_calls %}{{ call | tojson }}\n{% endfor %}{% endif %}'],
    end=['<|end|>', '<|end|>\n', '{{ eos_token }}', '\n', '', "{{ '<|end|>' if m.role == 'assistant' else '\\n' }}"],
    marks=[False, True, 'with end'],
    last=['{% if add_generation_prompt %}<|assistant|>{% endif %}',
          "{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% if enable_thinking is defined and not enable_thinking %}"
          '<think></think>{% endif %}{% endif %}', '{% if add_generation_prompt %}### Assistant:\n{% else %}{{ eos_token }}{% endif %}',
          '{{ "<|assistant|>" if add_generation_prompt else "" }}', '',
          '{% if add_generation_prompt and messages[-1].role != "assistant" %}<|assistant|>{% endif %}'],
    macro=[False, True])


def template_of(parts):
    """The text of a template. A part that is missing is the plainest."""
    part = {key: parts.get(key, values[0]) for key, values in PARTS.items()}
    answer = part['thoughts'] + part['content'] + part['calls']
    if part['marks']:
        inside, outside = (part['end'], '') if part['marks'] == 'with end' else ('', part['end'])
        answer = (f"{{% if m.role == 'assistant' %}}{{% generation %}}{answer}{inside}{{% endgeneration %}}{outside}"
                  f"{{% else %}}{answer}{part['end']}{{% endif %}}")
    else:
        answer += part['end']
    before = ''
    if part['macro']:
        before, answer = '{% macro say(m, loop) %}' + answer + '{% endmacro %}', '{{ say(m, loop) }}'
    loop = '{% for m in messages %}' + part['check'] + part['header'] + answer + '{% endfor %}'
    return before + part['begin'] + part['tools'] + part['system'] + loop + part['last']


def draw(generator):
    """Parts of a template or one of a family, messages, and what else is given to it."""
    def some(share):
        return generator.random() < share

    def text():
        return ''.join(generator.choice(WORDS) for _ in range(generator.choice([1, 1, 2, 3, 0])))

    def answer():
        message = dict(role='assistant', content=text() or 'b')
        if some(0.2):
            message['content'] = f'<think>{text()}</think>{message["content"]}'
        if some(0.15):
            message['reasoning_content'] = text()
        if some(0.15):
            message['tool_calls'] = [dict(type='function', function=dict(name='rate', arguments=dict(of=text())))]
            if some(0.5):
                message['content'] = generator.choice([None, ''])
        return message

    messages = [dict(role='system', content=text())] if some(0.3) else []
    for _ in range(generator.choice([1, 1, 2, 3])):
        messages += [dict(role='user', content=text() or 'a')]
        messages += [answer()] if some(0.95) else []
        if messages[-1].get('tool_calls') and some(0.8):
            messages += [dict(role='tool', content=text()), answer()]
    parts = {key: generator.choice(values) for key, values in PARTS.items() if some(0.5)}
    form = dict(parts=parts, messages=messages, sentence_piece=some(0.3))
    if some(0.2):
        form['family'] = generator.choice([*FAMILIES])
    if some(0.3):
        form['tools'] = [TOOL]
    if some(0.3):
        form['kwargs'] = dict(enable_thinking=some(0.5))
    return form


@pytest.fixture(scope='module')
def tokenizers(tmp_path_factory):
    """{whether it is of SentencePiece's kind: (our tokenizer, that of transformers)}"""
    found = {}
    for kind in (False, True):
        folder = write_folder(tmp_path_factory.mktemp('tokenizer'), '', SPECIAL, '<s>', '<|end|>', kind)
        found[kind] = JsonTokenizer(str(folder)), PreTrainedTokenizerFast.from_pretrained(folder)
    return found


@pytest.fixture
def difference(tokenizers):
    """Function (form) -> what differs, or ''. It counts what was refused."""
    counts = dict(same=0, counted=0, refused=0, invalid=0)

    def compare(form):
        brought, theirs = tokenizers[form.get('sentence_piece', False)]
        template = FAMILIES[form['family']][0] if 'family' in form else template_of(form.get('parts', {}))
        ours = copy.copy(brought)
        ours.files = brought.files | {'chat_template.jinja': template}
        messages, more = form.get('messages', []), dict(form.get('kwargs', {}))
        if 'tools' in form:
            more['tools'] = form['tools']
        options = dict(chat_template=template, **more)
        try:
            texts = [theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=prompt, **options)
                     for prompt in (False, True)]
        except Exception:  # transformers, or the template, refuses it
            counts['invalid'] += 1
            with pytest.raises(ValueError):
                ChatTemplate(ours).render(messages, True, more)
                ChatTemplate(ours).render(messages, False, more)
            return ''
        try:
            chat = ChatTemplate(ours)
            found = [chat.render(messages, prompt, more) for prompt in (False, True)]
        except ValueError:
            counts['refused'] += 1
            return ''
        if found != texts:
            return f'the text is {found}, in transformers {texts}'
        expected = theirs.apply_chat_template(messages, return_assistant_tokens_mask=chat.has_marks,
                                              return_dict=True, **options)
        # What a message has of special tokens is text for us, but in thoughts; so they are left out of the rest here.
        ids = expected['input_ids']
        if chat.encode(messages, more=more) != ids:
            return f'the ids are {chat.encode(messages, more=more)}, in transformers {ids}'
        counts['same'] += 1
        try:
            ours_ids, counted = chat.tokens_and_counted(messages, more=more)
        except ValueError:
            return ''
        counts['counted'] += 1
        if chat.has_marks:
            mask = [bool(each) for each in expected['assistant_masks']]
        else:
            mask = answers_by_prompts(theirs, messages, ids, chat.stop_ids, options)
        if mask is not None and (ours_ids[:len(ids)] != ids or counted[:len(ids)] != mask):
            return f'the counted tokens are {counted}, in transformers {mask}'
        return ''

    yield compare
    print(counts)


def answers_by_prompts(theirs, messages, ids, stop_ids, options):
    """Which ids are of answers: those after the prompt of each, up to the first that ends it. None if it is not plain."""
    mask = [False] * len(ids)
    for i, message in enumerate(messages):
        if message['role'] == 'assistant':
            prompt = theirs.apply_chat_template(messages[:i], add_generation_prompt=True, **options)['input_ids']
            last = next((j for j in range(len(prompt), len(ids)) if ids[j] in stop_ids), None)
            if ids[:len(prompt)] != prompt or last is None:
                return None
            mask[len(prompt):last + 1] = [True] * (last + 1 - len(prompt))
    return mask


def test_drawn_templates_write_what_they_write_in_transformers(difference):
    check_draws(draw, difference, seed=1, seconds=0, at_least=100)


@pytest.mark.slow
def test_templates_of_a_new_seed_write_what_they_write_in_transformers(difference):
    check_draws(draw, difference, seed=random.randrange(10 ** 6), seconds=20)
