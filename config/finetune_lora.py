# The training of config/finetune_chat.py with adapters (docs/finetune.md): the weights of the model stay as they are.
#
#   python data/chatterbot/prepare.py --tokenizer=HuggingFaceTB/SmolLM2-135M-Instruct
#   python train.py config/finetune_lora.py
#   python sample.py --out_dir=out-lora-chat --chat
init_from = 'HuggingFaceTB/SmolLM2-135M-Instruct'
dataset = 'chatterbot'
out_dir = 'out-lora-chat'

lora_rank = 16
lora_alpha = 16.0
lora_base_dtype = 'bfloat16'  # half the memory of the frozen linears; 'int8' is a quarter of it
documents = 'pack'
block_size = 256
batch_size = 4
gradient_accumulation_steps = 2
max_iters = 25  # of 2,048 tokens: about half of the conversations

learning_rate = 1e-3  # ten times that of all weights
min_lr = 1e-4
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
