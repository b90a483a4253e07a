"""Computes iterations of a run again and compares them with what the run has logged and saved: `python -m kilogpt.replay`.

__main__.py starts train.py from the run's own checkpoints, in a folder of its own; comparison.py finds the first
difference. Read __main__.py first; docs/faults.md has an example.
"""
