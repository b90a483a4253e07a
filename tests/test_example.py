"""A template for a test of your change: copy this file, put in your key or layer, and say what must hold.

`train` runs train.py on a tiny model and dataset: python -m pytest tests/test_example.py
"""
import pytest


@pytest.mark.quick
def test_deeper_model_learns(train):
    run = train('--n_layer=3', '--mlp=swiglu')  # arguments as on the command line
    assert run.lines[12]['loss'] < run.lines[1]['loss'] - 0.5  # metrics.jsonl, {iteration: line}


def test_two_processes_train_as_one(train):
    one = train('--n_layer=3')
    two = train('--n_layer=3', '--zero_stage=2', nproc=2)  # or --tp=2, --cp=2, --pp=2
    for i in one.lines:
        assert two.lines[i]['loss'] == pytest.approx(one.lines[i]['loss'], abs=1e-4)
