"""Logs: events of every process, and services that show a run's log (docs/measuring.md)."""
events = False  # write out_dir/events/rank_*.jsonl: start, saves, slow iterations, errors and end of each process
trackio = False  # log to trackio too, under wandb_project and wandb_run_name (pip install trackio)
