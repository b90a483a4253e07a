"""Islands: groups of processes that train apart and exchange their parameters now and then (DiLoCo).

islands.py is what a run does with the other islands of its torchrun, jobs.py what it does where islands are jobs of
their own, which meet at the server of server.py. Read islands.py first; docs/islands.md has examples.
"""
