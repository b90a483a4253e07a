# GPT-2 (124M) on OpenWebText, to nanoGPT's loss of about 2.85: 300B tokens, a few days on 8 A100s.
# torchrun --standalone --nproc_per_node=8 train.py config/train_gpt2.py
wandb_log = True
wandb_project = 'owt'
wandb_run_name = 'gpt2-124M'

# 12 sequences * 1024 tokens * 40 = 491,520 tokens an iteration, over all GPUs
batch_size = 12
block_size = 1024
gradient_accumulation_steps = 5 * 8

max_iters = 600000
lr_decay_iters = 600000
eval_interval = 1000
eval_iters = 200
log_interval = 10
