"""Estimates of what a run will need, before a cluster is rented: `python -m kilogpt.plan`.

memory_model.py and time_model.py have formulas for the memory and the time of an iteration. planner.py
compares layouts by these formulas, and dry_run.py checks a layout by running it on tensors without memory.
Read memory_model.py first.
"""
