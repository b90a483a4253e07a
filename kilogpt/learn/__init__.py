"""Learning from a teacher and from rewards, with loss='distill' and loss='rl'. Start with loaders.py."""
