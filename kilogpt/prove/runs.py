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

from kilogpt.launch_train import ROOT, as_arguments, last_error
from kilogpt.prove import compare, forked, observer
from kilogpt.run import checkpoint
from kilogpt.run.checkpoint_files import safe_reader
from kilogpt.run.metrics import read_metrics

CRASHES = {-signal.SIGABRT, -signal.SIGBUS, -signal.SIGSEGV}  # exit codes of processes that crashed
FIRST_PORT, N_PORTS = 15_000, 5_000
MORE = 2  # iterations of a run that continues: wrong moments change the loss only after the first update


class LayoutRuns:
    """Runs of one config in several layouts. Each run has its own folder in `folder`.

    config: train.py's config for one process, or for one process in each of its islands. All runs have its
    max_iters, MORE iterations than are compared, which the reference makes, and the runs that continue: what an
    edit may read is the same in all of them.
    iterations: number of iterations to compare; then a run saves.
    limit: seconds after which a run is killed. ports: an iterator. is_brief: as in observer.install.
    """

    def __init__(self, folder, config, iterations, in_float64, limit=600, ports=None, is_brief=False):
        self.folder, self.iterations, self.in_float64, self.limit = folder, iterations, in_float64, limit
        self.islands, self.is_brief = config['islands'], is_brief
        self.ports = ports or forked.free_ports(FIRST_PORT + os.getpid() % N_PORTS)
        if is_brief:
            self.tolerances = compare.OF_DRAWS_IN_FLOAT64 if in_float64 else compare.OF_DRAWS_IN_FLOAT32
        else:
            self.tolerances = compare.IN_FLOAT64 if in_float64 else compare.IN_FLOAT32
        self.number = 0  # runs started so far
        self.config_file = os.path.join(folder, 'config.json')
        with open(self.config_file, 'w', encoding='utf-8') as file:
            json.dump(config, file)

    def train(self, processes, arguments, to_end=False, **keys):
        """Run train.py, to_end or for the compared iterations; returns the run, an object with these attributes:

        out_dir; error: '' if the run succeeded; refusal: the sentence with which every process has refused
        the keys, or ''; lines and evals: {iteration: line of metrics.jsonl}; islands: the folder, lines and
        evals of each island; uncompiled: why the run was not compiled although it should be, or None.
        arguments, keys: settings of train.py, which override the config.

        If a process crashes, the run is repeated once: in rare cases PyTorch or gloo crashes (docs/log).
        """
        run = self._train_once(processes, arguments, to_end, keys)
        if CRASHES.intersection(run.codes):
            print(f'warning: a process of {run.layout} crashed ({run.error}): the run is repeated',
                  file=sys.stderr)
            run = self._train_once(processes, arguments, to_end, keys)
        return run

    def _train_once(self, processes, arguments, to_end, keys):
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
            timeout=self.limit, folder=folder,
            before=functools.partial(observer.install, folder, self.in_float64, is_brief=self.is_brief,
                                     traces_forward=not arguments and not self.is_brief,
                                     stop_after=None if to_end else self.iterations))
        error = first_error(folder, codes) if any(codes) else ''
        islands = [read_island(keys['out_dir'], island) for island in range(self.islands)]
        with open(os.path.join(folder, 'stdout.0'), encoding='utf-8') as file:
            uncompiled = re.search(r'compile=False.*', file.read())
        layout = ' '.join(arguments).replace('--', '') or 'one process'
        return SimpleNamespace(folder=folder, layout=layout, out_dir=keys['out_dir'], processes=processes,
                               codes=codes, error=error, refusal=common_refusal(folder, codes),
                               uncompiled=uncompiled and uncompiled[0], islands=islands,
                               lines=islands[0].lines, evals=islands[0].evals)

    def train_reference(self, arguments=()):
        """Train on one process, to the end; keep its observations and weights."""
        self.reference = self.train(self.islands, [*arguments], to_end=True)
        if not self.reference.error:
            # [island][iteration - 1]
            self.observations = list(zip(*(observer.read(self.reference.folder, i + 1, range(self.islands))
                                           for i in range(self.iterations))))
            self.clear = [compare.clear_elements([each.gradients for each in of_island])
                          for of_island in self.observations]
            self.saved = [saved_tensors(island.out_dir, self.iterations) for island in self.reference.islands]
        return self.reference

    def continue_from(self, source, processes, arguments):
        """Resume a run in another layout, to the end; returns [sentence] for what is wrong."""
        folder = os.path.join(self.folder, f'from-{self.number}')
        path = os.path.join('ckpt', f'iter_{self.iterations:08d}')
        shutil.copytree(os.path.join(source.out_dir, path), os.path.join(folder, path))
        shorter = dict(eval_iters=0) if self.is_brief else {}  # which an edit might read
        run = self.train(processes, arguments, to_end=True, out_dir=folder, init_from='resume', keep_checkpoints=0,
                         **shorter)
        self.continued = run
        if run.error:
            return [f'cannot resume from the checkpoint of {source.layout}: {run.error}']
        later = {i: line for i, line in self.reference.lines.items() if i > self.iterations}
        differences = self._compare_curves(SimpleNamespace(lines=run.lines, evals={}),
                                           SimpleNamespace(lines=later, evals={}))
        return [f'resumed from the checkpoint of {source.layout}, iteration {each.iteration} has {each.what} '
                f'{each.found:.10g}, on one process {each.expected:.10g}' for each in differences]

    def compare(self, run):
        """([Difference], {what: largest relative error}) of a run and the reference.

        The differences are those of the first island, and there of the first iteration, that has differences.
        """
        errors = {}
        for island in range(self.islands):
            if differences := self._compare_island(run, island, errors):
                return differences, errors
        return [], errors

    def _compare_curves(self, run, expected):
        loss, grad_norm = self.tolerances['loss'], self.tolerances['gradient norm']
        return compare.compare_curves(run, expected, loss, grad_norm)

    def _compare_island(self, run, island, errors):
        size, observed = run.processes // self.islands, self.observations[island]
        ranks, last = range(island * size, (island + 1) * size), self.iterations
        curves = self._compare_curves(run.islands[island], self.reference.islands[island])
        for iteration, reference in enumerate(observed, start=1):
            differences = []
            observations = observer.read(run.folder, iteration, ranks)
            if iteration == 1:
                differences += self._compare_tensors(iteration, 'starting weight', reference.weights,
                                                     [each.weights for each in observations], errors)
            elif not self.is_brief:
                by_rank = []
                for each in observations:
                    by_rank.append(self._compare_updates(island, iteration - 1, each.weights, reference.weights,
                                                         errors))
                names_by_rank = [set(dict(each.weights)) for each in observations]
                differences += compare.merge_ranks(by_rank, names_by_rank)
            if not differences:
                differences += self._compare_tensors(iteration, 'gradient', reference.gradients,
                                                     [each.gradients for each in observations], errors)
            differences += [each for each in curves if each.iteration == iteration]
            if iteration == 1 and not self.is_brief:
                run.first_wrong = first_wrong_value([each.activations for each in observations],
                                                    reference.activations)
            if differences:
                return differences
        differences = [each for each in curves if each.iteration <= last]
        found, expected = saved_tensors(run.islands[island].out_dir, last), self.saved[island]
        for name in sorted(found.keys() ^ expected.keys()):
            differences.append(compare.Difference(last, 'saved tensor', name, None, None))
        return differences + self._compare_saved(island, found, expected, errors)

    def _compare_saved(self, island, found, expected, errors):
        """[Difference] of the tensors of two checkpoints: of the model's updates, and of states by kind."""
        weights, others = [], []
        for tensors in (found, expected):
            weights.append({key.removeprefix('model.'): tensor for key, tensor in tensors.items()
                            if key.startswith('model.')})
            others.append({key: self._clear_part(island, key, tensor) for key, tensor in tensors.items()
                           if not key.startswith('model.')})
        differences = self._compare_updates(island, self.iterations, weights[0].items(), weights[1], errors)
        for kind in sorted({key.rpartition('.')[2] for key in others[1]}):
            states = [{key: tensor for key, tensor in tensors.items() if key.endswith(f'.{kind}')}
                      for tensors in others]
            floor = compare.NEGLIGIBLE * compare.norm_of_all(states[1].values()) + 1e-30
            of_kind, error = compare.compare_tensors(
                self.iterations, 'saved state', states[0].items(), states[1], self.tolerances['update'], floor)
            differences += of_kind
            errors['saved state'] = max(errors.get('saved state', 0.0), error)
        return differences

    def _clear_part(self, island, key, state):
        """The elements of a state 'optimizer.NAME.KIND' whose gradient is more than rounding."""
        name = key.partition('.')[2].rpartition('.')[0]
        start = dict(self.observations[island][0].weights).get(name)
        if start is None or start.shape != state.shape:
            return state
        return state[self.clear[island][name]] if name in self.clear[island] else state

    def _compare_tensors(self, iteration, what, expected, found_by_rank, errors):
        expected = dict(expected)
        floor = compare.NEGLIGIBLE * compare.norm_of_all(expected.values()) + 1e-30
        tolerance = compare.bound_at(iteration, self.tolerances[what])
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

    def _compare_updates(self, island, iteration, found, expected, errors):
        """[Difference] of the total change of the weights by all updates up to an iteration.

        found, expected: [(name, parameter)]. errors: {what: largest relative error}, which is updated here.
        """
        start, expected, differences = dict(self.observations[island][0].weights), dict(expected), []
        for name, weight in found:
            if name not in expected or weight.shape != expected[name].shape:
                differences.append(compare.Difference(iteration, 'update', name, weight.norm().item(), None))
                continue
            is_clear = self.clear[island].get(name, slice(None))
            update, right_update = weight - start[name], expected[name] - start[name]
            floor = 1e-5 * start[name].norm().item() + 1e-30
            of_name, error = compare.compare_tensors(
                iteration, 'update', [(name, update[is_clear])], {name: right_update[is_clear]},
                self.tolerances['update'], floor)
            differences += of_name
            errors['update'] = max(errors.get('update', 0.0), error)
        return differences


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


