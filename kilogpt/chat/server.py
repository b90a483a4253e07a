"""An OpenAI-compatible server of one model: Starlette and uvicorn speak HTTP, the main thread generates.

Up to ROWS texts grow together, and others wait for their turn. A client that vanishes gives its place away.
"""
import asyncio
import contextlib
import hmac
import json
import pathlib
import queue
import sys
import threading
import time
import traceback

from kilogpt.chat.requests import CutAtStops, RequestError, check_model, parse
from kilogpt.generate.engine import Request

ROWS = 8  # texts that grow at the same time, each with a row of the cache
MAX_BODY = 2 ** 22  # bytes
MAX_REQUESTS = 64  # that wait or are answered; more get status 429
MAX_SECONDS = 600  # until the turn of a request comes, and then for its text
MAX_BODY_SECONDS = 60
FAILED = 'the server failed; its log says where'
PAGE = pathlib.Path(__file__).with_name('page.html')
LOOPBACK = '127.0.0.1', 'localhost'


class Job:
    """A request on its way from the server's thread to the main thread, and its text on the way back."""

    def __init__(self, request):
        self.request = request
        self.loop = asyncio.get_running_loop()
        self.events = asyncio.Queue()
        self.deadline = time.monotonic() + MAX_SECONDS
        self.is_over = False  # the client is gone

    def send(self, event):
        """To the server: the numbers of tokens so far as a dict, a piece of text, a reason, or an error."""
        with contextlib.suppress(RuntimeError):  # the server has ended
            self.loop.call_soon_threadsafe(self.events.put_nowait, event)


class End(str):
    """Why a text ended."""


def run(engine, template, name, socket, host, api_key, max_new_tokens, temperature, top_k, top_p, seed):
    """Answer requests until Ctrl-C. engine: an Engine. template: a ChatTemplate. name: that of the model.

    socket: from bind(host, ...). api_key: '' = none. The other arguments are the keys of sample.py, and seed is
    that of requests without one. ImportError without the libraries.
    """
    jobs = queue.SimpleQueue()
    defaults = dict(max_tokens=max_new_tokens, temperature=temperature, top_p=1.0 if top_p is None else top_p)
    app = build_app(jobs, name, api_key, defaults, host)
    import uvicorn
    server = uvicorn.Server(uvicorn.Config(app, log_level='warning', timeout_graceful_shutdown=1))
    thread = threading.Thread(target=server.run, args=([socket],), daemon=True)
    thread.start()
    host, port = socket.getsockname()[:2]
    print(f'{name} answers at http://{host}:{port}/v1, with a page at http://{host}:{port}; Ctrl-C ends it',
          file=sys.stderr, flush=True)
    if host not in LOOPBACK and not api_key:
        print('whoever reaches that address can use the model: set --api_key', file=sys.stderr)
    answers = Answers(engine, template, top_k, seed)
    with contextlib.suppress(KeyboardInterrupt):
        while True:
            new = [] if answers.growing else [jobs.get()]
            while not jobs.empty():
                new.append(jobs.get())
            for job in new:
                answers.begin(job)
            answers.step()
    server.should_exit = True
    thread.join()


def bind(host, port):
    """A socket that listens there. OSError, in one sentence, if it cannot."""
    import socket
    try:
        return socket.create_server((host, port), family=socket.AF_INET6 if ':' in host else socket.AF_INET)
    except (OSError, OverflowError) as error:  # OverflowError: beyond 65535
        raise OSError(f'cannot listen at port {port} of {host} ({getattr(error, "strerror", error)}): set --port '
                      'or --host') from None


