#!/usr/bin/env bash
# Layouts on one GPU, a world of 1, in one call of some minutes. Figures go to docs/log. Their losses are compared by
# tests/gpu_checks.py.
#   bash tests/gpu_layouts.sh
# To try the script itself on a CPU:
#   export SHAPE="--n_layer=2 --n_embd=64 --n_head=4 --block_size=64 --batch_size=2"
#   XL="$SHAPE" QUICK="--iters=2" SAVES=3 bash tests/gpu_layouts.sh
set -uo pipefail
cd "$(dirname "$0")/.."
BENCH="python bench.py --random_tokens=50257 ${QUICK:---iters=10}"
SHAPE=${SHAPE:---n_layer=12 --batch_size=12}
XL=${XL:-config/gpt2_xl_fsdp.py --batch_size=4}
echo "== 124M: DDP's place, FSDP2 kept and freed, compiled; float16 with its scaler; checkpointing; offload"
$BENCH $SHAPE --gradient_accumulation_steps=1 --compile=True \
    --layouts="zero0; zero2; zero3; zero0 dtype=float16; zero3 selective; zero3 full; zero3 offload; zero0 compile=False"
echo "== 1.5B: activation checkpointing, compiled"
$BENCH $XL --gradient_accumulation_steps=1 --compile=True --layouts="zero2; zero2 selective; zero2 full; zero3 full"
echo "== checkpoints: how long training waits for one, blocking and from pinned memory, whole and as FSDP2's shards"
for stage in 0 3; do
    $BENCH $SHAPE --gradient_accumulation_steps=1 --zero_stage=$stage --saves=${SAVES:-40} --iters=$((4 * ${SAVES:-40}))
done
