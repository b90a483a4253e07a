"""Write a comparison as Markdown: what each candidate reached, what differs in the configs, and the tests."""
import math
import statistics

from kilogpt.compare import candidates as values
from kilogpt.compare.noise import paired, welch, z_test
from kilogpt.keys import initial_weights
from kilogpt.plot.sources import describe_datasets, describe_schedule

# Keys of config.json that do not change what a run learns.
IGNORED = ('out_dir', 'wandb_log', 'wandb_project', 'wandb_run_name', 'tensorboard', 'trackio', 'events',
           'eval_tasks', 'eval_tasks_interval', 'eval_tasks_limit', 'sample_interval', 'sample_prompts', 'sample_tokens')
MISSING = '—'
COSTS = dict(tokens=('tokens', ',.0f'), seconds=('seconds', ',.0f'), flops=('FLOPs', '.3g'))  # label, format


def describe(candidates, y, target):
    """The report. target: the value of y for which the costs are given."""
    sentences = [*warn(candidates, y), *compare_losses(candidates, y), *compare_tasks(candidates)]
    tests = sum('(95% interval' in sentence for sentence in sentences)
    if tests > 1:
        sentences.append(f'{tests} comparisons: if nothing differed, one in 20 would still have p < 0.05. '
                         f'p < {0.05 / tests:.2g} is safe for all of them together (Bonferroni).')
    parts = [results_table(candidates, y, target), '\n'.join(f'- {sentence}' for sentence in sentences),
             configs_table(candidates)]
    return '\n\n'.join(part for part in parts if part)


# --- tables -------------------------------------------------------------------------------------------------

def table(rows):
    """A Markdown table of rows of texts, the first of which is the header."""
    widths = [max(map(len, column)) for column in zip(*rows)]
    lines = ['| ' + ' | '.join(text.ljust(width) for text, width in zip(row, widths)) + ' |' for row in rows]
    lines.insert(1, '| ' + ' | '.join('-' * width for width in widths) + ' |')
    return '\n'.join(lines)


def mean_text(numbers, form):
    """'mean ± standard error' of numbers, without the error if they are all the same."""
    if not numbers:
        return MISSING
    text = format(statistics.mean(numbers), form)
    if len(set(numbers)) > 1:
        text += f' ± {standard_error(numbers):{form}}'
    return text


def standard_error(numbers):
    return statistics.stdev(numbers) / math.sqrt(len(numbers))


def results_table(candidates, y, target):
    """A column for each candidate."""
    rows = [['', *(candidate.name for candidate in candidates)],
            ['seeds', *(str(len(candidate.runs)) for candidate in candidates)]]

    def add(label, form, value_of):
        """Add the row of a number of each run, unless no run has it."""
        columns = [[value_of(run) for run in candidate.runs] for candidate in candidates]
        columns = [[value for value in column if value is not None] for column in columns]
        if any(columns):
            rows.append([label, *(mean_text(column, form) for column in columns)])

    add('parameters', ',.0f', lambda run: run.evals[-1].get('params'))
    for cost, (label, form) in COSTS.items():
        add(label, form, lambda run: run.evals[-1].get(cost))
    add('last val_loss', '.4f', lambda run: values.last_value(run, 'loss'))
    add('best val_loss', '.4f', lambda run: values.best_value(run, 'loss'))
    add('last val_bpb', '.4f', lambda run: values.last_value(run, 'bpb'))
    for cost, (label, form) in COSTS.items():
        row = [costs_text(candidate, y, target, cost, form) for candidate in candidates]
        if set(row) != {MISSING}:
            rows.append([f'{label} to val_{y} {target:.4f}', *row])
    for key in task_keys(candidates):
        rows.append([key, *(score_text(candidate, key) for candidate in candidates)])
    return table(rows)


