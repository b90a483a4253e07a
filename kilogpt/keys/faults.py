"""Faults: what a run does about bad gradients and silent processes."""
from kilogpt.keys.checks import check_at_least, check_choice

on_nonfinite = 'abort'  # on a NaN or infinite loss or gradient: 'abort', or 'skip' the update up to 9 times in a row
on_spike = 'none'  # on a gradient spike: 'skip' the update, or 'rollback' too after 4 in a row
spike_factor = 5.0  # with on_spike: gradient norms above this many times their running median are too large
comm_timeout = 600  # seconds without progress until the run ends and names what hung; 3 times that at start


def check(config):
    """Raise ValueError for values that no run can have."""
    check_at_least(config, 1, 'comm_timeout')
    check_choice(config, 'on_nonfinite', 'abort', 'skip')
    check_choice(config, 'on_spike', 'none', 'skip', 'rollback')
    if config['spike_factor'] <= 1:
        raise ValueError(f'spike_factor is {config["spike_factor"]}: it must be above 1')
    if config['on_spike'] == 'rollback' and config['keep_checkpoints'] == 0:
        raise ValueError('on_spike=rollback goes back to a checkpoint, but keep_checkpoints is 0: '
                         'set keep_checkpoints to at least 1')
