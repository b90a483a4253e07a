"""Record the memory and the collectives of each process's second iteration, into OUT_DIR.record.RANK."""
import json
import os
import sys

from kilogpt import optim
from kilogpt.recorder import Recorder

out_dir = next(argument for argument in sys.argv if argument.startswith('--out_dir=')).partition('=')[2]
scheduled_lr = optim.scheduled_lr
recorder = Recorder()
iterations = 0


def recording_scheduled_lr(*args):  # train.py calls it once an iteration
    global iterations
    iterations += 1
    if iterations == 2:
        recorder.start()
    if iterations == 3:
        with open(f'{out_dir}.record.{os.environ.get("RANK", "0")}', 'w') as file:
            json.dump(dict(peak=sum(recorder.peak().values()), collectives=recorder.collectives()), file)
    return scheduled_lr(*args)


optim.scheduled_lr = recording_scheduled_lr
recorder.__enter__()
