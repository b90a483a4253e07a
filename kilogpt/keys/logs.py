"""Logs: events of every process, and services that show a run's log (docs/measuring.md)."""
events = False  # write out_dir/events/rank_*.jsonl: start, saves, slow iterations, errors and end of each process
trackio = False  # log to trackio too, under wandb_project and wandb_run_name (pip install trackio)
wandb_log = False  # log to Weights & Biases too (WANDB_MODE=offline works)
wandb_project = 'owt'  # project in Weights & Biases
wandb_run_name = 'gpt2'  # run name in Weights & Biases
tensorboard = False  # write out_dir/tensorboard too (pip install tensorboard)
