#!/usr/bin/env bash
# Figures of one GPU, the most important first, in one call of under 9 minutes (a part left out says so):
#   bash tests/gpu.sh ../nanoGPT 2>&1 | tee gpu.log
# fp8 needs torchao. To try the script itself on a CPU, with small shapes:
#   SMALL="--n_layer=2 --n_head=2 --n_embd=64 --block_size=64 --batch_size=2 --gradient_accumulation_steps=2 \
#   --compile=False --device=cpu" bash tests/gpu.sh ../nanoGPT
set -uo pipefail
cd "$(dirname "$0")/.."
nanogpt=$(cd "${1:?give the folder of a nanoGPT checkout}" && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
SECONDS=0

part() {  # title, then a command
    local left=$((530 - SECONDS))
    echo "== $1 (at $SECONDS s)"
    if [ $left -lt 30 ]; then echo "left out: no time"; return; fi
    timeout -k 5 $left "${@:2}" || echo "FAILED: exit $?"
}

python -c "import sys; from data.prepare import write_random_tokens; write_random_tokens(sys.argv[1], 50257)" "$work"
data="--dataset=$work"
many="--gradient_accumulation_steps=40 ${SMALL:-}"  # nanoGPT's default, 491,520 tokens an iteration
one="--gradient_accumulation_steps=4 ${SMALL:-}"
few="--iters=8 --warmup=3"

part "124M at nanoGPT's defaults: an iteration of both, and the peak of memory" \
    python -m kilogpt.versus "$nanogpt" --rounds=1 $few $data $many
part "1.5B, bfloat16 and float8: tokens/s and MFU (of bfloat16's peak; float8's is twice that)" \
    python bench.py config/gpt2_xl_fsdp.py --zero_stage=0 --batch_size=16 $few $data $one \
    --layouts="dp1; dp1 fp8=True"
part "124M, larger micro-batches, bfloat16 and float8" \
    python bench.py --batch_size=48 $few $data $one --layouts="dp1; dp1 fp8=True"
mkdir "$work/looped"
echo "import torch.nn.functional; del torch.nn.functional.grouped_mm" > "$work/looped/sitecustomize.py"
part "8 experts of 124M's width, 2 active: products by one kernel, then in a loop" bash -c "
    for path in '' $work/looped; do
        PYTHONPATH=\$path python bench.py config/train_gpt2_moe.py --ep=1 --zero_stage=0 $few $data $one --layouts=dp1
    done"
part "attention that skips documents and windows: values and gradients of the kernels against the formula" \
    python -m pytest -n 0 tests/devices/test_flex.py -k on_a_gpu
tiny="config/quickstart.py $data --compile=False --lr_decay_iters=20 --eval_interval=10 --eval_iters=2 \
--log_interval=1 --dropout=0.1 ${SMALL:-}"
part "exact resume: 20 iterations, and 10 + 10" bash -c "
    python train.py $tiny --max_iters=20 --out_dir=$work/straight > /dev/null
    python train.py $tiny --max_iters=10 --out_dir=$work/resumed > /dev/null
    python train.py $tiny --max_iters=20 --out_dir=$work/resumed --init_from=resume > /dev/null
    curve() { grep grad_norm $work/\$1/metrics.jsonl | cut -d, -f1-3; }
    cmp <(curve straight) <(curve resumed) && echo identical"
part "sampling, 124M, 200 tokens" \
    python -m kilogpt.versus "$nanogpt" --part=sample --rounds=1 ${SMALL:-}
part "an experiment: the same 124M with cuDNN's attention before the flash kernel" bash -c "
    python - $data --batch_size=48 $one --out_dir=$work/cudnn --max_iters=12 --eval_iters=0 --keep_checkpoints=0 \
    <<'PYTHON' | tail -3
import runpy
from torch.nn.attention import SDPBackend, sdpa_kernel
order = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
with sdpa_kernel(order, set_priority=True):
    runpy.run_path('train.py', run_name='__main__')
PYTHON"
part "loss by parts: the first losses of bfloat16 with one micro-batch of 96, and with two of 48" bash -c "
    for batch in 96 48; do
        python train.py $data --out_dir=$work/parts --max_iters=2 --eval_iters=0 --keep_checkpoints=0 ${SMALL:-} \
            --batch_size=\$batch --gradient_accumulation_steps=\$((96 / batch)) | grep '^iter'
    done"
echo "== done after $SECONDS s"
