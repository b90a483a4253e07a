"""Read the curves' data: the folder of a run of train.py, or a text that nanoGPT printed.

Seconds are wall-clock time. The seconds of a folder count from the start of the process, include evaluations
and saves, and add up over resumed runs. The seconds of a text are the sum of its iterations' times, with
evaluations but without the time before the first iteration. They are exact with nanoGPT's log_interval=1.
Otherwise, an iteration between two lines is assumed to take as long as the latest iteration that was logged
without an evaluation.
"""
import glob
import json
import math
import os
import re
import sys
from typing import NamedTuple


class Run(NamedTuple):
    """Lines as in metrics.jsonl, sorted by iteration, with seconds added. nanoGPT's lines may have no tokens.

    about: the dataset and the machine, as far as they are known.
    """
    name: str
    train: list
    evals: list
    about: str

    def has(self, key):
        """Whether all lines have a value, such as 'tokens'."""
        return all(key in line for line in self.train + self.evals)

    def has_losses(self):
        """Whether there is a finite loss to draw."""
        values = [line['loss'] for line in self.train] + [line['val_loss'] for line in self.evals]
        return any(value is not None and math.isfinite(value) for value in values)


def read_run(source):
    """The Run of an argument: PATH or NAME=PATH."""
    name, equals, path = source.partition('=')
    if not equals or os.path.exists(source):
        path = source
        name = os.path.basename(os.path.normpath(path))
    is_text = os.path.isfile(path)
    lines = read_text(path) if is_text else read_folder(path)
    # A resumed run repeats the iterations since its checkpoint: the last line of an iteration counts.
    train = {line['iter']: line for line in lines if 'loss' in line}
    evals = {line['iter']: line for line in lines if 'val_loss' in line}
    return Run(name, [train[i] for i in sorted(train)], [evals[i] for i in sorted(evals)],
               '' if is_text else describe_folder(path))


def read_folder(folder):
    """The lines of a run's metrics.jsonl that have losses, with the seconds since the run first started."""
    try:
        with open(os.path.join(folder, 'metrics.jsonl'), encoding='utf-8') as file:
            lines = [json.loads(line) for line in file]
    except OSError:
        sys.exit(f'error: {folder} has no metrics.jsonl: '
                 'give folders written by train.py, or texts printed by nanoGPT')
    lines = [line for line in lines if 'loss' in line or 'val_loss' in line]
    add_seconds_and_tokens(lines)
    return lines


def add_seconds_and_tokens(lines):
    """Set the `seconds` of lines to those since the run first started; their own restart in each process.

    The evaluations of older versions get the seconds and the tokens of the training line before.
    """
    total, iterations, tokens = 0.0, 1, 0
    clock = 0.0  # the seconds of the line before, within its process
    last = dict(loss=0, val_loss=-1)  # {kind of line: its latest iteration in this process}
    for line in lines:
        kind = 'loss' if 'loss' in line else 'val_loss'
        is_repeated = line['iter'] <= last[kind]
        if kind == 'loss' and not is_repeated:
            iterations = line['iter'] - last['loss']
        if 'seconds' in line:
            if is_repeated or line['seconds'] < clock:  # the first line of a new process
                clock = 0.0
                last = dict(loss=line['iter'] - 1, val_loss=line['iter'] - 1)
            total, clock = total + line['seconds'] - clock, line['seconds']
        elif kind == 'loss':  # a run of an older version
            total, clock = total + iterations * line['dt_ms'] / 1000, math.inf
        last[kind] = line['iter']
        line['seconds'] = total
        tokens = line.setdefault('tokens', tokens)


def describe_folder(folder):
    """'dataset, machine' of a run, or as much of this as its config.json and newest checkpoint tell."""
    facts = []
    try:
        with open(os.path.join(folder, 'config.json'), encoding='utf-8') as file:
            facts.append(os.path.basename(os.path.normpath(json.load(file)['dataset'])))
        newest = max(glob.glob(os.path.join(glob.escape(folder), 'ckpt', 'iter_*', 'state.json')))
        with open(newest, encoding='utf-8') as file:
            processes, processor, threads, _ = json.load(file)['machine']
        processor = processor.rpartition(':')[2].strip()
        facts.append(f'{processor}, {processes} process(es) of {threads} thread(s)')
    except (OSError, ValueError, KeyError):  # a copied log alone, or a run without checkpoints
        pass
    return '; '.join(facts)


def read_text(path):
    """The lines of metrics.jsonl for a text printed by nanoGPT, whose iteration n makes update n + 1."""
    lines = []
    total_ms, plain_ms = 0.0, None
    previous = evaluated = None  # iterations of the latest training line and of the latest evaluation
    tokens_per_iteration = None
    with open(path, encoding='utf-8') as file:
        for text in file:
            tokens = re.match(r'tokens per iteration will be: ([\d,]+)', text)
            step = re.match(r'step (\d+): train loss \S+, val loss (\S+)', text)
            iteration = re.match(r'iter (\d+): loss (\S+), time (\S+)ms', text)
            if tokens:
                tokens_per_iteration = int(tokens[1].replace(',', ''))
            elif step:
                evaluated = int(step[1])
                lines.append(dict(iter=evaluated, val_loss=float(step[2]), seconds=total_ms / 1000))
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
    if tokens_per_iteration:
        for line in lines:
            line['tokens'] = line['iter'] * tokens_per_iteration
    return lines
