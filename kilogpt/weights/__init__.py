"""Reads and writes the weights of other programs.

importing.py opens and imports whole models, and exporting.py exports them; folders.py, safetensors_files.py and
nanogpt.py read and write their files; families.py has the names of tensors and the config entries of each family;
tensors.py has the tensors, which are read when they are needed; gguf/ has the files of llama.cpp, and is imported for
them alone. Read importing.py first; docs/weights.md has examples.
"""
