"""Conversations have the text and the tokens that transformers gives them, and their answers are counted."""
import json
import string
from types import SimpleNamespace

import chat_templates
import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from data.flags import BEGIN, CONTEXT, ids_of
from data.make.messages import ConversationEncoder
from data.tokens import chat_template
from data.tokens.chat_template import ChatTemplate
from data.tokens.json_tokenizer import JsonTokenizer
from data.tokens.tokenizer import CharTokenizer, get_tokenizer

# {family: (its template, special tokens with that which ends a turn first, bos, eos)}
FAMILIES = dict(
    chatml=(chat_templates.CHATML, ['<|im_end|>', '<|im_start|>', '<|endoftext|>'], '<|im_start|>', '<|im_end|>'),
    llama3=(chat_templates.LLAMA3, ['<|eot_id|>', '<|begin_of_text|>', '<|end_of_text|>', '<|start_header_id|>',
                                    '<|end_header_id|>'], '<|begin_of_text|>', '<|end_of_text|>'),
    mistral=(chat_templates.MISTRAL, ['</s>', '<s>', '<unk>', '[INST]', '[/INST]'], '<s>', '</s>'),
    gemma=(chat_templates.GEMMA, ['<end_of_turn>', '<start_of_turn>', '<bos>', '<eos>'], '<bos>', '<eos>'),
    phi3=(chat_templates.PHI3, ['<|end|>', '<|user|>', '<|assistant|>', '<|system|>', '<|endoftext|>', '<s>'],
          '<s>', '<|endoftext|>'),
    qwen25=(chat_templates.QWEN25, ['<|im_end|>', '<|im_start|>', '<|endoftext|>'], None, '<|im_end|>'),
    qwen3=(chat_templates.QWEN3, ['<|im_end|>', '<|im_start|>', '<|endoftext|>'], None, '<|im_end|>'),
    zephyr=(chat_templates.ZEPHYR, ['</s>', '<s>', '<unk>'], '<s>', '</s>'),
    marked=(chat_templates.MARKED, ['<|im_end|>', '<|im_start|>', '<|endoftext|>'], None, '<|im_end|>'),
)
BYTES = [f'<0x{byte:02X}>' for byte in range(256)]


def turns(*contents, system=None):
    """A conversation of user and assistant in turn."""
    messages = [dict(role='system', content=system)] if system else []
    for i, content in enumerate(contents):
        messages.append(dict(role='assistant' if i % 2 else 'user', content=content))
    return messages


CONVERSATIONS = [
    turns('the quick brown fox', 'jumps'),
    turns('Hello!', "It's 12345 words.\n\n  2 more ", 'and?', 'ÄÖ 🙂\n', 'So?', '{{ x }} {% y %}'),
    turns('Hi', 'the words', system='Be brief.'),
    turns('Only a question\n'),
    turns('a', 'b', 'c'),
]
TEXT = "the quick brown fox's 12345 words.\nIt was a dark and stormy night\nuser assistant system model\n" * 20


def write_folder(folder, template, special, bos=None, eos=None, is_sentence_piece=False):
    """Write a tokenizer.json with these special tokens, and the template; returns the folder."""
    options = dict(special_tokens=special, show_progress=False)
    if is_sentence_piece:
        tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token='<unk>', fuse_unk=True))
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend('▁'), normalizers.Replace(' ', '▁')])
        options['special_tokens'] = special + BYTES
        tokenizer.train_from_iterator(TEXT.split('\n'), trainers.BpeTrainer(vocab_size=400, **options))
        content = json.loads(tokenizer.to_str())
        content['added_tokens'] = content['added_tokens'][:len(special)]
        tokenizer = Tokenizer.from_str(json.dumps(content))
        tokenizer.decoder = decoders.Sequence([decoders.Replace('▁', ' '), decoders.ByteFallback(), decoders.Fuse(),
                                               decoders.Strip(' ', 1, 0)])
    else:
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        tokenizer.train_from_iterator([TEXT], trainers.BpeTrainer(vocab_size=320, initial_alphabet=alphabet, **options))
    folder.mkdir(exist_ok=True)
    tokenizer.save(str(folder / 'tokenizer.json'))
    config = dict(tokenizer_class='PreTrainedTokenizerFast', chat_template=template, bos_token=bos, eos_token=eos)
    config = {key: value for key, value in config.items() if value is not None}
    (folder / 'tokenizer_config.json').write_text(json.dumps(config))
    return folder


