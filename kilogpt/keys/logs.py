"""Logs: services that show a run's log (docs/measuring.md)."""
trackio = False  # log to trackio too, under wandb_project and wandb_run_name (pip install trackio)
