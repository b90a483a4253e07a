"""The page of sample.py --serve in a real browser: Chromium without a window, where one is installed."""
import contextlib
import fcntl
import json
import os
import select
import shutil
import subprocess
import time

import pytest
from test_chat_server import HI, send, serving
from test_conversation import trained  # noqa: F401  a fixture

BROWSER = shutil.which('chromium') or shutil.which('google-chrome')
pytestmark = [pytest.mark.slow, pytest.mark.skipif(BROWSER is None, reason='Chromium is not installed')]
SECONDS = 120


class Tab:
    """A tab of a browser, by the DevTools protocol: JSON messages that end with a zero byte, over two pipes."""

    def __init__(self, commands, answers):
        self.commands, self.answers, self.held, self.number, self.session = commands, answers, b'', 0, {}
        target = self.call('Target.createTarget', url='about:blank')['targetId']
        self.session = dict(sessionId=self.call('Target.attachToTarget', targetId=target, flatten=True)['sessionId'])

    def call(self, method, **parameters):
        """The result of a command. Events that come before it are left out."""
        self.number += 1
        message = dict(id=self.number, method=method, params=parameters) | self.session
        os.write(self.commands, json.dumps(message).encode() + b'\0')
        while True:
            *messages, self.held = self.held.split(b'\0')
            for answer in map(json.loads, messages):
                if answer.get('id') == self.number:
                    assert 'error' not in answer, answer
                    return answer['result']
            assert select.select([self.answers], [], [], SECONDS)[0], f'{method} has no answer'
            piece = os.read(self.answers, 2 ** 16)
            assert piece, f'the browser ended before it answered {method}'
            self.held += piece

    def evaluate(self, expression):
        """The value of an expression of JavaScript, which may be a promise."""
        found = self.call('Runtime.evaluate', expression=expression, awaitPromise=True, returnByValue=True)
        assert 'exceptionDetails' not in found, found
        return found['result'].get('value')

    def wait_for(self, condition):
        deadline = time.monotonic() + SECONDS
        while not self.evaluate(condition):
            assert time.monotonic() < deadline, f'{condition} is not so'

    def open(self, address):
        self.call('Page.navigate', url=address)
        self.wait_for(f'location.href.startsWith({json.dumps(address)}) && document.readyState == "complete"')

    def say(self, text):
        """Type a message into the page and press Enter; returns [class, text] of all that is shown then."""
        self.evaluate('document.getElementById("text").focus()')
        self.call('Input.insertText', text=text)
        key = dict(key='Enter', code='Enter', windowsVirtualKeyCode=13)
        self.call('Input.dispatchKeyEvent', type='keyDown', text='\r', **key)
        self.call('Input.dispatchKeyEvent', type='keyUp', **key)
        self.wait_for('!document.getElementById("send").disabled')
        return self.shown()

    def shown(self):
        return self.evaluate('[...document.getElementById("messages").children].map(e => [e.className, e.textContent])')

    def click(self, name):
        self.evaluate(f'document.getElementById("{name}").click()')


@pytest.fixture(scope='module')
def tab(tmp_path_factory):
    """A Tab of a browser that ends with the tests of this file."""
    folder = tmp_path_factory.mktemp('browser')
    (read_commands, commands), (answers, write_answers) = os.pipe(), os.pipe()
    # The browser reads file 3 and writes file 4, which may be numbers of these pipes.
    theirs = [fcntl.fcntl(pipe, fcntl.F_DUPFD, 10) for pipe in (read_commands, write_answers)]
    os.close(read_commands)
    os.close(write_answers)
    shell = f'exec "$@" 3<&{theirs[0]} 4>&{theirs[1]}'
    # As root, its sandbox does not start.
    command = [BROWSER, '--headless', '--no-sandbox', '--disable-gpu', '--disable-dev-shm-usage', '--no-first-run',
               f'--user-data-dir={folder}', '--remote-debugging-pipe']
    with subprocess.Popen(['bash', '-c', shell, 'bash', *command], pass_fds=theirs, stdout=subprocess.DEVNULL,
                          stderr=subprocess.DEVNULL) as process:
        for pipe in theirs:
            os.close(pipe)
        try:
            tab = Tab(commands, answers)
            yield tab
            tab.session = {}
            with contextlib.suppress(AssertionError, OSError):
                tab.call('Browser.close')  # and its processes
            process.wait(SECONDS)
        finally:
            process.kill()
            os.close(commands)
            os.close(answers)


@pytest.fixture(scope='module')
def server(trained):  # noqa: F811
    pytest.importorskip('starlette')
    pytest.importorskip('uvicorn')
    with serving(f'--out_dir={trained}', '--temperature=0', '--max_new_tokens=4', '--api_key=secret') as process:
        yield process


def answer_to(server, messages):
    """What a program gets as the answer to messages."""
    status, content = send(server, dict(messages=messages), Authorization='Bearer secret')
    assert status == 200
    return content['choices'][0]['message']['content']


def test_person_talks_with_the_model_on_the_page(tab, server):
    """A wrong key, two turns, one for which the context is too short, and a new conversation."""
    tab.open(f'http://127.0.0.1:{server.port}/')
    error = ['message error', 'the API key is missing or wrong']
    assert tab.say('HI') == [['message user', 'HI'], error]
    tab.evaluate('document.getElementById("key").value = "secret"')
    tab.click('reset')
    assert tab.shown() == []
    one = answer_to(server, HI)
    assert tab.say('HI') == [['message user', 'HI'], ['message assistant', one]]
    html = '<b>HO</b>'
    two = answer_to(server, [*HI, dict(role='assistant', content=one), dict(role='user', content=html)])
    turns = [['message user', 'HI'], ['message assistant', one], ['message user', html], ['message assistant', two]]
    assert tab.say(html) == turns and tab.evaluate('document.querySelector("#messages b")') is None
    shown = tab.say('HI' * 20)
    assert shown[:5] == [*turns, ['message user', 'HI' * 20]]
    assert shown[5][0] == 'message error' and 'but the model sees 64: shorten it' in shown[5][1] and len(shown) == 6
    tab.click('reset')
    tab.evaluate('document.getElementById("system").value = "S"')
    assert tab.say('HI')[1] == ['message assistant', answer_to(server, [dict(role='system', content='S'), *HI])]


def test_page_of_another_site_cannot_use_the_server(tab, server):
    """Neither with JSON, about which a browser asks the server first, nor with text, which it sends at once.

    The same address under another name is another site for a browser.
    """
    tab.open(f'http://localhost:{server.port}/')
    for site, expected in ((f'http://localhost:{server.port}', 401), (f'http://127.0.0.1:{server.port}', 'TypeError')):
        for kind in ('application/json', 'text/plain'):
            options = dict(method='POST', body=json.dumps(dict(messages=HI)), headers={'Content-Type': kind})
            request = f'fetch("{site}/v1/chat/completions", {json.dumps(options)})'
            assert tab.evaluate(f'{request}.then(r => r.status, e => e.name)') == expected
