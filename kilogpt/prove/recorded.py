"""What a run has logged and saved, and whether recomputed iterations agree with it."""
import os

import numpy as np
import torch

from data import storage
from data.datasets import find_sources
from data.schedule import DataSchedule
from data.splits import open_training_split
from data.tokens.tokenizer import get_tokenizer
from kilogpt.learning_rate import decay_iters
from kilogpt.parallel.processes import find_device, resolve_dtype
from kilogpt.run import checkpoint
from kilogpt.run.metrics import read_metrics

# Keys of train.py that do not change what an iteration computes.
FREE_KEYS = {
    'out_dir', 'eval_interval', 'log_interval', 'eval_iters', 'eval_only', 'always_save_checkpoint',
    'save_interval', 'save_minutes', 'keep_checkpoints', 'async_checkpoint', 'init_from', 'wandb_log',
    'wandb_project', 'wandb_run_name', 'tensorboard', 'trackio', 'events', 'max_iters', 'on_nonfinite', 'on_spike',
    'spike_factor', 'comm_timeout', 'backend', 'profile', 'accept_new_data'}
# {dtype: (error of a loss, relative error of a gradient norm)} that another layout or device may cause.
# Rounding errors grow with the iterations since the checkpoint.
BOUNDS = {'float32': (1e-3, 1e-2), 'bfloat16': (0.05, 0.2), 'float16': (0.05, 0.2)}


class RecordedRun:
    """The log and the checkpoints of the run in out_dir. Raises ValueError if there is no log.

    lines: {iteration: training line}. paths: {iteration: path of its checkpoint}. states: {iteration: state
    of its checkpoint}.
    """

    def __init__(self, out_dir):
        if storage.is_url(out_dir):
            raise ValueError(f'{out_dir} is a URL: copy that folder to this machine, and replay the copy')
        self.out_dir = out_dir
        self.lines, self.paths, self.states = {}, {}, {}
        if os.path.exists(os.path.join(out_dir, 'metrics.jsonl')):
            self.lines, _ = read_metrics(out_dir)
        if not self.lines:
            raise ValueError(f'{out_dir}/metrics.jsonl has no training lines: give the folder of a run')
        for path in checkpoint.find(out_dir):
            problem = checkpoint.damage(path)
            if problem:
                print(f'{path} is damaged ({problem}): skipped')
                continue
            self.paths[checkpoint.iteration_of(path)] = path
            self.states[checkpoint.iteration_of(path)] = checkpoint.read_state(path)

    def last_of(self, which):
        """The last iteration to compute. which: a logged iteration, as text, or 'all'; else ValueError."""
        if which == 'all':
            return max(self.lines)
        if which.isdigit() and int(which) in self.lines:
            return int(which)
        raise ValueError(f"the iteration to replay is {which!r}: choose 'all', or one that "
                         f'{self.out_dir}/metrics.jsonl has, between {min(self.lines)} and {max(self.lines)}')

    def segments(self, which, init_from, profile):
        """[(iteration to start from, last iteration)] of the segments that a replay computes.

        init_from: the key of the run. profile: whether to trace the last iteration, as a separate segment.
        """
        last = self.last_of(which)
        if which == 'all':
            starts_at_checkpoint = init_from == 'resume' and self.paths
            begin = min(self.paths) if starts_at_checkpoint else 0
            ends = sorted({iteration for iteration in self.paths if begin < iteration < last} | {last})
            return list(zip([begin, *ends], ends))
        begin = max((iteration for iteration in self.paths if iteration < last), default=0)
        if profile and begin < last - 1:
            return [(begin, last - 1), (last - 1, last)]
        return [(begin, last)]

    def state_of(self, iteration):
        """The state of a checkpoint that has the keys and the machine of an iteration; None if unknown."""
        later = [saved for saved in self.states if saved >= iteration]
        return self.states.get(min(later, default=max(self.states, default=None)))

    def processes_at(self, iteration):
        """The number of processes that computed an iteration."""
        state = self.state_of(iteration) or {}
        return state.get('machine', [1])[0]

    def check_dropout(self, iteration, nproc, config):
        """Raise ValueError if dropout is on and the replay would draw other random numbers than the run."""
        is_same = nproc == self.processes_at(iteration) and self._has_keys(self.state_of(iteration), config)
        if config['dropout'] and not is_same:
            raise ValueError(f'dropout={config["dropout"]} draws other random numbers in another layout: '
                             'replay this run with its own number of processes and its own keys')

    def is_exact(self, iteration, replayed):
        """Whether the run computed an iteration as the replay does, so that both must agree to the bit.

        replayed: the state of the replay's checkpoint.
        """
        state = self.state_of(iteration)
        return self._has_keys(state, replayed['config']) and state.get('machine') == replayed['machine']

    def _has_keys(self, state, config):
        if state is None:
            return False
        former = state['config'] | dict(lr_decay_iters=decay_iters(config | state['config']))
        config = config | dict(lr_decay_iters=decay_iters(config))
        return all(value == config[key] for key, value in former.items()
                   if key not in FREE_KEYS and key in config)


