"""Where the time and the communicated bytes of an iteration go, read from a trace of torch.profiler."""
import json
import math
import os
import re

import torch

from kilogpt.run import Hook

# An event's category is the first whose pattern matches the event's name in lower case.
PATTERNS = {
    'data': r'^data$|memcpy htod',
    'optimizer': r'^optimizer$|adam|multi_tensor_apply|lpnorm',
    'collectives': r'nccl|gloo|c10d',
    'attention': r'scaled_?dot_?product|flash|fmha|sdpa|kilogpt::attention',
    'matmul': r'gemm|nvjet|cutlass|xmma|aten::(mm|addmm|bmm|baddbmm|matmul|linear|mkldnn)',
}
CATEGORIES = ('matmul', 'attention', 'other compute', 'optimizer', 'collectives', 'data', 'idle')
# {operator of c10d: its name in the summary}. All communication in PyTorch goes through these operators.
COLLECTIVES = dict(allreduce='all_reduce', allgather='all_gather', reduce_scatter='reduce_scatter',
                   alltoall='all_to_all', broadcast='broadcast', send='send', recv='recv')
ITEM_BYTES = {'double': 8, 'long int': 8, 'long': 8, 'half': 2, 'bfloat16': 2}  # any other type takes 4


class Profiler(Hook):
    """Traces iterations of this process to out_dir/trace.json (Chrome's format) and prints a summary.

    The figures of the summary also go to out_dir/profile.json. Four iterations are traced, after five in
    which the run settles; both numbers are smaller in a run of less than nine iterations.
    iterations: the number of iterations of the whole run.
    """

    def __init__(self, out_dir, iterations):
        self.out_dir = out_dir
        self.n_traced = min(4, max(1, iterations))
        n_settling = min(5, max(0, iterations - self.n_traced))
        self.is_reported = False
        warm_up = min(2, n_settling + 1)
        schedule = torch.profiler.schedule(
            wait=n_settling + 1 - warm_up, warmup=warm_up, active=self.n_traced, repeat=1)
        self.profiler = torch.profiler.profile(
            schedule=schedule, record_shapes=True, on_trace_ready=self._report)
        self.profiler.start()
        self.profiler.step()  # the time before the first iteration is a step of its own

    def after_update(self):
        self.profiler.step()

    def _report(self, profiler):
        path = os.path.join(self.out_dir, 'trace.json')
        profiler.export_chrome_trace(path)
        events, steps = read_trace(path)
        milliseconds = breakdown(events, steps)
        communicated = communicated_bytes(events, steps)
        with open(os.path.join(self.out_dir, 'profile.json'), 'w', encoding='utf-8') as file:
            json.dump(dict(milliseconds=milliseconds, bytes=communicated), file, indent=1)
        total = sum(milliseconds.values())
        print(f'profile of {self.n_traced} iteration(s) of {total:.1f}ms each, traced in {path}')
        for category, value in milliseconds.items():
            print(f'  {category:<14}{value:>10.2f}ms {100 * value / total:>6.1f}%', flush=True)
        volumes = ', '.join(f'{name} {count / 1e6:,.3f}MB' for name, count in communicated.items())
        print('  communicated ', volumes or 'nothing', flush=True)
        self.is_reported = True

    def close(self):
        self.profiler.stop()
        if not self.is_reported:
            print('no profile: the run ended before the iterations to trace')


def read_trace(path):
    """Return (events with a duration, those that are whole iterations) of a trace in Chrome's format."""
    with open(path, encoding='utf-8') as file:
        events = [event for event in json.load(file)['traceEvents'] if event.get('ph') == 'X']
    steps = [e for e in events if e['name'].startswith('ProfilerStep') and e['cat'] == 'user_annotation']
    return events, steps


def communicated_bytes(events, steps):
    """Bytes per iteration and collective, {'all_reduce': 4e6, ...}, as this process sees them.

    Each collective counts its whole tensor, which is the output of all_gather and the input of
    reduce_scatter, whatever the algorithm puts on the wire. send and recv count the bytes that leave and
    arrive. Sums of single numbers, a few dozen bytes, are included.
    """
    item_bytes = _item_bytes_by_elements(events)
    communicated = {}
    for event in events:
        name = next((name for operator, name in COLLECTIVES.items() if operator in event['name']), None)
        if name is None or not event['name'].startswith('c10d::'):
            continue
        inputs = zip(event['args']['Input Dims'], event['args']['Input type'])
        tensors = [(_elements(dims), kind) for dims, kind in inputs
                   if kind not in ('', 'Scalar', 'ScalarList')]
        kind = tensors[0][1]
        if kind == 'TensorList':
            size = next((item_bytes[elements] for elements, _ in tensors if elements in item_bytes), 4)
        else:
            size = _item_bytes(kind)
        n_bytes = size * max(elements for elements, _ in tensors)
        communicated[name] = communicated.get(name, 0) + n_bytes / len(steps)
    return communicated


