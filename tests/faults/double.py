"""Compute everything in float64."""
import torch

torch.set_default_dtype(torch.float64)
