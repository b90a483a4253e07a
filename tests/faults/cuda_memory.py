"""Measure the memory of an iteration, under dev/cuda_without_gpu, and note what the planner has predicted for it.

OUT_DIR.memory.RANK gets JSON: `predicted`, bytes of tensors by part, `allocated`, the most bytes of tensors in the third
iteration, and `reserved`, which the allocator took from the device for all. Parameters do not get values, so that the
host need not have room for them. With MEMORY_PLACES=1 the file also has `places`, the bytes that were allocated when
they were most, by line.
"""
import collections
import ctypes
import json
import os
import runpy
import sys

import torch

if hasattr(ctypes.CDLL(None), 'on_cuda_call'):  # on pretended GPUs; real ones compute what the host must know
    runpy.run_path(os.path.join(os.path.dirname(__file__), 'cuda_sizes.py'))
if os.environ.get('ONE_OF_MANY'):
    runpy.run_path(os.path.join(os.path.dirname(__file__), 'one_of_many.py'))
from kilogpt.parallel import dtensor
from kilogpt.plan import memory_model
from kilogpt.run import state

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
out_dir = next(argument for argument in sys.argv if argument.startswith('--out_dir=')).partition('=')[2]
path = f'{out_dir}.memory.{os.environ.get("RANK", "0")}'
finds_places = os.environ.get('MEMORY_PLACES') == '1'
found, memory, count_update = {}, memory_model.memory, state.Progress.count_update


def noted_memory(shape, layout, work):
    parts = memory(shape, layout, work)
    found.setdefault('predicted', parts)  # later calls try other keys
    return parts


def measured_count(self):
    count_update(self)
    if self.iteration == 2:  # the optimizer has its state, and everything is compiled
        torch.cuda.reset_peak_memory_stats()
        if finds_places:
            found['segments'] = torch.cuda.memory._snapshot()['segments']
            torch.cuda.memory._record_memory_history(stacks='python', max_entries=10 ** 7)
    elif self.iteration == 3:
        found.update(allocated=torch.cuda.max_memory_allocated(), reserved=torch.cuda.max_memory_reserved())
        if finds_places:
            trace = torch.cuda.memory._snapshot()['device_traces'][torch.cuda.current_device()]
            found['places'] = places_at_peak(found.pop('segments'), trace)
        with open(path, 'w') as file:
            json.dump(found, file)


def places_at_peak(segments, trace):
    """[[bytes, tensors, place]] at the moment with most bytes. Those of earlier iterations have their size for a place."""
    alive = {}
    for segment in segments:
        for block in segment['blocks']:
            if block['state'] == 'active_allocated':
                alive[block['address']] = block['size'], f'earlier, of {block["size"]:,} bytes'
    total = most = sum(size for size, _ in alive.values())
    at_peak = dict(alive)
    for event in trace:
        if event['action'] == 'alloc':
            alive[event['addr']] = event['size'], place_of(event['frames'])
            total += event['size']
        elif event['action'] == 'free_completed':
            total -= alive.pop(event['addr'], (0, ''))[0]
        if total > most:
            most, at_peak = total, dict(alive)
    sums = collections.defaultdict(lambda: [0, 0])
    for size, place in at_peak.values():
        sums[place][0] += size
        sums[place][1] += 1
    return sorted(([*counts, place] for place, counts in sums.items()), reverse=True)


def place_of(frames):
    """The two innermost lines of ours in the stack of an allocation."""
    lines = [f'{os.path.relpath(frame["filename"], ROOT)}:{frame["line"]} {frame["name"]}'
             for frame in frames if frame['filename'].startswith(ROOT)]
    return ' < '.join(lines[:2]) or 'backward'


memory_model.memory, state.Progress.count_update, dtensor.fill = noted_memory, measured_count, lambda *_: None