def _item_bytes_by_elements(events):
    """{number of elements: bytes of one element}, from the events of gloo and NCCL.

    These events tell the type of a list of tensors, which c10d's own events do not.
    """
    item_bytes = {}
    for event in events:
        args = event.get('args', {})
        if event['name'].startswith('gloo:'):
            item_bytes[_elements(args['Input Dims'][0])] = _item_bytes(args['Input type'][0])
        elif event['name'] == 'record_param_comms' and 'dtype' in args:  # an event of NCCL
            item_bytes[args.get('In msg nelems')] = _item_bytes(args['dtype'])
            item_bytes[args.get('Out msg nelems')] = _item_bytes(args['dtype'])
    return item_bytes


def _elements(dims):
    """Number of elements of a tensor with these dimensions, or of a list of tensors."""
    return sum(map(_elements, dims)) if dims and isinstance(dims[0], list) else math.prod(dims)


def _item_bytes(type_name):
    return ITEM_BYTES.get(type_name.lower().removeprefix('c10::'), 4)


def breakdown(events, steps):
    """Milliseconds per iteration in each of CATEGORIES, from a trace.

    A trace of a GPU is divided by its kernels, any other trace by the operators of the main thread.
    Collectives count where they do not overlap with computation. The rest is idle: waiting for the host, for
    other processes, or for data.
    """
    begin = min(start for start, _ in map(_interval, steps))
    end = max(stop for _, stop in map(_interval, steps))
    computing, communicating = [], []  # intervals
    if any(event['cat'] == 'kernel' for event in events):
        kernels = [e for e in events if e['cat'] in ('kernel', 'gpu_memcpy', 'gpu_memset')]
        work = [(e, _category(e['name']), e['dur']) for e in kernels]
    else:
        operators = [e for e in events if e['cat'] in ('cpu_op', 'user_annotation') and e not in steps]
        communicating = [_interval(e) for e in operators if _category(e['name']) == 'collectives']
        # Other annotations include waiting: a pipeline waits for its neighbours, gloo for other processes.
        work = _self_times([e for e in operators if e['tid'] == steps[0]['tid'] and (
            e['cat'] == 'cpu_op' or _category(e['name']) in ('data', 'optimizer'))])
    spans = dict.fromkeys(CATEGORIES, 0.0)
    for event, category, duration in work:
        start, stop = _interval(event)
        start, stop = max(begin, start), min(end, stop)
        if start < stop:
            intervals = communicating if category == 'collectives' else computing
            intervals.append((start, stop))
            spans[category] += duration
    computed = _length(computing)
    spans['collectives'] = _length(computing + communicating) - computed
    spans['idle'] = end - begin - computed - spans['collectives']
    return {category: span / 1000 / len(steps) for category, span in spans.items()}


def _self_times(events):
    """[event, category, time without that of nested events] of the events of one thread."""
    times, enclosing = [], []  # enclosing: the entries of `times` around the current event
    for event in sorted(events, key=lambda e: (e['ts'], -e['dur'])):
        while enclosing and event['ts'] >= _interval(enclosing[-1][0])[1]:
            enclosing.pop()
        category = _category(event['name'])
        if enclosing:
            parent = enclosing[-1]
            parent[2] -= event['dur']
            # A matrix product inside attention counts as attention, and arithmetic inside an optimizer's step
            # as optimizer.
            if category == 'other compute' or parent[1] != 'other compute':
                category = parent[1]
        enclosing.append([event, category, event['dur']])
        times.append(enclosing[-1])
    return times


def _interval(event):
    """(start, stop) of an event in microseconds."""
    return event['ts'], event['ts'] + event['dur']


def _category(name):
    for category, pattern in PATTERNS.items():
        if re.search(pattern, name.lower()):
            return category
    return 'other compute'


def _length(intervals):
    """Length of the union of intervals (start, stop)."""
    total, reached = 0.0, float('-inf')
    for start, stop in sorted(intervals):
        total += max(0.0, stop - max(start, reached))
        reached = max(reached, stop)
    return total
