#!/usr/bin/env bash
# transformers 5 saves OLMo Hybrid's convolutions of queries, keys and values with rows of each other.
#
#     bash findings/olmo_hybrid_save.sh
#
# The script installs torch and transformers==5.24.0 in a temporary folder and saves a tiny random OLMo Hybrid whose
# values are wider than its keys, as they are by default. No code of kiloGPT runs. The model has one convolution for
# queries, keys and values, and files have three; save_pretrained cuts the whole into three equal parts instead of
# the widths of q, k and v. transformers itself joins them again, but a program that takes q_conv1d for the
# convolution of the queries gets other rows. The norm after attention gets a name of the recurrent blocks' norms.
#
# Exit code: 0 if the surprise is still there, 1 if the parts have the widths of q, k and v or the script fails.
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

import torch
import transformers
from safetensors import safe_open

print(f'torch {torch.__version__}, transformers {transformers.__version__}')
config = transformers.OlmoHybridConfig(
    vocab_size=97, hidden_size=32, intermediate_size=64, num_hidden_layers=4, num_attention_heads=2, pad_token_id=None,
    eos_token_id=None)
transformers.OlmoHybridForCausalLM(config).save_pretrained(sys.argv[1])
with safe_open(f'{sys.argv[1]}/model.safetensors', 'pt') as file:
    shapes = {name: file.get_slice(name).get_shape() for name in file.keys()}
rows = {part: [shapes[f'model.layers.0.linear_attn.{part}_{kind}.weight'][0] for kind in ('proj', 'conv1d')]
        for part in 'qkv'}
for part, (projected, convolved) in rows.items():
    print(f'{part}: the projection has {projected} rows, the convolution {convolved}')
norms = sorted(name for name in shapes if name.startswith('model.layers.3.') and 'norm' in name and 'attn' not in name)
print(f'norms of the block with attention: {", ".join(norms)}')
print('expected: as many rows in each convolution as in its projection, and post_attention_layernorm')
is_cut_equally = any(projected != convolved for projected, convolved in rows.values())
print('seen: three equal parts' if is_cut_equally else 'seen: no longer so')
sys.exit(not is_cut_equally)
SCRIPT
"$PYTHON" "$folder/script.py" "$folder/model"
