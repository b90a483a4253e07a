"""Islands: groups of processes that train separately and exchange parameters at intervals (DiLoCo)."""
from kilogpt.keys.checks import check_at_least, check_choice, check_range

islands = 1  # number of groups; each has the layout above and a share of each iteration's sequences
outer_interval = 0  # iterations from one exchange to the next; 0 = 100 with islands, else no exchange
outer_lr = 0.7  # learning rate of the outer optimizer, which takes the mean of the islands' changes
outer_momentum = 0.9  # its Nesterov momentum
outer_fragments = 1  # parts of the parameters that are exchanged at different times within an interval
outer_compress = 'none'  # what islands send: 'none' (parameters), or changes in 'bf16', 'int8' or 'int4'
outer_delay = 0  # iterations that islands make while an exchange is in progress
outer_mix = 0.0  # share of its own parameters that an island keeps after an exchange; 0 = none
outer_offload = False  # keep the state of the outer optimizer in host memory
outer_store = ''  # for islands that are jobs of their own: HOST:PORT of python -m kilogpt.islands
island = 0  # with outer_store: the number of this job's island
outer_timeout = 60.0  # with outer_store: seconds for which the first island waits for others at an exchange

INTERVAL = 100  # the outer_interval of a run with islands that does not set one


def are_on(config):
    """Whether a run has an outer optimizer: several islands, or one that takes outer steps."""
    return config['islands'] > 1 or config['outer_interval'] > 0 or bool(config['outer_store'])


def check(config):
    """Raise ValueError for values that no run can have, or that do not go together."""
    check_at_least(config, 1, 'islands', 'outer_fragments')
    check_at_least(config, 0, 'outer_interval', 'outer_delay')
    check_choice(config, 'outer_compress', 'none', 'bf16', 'int8', 'int4')
    if are_on(config) or config['island']:
        _check_together(config)


def _check_together(config):
    islands, global_batch = config['islands'], config['batch_size'] * config['gradient_accumulation_steps']
    if global_batch % islands:
        raise ValueError(f'islands={islands} does not divide the {global_batch} sequences of an iteration '
                         '(batch_size * gradient_accumulation_steps): set these to a multiple of islands')
    if not 0 <= config['island'] < islands:
        raise ValueError(f'island is {config["island"]}: it must be at least 0 and below islands={islands}')
    if config['island'] and not config['outer_store']:
        raise ValueError('island says which island a job is: set outer_store too, or leave island out')
    if config['outer_timeout'] <= 0:
        raise ValueError(f'outer_timeout is {config["outer_timeout"]}: it must be above 0')
    interval, fragments = config['outer_interval'] or INTERVAL, config['outer_fragments']
    most = min(interval, config['n_layer'] + 1)
    if fragments > most:
        raise ValueError(f'outer_fragments is {fragments}: it must be at most {most}, since an interval has '
                         f'{interval} iterations and the model {config["n_layer"]} blocks')
    if config['outer_delay'] >= interval // fragments:
        raise ValueError(f'outer_delay is {config["outer_delay"]}: it must be below '
                         f'outer_interval / outer_fragments, {interval // fragments}')
    check_range(config, 'outer_lr', 0, 10)
    check_range(config, 'outer_momentum', 0, 1)
    check_range(config, 'outer_mix', 0, 1)
    if config['on_spike'] == 'rollback':
        raise ValueError('on_spike=rollback does not work with islands or outer_interval, since the other '
                         'islands cannot go back: set another on_spike')
