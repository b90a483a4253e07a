"""Record the memory and the collectives of each process's iterations in OUT_DIR.record.RANK.

The collectives are those of one iteration. The memory is the lowest peak of three iterations: on a loaded
machine, a thread of gloo sometimes frees tensors late.
"""
import json
import os
import sys

from kilogpt import learning_rate
from kilogpt.plan.byte_counter import ByteCounter

out_dir = next(argument for argument in sys.argv if argument.startswith('--out_dir=')).partition('=')[2]
scheduled_lr = learning_rate.scheduled_lr
counter = ByteCounter()
iterations, peaks = 0, []


def recording_scheduled_lr(*args):  # train.py calls it once an iteration
    global iterations
    iterations += 1
    if iterations > 2:
        peaks.append(sum(counter.peak().values()))
    if iterations == 5:
        with open(f'{out_dir}.record.{os.environ.get("RANK", "0")}', 'w') as file:
            json.dump(dict(peak=min(peaks), collectives=counter.collectives()), file)
    counter.start()
    return scheduled_lr(*args)


learning_rate.scheduled_lr = recording_scheduled_lr
counter.__enter__()
