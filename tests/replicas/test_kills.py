"""Processes of replicas are killed in drawn phases, and no iteration is lost, doubled or different.

    REPLICA_KILLS=20 python -m pytest -s -n 0 -m slow 'tests/replicas/test_kills.py::test_killed_in_drawn_phases[--tp=2]'

kills at 20 moments of 300 iterations. Prints how long the others took to go on, and the killed ones to come back. `-k torchrun`
instead kills 20 times in a run of replicas and, in turn, in the same run under torchrun, and prints the times of both.
"""
import os
import random
import re
import signal
import statistics
import time

import pytest

from helpers import TINY, torchrun, wait_until, worker_pids
from replica_run import DOUBLE, PACED, ReplicaRun, assert_same_run, needs_torchft, read_updates

COUNT = int(os.environ.get('REPLICA_KILLS', 2))
ITERATIONS = 300 if COUNT > 2 else 60
PACE = 0.6  # seconds between two updates, so that the iterations last until the end of the kills
LAYOUTS = '--zero_stage=3', '--tp=2', '--pp=2', '--cp=2', '--ep=2'
MOE = '--mlp=moe --n_experts=4 --n_active_experts=2 --expert_hidden=16'  # with ep
OF_ANY = 'forward', 'backward', 'sum', 'vote', 'update', 'quorum', 'evaluation'
OF_LEAD = 'log', 'save'
# Who joins, or sends the state to one that does, is lost; or another replica; or all but one.
OF_SEVERAL = 'send', 'receive', 'joining', 'two', 'all but one'


class Kills:
    """Kills processes of a ReplicaRun of three replicas of two, such that a member always survives.

    n_ended: how often a replica has ended. recovery, joining: seconds from a kill to the next update, and until all
    replicas are members.
    """

    def __init__(self, run, rng):
        self.run, self.rng = run, rng
        self.n_ended, self.recovery, self.joining = 0, [], []

    def members(self):
        """The replicas all of whose processes have taken part in an update since they were started."""
        found = {}
        for (replica, _), pid in self.run.workers().items():
            found.setdefault(replica, []).append((self.run.kills / f'member.{pid}').exists())
        return sorted(replica for replica, joined in found.items() if len(joined) == 2 and all(joined))

    def kill(self, *replicas, ranks=1):
        for replica in replicas:
            self.run.kill(*((replica, rank) for rank in self.rng.sample(range(2), ranks)))

    def order(self, replica, phase, rank=None):
        """Let a process of a replica die in a phase; returns the file that says so, and the one that it becomes."""
        rank = self.rng.randrange(2) if rank is None else rank
        order = self.run.kills / f'{replica}.{rank}.{phase}'
        killed = order.with_name(f'killed.{order.name}')
        killed.unlink(missing_ok=True)
        draft = order.with_name('draft')
        draft.write_text(str(self.rng.choice([0, self.rng.uniform(0, 0.03)])))
        draft.rename(order)
        return order, killed

    def draw(self, way):
        """Kill in a way. Returns the replicas that have ended for it, and when the first was killed."""
        rng = self.rng
        victim, other = rng.sample(range(3), 2)
        if way in OF_LEAD or way == 'lead':
            victim = int((self.run.kills / 'lead').read_text())
        if way in OF_ANY or way in OF_LEAD:
            _, killed = self.order(victim, way, rank=0 if way == 'log' else None)
            self.run.wait_for(killed.exists, seconds=60)
            return [victim], killed.stat().st_ctime
        time.sleep(rng.uniform(0, 1))
        now = time.time()
        if way == 'receive':
            _, killed = self.order(victim, 'receive')
            self.kill(victim)
            self.run.wait_for(killed.exists, seconds=60)
            return [victim, victim], now
        if way == 'send':
            orders = [self.order(other, 'send', rank) for rank in range(2)]
            self.kill(victim)
            self.run.wait_for(lambda: victim in self.members() or any(killed.exists() for _, killed in orders), 60)
            for order, _ in orders:
                order.unlink(missing_ok=True)  # the third replica may have sent the state
            return [victim] + [other] * any(killed.exists() for _, killed in orders), now
        if way == 'joining':
            self.kill(victim)
            time.sleep(rng.uniform(1, 6))
            self.kill(other)
            return [victim, other], now
        replicas = [victim, other] if way in ('two', 'all but one') else [victim]
        self.kill(*replicas, ranks=2 if way == 'all but one' else 1)
        return replicas, now

    def kill_and_watch(self, way):
        """Kill in a way, and assert that the others go on."""
        before, n_updates = self.run.workers(), len(self.run.updates())
        victims, began = self.draw(way)
        self.n_ended += len(victims)
        recovered = self._first_recovered(n_updates)
        print(f'{way}: replica {" and ".join(map(str, victims))}, iteration {recovered["iter"]}, '
              f'{recovered["arrived"] - began:.2f} s until the update', flush=True)
        if way not in ('send', 'receive', 'joining'):  # in which time passes between two kills
            self.recovery.append(recovered['arrived'] - began)
        spared = {worker: pid for worker, pid in before.items() if worker[0] not in victims}
        assert spared.items() <= self.run.workers().items()
        self.run.wait_for(lambda: len(self.members()) == 3)
        self.joining.append(time.time() - began)

    def print_figures(self, updates):
        joined = [line['dt_ms'] - 1000 * PACE for last, line in zip(updates, updates[1:])
                  if line['members'] > last['members']]
        usual = [line['dt_ms'] - 1000 * PACE for line in updates
                 if not line['recovered_ms'] and line['dt_ms'] > 1000 * PACE]
        print(f'{self.n_ended} losses. Medians: {statistics.median(self.recovery):.2f} s from a kill to the '
              f'next update, {PACE} of it a pause; {statistics.median(self.joining):.1f} s until all are members; '
              f'an iteration in which one joins {statistics.median(joined):.0f} ms, others '
              f'{statistics.median(usual):.0f} ms, without the pause')

    def _first_recovered(self, start):
        """The first line after the first `start` that has a failure, with `arrived`, the time of its writing."""
        found = []

        def has_recovered():
            found.extend(line for line in self.run.updates()[start:] if line['recovered_ms'])
            return found

        self.run.wait_for(has_recovered)
        return found[0] | dict(arrived=time.time())


