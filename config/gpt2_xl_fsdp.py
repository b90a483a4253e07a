# GPT-2 XL's shape (1.56B parameters) on OpenWebText, on a node of 8 GPUs of 80 GB, over which parameters and
# optimizer are sharded:
# torchrun --standalone --nproc_per_node=8 train.py config/gpt2_xl_fsdp.py
# On 8 nodes, sharded within each node and replicated between them; the same on every node, with the address
# of the first:
# torchrun --nnodes=8 --nproc_per_node=8 --rdzv_backend=c10d --rdzv_endpoint=10.0.0.1:29500 \
#     train.py config/gpt2_xl_fsdp.py --dp_replicate=8
out_dir = 'out-gpt2-xl'
wandb_project = 'owt'
wandb_run_name = 'gpt2-xl-fsdp'

n_layer = 48
n_head = 25  # rules out tensor and context parallelism: 5 and 25 divide neither block_size nor the vocabulary
n_embd = 1600

zero_stage = 2  # 3 would take 3 GB less on each GPU and gather every block twice

# 8 sequences * 1024 tokens * 64 = 524,288 tokens an iteration: 8 micro-batches on each of 8 GPUs.
# python -m kilogpt.plan config/gpt2_xl_fsdp.py --gpus=8 --gpu=A100 finds nothing that is faster by 1%.
# The planner's layout: --batch_size=16 --gradient_accumulation_steps=32
# It is 1.00 times as fast, but takes 21 GB more.
batch_size = 8  # about 31 GB on a GPU (docs/layouts.md)
block_size = 1024
gradient_accumulation_steps = 8 * 8

learning_rate = 2e-4  # GPT-3's for 1.3B (Brown et al. 2020, table 2.1), which saw 1M tokens an iteration
min_lr = 2e-5
max_iters = 60000  # 31B tokens: 20 for each parameter (Hoffmann et al. 2022)
lr_decay_iters = 0  # follows max_iters
eval_interval = 1000
eval_iters = 64
log_interval = 10
