# Llama 7B's shape: 8 nodes of 8 GPUs of 80 GB. 2 GPUs share each block (tp), 4 such pairs of a node share the parameters and
# the optimizer (FSDP2), and each node holds a replica (HSDP): only gradients go between nodes. The same on each node, with the
# address of the first:
# torchrun --nnodes=8 --nproc_per_node=8 --rdzv_backend=c10d --rdzv_endpoint=10.0.0.1:29500 train.py config/llama_7b_tp_fsdp.py
# 6.86B parameters: the hidden width of our SwiGLU, the next multiple of 64 of 8/3 * n_embd, is 10,944 (Llama's: 11,008), and
# the vocabulary is that of the dataset, here GPT-2's.
out_dir = 'out-llama-7b'
dataset = 'fineweb'
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

# 4 sequences * 4096 tokens * 256 = 4,194,304 tokens an iteration: 8 micro-batches of each of 32 pairs of GPUs.
# tp pays in bytes where a micro-batch of the pair has fewer than 6 * n_embd = 24,576 tokens (docs/layouts.md), here
# 16,384. Without: --tp=1 --batch_size=2 --gradient_accumulation_steps=512. Short of memory: --activation_checkpoint=selective
batch_size = 4
block_size = 4096
gradient_accumulation_steps = 8 * 32

learning_rate = 3e-4  # Llama's (Touvron et al. 2023, table 2), and so are the batch and the warm-up
min_lr = 3e-5
max_iters = 250000  # 1T tokens
lr_decay_iters = 250000
eval_interval = 1000
eval_iters = 64
log_interval = 10
