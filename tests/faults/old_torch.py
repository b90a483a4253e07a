"""Say that this is a version of torch that the code supports, but not the tests."""
import torch

torch.__version__ = type(torch.__version__)('2.11.0')
