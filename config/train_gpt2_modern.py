# The shape of GPT-2 (124M) with modern blocks (RoPE, RMSNorm, SwiGLU, QK-norm, softcap, untied head), Muon,
# and the wsd schedule. All were chosen by runs of small models (LOG.md). The learning rate is usual for AdamW
# at this size and was not tuned: 21M parameters and 32,768 tokens an iteration were better at 6e-3 than at 3e-3.
# torchrun --standalone --nproc_per_node=8 train.py config/train_gpt2_modern.py
out_dir = 'out-gpt2-modern'
wandb_project = 'owt'
wandb_run_name = 'gpt2-124M-modern'

pos = 'rope'
norm = 'rmsnorm'
mlp = 'swiglu'
qk_norm = True
n_kv_head = 4  # three query heads share a key/value head: a third of GPT-2's KV cache
tie_weights = False
softcap = 30.0
zero_init = True

batch_size = 12
block_size = 1024
gradient_accumulation_steps = 5 * 8
optimizer = 'muon'
learning_rate = 1e-3
min_lr = 0.0
lr_schedule = 'wsd'
warmup_iters = 500
max_iters = 20000  # 10B tokens
lr_decay_iters = 0  # follows max_iters
eval_interval = 1000
log_interval = 10
