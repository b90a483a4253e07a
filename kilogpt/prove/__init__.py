"""Checks that every layout still trains an edited model as one process does: `python -m kilogpt.prove`.

__main__.py chooses layouts and runs each of them (runs.py). observer.py records what a run computes,
compare.py finds differences, and diagnosis.py suggests their cause. Read __main__.py first.
"""
