"""Skips updates of the optimizer whose gradients are not finite or far too large."""
import math
import statistics
from typing import NamedTuple

import torch
from torch.profiler import record_function

from kilogpt.optim import set_lr
from kilogpt.run.metrics import HostCopy

NO_LIMIT = torch.finfo(torch.float32).max  # any finite norm is at most this; infinity and NaN are not
# {quantity: what it often is if it is not finite, and what to do}
OFTEN = {
    'loss': 'try a lower learning_rate, or a loss that leaves out logits of -inf, such as those of padding',
    'gradient norm': 'try a lower learning_rate, or no root, logarithm or quotient at 0'}
MOST_SKIPPED = 9  # how many updates in a row on_nonfinite=skip skips before the run fails


class Update(NamedTuple):
    """An update of the optimizer, which is skipped unless grad_norm is at most the limit."""
    iteration: int  # the number of finished updates before this one
    lr: float
    loss_sum: HostCopy  # the sum of the losses of this process's tokens
    grad_norm: HostCopy  # the norm of all gradients on all processes
    limit: float


class Guard:
    """Makes the updates of the optimizer, and skips those that would damage the model.

    `step` skips an update if the gradient norm is NaN, infinite or above the limit. If the device makes this
    decision, the host does not wait for the norm: it learns the decision in `settle`, before the next update.

    run: the Run. Its key on_nonfinite is 'abort', or 'skip' (up to MOST_SKIPPED in a row). With the dtype float16
    a GradScaler scales the loss. Then an infinite loss is an error, but an infinite gradient is not.
    """

    def __init__(self, run):
        self.run, self.parallel, self.optimizer = run, run.parallel, run.optimizer
        self.scaler = torch.amp.GradScaler(run.processes.device.type, enabled=run.cluster.dtype == 'float16')
        self.log, self.loader, self.on_nonfinite = run.log, run.data.train, run.config['on_nonfinite']
        self.spikes = Spikes(run.config['on_spike'], run.config['spike_factor'])
        self.skipped = self.skipped_in_a_row = 0  # updates whose gradient or loss was not finite
        self.last_update = None  # the last Update, until `settle` knows whether it was made
        self.say = run.processes.say
        # For an optimizer that cannot skip on the device, the host waits for the norm and decides.
        self._skips_on_device = getattr(run.optimizer, 'skips_on_device', False)

    def state(self):
        """The values of the guard that a checkpoint keeps."""
        return dict(skipped=[self.skipped, self.skipped_in_a_row], spikes=self.spikes.state(),
                    scaler=self.scaler.state_dict())

    def load_state(self, state):
        self.skipped, self.skipped_in_a_row = state.get('skipped', [0, 0])
        self.spikes.load_state(state.get('spikes', {}))
        self.scaler.load_state_dict(state['scaler'])

    def scale(self, loss):
        """The loss whose gradients are computed."""
        return self.scaler.scale(loss)

    @record_function('optimizer')
    def step(self, lr, loss_sum, grad_clip):
        """Clip the gradients, and make or skip the update; returns the norm before clipping.

        loss_sum: the sum of the losses of this process's tokens.
        """
        processes = self.parallel.processes
        began = processes.device_time()
        set_lr(self.optimizer, lr)
        self.scaler.unscale_(self.optimizer)
        limit = self.spikes.limit()
        grad_norm = self.parallel.clip_gradients(grad_clip, limit)
        is_made = (grad_norm <= limit).float()  # 0 for NaN and infinity too
        if self._skips_on_device:
            # The decision of the GradScaler is about overflows only. A hook replaces it just before the step.
            hook = self.optimizer.register_step_pre_hook(
                lambda optimizer, *_: setattr(optimizer, 'found_inf', 1 - is_made))
            self.scaler.step(self.optimizer)
            hook.remove()
        elif is_made:
            self.scaler.step(self.optimizer)
        self.scaler.update()
        self.parallel.balance.update(is_made)
        self.parallel.zero_grad()
        processes.record_wait(began, processes.device_time(), 'optimizer')
        self.last_update = Update(self.run.iteration, lr, HostCopy(loss_sum), HostCopy(grad_norm), limit)
        return grad_norm

    def settle(self):
        """Wait until the last update is made or skipped. Returns whether training continues from there.

        If training does not continue, the run ends before that update, or a Rollback is due.
        """
        update, self.last_update = self.last_update, None
        if update is None:
            return not self.run.ending
        problem = self._check_finite(update)
        if problem:
            self.run.iteration = update.iteration  # a run that resumes makes this update again
            self.run.end('failed', problem, exit_code=1)
            return False
        spike = self.spikes.check(update)
        if spike:
            path = self._write_down('spike', update, spike)
            self.say(f'the {spike}: update skipped ({self.spikes.skipped} so far), its batch is in {path}')
        return not self.spikes.wants_rollback

    def figures(self):
        """What a line of the log has besides the loss: the experts' balance, and skipped spikes so far."""
        figures = self.parallel.balance.load_max()
        if self.spikes.on_spike != 'none':
            figures['spikes'] = self.spikes.skipped
        return figures

    def _write_down(self, kind, update, problem):
        """Write down the batch of a skipped update; returns the path of the file."""
        losses = self.parallel.processes.gather(update.loss_sum.item())
        starts = self.loader.train_starts(self.run.sequences(update.iteration))
        return self.log.dump(f'{kind}_{update.iteration + 1:08d}.json', dict(
            iteration=update.iteration + 1, what=problem, lr=update.lr, losses=losses,
            block_size=self.loader.block_size, sequences=self.loader.where(starts)))

    def check(self, loss_sum, key):
        """The sum of an evaluation's losses; if it is not finite, the run ends, or goes on with a warning."""
        if not math.isfinite(loss_sum):
            problem = f'the {key} of iteration {self.run.iteration} is {loss_sum}: {OFTEN["loss"]}'
            if self.on_nonfinite == 'abort':
                self.run.end('failed', problem, exit_code=1)
            else:
                self.say(f'warning: {problem}')
        return loss_sum

    def _check_finite(self, update):
        """Count and report an update that was not finite; returns why the run cannot continue, or None."""
        # The norm is already that of all gradients on all processes, while each process has its own loss.
        decides_by_loss = self.scaler.is_enabled()
        quantity, value = 'gradient norm', update.grad_norm.item()
        if decides_by_loss or not math.isfinite(value):
            loss_sum = self.parallel.sum_losses(update.loss_sum)
            if decides_by_loss or not math.isfinite(loss_sum):
                quantity, value = 'loss', loss_sum
        if math.isfinite(value):
            self.skipped_in_a_row = 0
            return None
        problem = f'{quantity} of iteration {update.iteration + 1} is {value}'
        path = self._write_down('nonfinite', update, problem)
        if self.on_nonfinite == 'skip' and self.skipped_in_a_row < MOST_SKIPPED:
            self.skipped += 1
            self.skipped_in_a_row += 1
            self.say(f'the {problem}: update skipped ({self.skipped} so far), its batch is in {path}')
            return None
        after = f', after {self.skipped_in_a_row} that were skipped' if self.skipped_in_a_row else ''
        return (f'the {problem}{after}: the update was not made, its batch is in {path}; {OFTEN[quantity]}, '
                'or --on_nonfinite=skip if it is the data')


