"""Fits a scaling law to runs of several sizes, and predicts larger runs: `python -m kilogpt.scaling`.

law.py has the laws and their compute-optimal sizes, fit.py finds the coefficients, and picture.py draws both.
Read law.py first; docs/measuring.md has an example.
"""
