"""An OpenAI-compatible server of one model: Starlette and uvicorn speak HTTP, the main thread generates.

Requests take turns, in the order in which they come, and a text is generated as a whole before the next one.
A client that vanishes gives its turn away.
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

import torch

from kilogpt.chat.requests import RequestError, check_model, cut_at, parse

MAX_BODY = 2 ** 22  # bytes
MAX_REQUESTS = 64  # that wait or are answered; more get status 429
MAX_SECONDS = 600  # until the turn of a request comes, and then for its text
MAX_BODY_SECONDS = 60
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


def run(conversation, name, host, port, api_key, max_new_tokens, temperature, top_k, top_p, generator):
    """Answer requests until Ctrl-C. name: that of the model. api_key: '' = none.

    The other arguments are the keys of sample.py, and generator draws where a request does not have a seed.
    ImportError without the libraries, OSError if the port is taken.
    """
    jobs = queue.SimpleQueue()
    defaults = dict(max_tokens=max_new_tokens, temperature=temperature, top_p=1.0 if top_p is None else top_p)
    app = build_app(jobs, name, api_key, defaults, host)
    import uvicorn
    config = uvicorn.Config(app, host, port, log_level='warning', timeout_graceful_shutdown=1)
    server, socket = uvicorn.Server(config), bind(host, port)
    thread = threading.Thread(target=server.run, args=([socket],), daemon=True)
    thread.start()
    host, port = socket.getsockname()[:2]
    print(f'{name} answers at http://{host}:{port}/v1, with a page at http://{host}:{port}; Ctrl-C ends it',
          file=sys.stderr, flush=True)
    if host not in LOOPBACK and not api_key:
        print('whoever reaches that address can use the model: set --api_key', file=sys.stderr)
    with contextlib.suppress(KeyboardInterrupt):
        while True:
            job = jobs.get()
            try:
                answer(conversation, job, top_k, generator)
            except RequestError as error:
                job.send(error)
            except Exception:
                traceback.print_exc()
                job.send(RequestError(500, 'the server failed; its log says where'))
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


def answer(conversation, job, top_k, generator):
    """Generate the text of a job, piece by piece. Runs in the main thread."""
    request, tokenizer, stop_ids = job.request, conversation.tokenizer, conversation.template.stop_ids
    if job.is_over:
        return
    if time.monotonic() > job.deadline:
        raise RequestError(503, f'no turn came within {MAX_SECONDS} seconds: try again later')
    try:
        if request.messages is not None:
            if 'tools' in request.more and not conversation.template.reads('tools'):
                raise ValueError(f'tools is not supported: {conversation.template.where} does not write them')
            ids = conversation.template.encode(request.messages, add_generation_prompt=True, more=request.more)
        else:
            ids, stop_ids = request.prompt, tokenizer.end_ids
            if isinstance(ids, str):
                ids = tokenizer.encode_prompt(ids)
            ids = ids or [tokenizer.eot or 0]  # the model needs at least one token
    except ValueError as error:
        raise RequestError(400, str(error)) from None
    if not all(0 <= token < tokenizer.vocab_size for token in ids):
        raise RequestError(400, f'the prompt has ids that are not from 0 to {tokenizer.vocab_size - 1}')
    if len(ids) >= conversation.block_size:
        raise RequestError(400, f'the prompt has {len(ids)} tokens, but the model sees '
                                f'{conversation.block_size}: shorten it', 'context_length_exceeded')
    if request.seed is not None:
        generator = torch.Generator(generator.device).manual_seed(request.seed)
    usage = dict(prompt_tokens=len(ids), completion_tokens=0, total_tokens=len(ids))
    job.send(usage)
    deadline = time.monotonic() + MAX_SECONDS

    def tokens():
        for token in conversation.generate(ids, request.max_tokens, request.temperature, top_k, request.top_p,
                                           generator, stop_ids):
            usage['completion_tokens'] += 1
            usage['total_tokens'] += 1
            yield token

    # After the colon of the default template a space begins each answer; of other templates it is the model's.
    begun, reason = request.messages is None or bool(conversation.template.source), None
    for piece in cut_at(request.stop, conversation.decode(tokens())):
        if piece is None:
            reason = 'stop'
            break
        piece = piece if begun else piece.lstrip()
        begun = begun or bool(piece)
        if job.is_over or time.monotonic() > deadline:
            break
        if piece:
            job.send(piece)
    job.send(End(reason or conversation.reason))


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
