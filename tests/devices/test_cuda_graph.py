"""The graph of a micro-batch, with a stand-in for PyTorch's. tests/gpu_checks.py checks real ones."""
import contextlib
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from kilogpt.devices import cuda_graph
from kilogpt.devices.cuda_graph import GraphedPasses, can_record
from kilogpt.layers.preferences import use_preferences
from kilogpt.run import metrics
from model import GPT, GPTConfig

pytestmark = pytest.mark.quick


class Passes:
    """The passes of a small model, which count their calls. Under recording they only note their work."""

    def __init__(self):
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.0), nn.Linear(4, 1))
        self.model.config = SimpleNamespace(width=4)
        self.model.unused = nn.Parameter(torch.ones(2))
        self.calls, self.recording, self.loss = 0, None, torch.zeros(())

    def __call__(self, batch, loss_scale, scale=None):
        if self.recording:
            self.recording.replay = lambda: self.loss.copy_(self.run(batch, loss_scale))
            return self.loss
        self.calls += 1
        return self.run(batch, loss_scale)

    def run(self, batch, loss_scale, scale=None):
        loss = (self.model(batch[0]) - batch[1]).square().sum()
        (loss * loss_scale).backward()
        return loss.detach()


@pytest.fixture
def passes(monkeypatch):
    passes = Passes()

    @contextlib.contextmanager
    def record(graph, capture_error_mode):
        passes.recording = graph
        yield
        passes.recording = None

    segments = [dict(segment_pool_id=(0, 1), total_size=9e9, active_size=2e9),
                dict(segment_pool_id=(0, 0), total_size=100e9, active_size=100e9)]
    monkeypatch.setattr(cuda_graph, 'bytes_of_graphs', [])
    monkeypatch.setattr(torch.cuda, 'max_memory_allocated', lambda device: 3e9)
    monkeypatch.setattr(torch.cuda, 'CUDAGraph', lambda: SimpleNamespace(pool=lambda: (0, 1)))
    monkeypatch.setattr(torch.cuda, 'memory_snapshot', lambda: segments)
    monkeypatch.setattr(torch.cuda, 'reset_peak_memory_stats', lambda: None)
    monkeypatch.setattr(torch.cuda, 'graph', record)
    monkeypatch.setattr(torch.cuda, 'set_sync_debug_mode', lambda mode: setattr(passes, 'mode', mode))
    return passes


def batches(count, rows=5):
    return [(torch.randn(rows, 3), torch.randn(rows, 1)) for _ in range(count)]


def recorded(passes, function=None):
    """A GraphedPasses that has recorded, and its notes."""
    notes = []
    graphed = GraphedPasses(function or passes, passes.model, notes)
    for batch in batches(2):
        graphed(batch, 0.5, None)
        passes.model.zero_grad()
    passes.calls = 0
    return graphed, notes


def assert_equal_to_plain(passes, graphed, batches, scale=0.5):
    """Losses and gradients of an iteration, with dropped gradients at its start."""
    results = []
    for run in (graphed, passes.run):
        passes.model.zero_grad()
        losses = [run(batch, scale, None) for batch in batches]
        results.append([*losses, *(p.grad.clone() for p in passes.model.parameters() if p.grad is not None)])
        assert passes.model.unused.grad is None
    torch.testing.assert_close(*results, atol=0, rtol=0)


def test_replays_give_the_losses_and_gradients_of_the_passes(passes):
    graphed, notes = recorded(passes)
    for scale in (0.5, 0.1):
        assert_equal_to_plain(passes, graphed, batches(3), scale)
    assert passes.calls == 0 and passes.mode == 'default' and not notes
    assert metrics.peak_memory_gb(torch.device('cuda')) == 3 + 7  # what the allocator holds for replays too


def test_what_was_not_recorded_runs_without_the_graph(passes):
    graphed, _ = recorded(passes)
    batch, = batches(1)
    passes.model[1].p = 0.1
    graphed(batch, 0.5, None)
    passes.model[1].p, passes.model.config.width = 0.0, 5
    graphed(batch, 0.5, None)
    passes.model.config.width = 4
    graphed(batches(1, rows=4)[0], 0.5, None)
    assert passes.calls == 3
    graphed(batch, 0.5, None)
    assert passes.calls == 3
    # Both ways within an iteration add to the same gradients.
    mixed = [*batches(1, rows=4), *batches(2), *batches(1, rows=4), *batches(1)]
    assert_equal_to_plain(passes, graphed, mixed)


def test_passes_that_wait_for_the_device_are_not_recorded(passes):
    def waits(batch, loss_scale, scale):
        if passes.mode == 'error':
            raise RuntimeError('called a synchronizing CUDA operation\nmore')
        return passes(batch, loss_scale)

    passes.mode = 'default'
    graphed, notes = recorded(passes, waits)
    assert notes == ['no CUDA graph of a micro-batch: called a synchronizing CUDA operation']
    assert_equal_to_plain(passes, graphed, batches(2))
    assert passes.calls == 2 and passes.mode == 'default'


def test_a_recording_that_fails_names_the_key(passes):
    def fails(batch, loss_scale, scale):
        if passes.recording:
            raise RuntimeError('operation not permitted when stream is capturing')
        return passes(batch, loss_scale)

    with pytest.raises(RuntimeError, match='set cuda_graph to False .operation not permitted'):
        recorded(passes, fails)


def test_model_that_logs_sums_is_not_recorded():
    """A replay would not add to them."""
    model = GPT(GPTConfig(n_layer=1, n_head=2, n_embd=16, vocab_size=65))
    assert can_record(model, torch.device('cuda'), 'bfloat16')
    use_preferences(model, 0.1)
    assert not can_record(model, torch.device('cuda'), 'bfloat16')
