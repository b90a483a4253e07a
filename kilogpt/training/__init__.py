"""What train.py builds its run of: a Cluster, a Start, and on both a Run. Start with run.py."""
