"""Islands compute what DiLoCo defines, in any layout, and continue exactly after kills and stops."""
import json
import os
import re
import shutil
import signal
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from data.datasets import read_meta
from data.loader import TokenLoader
from data.schedule import DataSchedule
from helpers import (FAULTS, ROOT, TINY, assert_near, assert_same_tensors, curve, newest_state,
                     newest_tensors, newest_weights, read_run, torchrun, wait_until, worker_pids)
from kilogpt.configurator import config_of
from kilogpt.islands.islands import needed_checkpoint, newest_together
from kilogpt.islands.outer_optimizer import decode, encode
from kilogpt.run import checkpoint
from kilogpt.settings import check_settings
from model import GPT, GPTConfig

slow = partial(pytest.param, marks=pytest.mark.slow)
PLAIN_OUTER = '--outer_lr=1', '--outer_momentum=0'  # the mean of the islands' parameters


def islands_of(run, count):
    """The runs of all islands. run: that of island 0."""
    return [read_run(run.out_dir / f'island_{island}' if island else run.out_dir) for island in range(count)]


def exchanges_of(run):
    """{number: line} of the exchanges in a run's log, without waiting times."""
    lines = [json.loads(line) for line in (run.out_dir / 'metrics.jsonl').read_text().splitlines()]
    return {line['exchange']: line | dict(wait_s=0) for line in lines if 'exchange' in line}


def assert_same_run(run, other, iterations):
    """Assert that two islands made the same iterations and exchanges, equal to the last bit."""
    assert list(run.lines) == list(other.lines) == list(range(1, iterations + 1))
    assert curve(run) == curve(other) and run.evals[iterations] == other.evals[iterations]
    assert exchanges_of(run) == exchanges_of(other)
    assert_same_tensors(newest_tensors(run.out_dir), newest_tensors(other.out_dir))


# --- compared with definitions --------------------------------------------------------------------------

@pytest.mark.parametrize('interval', [5, slow(1)])
def test_one_island_changes_nothing_to_the_bit(train_all, interval):
    runs = train_all(dict(plain=['--dropout=0.1'],
                          island=['--dropout=0.1', f'--outer_interval={interval}', *PLAIN_OUTER]))
    assert curve(runs['plain']) == curve(runs['island']) and runs['plain'].evals == runs['island'].evals
    assert len(exchanges_of(runs['island'])) == 12 // interval
    assert_same_tensors(newest_weights(runs['plain'].out_dir), newest_weights(runs['island'].out_dir))


@pytest.mark.slow
def test_islands_with_sgd_that_exchange_each_iteration_equal_ddp(train):
    """The mean loss, and the evaluation of the shared parameters, are within 1e-5."""
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

    Algorithm 1 of Douillard et al. 2023, with AdamW inside and PyTorch's SGD outside, and algorithms 2 and 3
    of Douillard et al. 2025 for fragments: exchange p starts at iteration (p + 1) * interval / fragments.
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
            x, y = map(torch.from_numpy, loader.train_batch(np.arange(first, first + size)))
            loss = torch.nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses[island, iteration + 1] = loss.item()
    return losses, {f'model.{name}': parameter.detach() for name, parameter in shared.items()}


@pytest.mark.parametrize('islands, interval, fragments, delay, mix', [
    (2, 4, 2, 1, 0.25), slow(2, 4, 1, 3, 0.5), slow(2, 1, 1, 0, 0.0), slow(3, 4, 2, 0, 0.0)])
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


@pytest.mark.slow
def test_compressed_islands_of_a_pipeline_equal_islands_of_one_process(train):
    """Tied weights have copies on two stages. `kilogpt.prove --random` has all layouts, without compression."""
    options = ['--islands=2', '--outer_interval=4', '--outer_fragments=2', '--outer_delay=1',
               '--learning_rate=2e-3', '--eval_interval=3', '--outer_compress=int8']
    alone = train(*options, nproc=2)
    run = train(*options, '--pp=2', nproc=4)
    for one, other in zip(islands_of(alone, 2), islands_of(run, 2)):
        assert_near(one, other)
    expected = newest_weights(alone.out_dir)
    for island in islands_of(run, 2):
        for name, tensor in newest_weights(island.out_dir).items():
            torch.testing.assert_close(tensor, expected[name], rtol=0, atol=1e-4)


@pytest.mark.slow
def test_replicas_of_shards_exchange_once(train):
    """HSDP: an island of two replicas, each of two processes, equals an island of one process."""
    options = ['--outer_interval=4', '--outer_fragments=2', '--outer_compress=bf16', '--learning_rate=2e-3']
    alone = train(*options)
    run = train(*options, '--zero_stage=2', '--dp_replicate=2', nproc=4)
    assert_near(alone, run)
    sent = [line['bytes_sent'] for line in exchanges_of(run).values()]
    assert sent == [line['bytes_sent'] for line in exchanges_of(alone).values()]


