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


Y = dict(loss='nats per token', bpb='bits per byte')  # {value of --y: its unit}
X = dict(tokens='how many tokens it has trained on', flops='how many FLOPs it has cost')  # in most logs


class Run(NamedTuple):
    """Lines as in metrics.jsonl, sorted by iteration, with seconds added. nanoGPT's lines may have no tokens.

    dataset, machine: names of them, '' if not known.
    path: the folder or the text. config: what config.json says, or {}.
    """
    name: str
    train: list
    evals: list
    dataset: str
    machine: str
    path: str
    config: dict

    def has(self, key):
        """Whether all lines have a value, such as 'tokens'."""
        return all(key in line for line in self.train + self.evals)

    def has_losses(self, y='loss'):
        """Whether there is a finite loss (y='loss') or number of bits per byte (y='bpb') to draw."""
        return any(is_finite(line.get(y)) for line in self.train) or bool(self.evaluations(y))

    def evaluations(self, y):
        """The evaluation lines in which val_loss (y='loss') or val_bpb (y='bpb') is finite."""
        return [line for line in self.evals if is_finite(line.get(f'val_{y}'))]


def is_finite(value):
    """Whether a value of a log is a number: the log of a diverged run has null, or nan in nanoGPT's texts."""
    return value is not None and math.isfinite(value)


def read_run(source):
    """The Run of an argument: PATH or NAME=PATH."""
    name, equals, path = source.partition('=')
    if not equals or os.path.exists(source):
        path = source
        name = os.path.basename(os.path.normpath(path))
    is_text = os.path.isfile(path)
    lines = read_text(path) if is_text else read_folder(path)
    add_flops(lines)
    add_bits(lines)
    # A resumed run repeats the iterations since its checkpoint: the last line of an iteration counts.
    train = {line['iter']: line for line in lines if 'loss' in line}
    evals = {line['iter']: line for line in lines if 'val_loss' in line}
    config = {} if is_text else read_config(path)
    return Run(name, [train[i] for i in sorted(train)], [evals[i] for i in sorted(evals)],
               dataset_name(config) if 'dataset' in config else '', '' if is_text else machine_of(path), path, config)


def read_folder(folder):
    """The lines of a run's metrics.jsonl that have losses, with the seconds since the run first started."""
    try:
        lines = read_lines(os.path.join(folder, 'metrics.jsonl'))
    except OSError:
        sys.exit(f'error: {folder} has no metrics.jsonl: '
                 'give folders written by train.py, or texts printed by nanoGPT')
    lines = [line for line in lines if 'loss' in line or 'val_loss' in line]
    add_seconds_and_tokens(lines)
    return lines


def read_lines(path):
    """The objects of a file with one JSON object a line, without a last line that is still being written."""
    with open(path, encoding='utf-8') as file:
        texts = file.read().split('\n')[:-1]
    try:
        return [json.loads(text) for text in texts]
    except ValueError as error:
        sys.exit(f'error: {path} has a line that is not JSON ({error}): remove it')


def read_config(folder):
    """The keys in a run's config.json; {} if there is no such file, as for a copied log."""
    try:
        with open(os.path.join(folder, 'config.json'), encoding='utf-8') as file:
            return json.load(file)
    except (OSError, ValueError):
        return {}


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


def add_flops(lines):
    """Set the `flops` of lines that do not have them. A run's FLOPs are proportional to its tokens."""
    known = [line for line in lines if line.get('flops')]
    if known:
        flops_per_token = known[-1]['flops'] / known[-1]['tokens']
        for line in lines:
            line.setdefault('flops', flops_per_token * line['tokens'])


def add_bits(lines):
    """Set the `bpb` of training lines, if the run says how many bits a byte of its validation text has.

    A token of the training text is taken to have as many bytes as one of the validation text.
    """
    known = [line for line in lines if is_finite(line.get('val_bpb')) and line['val_loss'] > 0]
    for line in lines if known else ():
        if is_finite(line.get('loss')):
            line['bpb'] = line['loss'] * known[-1]['val_bpb'] / known[-1]['val_loss']


def machine_of(folder):
    """'PROCESSOR, 2 processes' of a run, as its newest checkpoint tells; '' without one, as for a copied log."""
    try:
        newest = max(glob.glob(os.path.join(glob.escape(folder), 'ckpt', 'iter_*', 'state.json')))
        with open(newest, encoding='utf-8') as file:
            processes, processor, threads, _ = json.load(file)['machine']
        processor = processor.rpartition(':')[2].strip()
    except (OSError, ValueError, KeyError):  # no checkpoint, or one that was imported
        return ''
    counts = [f'{count} {name}{"" if count == 1 else ending}' for count, name, ending in (
        (processes, 'process', 'es'), (threads, 'thread', 's'))]
    return f'{processor}, {" of ".join(counts)}'


def dataset_name(config):
    """The dataset of a config without its folder. KeyError if the config has none."""
    return os.path.basename(os.path.normpath(config['dataset']))


def describe_schedule(run):
    """Why the last evaluation of a run is not at the end of its learning-rate schedule; '' if it may be."""
    last = run.evals[-1]['iter']
    max_iters = run.config.get('max_iters', last)
    end = run.config.get('lr_decay_iters') or max_iters
    if last < max_iters:
        return f'{run.name} was last evaluated after {last:,} of {max_iters:,} iterations'
    if run.config.get('decay_lr') and max_iters < end:
        return f'{run.name} ended at iteration {max_iters:,}, and its learning rate falls until {end:,}'
    return ''


def describe_datasets(runs, y):
    """A warning if runs have different datasets, whose losses may not be comparable; '' otherwise."""
    names = sorted({dataset_name(run.config) for run in runs if 'dataset' in run.config})
    if len(names) < 2:
        return ''
    needed = 'text is the same.' if y == 'bpb' else (
        'text and the tokenizer are the same. With different tokenizers on the same text, choose --y=bpb.')
    return (f'The datasets differ ({", ".join(names)}). '
            f'{Y[y].capitalize()} are comparable if the validation {needed}')


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
