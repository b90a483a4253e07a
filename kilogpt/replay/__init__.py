"""Recomputes iterations of a run and compares them with its log and checkpoints: `python -m kilogpt.replay`.

__main__.py starts train.py from the checkpoints of the run, in a separate folder. comparison.py finds the
first difference. Read __main__.py first; docs/faults.md has an example.
"""