# --- payloads ---------------------------------------------------------------------------------------

@pytest.mark.quick
@pytest.mark.parametrize('compress, error', [
    ('none', 0), ('bf16', 2 ** -8), ('int8', 1 / 127), ('int4', 1 / 7)])
def test_encoding_is_close_and_repeats_to_the_bit(compress, error):
    tensor = torch.randn(3, 201) * torch.tensor([[1e-6], [1.0], [100.0]])
    payload = encode(tensor, compress)
    decoded = decode(payload, tensor, compress)
    assert (decoded - tensor).abs().max() <= error * tensor.abs().max()
    assert torch.equal(encode(decoded, compress), payload) and payload.dtype == torch.uint8
    assert not decode(encode(torch.zeros(5), compress), torch.ones(5), compress).any()


@pytest.mark.slow
def test_compression_sends_less_and_ends_at_the_same_loss(train_all):
    options = ['--islands=2', '--outer_interval=3', '--max_iters=24', '--lr_decay_iters=24']
    kinds = 'none', 'int8', 'int4'
    runs = train_all({kind: [*options, f'--outer_compress={kind}'] for kind in kinds}, nproc=2)
    sent = {kind: exchanges_of(run)[0]['bytes_sent'] for kind, run in runs.items()}
    assert sent['int8'] < 0.26 * sent['none'] and sent['int4'] < 0.13 * sent['none']
    assert sent['none'] == 4 * 29_856
    losses = {kind: run.evals[24]['val_loss'] for kind, run in runs.items()}
    assert losses['none'] != losses['int8'] == pytest.approx(losses['none'], abs=0.03)
    assert losses['none'] != losses['int4'] == pytest.approx(losses['none'], abs=0.1)


# --- shares of the data ---------------------------------------------------------------------------------

@pytest.mark.quick
def test_every_sequence_is_trained_on_once_although_islands_leave_and_return():
    """Each island has 3 sequences in an iteration. A missing island loses those of a round, 4 iterations."""
    shares, trained = DataSchedule(3, 8, 4), []
    rounds = [{0, 1, 2, 3}, {0, 2, 3}, {0, 2}, {0, 1, 2}, {0, 1, 2, 3}, {3}, {0, 1, 2, 3}, {0, 1, 2, 3}]
    for number, present in enumerate(rounds):
        begin, end = 4 * number, 4 * number + 4
        was_present = shares.parts[-1]['present']
        trained.append(shares.assigned(begin, end, present))
        assert len(trained[-1]) == 12 * len(present & set(was_present))
        shares.change_islands(end, sorted(present), begin, members=present)
        assert shares.tokens_before(end) == 8 * sum(map(len, trained))
    assert sorted(np.concatenate(trained).tolist()) == list(range(240))
    continued = DataSchedule(3, 8, 4, parts=json.loads(json.dumps(shares.parts)))
    assert np.array_equal(continued.sequences(40, 2), shares.sequences(40, 2))


# --- resuming -------------------------------------------------------------------------------------------

@pytest.mark.quick
def test_islands_continue_from_checkpoints_that_go_together():
    """The pairs are (exchanges merged, exchanges started) of each checkpoint, the newest first."""
    assert newest_together([[(2, 2), (1, 1)], [(2, 2), (1, 1)]]) == [0, 0]
    assert newest_together([[(2, 2), (1, 1)], [(1, 1), (0, 1)]]) == [1, 0]  # the second was killed in a save
    assert newest_together([[(2, 2), (1, 1)], [(1, 2), (1, 1)]]) == [0, 0]  # the second had sent the third
    assert newest_together([[(2, 3), (1, 2)], [(1, 2)]]) == [0, 0]
    assert newest_together([[(3, 3)], [(1, 2)]]) is None
    assert newest_together([[(3, 3)], []]) is None


@pytest.mark.parametrize('started_elsewhere, needed', [(2, 8), (4, 13), (1, None)])
def test_checkpoint_that_goes_with_another_islands_newest_is_kept(tmp_path, started_elsewhere, needed):
    """Island 1 was killed before it had saved iteration 12, when island 0 had also saved iteration 13."""
    for iteration, merged, started in ((8, 2, 2), (12, 3, 4), (13, 3, 4)):
        folder = tmp_path / 'ckpt' / f'iter_{iteration:08d}'
        folder.mkdir(parents=True)
        (folder / '.metadata').touch()
        (folder / 'state.json').write_text(json.dumps(dict(islands=dict(merged=merged, started=started))))
    notes = {1: str(started_elsewhere)}
    between = SimpleNamespace(leave_note=lambda subject, text: notes.update({0: text}),
                              read_notes=lambda subject: notes)
    path = needed_checkpoint(str(tmp_path), between)
    assert (path and int(path[-8:])) == needed and notes[0] == '4'


