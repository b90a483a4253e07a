"""Islands compute what DiLoCo is, in any layout, and go on exactly after kills and stops."""
import json
import os
import signal

import numpy as np
import pytest
import torch

from data.loader import TokenLoader, read_meta
from helpers import (FAULTS, TINY, assert_near, assert_same_tensors, curve, newest_state, newest_tensors,
                     newest_weights, read_run, torchrun, wait_until, worker_pids)
from kilogpt.islands import Shares, decode, encode, newest_together
from model import GPT, GPTConfig

PLAIN_OUTER = '--outer_lr=1', '--outer_momentum=0'  # the mean of the islands' parameters


def islands_of(run, count):
    """The runs of all islands, of which `run` is the first."""
    return [read_run(run.out_dir / f'island_{island}' if island else run.out_dir) for island in range(count)]


def exchanges_of(run):
    """{number: line} of the exchanges in a run's log, without times."""
    lines = [json.loads(line) for line in (run.out_dir / 'metrics.jsonl').read_text().splitlines()]
    return {line['exchange']: line | dict(wait_s=0) for line in lines if 'exchange' in line}


def assert_same_run(run, other, count):
    """Two runs with that many islands found the same, to the last bit."""
    for one, two in zip(islands_of(run, count), islands_of(other, count)):
        assert curve(one) == curve(two) and one.evals == two.evals and one.lines
        assert exchanges_of(one) == exchanges_of(two)
        assert_same_tensors(newest_tensors(one.out_dir), newest_tensors(two.out_dir))


# --- exact ----------------------------------------------------------------------------------------------

@pytest.mark.parametrize('interval', [5, pytest.param(1, marks=pytest.mark.slow)])
def test_one_island_changes_nothing_to_the_bit(train_all, interval):
    runs = train_all(dict(plain=['--dropout=0.1'],
                          island=['--dropout=0.1', f'--outer_interval={interval}', *PLAIN_OUTER]))
    assert curve(runs['plain']) == curve(runs['island']) and runs['plain'].evals == runs['island'].evals
    assert len(exchanges_of(runs['island'])) == 12 // interval
    assert_same_tensors(newest_weights(runs['plain'].out_dir), newest_weights(runs['island'].out_dir))


def test_islands_with_sgd_that_exchange_each_iteration_equal_ddp(train):
    """Within 1e-5, of the mean loss, and of the evaluation of what the islands share."""
    options = dict(faults=[FAULTS / 'plain_sgd.py'], nproc=2)
    arguments = '--grad_clip=0', '--learning_rate=0.3', '--min_lr=0.03'
    ddp = train(*arguments, **options)
    run = train(*arguments, '--islands=2', '--outer_interval=1', *PLAIN_OUTER, **options)
    first, second = islands_of(run, 2)
    for iteration, line in ddp.lines.items():
        mean = (first.lines[iteration]['loss'] + second.lines[iteration]['loss']) / 2
        assert mean == pytest.approx(line['loss'], abs=1e-5)
        assert line['tokens'] == first.lines[iteration]['tokens']
    assert ddp.evals[12]['val_loss'] < 3.9  # the runs have learned
    for iteration, line in ddp.evals.items():
        assert run.evals[iteration] == pytest.approx(line, abs=1e-5) == second.evals[iteration]
    expected, found = newest_weights(ddp.out_dir), newest_weights(run.out_dir)
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=1e-5)


def diloco(dataset, islands, interval, fragments, delay, mix, iterations=12):
    """Plain DiLoCo in float64: ({(island, iteration): loss}, {name: outer parameter}).

    Algorithm 1 of Douillard et al. 2023 with AdamW inside and PyTorch's SGD outside; algorithms 2 and 3 of
    Douillard et al. 2025 for fragments, of which number p begins at iteration (p + 1) * interval / fragments.
    """
    torch.set_default_dtype(torch.float64)
    try:
        config = GPTConfig(block_size=32, vocab_size=65, n_layer=2, n_head=4, n_embd=32, bias=False)
        models = [GPT(config, seed=1337) for _ in range(islands)]
        outer = GPT(config, seed=1337)
    finally:
        torch.set_default_dtype(torch.float32)
    loader = TokenLoader(dataset, 'train', 32, 65, read_meta(dataset), 1337)
    inner = []
    for model in models:
        groups = [dict(params=[p for p in model.parameters() if p.dim() >= 2], weight_decay=0.1),
                  dict(params=[p for p in model.parameters() if p.dim() < 2], weight_decay=0)]
        inner.append(torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95)))
    momentum = torch.optim.SGD(outer.parameters(), lr=0.7, momentum=0.9, nesterov=True)
    shared = dict(outer.named_parameters())

    def fragment(name):
        parts = name.split('.')
        return (1 + int(parts[2]) if parts[1] == 'h' else 0) % fragments

    losses, sent, n_sent = {}, {}, 0
    for iteration in range(iterations + 1):
        if iteration and iteration * fragments % interval == 0:
            names = [name for name in shared if fragment(name) == n_sent % fragments]
            of_islands = [dict(model.named_parameters()) for model in models]
            sent[iteration + delay] = {name: torch.stack([p[name].detach() for p in of_islands]).mean(0)
                                       for name in names}
            n_sent += 1
        if iteration in sent:
            momentum.zero_grad()
            for name, mean in sent[iteration].items():
                shared[name].grad = shared[name].detach() - mean
            momentum.step()
            with torch.no_grad():
                for model in models:
                    own = dict(model.named_parameters())
                    for name in sent[iteration]:
                        own[name].copy_(mix * own[name] + (1 - mix) * shared[name])
        if iteration == iterations:
            break
        for island, (model, optimizer) in enumerate(zip(models, inner)):
            size = 12 // islands
            first = 12 * iteration + island * size
            x, y = loader.batch(loader.train_starts(np.arange(first, first + size)))
            loss = torch.nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses[island, iteration + 1] = loss.item()
    return losses, {f'model.{name}': parameter.detach() for name, parameter in shared.items()}


@pytest.mark.parametrize('islands, interval, fragments, delay, mix', [
    (2, 4, 2, 1, 0.25), pytest.param(2, 4, 1, 3, 0.5, marks=pytest.mark.slow),
    *(pytest.param(islands, interval, fragments, 0, 0.0, marks=pytest.mark.slow)
      for islands in (2, 3) for interval, fragments in ((1, 1), (4, 1), (4, 2)))])
def test_islands_with_adamw_equal_a_plain_diloco_in_float64(train, dataset, islands, interval, fragments,
                                                            delay, mix):
    """Within 1e-9, since the run computes in float64 too."""
    run = train('--grad_clip=0', '--decay_lr=False', f'--islands={islands}', f'--outer_interval={interval}',
                f'--outer_fragments={fragments}', f'--outer_delay={delay}', f'--outer_mix={mix}',
                nproc=islands, faults=[FAULTS / 'double.py'])
    losses, shared = diloco(dataset, islands, interval, fragments, delay, mix)
    for island, one in enumerate(islands_of(run, islands)):
        assert len(one.lines) == 12
        for iteration, line in one.lines.items():
            assert line['loss'] == pytest.approx(losses[island, iteration], abs=1e-9)
        found = newest_weights(one.out_dir)
        assert found.keys() == shared.keys()
        for name, tensor in shared.items():
            torch.testing.assert_close(found[name], tensor, rtol=0, atol=1e-9)
