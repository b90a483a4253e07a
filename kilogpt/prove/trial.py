"""Run one draw of `kilogpt.prove --random`: train on one process and in a layout, and compare.

A draw with islands is compared with islands of one process each. Adapters and pairs of answers need weights to
start from, for which one process trains a model for an iteration first.
"""
import dataclasses
import os
import shutil
import tempfile
import time
from typing import NamedTuple

import torch

from kilogpt.parallel.layout import Layout, check_layout
from kilogpt.prove import compare, data, forked, observer
from kilogpt.prove.diagnosis import describe
from kilogpt.prove.limits import is_documented
from kilogpt.prove.runs import LayoutRuns
from kilogpt.prove.space import LAYOUT, MODEL, TRAINING, count_processes, plain
from kilogpt.script_runs import as_arguments, parse_layout
from kilogpt.settings import check_settings
from model import GPT, GPTConfig

ITERATIONS = 3
LIMIT, LIMIT_COMPILED = 150, 400  # seconds for a run, after which it counts as hung
FIRST_PORT, PORTS_OF_DRAW, N_PORTS = 10_000, 10, 10_000
# What train.py's config has in every draw, besides the draw's own keys
FIXED = dict(
    device='cpu', backend='auto', dtype='float32', compile=False, dropout=0.0, init_from='scratch', min_lr=1e-3,
    lr_decay_iters=10, max_iters=ITERATIONS, eval_interval=ITERATIONS, eval_iters=1, log_interval=1,
    save_interval=0, save_minutes=0.0, keep_checkpoints=2, comm_timeout=60, loss='cross_entropy',
    documents='stream')
DOCUMENTS = {'mask': 'mask', 'pack': 'pack', 'packed answers': 'pack', 'pairs': 'pack', 'packed mixture': 'pack'}
OF_DATA = {'answers': 'answers', 'packed answers': 'answers', 'pairs': 'pairs'}  # {data: folder}, others: text


class Outcome(NamedTuple):
    """What became of a draw. kind: 'same', 'refused', or one of FAILURES. text: of a refusal or a failure."""
    kind: str
    text: str = ''
    seconds: float = 0.0
    errors: dict = {}  # {what: largest relative error}


FAILURES = ('wrong', 'failed', 'undocumented')


def write_data(folder):
    """Write the datasets of all draws into a folder."""
    data.write_text(os.path.join(folder, 'text'))
    data.write_text(os.path.join(folder, 'more'), seed=1)
    data.write_conversations(os.path.join(folder, 'answers'))
    data.write_pairs(os.path.join(folder, 'pairs'))


def config_of(draw, datasets, base):
    """train.py's config of a draw on one process, or for each of its islands. base: the values of other keys."""
    config = base | FIXED | {key: draw[key] for key in (*MODEL, *TRAINING, 'islands')}
    config['documents'] = DOCUMENTS.get(draw['data'], 'stream')
    config['dataset'] = os.path.join(datasets, OF_DATA.get(draw['data'], 'text'))
    if draw['data'] in ('mixture', 'packed mixture'):
        more = os.path.join(datasets, 'more')
        config['mixture_phases'] = config['mixture_phases'].replace('text', config['dataset']).replace('more:', f'{more}:')
        config['dataset'] = f'{config["dataset"]}:0.6, {more}:0.4'
    if draw['data'] == 'pairs':
        config['loss'] = 'dpo'
    if draw['precision'] == 'bfloat16':
        config['dtype'] = 'bfloat16'
    return config


def refusal_of(draw, base):
    """The sentence with which train.py is expected to refuse a draw, or ''. base: as in config_of."""
    config = config_of(draw, '', base)
    fields = {field.name: config[field.name] for field in dataclasses.fields(GPTConfig) if field.name in config}
    try:
        check_settings(config | {key: draw[key] for key in LAYOUT})
        with torch.device('meta'):
            model = GPT(GPTConfig(vocab_size=data.VOCABULARY, **fields), seed=None)
        layouts = [({key: draw[key] for key in LAYOUT}, count_processes(draw) // draw['islands'])]
        if draw['then']:
            processes, arguments = parse_layout(draw['then'], 0)
            layouts.append((dict(argument[2:].split('=') for argument in arguments), processes))
        for keys, processes in layouts:
            degrees = {key: type(LAYOUT[key].values[0])(keys[key]) for key in keys
                       if key in Layout.__dataclass_fields__}
            check_layout(model, Layout(processes, **degrees), block_size=config['block_size'],
                         dtype=config['dtype'], activation_checkpoint=draw['activation_checkpoint'],
                         cpu_offload=keys.get('cpu_offload', False), fp8=False,
                         grad_compress=keys.get('grad_compress', 'none'))
    except ValueError as error:
        return str(error)
    return ''


def run_draw(draw, number, datasets, base):
    """Run a draw; returns its Outcome. number: of the draw, for ports of its own. datasets: of write_data."""
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
        arguments = as_arguments(compile=draw['compile'], **{key: draw[key] for key in LAYOUT if key != 'islands'})
        run = runs.train(count_processes(draw), arguments)
        self._check(run)
        reference = runs.train_reference()
        if reference.error:
            return Outcome('failed', f'one process: {reference.error}')
        if self.config['dtype'] == 'bfloat16':
            return self._compare_in_bfloat16(run, runs)
        differences, errors = runs.compare(run)
        if differences:
            lines = describe(differences, draw['n_layer'])
            return Outcome('wrong', f'iteration {differences[0].iteration}: {"; ".join(lines[:3])}', errors=errors)
        if draw['then']:
            processes, arguments = parse_layout(draw['then'], 0)
            problems = runs.continue_from(run, processes, arguments)
            if problems:
                return Outcome('wrong', '; '.join(problems), errors=errors)
        return Outcome('same', errors=errors)

    def _compare_in_bfloat16(self, run, runs):
        """The Outcome of a layout in bfloat16: its first gradients against those of one process in float64."""
        exact = self._runs('float64', self.config | dict(dtype='float32'), in_float64=True)
        if exact.train_reference().error:
            return Outcome('failed', f'one process in float64: {exact.reference.error}')
        problem, error = compare.compare_drift(
            [dict(each.gradients) for each in observer.read(run.folder, 1, range(run.processes // self.draw['islands']))],
            dict(runs.observations[0][0].gradients), dict(exact.observations[0][0].gradients))
        errors = {'drift of gradients, in units of that of one process': error}
        return Outcome('wrong', problem, errors=errors) if problem else Outcome('same', errors=errors)

    def _runs(self, name, config, in_float64=False):
        folder = os.path.join(self.folder, name)
        os.mkdir(folder)
        in_float64 = in_float64 or self.draw['precision'] == 'float64'
        return LayoutRuns(folder, config, ITERATIONS, in_float64, self.limit, self.ports, is_brief=True)

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
                                            max_epochs=0, dataset=self.text, max_iters=1)
        run = self._runs('beginning', config).train(1, [])
        self._check(run)
        self.config['init_from'] = run.out_dir
        if self.draw['data'] == 'pairs':
            pairs = os.path.join(self.folder, 'pairs')
            self.config['dataset'] = data.pairs_of_reference(self.config['dataset'], pairs, run.out_dir)
