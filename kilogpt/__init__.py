"""The machinery of kiloGPT: what lets train.py run on any number of processes, and survive what happens there.

The files of this folder serve one run (optim.py, metrics.py, checkpoint.py, guard.py, ...); each folder is a room
for one subject, whose __init__.py says what happens there and which file to read first. docs/files.md lists all.
"""
