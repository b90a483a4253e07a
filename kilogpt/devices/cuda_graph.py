"""The passes of a micro-batch as one CUDA graph, which the host launches in a single call.

One by one, the thousand kernels of a micro-batch of GPT-2 take the host longer to launch than a fast GPU takes
to run them (LOG.md).
"""
import warnings

import torch


class GraphedPasses:
    """Replays `passes(batch, loss_scale)`, which adds gradients to parameters and returns the loss.

    batch: a tuple of tensors. loss_scale: a number. holders: the objects whose attributes passes reads, such as
    modules. If one of their numbers or texts changes after `record`, or with another loss_scale or a batch of
    another shape, passes runs as without a graph. What it takes from elsewhere, such as a global variable,
    keeps the value that it had at `record`.
    """

    def __init__(self, passes, parameters, holders):
        self.passes, self.parameters, self.holders = passes, list(parameters), list(holders)
        self.problem = None  # why `record` did not succeed
        self._graph = None
        self._recorded = None  # what the graph was recorded for
        self._gradients = []  # [(parameter, the gradient to which the graph adds)]

    def record(self, batch, loss_scale):
        """Record the passes of a batch like those to come. They have run before, and parameters lose gradients."""
        with warnings.catch_warnings():
            warnings.simplefilter('ignore')  # about how new this mode is
            torch.cuda.set_sync_debug_mode('error')
        try:  # a wait for the device during the recording itself would be beyond repair
            self.passes(batch, loss_scale)
        except RuntimeError as error:
            self.problem = str(error).splitlines()[0]
            return
        finally:
            torch.cuda.set_sync_debug_mode('default')
        self._gradients = [(p, torch.zeros_like(p)) for p in self.parameters if p.grad is not None]
        self._take_back_gradients()
        self._batch = tuple(tensor.clone() for tensor in batch)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode='thread_local'):  # other threads may allocate memory
            self._loss = self.passes(self._batch, loss_scale)
        self._graph, self._recorded = graph, self._state(batch, loss_scale)

    def __call__(self, batch, loss_scale):
        if self._graph is None or self._recorded != self._state(batch, loss_scale):
            return self.passes(batch, loss_scale)
        for tensor, static in zip(batch, self._batch):
            static.copy_(tensor)
        self._take_back_gradients()
        self._graph.replay()
        return self._loss.clone()

    def _state(self, batch, loss_scale):
        """What the passes depend on besides the values of tensors."""
        attributes = [value for holder in self.holders for value in vars(holder).values()
                      if isinstance(value, (bool, int, float, str))]
        return [loss_scale, *(tensor.shape for tensor in batch), *attributes]

    def _take_back_gradients(self):
        """Let parameters have the gradients to which the graph adds, with the values that they have now."""
        lost = [(p, gradient) for p, gradient in self._gradients if p.grad is not gradient]
        dropped = [gradient for p, gradient in lost if p.grad is None]
        if dropped:
            torch._foreach_zero_(dropped)
        for parameter, gradient in lost:
            if parameter.grad is not None:
                gradient.copy_(parameter.grad)
            parameter.grad = gradient
