"""Run one draw of `kilogpt.prove --random`: train on one process and in a layout, and compare.

A draw with islands is compared with islands of one process each. Adapters and pairs of answers need weights
to start from, for which one process trains a model for an iteration first.
"""
import dataclasses
import os
import shutil
import sys
import tempfile
import time
from typing import NamedTuple

import torch

from kilogpt.launch_train import as_arguments, keys_of_layout, parse_layout
from kilogpt.parallel.layout import Layout, check_layout
from kilogpt.prove import compare, data, forked, observer
from kilogpt.prove.diagnosis import describe
from kilogpt.prove.limits import is_documented
from kilogpt.prove.runs import MORE, LayoutRuns
from kilogpt.prove.space import LAYOUT, MODEL, TRAINING, count_processes, plain
from kilogpt.settings import check_settings
from model import GPT, GPTConfig

LIMIT, LIMIT_COMPILED = 150, 400  # seconds for a run, after which it counts as hung
FIRST_PORT, PORTS_OF_DRAW, N_PORTS = 10_000, 10, 10_000
# What train.py's config has in every draw, besides the draw's own keys
FIXED = dict(
    device='cpu', backend='auto', dtype='float32', compile=False, dropout=0.0, init_from='scratch',
    min_lr=1e-3, lr_decay_iters=10, eval_iters=1, log_interval=1, save_interval=0, save_minutes=0.0,
    keep_checkpoints=2, comm_timeout=60)
# {value of `data`: (the dataset's folder, documents, loss)}
DATA = {'stream': ('text', 'stream', 'cross_entropy'), 'mask': ('text', 'mask', 'cross_entropy'),
        'pack': ('text', 'pack', 'cross_entropy'), 'answers': ('answers', 'stream', 'cross_entropy'),
        'packed answers': ('answers', 'pack', 'cross_entropy'), 'pairs': ('pairs', 'pack', 'dpo'),
        'taught': ('text', 'stream', 'distill'), 'packed taught': ('text', 'pack', 'distill'),
        'mixture': ('text', 'stream', 'cross_entropy'), 'packed mixture': ('text', 'pack', 'cross_entropy'),
        'masked mixture': ('text', 'mask', 'cross_entropy')}  # of a text and conversations


class Outcome(NamedTuple):
    """What became of a draw. kind: 'same', 'refused', or one of FAILURES. text: of a refusal or a failure."""
    kind: str
    text: str = ''
    seconds: float = 0.0
    errors: dict = {}  # {what: largest relative error}


FAILURES = ('wrong', 'failed', 'undocumented')
MAX_LINES = 3  # differences named in a failure


def write_data(folder):
    """Write the datasets of all draws into a folder."""
    data.write_teacher_of(data.write_text(os.path.join(folder, 'text')))
    data.write_text(os.path.join(folder, 'more'), seed=1)
    data.write_conversations(os.path.join(folder, 'answers'))
    data.write_pairs(os.path.join(folder, 'pairs'))


def iterations_of(draw):
    """How many iterations are compared: the second shows the first update, of weights and of moments.

    What islands exchange after two iterations, and add with a delay, shows in the third.
    """
    return max(2, draw['outer_interval'] + 1)


def config_of(draw, datasets, base):
    """train.py's config of a draw on one process, or for each of its islands.

    datasets: the folder of write_data. base: the values of all other keys.
    """
    config = base | FIXED | {key: draw[key] for key in (*MODEL, *TRAINING, 'islands')}
    config['eval_interval'] = iterations_of(draw)
    config['max_iters'] = iterations_of(draw) + MORE
    folder, config['documents'], config['loss'] = DATA[draw['data']]
    config['dataset'] = os.path.join(datasets, folder)
    if 'mixture' in draw['data']:
        more = 'answers' if draw['data'] == 'masked mixture' else 'more'
        first, second = (os.path.join(datasets, name) for name in ('text', more))
        config['dataset'] = f'{first}:0.6, {second}:0.4'
        phases = config['mixture_phases']
        config['mixture_phases'] = phases.replace('text:', f'{first}:').replace('more:', f'{second}:')
    if draw['precision'] == 'bfloat16':
        config['dtype'] = 'bfloat16'
    return config


def layout_of(draw):
    """{key: value} of the keys of train.py that lay a draw out."""
    return {key: draw[key] for key in LAYOUT if key != 'islands'}