# {(family, number of the conversation): the beginning of why its answers cannot be counted}
REFUSED = {
    ('gemma', 2): 'refuses these messages: System role not supported',
    # The system message moves to the last question.
    ('mistral', 2): 'writes what comes before message 2 differently without it: mark its answers',
    # The thoughts of earlier answers are left out.
    ('qwen3', 1): 'writes message 1 differently when others follow',
}


@pytest.fixture(scope='module', params=FAMILIES)
def family(request, tmp_path_factory):
    """A family: its name, ChatTemplate, tokenizer of transformers, and id of the token that ends a turn."""
    template, special, bos, eos = FAMILIES[request.param]
    is_sentence_piece = '<unk>' in special
    folder = write_folder(tmp_path_factory.mktemp('family'), template, special, bos, eos, is_sentence_piece)
    tokenizer = JsonTokenizer(folder)
    return SimpleNamespace(name=request.param, ours=ChatTemplate(tokenizer), end=tokenizer.encode_prompt(special[0])[-1],
                           theirs=PreTrainedTokenizerFast.from_pretrained(folder))


@pytest.mark.parametrize('add_generation_prompt', [False, True])
def test_text_and_ids_are_those_of_transformers(family, add_generation_prompt):
    for i, messages in enumerate(CONVERSATIONS):
        if 'refuses' in REFUSED.get((family.name, i), ''):
            continue
        options = dict(conversation=messages, add_generation_prompt=add_generation_prompt)
        text = family.theirs.apply_chat_template(tokenize=False, **options)
        assert family.ours.render(messages, add_generation_prompt) == text
        ids = family.theirs.apply_chat_template(**options)['input_ids']
        assert family.ours.encode(messages, add_generation_prompt) == ids


def test_special_tokens_within_a_message_are_ordinary_text(family):
    special = family.theirs.convert_ids_to_tokens(family.end)
    messages = turns(f'the{special}quick', f'{special}', f' a {special}\n{special}')
    ids = family.ours.encode(messages)
    assert ids == family.theirs.apply_chat_template(messages, sanitize_control_tokens=True)['input_ids']
    assert ids.count(family.end) == family.ours.encode(turns('the quick', 'brown', 'fox')).count(family.end)
    assert family.ours.render(messages) == family.theirs.apply_chat_template(messages, tokenize=False)


@pytest.mark.parametrize('i', range(3))
def test_answers_are_counted_up_to_the_token_that_ends_them(family, i):
    """From the end of the prompt of each answer to the end of its turn, by the ids of transformers."""
    messages = CONVERSATIONS[i]
    if (family.name, i) in REFUSED:
        with pytest.raises(ValueError) as error:
            family.ours.tokens_and_counted(messages)
        assert REFUSED[family.name, i] in str(error.value)
        return
    ids = family.theirs.apply_chat_template(messages)['input_ids']
    expected = [False] * len(ids)
    for number, message in enumerate(messages):
        if message['role'] == 'assistant':
            prompt = family.theirs.apply_chat_template(messages[:number], add_generation_prompt=True)['input_ids']
            assert ids[:len(prompt)] == prompt
            last = ids.index(family.end, len(prompt))
            expected[len(prompt):last + 1] = [True] * (last + 1 - len(prompt))
    assert family.ours.tokens_and_counted(messages) == (ids, expected)
    assert family.end in family.ours.stop_ids


@pytest.mark.parametrize('end', ["{% endgeneration %}{{ '\\n' }}", "{{ '\\n' }}{% endgeneration %}"])
def test_answers_that_a_template_marks_are_counted_as_transformers_counts_them(end, tmp_path):
    template, *rest = FAMILIES['marked']
    template = template.replace("{% endgeneration %}{{ '\\n' }}", end)
    folder = write_folder(tmp_path, template, *rest)
    ours, theirs = ChatTemplate(JsonTokenizer(folder)), PreTrainedTokenizerFast.from_pretrained(folder)
    assert ours.has_marks
    for messages in CONVERSATIONS:
        expected = theirs.apply_chat_template(messages, return_assistant_tokens_mask=True)
        ids, counted = ours.tokens_and_counted(messages)
        assert ids == expected['input_ids'] and list(map(int, counted)) == expected['assistant_masks']
    ours.has_marks = False  # now by prefixes of the conversation, which do not count the newline
    assert (ours.tokens_and_counted(messages) == (ids, counted)) == end.startswith('{% end')


