"""Reads and writes the weights of other programs: `python -m kilogpt.convert`.

weights.py reads and writes whole models (nanoGPT, GPT-2, Hugging Face); hugging_face.py has the names of
tensors and the config entries of each family; start.py chooses what a run starts from. Read weights.py first;
docs/weights.md has examples.
"""
