"""sample.py --serve, as programs use it: OpenAI's client, and raw HTTP for what that client does not send."""
import asyncio
import collections
import concurrent.futures
import contextlib
import http.client
import json
import os
import pathlib
import re
import socket
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
from helpers import ROOT, run_forked
from test_conversation import build, count_read, trained  # noqa: F401  `trained` is a fixture

from kilogpt.chat import server as server_module
from kilogpt.chat.requests import CutAtStops, RequestError, parse
from kilogpt.generate.engine import Engine, ModelReader

DEFAULTS = dict(max_tokens=20, temperature=0.5, top_p=0.9)
HI = [dict(role='user', content='HI')]


# --- requests, without the server ---------------------------------------------------------------------------

def request(is_chat=True, **entries):
    content = dict(messages=HI) if is_chat else dict(prompt='HI')
    return parse(json.dumps(content | entries).encode(), is_chat, 'tiny', DEFAULTS)


@pytest.mark.quick
def test_entries_of_a_body_are_read_and_those_that_are_missing_have_defaults():
    found = request()
    assert (found.messages, found.max_tokens, found.temperature, found.top_p) == (HI, 20, 0.5, 0.9)
    assert found.stop == [] and not found.is_streamed and found.seed is None
    assert request(False).max_tokens == 16 and request(False, prompt=[1, 2]).prompt == [1, 2]
    assert request(False, prompt=['a']).prompt == 'a' and request(False, prompt=[[3]]).prompt == [3]
    assert request(max_completion_tokens=3, max_tokens=9, stop='x', seed=-1).max_tokens == 3
    parts = [dict(type='text', text='H'), dict(type='text', text='I')]
    assert request(messages=[dict(role='user', content=parts)]).messages == HI
    request(response_format=dict(type='text'), tool_choice='none', tools=[], logprobs=False, presence_penalty=0)
    request(False, best_of=1, echo=False)


@pytest.mark.quick
@pytest.mark.parametrize('entries, status, words', [
    (dict(model='gpt-5'), 404, "the model 'gpt-5' is not here: the only model is 'tiny'"),
    (dict(messages='HI'), 400, "messages is 'HI': it must be a list"),
    (dict(messages=[dict(role='user', content=[dict(type='image_url')])]), 400, 'a part that is not a text'),
    (dict(n=2), 400, 'n is 2: it must be 1: one text for each request'),
    (dict(max_tokens=0), 400, 'max_tokens is 0: it must be an integer of at least 1'),
    (dict(max_tokens=True), 400, 'max_tokens is True'),
    (dict(temperature=3), 400, 'temperature is 3: it must be a number from 0 to 2'),
    (dict(temperature='hot'), 400, "temperature is 'hot'"),
    (dict(top_p=0), 400, 'top_p is 0'),
    (dict(seed=2 ** 64), 400, 'seed is 18446744073709551616'),
    (dict(stop=['']), 400, 'it must be up to 16 texts'),
    (dict(stop=dict(a=1)), 400, 'it must be up to 16 texts'),
    (dict(stream='yes'), 400, "stream is 'yes': it must be true or false"),
    (dict(tools='rate'), 400, "tools is 'rate': it must be a list of objects"),
    (dict(ignore_eos=True), 400, 'ignore_eos is not supported: leave it out'),
    (dict(is_chat=False, tools=[dict(type='function')]), 400, 'tools is not supported'),
    (dict(response_format=dict(type='json_object')), 400, 'response_format is not supported'),
    (dict(tool_choice='required'), 400, "tool_choice is 'required': it must be auto or none"),
    (dict(is_chat=False, logprobs=0), 400, 'logprobs is not supported'),
    (dict(is_chat=False, prompt=['a', 'b']), 400, 'it must be one text, or one list of token ids'),
])
def test_bad_entry_is_named_with_its_value(entries, status, words):
    with pytest.raises(RequestError) as error:
        request(**entries)
    assert error.value.status == status and words in str(error.value)


@pytest.mark.quick
def test_text_is_cut_at_the_first_stop_wherever_its_pieces_are_cut():
    for pieces in (['one END two'], ['one E', 'ND two'], list('one END two'), ['one ', 'END', ' two']):
        cut = CutAtStops(['END', 'two'])
        assert ''.join(map(cut.add, pieces)) == 'one ' and cut.is_over and cut.add('', is_last=True) == ''
    cut = CutAtStops(['END'])
    assert [cut.add(piece) for piece in 'ENxE'] == ['', '', 'ENx', ''] and cut.add('', is_last=True) == 'E'
    assert [CutAtStops([]).add(piece) for piece in 'ab'] == ['a', 'b'] and not cut.is_over