def test_roles_say_whose_messages_are_counted(tmp_path):
    template = ChatTemplate(JsonTokenizer(write_folder(tmp_path, *FAMILIES['marked'])))
    messages = turns('the words', 'fox')
    decode = template.tokenizer.decode

    def text_of(*roles):
        ids, counted = template.tokens_and_counted(messages, roles)
        return decode([token for token, is_counted in zip(ids, counted) if is_counted])

    assert text_of('assistant') == 'fox<|im_end|>'
    assert text_of('user') == '<|im_start|>user\nthe words<|im_end|>'
    assert text_of('user', 'assistant') == '<|im_start|>user\nthe words<|im_end|>fox<|im_end|>'
    assert text_of() == ''


def test_role_that_no_template_names_is_not_trained_on(tmp_path):
    """ChatML writes any role, as transformers does."""
    template, *rest = FAMILIES['chatml']
    ours = ChatTemplate(JsonTokenizer(write_folder(tmp_path, template, *rest)))
    messages = [*turns('Hi'), dict(role='asistant', content='Hello'), *turns('So?', 'a')]
    assert '<|im_start|>asistant\nHello' in ours.render(messages)
    with pytest.raises(ValueError, match="message 1 has the role 'asistant', which the chat template in .* not name"):
        ours.documents(messages)
    ids, counted = ours.tokens_and_counted(messages, ('assistant', 'asistant'))
    assert ours.tokenizer.decode([i for i, is_counted in zip(ids, counted) if is_counted]).count('<|im_end|>') == 2
    known = [dict(role=role, content='x') for role in ('developer', 'user', 'tool', 'assistant')]
    assert any(ours.tokens_and_counted(known)[1])
    named = ChatTemplate(JsonTokenizer(write_folder(tmp_path, f'{{# asistant #}}{template}', *rest)))
    assert any(named.tokens_and_counted(messages)[1])


@pytest.mark.parametrize('name', ['char', 'bytes', 'gpt2'])
def test_default_template_ends_an_answer_by_end_of_text_or_a_newline(name, vocabulary, monkeypatch):
    monkeypatch.setenv('TIKTOKEN_CACHE_DIR', vocabulary)
    tokenizer = CharTokenizer(string.printable) if name == 'char' else get_tokenizer(dict(tokenizer=name))
    template = ChatTemplate(tokenizer)
    ids, counted = template.tokens_and_counted(turns('Hi', 'two\nlines', 'and', 'one <|endoftext|>'))
    end, words = ('<|endoftext|>\n', 'two\nlines') if name == 'gpt2' else ('\n', 'two lines')
    text = f'User: Hi\nAssistant: {words}{end}User: and\nAssistant: one <|endoftext|>{end}'
    assert tokenizer.decode(ids) == text
    answers = [token for token, is_counted in zip(ids, counted) if is_counted]
    assert tokenizer.decode(answers) == f' {words}{end.strip() or end} one <|endoftext|>{end.strip() or end}'
    assert sum(token in template.stop_ids for token in answers) == 2 and len(template.stop_ids) == 1
    with pytest.raises(ValueError, match='the role tool is not system, user or assistant'):
        template.render([dict(role='tool', content='a')])


def test_stop_ids_include_those_of_generation_config(tmp_path):
    folder = write_folder(tmp_path, *FAMILIES['llama3'])
    (folder / 'generation_config.json').write_text('{"eos_token_id": [2, 77]}')
    assert ChatTemplate(JsonTokenizer(folder)).stop_ids == {0, 2, 77}  # <|eot_id|>, <|end_of_text|>, 77


def test_template_file_comes_before_the_one_of_the_config(tmp_path):
    folder = write_folder(tmp_path, [dict(name='tool_use', template='a'), dict(name='default', template='b')], ['<s>'])
    assert ChatTemplate(JsonTokenizer(folder)).render(turns('Hi')) == 'b'
    (folder / 'chat_template.jinja').write_text('{{ messages[0] | tojson }}{{ strftime_now("%%") }}')
    assert ChatTemplate(JsonTokenizer(folder)).render(turns('<ä>')) == '{"role": "user", "content": "<ä>"}%'


