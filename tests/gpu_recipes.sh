#!/usr/bin/env bash
# What the convolutions gain and cost on one GPU, in one call of at most nine minutes. Figures go to docs/log and decide
# whether config/train_gpt2_modern.py gets attention_conv and mlp_conv. The dataset is one of docs/performance.md's, of
# which 20M training tokens are enough (head -c 42000000 of its train.bin):
#   bash tests/gpu_recipes.sh data/english
# LIMIT: seconds for all (530). To try the script itself on a CPU:
#   export SHAPE="--n_layer=2 --n_head=2 --n_kv_head=2 --n_embd=64 --block_size=64 --batch_size=2"
#   SIZE="n_layer=2 n_head=2 n_embd=64 block_size=64 batch_size=4" MAX_ITERS=20 bash tests/gpu_recipes.sh data/english
set -uo pipefail
cd "$(dirname "$0")/.."
dataset=${1:?give the folder of a dataset}
kept=${OUT:-out-gpu-recipes}
SIZE=${SIZE:-n_layer=6 n_head=8 n_embd=512 block_size=512 batch_size=64}
SECONDS=0
set -x

# An iteration of 124M, compiled.
shared="config/train_gpt2_modern.py --random_tokens=50257 --gradient_accumulation_steps=4 ${SHAPE:-}"
timeout -k 5 150 python bench.py $shared --iters=8 --warmup=3 --sweep="attention_conv=0,3 mlp_conv=0,3"

# 21M parameters at the rates of docs/models.md, two seeds each. Three runs share the GPU, so that one compiles while
# another trains.
recipe="config/words_cpu.py --value_pattern=NV --attention_conv=0 --mlp_conv=0 --lr_factors=embedding:8"
timeout -k 5 $((${LIMIT:-530} - SECONDS)) python -m kilogpt.compare.recipes "$kept/recipes" --no_sweep --seeds=2 \
    --jobs=3 --size="21M: dataset=$dataset $SIZE learning_rate=6e-3 min_lr=3e-4 max_iters=${MAX_ITERS:-600} \
        eval_interval=$((${MAX_ITERS:-600} / 20)) eval_iters=8" \
    "gates=$recipe" \
    "attention_conv=$recipe --attention_conv=3 --lr_factors=embedding:8,vector:3" \
    "both=$recipe --attention_conv=3 --mlp_conv=3 --lr_factors=embedding:8,vector:3"
