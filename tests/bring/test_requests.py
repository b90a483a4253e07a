"""Every parameter of the openai client: it says what happens anyway, or changes the request, or is refused by its name."""
import inspect
import json
import random

import httpx
import pytest

from drawing import check_draws
from kilogpt.chat.requests import HARMLESS, RequestError, parse

openai = pytest.importorskip('openai')
COMPLETIONS = dict(chat=openai.resources.chat.completions.Completions, text=openai.resources.completions.Completions)
OF_CLIENT = {'self', 'extra_headers', 'extra_query', 'extra_body', 'timeout', 'model', 'messages', 'prompt'}
PLAIN = dict(chat=dict(messages=[dict(role='user', content='HI')]), text=dict(prompt='HI'))
DEFAULTS = dict(max_tokens=20, temperature=0.5, top_p=0.9)
TOOLS = [dict(type='function', function=dict(name='rate', parameters={}))]
# Values that say what the server does anyway, as OpenAI's reference has them
NEUTRAL = dict(n=1, stream=False, logprobs=False, echo=False, presence_penalty=0, frequency_penalty=0.0, logit_bias={},
               response_format=dict(type='text'), tool_choice='auto', function_call='none', best_of=1, tools=[], stop=[],
               modalities=['text'], verbosity='medium', suffix='', functions=[], temperature=0.5, top_p=0.9)
OTHERS = dict(n=[2], stream=[True], logprobs=[True, 3], echo=[True], presence_penalty=[1.0], frequency_penalty=[-0.5],
              logit_bias=[{'5': -100}], response_format=[dict(type='json_object')], tool_choice=['required'],
              function_call=['auto'], best_of=[3], tools=[TOOLS], stop=['END', ['a', 'b']], modalities=[['text', 'audio']],
              verbosity=['low'], suffix=['x'], functions=[[dict(name='f')]], temperature=[0, 1.5], top_p=[0.1],
              max_tokens=[3], max_completion_tokens=[4], seed=[7], stream_options=[dict(include_usage=True)],
              audio=[dict(voice='a')], reasoning_effort=['high'], web_search_options=[{'x': 1}], moderation=[{'x': 1}],
              top_logprobs=[2], user=['u'], metadata=[dict(a='b')], store=[True], service_tier=['flex'],
              parallel_tool_calls=[False, True], prediction=[dict(type='content', content='x')], prompt_cache_key=['k'],
              prompt_cache_options=[{'x': 1}], prompt_cache_retention=['24h'], safety_identifier=['s'])
EXTRA = dict(top_k=5, min_p=0.1, repetition_penalty=1.2, grammar='x', ignore_eos=True, n_probs=2, guided_json={'a': 1})


def parameters(kind):
    return sorted(inspect.signature(COMPLETIONS[kind].create).parameters.keys() - OF_CLIENT)


def draw(generator):
    kind = generator.choice(['chat', 'text'])
    entries = {}
    for key in generator.sample(parameters(kind), generator.choice([1, 1, 2, 3])):
        is_neutral = key in NEUTRAL and (key not in OTHERS or generator.random() < 0.4)
        entries[key] = NEUTRAL[key] if is_neutral else generator.choice(OTHERS[key])
    if generator.random() < 0.2:
        key = generator.choice(sorted(EXTRA))
        entries['extra_body'] = {key: EXTRA[key]}
    return dict(kind=kind, entries=entries)


def body_of(kind, entries):
    """The body that the client sends."""
    bodies = []

    def answer(request):
        bodies.append(request.content)
        return httpx.Response(400, json={})

    client = openai.OpenAI(base_url='http://127.0.0.1:1/v1', api_key='x', max_retries=0,
                           http_client=httpx.Client(transport=httpx.MockTransport(answer)))
    create = client.chat.completions.create if kind == 'chat' else client.completions.create
    with pytest.raises(openai.BadRequestError):
        create(model='tiny', **PLAIN[kind], **entries)
    return bodies[0]


def read(kind, entries):
    found = parse(body_of(kind, entries), kind == 'chat', 'tiny', DEFAULTS)
    return {key: value for key, value in vars(found).items() if key not in ('id', 'created')}


def difference(form):
    """What is wrong with how a request is read, or ''."""
    if 'kind' not in form:
        return ''
    kind, entries = form['kind'], form.get('entries', {})
    plain = read(kind, {})
    sent = json.loads(body_of(kind, entries))
    neutral = {key for key, value in sent.items() if key in HARMLESS or key in NEUTRAL and value == NEUTRAL[key]
               and type(value) is type(NEUTRAL[key])}
    active = sent.keys() - neutral - {'model', 'messages', 'prompt'}
    try:
        found = read(kind, entries)
    except RequestError as error:
        is_named = any(str(error).startswith(f'{key} is ') for key in active)
        return '' if error.status == 400 and is_named else f'{entries} is refused: {error}'
    for key in active:
        others = {name: value for name, value in entries.items() if name != key}
        is_outdone = key == 'stream_options' or key == 'max_tokens' and 'max_completion_tokens' in entries
        if not is_outdone and (key not in entries or read(kind, others) == found):
            return f'{key}={sent[key]!r} changes nothing'
    return '' if active or found == plain else f'{entries} changes {found}'


def test_every_parameter_has_values_here():
    """A new version of the client may have more."""
    for kind in COMPLETIONS:
        assert {*parameters(kind)} <= NEUTRAL.keys() | OTHERS.keys()


def test_drawn_requests_are_read_or_refused_by_name():
    check_draws(draw, difference, seed=1, seconds=0, at_least=50)


@pytest.mark.slow
def test_requests_of_a_new_seed_are_read_or_refused_by_name():
    check_draws(draw, difference, seed=random.randrange(10 ** 6), seconds=15)
