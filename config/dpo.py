# Train a small open model to prefer one answer to another (DPO): about ten minutes on two CPU cores.
#
#   python data/chatterbot/prepare.py --tokenizer=HuggingFaceTB/SmolLM2-135M-Instruct --pairs --out=chatterbot_pairs
#   python -m kilogpt.evaluate HuggingFaceTB/SmolLM2-135M-Instruct --reference=chatterbot_pairs
#   python train.py config/dpo.py
#   python sample.py --out_dir=out-dpo --chat
#
# docs/finetune.md has the figures. With pairs of your own, prepare them with data/preferences/prepare.py.
init_from = 'HuggingFaceTB/SmolLM2-135M-Instruct'  # on the hub, or a folder; its chat template comes along
dataset = 'chatterbot_pairs'
out_dir = 'out-dpo'

loss = 'dpo'
dpo_beta = 0.1
documents = 'pack'  # each row has whole pairs, and attention stays within each answer and its prompt
block_size = 512  # several times as long as a pair, so that few pairs are cut
batch_size = 2
gradient_accumulation_steps = 1
max_iters = 20  # of about 8 pairs

learning_rate = 1e-5
min_lr = 1e-6
lr_decay_iters = 0  # max_iters
warmup_iters = 2
weight_decay = 0.0
dropout = 0.0

eval_interval = 10
eval_iters = 10
log_interval = 5
always_save_checkpoint = False
