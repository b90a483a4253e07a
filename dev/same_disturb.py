"""Disturb a run of train.py that is given this file as a config file, as dev/same_runs.py does.

The environment variable DISTURB says how, as a JSON object with any of these entries:

    pace      each forward pass in training takes this many seconds longer
    slow      [first, last]: these passes in training, counted from 1, take 1.2 seconds longer
    multiply  [first, last, factor]: the gradients of these passes are multiplied by the factor
    sigterm   [phase, number]: the process gets SIGTERM in this pass in 'training' or in 'evaluation', or in
              this call of fsync in 'saving'
    rank      the signal goes to this process alone; by default it goes to all

It builds upon model.GPT and os.fsync alone, so that it works wherever other modules of the repository are.
"""
import json
import os
import signal
import time

import model

# A config file's names that do not begin with _ would be keys of train.py.
_options = json.loads(os.environ['DISTURB'])
_phase, _number = _options.get('sigterm', ['none', 0])
_is_meant = _options.get('rank') in (None, int(os.environ.get('RANK', '0')))
_counts = dict(training=0, evaluation=0, saving=0)
_forward, _fsync = model.GPT.forward, os.fsync


def _count(phase):
    """Count a call, and send the signal if this is the one."""
    _counts[phase] += 1
    if _is_meant and (phase, _counts[phase]) == (_phase, _number):
        os.kill(os.getpid(), signal.SIGTERM)


def _disturbed_forward(self, *args, **options):
    _count('training' if self.training else 'evaluation')
    result = _forward(self, *args, **options)
    if self.training:
        number = _counts['training']
        time.sleep(_options.get('pace', 0))
        first, last = _options.get('slow', [0, 0])
        if first <= number <= last:
            time.sleep(1.2)
        first, last, factor = _options.get('multiply', [0, 0, 1])
        if first <= number <= last:
            result.register_hook(lambda gradient: gradient * factor)
    return result


def _counted_fsync(descriptor):
    _count('saving')
    return _fsync(descriptor)


model.GPT.forward = _disturbed_forward
os.fsync = _counted_fsync
