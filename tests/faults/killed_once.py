"""The process of rank RANK dies by SIGKILL when it enters a phase for the nth time: KILL='PHASE RANK N', or nothing.

This file is a config file, so that it takes effect before the run begins.
"""
import os
import signal

from kilogpt.generate.engine import Engine
from kilogpt.learn.rewards import Rewards
from kilogpt.parallel.apply import Parallel
from kilogpt.run.checkpoint import Saver
from kilogpt.run.guard import Guard

_PHASES = {'text': (Engine, 'step'), 'reward': (Rewards, 'score'), 'pass': (Parallel, 'forward_backward'),
           'update': (Guard, 'step'), 'save': (Saver, '_write')}


def make_mortal(place, name, count):
    function, entered = getattr(place, name), []

    def enter_phase(*args, **options):
        entered.append(1)
        if len(entered) == count:
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*args, **options)

    setattr(place, name, enter_phase)


if os.environ['KILL']:
    _phase, _rank, _count = os.environ['KILL'].split()
    if os.environ.get('RANK', '0') == _rank:
        make_mortal(*_PHASES[_phase], int(_count))
