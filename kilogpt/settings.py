"""Which values the keys of train.py and sample.py may have, and which a checkpoint decides or contradicts."""
import contextlib
import dataclasses

from kilogpt.optim import parse_lr_factors, scheduled_lr

OUTER_INTERVAL = 100  # the outer_interval of a run with islands that does not set one
RATE_KEYS = ('decay_lr', 'lr_schedule', 'lr_decay_ratio', 'learning_rate', 'min_lr', 'warmup_iters',
             'lr_decay_iters')
# Keys that a run may set although its model comes from elsewhere: sequences may be shorter.
FREE_MODEL_KEYS = ('block_size', 'dropout')


def check_settings(config):
    """Raise ValueError for a value that no run can have. The model and the layout check their own keys."""
    for key in ('eval_interval', 'log_interval', 'batch_size', 'gradient_accumulation_steps', 'block_size',
                'max_iters', 'comm_timeout', 'islands', 'outer_fragments', 'sample_tokens'):
        if config[key] < 1:
            raise ValueError(f'{key} is {config[key]}: it must be at least 1')
    for key in ('eval_iters', 'save_interval', 'save_minutes', 'keep_checkpoints', 'warmup_iters',
                'lr_decay_iters', 'seed', 'outer_interval', 'outer_delay', 'max_epochs', 'data_cache_gb',
                'eval_tasks_interval', 'eval_tasks_limit', 'sample_interval'):
        if config[key] < 0:
            raise ValueError(f'{key} is {config[key]}: it cannot be negative')
    for key, allowed in dict(lr_schedule=('cosine', 'linear', 'wsd'), optimizer=('adamw', 'muon'),
                             documents=('stream', 'mask', 'pack'), loss=('cross_entropy', 'dpo'),
                             on_nonfinite=('abort', 'skip'), on_spike=('none', 'skip', 'rollback'),
                             outer_compress=('none', 'bf16', 'int8', 'int4')).items():
        if config[key] not in allowed:
            raise ValueError(f'{key} is {config[key]!r}: choose one of {", ".join(allowed)}')
    if config['islands'] > 1 or config['outer_interval'] or config['outer_store'] or config['island']:
        _check_islands(config)
    _check_range(config, 'muon_momentum', 0, 1)
    parse_lr_factors(config['lr_factors'])
    if not 0 < config['lr_decay_ratio'] <= 1:
        raise ValueError(f'lr_decay_ratio is {config["lr_decay_ratio"]}: it must be above 0 and at most 1')
    _check_schedule(config)
    if config['documents'] != 'stream' and config['rope_scaling'].startswith('dynamic'):
        raise ValueError(f'rope_scaling is {config["rope_scaling"]!r}, which depends on the length of the whole '
                         f'sequence, but with documents={config["documents"]} a sequence has several texts: set '
                         'documents to stream, or rope_scaling to yarn')
    if config['loss'] == 'dpo':
        if config['documents'] != 'pack':
            raise ValueError(f'documents is {config["documents"]!r}, but loss=dpo needs both answers of a pair in one '
                             'row: set documents to pack')
        if not config['dpo_beta'] > 0:
            raise ValueError(f'dpo_beta is {config["dpo_beta"]}: it must be above 0')
    if config['spike_factor'] <= 1:
        raise ValueError(f'spike_factor is {config["spike_factor"]}: it must be above 1')
    if config['on_spike'] == 'rollback' and config['keep_checkpoints'] == 0:
        raise ValueError('on_spike=rollback goes back to a checkpoint, but keep_checkpoints is 0: '
                         'set keep_checkpoints to at least 1')


def check_sampling(config):
    """Raise ValueError for a value of a key of sample.py with which no text can be drawn."""
    num_samples, temperature, top_k, top_p = (
        config[key] for key in ('num_samples', 'temperature', 'top_k', 'top_p'))
    for key, is_allowed, values in (
            ('num_samples', num_samples is None or num_samples >= 1, 'at least 1'),
            ('max_new_tokens', config['max_new_tokens'] >= 1, 'at least 1'),
            # Logits that are divided by less would overflow.
            ('temperature', temperature == 0 or 1e-30 <= temperature <= 1e30,
             '0, which takes the likeliest token, or from 1e-30 to 1e30'),
            ('top_k', top_k is None or top_k >= 0, 'at least 0; 0 or None draws from all'),
            ('top_p', top_p is None or 0 < top_p <= 1, 'above 0 and at most 1; 1 or None draws from all'),
            ('seed', 0 <= config['seed'] < 2 ** 64, 'from 0 to 2**64 - 1')):
        if not is_allowed:
            raise ValueError(f'{key} is {config[key]}: it must be {values}')


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


def _check_schedule(config):
    """Raise ValueError if the learning rate would be 0 for most of the run."""
    max_iters, end = config['max_iters'], _end_of_schedule(config)
    if config['decay_lr'] and config['min_lr'] == 0 and not config['eval_only'] and 2 * end < max_iters:
        raise ValueError(f'lr_decay_iters is {config["lr_decay_iters"]}: with min_lr=0 the learning rate '
                         f'would be 0 from iteration {end} on, for most of max_iters={max_iters}: set '
                         f'lr_decay_iters to {max_iters}, or to 0, which follows max_iters')


def decay_iters(config):
    """The iteration at which the decay of the learning rate ends, if the warm-up ends before."""
    return config['lr_decay_iters'] or config['max_iters']


def _end_of_schedule(config):
    """The iteration from which on the learning rate is min_lr."""
    return max(config['warmup_iters'], decay_iters(config))


def lr_of(config, iteration):
    """The learning rate that a config gives the update that follows `iteration` finished ones."""
    if not config['decay_lr']:
        return config['learning_rate']
    return scheduled_lr(iteration, config['lr_schedule'], config['learning_rate'], config['min_lr'],
                        config['warmup_iters'], decay_iters(config), config['lr_decay_ratio'])


