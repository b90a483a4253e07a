"""Goes back to a checkpoint after several spikes in a row, with on_spike=rollback."""
from kilogpt.configurator import exit_on_error
from kilogpt.parallel.apply import saved_parameters
from kilogpt.run import checkpoint
from kilogpt.run import Hook


class Rollback(Hook):
    """Goes back to the checkpoint before a row of spikes, and skips the batches since.

    run: the Run, whose hooks also continue from the checkpoint. save(): saves a checkpoint.
    """

    def __init__(self, run, save):
        self.guard, self.spikes, self.save = run.guard, run.guard.spikes, save
        self.out_dir = run.cluster.out_dir
        self._failed_at = 0  # the number of skipped updates when a checkpoint was last missing

    def is_due(self, run):
        return self.spikes.wants_rollback and self.spikes.skipped > self._failed_at

    def act(self, run):
        parallel, spikes = self.guard.parallel, self.spikes
        processes = parallel.processes
        with run.clock.paused():
            run.saver.wait()
            path, state = checkpoint.find_undamaged(self.out_dir, processes, newest=spikes.row_began)
            if not path:
                processes.say(f'cannot go back: there is no checkpoint of iteration {spikes.row_began} '
                              'or earlier; a smaller save_interval saves more of them')
                self._failed_at = spikes.skipped
                return False
            processes.say(f'{spikes.in_a_row} spikes in a row: going back to {path}, '
                          'to continue with the batches after the spikes')
            with exit_on_error():  # a checkpoint with NaN
                checkpoint.load(path, saved_parameters(parallel), self.guard.optimizer)
            run.hooks.restore(path, state, processes)
            parallel.zero_grad()
            parallel.balance.forget()
            run.restore(state, tokens=run.tokens)
            self.guard.scaler.load_state_dict(state['scaler'])
            problem = spikes.go_back(state)
            if problem:
                run.end('failed', problem, exit_code=1)
                return True
            # A run that resumes later must not find the checkpoints after this one, nor this checkpoint with
            # its former place in the data.
            self.save()
            checkpoint.delete_after(self.out_dir, run.iteration, processes)
        return True
