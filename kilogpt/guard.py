"""Which updates of the optimizer are made: not those of gradients that are not finite, or far too large."""
import math
import statistics
from typing import NamedTuple

import torch

NO_LIMIT = torch.finfo(torch.float32).max  # infinity is above this limit, and NaN is not below it


class Update(NamedTuple):
    """An update by the optimizer. The device itself leaves it out unless the norm is at most the limit."""
    iteration: int  # finished updates before this one
    lr: float
    loss_sum: torch.Tensor  # the losses of this process's tokens, added up
    grad_norm: torch.Tensor  # the norm of all gradients on all processes
    limit: float


class NonfiniteUpdates:
    """Decides whether a run continues where the loss or gradient of an update may be NaN or infinite.

    on_nonfinite: 'abort', or 'skip' (up to 9 in a row). parallel: the Parallel that sums losses.
    report(update, what): writes down the update's batch and returns the name of the file.
    has_scaler: the loss decides, since a gradient scaler (float16) mends gradients that overflow.
    """

    def __init__(self, on_nonfinite, parallel, report, has_scaler, skipped=0, skipped_in_a_row=0):
        self.on_nonfinite, self.has_scaler = on_nonfinite, has_scaler
        self.parallel, self.report = parallel, report
        self.skipped, self.skipped_in_a_row = skipped, skipped_in_a_row
        self.problem = None  # why the run cannot continue, once an update was fatal

    def check(self, update):
        """'applied', 'skipped' or 'fatal', the same on all processes; 'applied' for an update of None.

        Waits until the device has made or skipped the update.
        """
        if update is None:
            return 'applied'
        # The norm is that of all gradients on all processes, but each process has a loss of its own.
        value = self.parallel.sum_losses(update.loss_sum) if self.has_scaler else update.grad_norm.item()
        if math.isfinite(value):
            self.skipped_in_a_row = 0
            return 'applied'
        quantity = 'loss' if self.has_scaler else 'gradient norm'
        what = f'{quantity} of iteration {update.iteration + 1} is {value}'
        path = self.report(update, what)
        if self.on_nonfinite == 'skip' and self.skipped_in_a_row < 9:
            self.skipped += 1
            self.skipped_in_a_row += 1
            self.parallel.processes.say(
                f'the {what}: update skipped ({self.skipped} so far), its batch is in {path}')
            return 'skipped'
        after = f', after {self.skipped_in_a_row} that were skipped' if self.skipped_in_a_row else ''
        self.problem = (f'the {what}{after}: the update was not made, its batch is in {path}; '
                        'try a lower learning_rate, or --on_nonfinite=skip if it is the data')
        return 'fatal'


class Spikes:
    """Decides which finite gradients are too large for an update, and when the run goes back to a checkpoint.

    A spike is a gradient norm of more than `factor` times the median of the last WINDOW finite ones. Spikes
    are among those too: after a while, norms that have risen for good are the usual ones. All processes know
    the norms, and decide alike.

    on_spike: 'none', 'skip' (leave the update out), or 'rollback', which also goes back to a checkpoint
    after IN_A_ROW spikes in a row. report(update, what): writes down the update's batch and returns the name
    of the file. say(text): prints. state: what `state` returned in the checkpoint that the run resumes.
    """
    WINDOW = 128
    LEAST = 16  # norms without which a median says little: there are no spikes before
    IN_A_ROW = 4
    MOST_RETURNS = 3  # to one checkpoint: by then the batches are not the cause

    def __init__(self, on_spike, factor, report, say, state):
        self.on_spike, self.factor, self.report, self.say = on_spike, factor, report, say
        self.skipped = 0  # updates so far
        self.row_began, self.in_a_row = 0, 0  # finished updates before the present row, and its length
        self.returned_to, self.n_returns = -1, 0  # the last iteration that the run went back to, how often
        self.load(state)

    def state(self):
        """What a checkpoint keeps."""
        return dict(norms=self.norms, skipped=self.skipped, row_began=self.row_began, in_a_row=self.in_a_row,
                    returned_to=self.returned_to, n_returns=self.n_returns)

    def load(self, state):
        self.norms = list(state.get('norms', []))
        for key in state.keys() - {'norms'}:
            setattr(self, key, state[key])

    def limit(self):
        """The greatest gradient norm with which the next update is made."""
        if self.on_spike == 'none' or len(self.norms) < self.LEAST:
            return NO_LIMIT
        return self.factor * statistics.median(self.norms)

    def check(self, update):
        """Whether the run is to go back to a checkpoint. update: None, or one that the device has checked."""
        if update is None or self.on_spike == 'none':
            return False
        norm = update.grad_norm.item()
        if not math.isfinite(norm):  # NonfiniteUpdates decides
            return False
        self.norms = [*self.norms, norm][-self.WINDOW:]
        if norm <= update.limit:
            self.in_a_row = 0
            return False
        if self.in_a_row == 0:
            self.row_began = update.iteration
        self.in_a_row += 1
        self.skipped += 1
        what = (f'gradient norm of iteration {update.iteration + 1} is {norm:.4g}, above {update.limit:.4g} '
                f'(spike_factor={self.factor:g} times the usual)')
        path = self.report(update, what)
        self.say(f'the {what}: update skipped ({self.skipped} so far), its batch is in {path}')
        return self.on_spike == 'rollback' and self.in_a_row >= self.IN_A_ROW

    def go_back(self, state):
        """Take over the state of the checkpoint that the run goes back to.

        Returns why the run must end, or None.
        """
        iteration, skipped = state['iteration'], self.skipped
        n_returns = self.n_returns + 1 if iteration == self.returned_to else 1
        self.load(state.get('spikes', {}))
        self.skipped, self.in_a_row = skipped, 0
        self.returned_to, self.n_returns = iteration, n_returns
        if n_returns > self.MOST_RETURNS:
            return (f'the gradient norm has spiked {self.IN_A_ROW} times in a row after each of '
                    f'{self.MOST_RETURNS} returns to iteration {iteration}, with other batches each time: '
                    'try a lower learning_rate or a higher spike_factor')
