"""Which updates of the optimizer are made: not those of gradients that are not finite, or far too large."""
import math
import statistics
from typing import NamedTuple

import torch

from kilogpt import checkpoint
from kilogpt.run import Hook, restore_hooks

NO_LIMIT = torch.finfo(torch.float32).max  # infinity is above this limit, and NaN is not below it
MOST_SKIPPED = 9  # updates in a row that on_nonfinite=skip leaves out before the run fails


class Update(NamedTuple):
    """An update by the optimizer, which is left out unless the gradient's norm is at most the limit."""
    iteration: int  # finished updates before this one
    lr: float
    loss_sum: torch.Tensor  # the losses of this process's tokens, added up
    grad_norm: torch.Tensor  # the norm of all gradients on all processes
    limit: float


class Guard:
    """Makes the updates of a run's optimizer, and leaves out those that must not be made.

    `step` makes an update, or leaves it out where the gradient's norm is NaN, infinite or above the limit. On a
    device that decides by itself, the host does not wait for the norm: it learns in `settle`, before the next
    update, what was decided.

    on_nonfinite: 'abort', or 'skip' (up to MOST_SKIPPED in a row). on_spike: 'none', 'skip' or 'rollback', as in
    Spikes, with spike_factor. dtype: with 'float16' a GradScaler scales losses, so that an infinite gradient is
    not an error, but an infinite loss is.
    log, loader: the run's metrics.Metrics and TokenLoader, which tell the text of an update that was left out.
    """

    def __init__(self, run, parallel, optimizer, dtype, log, loader, on_nonfinite, on_spike, spike_factor):
        self.run, self.parallel, self.optimizer = run, parallel, optimizer
        device = parallel.processes.device
        self.scaler = torch.amp.GradScaler(device.type, enabled=dtype == 'float16')
        self.log, self.loader, self.on_nonfinite = log, loader, on_nonfinite
        self.spikes = Spikes(on_spike, spike_factor)
        self.skipped = self.skipped_in_a_row = 0  # updates whose gradient or loss was not finite
        self.last_update = None  # the last Update, until it is known whether it was made
        self.say = parallel.processes.say
        # For an optimizer from elsewhere, the host waits for the norm and decides.
        self._skips_on_device = getattr(optimizer, 'skips_on_device', False)

    def state(self):
        """What a checkpoint keeps."""
        return dict(skipped=[self.skipped, self.skipped_in_a_row], spikes=self.spikes.state(),
                    scaler=self.scaler.state_dict())

    def load_state(self, state):
        self.skipped, self.skipped_in_a_row = state.get('skipped', [0, 0])
        self.spikes.load_state(state.get('spikes', {}))
        self.scaler.load_state_dict(state['scaler'])

    def scale(self, loss):
        """The loss whose gradients are computed."""
        return self.scaler.scale(loss)

    def step(self, lr, loss_sum, grad_clip):
        """Clip the gradients and make the update, or leave it out; returns the norm before clipping.

        loss_sum: the losses of this process's tokens, added up.
        """
        self.scaler.unscale_(self.optimizer)
        limit = self.spikes.limit()
        grad_norm = self.parallel.clip_gradients(grad_clip, limit)
        is_made = (grad_norm <= limit).float()  # 0 for NaN and infinity too
        if self._skips_on_device:
            # A GradScaler's own decision covers overflows alone, and is replaced just before the step.
            hook = self.optimizer.register_step_pre_hook(
                lambda optimizer, *_: setattr(optimizer, 'found_inf', 1 - is_made))
            self.scaler.step(self.optimizer)
            hook.remove()
        elif is_made:
            self.scaler.step(self.optimizer)
        self.scaler.update()
        self.parallel.balance.update(is_made)
        self.parallel.zero_grad()
        self.last_update = Update(self.run.iteration, lr, loss_sum, grad_norm, limit)
        return grad_norm

    def settle(self):
        """Wait until the last update is made or left out. Returns whether training goes on from there.

        If it does not, the run ends before that update, or a Rollback is due.
        """
        update, self.last_update = self.last_update, None
        if update is None:
            return not self.run.ending
        problem = self._check_finite(update)
        if problem:
            self.run.iteration = update.iteration  # a run that resumes from here comes to that update again
            self.run.end('failed', problem, exit_code=1)
            return False
        what = self.spikes.check(update)
        if what:
            path = self._write_down('spike', update, what)
            self.say(f'the {what}: update skipped ({self.spikes.skipped} so far), its batch is in {path}')
        return not self.spikes.wants_rollback

    def figures(self):
        """What the log's line of an update says besides its loss: the experts' balance, spikes so far."""
        figures = self.parallel.balance.load_max()
        if self.spikes.on_spike != 'none':
            figures['spikes'] = self.spikes.skipped
        return figures

    def _write_down(self, kind, update, what):
        """Write down the batch of an update that was left out; returns the path of the file."""
        losses = self.parallel.processes.gather(update.loss_sum.item())
        starts = self.loader.train_starts(self.run.sequences(update.iteration))
        return self.log.dump(f'{kind}_{update.iteration + 1:08d}.json', dict(
            iteration=update.iteration + 1, what=what, lr=update.lr, losses=losses,
            block_size=self.loader.block_size, sequences=self.loader.where(starts)))

    def _check_finite(self, update):
        """Count an update that was left out, and say so; returns why the run cannot continue, or None."""
        # The norm is that of all gradients on all processes, but each process has a loss of its own.
        decides_by_loss = self.scaler.is_enabled()
        value = self.parallel.sum_losses(update.loss_sum) if decides_by_loss else update.grad_norm.item()
        if math.isfinite(value):
            self.skipped_in_a_row = 0
            return None
        quantity = 'loss' if decides_by_loss else 'gradient norm'
        what = f'{quantity} of iteration {update.iteration + 1} is {value}'
        path = self._write_down('nonfinite', update, what)
        if self.on_nonfinite == 'skip' and self.skipped_in_a_row < MOST_SKIPPED:
            self.skipped += 1
            self.skipped_in_a_row += 1
            self.say(f'the {what}: update skipped ({self.skipped} so far), its batch is in {path}')
            return None
        after = f', after {self.skipped_in_a_row} that were skipped' if self.skipped_in_a_row else ''
        return (f'the {what}{after}: the update was not made, its batch is in {path}; '
                'try a lower learning_rate, or --on_nonfinite=skip if it is the data')


