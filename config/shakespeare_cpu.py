# Shakespeare letter by letter, on two CPU cores: 3.0M parameters, Muon, less than two passes over the text. After
# two and a half minutes on a Zen 4 the validation loss is below that of nanoGPT's baby GPT (1.4697, 3 minutes on an
# A100).
out_dir = 'out-shakespeare-cpu'
dataset = 'shakespeare_char'
eval_interval, log_interval = 340, 10
eval_iters = 27  # 27 * 16 sequences are all of tiny Shakespeare's validation text
always_save_checkpoint = False  # save only what improves

gradient_accumulation_steps = 1
batch_size, block_size = 16, 256
n_layer, n_head, n_kv_head, n_embd = 4, 4, 2, 256
pos, qk_norm, mlp = 'rope', True, 'swiglu'
mlp_conv, attention_gate = 5, True
tie_weights, zero_init = False, True
dropout = 0.0  # so few passes overfit little

optimizer, muon_momentum = 'muon', 0.85
learning_rate, lr_factors, min_lr, warmup_iters = 1e-2, 'vector:3', 0.0, 20
lr_schedule, lr_decay_ratio = 'wsd', 0.7
beta2 = 0.99
max_iters = 340
lr_decay_iters = 0  # follows max_iters