def answers_of(talk, n_rows=1):
    return server_module.Answers(Engine(ModelReader(talk.engine.reader.model, n_rows)), talk.template, None, 0)


def job_of(asked, receive, seconds=600):
    return SimpleNamespace(request=asked, is_over=False, deadline=time.monotonic() + seconds, send=receive)


@pytest.mark.quick
@pytest.mark.parametrize('is_late', [False, True])
def test_text_ends_when_its_client_vanishes_or_takes_too_long(is_late, monkeypatch):
    """The next client gets the place; one that waits too long gets a sentence."""
    talk, events, of_next, of_last = build(dict(pos='rope')), [], [], []
    answers = answers_of(talk)
    jobs = job_of(request(max_tokens=60), events.append, 9), job_of(request(max_tokens=3), of_next.append), \
        job_of(request(max_tokens=60), of_last.append)
    for job in jobs:
        answers.begin(job)
    answers.step()
    assert len(events) == 3 and of_next == []  # the numbers of tokens, and two pieces
    if is_late:
        jobs[0].deadline -= server_module.MAX_SECONDS + 9
    else:
        jobs[0].is_over = True
    jobs[2].deadline = 0
    for _ in range(4):
        answers.step()
    assert isinstance(events[-1], server_module.End) and len(events) == 4
    assert len(of_next) == 5 and of_next[-1] == 'length' and not answers.growing
    assert 'no turn came within' in str(of_last[0]) and of_last[0].status == 503


@pytest.mark.quick
def test_texts_grow_together_and_each_is_what_it_is_alone():
    """In less than a third of the passes through the model."""
    talk, together, counts = build(dict(pos='rope')), {}, []
    count_read(talk, counts)
    answers = answers_of(talk, 8)
    asked = [request(messages=[dict(role='user', content='HI' * n)], max_tokens=n + 9, temperature=1, seed=n,
                     stop=['7']) for n in range(8)]
    for n in range(8):
        together[n] = []
        answers.begin(job_of(asked[n], together[n].append))
    while answers.growing:
        answers.step()
    n_together = len(counts)
    for n in range(8):
        alone = answers_of(talk)
        events = []
        alone.begin(job_of(asked[n], events.append))
        while alone.growing:
            alone.step()
        assert events[1:] == together[n][1:] and events[0] == together[n][0] and len(events) > 2
    assert n_together < (len(counts) - n_together) / 3


@pytest.mark.quick
def test_turns_of_a_client_read_only_what_is_new_and_give_what_the_whole_gives():
    """A conversation that grows, whose last question changes, and then another client's."""
    options = dict(pos='rope', n_kv_head=2)
    cached, counts, messages = build(options), [], []
    count_read(cached, counts)
    # The template writes a space before an answer, which this model does not, so that the next turn reads it again.
    for n_kept, content, n_read in ((0, 'HI', len('User: HI\nAssistant:')),
                                    (2, 'So?', len(' 1234\nUser: So?\nAssistant:')),
                                    (2, 'No', len('No\nAssistant:')),
                                    (0, 'other', len('other\nAssistant:')),
                                    (2, 'HI', len(' 1234\nUser: HI\nAssistant:'))):
        messages = [*messages[:n_kept], dict(role='user', content=content)]
        asked = request(messages=messages, max_tokens=4, temperature=0)
        counts.clear()
        texts = []
        for talk in (cached, build(options)):
            events = []
            answers = server_module.Answers(talk.engine, talk.template, None, 0)
            answers.begin(job_of(asked, events.append))
            while answers.growing:
                answers.step()
            texts.append(''.join(events[1:-1]))
        assert texts[0] == texts[1] and len(texts[0]) == 4
        assert counts == [n_read, 1, 1, 1]
        messages.append(dict(role='assistant', content=texts[0]))


@pytest.mark.quick
@pytest.mark.parametrize('pieces, status, words', [
    (None, 408, 'the body did not come within 0.01 seconds'),
    ([b' ' * 2 ** 21] * 3, 413, 'the body has more than 4194304 bytes')])