class Comparison:
    """Compares a RecordedRun with a replay of it. config: the config of the replay.

    problem: a description of the first difference, or None.
    """

    def __init__(self, run, config):
        self.run = run
        self.bounds = BOUNDS[resolve_dtype(config['dtype'], find_device(config['device']))]
        self.n_compared, self.n_exact = 0, 0
        self.largest_differences = [0.0, 0.0]  # of a loss, and relative of a gradient norm
        self.problem = None

    def compare(self, folder, begin, end):
        """Compare the log and the checkpoint in a replay's folder: the iterations after begin, up to end."""
        path = checkpoint.find(folder)[0]
        state = checkpoint.read_state(path)
        lines, _ = read_metrics(folder)
        for iteration in range(begin + 1, end + 1):
            self._compare_line(lines[iteration], self.run.is_exact(iteration, state))
            if self.problem:
                return
        if end in self.run.paths and self.run.is_exact(end, state):
            self._compare_weights(path, self.run.paths[end], end)

    def _compare_line(self, line, is_exact):
        iteration, out_dir = line['iter'], self.run.out_dir
        logged = self.run.lines.get(iteration)
        if logged is None or logged['tokens'] != line['tokens']:
            return  # the run has gone back since, and skipped this batch
        self.n_compared += 1
        self.n_exact += is_exact
        for number, key in enumerate(('loss', 'grad_norm')):
            found, expected = line[key], logged[key]
            bound = 0.0 if is_exact else self.bounds[number]
            if found is None and expected is None:  # both are NaN or infinite
                continue
            difference = float('inf')
            if found is not None and expected is not None:
                size = 1 if key == 'loss' else expected or 1  # a norm may be 0
                difference = abs(found - expected) / size
            self.largest_differences[number] = max(self.largest_differences[number], difference)
            if difference > bound:
                allowed = f'allowed: {bound:g}' if bound else 'the same layout and device give the same bits'
                self.problem = (f'iteration {iteration} is the first that differs: {key} is {found!r}, '
                                f'but {out_dir}/metrics.jsonl has {expected!r} ({allowed})')
                return

    def _compare_weights(self, found, expected, iteration):
        """Compare the weights of two checkpoints, one tensor at a time."""
        differing = []
        for key, stored in checkpoint.stored_tensors(expected).items():
            if key.startswith('model.'):
                tensors = [torch.empty(stored.size, dtype=stored.properties.dtype) for _ in range(2)]
                for path, tensor in zip((found, expected), tensors):
                    checkpoint.load_tensors(path, [(key, tensor)])
                if not torch.equal(*tensors):
                    differing.append(key.removeprefix('model.'))
        if differing:
            self.problem = (f'the weights after iteration {iteration} differ from those in {expected}, while '
                            f'all losses before are the same: {", ".join(differing[:3])}')

    def summary(self):
        """A sentence for a replay that agrees with its run. ValueError if nothing could be compared."""
        if not self.n_compared:
            raise ValueError(f'{self.run.out_dir}/metrics.jsonl has no line for the computed iterations with '
                             'the same batches, so nothing was compared: replay another iteration')
        what = '1 iteration agrees' if self.n_compared == 1 else f'{self.n_compared} iterations agree'
        text = f'replay: {what} with {self.run.out_dir}/metrics.jsonl'
        if self.n_exact == self.n_compared:
            return f'{text} to the bit'
        loss, norm = self.largest_differences
        return f'{text}: losses within {loss:.1e}, gradient norms within {norm:.1e} (relative)'


def write_batch(folder, run, iteration, config):
    """Write the text of an iteration's batch to folder/batch.txt."""
    begin = max((saved for saved in run.paths if saved < iteration), default=0)
    tokens = run.states[begin]['tokens'] if begin else 0
    n_sequences = config['batch_size'] * config['gradient_accumulation_steps']
    sequences = DataSchedule(n_sequences, config['block_size'], 1, begin, tokens).sequences(iteration - 1, 0)
    sources = find_sources(config['dataset'])
    meta = next(iter(sources.values())).meta
    tokenizer = get_tokenizer(meta)
    loader = open_training_split(sources, meta['vocab_size'], config)
    starts = loader.train_starts(sequences)
    x, y, *_ = loader.train_batch(sequences)
    begins = {}  # {path of a shard: positions at which its documents begin}
    with open(os.path.join(folder, 'batch.txt'), 'w', encoding='utf-8') as file:
        for (path, position), inputs, targets in zip(loader.where(starts), x.tolist(), y.tolist()):
            if path not in begins:
                shard = loader.shards[loader.paths.index(path)]
                begins[path] = np.flatnonzero(shard == meta['separator']) if 'separator' in meta else []
            number = np.searchsorted(begins[path], position, side='right')
            document = f', in its document {number}' if len(begins[path]) else ''
            text = tokenizer.decode([*inputs, targets[-1]])
            file.write(f'--- token {position} of {path}{document}\n{text}\n')
