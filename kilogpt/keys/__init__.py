"""Keys of train.py that few runs set, a page for each subject; islands.py is an example.

A page holds globals with comments, as train.py does, and `check(config)`, which raises ValueError for values that
no run can have. Pages do not import torch, so that a bad value ends a run at once. The model's keys are the fields
of GPTConfig in model.py.
"""
from kilogpt.keys import data, faults, islands, scoring


def check(config):
    """Raise ValueError for a value that no run can have. The model and the layout check their own keys."""
    for page in (data, faults, islands, scoring):
        page.check(config)
    if config['loss'] in ('distill', 'rl'):
        from kilogpt.keys import learning  # which other runs do not load
        learning.check(config)
