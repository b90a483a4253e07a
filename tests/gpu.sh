#!/usr/bin/env bash
# Figures of one GPU, the most important first (a part for which no time is left says so):
#   bash tests/gpu.sh ../nanoGPT 2>&1 | tee gpu.log
# First it compiles what it will measure, beside the checks of tests/gpu_checks.py. float8 needs torchao.
# LIMIT: seconds for all (530). To try the script itself on a CPU, with small shapes:
#   SMALL="--n_layer=2 --n_head=2 --n_embd=64 --block_size=64 --batch_size=2 --gradient_accumulation_steps=2 \
#   --compile=False --device=cpu" bash tests/gpu.sh ../nanoGPT
set -uo pipefail
cd "$(dirname "$0")/.."
nanogpt=$(cd "${1:?give the folder of a nanoGPT checkout}" && pwd)
kept=${OUT:-.}  # traces stay here
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
SECONDS=0

part() {  # title, then a command
    local left=$((${LIMIT:-530} - SECONDS))
    echo "== $1 (at $SECONDS s)"
    if [ $left -lt 20 ]; then echo "left out: no time"; return; fi
    timeout -k 5 $left "${@:2}" || echo "FAILED: exit $?"
}

python - "$work" <<'PYTHON'
import os, sys
from data.make.prepare import write_random_tokens
for name, length in (('stream', 0), ('documents', 256)):
    os.makedirs(os.path.join(sys.argv[1], name))
    write_random_tokens(os.path.join(sys.argv[1], name), 50257, document_length=length, draws_lengths=length > 0)
PYTHON
data="--dataset=$work/stream"
documents="--dataset=$work/documents --documents=mask"
many="--gradient_accumulation_steps=40 ${SMALL:-}"  # nanoGPT's default, 491,520 tokens an iteration
one="--gradient_accumulation_steps=4 ${SMALL:-}"
few="--iters=8 --warmup=3"
large="config/gpt2_xl_fsdp.py --zero_stage=0"
experts="config/train_gpt2_moe.py --ep=1 --zero_stage=0"
gpu=$(nvidia-smi --query-gpu=name --format=csv,noheader 2> /dev/null | grep -o 'H[12]00\|A100' | head -1)
predicted=${gpu:+--gpu=$gpu}
nvidia-smi --query-gpu=name,memory.total,driver_version --format=csv,noheader 2> /dev/null

compile() {  # train.py's arguments
    timeout 90 python train.py "$@" --out_dir="$(mktemp -d -p "$work")" --max_iters=2 --eval_iters=0 --keep_checkpoints=0 \
        > /dev/null 2> "$work/compile_errors" || tail -3 "$work/compile_errors"
}
echo "== checks, and compiling what will be measured"
export TORCHINDUCTOR_COMPILE_THREADS=2
timeout -k 5 ${CHECKS:-170} python tests/gpu_checks.py > "$work/checks" 2>&1 &
(compile $data $one; compile $data $one --fp8=True) &
(compile $data --batch_size=48 $one; compile $documents --batch_size=48 $one) &
(compile $experts $data $one
 for fp8 in False True; do
     compile $large $data --gradient_accumulation_steps=1 --fp8=$fp8 ${SMALL:-}
 done) &
python dev/versus.py "$nanogpt" --rounds=1 --iters=2 --warmup=1 $data $one > /dev/null &
wait
cat "$work/checks"
unset TORCHINDUCTOR_COMPILE_THREADS

part "124M at nanoGPT's defaults: an iteration of both, and the peak of memory" \
    python dev/versus.py "$nanogpt" --rounds=1 $few $data $many
part "124M: what an iteration of the same consists of" \
    python bench.py $data $one --iters=8 --profile
part "124M, larger micro-batches, bfloat16 and float8" \
    python bench.py --batch_size=48 $few $data $one --sweep="fp8=False,True"
part "the same with documents of 256 tokens on average" \
    python bench.py --batch_size=48 $few $documents $one
part "1.5B, bfloat16 and float8: tokens/s and MFU (of bfloat16's peak; float8's is twice that)" \
    python bench.py $large $few $data $one --sweep="fp8=False,True"
mkdir "$work/looped"
echo "import torch.nn.functional; del torch.nn.functional.grouped_mm" > "$work/looped/sitecustomize.py"
part "8 experts of 124M's width, 2 active: products by one kernel, then in a loop" bash -c "
    for path in '' $work/looped; do
        PYTHONPATH=\$path python bench.py $experts $few $data $one
    done"
part "what the planner foretells of 124M and of 1.5B" bash -c "
    python bench.py --batch_size=48 $few $data $one --layouts='dp1; dp1 full' $predicted
    python bench.py $large $few $data --gradient_accumulation_steps=1 --layouts='dp1 full' $predicted"
part "sampling, 124M, 200 tokens" \
    python dev/versus.py "$nanogpt" --part=sample --rounds=1 ${SMALL:-}
part "an experiment: the same 124M with cuDNN's attention before the flash kernel" bash -c "
    python - $data --batch_size=48 $one --out_dir=$work/cudnn --max_iters=12 --eval_iters=0 --keep_checkpoints=0 \
    <<'PYTHON' | tail -3
import runpy
from torch.nn.attention import SDPBackend, sdpa_kernel
order = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
with sdpa_kernel(order, set_priority=True):
    runpy.run_path('train.py', run_name='__main__')
PYTHON"
for trace in trace-*.json; do [ -e "$trace" ] && gzip -c "$trace" > "$kept/$trace.gz" && rm "$trace"; done
echo "== done after $SECONDS s"