def read_island(out_dir, island):
    """The folder, lines and evals of an island of a run."""
    folder = os.path.join(out_dir, f'island_{island}') if island else out_dir
    lines, evals = {}, {}
    with contextlib.suppress(FileNotFoundError):
        lines, evals = read_metrics(folder)
    return SimpleNamespace(out_dir=folder, lines=lines, evals=evals)


def saved_tensors(out_dir, iteration):
    """{key: tensor} of a run's checkpoint."""
    import torch.distributed.checkpoint as dcp
    path = os.path.join(out_dir, 'ckpt', f'iter_{iteration:08d}')
    tensors = {name: torch.empty(found.size, dtype=found.properties.dtype)
               for name, found in checkpoint.stored_tensors(path).items()}
    dcp.load(tensors, storage_reader=safe_reader(path))
    return {name: observer.wide(tensor) for name, tensor in tensors.items()}


def common_refusal(folder, codes):
    """The sentence with which all processes of a run have refused its keys; '' if one of them has not."""
    sentences = set()
    for rank in range(len(codes)):
        with open(os.path.join(folder, f'stderr.{rank}'), encoding='utf-8') as file:
            text = file.read()
        lines = [line for line in text.splitlines() if line.startswith('error: ')]
        sentences.add(lines[0] if len(lines) == 1 and 'Traceback' not in text else '')
    is_common = len(sentences) == 1 and set(codes) == {1}
    return sentences.pop().removeprefix('error: ') if is_common else ''


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
