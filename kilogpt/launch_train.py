"""Launch this repository's scripts as a user does, and read the measurements of a run of train.py."""
import json
import math
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from typing import NamedTuple

from kilogpt.configurator import announced
from kilogpt.parallel.layout import SCHEDULES

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


class Run(NamedTuple):
    """A finished run of train.py: its folder, its output, and its lines in metrics.jsonl."""
    out_dir: str
    stdout: str
    config: dict
    train_lines: list  # training line of each iteration
    stalls_ms: list  # milliseconds that training waited for each save

    def median(self, key, warmup):
        """Median over the iterations after `warmup`; None if the value is unknown (such as mfu on a CPU)."""
        values = [line.get(key) for line in self.train_lines[warmup:]]
        return None if None in values else statistics.median(values)


def parse_layouts(text, processes=0):
    """'zero3 dp2; pp2 zbv' -> [(layout, number of processes, train.py arguments), ...].

    processes: number of processes of a layout without dpN; 0 = the smallest possible number, at least 2.
    Exits with one sentence if a layout is wrong.
    """
    layouts = [' '.join(layout.split()) for layout in text.split(';')]
    if text and not any(layouts):
        sys.exit(f'error: --layouts={text!r} names no layout: such as --layouts="dp2; tp2"')
    return [(layout, *parse_layout(layout, processes)) for layout in layouts if layout]


def parse_layout(layout, default_processes):
    """'tp2 dp2 zero3' -> (4, ['--tp=2', '--zero_stage=3'])."""
    key_of_word = dict(full='activation_checkpoint', selective='activation_checkpoint', bf16='grad_compress',
                       powersgd='grad_compress', **dict.fromkeys(SCHEDULES, 'pp_schedule'))
    key_of_degree = dict(tp='tp', cp='cp', pp='pp', ep='ep', zero='zero_stage', rep='dp_replicate')
    arguments, degrees = [], {}
    for word in layout.split():
        degree = re.fullmatch(r'(dp|tp|cp|pp|ep|zero|rep)=?(\d+)', word)
        if degree:
            name, number = degree.groups()
            degrees[name] = int(number)
            if name != 'dp':  # dp follows from the number of processes and the other degrees
                arguments.append(f'--{key_of_degree[name]}={number}')
        elif word in key_of_word:
            arguments.append(f'--{key_of_word[word]}={word}')
        elif word == 'offload':
            arguments.append('--cpu_offload=True')
        elif re.fullmatch(r'\w+=.+', word):
            arguments.append(f'--{word}')
        else:
            sys.exit(f'error: --layouts has {word!r}: the words of a layout are dpN, tpN, cpN, ppN, epN, '
                     f'zeroN, repN, {", ".join(SCHEDULES)}, full, selective, offload, bf16, powersgd '
                     'and key=value')
    model_parallel = math.prod(degrees.get(name, 1) for name in ('tp', 'cp', 'pp'))
    processes = default_processes
    if 'dp' in degrees:
        processes = degrees['dp'] * model_parallel
    elif not processes:
        experts = -(-degrees.get('ep', 1) // max(1, degrees.get('cp', 1)))
        processes = max(2, model_parallel * degrees.get('rep', 1) * experts)
    if processes < 1 or model_parallel < 1 or processes % model_parallel:
        sys.exit(f'error: layout {layout!r} needs a multiple of tp × cp × pp = {model_parallel} processes, '
                 f'not {processes}: set --nproc_per_node, or add dpN to the layout')
    return processes, arguments


def keys_of_layout(layout):
    """'tp2 dp2 zero3' -> (4, {'tp': '2', 'zero_stage': '3'})."""
    processes, arguments = parse_layout(layout, 0)
    return processes, dict(argument[2:].split('=') for argument in arguments)


def train_command(arguments, out_dir, **keys):
    """Command line of a run that only trains and logs. keys: settings, which override the arguments.

    A new model is trained, whatever a config file says, unless the arguments name an init_from.
    """
    keys = dict(wandb_log=False, trackio=False, log_interval=1, eval_iters=0, keep_checkpoints=0,
                lr_decay_iters=0) | keys
    if not any(argument.startswith('--init_from=') for argument in arguments):
        keys.setdefault('init_from', 'scratch')
    return [os.path.join(ROOT, 'train.py'), *arguments, *as_arguments(out_dir=out_dir, **keys)]


def as_arguments(**keys):
    return [f'--{key}={value}' for key, value in keys.items()]


def train(arguments, out_dir, processes=1, **keys):
    """Run train.py, under torchrun if processes > 1. RuntimeError with the run's error if it fails."""
    launcher = [sys.executable]
    if processes > 1:
        launcher += ['-m', 'torch.distributed.run', '--standalone', f'--nproc_per_node={processes}']
    command = [*launcher, *train_command(arguments, out_dir, **keys)]
    with announced('training'):
        run = subprocess.run(command, capture_output=True, text=True)
    if run.returncode:
        raise RuntimeError(last_error(run.stderr))
    with open(os.path.join(out_dir, 'config.json'), encoding='utf-8') as file:
        config = json.load(file)
    with open(os.path.join(out_dir, 'metrics.jsonl'), encoding='utf-8') as file:
        lines = [json.loads(line) for line in file]
    return Run(out_dir, run.stdout, config,
               train_lines=[line for line in lines if 'loss' in line],
               stalls_ms=[line['ckpt_stall_ms'] for line in lines if 'ckpt_stall_ms' in line])


def predict(arguments, processes, gpu):
    """A layout's predicted_gb and predicted_ms by kilogpt.plan. RuntimeError with its error if it fails."""
    command = [sys.executable, '-m', 'kilogpt.plan', *arguments, f'--gpus={processes}', f'--gpu={gpu}',
               '--as_given', '--json', '--async_checkpoint=False']  # `train_command` does not save
    # The module is found from any folder, and paths in the arguments stay relative to the user's.
    path = os.pathsep.join(filter(None, [ROOT, os.environ.get('PYTHONPATH')]))
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | dict(PYTHONPATH=path))
    if done.returncode:
        raise RuntimeError(last_error(done.stderr))
    row, = json.loads(done.stdout)
    return dict(predicted_gb=row['memory_gb'], predicted_ms=row['ms'])


