#!/usr/bin/env bash
# What a GPU has to show, in one call: bash tests/gpu.sh [nanoGPT checkout] > gpu.log
# The quick start; exact resume; then the 124M shape (batch 12 x 1024, bf16, compiled) for 50 iterations, ours and nanoGPT's.
# SHAPE and TEXT make it small enough to be tried on a CPU:
#   SHAPE="--n_layer=2 --n_head=2 --n_embd=64 --block_size=64 --device=cpu --compile=False" bash tests/gpu.sh ../nanoGPT
set -euo pipefail
cd "$(dirname "$0")/.."
nanogpt=${1:+$(cd "$1" && pwd)}
shape=${SHAPE:-"--batch_size=12 --block_size=1024"}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

echo "== quick start"
python data/shakespeare_char/prepare.py ${TEXT:+--input="$TEXT"} --out="$work/shakespeare"
time python train.py config/quickstart.py --dataset="$work/shakespeare" --out_dir="$work/quickstart" ${QUICK:-}
python sample.py --out_dir="$work/quickstart" --num_samples=1 --max_new_tokens=200

echo "== resume: 20 iterations, and 10 + 10"
tiny="config/quickstart.py --dataset=$work/shakespeare --lr_decay_iters=20 --eval_interval=10 --eval_iters=2 --log_interval=1 --dropout=0.1"
python train.py $tiny --max_iters=20 --out_dir="$work/straight" > /dev/null
python train.py $tiny --max_iters=10 --out_dir="$work/resumed" > /dev/null
python train.py $tiny --max_iters=20 --out_dir="$work/resumed" --init_from=resume > /dev/null
python - "$work" <<'PYTHON'
import json, sys
straight, resumed = ({line['iter']: (line['loss'], line['grad_norm']) for line in map(json.loads, open(f'{sys.argv[1]}/{run}/metrics.jsonl'))
                      if 'loss' in line} for run in ('straight', 'resumed'))
print('identical' if straight == resumed else f'DIFFERENT {[i for i in straight if straight[i] != resumed[i]]}')
PYTHON

echo "== 124M, ours"
python bench.py --random_tokens=50257 --gradient_accumulation_steps=1 $shape --warmup=10 --iters=50 --profile
if [ -n "$nanogpt" ]; then
    echo "== 124M, nanoGPT"
    mkdir -p "$nanogpt/data/random"
    python -c "import sys, bench; bench.write_random_tokens(sys.argv[1], 50257)" "$nanogpt/data/random"
    cd "$nanogpt"
    python train.py --dataset=random --gradient_accumulation_steps=1 $shape --eval_iters=1 --max_iters=60 --out_dir="$work/nanogpt" |
        python -c "import re, statistics, sys
ms = [float(t) for t in re.findall(r'time ([0-9.]+)ms', sys.stdin.read())][-50:]
print(f'median of {len(ms)} iterations: {statistics.median(ms):.2f} ms')"
fi
