# A first run, on Shakespeare letter by letter: ten to twenty seconds on two CPU cores; on a GPU a model as
# large as nanoGPT's baby GPT. The blocks are Qwen3's (RoPE, RMSNorm, SwiGLU, grouped-query heads, QK-norm), so that
# `python -m kilogpt.convert export` can write the model for other software.
import torch

out_dir = 'out-quickstart'
dataset = 'shakespeare_char'
gradient_accumulation_steps = 1
beta2 = 0.99
warmup_iters = 100
lr_decay_iters = 0  # follows max_iters
pos, norm, mlp, qk_norm, n_kv_head = 'rope', 'rmsnorm', 'swiglu', True, 2

if torch.cuda.is_available():
    eval_interval, eval_iters, log_interval = 250, 200, 10
    always_save_checkpoint = False
    batch_size, block_size = 64, 256
    n_layer, n_head, n_embd, dropout = 6, 6, 384, 0.2
    learning_rate, min_lr = 1e-3, 1e-4
    max_iters = 5000
else:
    compile = False  # compiling would take longer than the run
    eval_interval, eval_iters, log_interval = 140, 10, 20
    batch_size, block_size = 24, 64
    n_layer, n_head, n_embd = 2, 4, 128
    tie_weights, zero_init, optimizer, muon_momentum = False, True, 'muon', 0.85
    learning_rate, min_lr, lr_schedule, warmup_iters = 1.2e-2, 0.0, 'linear', 5
    max_iters = 140
