"""Draws pictures of runs: `python -m kilogpt.plot`.

sources.py reads the log of a run or of nanoGPT, and curves.py draws it. Read curves.py first.
"""
