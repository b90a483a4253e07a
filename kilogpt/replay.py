"""Compares iterations that are computed again with the log and the checkpoints of a run."""
import os

import torch

from data.tokenizer import get_tokenizer
from kilogpt import checkpoint
from kilogpt.metrics import read_metrics
from kilogpt.optim import local_part

# Keys of train.py that do not change what an iteration computes.
FREE_KEYS = {
    'out_dir', 'eval_interval', 'log_interval', 'eval_iters', 'eval_only', 'always_save_checkpoint',
    'save_interval', 'save_minutes', 'keep_checkpoints', 'async_checkpoint', 'init_from', 'wandb_log',
    'wandb_project', 'wandb_run_name', 'tensorboard', 'max_iters', 'on_nonfinite', 'on_spike', 'spike_factor',
    'comm_timeout', 'backend', 'profile', 'replay'}
# What another layout or device may change: of a loss, and of a gradient norm as a share. Rounding grows with
# the iterations since the checkpoint.
BOUNDS = {'float32': (1e-3, 1e-2), 'bfloat16': (0.05, 0.2), 'float16': (0.05, 0.2)}


class Replay:
    """What to compute again of the run in out_dir, and what is found.

    which: an iteration, as text, or 'all'. config, dtype: this run's. ValueError if the log does not have the
    iteration. `problem` is the first difference, in words, once there is one.
    """

    def __init__(self, which, out_dir, processes, config, dtype):
        self.out_dir, self.processes, self.config, self.dtype = out_dir, processes, config, dtype
        self.machine = processes.machine()
        run = processes.share(read_run(out_dir) if processes.is_main else None)
        self.lines, self.paths, self.states = run
        if not self.lines:
            raise ValueError(f'{out_dir}/metrics.jsonl has no training lines: set out_dir to that of a run')
        if which != 'all' and not (which.isdigit() and int(which) in self.lines):
            raise ValueError(f"replay is {which!r}: choose 'all', or an iteration that "
                             f'{out_dir}/metrics.jsonl has, of {min(self.lines)} to {max(self.lines)}')
        self.is_whole = which == 'all'
        self.last = max(self.lines) if self.is_whole else int(which)
        self.n_compared, self.n_exact, self.greatest = 0, 0, [0.0, 0.0]
        self.problem = None
        if config['dropout'] and not self.is_exact(self.last):
            raise ValueError(f'dropout={config["dropout"]} draws other numbers in another layout: '
                             'replay this run with its own number of processes and its own keys')

    def start(self):
        """(path, state) of the checkpoint to start from; (None, {}) for the beginning of the run."""
        newest = self.last - 1
        if self.is_whole:
            starts_at_checkpoint = self.config['init_from'] == 'resume' and self.paths
            newest = min(self.paths) if starts_at_checkpoint else 0
        return checkpoint.find_undamaged(self.out_dir, self.processes, newest)

    def is_exact(self, iteration):
        """Whether an iteration was computed as it is here, and must agree to the bit.

        The next checkpoint has the keys with which it was computed.
        """
        later = [saved for saved in self.states if saved >= iteration]
        state = self.states.get(min(later, default=max(self.states, default=None)))
        if state is None or state.get('machine') != self.machine:
            return False
        return all(value == self.config.get(key) for key, value in state['config'].items()
                   if key not in FREE_KEYS)

    def compare(self, line):
        """Compare a line of the log with the one that the run has written for the same tokens."""
        iteration = line['iter']
        logged = self.lines.get(iteration)
        if self.problem or logged is None or logged['tokens'] != line['tokens']:
            return
        is_exact = self.is_exact(iteration)
        self.n_compared += 1
        self.processes.say(f'iter {iteration}: loss {line["loss"]:.6f}, logged {logged["loss"]:.6f}')
        self.n_exact += is_exact
        bounds = (0.0, 0.0) if is_exact else BOUNDS[self.dtype]
        for number, (key, bound) in enumerate(zip(('loss', 'grad_norm'), bounds)):
            found, expected = line[key], logged[key]
            if expected is None:  # NaN or infinite
                continue
            difference = abs(found - expected) / (1 if key == 'loss' else expected)
            self.greatest[number] = max(self.greatest[number], difference)
            if not difference <= bound:
                allowed = f'allowed: {bound:g}' if bound else 'the same layout and device give the same bits'
                self.problem = (f'iteration {iteration} is the first that differs: {key} is {found!r}, '
                                f'but {self.out_dir}/metrics.jsonl has {expected!r} ({allowed})')
                return

    def pass_checkpoint(self, iteration, parameters, optimizer):
        """Compare the weights with those that the run has saved here, and go on from these."""
        path = self.paths[iteration]
        found = [local_part(parameter.detach()).clone() for _, parameter in parameters]
        checkpoint.load(path, parameters, optimizer)
        differing = [name for (name, parameter), value in zip(parameters, found)
                     if not torch.equal(local_part(parameter.detach()), value)]
        first = self.processes.first_problem(', '.join(differing[:3]))
        if first and self.is_exact(iteration) and not self.problem:
            self.problem = (f'the weights after iteration {iteration} differ from those in {path}, '
                            f'while all losses before are the same: {first[1]}')
        return self.states[iteration]

    def write_batch(self, loader, starts, meta):
        """Write the text of the last iteration's batch; returns the folder."""
        folder = os.path.join(self.out_dir, f'replay_{self.last:08d}')
        if not self.processes.is_main:
            return folder
        os.makedirs(folder, exist_ok=True)
        tokenizer = get_tokenizer(meta)
        x, y = loader.batch(starts)
        with open(os.path.join(folder, 'batch.txt'), 'w', encoding='utf-8') as file:
            for (path, position), inputs, targets in zip(loader.where(starts), x.tolist(), y.tolist()):
                text = tokenizer.decode([*inputs, targets[-1]])
                file.write(f'--- token {position} of {path}\n{text}\n')
        return folder

    def summary(self):
        """What was found, if nothing differs."""
        text = f'replay: {self.n_compared} iterations agree with {self.out_dir}/metrics.jsonl'
        if self.n_exact == self.n_compared:
            return f'{text} to the bit'
        loss, norm = self.greatest
        return f'{text}: losses within {loss:.1e}, gradient norms within {norm:.1e} of their size'


def read_run(out_dir):
    """({iteration: training line}, {iteration: checkpoint}, {iteration: its state}) of a run."""
    lines = {}
    if os.path.exists(os.path.join(out_dir, 'metrics.jsonl')):
        lines, _ = read_metrics(out_dir)
    paths = {checkpoint.iteration_of(path): path for path in checkpoint.find(out_dir)}
    return lines, paths, {iteration: checkpoint.read_state(path) for iteration, path in paths.items()}
