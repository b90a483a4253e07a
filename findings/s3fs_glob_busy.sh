#!/usr/bin/env bash
# fsspec's glob leaves out a folder whose listing fails: where a bucket answers it with 503, the result is an empty list.
#
#     bash findings/s3fs_glob_busy.sh
#
# The script installs s3fs==2026.9.0 (and the fsspec that it pins) in a temporary folder, and asks a server on loopback
# with three files in a folder. It answers the first request for the folder's list, and from then on says "SlowDown", as
# S3 does when many clients list a prefix at once. ls raises then; glob, which asks for the list twice, says that there
# is nothing. A program that trains on `fs.glob('bucket/folder/*.jsonl')` then trains on fewer files without a word. No
# code of kiloGPT runs.
#
# Exit code: 0 if the surprise is still there, 1 if glob raises too or the script fails.
#
# Variables: S3FS=2025.9.0 tries another version, and PYTHON=path uses a Python that has it, without a venv.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

if [ -z "${PYTHON:-}" ]; then
    python3 -m venv "$folder/venv"
    PYTHON="$folder/venv/bin/python"
    "$PYTHON" -m pip install --quiet "s3fs==${S3FS:-2026.9.0}"
fi

cat > "$folder/script.py" <<'SCRIPT'
import http.server
import sys
import threading

import fsspec
import s3fs

BUSY = b'<?xml version="1.0"?><Error><Code>SlowDown</Code><Message>Please reduce your request rate.</Message></Error>'
FILES = ''.join(f'<Contents><Key>folder/{name}.jsonl</Key><Size>3</Size><ETag>"0"</ETag><StorageClass>STANDARD</StorageClass>'
                '<LastModified>2026-01-01T00:00:00.000Z</LastModified></Contents>' for name in 'abc')
LIST = ('<?xml version="1.0"?><ListBucketResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/"><Name>bucket</Name>'
        '<Prefix>folder/</Prefix><KeyCount>3</KeyCount><MaxKeys>1000</MaxKeys><IsTruncated>false</IsTruncated>'
        f'{FILES}</ListBucketResult>').encode()


lists = []


class Bucket(http.server.BaseHTTPRequestHandler):
    protocol_version = 'HTTP/1.1'

    def log_message(self, *args):
        pass

    def do_GET(self):
        is_list = 'list-type' in self.path
        status, body = (404, b'') if not is_list else (200, LIST)
        if is_list and 'max-keys' not in self.path and self.command == 'GET':
            lists.append(self.path)
            if len(lists) > 1:
                status, body = 503, BUSY
        self.send_response(status)
        self.send_header('Content-Type', 'application/xml')
        self.send_header('Content-Length', len(body))
        self.end_headers()
        if self.command == 'GET':
            self.wfile.write(body)

    do_HEAD = do_GET


server = http.server.ThreadingHTTPServer(('127.0.0.1', 0), Bucket)
server.daemon_threads = True
threading.Thread(target=server.serve_forever, daemon=True).start()
s3fs.S3FileSystem.retries = 1  # with all retries the result is the same, after 51 requests and two minutes
fs = s3fs.S3FileSystem(key='a', secret='b', endpoint_url=f'http://127.0.0.1:{server.server_port}', use_listings_cache=False,
                       config_kwargs=dict(retries=dict(total_max_attempts=1)))

print(f's3fs {s3fs.__version__}, fsspec {fsspec.__version__}; the first list of the folder is given, the next are 503')
seen = {}
for name, call in dict(glob=lambda: fs.glob('bucket/folder/*.jsonl'), ls=lambda: fs.ls('bucket/folder')).items():
    try:
        seen[name] = call()
    except Exception as error:
        seen[name] = type(error).__name__
print('expected: three files, or an error')
print(f'seen: {seen}, after {len(lists)} requests for the list')
sys.exit(not (seen['glob'] == [] and isinstance(seen['ls'], str)))
SCRIPT
"$PYTHON" "$folder/script.py"