@needs_torchft
@pytest.mark.slow
@pytest.mark.drawn(1)
@pytest.mark.parametrize('layout', LAYOUTS)
def test_killed_in_drawn_phases(dataset, tmp_path, train, layout):
    """A replica has two processes, and one of these layouts."""
    seed = int(os.environ.get('REPLICA_SEED', random.SystemRandom().randrange(1000)))
    print(f'REPLICA_SEED={seed}')
    rng = random.Random(seed)
    ways = ['lead', 'moment', *OF_ANY, *OF_LEAD, *OF_SEVERAL]
    ways = rng.sample(ways, min(COUNT, len(ways))) + rng.choices(ways, k=max(0, COUNT - len(ways)))
    keys = [f'--max_iters={ITERATIONS}', f'--lr_decay_iters={ITERATIONS}', '--eval_interval=6']
    keys += (MOE if 'ep' in layout else '').split()
    with ReplicaRun(tmp_path, dataset, *keys, layout, replicas=3, nproc=2, pace=PACE) as run:
        kills = Kills(run, rng)
        run.wait_for(lambda: len(kills.members()) == 3)
        for way in ways:
            kills.kill_and_watch(way)
        ended = run.end()
    assert len(re.findall(r'replica \d has ended with exit code -9', ended.text)) == kills.n_ended
    assert ended.text.count('has ended with exit code') == kills.n_ended and 'Traceback' not in ended.text
    assert_same_run(ended, train(DOUBLE, *keys))
    kills.print_figures(ended.updates)


@needs_torchft
@pytest.mark.slow
def test_killed_process_restarts_no_survivor_unlike_under_torchrun(dataset, tmp_path):
    """A process of each run is killed in turn. Both runs save every 10 iterations."""
    keys = ['--max_iters=100000', '--eval_interval=100000', '--save_interval=10', '--init_from=auto']
    out_dir = tmp_path / 'restarted'
    command = ['train.py', DOUBLE, PACED, *TINY, f'--dataset={dataset}', f'--out_dir={out_dir}', *keys]
    options = '--standalone', '--nproc_per_node=3', '--max-restarts=1000'
    environment = dict(HURRY=str(tmp_path / 'never'), PACE='0.3')
    replicas, restarts, again = [], [], []
    with (ReplicaRun(tmp_path, dataset, *keys, replicas=3, restarts=1000) as run,
          torchrun(options, tmp_path, *command, **environment) as process):
        run.wait_for_members(3)
        wait_until(lambda: len(read_updates(out_dir)) > 10, process)
        for _ in range(int(os.environ.get('REPLICA_KILLS', 1))):
            time.sleep(random.uniform(0, 1))
            replicas.append(seconds_of_replicas(run, victim=random.randrange(3)))
            run.wait_for_members(3)
            time.sleep(random.uniform(0, 1))
            seconds = seconds_of_restart(process, out_dir, victim=random.randrange(3))
            restarts.append(seconds[0])
            again.append(seconds[1])
            print(f'{replicas[-1]:.2f} s; {restarts[-1]:.2f} and {again[-1]:.2f} s', flush=True)
        iterations = [line['iter'] for line in run.updates()]
    assert iterations == list(range(1, len(iterations) + 1))
    print(f'medians from a kill to the next update: replicas {statistics.median(replicas):.2f} s; torchrun '
          f'{statistics.median(restarts):.2f} s, and {statistics.median(again):.2f} s to the first one not made before')


def seconds_of_replicas(run, victim):
    """Kill a replica of a ReplicaRun; returns the seconds until the others have made the update."""
    before, n_updates = run.workers(), len(run.updates())
    began = time.monotonic()
    run.kill((victim, 0))
    run.wait_for(lambda: any(line['recovered_ms'] for line in run.updates()[n_updates:]))
    seconds = time.monotonic() - began
    del before[victim, 0]
    assert before.items() <= run.workers().items()
    return seconds


def seconds_of_restart(process, out_dir, victim):
    """Kill a process of a torchrun; returns the seconds until an update, and until one that was not made before."""
    before, last = worker_pids(process), read_updates(out_dir)[-1]['iter']
    began = time.monotonic()
    os.kill(before[victim], signal.SIGKILL)
    wait_until(lambda: worker_pids(process).get(0, before[0]) != before[0], process)
    n_updates = len(read_updates(out_dir))
    wait_until(lambda: len(read_updates(out_dir)) > n_updates, process)
    seconds = time.monotonic() - began
    wait_until(lambda: read_updates(out_dir)[-1]['iter'] > last, process)
    return seconds, time.monotonic() - began
