"""Tokens a second of kiloGPT and of llama.cpp (PyPI's xllamacpp) on this CPU, in turn, with the same weights.

    python -m kilogpt.convert export RUN model.f16.gguf --dtype=float16
    python -m kilogpt.convert export RUN model.q8_0.gguf --dtype=q8_0
    python dev/versus_llama.py RUN model.f16.gguf model.q8_0.gguf

Each program loads its model once and waits. Then all of them take turns: they read a prompt of 500 random
tokens, and continue one of 5 tokens by the likeliest ones. The table has medians of the rounds, and of the
ratios within a round, for the prompt and for the text.
"""
import argparse
import json
import pathlib
import subprocess
import sys
import time
import urllib.request
from statistics import median

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))
PROMPT, LONG = 5, 500  # tokens
KEYS = 'prompt', 'tokens'  # rates in a turn


def draw_prompt(n_tokens):
    return [(7919 * i + 11) % 30000 for i in range(n_tokens)]


def answer_turns(measure, n_tokens):
    """Measure once for each line of standard input."""
    measure(PROMPT, 2)
    for _ in sys.stdin:
        reading, _ = measure(LONG, 1)
        _, writing = measure(PROMPT, n_tokens)
        print('TURN', json.dumps(dict(prompt=LONG / reading, tokens=n_tokens / writing)), flush=True)


def run_ours(path, numbers, n_threads):
    import torch

    from kilogpt.devices.cpu_step import prepare_for_text
    from kilogpt.devices.host import prepare
    from kilogpt.loading import load_model
    torch.set_num_threads(n_threads)
    prepare(lambda line: None)
    model = load_model(path)[0]
    quantize = 'int8' if numbers == 'int8' else 'none'
    prepare_for_text(model, torch.bfloat16 if quantize == 'int8' else getattr(torch, numbers), quantize)

    @torch.inference_mode()
    def measure(n_prompt, n_tokens):
        """Seconds for the prompt, and for the tokens after it."""
        cache = model.new_cache(1, n_prompt + n_tokens + 1)
        ids = torch.tensor([draw_prompt(n_prompt)])
        times = [time.perf_counter()]
        for _ in range(n_tokens + 1):
            ids = model(ids, cache=cache)[:, -1].argmax(dim=-1)[None]
            times.append(time.perf_counter())
        return times[1] - times[0], times[-1] - times[1]
    return measure


def run_theirs(path, n_threads):
    import xllamacpp
    options = xllamacpp.CommonParams()
    options.model.path, options.n_ctx, options.n_parallel = path, 1024, 1
    options.cpuparams.n_threads = options.cpuparams_batch.n_threads = n_threads
    server = xllamacpp.Server(options)

    def measure(n_prompt, n_tokens):
        body = dict(prompt=draw_prompt(n_prompt), n_predict=n_tokens + 1, ignore_eos=True, samplers=['top_k'],
                    top_k=1, cache_prompt=False)
        request = urllib.request.Request(f'{server.listening_address}/completion', json.dumps(body).encode(),
                                         {'Content-Type': 'application/json'})
        timings = json.loads(urllib.request.urlopen(request).read())['timings']
        return timings['prompt_ms'] / 1000, timings['predicted_per_token_ms'] * n_tokens / 1000
    return measure


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument('paths', nargs='+', metavar='PATH', help='what kilogpt.load takes, then GGUF files')
    parser.add_argument('--rounds', type=int, default=5)
    parser.add_argument('--tokens', type=int, default=100, help='tokens to continue by')
    parser.add_argument('--threads', type=int, default=2)
    parser.add_argument('--numbers', default='bfloat16,int8,float32', help='what our weights are kept in')
    parser.add_argument('--side', help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.side:
        path = args.paths[0]
        is_ours = args.side != 'theirs'
        measure = run_ours(path, args.side, args.threads) if is_ours else run_theirs(path, args.threads)
        return answer_turns(measure, args.tokens)
    sides = [(args.paths[0], numbers) for numbers in args.numbers.split(',')]
    sides += [(path, 'theirs') for path in args.paths[1:]]
    programs = {}
    for path, side in sides:
        command = [sys.executable, __file__, path, f'--side={side}', f'--tokens={args.tokens}',
                   f'--threads={args.threads}']
        name = f'llama.cpp {pathlib.Path(path).name}' if side == 'theirs' else f'kiloGPT {side}'
        programs[name] = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                          stderr=subprocess.DEVNULL, text=True)
    rounds = []
    for _ in range(args.rounds):
        rounds.append({})
        for name, program in programs.items():
            print('go', file=program.stdin, flush=True)
            lines = iter(program.stdout.readline, '')
            line = next(line for line in lines if line.startswith('TURN '))
            rounds[-1][name] = json.loads(line.removeprefix('TURN '))
    theirs = [name for name in programs if name.startswith('llama.cpp')]
    print('| | prompt, tokens/s | text, tokens/s |', *(f'times {name} |' for name in theirs))
    print('| --- | --- | --- |', *('--- |' for _ in theirs))
    for name, program in programs.items():
        cells = [f'{median(turn[name][key] for turn in rounds):.1f}' for key in KEYS]
        for other in theirs:
            ratios = [median(turn[name][key] / turn[other][key] for turn in rounds) for key in KEYS]
            cells.append(f'{ratios[0]:.2f}, {ratios[1]:.2f}')
        print('|', name, '|', ' | '.join(cells), '|')
        program.stdin.close()
        program.wait()


if __name__ == '__main__':
    main()
