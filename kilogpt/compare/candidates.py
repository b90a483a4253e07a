"""Read the candidates of a comparison, and what their runs have reached at which cost.

y is 'loss' (val_loss) or 'bpb' (val_bpb). A cost is 'tokens', 'seconds' or 'flops'.
"""
import glob
import math
import os
import statistics
import sys
from typing import NamedTuple

from kilogpt.plot.sources import is_finite, read_lines, read_run

COSTS = 'tokens', 'seconds', 'flops'


class Candidate(NamedTuple):
    """A run, or several that differ in their seed. scores: {key: score} of the tasks of each run."""
    name: str
    runs: list
    scores: list


def read_candidates(sources, y):
    """The Candidates of arguments [NAME=]SOURCE."""
    candidates = [read_candidate(source) for source in sources]
    names, paths = set(), set()
    for name, runs, _ in candidates:
        if name in names:
            sys.exit(f'error: two candidates have the name {name}: give another with NAME=SOURCE')
        names.add(name)
        for run in runs:
            path = os.path.realpath(run.path)
            if path in paths:
                sys.exit(f'error: {run.path} is given twice: a run can be part of one candidate only')
            paths.add(path)
            if not run.evals:
                sys.exit(f'error: {run.path} has no evaluation: '
                         'leave it out, or train for longer with eval_iters')
            if not run.evaluations(y):
                remedy = ' (docs/evaluate.md says which datasets have it)' if y == 'bpb' else ''
                sys.exit(f'error: {run.path} has no finite val_{y}: leave it out{remedy}')
    return candidates


def read_candidate(source):
    """The Candidate of an argument: PATH, PATTERN, NAME=PATH or NAME=PATTERN."""
    name, equals, pattern = source.partition('=')
    if not equals or os.path.exists(source):
        pattern = source
        name = os.path.basename(os.path.normpath(source))
    paths = [pattern] if os.path.exists(pattern) else sorted(glob.glob(pattern))
    if not paths:
        sys.exit(f'error: {pattern} does not exist, nor does a path that matches it as a pattern: check it')
    runs = [read_run(path) for path in paths]  # a path that exists is not split at `=`
    return Candidate(name, runs, [read_scores(path) for path in paths])


def read_scores(folder):
    """{'NAME/METRIC' and 'NAME/METRIC_stderr': score} of a run's last iteration that has scores of tasks.

    They are in metrics.jsonl or in tasks.jsonl, under 'task/NAME/METRIC'. A later line counts.
    """
    lines = []
    for name in ('metrics.jsonl', 'tasks.jsonl'):
        path = os.path.join(folder, name)
        if os.path.exists(path):
            lines += read_lines(path)
    lines = [line for line in lines if any(key.startswith('task/') for key in line)]
    last = max((line['iter'] for line in lines), default=0)
    scores = {}
    for line in lines:
        if line['iter'] == last:
            scores |= {key.removeprefix('task/'): value for key, value in line.items()
                       if key.startswith('task/') and is_finite(value)}
    return scores


def last_value(run, y):
    """The value of the last evaluation, or None if it is not finite because the run has diverged."""
    value = run.evals[-1].get(f'val_{y}')
    return value if is_finite(value) else None


def best_value(run, y):
    """The lowest value of all evaluations, or None."""
    return min((line[f'val_{y}'] for line in run.evaluations(y)), default=None)


def easiest_value(candidates, y):
    """The lowest value that all runs reach, apart from those that have diverged."""
    runs = [run for candidate in candidates for run in candidate.runs]
    sound = [run for run in runs if last_value(run, y) is not None]
    return max(best_value(run, y) for run in sound or runs)


def cost_of_reaching(run, y, value):
    """{cost: amount} when a run first reached a value, linear between evaluations; None if it never did."""
    key, before = f'val_{y}', None
    for line in run.evaluations(y):
        if line[key] > value:
            before = line
        elif before is None:
            return line
        else:
            share = (before[key] - value) / (before[key] - line[key])
            return {cost: before[cost] + share * (line[cost] - before[cost])
                    for cost in COSTS if cost in before and cost in line}
    return None


def value_at(run, y, tokens):
    """The value after a number of tokens, linear between the evaluations before and after."""
    lines = run.evaluations(y)
    after = next(line for line in lines if line['tokens'] >= tokens)
    if after['tokens'] == tokens:
        return after[f'val_{y}']
    before = [line for line in lines if line['tokens'] < tokens][-1]
    share = (tokens - before['tokens']) / (after['tokens'] - before['tokens'])
    return before[f'val_{y}'] + share * (after[f'val_{y}'] - before[f'val_{y}'])


def mean_run(candidate, y):
    """A Run of the candidate's name, with the mean of its runs at the iterations that all of them have."""
    first = candidate.runs[0]
    if len(candidate.runs) == 1:
        return first._replace(name=candidate.name)
    machine = first.machine if len({run.machine for run in candidate.runs}) == 1 else ''
    return first._replace(name=candidate.name, machine=machine,
                          train=mean_lines([run.train for run in candidate.runs], y),
                          evals=mean_lines([run.evals for run in candidate.runs], f'val_{y}'))


def mean_lines(logs, key):
    """Lines with the means of `key` and of the costs over several logs.

    There is a line for each iteration at which all logs have a finite `key`. The lines also have the standard
    deviation of `key`, as `{key}_spread`.
    """
    logs = [{line['iter']: line for line in log if is_finite(line.get(key))} for log in logs]
    means = []
    for iteration in sorted(set.intersection(*map(set, logs))):
        lines = [log[iteration] for log in logs]
        mean = {name: math.fsum(line[name] for line in lines) / len(lines)
                for name in ('iter', key, *COSTS) if all(name in line for line in lines)}
        mean[f'{key}_spread'] = statistics.stdev(line[key] for line in lines)
        means.append(mean)
    return means
