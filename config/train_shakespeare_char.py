# A character-level Shakespeare model: nanoGPT's baby GPT. Minutes on a GPU; on a CPU see quickstart.py.
out_dir = 'out-shakespeare-char'
eval_interval = 250  # often, since the model will overfit
eval_iters = 200
log_interval = 10
always_save_checkpoint = False  # the model will overfit: save only what improves
wandb_project = 'shakespeare-char'
wandb_run_name = 'mini-gpt'

dataset = 'shakespeare_char'
gradient_accumulation_steps = 1
batch_size = 64
block_size = 256

n_layer = 6
n_head = 6
n_embd = 384
dropout = 0.2

learning_rate = 1e-3  # a small model takes a high learning rate
max_iters = 5000
lr_decay_iters = 5000
min_lr = 1e-4
beta2 = 0.99  # few tokens per iteration: a longer memory
warmup_iters = 100
