"""Object storage on loopback for tests: moto's server of S3, and a proxy before it that makes faults.

    python tests/object_store.py 5000     # a server without faults on that port
"""
import http.client
import http.server
import random
import re
import sys
import threading
import time


class FaultyProxy(http.server.ThreadingHTTPServer):
    """Passes requests on to a server, with faults that the attributes choose.

    latency: seconds before each answer. busy: share of requests that are answered by 503. cut: share of the
    bodies of more than 1,000 bytes that end in the middle. lag: seconds for which lists of files leave out
    what is new. rate: bytes a second of all answers together; None = no limit.
    requests: [(method, path)] so far. seed: of the faults.
    """
    daemon_threads = True
    request_queue_size = 128

    def __init__(self, upstream, latency=0.0, busy=0.0, cut=0.0, lag=0.0, rate=None, seed=0):
        super().__init__(('127.0.0.1', 0), _Handler)
        self.upstream, self.latency, self.busy, self.cut, self.lag, self.rate = (
            upstream, latency, busy, cut, lag, rate)
        self.random, self.lock = random.Random(seed), threading.Lock()
        self.requests, self.written, self.busy_until = [], {}, 0.0
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def url(self):
        return f'http://127.0.0.1:{self.server_port}'

    def happens(self, share):
        with self.lock:
            return self.random.random() < share

    def pace(self, n_bytes):
        """Wait until n_bytes have had their time on a line of `rate` bytes a second."""
        if self.rate:
            with self.lock:
                self.busy_until = max(self.busy_until, time.monotonic()) + n_bytes / self.rate
                wait = self.busy_until - time.monotonic()
            time.sleep(max(0, wait))

    def handle_error(self, request, client_address):
        pass  # a client that was killed


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = 'HTTP/1.1'
    disable_nagle_algorithm = True

    def log_message(self, *args):
        pass

    def do_any(self):
        server = self.server
        server.requests.append((self.command, self.path))
        body = self._read_body()
        time.sleep(server.latency)
        if server.happens(server.busy):
            self._answer(503, [], b'<Error><Code>ServiceUnavailable</Code></Error>')
            return
        status, headers, content = self._ask(body)
        if self.command in ('PUT', 'POST') and status == 200:
            server.written.setdefault(self.path.partition('?')[0], time.monotonic())
        if server.lag and 'list-type' in self.path:
            content = self._without_new(content)
        self._answer(status, headers, content)

    do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = do_any

    def _read_body(self):
        if 'chunked' not in self.headers.get('Transfer-Encoding', ''):
            return self.rfile.read(int(self.headers.get('Content-Length') or 0))
        body = b''
        while size := int(self.rfile.readline().split(b';')[0], 16):
            body += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return body

    def _ask(self, body):
        connection = http.client.HTTPConnection(self.server.upstream, timeout=60)
        headers = {key: value for key, value in self.headers.items() if key.lower() not in (
            'transfer-encoding', 'content-length')}
        connection.request(self.command, self.path, body, headers)
        answer = connection.getresponse()
        content = answer.read()
        connection.close()
        return answer.status, answer.getheaders(), content

    def _without_new(self, content):
        """A list of files (XML) without those that were written less than `lag` seconds ago."""
        now = time.monotonic()
        new = {path.split('/', 2)[2] for path, since in self.server.written.items()
               if path.count('/') > 1 and now - since < self.server.lag}
        return re.sub(rb'<Contents>.*?</Contents>', lambda found: b'' if re.search(
            rb'<Key>(.*?)</Key>', found[0])[1].decode() in new else found[0], content, flags=re.DOTALL)

    def _answer(self, status, headers, content):
        self.send_response_only(status)
        length = dict((key.lower(), value) for key, value in headers).get('content-length', len(content))
        for key, value in headers:
            if key.lower() not in ('content-length', 'transfer-encoding', 'connection'):
                self.send_header(key, value)
        self.send_header('Content-Length', length if self.command == 'HEAD' else str(len(content)))
        self.end_headers()
        if self.command == 'HEAD':
            return
        if len(content) > 1000 and self.server.happens(self.server.cut):
            self.wfile.write(content[:len(content) // 2])
            self.close_connection = True
            return
        for begin in range(0, len(content), 2 ** 16):
            piece = content[begin:begin + 2 ** 16]
            self.server.pace(len(piece))
            self.wfile.write(piece)


def start_moto():
    """Start moto's server on a free port of loopback; returns (server, 'host:port')."""
    from moto.server import ThreadedMotoServer
    server = ThreadedMotoServer(ip_address='127.0.0.1', port=0, verbose=False)
    server.start()
    return server, '127.0.0.1:%d' % server.get_host_and_port()[1]


if __name__ == '__main__':
    from moto.server import main
    main(['-H', '127.0.0.1', '-p', sys.argv[1]])
