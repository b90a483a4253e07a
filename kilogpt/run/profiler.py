"""Where the time of an iteration goes and what it communicates, from a trace of torch.profiler."""
import json
import math
import os
import re

import torch

from kilogpt.run import Hook, verdict

# The category of an event is the first whose pattern matches the name of the event in lower case.
PATTERNS = {
    'data': r'^data$|memcpy htod',
    'optimizer': r'^optimizer$|adam|multi_tensor_apply|lpnorm',
    'collectives': r'nccl|gloo|c10d',
    # On CPUs, batched products and softmaxes are those of devices.cpu.PlainAttention.
    'attention': r'scaled_?dot_?product|flash|fmha|sdpa|kilogpt::(?:visible_)?attention|bmm|'
                 r'aten::_?softmax|\bsoftmaxbackward',
    'matmul': r'gemm|nvjet|cutlass|xmma|aten::(_grouped_|_scaled_)?mm|aten::(addmm|matmul|linear|mkldnn)',
}
CATEGORIES = ('matmul', 'attention', 'other compute', 'optimizer', 'collectives', 'data', 'idle')
# All communication in PyTorch ends in operators of c10d. These are their names, and ours.
COLLECTIVES = dict(allreduce='all_reduce', allgather='all_gather', reduce_scatter='reduce_scatter',
                   alltoall='all_to_all', broadcast='broadcast', send='send', recv='recv')
SHORT = 20  # microseconds of an operator on a CPU, of which its start takes about as many
ITEM_BYTES = {'double': 8, 'long int': 8, 'long': 8, 'half': 2, 'bfloat16': 2}  # any other type takes 4


class Profiler(Hook):
    """Traces iterations of this process to out_dir/trace.json (Chrome's format), and prints a summary.

    The figures, and the bytes communicated, go to out_dir/profile.json. Four iterations are traced, after
    five in which the run settles; in a run of less than nine iterations, both are fewer.
    run: the Run, which makes `max_iters` iterations.
    """

    def __init__(self, run):
        self.run, self.out_dir, iterations = run, run.cluster.folder.path, run.max_iters - run.iteration
        self.traced = min(4, max(1, iterations))
        settle = min(5, max(0, iterations - self.traced))
        self.is_done = False
        warm_up = min(2, settle + 1)
        schedule = torch.profiler.schedule(wait=settle + 1 - warm_up, warmup=warm_up, active=self.traced,
                                           repeat=1)
        self.profiler = torch.profiler.profile(
            schedule=schedule, record_shapes=True, on_trace_ready=self._report)
        self.profiler.start()
        self.profiler.step()  # the time before the first iteration counts as a step

    def after_update(self):
        """Tell the profiler that an iteration has ended."""
        self.profiler.step()

    def _report(self, profiler):
        path = os.path.join(self.out_dir, 'trace.json')
        profiler.export_chrome_trace(path)
        events, steps = read_trace(path)
        milliseconds = breakdown(events, steps)
        moved = bytes_moved(events, steps)
        with open(os.path.join(self.out_dir, 'profile.json'), 'w', encoding='utf-8') as file:
            json.dump(dict(milliseconds=milliseconds, bytes=moved), file, indent=1)
        total = sum(milliseconds.values())
        print(f'profile of {self.traced} iteration(s) of {total:.1f}ms each, traced in {path}')
        for category, value in milliseconds.items():
            print(f'  {category:<14}{value:>10.2f}ms {100 * value / total:>6.1f}%', flush=True)
        communicated = ', '.join(f'{name} {count / 1e6:,.3f}MB' for name, count in moved.items())
        print('  communicated ', communicated or 'nothing', flush=True)
        print(' ', verdict.verdict_of_profile(milliseconds, *losses(events, steps), verdict.situation_of(self.run)),
              flush=True)
        self.is_done = True

    def close(self):
        """Stop the profiler, and say so if the run was too short to trace."""
        self.profiler.stop()
        if not self.is_done:
            print('no profile: the run ended before the iterations to be traced')


def read_trace(path):
    """(events with a duration, those of them that are whole iterations) of a trace in Chrome's format."""
    with open(path, encoding='utf-8') as file:
        events = [event for event in json.load(file)['traceEvents'] if event.get('ph') == 'X']
    steps = [e for e in events if e['name'].startswith('ProfilerStep') and e['cat'] == 'user_annotation']
    return events, steps


