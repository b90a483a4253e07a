"""Which values the keys of train.py and sample.py may have, and which a checkpoint decides or contradicts."""
import contextlib
import dataclasses

from kilogpt import keys
from kilogpt.keys import initial_weights
from kilogpt.keys.checks import check_at_least, check_choice, check_range
from kilogpt.learning_rate import RATE_KEYS, check_rates, find_oddities, lr_of

# Keys that a run may set although its model comes from elsewhere: sequences may be shorter.
FREE_MODEL_KEYS = ('block_size', 'dropout')


def check_settings(config):
    """Raise ValueError for a value that no run can have. The model and the layout check their own keys."""
    check_at_least(config, 1, 'eval_interval', 'log_interval', 'batch_size', 'gradient_accumulation_steps',
                   'block_size', 'max_iters')
    check_at_least(config, 0, 'eval_iters', 'save_interval', 'save_minutes', 'keep_checkpoints', 'warmup_iters',
                   'lr_decay_iters', 'seed')
    if not config['out_dir']:
        raise ValueError("out_dir is '': name the folder of the run, such as --out_dir=out")
    check_choice(config, 'optimizer', 'adamw', 'muon')
    check_range(config, 'muon_momentum', 0, 1)
    check_rates(config)
    keys.check(config)


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


def settle_settings(config, model, shards, start, say):
    """The config of the run that begins, with the keys of the model that it has. Prints what is odd.

    config: the keys as they were given. model: the GPTConfig of the model. shards: data.datasets.fingerprint
    of the dataset. start: the Start of the run. say(text): prints.
    Raises ValueError if the run cannot continue from the checkpoint with these keys or these data.
    """
    saved, source = start.saved, start.source or initial_weights(config['init_from'])
    decided = _keys_of_model(config, model)
    if decided:
        ignored = ', '.join(f'{key}={value!r} (not {config[key]!r})' for key, value in decided.items())
        say(f'the model is that of {source}: {ignored}')
    config = config | decided
    if not config['eval_only']:
        for warning in find_oddities(config):
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
