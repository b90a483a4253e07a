# The shape of Qwen3-30B-A3B (Qwen3 technical report, 2025, table 2) with GPT-2's vocabulary: 30.1B
# parameters, of which 2.9B are active. On 8 nodes of 8 GPUs of 80 GB; the same command on every node, with
# the address of the first:
# torchrun --nnodes=8 --nproc_per_node=8 --rdzv_backend=c10d --rdzv_endpoint=10.0.0.1:29500 \
#     train.py config/qwen3_30b_a3b.py
out_dir = 'out-qwen3-30b-a3b'
dataset = 'fineweb-edu'
wandb_project = 'fineweb-edu'
wandb_run_name = 'qwen3-30b-a3b'

pos = 'rope'
norm = 'rmsnorm'
qk_norm = True
tie_weights = False
n_layer = 48
n_head = 32
n_kv_head = 4
n_embd = 2048
head_width = 128  # 32 heads of 128 are twice as wide as the residual stream
mlp = 'moe'
n_experts = 128
n_active_experts = 8
expert_hidden = 768
router = 'softmax'
router_balance = 'loss'  # as Qwen3's, over the whole batch; a bias would have no form in transformers
router_balance_rate = 1e-3

# FSDP2 alone: a micro-batch of 32,768 tokens computes for longer than its gathers of experts take, while the
# tokens of ep travel when nothing else runs. On H100 GPUs with 400 Gb/s each
# python -m kilogpt.plan config/qwen3_30b_a3b.py --gpus=64 finds it the fastest without a pipeline, but for
# larger micro-batches, which gain less than 1%. With a pipeline,
# The planner's layout: --pp=8 --zero_stage=2 --batch_size=1 --gradient_accumulation_steps=1024 \
#     --activation_checkpoint=none
# It is predicted to be 1.07 times as fast, but takes 77 of 80 GB.
zero_stage = 3
activation_checkpoint = 'full'

# 8 sequences * 4096 tokens * 128 = 4,194,304 tokens an iteration: 2 micro-batches on each of 64 GPUs
batch_size = 8
block_size = 4096
gradient_accumulation_steps = 2 * 64

learning_rate = 3e-4
min_lr = 3e-5
max_iters = 150000  # 630B tokens: 20 for each parameter (Hoffmann et al. 2022)
lr_decay_iters = 0  # follows max_iters
eval_interval = 1000
eval_iters = 128
log_interval = 10