# An exchange is under way at iteration 7, in the middle of another fragment's round.
STAGGERED = ('--outer_interval=6', '--outer_fragments=2', '--outer_delay=2', '--outer_compress=int8')


@pytest.mark.parametrize('options', [
    STAGGERED, slow(('--outer_interval=5', '--outer_delay=3', '--outer_offload'))])
def test_resumed_islands_continue_to_the_bit(train, options):
    options = ['--islands=2', *options, '--dropout=0.1', '--eval_interval=20']
    unbroken = train(*options, nproc=2)
    stopped = train(*options, '--max_iters=7', nproc=2)
    state = newest_state(stopped.out_dir)['islands']
    assert state['started'] == state['merged'] + 1
    resumed = train(*options, '--init_from=resume', out_dir=stopped.out_dir, nproc=2)
    assert 'resuming' in resumed.stdout
    for one, other in zip(islands_of(unbroken, 2), islands_of(resumed, 2)):
        assert_same_run(one, other, 12)


@pytest.mark.slow
@pytest.mark.parametrize('count', [1, 3])
def test_checkpoint_continues_with_another_number_of_islands(train, count):
    """The run starts from the parameters that the islands shared, and from the moments of island 0."""
    options = '--outer_interval=4', '--max_iters=4', '--eval_interval=4'
    first = train(*options, '--islands=2', nproc=2)
    islands = ['--outer_interval=4', f'--islands={count}'] if count > 1 else []
    more = train(*islands, '--init_from=resume', out_dir=first.out_dir, nproc=count)
    assert f'resuming {first.out_dir}/ckpt/iter_00000004' in more.stdout
    assert list(more.lines) == list(range(1, 13)) and more.lines[12]['tokens'] == 12 * 12 * 32
    assert more.lines[5]['loss'] == pytest.approx(first.evals[4]['train_loss'], abs=0.15)
    assert more.evals[12]['val_loss'] < first.evals[4]['val_loss'] - 0.1
    if count > 1:  # back to two islands: the checkpoints of the second island are of another run
        again = train('--islands=2', '--outer_interval=4', '--max_iters=16', '--init_from=resume',
                      out_dir=first.out_dir, nproc=2)
        assert f'resuming {first.out_dir}/ckpt/iter_00000012' in again.stdout
        assert list(islands_of(again, 2)[1].lines) == [13, 14, 15, 16]
        assert list((first.out_dir / 'island_1').glob('earlier-*'))


@pytest.mark.slow
def test_damaged_checkpoint_takes_all_islands_back(train):
    options = '--islands=2', '--outer_interval=2', '--save_interval=4'
    run = train(*options, nproc=2)
    damaged = run.out_dir / 'island_1' / 'ckpt' / 'iter_00000012' / '__0_0.distcp'
    damaged.write_bytes(damaged.read_bytes()[:-1])
    more = train(*options, '--init_from=resume', out_dir=run.out_dir, nproc=2)
    assert 'resuming' in more.stdout and 'at iteration 8' in more.stdout
    for island in islands_of(more, 2):
        assert list(exchanges_of(island)) == [0, 1, 2, 3, 4, 5] and len(island.lines) == 12


@pytest.mark.slow
def test_run_that_ended_in_its_first_save_begins_again(train):
    """One island had saved a checkpoint, the other had not."""
    options = '--islands=2', '--outer_interval=2', '--dropout=0.1'
    run = train(*options, '--max_iters=6', nproc=2)
    shutil.rmtree(run.out_dir / 'island_1' / 'ckpt')
    again = train(*options, '--init_from=auto', out_dir=run.out_dir, nproc=2)
    assert 'resuming' not in again.stdout and list(again.lines) == list(range(1, 13))
    assert curve(again)[5] == curve(run)[5]  # after two exchanges


KILLED = ('--islands=2', '--outer_interval=6', '--outer_fragments=2', '--outer_delay=1',
          '--outer_compress=int8', '--dropout=0.1', '--eval_interval=40', '--lr_decay_iters=100')


def logged(out_dir):
    """How many iterations a run has logged."""
    return len(read_run(out_dir).lines) if (out_dir / 'metrics.jsonl').exists() else 0


def wait_for_iterations(process, out_dir, count):
    """Wait until a torchrun has logged `count` more iterations."""
    wanted = logged(out_dir) + count
    wait_until(lambda: logged(out_dir) >= wanted, process)