class Answers:
    """The texts of jobs, which grow together. Used by the main thread."""

    def __init__(self, engine, template, top_k, seed):
        self.engine, self.template, self.top_k, self.seed = engine, template, top_k, seed
        self.growing = {}  # {Request: (Job, Answer)}
        self.n_begun = 0

    def begin(self, job):
        """Submit the text of a job to the engine, or tell the client why not."""
        asked, answer = job.request, Answer(job, self.template)
        self.n_begun += 1
        try:
            ids, stop_ids = self._encode(asked)
        except RequestError as error:
            return job.send(error)
        except Exception:
            traceback.print_exc()
            return job.send(RequestError(500, FAILED))
        answer.usage.update(prompt_tokens=len(ids), total_tokens=len(ids))
        seed = (self.seed, self.n_begun) if asked.seed is None else asked.seed
        request = Request(ids, min(asked.max_tokens, self.engine.block_size - len(ids)), asked.temperature, self.top_k,
                          asked.top_p, stop_ids, answer.take, seed)
        self.growing[request] = job, answer
        self.engine.submit(request)

    def step(self):
        """Let the texts grow by a token, and end those that are over or that nobody waits for."""
        for request, (job, _) in list(self.growing.items()):
            if not job.is_over and time.monotonic() > job.deadline and request in self.engine.waiting:
                job.send(RequestError(503, f'no turn came within {MAX_SECONDS} seconds: try again later'))
                job.is_over = True
            if job.is_over or time.monotonic() > job.deadline + MAX_SECONDS:
                self.engine.cancel(request)
        try:
            self.engine.step()
        except Exception:
            traceback.print_exc()
            for request, (job, _) in self.growing.items():
                self.engine.cancel(request)
                job.send(RequestError(500, FAILED))
            self.growing.clear()
        for request, (_, answer) in list(self.growing.items()):
            if request.reason is not None:
                answer.end('length' if request.reason == 'cancelled' else request.reason)
                del self.growing[request]

    def _encode(self, asked):
        """(ids of the prompt, ids that end the text). RequestError if the model cannot see them."""
        tokenizer, stop_ids = self.template.tokenizer, self.template.stop_ids
        try:
            if asked.messages is not None:
                if 'tools' in asked.more and not self.template.reads('tools'):
                    raise ValueError(f'tools is not supported: {self.template.where} does not write them')
                ids = self.template.encode(asked.messages, add_generation_prompt=True, more=asked.more)
            else:
                ids, stop_ids = asked.prompt, tokenizer.end_ids
                if isinstance(ids, str):
                    ids = tokenizer.encode_prompt(ids)
                ids = ids or [tokenizer.eot or 0]  # the model needs at least one token
        except ValueError as error:
            raise RequestError(400, str(error)) from None
        if not all(0 <= token < tokenizer.vocab_size for token in ids):
            raise RequestError(400, f'the prompt has ids that are not from 0 to {tokenizer.vocab_size - 1}')
        if len(ids) >= self.engine.block_size:
            raise RequestError(400, f'the prompt has {len(ids)} tokens, but the model sees '
                                    f'{self.engine.block_size}: shorten it', 'context_length_exceeded')
        return list(ids), stop_ids


class Answer:
    """The text of a job on its way from tokens to the client."""

    def __init__(self, job, template):
        self.job, self.text_of, self.cut = job, template.tokenizer.text_stream(), CutAtStops(job.request.stop)
        self.usage = dict(prompt_tokens=0, completion_tokens=0, total_tokens=0)
        # After the colon of the default template a space begins each answer; of other templates it is the model's.
        self.begun, self.has_begun = job.request.messages is None or bool(template.source), False

    def take(self, tokens):
        """Send the text that the last of the tokens adds; returns whether the answer ends with it."""
        self._begin()
        self.usage['completion_tokens'] += 1
        self.usage['total_tokens'] += 1
        self._send(self.cut.add(self.text_of(tokens[-1])))
        return self.cut.is_over

    def end(self, reason):
        self._begin()
        self._send(self.cut.add(self.text_of(), is_last=True))
        self.job.send(End('stop' if self.cut.is_over else reason))

    def _begin(self):
        """Send the numbers of tokens, which come first, and change until the end."""
        if not self.has_begun:
            self.job.send(self.usage)
        self.has_begun = True

    def _send(self, piece):
        piece = piece if self.begun else piece.lstrip()
        self.begun = self.begun or bool(piece)
        if piece:
            self.job.send(piece)


