"""A Hugging Face hub on loopback for tests: the few routes that a download needs.

    python tests/hub_server.py FOLDER 8000     # serves FOLDER/models/org/name and FOLDER/datasets/org/name

HF_ENDPOINT=http://127.0.0.1:8000 then names it.
"""
import hashlib
import http.server
import json
import pathlib
import re
import sys
import threading

LARGE = ('.safetensors', '.gguf', '.parquet', '.bin')  # kept apart by the hub, with a sha256
COMMIT = 'c0ffee' + 34 * '0'  # of every repository


class Hub(http.server.ThreadingHTTPServer):
    """Serves a folder, with faults that the attributes choose.

    stall: bytes after which no more comes of the body of a large file; None = never.
    gated: names of repositories whose files are refused. token: the only one that is accepted, '' = any.
    requests: [(method, path, Range header or None)] so far.
    """
    daemon_threads = True

    def __init__(self, folder, port=0):
        super().__init__(('127.0.0.1', port), _Handler)
        self.folder, self.stall, self.gated, self.token, self.requests = pathlib.Path(folder), None, (), '', []
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def url(self):
        return f'http://127.0.0.1:{self.server_port}'

    def downloads(self):
        """{file: [Range header or None of each time that it was read]}."""
        found = {}
        for method, path, span in self.requests:
            if method == 'GET' and '/resolve/' in path:
                found.setdefault(path.partition(COMMIT + '/')[2], []).append(span)
        return found


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = 'HTTP/1.1'

    def log_message(self, *args):
        pass

    def do_GET(self):
        server, path = self.server, self.path.partition('?')[0]
        server.requests.append((self.command, path, self.headers.get('Range')))
        token = self.headers.get('Authorization', '').removeprefix('Bearer ')
        if server.token and token not in ('', server.token):
            return self.refuse(401, None, 'Invalid credentials in Authorization header')
        if found := re.fullmatch(r'/api/(models|datasets)/([^/]+/[^/]+)/revision/(.+)', path):
            kind, name, revision = found.groups()
            return self.describe(server.folder / kind / name, revision)
        found = re.fullmatch(r'/(datasets/)?([^/]+/[^/]+)/resolve/([^/]+)/(.+)', path)
        if not found:
            return self.refuse(404, 'EntryNotFound')
        kind, name, _, file = found.groups()
        if name in server.gated:
            return self.refuse(403, 'GatedRepo')
        self.send_file(server.folder / (kind or 'models') / name / file)

    do_HEAD = do_GET

    def refuse(self, status, code, message=''):
        named = {'X-Error-Code': code} if code else {}
        self.answer(status, b'', named | {'X-Error-Message': message})

    def answer(self, status, body, headers, is_large=False):
        self.send_response(status)
        for key, value in headers.items():
            self.send_header(key, value)
        if 'Content-Length' not in headers:
            self.send_header('Content-Length', len(body))
        self.end_headers()
        if self.command == 'HEAD':
            return
        if is_large and self.server.stall is not None:
            self.wfile.write(body[:self.server.stall])
            threading.Event().wait()
        self.wfile.write(body)

    def describe(self, folder, revision):
        if not folder.exists():
            return self.refuse(401, 'RepoNotFound')
        if revision not in ('main', 'v1', COMMIT):
            return self.refuse(404, 'RevisionNotFound')
        files = []
        for path in sorted(filter(pathlib.Path.is_file, folder.rglob('*'))):
            entry = dict(rfilename=path.relative_to(folder).as_posix(), size=path.stat().st_size, blobId=digest(path))
            if path.suffix in LARGE:
                entry['lfs'] = dict(sha256=digest(path), size=entry['size'], pointerSize=1)
            files.append(entry)
        name = '/'.join(folder.parts[-2:])
        info = dict(id=name, modelId=name, sha=COMMIT, siblings=files, private=False, gated=False, tags=[], downloads=0)
        self.answer(200, json.dumps(info).encode(), {'Content-Type': 'application/json'})

    def send_file(self, path):
        if not path.exists():
            return self.refuse(404, 'EntryNotFound')
        content, begin = path.read_bytes(), 0
        if span := re.fullmatch(r'bytes=(\d+)-', self.headers.get('Range', '')):
            begin = int(span[1])
        headers = {'ETag': f'"{digest(path)}"', 'X-Repo-Commit': COMMIT, 'Content-Length': str(len(content) - begin)}
        if begin:
            headers['Content-Range'] = f'bytes {begin}-{len(content) - 1}/{len(content)}'
        self.answer(206 if begin else 200, content[begin:], headers, path.suffix in LARGE)


def digest(path):
    return hashlib.sha256(path.read_bytes()).hexdigest()


if __name__ == '__main__':
    Hub(sys.argv[1], int(sys.argv[2]))
    threading.Event().wait()
