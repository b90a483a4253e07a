# Shakespeare letter by letter, on two CPU cores: 3.0M parameters, Muon, two passes over the text. After one and
# a half to four minutes, depending on the CPU, the validation loss is below that of nanoGPT's baby GPT (1.4697,
# 3 minutes on an A100).
out_dir = 'out-shakespeare-cpu'
dataset = 'shakespeare_char'
eval_interval, log_interval = 480, 10
eval_iters = 27  # 27 * 16 sequences are all of tiny Shakespeare's validation text
always_save_checkpoint = False  # save only what improves

gradient_accumulation_steps = 1
batch_size, block_size = 16, 256
n_layer, n_head, n_kv_head, n_embd = 4, 4, 2, 256
pos, qk_norm, mlp = 'rope', True, 'swiglu'
tie_weights, zero_init = False, True
dropout = 0.0  # two passes overfit little

optimizer, muon_momentum = 'muon', 0.85
learning_rate, min_lr, lr_schedule, warmup_iters = 1e-2, 0.0, 'linear', 20
beta2 = 0.99
max_iters = 480
lr_decay_iters = 0  # follows max_iters
