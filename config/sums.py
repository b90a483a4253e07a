# Learn to write sums, letter by letter, for under a minute of one core: most are wrong. Then config/sums_rewards.py.
#
#   python data/sums/prepare.py
#   python train.py config/sums.py
#   python train.py config/sums_rewards.py
out_dir = 'out-sums'
dataset = 'sums'
documents = 'pack'  # attention stays within each sum
block_size = 16
batch_size = 64
gradient_accumulation_steps = 1
n_layer, n_head, n_embd = 3, 4, 128
pos, norm, mlp = 'rope', 'rmsnorm', 'swiglu'
compile = False
dtype = 'float32'
learning_rate, min_lr, warmup_iters, lr_decay_iters = 2e-3, 2e-4, 20, 0
weight_decay = 0.0
max_iters = 500
eval_interval, eval_iters, log_interval = 150, 5, 50
