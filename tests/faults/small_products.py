"""Measure the peak of the CPU with a small product: the usual products take longer than a tiny run."""
from kilogpt import metrics

metrics.TIMED_PRODUCTS = ((64, 64, 64),)
metrics.measured_flops.__defaults__ = (0.001,)
