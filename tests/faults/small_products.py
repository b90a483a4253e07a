"""Time a small product for the peak FLOP/s: the usual products take longer than the iterations of a test."""
from kilogpt import metrics

metrics.TIMED_PRODUCTS = ((64, 64, 64),)
metrics.measured_flops.__defaults__ = (0.001,)
