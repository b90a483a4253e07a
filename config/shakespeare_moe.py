# Shakespeare letter by letter on one CPU core, with 8 experts in each block, 2 of them for a letter: 1.35M
# parameters, of which 0.46M are active. docs/models.md compares the validation loss with that of a dense model:
# OMP_NUM_THREADS=1 python train.py config/shakespeare_moe.py --mlp=swiglu --out_dir=out-dense
out_dir = 'out-shakespeare-moe'
dataset = 'shakespeare_char'
eval_interval, log_interval = 600, 10
eval_iters = 54  # 54 * 16 sequences are half of tiny Shakespeare's validation text
compile = False  # compiling would take longer than it saves

gradient_accumulation_steps = 1
batch_size, block_size = 16, 64
n_layer, n_head, n_embd = 2, 4, 128
pos, norm, qk_norm = 'rope', 'rmsnorm', True
tie_weights, zero_init = False, True
mlp = 'moe'
n_experts, n_active_experts = 8, 2
expert_hidden = 192  # two of them are as wide as the MLP of mlp=swiglu

learning_rate, min_lr, lr_schedule, warmup_iters = 3e-3, 0.0, 'linear', 50
beta2 = 0.99
max_iters = 600
lr_decay_iters = 0  # follows max_iters