@pytest.mark.slow
def test_islands_that_are_killed_continue_to_the_bit(train, dataset, tmp_path):
    """One process or the other is killed, three times. torchrun restarts both."""
    out_dir, options = tmp_path / 'out', [*KILLED, '--max_iters=120', '--save_interval=4']
    folders = out_dir, out_dir / 'island_1'
    command = [*TINY, *options, '--init_from=auto', f'--dataset={dataset}', f'--out_dir={out_dir}']
    restarting = '--standalone', '--nproc_per_node=2', '--max-restarts=3'
    with torchrun(restarting, tmp_path, 'train.py', *command) as process:
        for kill in range(3):
            wait_for_iterations(process, out_dir, 10)
            wait_until(lambda: all(map(checkpoint.find, folders)), process)
            os.kill(worker_pids(process)[1 - kill % 2], signal.SIGKILL)
            wait_until(lambda: process.output().count('resuming') == kill + 1, process)
        assert process.wait(240) == 0, process.output()
    unbroken = train(*options, nproc=2)
    for one, other in zip(islands_of(unbroken, 2), islands_of(read_run(out_dir), 2)):
        assert_same_run(one, other, 120)


@pytest.mark.slow
@pytest.mark.parametrize('whom', ['torchrun', 'one process'])
def test_islands_that_are_stopped_continue_to_the_bit(train, dataset, tmp_path, whom):
    """A signal may come at any time. If it reaches one island, the other stops at its next exchange."""
    out_dir = tmp_path / 'out'
    options = [*KILLED, '--max_iters=60', '--outer_fragments=1', '--outer_interval=3']
    command = [*TINY, *options, '--init_from=auto', f'--dataset={dataset}', f'--out_dir={out_dir}']
    for stop in range(3):
        with torchrun(('--standalone', '--nproc_per_node=2'), tmp_path, 'train.py', *command) as process:
            wait_for_iterations(process, out_dir, 5 + stop)
            pid = process.pid if whom == 'torchrun' else worker_pids(process)[stop % 2]
            os.kill(pid, signal.SIGTERM)
            process.wait(120)
            assert 'stopped by SIGTERM' in process.output(), process.output()
    resumed = train(*options, '--init_from=resume', out_dir=out_dir, nproc=2)
    unbroken = train(*options, nproc=2)
    for one, other in zip(islands_of(unbroken, 2), islands_of(resumed, 2)):
        assert_same_run(one, other, 60)


# --- bad input ------------------------------------------------------------------------------------------

BAD = {
    '--islands=0': 'islands is 0: it must be at least 1',
    '--islands=5': 'islands=5 does not divide the 12 sequences of an iteration',
    '--outer_interval=-1': 'outer_interval is -1: it cannot be negative',
    '--outer_interval=4 --outer_compress=fp4':
        "outer_compress is 'fp4': choose one of none, bf16, int8, int4",
    '--outer_interval=4 --outer_fragments=4': 'outer_fragments is 4: it must be at most 3',
    '--outer_interval=4 --outer_fragments=2 --outer_delay=2': 'outer_delay is 2: it must be below',
    '--outer_interval=4 --outer_momentum=1': 'outer_momentum is 1.0: it must be at least 0 and below 1',
    '--outer_interval=4 --on_spike=rollback': 'on_spike=rollback does not work with islands'}


@pytest.mark.quick
def test_bad_keys_are_refused_in_one_sentence():
    for arguments, sentence in BAD.items():
        config = config_of(os.path.join(ROOT, 'train.py'), [*TINY, *arguments.split()])
        with pytest.raises(ValueError, match=re.escape(sentence)):
            check_settings(config)


def test_islands_that_do_not_divide_the_processes_are_refused_in_one_sentence(train):
    run = train('--islands=2', check=False)
    sentence = 'error: islands=2 does not divide the 1 process(es): start a multiple of 2'
    assert run.returncode == 1 and sentence in run.stderr and 'Traceback' not in run.stderr


@pytest.mark.slow
def test_island_that_fails_ends_the_others_with_a_checkpoint(train):
    """After a NaN on one island, the other one stops at its next exchange and saves."""
    run = train('--islands=2', '--outer_interval=4', '--max_iters=40', nproc=2, check=False,
                faults=[FAULTS / 'nan_on_island.py'])
    assert run.codes == [143, 1] and 'stopped by SIGTERM at iteration 8' in run.stdout
    assert 'gradient norm of iteration 6 is nan' in run.stderr
    saved = [newest_state(island.out_dir)['iteration'] for island in islands_of(run, 2)]
    assert saved == [8, 5]