class Spikes:
    """Decides which finite gradients are too large for an update.

    A spike is a gradient norm of more than `factor` times the median of the last WINDOW finite ones. Spikes are
    among those too, so that norms that have risen for good are the usual ones after a while. All processes know
    the norms, and decide the same.

    on_spike: 'none', 'skip' (leave the update out), or 'rollback', which also goes back to a checkpoint after
    IN_A_ROW spikes in a row.
    """
    WINDOW = 128
    LEAST = 16  # norms, with fewer of which a median says little: there are no spikes before
    IN_A_ROW = 4
    MOST_RETURNS = 3  # to one checkpoint: by then the batches are not the cause

    def __init__(self, on_spike, factor):
        self.on_spike, self.factor = on_spike, factor
        self.norms = []
        self.skipped = 0  # updates so far
        self.row_began, self.in_a_row = 0, 0  # finished updates before the present row, and its length
        self.returned_to, self.n_returns = -1, 0  # the last iteration that the run went back to, how often

    def state(self):
        """What a checkpoint keeps."""
        return dict(norms=self.norms, skipped=self.skipped, row_began=self.row_began, in_a_row=self.in_a_row,
                    returned_to=self.returned_to, n_returns=self.n_returns)

    def load_state(self, state):
        self.norms = list(state.get('norms', []))
        for key in state.keys() - {'norms'}:
            setattr(self, key, state[key])

    def limit(self):
        """The greatest gradient norm with which the next update is made."""
        if self.on_spike == 'none' or len(self.norms) < self.LEAST:
            return NO_LIMIT
        return self.factor * statistics.median(self.norms)

    def check(self, update):
        """What is wrong with an update whose gradient was too large, in words; None for others."""
        norm = update.grad_norm.item() if self.on_spike != 'none' else math.nan
        if not math.isfinite(norm):  # the guard has decided already
            return None
        self.norms = [*self.norms, norm][-self.WINDOW:]
        if norm <= update.limit:
            self.in_a_row = 0
            return None
        if self.in_a_row == 0:
            self.row_began = update.iteration
        self.in_a_row += 1
        self.skipped += 1
        return (f'gradient norm of iteration {update.iteration + 1} is {norm:.4g}, above {update.limit:.4g} '
                f'(spike_factor={self.factor:g} times the usual)')

    @property
    def wants_rollback(self):
        """Whether so many updates in a row were spikes that the run is to go back to a checkpoint."""
        return self.on_spike == 'rollback' and self.in_a_row >= self.IN_A_ROW

    def go_back(self, state):
        """Take over the state of the checkpoint that the run goes back to.

        Returns why the run must end, or None.
        """
        iteration, skipped = state['iteration'], self.skipped
        n_returns = self.n_returns + 1 if iteration == self.returned_to else 1
        self.load_state(state.get('spikes', {}))
        self.skipped, self.in_a_row = skipped, 0
        self.returned_to, self.n_returns = iteration, n_returns
        if n_returns > self.MOST_RETURNS:
            return (f'the gradient norm has spiked {self.IN_A_ROW} times in a row after each of '
                    f'{self.MOST_RETURNS} returns to iteration {iteration}, with other batches each time: '
                    'try a lower learning_rate or a higher spike_factor')


class Rollback(Hook):
    """Goes back to the checkpoint before a row of spikes, and leaves out the batches since (on_spike=rollback).

    hooks: all hooks of the run, which continue from the checkpoint too. save(): saves one in the foreground.
    """

    def __init__(self, guard, out_dir, saver, hooks, save):
        self.guard, self.spikes, self.out_dir, self.saver = guard, guard.spikes, out_dir, saver
        self.hooks, self.save = hooks, save
        self._failed_at = 0  # spikes so far when there was no checkpoint to go back to

    def is_due(self, run):
        return self.spikes.wants_rollback and self.spikes.skipped > self._failed_at

    def act(self, run):
        parallel, spikes = self.guard.parallel, self.spikes
        processes = parallel.processes
        with run.clock.paused():
            self.saver.wait()
            path, state = checkpoint.find_undamaged(self.out_dir, processes, newest=spikes.row_began)
            if not path:
                processes.say(f'there is no checkpoint of iteration {spikes.row_began} or before to go back to; '
                              '--save_interval makes more of them')
                self._failed_at = spikes.skipped
                return False
            processes.say(f'{spikes.in_a_row} spikes in a row: going back to {path}, '
                          'and on with the batches behind them')
            checkpoint.load(path, parallel.named_parameters(), self.guard.optimizer)
            restore_hooks(self.hooks, path, state, processes)
            parallel.zero_grad()
            parallel.balance.forget()
            run.restore(state, tokens=run.tokens)
            self.guard.scaler.load_state_dict(state['scaler'])
            problem = spikes.go_back(state)
            if problem:
                run.end('failed', problem, exit_code=1)
                return True
            # A run that resumes from now on must find neither what came after this checkpoint, nor the place in
            # the data that this checkpoint had before.
            self.save()
            checkpoint.delete_after(self.out_dir, run.iteration, processes)
        return True
