"""How a model is laid out on many processes, and runs there.

layout.py says which process has which part, by arithmetic alone. apply.py carries that out with PyTorch's own
parts (DDP, FSDP2, DTensor, pipelines). The other files are the parts that need code of ours. Read apply.py
first, from `Parallel.lay_out` on.
"""
