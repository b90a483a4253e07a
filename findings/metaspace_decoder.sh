#!/usr/bin/env bash
# The Metaspace decoder of tokenizers drops every space of a text's first token, not only the one before it.
#
#     bash findings/metaspace_decoder.sh
#
# The script installs tokenizers==0.23.3 in a temporary folder. No code of kiloGPT runs. A BPE is trained with
# Metaspace(split=False), so that a token may be several words, and with the Metaspace decoder, which belongs to it. A
# text of two words that is one token is decoded as one word, although encode and decode are given nothing unusual.
#
# Exit code: 0 if the surprise is still there, 1 if the spaces are kept or the script fails.
#
# Variables: TOKENIZERS=0.24.0 tries another version, and PYTHON=path uses a Python that has it, without a venv.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

if [ -z "${PYTHON:-}" ]; then
    python3 -m venv "$folder/venv"
    PYTHON="$folder/venv/bin/python"
    "$PYTHON" -m pip install --quiet "tokenizers==${TOKENIZERS:-0.23.3}"
fi

cat > "$folder/script.py" <<'SCRIPT'
import sys

import tokenizers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

print(f'tokenizers {tokenizers.__version__}')
tokenizer = Tokenizer(models.BPE())
tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(split=False)
tokenizer.decoder = decoders.Metaspace()
tokenizer.train_from_iterator(['New York', 'of the'] * 9, trainers.BpeTrainer(vocab_size=60, show_progress=False))
for text in ('New York', 'of the', 'New York of the New York'):
    encoding = tokenizer.encode(text)
    print(f'expected: {text!r} from {encoding.tokens}; seen: {tokenizer.decode(encoding.ids)!r}')
sys.exit(tokenizer.decode(tokenizer.encode('New York').ids) != 'NewYork')
SCRIPT
"$PYTHON" "$folder/script.py"
