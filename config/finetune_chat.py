# Finetune a small open model on short conversations: eight minutes on two CPU cores.
#
#   python data/chatterbot/prepare.py --tokenizer=HuggingFaceTB/SmolLM2-135M-Instruct
#   python train.py config/finetune_chat.py
#   python sample.py --out_dir=out-chat --chat
#
# docs/finetune.md has the figures. With data of your own, prepare it with data/conversations/prepare.py.
init_from = 'HuggingFaceTB/SmolLM2-135M-Instruct'  # on the hub, or a folder; its chat template comes along
dataset = 'chatterbot'
out_dir = 'out-chat'

documents = 'pack'  # each row has whole conversations, and attention stays within each
block_size = 256
batch_size = 4
gradient_accumulation_steps = 2
max_iters = 25  # of 2,048 tokens: about half of the conversations

learning_rate = 1e-4
min_lr = 1e-5
lr_decay_iters = 0  # max_iters
warmup_iters = 5
weight_decay = 0.0
dropout = 0.0

eval_interval = 25
eval_iters = 8
log_interval = 5
always_save_checkpoint = False
sample_interval = 25  # prompts as the template writes them, which ends in what begins an answer
sample_prompts = '<|im_start|>user\nMy laptop screen is black.<|im_end|>\n<|im_start|>assistant\n'
sample_tokens = 30
