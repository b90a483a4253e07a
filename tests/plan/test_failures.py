"""What failures cost, by formulas of Young and Daly, against a search and against simulated failures."""
import random

import pytest

from kilogpt.plan.failures import daly_interval, lost_with_replicas, lost_with_restarts, young_interval
from test_planner import run_plan  # noqa: F401


def simulated_share(rng, mtbf, interval, save, restart, work):
    """The share of time lost in a run of `work` seconds that saves, fails and restarts."""
    now, done, failure = 0.0, 0.0, rng.expovariate(1 / mtbf)
    while done < work:
        if now + interval + save < failure:
            now += interval + save
            done += interval
            continue
        now = failure + restart
        failure = failure + rng.expovariate(1 / mtbf)
        while failure < now:  # during a restart, which begins again
            now = failure + restart
            failure += rng.expovariate(1 / mtbf)
    return 1 - done / now


@pytest.mark.parametrize('mtbf, save, restart', [(36_000, 5, 300), (3_600, 20, 120), (1_000, 100, 60)])
def test_interval_is_the_best_and_the_share_that_of_simulated_failures(mtbf, save, restart):
    best = daly_interval(mtbf, save)
    share = lost_with_restarts(mtbf, best, save, restart)
    assert all(share <= lost_with_restarts(mtbf, best * factor, save, restart) for factor in (0.8, 1.25))
    assert abs(best / young_interval(mtbf, save) - 1) < 0.25
    seed = random.SystemRandom().randrange(1000)
    print(f'seed {seed}')
    # 20,000 failures: the share varies by about 1 / sqrt(20,000) of itself, of which this is 5 times as much.
    simulated = simulated_share(random.Random(seed), mtbf, best, save, restart, 20_000 * mtbf)
    assert simulated == pytest.approx(share, rel=0.04)


def test_planner_says_what_failures_cost(run_plan):  # noqa: F811
    arguments = ('config/gpt2_xl_fsdp.py', '--gpus=16', '--gpu=H100', '--as_given', '--price=2')
    printed, problem = run_plan(*arguments, '--mtbf=1000')
    assert problem is None and 'failures: one of 2 node(s) every 500.0 hours' in printed
    lines = printed.splitlines()
    restarts, replicas = lines[-2], lines[-1]
    assert '--save_minutes=44.7 is best' in restarts and replicas.startswith('  2 replicas')
    assert 'failures' not in run_plan(*arguments)[0]
    assert run_plan(*arguments, '--mtbf=-1')[1].startswith('error: --mtbf')


def test_replicas_lose_less_than_restarts():
    restarts = lost_with_restarts(3_600, daly_interval(3_600, 2), 2, 180)
    assert lost_with_replicas(3_600, 8, 180, 1.0) < restarts / 5
