"""Settings of short runs on a pretended GPU, and what a run asked of CUDA."""
import collections
import json
import os
import pathlib
import re

# With cpu_offload the host computes with what the memory of gradients holds.
SHORT = '--max_iters=3 --lr_decay_iters=3 --eval_interval=3 --eval_iters=1 --on_nonfinite=skip'.split()
SMALL = ('--n_layer=2 --n_head=4 --n_kv_head=2 --n_embd=64 --block_size=64 --batch_size=4 '
         '--gradient_accumulation_steps=2 --log_interval=1 --warmup_iters=1').split()

# Calls that return when the device, or a copy, is done.
WAITS = {'cudaStreamSynchronize', 'cudaEventSynchronize', 'cudaDeviceSynchronize', 'cudaMemcpy',
         'copy of pageable memory', 'copy of a pageable number'}


def read_calls(path):
    """{iteration: Counter of (call, place or stream)} of a file of faults/record_cuda.py, if it exists."""
    found = {}
    if os.path.exists(path):
        for iteration, entries in json.loads(pathlib.Path(path).read_text()).items():
            found[int(iteration)] = collections.Counter({(call, where): n for call, where, n in entries})
    return found


def waits_of(run, iterations):
    """{place: waits} of the host for the device in some iterations."""
    found = collections.Counter()
    for iteration in iterations:
        for (call, place), n in run.calls[iteration].items():
            if call in WAITS:
                found[without_line(place)] += n
    return dict(found)


def calls_in_streams(run, call):
    """Counter of {stream: how often} a call was made in an iteration."""
    found = collections.Counter()
    for (other, stream), n in run.streams[5].items():
        if other == call:
            found[stream] += n
    return found


def copies_from_pageable_memory(run):
    """The places at which checkpoints copy more than a number to or from memory that is not pinned."""
    return {without_line(place) for calls in run.calls.values() for call, place in calls
            if call == 'copy of pageable memory' and place.startswith('kilogpt/run/checkpoint')}


def products_of(run):
    """The kinds of matrix products in an iteration."""
    return {call for call, _ in run.calls[2] if call.startswith('product')}


def without_line(place):
    """'kilogpt/run/guard.py:107 settle' -> 'kilogpt/run/guard.py settle'."""
    return re.sub(r':\d+', '', place)
