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


# --- init_from: 'scratch', weights, 'resume', 'auto', or 'auto:' and weights --------------------------------

def parse_init_from(init_from):
    """(whether a run resumes the checkpoint in its out_dir, the weights it starts from without one, or '')."""
    automatic, _, start = init_from.partition(':')
    if automatic != 'auto':
        start = init_from
    return automatic == 'auto' or init_from == 'resume', '' if start in ('scratch', 'resume') else start


def initial_weights(init_from):
    """The weights that init_from names, or '' if it names none."""
    _, weights = parse_init_from(init_from)
    return weights


def with_resuming(init_from):
    """The value that starts from what init_from names, but resumes the checkpoint in out_dir if there is one."""
    weights = initial_weights(init_from)
    return f'auto:{weights}' if weights else 'auto'
