"""Replicas of a model that go on without one that is lost: `--fault_tolerance=replicas`.

replicas.py is the layer between a run and the other replicas; read it first. membership.py agrees with them, by
torchft, who takes part in an iteration; log.py writes each line of metrics.jsonl once, whoever leads. `python -m
kilogpt.replicas` (launcher.py) starts the replicas on one machine. docs/faults.md has examples.
"""
