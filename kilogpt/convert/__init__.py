"""Conversion of weights from and to other programs: `python -m kilogpt.convert`.

weights.py reads and writes whole models (nanoGPT, GPT-2, Hugging Face). hugging_face.py has the names and the
config entries of each model family. Read weights.py first; docs/weights.md has examples.
"""