def settle_settings(config, model, shards, saved, source, say):
    """The config of the run that begins, with the keys of the model that it has. Prints what is odd.

    config: the keys as they were given. model: the GPTConfig of the model. shards: data.datasets.fingerprint
    of the dataset. saved: the state of the checkpoint from which the run continues, or {}. source: where the
    weights come from. say(text): prints.
    Raises ValueError if the run cannot continue from the checkpoint with these keys or these data.
    """
    decided = _keys_of_model(config, model)
    if decided:
        ignored = ', '.join(f'{key}={value!r} (not {config[key]!r})' for key, value in decided.items())
        say(f'the model is that of {source}: {ignored}')
    config = config | decided
    if not config['eval_only']:
        for warning in _schedule_warnings(config):
            say(f'warning: {warning}')
    if saved:
        _compare_keys(config, saved, source, say)
        _compare_shards(config, shards, saved, source, say)
        if not config['eval_only']:
            _compare_progress(config, saved, say)
    return config


def _keys_of_model(config, model):
    """{key: value} of the keys for which a model has another value than the config. model: its GPTConfig."""
    decided = {}
    for key, value in dataclasses.asdict(model).items():
        if key in FREE_MODEL_KEYS or key not in config or config[key] == value:
            continue
        with contextlib.suppress(ValueError):  # 0 may stand for a size that follows from other keys
            if getattr(dataclasses.replace(model, **{key: config[key]}), key) == value:
                continue
        decided[key] = value
    return decided


def _schedule_warnings(config):
    """Yield what does not fit together in the schedule of the learning rate."""
    if not config['decay_lr']:
        return
    max_iters, warmup_iters, min_lr = config['max_iters'], config['warmup_iters'], config['min_lr']
    decay, end = decay_iters(config), _end_of_schedule(config)
    if warmup_iters >= max_iters:
        yield (f'warmup_iters={warmup_iters} is not below max_iters={max_iters}: the learning rate never '
               f'reaches learning_rate={config["learning_rate"]:g}. Set warmup_iters lower')
    elif warmup_iters >= decay:
        yield (f'warmup_iters={warmup_iters} is not below lr_decay_iters={decay}: after the warm-up the '
               f'learning rate falls to min_lr={min_lr:g} at once. Set warmup_iters lower')
    elif end < max_iters:
        yield (f'the learning rate stays at min_lr={min_lr:g} from lr_decay_iters={end} to '
               f'max_iters={max_iters}. lr_decay_iters=0 follows max_iters')
    elif decay > 1.1 * max_iters:
        yield (f'max_iters={max_iters} ends the run before lr_decay_iters={decay}, where the learning '
               f'rate reaches min_lr={min_lr:g}. lr_decay_iters=0 follows max_iters')
    if min_lr > config['learning_rate']:
        yield (f'min_lr={min_lr:g} is above learning_rate={config["learning_rate"]:g}: the learning rate '
               'rises. Set min_lr lower')


def _compare_keys(config, saved, source, say):
    """Print which keys differ from those of a checkpoint; ValueError if a key cannot change."""
    former = saved['config']
    if former.get('optimizer', config['optimizer']) != config['optimizer']:
        raise ValueError(
            f'optimizer is {config["optimizer"]!r}, but {source} holds the state of '
            f'{former["optimizer"]!r}: set that optimizer, or start from the weights with '
            f'--init_from={config["out_dir"]} and another out_dir')
    silent = {'init_from', 'accept_new_data', *saved['model']} - {*FREE_MODEL_KEYS}
    for key, value in former.items():
        if key not in silent and config.get(key, value) != value:
            say(f'resuming with another {key}: {value!r} -> {config[key]!r}')


def _compare_shards(config, shards, saved, source, say):
    """Raise ValueError if the shards of the dataset are not those of a checkpoint, unless that is accepted.

    Another `dataset` was asked for, so that its shards may differ.
    """
    former = saved.get('shards', shards)
    if former == shards or saved['config'].get('dataset') != config['dataset']:
        return
    names = [name for name in {**former, **shards} if former.get(name) != shards.get(name)]
    others = f', {len(names) - 1} more differ' if len(names) > 1 else ''
    was, now = (f'{found[names[0]][0]:,} bytes' if names[0] in found else 'absent'
                for found in (former, shards))
    change = f'was {was} and is {now}' if was != now else 'has other content'
    text = f'dataset {config["dataset"]!r} has changed since {source} was saved ({names[0]} {change}{others})'
    if not config['accept_new_data']:
        raise ValueError(f'{text}: restore it, or continue with other batches by --accept_new_data=True')
    say(f'{text}: accept_new_data=True continues with other batches')


def _compare_progress(config, saved, say):
    """Print whether a resumed run has nothing left to do, or begins with a jump of the learning rate."""
    iteration = saved['iteration']
    if iteration >= config['max_iters']:
        say(f'nothing is left to do: the checkpoint has {iteration} iterations, and max_iters is '
            f'{config["max_iters"]}. Set max_iters higher to continue')
        return
    former = config | saved['config']
    last = max(0, iteration - 1)
    before, now = lr_of(former, last), lr_of(config, last)
    if abs(now - before) > 0.1 * max(now, before):
        follows = 0 in (config['lr_decay_iters'], former['lr_decay_iters'])
        keys = [key for key in (*RATE_KEYS, *['max_iters'] * follows) if config[key] != former[key]]
        say(f'warning: the learning rate jumps at iteration {iteration}: the last update had {before:.3g}, '
            f'the next one has {lr_of(config, iteration):.3g}, because of {", ".join(keys)}')
