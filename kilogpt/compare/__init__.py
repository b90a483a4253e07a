"""Compares runs, which may have several seeds, in a picture, tables and tests: `python -m kilogpt.compare`.

candidates.py reads the runs, noise.py has the tests of whether a difference is larger than the noise, and
report.py writes both as Markdown. recipes.py trains the runs too, each recipe at its own best learning rate:
`python -m kilogpt.compare.recipes`. Read report.py first; docs/measuring.md has examples.
"""
