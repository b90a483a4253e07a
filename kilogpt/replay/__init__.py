"""The command `python -m kilogpt.replay`: iterations of a run, recomputed and compared with its log and checkpoints.

__main__.py reads its arguments, and kilogpt/prove/replay.py does the work. docs/faults.md has an example.
"""
