"""Islands: groups of processes that train separately and exchange their parameters at intervals (DiLoCo).

islands.py is the hook that exchanges between islands of one torchrun, with the outer optimizer of
outer_optimizer.py. jobs.py is the hook of islands that are separate jobs, started at different times: each
is a client (client.py) of a common server (server.py), which `python -m kilogpt.islands` starts. Read
islands.py first; docs/islands.md has examples.
"""
