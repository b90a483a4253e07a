# Finetune GPT-2 XL on Shakespeare, or a smaller GPT-2 by --init_from=gpt2.
out_dir = 'out-shakespeare'
eval_interval = 5
eval_iters = 40
wandb_project = 'shakespeare'
wandb_run_name = 'finetune'

dataset = 'shakespeare'
init_from = 'gpt2-xl'
always_save_checkpoint = False  # save only where the validation loss improves

# 1 sequence * 32 * 1024 tokens = 32,768 tokens an iteration: 9 iterations see all of Shakespeare's 301,966
batch_size = 1
gradient_accumulation_steps = 32
max_iters = 20
learning_rate = 3e-5
decay_lr = False
