"""The library of kiloGPT: train.py uses it to run on any number of processes and to survive their failures.

The files of this folder serve a single run (optim.py, metrics.py, checkpoint.py, guard.py, ...). Each
subfolder has one subject; its __init__.py describes it and says which file to read first. docs/files.md lists
all files.
"""