def costs_text(candidate, y, target, cost, form):
    """The mean cost of the runs that reach the target, and how many these are if not all."""
    reached = [values.cost_of_reaching(run, y, target) for run in candidate.runs]
    reached = [costs for costs in reached if costs is not None]
    if not reached:
        return 'not reached'
    text = mean_text([costs[cost] for costs in reached if cost in costs], form)
    if len(reached) < len(candidate.runs):
        text += f' ({len(reached)} of {len(candidate.runs)} runs)'
    return text


def task_keys(candidates):
    """The tasks' metrics of all runs, without standard errors, and without those that say the same as accuracy."""
    keys = {key for candidate in candidates for scores in candidate.scores for key in scores}
    return sorted(key for key in keys if not key.endswith(('_stderr', '/centred')))


def score_and_error(candidate, key):
    """(mean score, standard error) of a task, each None if it is not known.

    The error has two parts, added as squares: the standard error over seeds, and the error of the questions,
    which is in the log. More seeds do not make the latter smaller, because all answer the same questions.
    """
    scores, errors = scores_of(candidate, key), scores_of(candidate, f'{key}_stderr')
    if not scores:
        return None, None
    parts = [statistics.mean(errors)] if errors else []
    if len(scores) > 1:
        parts.append(standard_error(scores))
    return statistics.mean(scores), math.hypot(*parts) if parts else None


def scores_of(candidate, key):
    """The scores under a key of those runs of a candidate that have it."""
    return [scores[key] for scores in candidate.scores if key in scores]


def score_text(candidate, key):
    score, error = score_and_error(candidate, key)
    if score is None:
        return MISSING
    return f'{score:.4f}' if error is None else f'{score:.4f} ± {error:.4f}'


def configs_table(candidates):
    """The keys of config.json that differ between candidates."""
    keys = {}  # a dict keeps the order of config.json
    for candidate in candidates:
        for run in candidate.runs:
            keys |= dict.fromkeys(settings_of(run))
    rows = [['key', *(candidate.name for candidate in candidates)]]
    for key in keys:
        row = [', '.join(config_values(candidate, key)) for candidate in candidates]
        if len(set(row)) > 1:
            rows.append([key, *row])
    if len(rows) > 1:
        return 'What differs in config.json:\n\n' + table(rows)
    return 'Nothing differs in config.json.' if keys and len(candidates) > 1 else ''


def settings_of(run):
    """The keys of a run's config that may change what it learns: not that it was resumed, for example."""
    config = {key: value for key, value in run.config.items() if key not in IGNORED}
    weights = initial_weights(config.pop('init_from', 'scratch'))
    return config | (dict(init_from=weights) if weights else {})


def config_values(candidate, key):
    """The different values of a key in a candidate's runs, as sorted texts."""
    settings = map(settings_of, candidate.runs)
    return sorted({repr(config[key]) for config in settings if key in config}) or [MISSING]


# --- sentences ----------------------------------------------------------------------------------------------

def warn(candidates, y):
    """Sentences on what makes the runs hard to compare."""
    runs = [run for candidate in candidates for run in candidate.runs]
    sentences = [describe_datasets(runs, y), *map(describe_schedule, runs)]
    for run in runs:
        if not run.config:
            sentences.append(f'{run.path} has no config.json: its settings are not known')
        if values.last_value(run, y) is None:
            sentences.append(f'{run.name} has diverged: its last evaluation has no finite val_{y}. '
                             'Means and tests are without it, and therefore flatter its candidate')
    for candidate in candidates:
        seeds = [run.config.get('seed') for run in candidate.runs]
        if None not in seeds and len(set(seeds)) < len(seeds):
            sentences.append(f'Runs of {candidate.name} have the same seed: they say less about the noise '
                             'than runs with different seeds')
        keys = {key for run in candidate.runs for key in settings_of(run)} - {'seed'}
        differing = ', '.join(key for key in sorted(keys) if len(config_values(candidate, key)) > 1)
        if differing:
            sentences.append(f'Runs of {candidate.name} differ in {differing}: '
                             'seeds of one candidate should differ in seed alone')
    return [sentence.rstrip('.') + '.' for sentence in sentences if sentence]


