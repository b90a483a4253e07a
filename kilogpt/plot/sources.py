"""Read the curves' data: the folder of a run of train.py, or a text that nanoGPT printed.

Seconds are wall-clock time. The seconds of a folder count from the start of the process, include evaluations
and saves, and add up over resumed runs. The seconds of a text are the sum of its iterations' times, with
evaluations but without the time before the first iteration. They are exact with nanoGPT's log_interval=1.
Otherwise, an iteration between two lines is assumed to take as long as the latest iteration that was logged
without an evaluation.
"""
import bisect
import json
import math
import os
import re
import sys
from typing import NamedTuple


class Run(NamedTuple):
    """Lines as in metrics.jsonl, sorted by iteration, with seconds added. nanoGPT's lines have no tokens."""
    name: str
    train: list
    evals: list


def read_run(source):
    """The Run of an argument: PATH or NAME=PATH."""
    name, equals, path = source.partition('=')
    if not equals or os.path.exists(source):
        path = source
        name = os.path.basename(os.path.normpath(path))
    lines = read_text(path) if os.path.isfile(path) else read_folder(path)
    # A resumed run repeats the iterations since its checkpoint: the last line of an iteration counts.
    train = {line['iter']: line for line in lines if 'loss' in line}
    evals = {line['iter']: line for line in lines if 'val_loss' in line}
    iterations = sorted(train)
    for iteration, line in evals.items():  # an evaluation gets the time of the latest training line
        logged = bisect.bisect_right(iterations, iteration)
        latest = train[iterations[logged - 1]] if logged else dict(seconds=0.0, tokens=0)
        line |= {key: latest[key] for key in ('seconds', 'tokens') if key in latest}
    return Run(name, [train[i] for i in iterations], [evals[i] for i in sorted(evals)])


def read_folder(folder):
    """The lines of a run's metrics.jsonl; training lines have the seconds since the run first started."""
    try:
        with open(os.path.join(folder, 'metrics.jsonl'), encoding='utf-8') as file:
            lines = [json.loads(line) for line in file]
    except OSError:
        sys.exit(f'error: {folder} has no metrics.jsonl: '
                 'give folders written by train.py, or texts printed by nanoGPT')
    train = [line for line in lines if 'loss' in line]
    for line, seconds in zip(train, total_seconds(train)):
        line['seconds'] = seconds
    return lines


def total_seconds(train):
    """[seconds since the run first started] of training lines; their own seconds restart in each process."""
    totals = []
    total, iterations = 0.0, 1
    previous = dict(iter=0, seconds=0.0)
    for line in train:
        is_repeated = line['iter'] <= previous['iter']
        if not is_repeated:
            iterations = line['iter'] - previous['iter']
        if 'seconds' not in line:  # a run of an older version
            total += iterations * line['dt_ms'] / 1000
        elif is_repeated or line['seconds'] < previous.get('seconds', math.inf):
            total += line['seconds']  # since the start of a new process
        else:
            total += line['seconds'] - previous['seconds']
        totals.append(total)
        previous = line
    return totals


def read_text(path):
    """The lines of metrics.jsonl for a text printed by nanoGPT, whose iteration n makes update n + 1."""
    lines = []
    total_ms, plain_ms = 0.0, None
    previous = evaluated = None  # iterations of the latest training line and of the latest evaluation
    with open(path, encoding='utf-8') as file:
        for text in file:
            step = re.match(r'step (\d+): train loss \S+, val loss (\S+)', text)
            iteration = re.match(r'iter (\d+): loss (\S+), time (\S+)ms', text)
            if step:
                evaluated = int(step[1])
                lines.append(dict(iter=evaluated, val_loss=float(step[2])))
            elif iteration:
                number, ms = int(iteration[1]), float(iteration[3])
                if number != evaluated or plain_ms is None:  # an iteration's time includes evaluation
                    plain_ms = ms
                not_logged = 0 if previous is None else max(0, number - previous - 1)
                total_ms += not_logged * plain_ms + ms
                previous = number
                lines.append(dict(iter=number + 1, loss=float(iteration[2]), seconds=total_ms / 1000))
    if not lines:
        sys.exit(f'error: {path} has no line such as "step 250: train loss 2.4293, val loss 2.4447"')
    return lines