def test_body_that_does_not_end_has_a_status(pieces, status, words, monkeypatch):
    """Also where a body comes in pieces, without its length in a header."""
    pytest.importorskip('starlette')
    monkeypatch.setattr(server_module, 'MAX_BODY_SECONDS', 0.01)

    async def stream():
        for piece in pieces or ():
            yield piece
        await asyncio.Event().wait()

    body = SimpleNamespace(headers={'content-type': 'application/json; charset=utf-8'}, stream=stream)
    with pytest.raises(RequestError, match=words) as error:
        asyncio.run(server_module.read_body(body))
    assert error.value.status == status


# --- the server ---------------------------------------------------------------------------------------------

@contextlib.contextmanager
def serving(*arguments):
    """A context in which sample.py serves: its Popen, with `name`, `host` and `port`."""
    command = [sys.executable, os.path.join(ROOT, 'sample.py'), '--serve', '--port=0', '--device=cpu', *arguments]
    with subprocess.Popen(command, text=True, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL,
                          env=dict(os.environ, OMP_NUM_THREADS='1')) as process:
        try:
            for line in process.stderr:
                if found := re.search(r'^(\S+) answers at http://([\d.]+):(\d+)/v1', line):
                    break
            process.name, process.host, process.port = found[1], found[2], int(found[3])
            yield process
        finally:
            process.kill()


@pytest.fixture(scope='module')
def server(trained):  # noqa: F811
    pytest.importorskip('starlette')
    pytest.importorskip('uvicorn')
    with serving(f'--out_dir={trained}', '--temperature=0', '--max_new_tokens=8') as process:
        yield process


def send(server, body, path='/v1/chat/completions', method='POST', **headers):
    """(status, content) of the answer to a request; body: an object, or bytes."""
    connection = http.client.HTTPConnection(server.host, server.port, timeout=60)
    body = body if isinstance(body, bytes) else json.dumps(body).encode()
    headers = {'Content-Type': 'application/json'} | {key.replace('_', '-'): value for key, value in headers.items()}
    connection.request(method, path, body, headers)
    response = connection.getresponse()
    text = response.read().decode()
    connection.close()
    return response.status, json.loads(text) if text.startswith('{') else text


