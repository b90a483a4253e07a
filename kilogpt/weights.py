from kilogpt.checkpoint import read_weights, padded, find_initial
