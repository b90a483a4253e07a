"""Checks that every layout still trains an edited model as one process does: `python -m kilogpt.prove`.

__main__.py chooses the layouts and runs.py runs them; observer.py records what each run computes, compare.py
finds the differences, and diagnosis.py names their likely cause. Read __main__.py first.

replay.py does the same for iterations of a finished run, whose log and checkpoints recorded.py reads.
"""
