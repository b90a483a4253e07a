"""Send SIGTERM to all processes of a run, as torchrun does, while rank 1 is in a certain phase.

FAULT_PHASE: training, evaluation, saving, or iteration. The last is training in which the processes exchange
signals only between iterations. FAULT_FOLDER: a folder in which the processes find each other; its file
`sent` is written when the signal is sent.
"""
import os
import pathlib
import signal
import time

import model
from kilogpt.signals import Signals

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
    time.sleep(0.5)  # the others learn of it meanwhile


def stopped_forward(self, *args, **options):
    global calls
    counts = self.training == (phase != 'evaluation')
    calls += counts
    # Training: one pass is dropped, then an iteration has 5 micro-steps; the second of the ninth is meant.
    # Evaluation: 6 micro-batches; the fourth of the second evaluation is meant, after six iterations.
    if counts and calls == (10 if phase == 'evaluation' else 1 + 8 * 5 + 2):
        send_sigterm()
    return forward(self, *args, **options)


def stopped_fsync(descriptor):
    if not (folder / 'sent').exists():
        send_sigterm()
    return fsync(descriptor)


(folder / f'pid-{os.getpid()}').touch()
if phase in ('training', 'evaluation'):
    Signals.PERIOD = 0  # as if each micro-step took longer than a second
if phase == 'iteration':
    Signals.PERIOD = 1e9  # as if iterations were short, on a loaded machine too
if os.environ['RANK'] == '1':
    if phase == 'saving':
        os.fsync = stopped_fsync
    else:
        model.GPT.forward = stopped_forward
