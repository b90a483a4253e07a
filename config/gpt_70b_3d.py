# The width and depth of Llama 2 70B, on 128 nodes of 8 GPUs of 80 GB: tp 8 within a node × pp 8 × dp 16
# between nodes = 1,024. The same command on every node, with the address of the first:
# torchrun --nnodes=128 --nproc_per_node=8 --rdzv_backend=c10d --rdzv_endpoint=10.0.0.1:29500 \
#     train.py config/gpt_70b_3d.py
# The model has 55.9B parameters, since the hidden width of our SwiGLU, 8/3 * n_embd up to a multiple of 64,
# is 21,888 (Llama's: 28,672). n_layer = 100 would make 69.7B.
# The 1.1T tokens are of FineWeb-Edu, which has 1.3T. They take 2.6 TB that every node sees; about 4 TB are
# downloaded and not kept:
# python data/fineweb/prepare.py --repository=HuggingFaceFW/fineweb-edu --subset=default --out=fineweb-edu \
#     --shard_tokens=1000000000
out_dir = 'out-gpt-70b'
dataset = 'fineweb-edu'
wandb_project = 'fineweb-edu'
wandb_run_name = 'gpt-70b-3d'

pos = 'rope'
norm = 'rmsnorm'
mlp = 'swiglu'
tie_weights = False
n_layer = 80
n_head = 64
n_kv_head = 8  # one for each of the 8 GPUs of a node
n_embd = 8192

# This file shows three kinds of parallelism together, in half of the memory of 80 GB, so that longer
# sequences or smaller GPUs fit. On H100 GPUs with 400 Gb/s each, python -m kilogpt.plan config/gpt_70b_3d.py --gpus=1024
# finds FSDP2 alone faster, with 66 of the 80 GB: its gathers over all nodes fit beside the computation.
# The planner's layout: --tp=1 --pp=1 --zero_stage=3 --activation_checkpoint=selective
# It is predicted to be 1.50 times as fast. With --link=100 it is not among the first, which have cp=8 pp=8.
tp = 8
pp = 8
pp_schedule = 'interleaved1f1b'  # 2 stages of 5 blocks on each GPU; 'zbv' idles less but cannot be compiled
zero_stage = 2  # 3 would gather the parameters again for every micro-batch

# 1 sequence * 4096 tokens * 1024 = 4,194,304 tokens an iteration: 64 micro-batches in each of 16 pipelines
batch_size = 1
block_size = 4096
gradient_accumulation_steps = 64 * 16

# Learning rate, batch and warm-up are those of Llama 2 70B (Touvron et al. 2023, "Llama 2", table 1).
learning_rate = 1.5e-4
min_lr = 1.5e-5
max_iters = 270000  # 1.1T tokens: 20 for each parameter (Hoffmann et al. 2022)
lr_decay_iters = 0  # follows max_iters
eval_interval = 1000
eval_iters = 1024
log_interval = 10
