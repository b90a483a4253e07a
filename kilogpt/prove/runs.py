"""Run train.py in layouts on processes of this machine, and compare each run with one process.

kilogpt.prove chooses the layouts and prints the results.
"""
import contextlib
import functools
import json
import os
import re
import shutil
import signal
import sys
from types import SimpleNamespace

import torch

from data.prepare import write_random_tokens
from kilogpt import checkpoint
from kilogpt.prove import compare, forked, observer
from kilogpt.script_runs import ROOT, as_arguments, last_error
from kilogpt.metrics import read_metrics
from kilogpt.checkpoint_files import safe_reader

LIMIT = 600  # seconds after which a run is killed
CRASHES = {-signal.SIGABRT, -signal.SIGBUS, -signal.SIGSEGV}  # exit codes of processes that crashed
FIRST_PORT = 15_000
DOCUMENT_LENGTH = 9  # tokens in a document, on average: a few documents in a sequence, and some of one token


class LayoutRuns:
    """Runs of one config in several layouts. Each run has its own folder in `folder`.

    config: train.py's config for one process. iterations: number of iterations to compare; then a run saves.
    """

    def __init__(self, folder, config, vocab_size, iterations, in_float64):
        self.folder, self.iterations, self.in_float64 = folder, iterations, in_float64
        self.ports = forked.free_ports(FIRST_PORT)
        self.tolerances = compare.IN_FLOAT64 if in_float64 else compare.IN_FLOAT32
        self.number = 0  # runs started so far
        data = os.path.join(folder, 'data')
        os.mkdir(data)
        document_length = 0 if config['documents'] == 'stream' else DOCUMENT_LENGTH
        write_random_tokens(data, vocab_size, 2 ** 14, document_length, draws_lengths=document_length > 0)
        self.config_file = os.path.join(folder, 'config.json')
        with open(self.config_file, 'w', encoding='utf-8') as file:
            json.dump(config | dict(dataset=data), file)

    def train(self, processes, arguments, **keys):
        """Run train.py; returns the run, an object with these attributes:

        out_dir; error: '' if the run succeeded; lines and evals: {iteration: line of metrics.jsonl};
        uncompiled: why the run was not compiled although it should be, or None.
        arguments, keys: settings of train.py, which override the config.

        If a process crashes, the run is repeated once: in rare cases PyTorch or gloo crashes (LOG.md).
        """
        run = self._train_once(processes, arguments, keys)
        if CRASHES.intersection(run.codes):
            print(f'warning: a process of {run.layout} crashed ({run.error}): the run is repeated',
                  file=sys.stderr)
            run = self._train_once(processes, arguments, keys)
        return run

    def _train_once(self, processes, arguments, keys):
        self.number += 1
        folder = os.path.join(self.folder, str(self.number))
        os.mkdir(folder)
        open(os.path.join(folder, 'stdin'), 'w').close()
        keys = dict(out_dir=os.path.join(folder, 'out')) | keys
        environment = os.environ | dict(OMP_NUM_THREADS='1', MASTER_ADDR='127.0.0.1',
                                        MASTER_PORT=next(self.ports))
        sys.stdout.flush()  # otherwise each forked process would print the buffered text again
        codes = forked.run_forked(
            processes, ends_together=True, script=os.path.join(ROOT, 'train.py'),
            arguments=[self.config_file, *arguments, *as_arguments(**keys)], env=environment, cwd=ROOT,
            timeout=LIMIT, folder=folder,
            before=functools.partial(observer.install, folder, self.in_float64, traces_forward=not arguments))
        error = first_error(folder, codes) if any(codes) else ''
        lines, evals = {}, {}
        with contextlib.suppress(FileNotFoundError):
            lines, evals = read_metrics(keys['out_dir'])
        with open(os.path.join(folder, 'stdout.0'), encoding='utf-8') as file:
            uncompiled = re.search(r'compile=False.*', file.read())
        layout = ' '.join(arguments).replace('--', '') or 'one process'
        return SimpleNamespace(folder=folder, layout=layout, out_dir=keys['out_dir'], processes=processes,
                               codes=codes, error=error, uncompiled=uncompiled and uncompiled[0], lines=lines,
                               evals=evals)

    def train_reference(self):
        """Train on one process for two iterations more than in layouts; keep its observations and weights."""
        self.reference = self.train(1, [], max_iters=self.iterations + 2)
        if not self.reference.error:
            folder = self.reference.folder
            self.observations = [observer.read(folder, i + 1, 1)[0] for i in range(self.iterations)]
            self.saved = saved_weights(self.reference.out_dir, self.iterations)
        return self.reference

    def unused_parameters(self, model):
        """Names of parameters that require a gradient but had none on one process."""
        trained = {name for name, _ in self.observations[0].gradients}
        return [name for name, p in model.named_parameters() if p.requires_grad and name not in trained]

    def continue_from(self, source, processes, arguments):
        """Resume a run in another layout; returns [sentence] for what is wrong.

        The resumed run makes two iterations: wrong moments change the loss only after the first update.
        """
        folder = os.path.join(self.folder, f'from-{self.number}')
        path = os.path.join('ckpt', f'iter_{self.iterations:08d}')
        shutil.copytree(os.path.join(source.out_dir, path), os.path.join(folder, path))
        run = self.train(processes, arguments, out_dir=folder, init_from='resume', eval_iters=0,
                         keep_checkpoints=0, max_iters=self.iterations + 2)
        if run.error:
            return [f'cannot resume from the checkpoint of {source.layout}: {run.error}']
        later = {i: line for i, line in self.reference.lines.items() if i > self.iterations}
        differences = compare.compare_curves(run, SimpleNamespace(lines=later, evals={}))
        return [f'resumed from the checkpoint of {source.layout}, iteration {each.iteration} has {each.what} '
                f'{each.found:.6g}, on one process {each.expected:.6g}' for each in differences]

    def compare(self, run):
        """([Difference], {what: largest relative error}) of a run and the reference.

        The differences are those of the first iteration that has differences.
        """
        errors = {}
        for iteration, reference in enumerate(self.observations, start=1):
            differences = []
            observations = observer.read(run.folder, iteration, run.processes)
            if iteration == 1:
                differences += self._compare_tensors(iteration, 'starting weight', reference.weights,
                                                     [each.weights for each in observations], errors)
            else:
                by_rank = [self._compare_updates(iteration - 1, each.weights, reference.weights, errors)
                           for each in observations]
                names_by_rank = [set(dict(each.weights)) for each in observations]
                differences += compare.merge_ranks(by_rank, names_by_rank)
            if not differences:
                differences += self._compare_tensors(iteration, 'gradient', reference.gradients,
                                                     [each.gradients for each in observations], errors)
            differences += [each for each in compare.compare_curves(run, self.reference)
                            if each.iteration == iteration]
            if iteration == 1:
                run.first_wrong = first_wrong_value([each.activations for each in observations],
                                                    reference.activations)
            if differences:
                return differences, errors
        last = self.iterations
        differences = [each for each in compare.compare_curves(run, self.reference) if each.iteration <= last]
        found = saved_weights(run.out_dir, last)
        for name in sorted(found.keys() ^ self.saved.keys()):
            differences.append(compare.Difference(last, 'saved weight', name, None, None))
        found = [(name, weight) for name, weight in found.items() if name in self.saved]
        return differences + self._compare_updates(last, found, self.saved, errors), errors

    def _compare_tensors(self, iteration, what, expected, found_by_rank, errors):
        expected = dict(expected)
        floor = compare.NEGLIGIBLE * compare.norm_of_all(expected.values())
        tolerance = self.tolerances[what][min(iteration, len(self.tolerances[what])) - 1]
        differences = []
        for found in found_by_rank:
            of_rank, error = compare.compare_tensors(iteration, what, found, expected, tolerance, floor)
            differences.append(of_rank)
            errors[what] = max(errors.get(what, 0.0), error)
        names_by_rank = [set(dict(found)) for found in found_by_rank]
        missing = expected.keys() - set().union(*names_by_rank)
        absent = [compare.Difference(iteration, what, name, None, expected[name].norm().item())
                  for name in missing]
        return absent + compare.merge_ranks(differences, names_by_rank)

    def _compare_updates(self, iteration, found, expected, errors):
        """[Difference] of the total change of the weights by all updates up to an iteration.

        found, expected: [(name, parameter)]. errors: {what: largest relative error}, which is updated here.
        """
        start, expected, differences = dict(self.observations[0].weights), dict(expected), []
        for name, weight in found:
            is_clear = self._has_clear_gradient(name)
            update, right_update = weight - start[name], expected[name] - start[name]
            floor = 1e-5 * start[name].norm().item() + 1e-30
            of_name, error = compare.compare_tensors(
                iteration, 'update', [(name, update[is_clear])], {name: right_update[is_clear]},
                self.tolerances['update'], floor)
            differences += of_name
            errors['update'] = max(errors.get('update', 0.0), error)
        return differences

    def _has_clear_gradient(self, name):
        """A mask of a parameter's elements whose gradient is more than rounding in every iteration.

        AdamW makes a full step for the other elements as well, but in an arbitrary direction.
        """
        is_clear = torch.ones_like(self.saved[name], dtype=torch.bool)
        for observation in self.observations:
            gradients = dict(observation.gradients)
            if name in gradients:
                floor = compare.NEGLIGIBLE * compare.norm_of_all(gradients.values())
                size = max(gradients[name].norm().item(), floor) / gradients[name].numel() ** 0.5
                is_clear &= gradients[name].abs() > 0.05 * size
        return is_clear


