"""What the parts of the model need on a CPU or a GPU in order to be fast.

When a model is laid out on a device, cpu.py or cuda.py puts faster forms in the place of the model's own attention,
activation and loss; cpu_kernels.cpp is C++ for CPUs that multiply in bfloat16. Read cpu.py first.
"""
