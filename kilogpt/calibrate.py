def measure_into(path): pass