def compare_losses(candidates, y):
    """A sentence on each candidate's last values, compared with those of the first."""
    return [compare_last(candidates[0], other, y) for other in candidates[1:]]


def compare_last(base, other, y):
    """A sentence on the difference of two candidates' last values, at the tokens that all their runs have."""
    groups = [[run for run in candidate.runs if values.last_value(run, y) is not None]
              for candidate in (base, other)]
    what = f'val_{y} of {other.name}'
    if min(map(len, groups)) < 2:
        folder = other.name if other.name.startswith('out') else f'out-{other.name}'
        return (f'Whether {what} differs from that of {base.name} by more than the noise is not known: '
                'one seed says nothing about noise. Give two seeds or more of each, as a pattern such as '
                f"'{other.name}={folder}-s*'.")
    runs = groups[0] + groups[1]
    if not all(run.has('tokens') for run in runs):
        return f'{what} is not compared: a log does not say how many tokens its run has trained on.'
    ends = [run.evals[-1]['tokens'] for run in runs]
    tokens = min(ends)
    samples = [[values.value_at(run, y, tokens) for run in group] for group in groups]
    seeds = [{run.config.get('seed'): value for run, value in zip(group, sample)}
             for group, sample in zip(groups, samples)]
    is_paired = seeds[0].keys() == seeds[1].keys() and None not in seeds[0] and all(
        len(by_seed) == len(sample) for by_seed, sample in zip(seeds, samples))
    if is_paired:
        difference = paired(*([by_seed[seed] for seed in seeds[0]] for by_seed in seeds))
    else:
        difference = welch(*samples)
    counts = [len(sample) for sample in samples]
    seeds_text = f'{counts[0]} seeds each' if counts[0] == counts[1] else f'{counts[1]} and {counts[0]} seeds'
    test = 'paired t-test' if is_paired else "Welch's t-test"
    sentence = difference_text(what, base.name, difference, f'{seeds_text}, {test}')
    if max(ends) > tokens:
        sentence += (f' The runs have {tokens:,} to {max(ends):,} tokens, and are compared at {tokens:,}, '
                     'where the schedules of the longer ones had not ended.')
    return sentence


def compare_tasks(candidates):
    """A sentence on each task's metric of each candidate, compared with the first, if its noise is known."""
    base, sentences = candidates[0], []
    for other in candidates[1:]:
        for key in task_keys([base, other]):
            samples = [scores_of(candidate, key) for candidate in (base, other)]
            if len({*samples[0], *samples[1]}) == 1:  # the same in all runs, as what guessing gets
                continue
            if all(scores_of(candidate, f'{key}_stderr') for candidate in (base, other)):
                difference = z_test(*score_and_error(base, key), *score_and_error(other, key))
                test = 'z-test'
            elif min(map(len, samples)) > 1:
                difference = welch(*samples)
                test = "Welch's t-test"
            else:
                continue
            sentences.append(difference_text(f'{key} of {other.name}', base.name, difference, test))
    return sentences


def difference_text(what, base, difference, test):
    """A sentence: by how much `what` differs from that of `base`, and whether that is more than the noise."""
    p = 'p < 0.0001' if difference.p < 1e-4 else f'p = {difference.p:.2g}'
    way = 'lower' if difference.mean < 0 else 'higher'
    ends = sorted([difference.low, difference.high], key=abs)
    if difference.p < 0.05:
        interval = f'{abs(ends[0]):.4f} to {abs(ends[1]):.4f}'
        return (f'{what} is {abs(difference.mean):.4f} {way} than that of {base} '
                f'(95% interval {interval}, {p}, {test}).')
    interval = f'{difference.low:+.4f} to {difference.high:+.4f}'
    return (f'{what} differs from that of {base} by {difference.mean:+.4f}, '
            f'which is not larger than the noise (95% interval {interval}, {p}, {test}).')