def first_wrong_value(activations, expected):
    """The first key of `Observation.activations` whose mean square is wrong, or ''.

    activations: `Observation.activations` of each process; expected: the same of one process. Returns '' if
    the processes compute padding, too, since the means then have other elements.
    """
    squares, counts = {}, {}
    for of_rank in activations:
        for what, (square, count) in of_rank.items():
            squares[what] = squares.get(what, 0.0) + square
            counts[what] = counts.get(what, 0) + count
    first, (_, count) = next(iter(expected.items()))
    if counts.get(first, count) % count:
        return ''
    for what, (square, count) in expected.items():
        # A value that several processes have is counted several times, which does not change the mean.
        right = square / max(1, count)
        if what in counts and not abs(squares[what] / max(1, counts[what]) - right) <= 1e-3 * right:
            return what
    return ''


def saved_weights(out_dir, iteration):
    """{name: parameter} in a run's checkpoint."""
    import torch.distributed.checkpoint as dcp
    path = os.path.join(out_dir, 'ckpt', f'iter_{iteration:08d}')
    stored = checkpoint.stored_tensors(path)
    tensors = {name: torch.empty(found.size, dtype=found.properties.dtype) for name, found in stored.items()
               if name.startswith('model.')}
    dcp.load(tensors, storage_reader=safe_reader(path))
    return {name.removeprefix('model.'): tensor for name, tensor in tensors.items()}


def first_error(folder, codes):
    """The error of a failed run: of the first rank with an error other than a lost connection."""
    errors = []
    for rank, code in enumerate(codes):
        with open(os.path.join(folder, f'stderr.{rank}'), encoding='utf-8') as file:
            text = file.read()
        if code:
            errors.append(last_error(text) if text.strip() else f'rank {rank} ended with code {code}')
    telling = [error for error in errors
               if 'lost its connection' not in error and 'Connection closed by peer' not in error]
    return (telling or errors)[0]
