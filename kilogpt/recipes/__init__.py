"""Compares recipes of training, each at its own best learning rate, over seeds: `python -m kilogpt.recipes`.

docs/compare.md has an example.
"""
