"""The passes of a micro-batch as one CUDA graph, which the host launches in a single call.

One by one, the thousand kernels of a micro-batch of GPT-2 take the host longer to launch than a fast GPU
takes to run them (docs/log).
"""
import warnings

import torch

from kilogpt.devices.parts import find_experts


def can_record(model, device, dtype):
    """Whether a graph can stand for the passes of a model that one process trains on a device in a dtype.

    With experts, shapes depend on the tokens. In float16 the scale of the loss changes. What a model adds to
    its `sums` would be added in the recording alone.
    """
    return device.type == 'cuda' and dtype != 'float16' and not find_experts(model) and not model.sums


bytes_of_graphs = []  # that PyTorch's peak of memory leaves out


def count_memory(pool):
    """Count a CUDA graph's pool of memory from now on. PyTorch counts it in the recording alone."""
    bytes_of_graphs.append(sum(
        segment['total_size'] - segment['active_size'] for segment in torch.cuda.memory_snapshot()
        if tuple(segment['segment_pool_id']) == tuple(pool)))
    torch.cuda.reset_peak_memory_stats()  # the peak of the recording would count these bytes twice


class GraphedPasses:
    """passes(batch, loss_scale, scale), of which the second call is recorded and later ones are replayed.

    passes adds gradients to the parameters of a model and returns the loss. batch: a tuple of tensors.
    loss_scale: a number. scale: a function of the loss, which must not do anything in what is replayed.

    If a number or a text in the model's modules or config has changed since the recording, or with a batch of
    another shape, `passes` runs as without a graph. What it takes from elsewhere, such as a global variable,
    keeps its value. notes: gets the reason if there can be no graph.
    """

    def __init__(self, passes, model, notes):
        self.passes, self.model, self.notes = passes, model, notes
        self._calls = 0
        self._graph = None
        self._recorded = None  # the `_state` that was recorded
        self._gradients = []  # [(parameter, the gradient to which the graph adds)]

    def __call__(self, batch, loss_scale, scale):
        self._calls += 1
        if self._calls == 2:  # by now, everything is compiled
            self._record(batch, loss_scale, scale)
        if self._graph is None or self._recorded != self._state(batch):
            return self.passes(batch, loss_scale, scale)
        for tensor, recorded in zip(batch, self._batch):
            recorded.copy_(tensor)
        self._loss_scale.fill_(loss_scale)
        self._take_back_gradients()
        self._graph.replay()
        return self._loss.clone()

    def _record(self, batch, loss_scale, scale):
        """Record the passes of a batch that is like those to come. Parameters lose their gradients."""
        with warnings.catch_warnings():
            warnings.simplefilter('ignore')  # says that this mode is new
            torch.cuda.set_sync_debug_mode('error')
        try:  # to wait for the device during the recording itself would leave the device unusable
            self.passes(batch, loss_scale, scale)
        except RuntimeError as error:
            self.notes.append(f'no CUDA graph of a micro-batch: {str(error).splitlines()[0]}')
            self.model.zero_grad()
            return
        finally:
            torch.cuda.set_sync_debug_mode('default')
        self._gradients = [(p, torch.zeros_like(p)) for p in self.model.parameters() if p.grad is not None]
        self.model.zero_grad()
        self._take_back_gradients()
        self._batch = tuple(tensor.clone() for tensor in batch)
        self._loss_scale = torch.tensor(loss_scale, device=batch[0].device)  # conversations change it
        graph = torch.cuda.CUDAGraph()
        try:
            # Other threads may allocate memory meanwhile.
            with torch.cuda.graph(graph, capture_error_mode='thread_local'):
                self._loss = self.passes(self._batch, self._loss_scale, scale)
        except RuntimeError as error:
            raise RuntimeError('this model cannot be recorded as a CUDA graph: set cuda_graph to False '
                               f'({str(error).splitlines()[0]})') from error
        self._graph, self._recorded = graph, self._state(batch)
        count_memory(graph.pool())

    def _state(self, batch):
        """What the passes depend on besides the values of tensors."""
        attributes = [value for holder in (self.model.config, *self.model.modules())
                      for value in vars(holder).values() if isinstance(value, (bool, int, float, str))]
        return [*(tensor.shape for tensor in batch), *attributes]

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
