"""What a run writes of itself, and what it measures on any system."""
import json
import sys

import pytest
import torch

from kilogpt import metrics

pytestmark = pytest.mark.quick


def test_training_line_has_seconds_in_the_file_alone(tmp_path, capsys):
    line = dict(iter=100, loss=2.5123, grad_norm=0.5, lr=1e-3, dt_ms=30.1, tokens_per_sec=12345.6, mfu=0.1234,
                mem_gb=1.5, tokens=1000, seconds=12.5)
    log = metrics.Metrics(tmp_path, is_main=True)
    log.train(line, eta_seconds=3725)
    log.train(dict(line, mfu=None, slowest_rank=3, lag_ms=1.25), eta_seconds=0)
    log.close()
    first, second = capsys.readouterr().out.splitlines()
    assert first == ('iter 100: loss 2.5123, time 30.10ms, mfu 12.34%, 12,346 tok/s, grad norm 0.500, '
                     'lr 1.00e-03, mem 1.50GB, eta 1:02:05')
    assert 'mfu n/a' in second and second.endswith('eta 0:00:00, rank 3 last by 1.2ms')
    assert json.loads((tmp_path / 'metrics.jsonl').read_text().splitlines()[0]) == line


@pytest.mark.parametrize('value', [float('nan'), float('inf'), float('-inf')])
def test_value_that_is_not_finite_is_null(tmp_path, value):
    log = metrics.Metrics(tmp_path, is_main=True)
    log.eval(dict(iter=0, train_loss=4.0, val_loss=value))
    assert json.loads((tmp_path / 'metrics.jsonl').read_text()) == dict(iter=0, train_loss=4.0, val_loss=None)


def test_peak_memory_is_measured_and_0_where_it_is_unknown(monkeypatch):
    """Windows has no module `resource`."""
    cpu = torch.device('cpu')
    assert 0.05 < metrics.peak_memory_gb(cpu) < 1000
    monkeypatch.setitem(sys.modules, 'resource', None)
    assert metrics.peak_memory_gb(cpu) == 0.0
