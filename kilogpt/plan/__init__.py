"""Predicts what a run will need before a cluster is rented: `python -m kilogpt.plan`.

memory_model.py and time_model.py are formulas for the memory and the time of an iteration. planner.py uses
these formulas to compare layouts, and dry_run.py checks a layout by running one iteration on tensors without
memory. Read memory_model.py first.
"""
