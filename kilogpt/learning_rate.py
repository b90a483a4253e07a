"""The learning rate: its schedule, and its factors for kinds of parameters."""
import math

from kilogpt.keys.checks import check_choice

RATE_KEYS = ('decay_lr', 'lr_schedule', 'lr_decay_ratio', 'learning_rate', 'min_lr', 'warmup_iters',
             'lr_decay_iters')
KINDS = 'embedding', 'head', 'matrix', 'vector'  # of parameters, as lr_factors names them


def parse_lr_factors(text):
    """{kind of parameter: factor of its learning rate} of a text such as 'embedding:3, vector:2'."""
    factors = {}
    for part in filter(None, map(str.strip, text.split(','))):
        kind, _, factor = map(str.strip, part.partition(':'))
        try:
            factors[kind] = float(factor)
        except ValueError:
            factors[kind] = math.nan
        if kind not in KINDS or not 0 <= factors[kind] < math.inf:
            raise ValueError(f'lr_factors is {text!r}: give a kind of parameters and a number from 0 on, such as '
                             f'embedding:3, with commas between; the kinds are {", ".join(KINDS)}')
    return factors


def scheduled_lr(iteration, schedule, peak, floor, warmup_iters, decay_iters, decay_ratio):
    """The learning rate of the update that follows `iteration` finished ones.

    The rate rises linearly to peak over warmup_iters, falls to floor at decay_iters, and stays there.
    schedule: 'cosine' (nanoGPT's), 'linear', or 'wsd' (warm-up, stable, decay), which stays at peak and falls
    linearly over the last part of decay_iters, decay_ratio of them (Hägele et al. 2024).
    """
    if iteration < warmup_iters:
        return peak * (iteration + 1) / (warmup_iters + 1)
    if iteration >= decay_iters:
        return floor
    if schedule == 'wsd':
        start = max(warmup_iters, (1 - decay_ratio) * decay_iters)
        remaining = min(1.0, (decay_iters - iteration) / (decay_iters - start))
    else:
        remaining = 1 - (iteration - warmup_iters) / (decay_iters - warmup_iters)
        if schedule == 'cosine':
            remaining = 0.5 * (1.0 - math.cos(math.pi * remaining))
    return floor + remaining * (peak - floor)


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


def check_rates(config):
    """Raise ValueError for values that no run can have, or if the rate would be 0 for most of the run."""
    check_choice(config, 'lr_schedule', 'cosine', 'linear', 'wsd')
    parse_lr_factors(config['lr_factors'])
    if not 0 < config['lr_decay_ratio'] <= 1:
        raise ValueError(f'lr_decay_ratio is {config["lr_decay_ratio"]}: it must be above 0 and at most 1')
    max_iters, end = config['max_iters'], _end_of_schedule(config)
    if config['decay_lr'] and config['min_lr'] == 0 and not config['eval_only'] and 2 * end < max_iters:
        raise ValueError(f'lr_decay_iters is {config["lr_decay_iters"]}: with min_lr=0 the learning rate '
                         f'would be 0 from iteration {end} on, for most of max_iters={max_iters}: set '
                         f'lr_decay_iters to {max_iters}, or to 0, which follows max_iters')


def find_oddities(config):
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
