# GPT-2's shape with 8 experts in each block, of which a token goes to 2: 520M parameters, of which 180M are
# active. On a node of 8 GPUs, each with one of the experts:
# torchrun --standalone --nproc_per_node=8 train.py config/train_gpt2_moe.py
out_dir = 'out-gpt2-moe'
wandb_project = 'owt'
wandb_run_name = 'gpt2-moe'

pos = 'rope'
norm = 'rmsnorm'
qk_norm = True
tie_weights = True
mlp = 'moe'
n_experts = 8
n_active_experts = 2
router = 'softmax'
router_balance = 'bias'

ep = 8
zero_stage = 2

# 12 sequences * 1024 tokens * 40 = 491,520 tokens an iteration, as nanoGPT's: 5 micro-batches on each GPU
batch_size = 12
block_size = 1024
gradient_accumulation_steps = 5 * 8

learning_rate = 6e-4
min_lr = 6e-5
max_iters = 60000  # 29B tokens
lr_decay_iters = 0  # follows max_iters
eval_interval = 1000
eval_iters = 200
log_interval = 10
