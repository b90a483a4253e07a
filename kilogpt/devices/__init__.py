"""Implementations of the model's parts that are fast on a CPU or on a GPU.

When a model is laid out on a device, cpu.py or cuda.py replaces the parts that `GPT.replaceable` names
(parts.py): attention, activations, the loss, the matrix products of experts. On a GPU flex.py replaces
attention to documents and windows. cpu_kernels.cpp is C++ code for training on CPUs that multiply in bfloat16,
cpu_step.cpp for text on them. Read cpu.py first.
"""