@pytest.mark.quick
@pytest.mark.parametrize('template, words', [
    ('{% for %}', 'is not valid Jinja (line 1: '),
    ('{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}', 'fails: it takes more than'),
    ('{% macro f() %}{{ f() }}{{ f() }}{% endmacro %}{{ f() }}', 'fails: '),
    ('{% for i in range(9999) %}{{ "a" * 9999 }}{% endfor %}', 'fails: it writes more than'),
    ('{{ messages[0].content.missing.entry }}', 'refuses these messages: '),
    ('{{ messages[0].content.__class__.__mro__ }}', 'refuses these messages: access to attribute'),
    ('{{ 1 / 0 }}', 'fails: division by zero'),
    ('{{ raise_exception("no tools here") }}', 'refuses these messages: no tools here'),
])
def test_template_that_fails_or_does_not_end_is_named_in_one_sentence(template, words, tmp_path):
    with pytest.raises(ValueError) as error:
        ChatTemplate(JsonTokenizer(write_folder(tmp_path, template, ['<s>']))).render(turns('Hi'))
    assert words in str(error.value) and f'the chat template in {tmp_path}' in str(error.value)


@pytest.mark.quick
@pytest.mark.parametrize('messages, words', [
    ([], 'messages is []: it must be a list'),
    ('Hi', "messages is 'Hi'"),
    ([['user', 'Hi']], "message 0 is ['user', 'Hi']: it must be"),
    ([dict(role='user', content=None)], "message 0 is {'role': 'user', 'content': None}"),
    (turns('Hi', '  '), 'message 1, of the role assistant, is empty: leave it out'),
    (turns('Hi', 'a')[1:], 'message 0 is an answer, but no message comes before it'),
])
def test_messages_that_are_not_a_conversation_are_named_in_one_sentence(messages, words):
    with pytest.raises(ValueError) as error:
        ChatTemplate(CharTokenizer(string.printable)).tokens_and_counted(messages)
    assert words in str(error.value)


def test_answers_that_change_once_others_follow_end_documents_of_their_own(family):
    """Each document is the conversation up to an answer, of which the answer alone is counted."""
    messages = CONVERSATIONS[1]
    documents = family.ours.documents(messages)
    encoder = ConversationEncoder(family.ours.tokenizer, 'assistant')
    tokens = encoder.encode_to_numpy(json.dumps(dict(place='here', messages=messages)))
    assert ((tokens & BEGIN) > 0).sum() == len(documents) == (3 if family.name == 'qwen3' else 1)
    assert ids_of(tokens).tolist() == [each for ids, _ in documents for each in ids]
    assert ((tokens & CONTEXT) == 0).tolist() == [each for _, counted in documents for each in counted]
    if family.name == 'qwen3':
        for number, (ids, counted) in enumerate(documents):
            last = 2 * number + 1
            assert ids == family.theirs.apply_chat_template(messages[:last + 1])['input_ids']
            prompt = family.theirs.apply_chat_template(messages[:last], add_generation_prompt=True)['input_ids']
            assert counted.index(True) == len(prompt) and sum(counted) == counted[len(prompt):].index(False)
            answer = family.theirs.decode(ids[len(prompt):len(prompt) + sum(counted)])
            assert answer.endswith(f'{messages[last]["content"].lstrip()}<|im_end|>')


def test_template_that_writes_earlier_messages_differently_is_named(tmp_path):
    """Where the number of messages is part of the text, a prefix of the conversation is not one of the text."""
    template = '{{ messages | length }}{% for message in messages %}{{ message.content }}{% endfor %}'
    with pytest.raises(ValueError, match='writes what comes before message 1 differently without it'):
        ChatTemplate(JsonTokenizer(write_folder(tmp_path, template, ['<s>']))).tokens_and_counted(turns('a', 'b'))


def test_tokenizer_that_is_not_known_has_no_conversations():
    with pytest.raises(ValueError, match='the tokenizer is not known'):
        ChatTemplate(get_tokenizer(dict(vocab_size=10)))


def test_loops_have_their_variables_although_their_rounds_are_counted(tmp_path):
    template = ('{% for m in messages %}{% if loop.last %}{{ loop.length }}{{ loop.revindex }}{% endif %}'
                '{% if loop.index == 1 %}{% continue %}{% endif %}{{ loop.previtem.role }}{% endfor %}')
    folder = write_folder(tmp_path, template, ['<s>'])
    theirs = PreTrainedTokenizerFast.from_pretrained(folder)
    messages = CONVERSATIONS[1]
    assert ChatTemplate(JsonTokenizer(folder)).render(messages) == theirs.apply_chat_template(messages, tokenize=False)
    assert chat_template.MAX_STEPS > 1000 * len(messages)


