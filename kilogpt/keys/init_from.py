"""The values of train.py's key init_from: 'scratch', weights, 'resume', 'auto', or 'auto:' and weights."""


def parse_init_from(init_from):
    """(whether a run resumes the checkpoint in its out_dir, what it starts from without one).

    The latter is 'scratch', weights, or None if a run without a checkpoint cannot start.
    """
    if init_from == 'resume':
        return True, None
    automatic, _, start = init_from.partition(':')
    if automatic == 'auto':
        return True, start or 'scratch'
    return False, init_from


def initial_weights(init_from):
    """The weights that init_from names, or '' if it names none."""
    _, start = parse_init_from(init_from)
    return '' if start in (None, 'scratch') else start


def with_resuming(init_from):
    """The value that starts from what init_from names, but resumes the checkpoint in out_dir if there is one."""
    weights = initial_weights(init_from)
    return f'auto:{weights}' if weights else 'auto'
