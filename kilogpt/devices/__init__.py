"""Forms of the model's parts that are fast on a CPU or on a GPU.

cpu.py and cuda.py replace parts that `GPT.replaceable` names (parts.py) when a model is laid out on a device:
attention, activations, the loss, the products of experts. cpu_kernels.cpp is C++ for CPUs that multiply in
bfloat16. Read cpu.py first.
"""