def bytes_moved(events, steps):
    """Bytes per iteration by collective, {'all_reduce': 4e6, ...}, counted as whole tensors on this process.

    The whole tensor is the result of all_gather and the input of reduce_scatter, whatever the algorithm
    transfers; send and recv count what leaves and what arrives. Sums of single numbers, a few dozen bytes,
    are included.
    """
    item_bytes = _item_bytes_by_elements(events)
    moved = {}
    for event in events:
        name = next((ours for key, ours in COLLECTIVES.items() if key in event['name']), None)
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
        moved[name] = moved.get(name, 0) + size * max(elements for elements, _ in tensors) / len(steps)
    return moved


def _item_bytes_by_elements(events):
    """{number of elements: bytes of one element}, from the events of gloo and NCCL.

    The events of c10d itself do not give the type of a list of tensors.
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
    """The number of elements of a tensor with these dimensions, or of a list of tensors."""
    return sum(map(_elements, dims)) if dims and isinstance(dims[0], list) else math.prod(dims)


def _item_bytes(type_name):
    return ITEM_BYTES.get(type_name.lower().removeprefix('c10::'), 4)


def breakdown(events, steps):
    """{category: milliseconds per iteration} of a trace, for CATEGORIES.

    With a GPU its kernels count, otherwise the operators of the main thread. Collectives count as far as they
    do not overlap with computation. Idle is the remaining time: waiting for the host, for other processes,
    for data.
    """
    begin, end = _span(steps)
    spans = dict.fromkeys(CATEGORIES, 0.0)
    work, communicating = _work(events, steps)
    computing = []  # intervals
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


def losses(events, steps):
    """What `breakdown` does not tell, both in milliseconds per iteration.

    First, of the idle time of a GPU, that in which the host waits for data (on a CPU this time is in `data`). Second,
    {category: the time of operators on a CPU that take about as long to start as to run}.
    """
    begin, end = _span(steps)
    work, _ = _work(events, steps)
    milliseconds = 1 / 1000 / len(steps)
    if not _has_kernels(events):
        short = {}
        for _, category, duration in work:
            if duration < SHORT:
                short[category] = short.get(category, 0.0) + duration * milliseconds
        return 0.0, short
    busy = [_interval(event) for event, _, _ in work]
    busy = [(max(begin, start), min(end, stop)) for start, stop in busy if start < end and stop > begin]
    waiting = [_interval(event) for event in events if event['name'] == 'data' and event['cat'] == 'user_annotation']
    waiting = [(max(begin, start), min(end, stop)) for start, stop in waiting if start < end and stop > begin]
    return (_length(busy + waiting) - _length(busy)) * milliseconds, {}


def _work(events, steps):
    """([(event, category, duration)] of what a GPU or the main thread does, intervals of collectives on a CPU)."""
    if _has_kernels(events):
        kernels = [e for e in events if e['cat'] in ('kernel', 'gpu_memcpy', 'gpu_memset')]
        return [(e, _category(e['name']), e['dur']) for e in kernels], []
    operators = [e for e in events if e['cat'] in ('cpu_op', 'user_annotation') and e not in steps]
    communicating = [_interval(e) for e in operators if _category(e['name']) == 'collectives']
    # Other annotations include waiting, of a pipeline for its neighbours and of gloo for other processes.
    return _self_times([e for e in operators if e['tid'] == steps[0]['tid'] and (
        e['cat'] == 'cpu_op' or _category(e['name']) in ('data', 'optimizer'))]), communicating


def _has_kernels(events):
    return any(event['cat'] == 'kernel' for event in events)


def _span(steps):
    """(start of the first, stop of the last) iteration."""
    return min(start for start, _ in map(_interval, steps)), max(stop for _, stop in map(_interval, steps))


def _self_times(events):
    """[[event, category, its duration without enclosed events]] of the nested events of one thread."""
    times, enclosing = [], []  # enclosing: the entries of `times` around the present event
    for event in sorted(events, key=lambda e: (e['ts'], -e['dur'])):
        while enclosing and event['ts'] >= _interval(enclosing[-1][0])[1]:
            enclosing.pop()
        category = _category(event['name'])
        if enclosing:
            parent = enclosing[-1]
            parent[2] -= event['dur']
            # A product inside attention counts as attention, arithmetic inside an optimizer step as
            # optimizer.
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
    """The total length of the union of intervals (start, stop)."""
    total, reached = 0.0, float('-inf')
    for start, stop in sorted(intervals):
        total += max(0.0, stop - max(start, reached))
        reached = max(reached, stop)
    return total
