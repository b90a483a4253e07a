"""Faults: what a run does about bad gradients and silent processes."""
from kilogpt.keys.checks import check_at_least, check_choice
from kilogpt.keys.islands import are_on

fault_tolerance = 'restart'  # of a lost process: 'restart' all from a checkpoint; 'replicas' = the others go on
replica_timeout = 60.0  # with replicas: seconds until one that does not answer is left out
on_nonfinite = 'abort'  # on a NaN or infinite loss or gradient: 'abort', or 'skip' the update up to 9 times in a row
on_spike = 'none'  # on a gradient spike: 'skip' the update, or 'rollback' too after 4 in a row
spike_factor = 5.0  # with on_spike: gradient norms above this many times their running median are too large
comm_timeout = 600  # seconds without progress until the run ends and names what hung; 3 times that at start


def check(config):
    """Raise ValueError for values that no run can have."""
    check_at_least(config, 1, 'comm_timeout')
    check_choice(config, 'on_nonfinite', 'abort', 'skip')
    check_choice(config, 'on_spike', 'none', 'skip', 'rollback')
    check_choice(config, 'fault_tolerance', 'restart', 'replicas')
    if config['fault_tolerance'] == 'replicas':
        _check_replicas(config)
    if config['spike_factor'] <= 1:
        raise ValueError(f'spike_factor is {config["spike_factor"]}: it must be above 1')
    if config['on_spike'] == 'rollback' and config['keep_checkpoints'] == 0:
        raise ValueError('on_spike=rollback goes back to a checkpoint, but keep_checkpoints is 0: '
                         'set keep_checkpoints to at least 1')


def _check_replicas(config):
    if config['replica_timeout'] <= 0:
        raise ValueError(f'replica_timeout is {config["replica_timeout"]}: it must be above 0')
    if are_on(config):
        raise ValueError('fault_tolerance=replicas does not go with islands, which go on without each other anyway: '
                         'set islands, outer_interval and outer_store to their defaults, or fault_tolerance to restart')
    if config['on_spike'] == 'rollback':
        raise ValueError('on_spike=rollback goes back to a checkpoint, which replicas that come and go may not have: '
                         'set on_spike to skip, or fault_tolerance to restart')
    if config['grad_compress'] != 'none':
        raise ValueError(f'grad_compress is {config["grad_compress"]!r}, but fault_tolerance=replicas adds up whole '
                         'gradients: set grad_compress to none, or fault_tolerance to restart')
    for key in ('cpu_offload', 'eval_only', 'events', 'profile', 'trackio', 'wandb_log'):
        if config[key]:
            raise ValueError(f'{key}=True does not go with fault_tolerance=replicas: set {key} to False, or '
                             'fault_tolerance to restart')
