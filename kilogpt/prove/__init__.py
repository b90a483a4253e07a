"""Whether every layout still trains an edited model as one process does: `python -m kilogpt.prove`.

__main__.py chooses layouts and runs each of them (runs.py); observer.py writes down what a run computes, compare.py
finds what differs, and diagnosis.py says what the reason often is. Read __main__.py first.
"""
