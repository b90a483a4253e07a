"""What pages of keys check their values with. Each function raises ValueError with the key to change."""


def check_at_least(config, least, *keys):
    for key in keys:
        if config[key] < least:
            bound = 'it cannot be negative' if least == 0 else f'it must be at least {least}'
            raise ValueError(f'{key} is {config[key]}: {bound}')


def check_choice(config, key, *allowed):
    if config[key] not in allowed:
        raise ValueError(f'{key} is {config[key]!r}: choose one of {", ".join(allowed)}')


def check_range(config, key, low, high):
    if not low <= config[key] < high:
        raise ValueError(f'{key} is {config[key]}: it must be at least {low} and below {high}')
