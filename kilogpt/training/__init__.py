"""What train.py builds its run of: a Cluster, and on it a Run. Start with run.py."""
