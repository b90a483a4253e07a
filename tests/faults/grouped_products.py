"""Experts' products as on a GPU: by PyTorch's grouped_mm, which processors have too."""
from kilogpt import cpu, cuda
from kilogpt.experts import find_experts


def use_faster_parts(model):
    faster_parts(model)
    for routed in find_experts(model).values():
        routed.experts.products = cuda.grouped_products


faster_parts, cpu.use_faster_parts = cpu.use_faster_parts, use_faster_parts
