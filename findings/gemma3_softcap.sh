#!/usr/bin/env bash
# transformers' Gemma 3 documents attn_logit_softcapping, stores it in each attention layer, and never computes it.
#
#     bash findings/gemma3_softcap.sh
#
# The script installs torch and transformers==5.24.0 in a temporary folder and runs tiny random models of Gemma 2 and
# Gemma 3, with and without a cap of attention scores. No code of kiloGPT runs. A cap of 0.01 makes all scores nearly
# equal: the logits of Gemma 2 change by much, those of Gemma 3 by nothing, without a warning.
#
# Exit code: 0 if the surprise is still there, 1 if Gemma 3 computes the cap or the script fails.
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

print(f'torch {torch.__version__}, transformers {transformers.__version__}')
SIZES = dict(vocab_size=97, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
             num_key_value_heads=2, head_dim=8, max_position_embeddings=64, pad_token_id=None,
             final_logit_softcapping=None)
TOKENS = torch.arange(40).view(1, 40)


@torch.no_grad()
def logits_of(config_class, model_class, cap):
    config = config_class(**SIZES, attn_logit_softcapping=cap)
    config._attn_implementation = 'eager'
    torch.manual_seed(0)
    model = model_class(config).eval()
    for parameter in model.parameters():
        parameter.copy_(0.3 * torch.randn(parameter.shape))
    return model(TOKENS).logits


changes = {}
for name in ('Gemma2', 'Gemma3'):
    classes = getattr(transformers, f'{name}Config' if name == 'Gemma2' else 'Gemma3TextConfig'), getattr(
        transformers, f'{name}ForCausalLM')
    changes[name] = (logits_of(*classes, 0.01) - logits_of(*classes, None)).abs().max().item()
    print(f'{name}: attn_logit_softcapping=0.01 changes logits by up to {changes[name]:.3g}')
print('expected: both change, since both configurations document the entry')
is_ignored = changes['Gemma2'] > 0.01 and changes['Gemma3'] == 0
print('seen: Gemma 3 passes over it' if is_ignored else 'seen: no longer so')
sys.exit(not is_ignored)
SCRIPT
"$PYTHON" "$folder/script.py"
