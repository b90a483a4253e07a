#!/usr/bin/env bash
# transformers 5 gives OLMo 3's layers with a window another rope_theta than the one that config.json has.
#
#     bash findings/olmo3_rope_theta.sh
#
# The script installs torch and transformers==5.24.0 in a temporary folder and prints what Olmo3Config and
# Gemma3TextConfig make of rope_theta=10000.0, as files of version 4 have it, for layers with a window and without.
# No code of kiloGPT runs. The first kind of layers in OLMo 3 gets 500000.0: the value is popped from the entries for
# the layers without a window, and then popped again, with a default, for the others.
#
# Exit code: 0 if the surprise is still there, 1 if both kinds have the value of the file or the script fails.
#
# Variables: TRANSFORMERS=5.25.0 tries another version, and PYTHON=path uses a Python that has both, without a venv.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
export OMP_NUM_THREADS=1

if [ -z "${PYTHON:-}" ]; then
    python3 -m venv "$folder/venv"
    PYTHON="$folder/venv/bin/python"
    "$PYTHON" -m pip install --quiet torch==2.13.0 "transformers==${TRANSFORMERS:-5.24.0}"
fi

cat > "$folder/script.py" <<'SCRIPT'
import sys

import transformers

print(f'transformers {transformers.__version__}')
thetas = {}
for name in ('Gemma3Text', 'Olmo3'):
    config = getattr(transformers, f'{name}Config')(rope_theta=10000.0, num_hidden_layers=4)
    for kind in ('full_attention', 'sliding_attention'):
        thetas[name, kind] = config.rope_parameters[kind]['rope_theta']
        print(f'{name}Config(rope_theta=10000.0): {kind} has rope_theta={thetas[name, kind]}')
print('expected: 10000.0 in all four')
is_lost = thetas['Olmo3', 'full_attention'] == 10000.0 != thetas['Olmo3', 'sliding_attention']
print('seen: OLMo 3 has another one in layers with a window' if is_lost else 'seen: no longer so')
sys.exit(not is_lost)
SCRIPT
"$PYTHON" "$folder/script.py"
