"""Pictures of runs: `python -m kilogpt.plot`.

curves.py reads the lines of a run, or of a nanoGPT log, and draws them. It is the only file to read.
"""
