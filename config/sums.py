# Learn to write sums, letter by letter, for 11 seconds of one core: most are wrong. Then config/sums_rewards.py.
#
#   python data/sums/prepare.py
#   python train.py config/sums.py
#   python train.py config/sums_rewards.py
out_dir = 'out-sums'
dataset = 'sums'
documents = 'pack'  # attention stays within each sum
block_size = 32
batch_size = 40
gradient_accumulation_steps = 1
n_layer, n_head, n_embd = 2, 4, 64
pos, norm, mlp = 'rope', 'rmsnorm', 'swiglu'
compile = False
dtype = 'float32'
# The rate hardly falls: what a low learning rate finds, the noise of rewards destroys at once.
learning_rate, min_lr, warmup_iters, lr_decay_iters = 4e-3, 3e-3, 20, 0
weight_decay = 0.0
max_iters = 330
eval_interval, eval_iters, log_interval = 330, 5, 50