def vanish(server, body, after):
    """Send a request and close the connection after that many bytes of the answer; None = with half of the body."""
    body = json.dumps(body).encode()
    head = (f'POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n'
            f'Content-Length: {len(body)}\r\n\r\n').encode()
    with socket.create_connection(('127.0.0.1', server.port), timeout=60) as connection:
        if after is None:
            connection.sendall(head + body[:len(body) // 2])
        else:
            connection.sendall(head + body)
            received = 0
            while received < after:
                received += len(connection.recv(after))


def memory(server):
    """Megabytes of the server's memory."""
    with open(f'/proc/{server.pid}/statm') as file:
        return int(file.read().split()[1]) * os.sysconf('SC_PAGE_SIZE') / 1e6


def use(server, client, n_requests, max_tokens, expected):
    """Send requests of every kind as one of many clients; returns Counter of (kind, status).

    expected: the answer to HI.
    """
    import openai
    library = openai.OpenAI(base_url=f'http://127.0.0.1:{server.port}/v1', api_key='none', max_retries=0, timeout=300)
    asked = dict(model=server.name, messages=HI, max_tokens=max_tokens, temperature=0)
    found = collections.Counter()
    for i in range(n_requests):
        kind = (client + i) % 8
        if kind in (0, 1, 2):
            answer = library.chat.completions.create(**asked)
            assert answer.choices[0].message.content == expected
            found['whole', 200] += 1
        elif kind in (3, 4):
            chunks = list(library.chat.completions.create(stream=True, stream_options=dict(include_usage=True), **asked))
            assert ''.join(chunk.choices[0].delta.content or '' for chunk in chunks[:-1]) == expected
            assert chunks[-2].choices[0].finish_reason and chunks[-1].usage.completion_tokens
            found['streamed', 200] += 1
        elif kind == 5:
            found['too long', send(server, asked | dict(messages=[dict(role='user', content='A ' * 20_000)]))[0]] += 1
        elif kind == 6:
            found['broken', send(server, json.dumps(asked).encode()[:-3 - i % 20])[0]] += 1
        else:
            vanish(server, asked | dict(stream=True, max_tokens=50), (None, 0, 1, 200)[i // 8 % 4])
            found['vanished', 0] += 1
    return found


def use_by_many(server, n_clients, n_requests, max_tokens):
    """The sum of what `use` returns for n_clients at the same time."""
    asked = dict(messages=HI, max_tokens=max_tokens, temperature=0)
    expected = send(server, asked)[1]['choices'][0]['message']['content']
    with concurrent.futures.ThreadPoolExecutor(n_clients) as pool:
        jobs = [pool.submit(use, server, client, n_requests, max_tokens, expected) for client in range(n_clients)]
        return sum((job.result() for job in jobs), collections.Counter())


@pytest.mark.slow
def test_eight_clients_lose_nothing_and_memory_stays_flat(server):
    """With bodies that are too long or broken, and clients that vanish."""
    pytest.importorskip('openai')
    use_by_many(server, 8, 8, 8)
    before = memory(server)
    found = use_by_many(server, 8, 100, 8)
    assert found == {('whole', 200): 300, ('streamed', 200): 200, ('too long', 400): 100, ('broken', 400): 100,
                     ('vanished', 0): 100}
    assert memory(server) < before + 20
    assert send(server, dict(messages=HI))[0] == 200 and server.poll() is None


@pytest.mark.slow
def test_openai_library_gets_models_texts_and_usage(server):
    openai = pytest.importorskip('openai')
    client = openai.OpenAI(base_url=f'http://127.0.0.1:{server.port}/v1', api_key='none', max_retries=0)
    assert [model.id for model in client.models.list()] == [server.name] == [client.models.retrieve(server.name).id]
    answer = client.chat.completions.create(model=server.name, messages=HI)
    assert answer.choices[0].finish_reason == 'stop' and answer.choices[0].message.role == 'assistant'
    usage = answer.usage
    assert usage.prompt_tokens == len('User: HI\nAssistant:') and usage.completion_tokens >= 2
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    stream = client.chat.completions.create(model=server.name, messages=HI, stream=True)
    pieces = [chunk.choices[0].delta.content for chunk in stream if chunk.choices[0].delta.content]
    assert pieces == list(answer.choices[0].message.content) and len(pieces) > 1  # a token is a character
    text = client.completions.create(model=server.name, prompt='User: HI\nAssistant:')
    assert text.choices[0].text.strip().startswith(answer.choices[0].message.content)
    assert text.choices[0].finish_reason == 'length' and text.usage.completion_tokens == 16
    cut = client.completions.create(model=server.name, prompt='User: HI\nAssistant:', stop='I')
    assert cut.choices[0].text == text.choices[0].text.partition('I')[0] and cut.choices[0].finish_reason == 'stop'
    drawn = [client.completions.create(model=server.name, prompt='U', seed=seed, temperature=2).choices[0].text
             for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]
    with pytest.raises(openai.NotFoundError, match='the only model is'):
        client.completions.create(model='other', prompt='')


@pytest.mark.slow
def test_served_name_is_the_models_for_clients_and_the_pages_curl_gets_an_answer(trained):  # noqa: F811
    pytest.importorskip('uvicorn')
    page = pathlib.Path(ROOT, 'docs', 'text.md').read_text()
    command, = re.findall(r'^(curl .*\n.*)$', page, re.MULTILINE)
    with serving(f'--out_dir={trained}', '--served_name=gpt-4o-mini', '--max_new_tokens=8') as server:
        assert server.name == 'gpt-4o-mini'
        command = command.replace(':8000', f':{server.port}').replace('What is the capital of France?', 'HI')
        answer = json.loads(subprocess.run(['bash', '-c', command], capture_output=True, check=True).stdout)
        assert answer['model'] == 'gpt-4o-mini' and answer['choices'][0]['message']['content']
        assert send(server, dict(messages=HI, model='gpt-4o-mini'))[0] == 200
        assert send(server, dict(messages=HI, model='gpt-4o'))[0] == 404


@pytest.mark.slow
@pytest.mark.parametrize('body, options, status, words', [
    (b'', {}, 400, 'the body is not JSON'),
    (b'[' * 100_000, {}, 400, 'the body is not JSON'),
    (b'\xff\xfe{}', {}, 400, 'the body is not JSON'),
    ([], {}, 400, 'the body is not a JSON object'),
    (b' ' * (2 ** 22 + 1), {}, 413, 'the body has more than 4194304 bytes: shorten it'),
    (dict(messages=HI), dict(Content_Type='text/plain'), 415, 'Content-Type: application/json'),
    (dict(messages=[dict(role='tool', content='A')]), {}, 400, 'the role tool is not system, user or assistant'),
    (dict(messages=[dict(role='user', content='é')]), {}, 400, "the character 'é' is not among"),
    (dict(messages=[dict(role='user', content='A' * 99)]), {}, 400, 'the prompt has 116 tokens, but the model sees 64'),
    (dict(prompt=[1, 95]), dict(path='/v1/completions'), 400, 'ids that are not from 0 to 94'),
    (dict(prompt='A'), dict(path='/v1/embeddings'), 404, 'POST /v1/embeddings: Not Found'),
    (b'', dict(method='GET'), 405, 'GET /v1/chat/completions: Method Not Allowed'),
])
def test_bad_request_has_a_status_and_a_sentence(server, body, options, status, words):
    found, content = send(server, body, **options)
    assert found == status and words in content['error']['message']
    assert content['error']['type'] == 'invalid_request_error'


@pytest.mark.slow
def test_page_is_served_and_only_under_the_names_of_this_machine(server):
    assert server.host == '127.0.0.1'
    status, text = send(server, b'', '/', 'GET')
    assert status == 200 and '<title>kiloGPT</title>' in text
    assert send(server, dict(messages=HI), Host='elsewhere.example')[0] == 400


@pytest.mark.slow
def test_other_addresses_are_served_under_any_name_if_told_with_a_warning(trained):  # noqa: F811
    """Another address of this machine, so that no test opens a port to others."""
    pytest.importorskip('uvicorn')
    with serving(f'--out_dir={trained}', '--host=127.0.0.2') as server:
        assert server.host == '127.0.0.2'
        assert server.stderr.readline() == 'whoever reaches that address can use the model: set --api_key\n'
        assert send(server, b'', '/v1/models', 'GET', Host='elsewhere.example')[0] == 200
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(('127.0.0.1', server.port))


@pytest.mark.slow
def test_client_that_vanishes_ends_its_text_and_more_than_64_are_refused(trained):  # noqa: F811
    """The only way to the next text is the end of those before."""
    pytest.importorskip('uvicorn')
    with serving(f'--out_dir={trained}', '--api_key=secret') as server:
        key = dict(Authorization='Bearer secret')
        assert send(server, dict(messages=HI))[0] == 401
        assert send(server, dict(messages=HI), Authorization='Bearer wrong')[0] == 401
        assert send(server, b'', '/v1/models', 'GET')[0] == 401
        assert send(server, b'', '/v1/models', 'GET', **key)[0] == 200
        head = (b'POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n'
                b'Authorization: Bearer secret\r\nContent-Length: 100\r\n\r\n')
        waiting = []
        for _ in range(64):
            waiting.append(socket.create_connection(('127.0.0.1', server.port)))
            waiting[-1].sendall(head)
        deadline = time.monotonic() + 30
        while send(server, dict(messages=HI), **key)[0] != 429:
            assert time.monotonic() < deadline
        for connection in waiting:
            connection.close()
        while send(server, dict(messages=HI), **key)[0] != 200:
            assert time.monotonic() < deadline


def test_port_that_is_taken_is_named_before_the_model_is_read(tmp_path):
    with socket.create_server(('127.0.0.1', 0)) as other:
        port = other.getsockname()[1]
        done = run_forked('sample.py', f'--out_dir={tmp_path}', '--device=cpu', '--serve', f'--port={port}', check=False)
    assert done.returncode == 1 and f'cannot listen at port {port} of 127.0.0.1' in done.stderr


@pytest.mark.parametrize('port', [80000, -1])
def test_impossible_port_is_named(port):
    with pytest.raises(OSError, match=f'cannot listen at port {port} of 127.0.0.1 .*: set --port'):
        server_module.bind('127.0.0.1', port)


@pytest.mark.slow
def test_missing_library_is_named(trained, tmp_path):  # noqa: F811
    fault = tmp_path / 'fault.py'
    fault.write_text("import sys\nsys.modules['starlette'] = None\nsys.modules['starlette.applications'] = None\n")
    done = run_forked('sample.py', f'--out_dir={trained}', '--device=cpu', '--serve', faults=[fault], check=False)
    assert done.returncode == 1 and 'pip install starlette uvicorn' in done.stderr and 'Traceback' not in done.stderr
