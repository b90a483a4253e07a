"""Which values the keys of train.py may have, and which of them a resumed run may change."""

OUTER_INTERVAL = 100  # the outer_interval of a run with islands that does not set one


def check_settings(config):
    """Raise ValueError for a value that no run can have. The model and the layout check their own keys."""
    for key in ('eval_interval', 'log_interval', 'batch_size', 'gradient_accumulation_steps', 'block_size',
                'max_iters', 'comm_timeout', 'islands', 'outer_fragments'):
        if config[key] < 1:
            raise ValueError(f'{key} is {config[key]}: it must be at least 1')
    for key in ('eval_iters', 'save_interval', 'save_minutes', 'keep_checkpoints', 'warmup_iters', 'seed',
                'outer_interval', 'outer_delay'):
        if config[key] < 0:
            raise ValueError(f'{key} is {config[key]}: it cannot be negative')
    for key, allowed in dict(lr_schedule=('cosine', 'linear', 'wsd'), optimizer=('adamw', 'muon'),
                             on_nonfinite=('abort', 'skip'), on_spike=('none', 'skip', 'rollback'),
                             outer_compress=('none', 'bf16', 'int8', 'int4')).items():
        if config[key] not in allowed:
            raise ValueError(f'{key} is {config[key]!r}: choose one of {", ".join(allowed)}')
    if config['islands'] > 1 or config['outer_interval'] or config['outer_store'] or config['island']:
        _check_islands(config)
    _check_range(config, 'muon_momentum', 0, 1)
    if config['spike_factor'] <= 1:
        raise ValueError(f'spike_factor is {config["spike_factor"]}: it must be above 1')
    if config['on_spike'] == 'rollback' and config['keep_checkpoints'] == 0:
        raise ValueError('on_spike=rollback goes back to a checkpoint, but keep_checkpoints is 0: '
                         'set keep_checkpoints to at least 1')


def _check_range(config, key, low, high):
    if not low <= config[key] < high:
        raise ValueError(f'{key} is {config[key]}: it must be at least {low} and below {high}')


def _check_islands(config):
    """Raise ValueError for keys that do not go together with islands or an outer optimizer."""
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
    interval, fragments = config['outer_interval'] or OUTER_INTERVAL, config['outer_fragments']
    most = min(interval, config['n_layer'] + 1)
    if fragments > most:
        raise ValueError(f'outer_fragments is {fragments}: it must be at most {most}, since an interval has '
                         f'{interval} iterations and the model {config["n_layer"]} blocks')
    if config['outer_delay'] >= interval // fragments:
        raise ValueError(f'outer_delay is {config["outer_delay"]}: it must be below '
                         f'outer_interval / outer_fragments, {interval // fragments}')
    for key, low, high in (('outer_lr', 0, 10), ('outer_momentum', 0, 1), ('outer_mix', 0, 1)):
        _check_range(config, key, low, high)
    if config['on_spike'] == 'rollback':
        raise ValueError('on_spike=rollback does not work with islands or outer_interval, since the other '
                         'islands cannot go back: set another on_spike')


def compare_settings(config, saved, source, say):
    """Print which keys differ from those of a checkpoint; ValueError if a key cannot change.

    config: the keys of this run. saved: the state of the checkpoint `source`. say(text): prints.
    """
    former = saved['config']
    if former.get('optimizer', config['optimizer']) != config['optimizer']:
        raise ValueError(
            f'optimizer is {config["optimizer"]!r}, but {source} holds the state of '
            f'{former["optimizer"]!r}: set that optimizer, or start from the weights with '
            f'--init_from={config["out_dir"]} and another out_dir')
    for key, value in former.items():
        if config.get(key, value) != value and key != 'init_from':
            is_fixed = key != 'dropout' and saved['model'].get(key, config[key]) != config[key]
            decision = ' (the checkpoint decides)' if is_fixed else ''
            say(f'resuming with another {key}: {value!r} -> {config[key]!r}{decision}')
