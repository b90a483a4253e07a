"""The parts of a run of train.py: state, log, hooks, guard, signals, watchdog and checkpoints. Start with state.py.

A hook acts between the iterations of a run. To add one, write a subclass of Hook and append it to `hooks` in
train.py.
"""
import contextlib

from kilogpt.run import checkpoint


class Hook:
    """Acts between the iterations of a run. A subclass defines the methods that it needs.

    All processes call the same methods at the same iteration, so that a method may use collectives.
    """

    @property
    def name(self):
        """The name under which checkpoints keep the state of this hook."""
        return type(self).__name__

    def is_due(self, run):
        """Whether to call `act` before the next update. All processes must return the same."""
        return False

    def act(self, run):
        """Act between two updates, when no other work is under way.

        Returns whether the hook has moved the run to another iteration, from which the run then continues.
        """
        return False

    def after_update(self):
        """Called after each update, even if the guard has skipped it."""

    def weights_for_evaluation(self):
        """A context in which the model has the weights that are to be evaluated."""
        return contextlib.nullcontext()

    def state(self):
        """Plain values for a checkpoint to keep, or None. A resumed run passes them to `load_state`."""

    def load_state(self, state):
        """Continue from the values that `state` returned when the checkpoint was saved."""

    def tensors(self):
        """[(key, tensor)] for a checkpoint to keep. A resumed run fills these tensors in place.

        The hook chooses the keys, such as f'{self.name}.{name of a parameter}'. A tensor is a DTensor, or has
        the same values on all processes that have its key.
        """
        return []

    def close(self):
        """Called when the run ends, after its last checkpoint."""

    def restore(self, path, state, processes):
        """Continue from a checkpoint, or say that it was saved without this hook. All processes call this.

        path: the checkpoint. state: the content of its state.json.
        """
        tensors, keeps_state = self.tensors(), self.state() is not None
        stored = checkpoint.stored_tensors(path) if tensors else {}
        lacks_state = keeps_state and self.name not in state
        if processes.any(lacks_state or any(key not in stored for key, _ in tensors)):
            processes.say(f'{path} was saved without {self.name}, which starts as in a new run')
            return
        if keeps_state:
            self.load_state(state[self.name])
        if tensors:
            checkpoint.load_tensors(path, tensors)


class Hooks(list):
    """The hooks of a run, in the order in which they act."""

    def are_due(self, run):
        """Whether any hook acts before the next update."""
        return any(hook.is_due(run) for hook in self)

    def act(self, run):
        """Let those that are due act; returns whether one has moved the run to another iteration."""
        return any([hook.act(run) for hook in self if hook.is_due(run)])

    def after_update(self):
        for hook in self:
            hook.after_update()

    @contextlib.contextmanager
    def weights_for_evaluation(self):
        """A context in which the model has the weights that the hooks choose for evaluation."""
        with contextlib.ExitStack() as contexts:
            for hook in self:
                contexts.enter_context(hook.weights_for_evaluation())
            yield

    def state(self):
        """{name of a hook: its state} for the state.json of a checkpoint."""
        states = {hook.name: hook.state() for hook in self}
        return {name: state for name, state in states.items() if state is not None}

    def tensors(self):
        """[(key, tensor)] of all hooks for a checkpoint."""
        return [pair for hook in self for pair in hook.tensors()]

    def restore(self, path, state, processes):
        """Let all hooks continue from a checkpoint. state: the content of its state.json."""
        for hook in self:
            hook.restore(path, state, processes)

    def close(self):
        for hook in self:
            hook.close()
