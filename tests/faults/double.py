"""Compute everything in float64, including the loss."""
import torch

torch.set_default_dtype(torch.float64)
to_float32 = torch.Tensor.float
torch.Tensor.float = lambda tensor: tensor if tensor.dtype == torch.float64 else to_float32(tensor)
