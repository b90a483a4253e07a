# Text of words on two CPU cores: 4.5M parameters with a vocabulary of 4,096, two to four minutes for 1.2M tokens. Of our
# recipes, this one learns most from so few tokens (docs/models.md). Your own text:
#
#   python data/text/train_tokenizer.py --input='books/*.txt' --vocab_size=4096 --out=mytokenizer
#   python data/text/prepare.py --input='books/*.txt' --tokenizer=mytokenizer --out=mybooks
#   python train.py config/words_cpu.py
out_dir = 'out-words'
dataset = 'mybooks'
eval_interval, eval_iters, log_interval = 100, 8, 10
always_save_checkpoint = False  # save only what improves

gradient_accumulation_steps = 1
batch_size, block_size = 16, 256
n_layer, n_head, n_embd = 3, 3, 192
pos, qk_norm, mlp = 'rope', True, 'swiglu'
attention_conv, mlp_conv, attention_gate, value_pattern = 3, 3, True, 'VNV'
tie_weights, zero_init = False, True
dropout = 0.0

optimizer, muon_momentum = 'muon', 0.85
learning_rate, lr_factors = 1e-2, 'embedding:5, vector:3'
lr_schedule, lr_decay_ratio, min_lr = 'wsd', 0.65, 5e-4
warmup_iters = 20
beta2 = 0.99
max_iters = 300
lr_decay_iters = 0  # follows max_iters
