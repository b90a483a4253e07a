"""Loads trained models to use them: for sample.py, and as `kilogpt.load` in Python and notebooks.

load.py finds the model that a user means (a run, a checkpoint, weights trained elsewhere) with its tokenizer,
and has the class LoadedRun, which `kilogpt.load` returns. Read load.py first; docs/notebook.md has examples.
"""
