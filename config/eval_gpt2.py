# Evaluate OpenAI's GPT-2 (124M parameters) on a dataset.
batch_size = 8
eval_iters = 500  # many, for a good estimate of the loss
eval_only = True
init_from = 'gpt2'