def last_error(stderr):
    """The most informative line of a failed run, and the line of code if it is the message of an exception.

    torchrun's last line only says that a child failed.
    """
    lines = stderr.splitlines() or ['no message']
    sentences = [line for line in lines if line.startswith('error:')]
    exceptions = [f'{line} {following}' if line.endswith(': ') else line  # a message of several lines
                  for line, following in zip(lines, [*lines[1:], ''])
                  if 'Error' in line and 'ChildFailedError' not in line]
    place = '' if sentences or not exceptions else place_of_error(stderr)
    return (sentences or exceptions or lines)[-1] + place


def place_of_error(stderr):
    """' (FILE, line N, in FUNCTION)' of the last call in a traceback that someone may have edited, or ''.

    That is a call in model.py, for example, rather than the machinery that it calls, or that calls it.
    """
    calls = re.findall(rf'File "{re.escape(ROOT)}/(?!.*site-packages)(.+)", line (\d+), in (.+)', stderr)
    calls = [call for call in calls if not call[0].startswith('kilogpt/prove/')]
    machinery = ('kilogpt/parallel/', 'kilogpt/devices/', 'train.py')
    edited = [call for call in calls if not call[0].startswith(machinery)]
    return ' ({}, line {}, in {})'.format(*(edited or calls)[-1]) if calls else ''


def timed(command, cwd=ROOT, until=None, **environment):
    """Time a Python command; returns (milliseconds, its output). RuntimeError with its error if it fails.

    until: stop the clock at the first line of output that starts with this text; None = at the end.
    """
    environment = os.environ | environment | dict(PYTHONUNBUFFERED='1')
    start, end = time.perf_counter(), None
    with tempfile.TemporaryFile('w+') as errors:
        with subprocess.Popen([sys.executable, *command], cwd=cwd, env=environment, stdout=subprocess.PIPE,
                              stderr=errors, text=True) as process:
            lines = []
            for line in process.stdout:
                lines.append(line)
                if end is None and until and line.startswith(until):
                    end = time.perf_counter()
        end = end or time.perf_counter()
        errors.seek(0)
        if process.returncode:
            raise RuntimeError(last_error(errors.read()))
    return 1000 * (end - start), ''.join(lines)
