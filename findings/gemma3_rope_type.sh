#!/usr/bin/env bash
# transformers 5 takes rope_scaling={'type': 'linear', ...} of Gemma 3 for no scaling, and that of Llama for what it says.
#
#     bash findings/gemma3_rope_type.sh
#
# The script installs torch and transformers==5.24.0 in a temporary folder and runs tiny random models of Llama and
# Gemma 3 whose config has the scaling of rotary angles under `rope_type`, and under `type`, as files of version 4 may
# have it. No code of kiloGPT runs. Logits of Gemma 3 do not change in the second case, without a warning.
#
# Exit code: 0 if the surprise is still there, 1 if Gemma 3 reads it or the script fails.
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
             num_key_value_heads=2, head_dim=8, max_position_embeddings=64, pad_token_id=None)
TOKENS = torch.arange(40).view(1, 40)


@torch.no_grad()
def logits_of(config_class, model_class, scaling):
    config = config_class(**SIZES, rope_scaling=scaling)
    torch.manual_seed(0)
    model = model_class(config).eval()
    for parameter in model.parameters():
        parameter.copy_(0.3 * torch.randn(parameter.shape))
    return model(TOKENS).logits


changes = {}
for name, config_class in (('Llama', transformers.LlamaConfig), ('Gemma3', transformers.Gemma3TextConfig)):
    for key in ('rope_type', 'type'):
        extra = dict(layer_types=['full_attention'] * 2) if name == 'Gemma3' else {}
        classes = (lambda extra=extra, **entries: config_class(**extra, **entries)), getattr(
            transformers, f'{name}ForCausalLM')
        scaled = logits_of(*classes, {key: 'linear', 'factor': 8.0})
        changes[name, key] = (scaled - logits_of(*classes, None)).abs().max().item()
        print(f"{name}: rope_scaling={{'{key}': 'linear', 'factor': 8.0}} changes logits by up to {changes[name, key]:.3g}")
print('expected: all four change; the older spelling `type` is still read, as in Llama')
is_ignored = min(changes['Llama', 'type'], changes['Gemma3', 'rope_type']) > 0.01 and changes['Gemma3', 'type'] == 0
print('seen: Gemma 3 takes `type` for no scaling' if is_ignored else 'seen: no longer so')
sys.exit(not is_ignored)
SCRIPT
"$PYTHON" "$folder/script.py"