def build_app(jobs, name, api_key, defaults, host):
    """The Starlette application. Its thread only passes on what the main thread generates."""
    try:
        import uvicorn  # noqa: F401
        from starlette.applications import Starlette
        from starlette.exceptions import HTTPException
        from starlette.middleware import Middleware
        from starlette.middleware.trustedhost import TrustedHostMiddleware
        from starlette.responses import HTMLResponse, JSONResponse, StreamingResponse
        from starlette.routing import Route
    except ImportError as error:
        raise ImportError(f'--serve needs {error.name}: pip install starlette uvicorn') from None
    active = set()
    created = int(time.time())

    def refuse(request, error):
        headers = {'Retry-After': '5'} if error.status == 429 else None
        return JSONResponse(error.body(), error.status, headers)

    def refuse_http(request, error):
        """A path or a method that the server does not have."""
        message = f'{request.method} {request.url.path}: {error.detail}'
        return refuse(request, RequestError(error.status_code, message))

    def check_key(request):
        given = request.headers.get('authorization', '').removeprefix('Bearer ')
        if api_key and not hmac.compare_digest(given.encode(), api_key.encode()):
            raise RequestError(401, 'the API key is missing or wrong', 'invalid_api_key')

    async def page(request):
        return HTMLResponse(PAGE.read_text(encoding='utf-8'))

    model = dict(id=name, object='model', created=created, owned_by='kilogpt')

    async def models(request):
        check_key(request)
        return JSONResponse(dict(object='list', data=[model]))

    async def one_model(request):
        check_key(request)
        check_model(request.path_params['name'], name)
        return JSONResponse(model)

    async def generate(request):
        check_key(request)
        if len(active) >= MAX_REQUESTS:
            raise RequestError(429, f'{MAX_REQUESTS} requests are waiting: try again later',
                               'rate_limit_exceeded')
        active.add(request)
        try:
            is_chat = request.url.path.endswith('/chat/completions')
            job = Job(parse(await read_body(request), is_chat, name, defaults))
        except BaseException:
            active.discard(request)
            raise
        watcher = asyncio.create_task(watch(request, job))
        watcher.add_done_callback(lambda _: active.discard(request))

        def end():
            job.is_over = True
            watcher.cancel()

        try:
            jobs.put(job)
            usage = await job.events.get()
            if isinstance(usage, RequestError):
                raise usage
            if job.request.is_streamed and not isinstance(usage, End):
                return StreamingResponse(stream(job, usage, end), media_type='text/event-stream')
            text, reason = [], usage
            while not isinstance(reason, End):
                reason = await job.events.get()
                if isinstance(reason, RequestError):
                    raise reason
                text.append(reason)
        except BaseException:
            end()
            raise
        end()
        return JSONResponse(job.request.full(''.join(text[:-1]), str(reason), usage))

    return Starlette(
        routes=[Route('/', page), Route('/v1/models', models), Route('/v1/models/{name:path}', one_model),
                Route('/v1/chat/completions', generate, methods=['POST']),
                Route('/v1/completions', generate, methods=['POST'])],
        # Otherwise a page of another site could reach the server under a name of its own (DNS rebinding).
        middleware=[Middleware(TrustedHostMiddleware, allowed_hosts=LOOPBACK)] if host in LOOPBACK else [],
        exception_handlers={RequestError: refuse, HTTPException: refuse_http})


async def read_body(request):
    """The body of a request, which is JSON of at most MAX_BODY bytes."""
    from starlette.requests import ClientDisconnect
    # Browsers send JSON to another site only if that site agrees, and this one does not.
    if request.headers.get('content-type', '').partition(';')[0].strip() != 'application/json':
        raise RequestError(415, 'the body must have the header Content-Type: application/json')
    body = bytearray()
    try:
        async with asyncio.timeout(MAX_BODY_SECONDS):
            async for chunk in request.stream():
                body += chunk
                if len(body) > MAX_BODY:
                    raise RequestError(413, f'the body has more than {MAX_BODY} bytes: shorten it')
    except TimeoutError:
        raise RequestError(408, f'the body did not come within {MAX_BODY_SECONDS} seconds') from None
    except ClientDisconnect:
        raise RequestError(400, 'the client vanished before the end of the body') from None
    return bytes(body)


async def watch(request, job):
    """Notice that a client has vanished."""
    while not job.is_over:
        message = await request.receive()
        if message['type'] == 'http.disconnect':
            job.is_over = True
            job.events.put_nowait(End('vanished'))


async def stream(job, usage, end):
    """Yield the server-sent events of a text. end(): called when they end, even if the client vanishes."""
    request, reason = job.request, None
    try:
        if request.messages is not None:
            yield as_event(request.chunk('', is_first=True))
        while reason is None:
            event = await job.events.get()
            if isinstance(event, RequestError):
                yield as_event(event.body())
                return
            reason = str(event) if isinstance(event, End) else None
            yield as_event(request.chunk('' if reason else event, reason))
        if request.wants_usage:
            yield as_event(request.last_chunk(usage))
        yield 'data: [DONE]\n\n'
    finally:
        end()


def as_event(body):
    return f'data: {json.dumps(body)}\n\n'
