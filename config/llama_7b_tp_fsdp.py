# Llama 7B's shape, on 8 nodes of 8 GPUs of 80 GB. Two GPUs share each block (tp), the four pairs of a node
# share the parameters and the optimizer (FSDP2), and each node holds a replica (HSDP): only gradients go
# between nodes.
# The same command on every node, with the address of the first:
# torchrun --nnodes=8 --nproc_per_node=8 --rdzv_backend=c10d --rdzv_endpoint=10.0.0.1:29500 \
#     train.py config/llama_7b_tp_fsdp.py
# The model has 6.86B parameters: the hidden width of our SwiGLU, 8/3 * n_embd up to a multiple of 64, is
# 10,944 (Llama's: 11,008), and the vocabulary is that of the dataset, here GPT-2's.
out_dir = 'out-llama-7b'
dataset = 'fineweb-edu'  # 1.3T tokens, 2.6 TB; config/gpt_70b_3d.py has the command that prepares them
wandb_project = 'fineweb'
wandb_run_name = 'llama-7b-tp-fsdp'

pos = 'rope'
norm = 'rmsnorm'
mlp = 'swiglu'
tie_weights = False
n_layer = 32
n_head = 32
n_embd = 4096

tp = 2
dp_replicate = 8  # one replica a node
zero_stage = 3

# 4 sequences * 4096 tokens * 256 = 4,194,304 tokens an iteration: 8 micro-batches on each of 32 GPU pairs.
# A pair with tp sends fewer bytes than without where a micro-batch has fewer than 6 * n_embd = 24,576 tokens
# (docs/layouts.md), here 16,384. With too little memory: --activation_checkpoint=selective.
# This file shows tp together with FSDP2 and HSDP. On H100 GPUs with 400 Gb/s each
# python -m kilogpt.plan config/llama_7b_tp_fsdp.py --gpus=64 finds FSDP2 alone faster, since its gathers run
# beside the computation and tp's do not.
# The planner's layout: --tp=1 --dp_replicate=1 --zero_stage=2 --batch_size=2 \
#     --gradient_accumulation_steps=512
# It is predicted to be 1.07 times as fast.
batch_size = 4
block_size = 4096
gradient_accumulation_steps = 8 * 32

# Learning rate, batch and warm-up are Llama's (Touvron et al. 2023, table 2).
learning_rate = 3e-4
min_lr = 3e-5
max_iters = 250000  # 1T tokens
lr_decay_iters = 0  # follows max_iters
eval_interval = 1000
eval_iters = 64
log_interval = 10