def refusal_of(draw, base):
    """The sentence with which train.py is expected to refuse a draw, or ''. base: as in config_of."""
    config = config_of(draw, '', base)
    fields = [field.name for field in dataclasses.fields(GPTConfig) if field.name in config]
    layouts = [(count_processes(draw) // draw['islands'], layout_of(draw))]
    if draw['then']:
        layouts.append(keys_of_layout(draw['then']))
    try:
        check_settings(config | layout_of(draw))
        with torch.device('meta'):
            model = GPT(GPTConfig(vocab_size=data.VOCABULARY, **{key: config[key] for key in fields}), seed=None)
        for processes, keys in layouts:
            degrees = {key: type(LAYOUT[key].values[0])(value) for key, value in keys.items()
                       if key in Layout.__dataclass_fields__}
            check_layout(
                model, Layout(processes, **degrees), block_size=config['block_size'], dtype=config['dtype'],
                activation_checkpoint=draw['activation_checkpoint'], cpu_offload=keys.get('cpu_offload', False),
                fp8=False, grad_compress=keys.get('grad_compress', 'none'))
    except ValueError as error:
        return str(error)
    return ''


def run_draw(draw, number, datasets, base):
    """Run a draw; returns its Outcome. number: of the draw, for ports of its own. datasets: of write_data.

    A draw that ends with an error is run once more: in rare cases PyTorch or gloo fails (docs/log).
    """
    outcome = run_once(draw, number, datasets, base)
    if outcome.kind != 'failed':
        return outcome
    again = run_once(draw, number, datasets, base)
    if again.kind != 'failed':
        print(f'warning: a draw failed once, and not again: {outcome.text}', file=sys.stderr, flush=True)
    return again


def run_once(draw, number, datasets, base):
    """Run a draw without a second attempt; returns its Outcome."""
    began = time.perf_counter()
    folder = tempfile.mkdtemp(dir=os.path.dirname(datasets))
    try:
        outcome = Trial(draw, number, folder, datasets, base).run()
    except _Stop as stop:
        outcome = stop.outcome
    except Exception as error:  # what cannot be compared is a failure of this draw, and not of the others
        outcome = Outcome('failed', f'the comparison ends with {type(error).__name__}: {error}')
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return outcome._replace(seconds=time.perf_counter() - began)


class _Stop(Exception):
    def __init__(self, outcome):
        self.outcome = outcome


class Trial:
    """The runs of one draw, which share a folder."""

    def __init__(self, draw, number, folder, datasets, base):
        self.draw, self.folder = draw, folder
        self.config, self.text = config_of(draw, datasets, base), os.path.join(datasets, 'text')
        self.ports = forked.free_ports(FIRST_PORT + number * PORTS_OF_DRAW % N_PORTS)
        self.limit = LIMIT_COMPILED if draw['compile'] else LIMIT

    def run(self):
        draw = self.draw
        if draw['lora_rank'] or draw['data'] == 'pairs':
            self._train_beginning()
        runs = self._runs('runs', self.config)
        run = runs.train(count_processes(draw), as_arguments(**layout_of(draw), compile=draw['compile']))
        self._check(run)
        reference = runs.train_reference(self._reference_arguments())
        if reference.error:
            return Outcome('failed', f'one process: {reference.error}')
        if draw['precision'] == 'bfloat16':
            return self._compare_in_bfloat16(run, runs)
        differences, errors = runs.compare(run)
        problems = describe(differences, draw['n_layer'])[:MAX_LINES]
        if differences:
            problems[0] = f'iteration {differences[0].iteration}: {problems[0]}'
        elif draw['then']:
            problems = runs.continue_from(run, *parse_layout(draw['then'], 0))
            if runs.continued.refusal:  # the second layout cannot be
                self._check(runs.continued)
        return Outcome('wrong' if problems else 'same', '; '.join(problems), errors=errors)

    def _reference_arguments(self):
        """The arguments of the one process: in bfloat16 FSDP2 casts what autocast keeps in float32."""
        draw = self.draw
        uses_fsdp = draw['zero_stage'] >= 2 or draw['tp'] * draw['pp'] * draw['ep'] > 1
        return as_arguments(zero_stage=2) if uses_fsdp and draw['precision'] == 'bfloat16' else []

    def _compare_in_bfloat16(self, run, runs):
        """The Outcome of a layout in bfloat16: its first gradients against those of one process in float64."""
        exact = self._runs('float64', self.config | dict(dtype='float32'), in_float64=True)
        if exact.train_reference().error:
            return Outcome('failed', f'one process in float64: {exact.reference.error}')
        ranks = range(run.processes // self.draw['islands'])
        problem, drift = compare.compare_drift(
            [dict(each.gradients) for each in observer.read(run.folder, 1, ranks)],
            dict(runs.observations[0][0].gradients), dict(exact.observations[0][0].gradients))
        errors = {"drift of a gradient, in units of one process's": drift}
        return Outcome('wrong' if problem else 'same', problem, errors=errors)

    def _runs(self, name, config, in_float64=False, iterations=None):
        folder = os.path.join(self.folder, name)
        os.mkdir(folder)
        in_float64 = in_float64 or self.draw['precision'] == 'float64'
        iterations = iterations or iterations_of(self.draw)
        return LayoutRuns(folder, config, iterations, in_float64, self.limit, self.ports, is_brief=True)

    def _check(self, run):
        """Stop unless a run succeeded."""
        if run.refusal:
            raise _Stop(Outcome('refused' if is_documented(run.refusal) else 'undocumented', run.refusal))
        if run.error:
            raise _Stop(Outcome('failed', run.error))

    def _train_beginning(self):
        """Train the weights from which the draw starts, and make them the reference of its pairs."""
        dense = {key: value for key, value in plain().items() if key.startswith(('lora_', 'outer_', 'islands'))}
        config = self.config | dense | dict(loss='cross_entropy', documents='stream', mixture_phases='',
                                            max_epochs=0, dataset=self.text)
        run = self._runs('beginning', config, iterations=1).train(1, [])
        self._check(run)
        self.config['init_from'] = run.out_dir
        if self.draw['data'] == 'pairs':
            pairs = os.path.join(self.folder, 'pairs')
            self.config['dataset'] = data.pairs_of_reference(self.config['dataset'], pairs, run.out_dir)
