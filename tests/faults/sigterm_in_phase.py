"""SIGTERM reaches all processes of a run, as from torchrun, while rank 1 is in a certain phase.

FAULT_PHASE: training, evaluation, saving, or iteration, which is training where the processes exchange
signals only between iterations. FAULT_FOLDER: a folder in which the processes find each other. Its file
`sent` is as old as the signal.
"""
import os
import pathlib
import signal
import time

import model
from kilogpt.run.signals import Signals

phase, folder = os.environ['FAULT_PHASE'], pathlib.Path(os.environ['FAULT_FOLDER'])
world_size = int(os.environ['WORLD_SIZE'])
forward, fsync = model.GPT.forward, os.fsync
calls = 0


def send_sigterm():
    pids = [int(path.name[4:]) for path in folder.glob('pid-*')]
    assert len(pids) == world_size
    (folder / 'sent').touch()
    for pid in pids:
        os.kill(pid, signal.SIGTERM)
    time.sleep(0.5)  # until the signal has reached the others


def stopped_forward(self, *args, **options):
    global calls
    counts = self.training == (phase != 'evaluation')
    calls += counts
    # Training: after a warm-up pass, each iteration has 5 micro-steps. The signal comes in the second
    # micro-step of the ninth iteration. Evaluation: with 6 micro-batches each, the signal comes in the fourth
    # of the second.
    if counts and calls == (10 if phase == 'evaluation' else 1 + 8 * 5 + 2):
        send_sigterm()
    return forward(self, *args, **options)


def stopped_fsync(descriptor):
    if not (folder / 'sent').exists():
        send_sigterm()
    return fsync(descriptor)


(folder / f'pid-{os.getpid()}').touch()
if phase in ('training', 'evaluation'):
    Signals.PERIOD = 0  # like micro-steps of more than a second
if phase == 'iteration':
    Signals.PERIOD = 1e9  # like short iterations, also on a loaded machine
if os.environ['RANK'] == '1':
    if phase == 'saving':
        os.fsync = stopped_fsync
    else:
        model.GPT.forward = stopped_forward
