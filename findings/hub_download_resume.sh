#!/usr/bin/env bash
# huggingface_hub 2.4 does not continue a download that another process began: a killed one starts at 0 again.
#
#     bash findings/hub_download_resume.sh
#
# The script installs huggingface_hub==2.4.0 in a temporary folder and serves a file of 60 MB from a hub on loopback,
# which stops after 40 MB. The process that downloads is killed there, and a second one downloads the same file. No
# code of kiloGPT runs. Version 0.26.0 keeps SHA.incomplete and asks for the rest with a Range header; 2.4.0 gives each
# process a file of its own name, because some file systems say yes to every lock (its pull request 4228).
#
# Exit code: 0 if the surprise is still there, 1 if the second process asks for the rest or the script fails.
#
# Variables: HUB=0.26.0 tries another version, and PYTHON=path uses a Python that has it, without a venv.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

if [ -z "${PYTHON:-}" ]; then
    python3 -m venv "$folder/venv"
    PYTHON="$folder/venv/bin/python"
    "$PYTHON" -m pip install --quiet "huggingface_hub==${HUB:-2.4.0}"
fi

cat > "$folder/script.py" <<'SCRIPT'
import hashlib
import http.server
import os
import re
import subprocess
import sys
import threading
import time

import huggingface_hub

SIZE, STOP = 60_000_000, 40_000_000
CONTENT = bytes(range(256)) * (SIZE // 256 + 1)
CONTENT = CONTENT[:SIZE]
SHA = hashlib.sha256(CONTENT).hexdigest()
ranges, stops = [], threading.Event()


class Hub(http.server.BaseHTTPRequestHandler):
    protocol_version = 'HTTP/1.1'

    def log_message(self, *args):
        pass

    def do_GET(self):
        span = self.headers.get('Range')
        begin = int(re.fullmatch(r'bytes=(\d+)-', span)[1]) if span and self.command == 'GET' else 0
        self.send_response(206 if begin else 200)
        for key, value in {'ETag': f'"{SHA}"', 'X-Repo-Commit': 'c0ffee' + 34 * '0', 'Accept-Ranges': 'bytes',
                           'Content-Length': SIZE - begin}.items():
            self.send_header(key, value)
        if begin:
            self.send_header('Content-Range', f'bytes {begin}-{SIZE - 1}/{SIZE}')
        self.end_headers()
        if self.command == 'HEAD':
            return
        ranges.append(span)
        if len(ranges) == 1:
            self.wfile.write(CONTENT[:STOP])
            stops.set()
            threading.Event().wait()
        self.wfile.write(CONTENT[begin:])

    do_HEAD = do_GET


server = http.server.ThreadingHTTPServer(('127.0.0.1', 0), Hub)
server.daemon_threads = True
threading.Thread(target=server.serve_forever, daemon=True).start()
environment = dict(os.environ, HF_ENDPOINT=f'http://127.0.0.1:{server.server_port}', HF_HOME=sys.argv[1],
                   HF_HUB_DISABLE_XET='1', HF_HUB_DISABLE_PROGRESS_BARS='1', HF_HUB_DISABLE_TELEMETRY='1')
download = [sys.executable, '-c', 'import huggingface_hub as hub; print(hub.hf_hub_download("org/name", "model.bin"))']

print(f'huggingface_hub {huggingface_hub.__version__}, a file of {SIZE:,} bytes')
first = subprocess.Popen(download, env=environment)
assert stops.wait(60), 'the first process has asked for nothing'
time.sleep(2)  # until what came is written
first.kill()
first.wait()
left = [(os.path.getsize(os.path.join(path, name)), name) for path, _, names in os.walk(sys.argv[1])
        for name in names if name.endswith('.incomplete')]
print(f'killed after {STOP:,} bytes; left in the cache: {left}')
path = subprocess.run(download, env=environment, check=True, capture_output=True, text=True).stdout.strip()
with open(path, 'rb') as file:
    assert hashlib.file_digest(file, 'sha256').hexdigest() == SHA
print('expected: the second process asks for the rest, with a Range header that begins where the first ended')
print(f'seen: the Range headers of the downloads are {ranges}')
sys.exit(ranges != [None, None])
SCRIPT
"$PYTHON" "$folder/script.py" "$folder/home"
