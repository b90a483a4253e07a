# The shape of GPT-2 (124M) with modern blocks (RoPE, RMSNorm, SwiGLU, QK-norm, gated heads, softcap, untied head),
# Muon, and the wsd schedule. All were chosen by runs of smaller models (docs/log), up to 21M parameters. So was the
# learning rate: the best ones fell with the width, to 6e-3 at 512, and that of the embedding did not (docs/models.md).
# No run has compared rates at this size.
# torchrun --standalone --nproc_per_node=8 train.py config/train_gpt2_modern.py
out_dir = 'out-gpt2-modern'
wandb_project = 'owt'
wandb_run_name = 'gpt2-124M-modern'

pos = 'rope'
norm = 'rmsnorm'
mlp = 'swiglu'
qk_norm = True
attention_gate = True
n_kv_head = 4  # three query heads share a key/value head: a third of GPT-2's KV cache
tie_weights = False
softcap = 30.0
zero_init = True

batch_size = 12
block_size = 1024
gradient_accumulation_steps = 5 * 8
optimizer = 'muon'
learning_rate, lr_factors = 4e-3, 'embedding:10'
min_lr = 2e-4
lr_schedule, lr_decay_ratio = 'wsd', 0.65
warmup_iters = 500
max_iters = 20000  # 10B tokens
lr_decay_iters = 0  # follows max_iters
eval_interval = 1000
log_interval = 10