# --- tools, flags of messages, and templates of few families ---------------------------------------------

TOOLS = [dict(type='function', function=dict(name='rate', parameters={}))]
CALL = [dict(type='function', function=dict(name='rate', arguments=dict(of='EUR')))]


@pytest.fixture(scope='module')
def of_tools(tmp_path_factory):
    """(ChatTemplate, tokenizer of transformers) of a template that writes tools and their calls."""
    template = ('{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}<|{{ m.role }}|>{{ m.content or "" }}'
                '{% for call in m.tool_calls or [] %}{{ call.function | tojson }}{% endfor %}<|end|>{% endfor %}'
                '{% if add_generation_prompt %}<|assistant|>{% endif %}')
    special = ['<|end|>', '<|user|>', '<|assistant|>', '<|tool|>', '<think>', '</think>']
    folder = write_folder(tmp_path_factory.mktemp('tools'), template, special, None, '<|end|>')
    return ChatTemplate(JsonTokenizer(folder)), PreTrainedTokenizerFast.from_pretrained(folder)


def counted_text(template, theirs, *arguments, **options):
    """The text of the counted tokens."""
    ids, counted = template.tokens_and_counted(*arguments, **options)
    return theirs.decode([i for i, is_counted in zip(ids, counted) if is_counted])


def test_tools_and_their_calls_are_what_transformers_makes_of_them(of_tools):
    ours, theirs = of_tools
    messages = [*turns('rate?'), dict(role='assistant', tool_calls=CALL), dict(role='tool', content='1.2'),
                dict(role='assistant', content='It is 1.2')]
    assert ours.encode(messages, more=dict(tools=TOOLS)) == theirs.apply_chat_template(messages, tools=TOOLS)['input_ids']
    text = counted_text(ours, theirs, messages, more=dict(tools=TOOLS))
    assert text == '{"name": "rate", "arguments": {"of": "EUR"}}<|end|>It is 1.2<|end|>'


def test_special_tokens_of_an_answer_are_its_own_but_those_that_end_it(of_tools):
    ours, theirs = of_tools
    messages = turns('<think>no</think>', '<think>why</think> so<|end|>')
    ids = ours.encode(messages)
    think, end = (theirs.convert_tokens_to_ids(token) for token in ('<think>', '<|end|>'))
    assert ids.count(think) == 1 and ids.count(end) == 2
    messages[1]['content'] = '<think>why</think> so'
    assert ours.encode(messages)[-8:] == theirs.apply_chat_template(messages)['input_ids'][-8:]


@pytest.mark.parametrize('key, value', [('weight', 0), ('weight', 0.0), ('train', False), ('training', False), ('loss', False)])
def test_message_that_is_not_to_be_learnt_is_context(of_tools, key, value):
    ours, theirs = of_tools
    messages = turns('2+2?', '5', 'No!', '4')
    messages[1][key] = value
    assert counted_text(ours, theirs, messages) == '4<|end|>'
    messages[1][key] = type(value)(1)
    assert counted_text(ours, theirs, messages) == '5<|end|>4<|end|>'
    messages[1][key] = 0.5
    with pytest.raises(ValueError, match=f'has the {key} 0.5: it must be 1 or 0'):
        ours.tokens_and_counted(messages)


def test_mark_of_the_next_message_that_ends_an_answer_is_learnt(tmp_path):
    """GLM-4.5's template ends answers by the mark of who speaks next, which generation_config.json names."""
    template = ('{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}'
                '{% if add_generation_prompt %}<|assistant|>{% endif %}')
    folder = write_folder(tmp_path, template, ['<|user|>', '<|assistant|>', '<|end|>'], None, '<|end|>')
    (folder / 'generation_config.json').write_text(json.dumps(dict(eos_token_id=[2, 0])))
    theirs, ours = PreTrainedTokenizerFast.from_pretrained(folder), ChatTemplate(JsonTokenizer(folder))
    assert counted_text(ours, theirs, turns('2+2', '4', '3+3', '6')) == '4<|user|>6<|user|>'


def test_named_templates_without_a_default_are_refused(tmp_path):
    folder = write_folder(tmp_path, [dict(name='rag', template='a'), dict(name='tool_use', template='b')], ['<s>'])
    with pytest.raises(ValueError, match='has the chat templates rag, tool_use, of which none is called default'):
        ChatTemplate(JsonTokenizer(folder))
