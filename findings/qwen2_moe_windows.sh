#!/usr/bin/env bash
# transformers 5 reads max_window_layers of Qwen2-MoE in another way than of Qwen2.
#
#     bash findings/qwen2_moe_windows.sh
#
# The script installs torch and transformers==5.24.0 in a temporary folder and prints which layers of Qwen2Config and
# Qwen2MoeConfig have a window, for the same entries of config.json. No code of kiloGPT runs. In Qwen2 these are the
# layers from max_window_layers on, as its documentation says, in Qwen2-MoE every other layer before it.
#
# Exit code: 0 if the surprise is still there, 1 if both have the same layers or the script fails.
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
entries = dict(num_hidden_layers=8, use_sliding_window=True, sliding_window=16, max_window_layers=4)
windows = {}
for name in ('Qwen2', 'Qwen2Moe'):
    types = getattr(transformers, f'{name}Config')(**entries).layer_types
    windows[name] = [layer for layer, kind in enumerate(types) if kind == 'sliding_attention']
    print(f'{name}Config, max_window_layers=4 of 8: layers {windows[name]} have a window')
print('expected: layers 4 to 7 in both')
differs = windows == dict(Qwen2=[4, 5, 6, 7], Qwen2Moe=[0, 2])
print('seen: Qwen2-MoE has it in every other layer before number 4' if differs else 'seen: no longer so')
sys.exit(not differs)
SCRIPT
"$PYTHON" "$folder/script.py"
