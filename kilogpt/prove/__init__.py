"""Checks that every layout still trains an edited model as one process does: `python -m kilogpt.prove`.

__main__.py chooses the layouts and runs.py runs them; observer.py records what each run computes, compare.py
finds the differences, and diagnosis.py names their likely cause. Read __main__.py first.
"""
