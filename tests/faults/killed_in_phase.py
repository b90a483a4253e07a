"""Processes of replicas die by SIGKILL, or hang, in phases that a test chooses. This file also works as a config file.

A process dies some time after it enters a phase, if the file KILLS/<replica>.<rank>.<phase> exists. The file has the
seconds until then, and is renamed to killed.<replica>.<rank>.<phase> at the end. With 'hang' in the file, the main
thread sleeps instead, while the other threads of the process go on. A process writes KILLS/member.<pid>
after an update in which it has taken part, and KILLS/lead has the number of the replica that writes the log.
"""
import os
import pathlib
import signal
import threading
import time

import torch

from kilogpt.parallel.apply import Parallel
from kilogpt.parallel.bits_per_byte import BitsPerByte
from kilogpt.replicas.log import ReplicaLog
from kilogpt.replicas.membership import Membership, SafeTransport
from kilogpt.run.checkpoint import Saver
from kilogpt.run.guard import Guard

_PHASES = {
    'forward': (Parallel, 'forward_backward'), 'backward': (torch.autograd, 'backward'), 'sum': (Membership, 'add_up'),
    'vote': (Membership, 'vote'), 'update': (Guard, 'step'), 'quorum': (Membership, 'meet'), 'log': (ReplicaLog, 'lead'),
    'evaluation': (BitsPerByte, 'evaluate'), 'save': (Saver, '_write'), 'send': (SafeTransport, 'send_checkpoint'),
    'receive': (Membership, '_receive')}
_folder = pathlib.Path(os.environ['KILLS'])
_replica, _rank = (os.environ.get(name) for name in ('REPLICA_GROUP_ID', 'RANK'))


def die(order):
    time.sleep(float(order.read_text()))
    order.rename(order.with_name(f'killed.{order.name}'))
    os.kill(os.getpid(), signal.SIGKILL)


def make_mortal(phase, place, name):
    function, order = getattr(place, name), _folder / f'{_replica}.{_rank}.{phase}'

    def enter_phase(*args, **options):
        if order.exists() and order.read_text() == 'hang':
            order.unlink()
            time.sleep(1e6)
        if order.exists():
            threading.Thread(target=die, args=[order]).start()
        result = function(*args, **options)
        if phase == 'vote' and result:
            (_folder / f'member.{os.getpid()}').touch()
        if phase == 'log':
            (_folder / 'lead').write_text(_replica)
        return result

    setattr(place, name, enter_phase)


def make_all_mortal():
    for phase, (place, name) in _PHASES.items():
        make_mortal(phase, place, name)


make_all_mortal()
