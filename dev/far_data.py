"""How long a run waits for data that are far away: a server on loopback answers late and slowly.

    python dev/far_data.py --latency=0.05 --rate=100e6
    python dev/far_data.py --latency=0.05 --rate=100e6 --cache_gb=1

A process takes micro-batches of --batch_size sequences of 1,024 tokens, one each --pace seconds, as GPT-2 does on
an H100 (26 ms), from files on this disk and then from the server. Prints a row for each: seconds to open the
dataset, seconds by which the first 20 micro-batches were late, and of the time after these, the share that was
spent waiting for data, and the share of a core that reading took.
"""
import argparse
import http.server
import json
import os
import subprocess
import sys
import tempfile
import threading
import time

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path[0] = ROOT
import numpy as np
import torch

from data.cache import start_copying
from data.datasets import read_meta
from data.batches import Batches
from data.loader import TokenLoader

BLOCK_SIZE, SHARD_TOKENS = 1024, 50_000_000
FIRST = 20  # micro-batches in which connections are made


class FarFiles(http.server.BaseHTTPRequestHandler):
    """Serves the files of a folder, whole or in ranges, after `latency` seconds, at `rate` bytes a second in all."""
    protocol_version = 'HTTP/1.1'
    disable_nagle_algorithm = True
    folder, latency, rate = '', 0.0, 1e9
    lock, free_at = threading.Lock(), 0.0

    def log_message(self, *args):
        pass

    def do_GET(self):
        time.sleep(self.latency)
        path = os.path.join(self.folder, os.path.basename(self.path))
        if not os.path.isfile(path):
            self.send_error(404)
            return
        size = os.path.getsize(path)
        begin, end = 0, size
        if wanted := self.headers.get('Range'):
            first, _, last = wanted.removeprefix('bytes=').partition('-')
            begin, end = int(first), min(size, int(last) + 1)
        self.send_response_only(206 if wanted else 200)
        self.send_header('Content-Length', str(end - begin))
        self.send_header('Accept-Ranges', 'bytes')
        self.end_headers()
        if self.command == 'HEAD':
            return
        with open(path, 'rb') as file:
            file.seek(begin)
            for start in range(begin, end, 2 ** 18):
                piece = file.read(min(2 ** 18, end - start))
                self.pace(len(piece))
                self.wfile.write(piece)

    do_HEAD = do_GET

    def pace(self, n_bytes):
        with FarFiles.lock:
            FarFiles.free_at = max(FarFiles.free_at, time.monotonic()) + n_bytes / self.rate
            wait = FarFiles.free_at - time.monotonic()
        time.sleep(max(0, wait))


def serve(folder, latency, rate):
    FarFiles.folder, FarFiles.latency, FarFiles.rate = folder, latency, rate
    server = http.server.ThreadingHTTPServer(('127.0.0.1', 0), FarFiles)
    server.daemon_threads, server.request_queue_size = True, 256
    print(server.server_port, flush=True)
    server.serve_forever()


def make_dataset(folder, n_tokens):
    rng, sizes = np.random.default_rng(0), {}
    for i, begin in enumerate(range(0, n_tokens, SHARD_TOKENS)):
        name, count = f'train_{i:03d}.bin', min(SHARD_TOKENS, n_tokens - begin)
        rng.integers(0, 50257, count, np.uint16).tofile(os.path.join(folder, name))
        sizes[name] = count
    with open(os.path.join(folder, 'meta.json'), 'w') as file:
        json.dump(dict(vocab_size=50257, dtype='uint16', tokenizer='gpt2', separator=50256, tokens=sizes), file)


def measure(place, options):
    """Take micro-batches from a dataset, and print how long that took."""
    began = time.perf_counter()
    loader = TokenLoader(place, 'train', BLOCK_SIZE, 50257, read_meta(place), seed=0)
    copying = start_copying([loader], options.cache_gb)
    opened = time.perf_counter() - began
    rows = options.batch_size
    batches = Batches(loader, loader.train_batch, lambda batch: batch * rows + np.arange(rows), steps=lambda total: 1,
                      rows=lambda total, step: np.arange(rows), positions=slice(None),
                      device=torch.device('cpu'))
    waits = []
    for batch in range(options.batches):
        if batch == FIRST:
            cpu = time.process_time()
        before = time.perf_counter()
        batches(batch, 0)
        waits.append(time.perf_counter() - before)
        time.sleep(max(0, options.pace - waits[-1]))
    cpu = time.process_time() - cpu
    late = sum(max(0, wait - options.pace) for wait in waits[:FIRST])
    whole = sum(max(wait, options.pace) for wait in waits[FIRST:])
    if copying:
        copying.stdin.close()
        copying.wait()
    print(f'{place[:30]:<30} opened in {opened:.2f} s, first {FIRST} late by {late:.2f} s; then waited '
          f'{sum(waits[FIRST:]) / whole:.1%} of the time, longest {max(waits[FIRST:]) * 1e3:,.0f} ms, '
          f'{cpu / whole:.1%} of a core', flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--latency', type=float, default=0.05, help='seconds until an answer begins')
    parser.add_argument('--rate', type=float, default=100e6, help='bytes a second of all answers')
    parser.add_argument('--tokens', type=float, default=2e8, help='tokens in the dataset')
    parser.add_argument('--batches', type=int, default=600, help='micro-batches to take')
    parser.add_argument('--batch_size', type=int, default=12)
    parser.add_argument('--pace', type=float, default=0.026, help='seconds from one micro-batch to the next')
    parser.add_argument('--cache_gb', type=float, default=0.0)
    parser.add_argument('--serve', help='a folder to serve (for this script itself)')
    options = parser.parse_args()
    if options.serve:
        serve(options.serve, options.latency, options.rate)
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as cache:
        os.environ['KILOGPT_CACHE'] = cache
        make_dataset(folder, int(options.tokens))
        command = [sys.executable, __file__, f'--serve={folder}', f'--latency={options.latency}',
                   f'--rate={options.rate}']
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
            try:
                measure(folder, options)
                measure(f'http://127.0.0.1:{int(server.stdout.readline())}/data', options)
            finally:
                server.kill()
    sys.stdout.flush()
    os._exit(0)  # threads that read ahead would try again for a minute


if __name__ == '__main__':
    main()