class Spikes:
    """Decides which finite gradients are too large for an update.

    A spike is a gradient norm above `factor` times the median of the last WINDOW finite norms. This window
    includes spikes, so that the limit follows norms that have risen for good. All processes know the norms
    and make the same decision.

    on_spike: 'none', 'skip' (skip the update), or 'rollback', which also goes back to a checkpoint after
    IN_A_ROW spikes in a row.
    """
    WINDOW = 128
    MIN_NORMS = 16  # with fewer norms the median says little, so that no norm counts as a spike
    IN_A_ROW = 4
    MAX_RETURNS = 3  # after this many returns to one checkpoint, the batches are not the cause

    def __init__(self, on_spike, factor):
        self.on_spike, self.factor = on_spike, factor
        self.norms = []
        self.skipped = 0  # the number of skipped updates so far
        self.row_began, self.in_a_row = 0, 0  # the iteration before the current row of spikes, and its length
        self.returned_to, self.n_returns = -1, 0  # the last iteration gone back to, how often

    def state(self):
        """The values that a checkpoint keeps."""
        return dict(norms=self.norms, skipped=self.skipped, row_began=self.row_began, in_a_row=self.in_a_row,
                    returned_to=self.returned_to, n_returns=self.n_returns)

    def load_state(self, state):
        self.norms = list(state.get('norms', []))
        for key in state.keys() - {'norms'}:
            setattr(self, key, state[key])

    def limit(self):
        """The largest gradient norm with which the next update is made."""
        if self.on_spike == 'none' or len(self.norms) < self.MIN_NORMS:
            return NO_LIMIT
        return self.factor * statistics.median(self.norms)

    def check(self, update):
        """Count an update whose gradient was a spike; returns a description of the spike, or None."""
        if self.on_spike == 'none':
            return None
        norm = update.grad_norm.item()
        if not math.isfinite(norm):  # Guard handles such a norm
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
        """Whether there were enough spikes in a row for the run to go back to a checkpoint."""
        return self.on_spike == 'rollback' and self.in_a_row >= self.IN_A_ROW

    def go_back(self, state):
        """Continue from the state of the checkpoint that the run goes back to.

        Returns why the run must end, or None.
        """
        iteration, skipped = state['iteration'], self.skipped
        n_returns = self.n_returns + 1 if iteration == self.returned_to else 1
        self.load_state(state.get('spikes', {}))
        self.skipped, self.in_a_row = skipped, 0
        self.returned_to, self.n_returns = iteration, n_returns
        if n_returns > self.MAX_RETURNS:
            return (f'the gradient norm has spiked {self.IN_A_ROW} times in a row after each of '
                    f'{self.MAX_RETURNS} returns to iteration {iteration}, with other batches each time: '
                    'try a lower learning_rate or a higher spike_factor')
        return None
