"""Runs of train.py on processes of this machine whose results are compared with those of one process.

For kilogpt.prove, which says what runs and prints what was found.
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

LIMIT = 600  # seconds that a run may take
CRASHES = {-signal.SIGABRT, -signal.SIGBUS, -signal.SIGSEGV}  # exit codes
FIRST_PORT = 15_000


class Trials:
    """Runs of one config in forked processes, each in a folder of its own within `folder`.

    config: train.py's, of one process. iterations: those that are compared, after which each run saves.
    """

    def __init__(self, folder, config, vocab_size, iterations, in_float64):
        self.folder, self.iterations, self.in_float64 = folder, iterations, in_float64
        self.ports = forked.free_ports(FIRST_PORT)
        self.tolerances = compare.IN_FLOAT64 if in_float64 else compare.IN_FLOAT32
        self.number = 0  # of runs so far
        data = os.path.join(folder, 'data')
        os.mkdir(data)
        write_random_tokens(data, vocab_size, count=2 ** 14)
        self.config_file = os.path.join(folder, 'config.json')
        with open(self.config_file, 'w', encoding='utf-8') as file:
            json.dump(config | dict(dataset=data), file)

    def train(self, processes, arguments, **keys):
        """Run train.py; returns the run, whose `error` is '' where it has succeeded.

        arguments, keys: train.py's, on top of the config. The run has its `out_dir`, and `lines` and `evals`,
        {iteration: line of metrics.jsonl}; `uncompiled` is why it was not compiled as it should be, or None.

        A run in which a process crashes is repeated: one in thousands has done so in PyTorch or gloo (LOG.md).
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
        sys.stdout.flush()  # before the fork, or each process would print it
        codes = forked.run_forked(
            processes, ends_together=True, script=os.path.join(ROOT, 'train.py'),
            arguments=[self.config_file, *arguments, *as_arguments(**keys)], env=environment, cwd=ROOT,
            timeout=LIMIT, folder=folder, before=functools.partial(observer.install, folder, self.in_float64))
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
        """Run one process two iterations longer than the others, and keep what it saw and saved."""
        self.one = self.train(1, [], max_iters=self.iterations + 2)
        if not self.one.error:
            self.testimonies = [observer.read(self.one.folder, i + 1, 1)[0] for i in range(self.iterations)]
            self.saved = saved_weights(self.one.out_dir, self.iterations)
        return self.one

    def unused_parameters(self, model):
        """Names of the model's parameters that should be trained, but got no gradient on one process."""
        trained = {name for name, _ in self.testimonies[0].gradients}
        return [name for name, p in model.named_parameters() if p.requires_grad and name not in trained]

    def continue_from(self, source, processes, arguments):
        """Continue a run under another layout; returns what is wrong, a list of sentences.

        It takes two iterations, since moments that were not read show in the loss after the first update.
        """
        folder = os.path.join(self.folder, f'from-{self.number}')
        path = os.path.join('ckpt', f'iter_{self.iterations:08d}')
        shutil.copytree(os.path.join(source.out_dir, path), os.path.join(folder, path))
        run = self.train(processes, arguments, out_dir=folder, init_from='resume', eval_iters=0,
                         keep_checkpoints=0, max_iters=self.iterations + 2)
        if run.error:
            return [f'cannot continue from what {source.layout} has saved: {run.error}']
        later = {i: line for i, line in self.one.lines.items() if i > self.iterations}
        expected = SimpleNamespace(lines=later, evals={})
        differences = compare.compare_curves(run, expected)
        return [f'continued from what {source.layout} has saved, iteration {each.iteration} has {each.what} '
                f'{each.found:.6g}, on one process {each.expected:.6g}' for each in differences]

    def compare(self, run):
        """([Difference], {what: largest relative error}) of a run and the reference.

        The differences are those of the first iteration that has any.
        """
        errors = {}
        for iteration, reference in enumerate(self.testimonies, start=1):
            differences = []
            testimonies = observer.read(run.folder, iteration, run.processes)
            if iteration == 1:
                differences += self._compare_tensors(iteration, 'starting weight', reference.weights,
                                                     [each.weights for each in testimonies], errors)
            else:
                of_ranks = [self._compare_updates(iteration - 1, each.weights, reference.weights, errors)
                            for each in testimonies]
                held = [{name for name, _ in each.weights} for each in testimonies]
                differences += compare.unite_ranks(of_ranks, held)
            if not differences:
                differences += self._compare_tensors(iteration, 'gradient', reference.gradients,
                                                     [each.gradients for each in testimonies], errors)
            differences += [each for each in compare.compare_curves(run, self.one)
                            if each.iteration == iteration]
            if iteration == 1:
                run.first_wrong = first_wrong_value([each.activations for each in testimonies],
                                                    reference.activations)
            if differences:
                return differences, errors
        last = self.iterations
        differences = [each for each in compare.compare_curves(run, self.one) if each.iteration <= last]
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
        held = [{name for name, _ in found} for found in found_by_rank]
        missing = expected.keys() - set().union(*held)
        absent = [compare.Difference(iteration, what, name, None, expected[name].norm().item())
                  for name in missing]
        return absent + compare.unite_ranks(differences, held)

    def _compare_updates(self, iteration, found, expected, errors):
        """[Difference] of the changes that the updates up to an iteration have made to the weights.

        found, expected: [(name, parameter)]; errors: takes the largest error.
        """
        start, expected, differences = dict(self.testimonies[0].weights), dict(expected), []
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
        """Which elements of a parameter have a gradient that is more than rounding, in each iteration.

        AdamW makes a whole step of the others too, in any direction.
        """
        is_clear = torch.ones_like(self.saved[name], dtype=torch.bool)
        for testimony in self.testimonies:
            gradients = dict(testimony.gradients)
            if name in gradients:
                floor = compare.NEGLIGIBLE * compare.norm_of_all(gradients.values())
                size = max(gradients[name].norm().item(), floor) / gradients[name].numel() ** 0.5
                is_clear &= gradients[name].abs() > 0.05 * size
        return is_clear


def first_wrong_value(activations, expected):
    """The first input or output of a module that has another mean square than expected, or ''.

    activations: `Testimony.activations` of each process; expected: those of one process. Where the processes
    compute padding too, nothing is known.
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
        # A value that several processes have counts as often, which leaves its mean.
        right = square / max(1, count)
        if what in counts and not abs(squares[what] / max(1, counts[what]) - right) <= 1e-3 * right:
            return what
    return ''


def saved_weights(out_dir, iteration):
    """{name: parameter} of a checkpoint."""
    import torch.distributed.checkpoint as dcp
    path = os.path.join(out_dir, 'ckpt', f'iter_{iteration:08d}')
    stored = checkpoint.stored_tensors(path)
    tensors = {name: torch.empty(found.size, dtype=found.properties.dtype) for name, found in stored.items()
               if name.startswith('model.')}
    dcp.load(tensors, storage_reader=safe_reader(path))
    return {name.removeprefix('model.'): tensor for name, tensor in tensors.items()}


def first_error(folder, codes):
    """What a failed run says: the error of the first rank that has one, not that of a lost connection."""
    errors = []
    for rank, code in enumerate(codes):
        with open(os.path.join(folder, f'stderr.{rank}'), encoding='utf-8') as file:
            text = file.read()
        if code:
            errors.append(last_error(text) if text.strip() else f'rank {rank} ended with code {code}')
    telling = [error for error in errors
               if 'lost its connection' not in error and 'Connection closed by peer' not in error]
    return (telling or errors)[0]
