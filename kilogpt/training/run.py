"""A run of train.py: one object that has its state, and what guards, logs, saves and ends it."""
import signal
import sys
import time

from kilogpt.configurator import is_to_say
from kilogpt.keys.islands import are_on
from kilogpt.run import Hooks, checkpoint
from kilogpt.run.guard import Guard
from kilogpt.run.metrics import synchronize
from kilogpt.run.state import Ending, Progress

LEAST_ITERATIONS = 20  # of a run that says what bounds it


class Run(Progress):
    """A run of train.py, the same on all its processes. Prints what it is, and opens its folder.

    config: the keys of train.py. cluster: its Cluster. data: its TrainingData. start: its Start.
    parallel: the Parallel of the model. optimizer: that of this process. meter: its Meter.

    batches: the micro-batches of this process, a data.batches.Batches.
    guard: makes the updates. hooks: what acts between them, in their order.
    has_moved: whether a hook has just moved the run to another iteration.
    """

    def __init__(self, config, cluster, data, start, model, parallel, optimizer, meter):
        super().__init__(config, cluster.islands.island, start.saved)
        self.cluster, self.processes, self.data, self.start = cluster, cluster.processes, data, start
        self.model_config, self.parallel, self.optimizer, self.meter = model.config, parallel, optimizer, meter
        self.has_moved = False
        self.saves_checkpoints = not self.eval_only and (config['keep_checkpoints'] > 0 or config['eval_iters'] > 0)
        self.saves_in_background = (
            self.saves_checkpoints and config['async_checkpoint'] and not config['cpu_offload'])
        self.loader = data.train
        if config['loss'] in ('distill', 'rl'):
            from kilogpt.learn.loaders import open_loader
            self.loader = open_loader(self)
        self.batches = parallel.batches(self.loader, self.loader.train_batch, self.sequences, end=self.max_iters,
                                        share=cluster.replicas.share)
        parallel.warm_up(lambda: self.batches(self.iteration, 0))
        cluster.describe(config, data, model, parallel, optimizer, meter.size)
        if start.saved:
            self.processes.say(f'resuming {start.source} at iteration {self.iteration}')
        cluster.replicas.open_folder(self)
        self.log = cluster.replicas.log_class(
            cluster.folder.path, self.processes.is_main, config, start.saved.get('wandb_id'), self.iteration,
            self.island, prints=self.processes.is_first)
        self.saver = checkpoint.Saver(cluster.out_dir, config['keep_checkpoints'], cluster.islands.needed_checkpoint)
        self.signals = cluster.replicas.signals_class(
            self.processes, cluster.stop_request, cluster.watchdog, self.wants_save,
            lambda line: meter.write(self, line))
        self.guard = Guard(self)
        self.hooks = Hooks([cluster.islands] if are_on(config) else [])

    def open_folder(self):
        """Prepare the folder of the run. All processes that write there call this."""
        self.cluster.folder.begin(self.config, self.start.meta, self.start.source if self.start.saved else None,
                                  self.saves_checkpoints)

    def begin(self, save):
        """Add the hooks that keys ask for, and continue from the hooks' part of a checkpoint. save(): saves one."""
        config, saved = self.config, self.start.saved
        if config['on_spike'] == 'rollback':
            from kilogpt.run.rollback import Rollback
            self.hooks.append(Rollback(self, save))
        if config['events'] and not self.eval_only:
            from kilogpt.run.events import Events
            self.hooks.append(Events(self))
        if config['profile'] and self.processes.is_main:
            from kilogpt.run.profiler import Profiler
            self.hooks.append(Profiler(self))
        if config['eval_tasks'] or config['sample_interval']:
            from kilogpt.evaluate.hooks import evaluation_hooks
            self.hooks += evaluation_hooks(self)
        if config['loss'] == 'rl':
            from kilogpt.learn.rollouts import reward_hooks
            self.hooks += reward_hooks(self)
        if saved:
            self.guard.load_state(saved)
            self.hooks.restore(self.start.source, saved, self.processes)
        self.cluster.islands.begin(self)
        self.cluster.replicas.attach(self, save)
        self.clock.start_lap(self.iteration)

    # --- what is due ----------------------------------------------------------------------------------------

    def is_due(self):
        """Whether anything other than an update has to be done now."""
        self.cluster.replicas.begin()
        return (self.ending or self.signals.stop or self._is_at_evaluation or self._save_is_due
                or self.hooks.are_due(self))

    def settle(self):
        """Wait until the last update is made or skipped; then let the hooks act that are due."""
        self.signals.flush()
        synchronize(self.processes.device)  # work still under way counts as training time
        self.guard.settle()  # now the last update is made or skipped, or the run ends before it
        self._end_if_stopped()
        self.has_moved = not self.ending and self.hooks.act(self)

    @property
    def _is_at_evaluation(self):
        at_interval = self.iteration % self.config['eval_interval'] == 0
        return self.eval_only or at_interval or self.iteration >= self.max_iters  # above it if max_iters was lowered

    @property
    def evaluates(self):
        """Whether to evaluate the current iteration."""
        is_wanted = self.config['eval_iters'] > 0 and self.evaluated_at != self.iteration
        return self._is_at_evaluation and is_wanted and not self.ending

    def wants_save(self):
        """Whether the last checkpoint is older than save_minutes by the clock of this process."""
        seconds = 60 * self.config['save_minutes'] * self.saves_checkpoints
        return seconds > 0 and time.monotonic() - self.saved_time >= seconds

    @property
    def _save_is_due(self):
        interval = self.config['save_interval']
        return self.signals.save_requested or (interval and self.iteration % interval == 0)

    @property
    def saves(self):
        """Whether to save a checkpoint now. A failed save is tried again at the end of the run."""
        is_unsaved = self.iteration > self.saved_iteration or (self.ending and self.saver.problem)
        is_wanted = self._is_at_evaluation and (self.config['always_save_checkpoint'] or self.has_improved)
        return self.saves_checkpoints and is_unsaved and (self.ending or self._save_is_due or is_wanted)

    def stops(self):
        """Before a micro-batch: whether any process has received a signal to stop."""
        return self.signals.poll()

    def may_update(self, loss_sum):
        """After the micro-batches: whether their gradients are complete, and the next update is to be made.

        loss_sum: as in `advance`. The device has made the previous update long ago, so the guard does not wait here.
        """
        return not self.signals.stop and self.guard.settle() and self.cluster.replicas.add_up(loss_sum)

    # --- what happens ---------------------------------------------------------------------------------------

    def advance(self, lr, loss_sum, grad_norm, n_targets, **figures):
        """Count an update, and log it if log_interval says so.

        loss_sum: the sum of the losses of this process's tokens. n_targets: those of all processes.
        figures: further values for the line of the log.
        """
        n_tokens, sums = self.batch * self.block_size, self.parallel.pop_sums()
        self.hooks.after_update()
        self.count_update()
        self.cluster.watchdog.first_iteration_done()
        if self.saves_in_background and self.cluster.replicas.is_lead and not self.saver.host_copies:
            self.saver.allocate(self.cluster.islands.parameters(), self.optimizer, self.hooks.tensors())
        line = None
        if self.iteration % self.config['log_interval'] == 0:
            synchronize(self.processes.device)
            if not self.guard.settle():
                return
            line = self.meter.line(self, n_tokens, n_targets, lr, loss_sum, grad_norm, sums,
                                   self.guard.figures() | self.cluster.replicas.figures() | figures)
        self.signals.exchange(line)
        self.log.save_written(self.iteration, self.clock.now())

    def note(self, losses):
        """Record and log the losses of an evaluation; None if a signal has interrupted it."""
        if losses:
            self.note_loss(losses['val_loss'])
            self.evaluated_at = self.iteration
            self.log.eval(self.meter.stamp(self) | losses | self.parallel.balance.loads())

    def write(self, state, in_background):
        """Save a checkpoint of the current iteration. The log has its line once it is written.

        state: what state.json keeps besides the states of this run.
        """
        if self.cluster.replicas.is_lead:
            self._write(state, in_background)
        self.saved_iteration, self.saved_time = self.iteration, time.monotonic()
        self.signals.forget_save_request()

    def _write(self, state, in_background):
        state = self.progress() | self.guard.state() | self.hooks.state() | dict(
            wandb_id=self.log.wandb_id, machine=self.processes.machine()) | state
        with self.cluster.watchdog.waits_for_storage():
            self.saver.wait()
            self.log.save_written(self.iteration, self.clock.now())
            began = time.perf_counter()
            path = self.saver.save(self.iteration, self.cluster.islands.parameters(), self.optimizer, state,
                                   in_background and self.saves_in_background, self.hooks.tensors())
            self.log.save_started(self.saver, path, self.iteration, time.perf_counter() - began, self.clock.now())

    # --- how it ends ----------------------------------------------------------------------------------------

    def end_if_due(self):
        """End the run if any process has received a signal to stop, or if all updates are made."""
        self._end_if_stopped()
        self.end_if_finished()

    def _end_if_stopped(self):
        if self.signals.stop:
            resumes = '; --init_from=resume continues from here' if self.iteration else ''
            name = signal.Signals(self.signals.stop).name
            self.end('stopped', f'stopped by {name} at iteration {self.iteration}{resumes}', 143)

    def leave(self):
        """Wait for the last save, close the log, say what bounded the run, and end this process with its exit code."""
        with self.cluster.watchdog.waits_for_storage():
            self.saver.wait()
        self.log.save_written(self.iteration, self.clock.now())
        if self.saver.problem and self.ending.reason != 'failed':
            self.ending = Ending('failed', f'the run ended at iteration {self.iteration}, but its last checkpoint '
                                 f'could not be saved ({self.saver.problem})', 1)
        self.cluster.replicas.finish()
        self.hooks.close()
        self.log.close()
        is_told = self.processes.is_first and not self.config['profile'] and not are_on(self.config)
        if is_told and self.meter.iterations >= LEAST_ITERATIONS:  # waits for other islands have no share
            from kilogpt.run.verdict import verdict_of_run
            self.processes.say(verdict_of_run(self))
        if self.ending.reason == 'stopped':
            self.processes.say(self.ending.message)
        sentence = f'error: {self.ending.message}'
        if self.ending.reason == 'failed' and self.processes.is_main and is_to_say(sentence):
            print(sentence, file=sys.stderr, flush=True)
        self.processes.leave(self.ending.exit_code)
