"""Where the host waits for a pretended GPU, and what it launches."""
import pytest

from conftest import WAITS

# Iterations 4 and 5 have settled, and neither logs, evaluates nor saves.
QUIET = '--max_iters=6 --log_interval=6 --eval_iters=0 --eval_interval=100 --keep_checkpoints=0'.split()
SETTLED = 4, 5


def waits_of(run):
    """{place: waits} of the host in iterations that do nothing but an update."""
    found = {}
    for iteration in SETTLED:
        for (call, place), n in run.calls[iteration].items():
            if call in WAITS:
                found[f'{call} at {place}'] = found.get(f'{call} at {place}', 0) + n
    return found


@pytest.mark.parametrize('settings', [
    '--dtype=bfloat16', '--dtype=float16', '--dtype=bfloat16 --optimizer=muon', '--dtype=bfloat16 --zero_stage=3',
    '--dtype=bfloat16 --on_spike=skip', '--dtype=bfloat16 --mlp=moe'])
def test_host_does_not_wait_between_log_lines(dry_run, settings):
    run = dry_run(*QUIET, *settings.split())
    assert list(run.calls) == [1, 2, 3, 4, 5, 6]
    assert waits_of(run) == {}
