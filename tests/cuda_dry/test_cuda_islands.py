"""Islands on pretended GPUs: they exchange through the host, which waits for a GPU in exchanges alone."""
import json

import pytest

from cuda_helpers import read_calls, waits_of

SETTINGS = ('--islands=2 --max_iters=9 --log_interval=9 --eval_iters=0 --eval_interval=100 --keep_checkpoints=0 '
            '--n_layer=4 --dtype=bfloat16 --gradient_accumulation_steps=4').split()
# {settings: (processes, iterations after those with an exchange, iterations before)}. The calls of an exchange at
# iteration 2 are with those of the third one (faults/record_cuda.py).
RUNS = {
    '--outer_interval=2': (2, [3, 5, 7, 9], [4, 6, 8]),
    '--outer_interval=3 --outer_delay=1 --outer_compress=int8': (2, [4, 5, 7, 8], [3, 6, 9]),
    '--outer_interval=4 --outer_fragments=2 --zero_stage=3': (4, [3, 5, 7, 9], [4, 6, 8]),
}


def exchanges_of(folder):
    """[(iteration, number, fragment, bytes sent)] in the order of an island's log."""
    lines = [json.loads(line) for line in (folder / 'metrics.jsonl').read_text().splitlines()]
    return [(line['iter'], line['exchange'], line['fragment'], line['bytes_sent'])
            for line in lines if 'exchange' in line]


def calls_in_exchanges(run, rank):
    """{iteration: {(call, place): how often}} of what a rank asks for in an exchange."""
    return {iteration: {(call, place): n for (call, place), n in calls.items() if 'kilogpt/islands/' in place}
            for iteration, calls in read_calls(f'{run.out_dir}.cuda.{rank}').items()}


@pytest.mark.parametrize('settings', RUNS)
def test_islands_exchange_in_one_order_and_wait_in_exchanges_alone(dry_run, settings):
    nproc, with_exchange, between = RUNS[settings]
    run = dry_run(*SETTINGS, *settings.split(), nproc=nproc)
    assert list(run.lines) == [9] and 'islands     2 of' in run.stdout
    first, second = exchanges_of(run.out_dir), exchanges_of(run.out_dir / 'island_1')
    assert first == second and [number for _, number, *_ in first] == list(range(len(first))) and len(first) > 1
    assert calls_in_exchanges(run, 0) == calls_in_exchanges(run, nproc // 2)  # the first rank of each island
    assert waits_of(run, between) == {}
    for iteration in with_exchange:
        assert {place.split()[0] for place in waits_of(run, [iteration])} == {
            'kilogpt/islands/outer_optimizer.py', 'kilogpt/run/metrics.py'}
