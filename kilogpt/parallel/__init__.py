"""How a model is laid out on many processes, and how it runs there.

layout.py decides by arithmetic which process has which part. apply.py carries the layout out with PyTorch's
DDP, FSDP2, DTensor and pipelines. The other files implement what PyTorch does not provide. Read apply.py
first, from `Parallel.parallelize` on.
"""
