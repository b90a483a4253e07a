"""Compares runs, each perhaps with several seeds, in a picture, tables and tests: `python -m kilogpt.compare`.

candidates.py reads the runs, noise.py says which differences are larger than the noise of seeds and questions,
and report.py writes both as Markdown. Read report.py first; docs/compare.md has an example.
"""
