"""What a run says of itself: console lines, metrics.jsonl, wandb, throughput, MFU, and a profile of where time goes."""
import json
import math
import os
import re
import resource
import sys
import time

import torch

# Dense peak TFLOP/s from the makers' data sheets: 16-bit with float32 accumulation, and float32 (TF32 where there is one)
PEAK_TFLOPS = {
    'B200': (2250, 1125), 'H200': (989, 494), 'GH200': (989, 494), 'H100 PCIe': (756, 378), 'H100 NVL': (835, 417),
    'H100': (989, 494), 'A100': (312, 156), 'A10': (125, 62.5), 'A40': (149.7, 74.8), 'A6000': (154.8, 77.4),
    'L4': (121, 60.5), 'L40S': (362, 183), 'L40': (181, 90.5), 'RTX 5090': (209.5, 104.8), 'RTX 4090': (165.2, 82.6),
    'RTX 3090': (71, 35.6), 'V100': (125, 15.7), 'T4': (65, 8.1),
}


def peak_flops(device, dtype):
    """Peak FLOP/s of one device in dtype ('float32', 'bfloat16', 'float16'); None where it is unknown.

    A CPU has no figure of its own: a 512 × 512 matrix product is timed, as much as the threads at hand can do.
    """
    if device.type == 'cuda':
        name = torch.cuda.get_device_name(device)
        return next((peak[dtype == 'float32'] * 1e12 for key, peak in PEAK_TFLOPS.items()
                     if re.search(rf'\b{key}\b', name)), None)
    if device.type != 'cpu':
        return None
    # float16 has no fast product on CPUs: float32 is the measure there
    a = torch.ones(512, 512, dtype=torch.bfloat16 if dtype == 'bfloat16' else torch.float32)
    times = []
    for _ in range(10):
        start = time.perf_counter()
        a @ a
        times.append(time.perf_counter() - start)
    return 2 * 512 ** 3 / min(times)


class Metrics:
    """Writes a run's lines to the console, out_dir/metrics.jsonl and wandb; on every process but the main one, nothing.

    wandb: None, or the arguments of wandb.init (project, name, config, id). ImportError: it is not installed. ValueError: it cannot begin.
    """

    def __init__(self, out_dir, is_main, wandb=None):
        self.file = self.wandb = None
        if not is_main:
            return
        if wandb is not None:
            try:
                import wandb as client
            except ImportError:
                raise ImportError('wandb_log=True needs wandb: pip install wandb, or set --wandb_log=False') from None
            try:
                self.wandb = client.init(dir=out_dir, resume='allow', **wandb)
            except client.Error as error:  # no account, no network
                raise ValueError(f'wandb_log=True, but {error} (or set WANDB_MODE=offline, or --wandb_log=False)') from None
        path = os.path.join(out_dir, 'metrics.jsonl')
        if os.path.exists(path):
            with open(path, 'rb+') as file:  # a line that a crash of the machine cut off
                content = file.read()
                file.truncate(content.rfind(b'\n') + 1)
        # lines that a full disk does not take stay in the buffer, and come before the next
        self.out_dir, self.full = out_dir, False
        self.file = open(path, 'a', buffering=2 ** 20, encoding='utf-8')

    @property
    def wandb_id(self):
        return self.wandb.id if self.wandb else None

    def train(self, line, eta_seconds):
        """A training line: iter loss grad_norm lr dt_ms tokens_per_sec mfu mem_gb tokens; of several processes slowest_rank lag_ms."""
        mfu = 'n/a' if line['mfu'] is None else f'{100 * line["mfu"]:.2f}%'
        lag = f', rank {line["slowest_rank"]} last by {line["lag_ms"]:.1f}ms' if 'lag_ms' in line else ''
        hours, seconds = divmod(int(eta_seconds), 3600)
        self._write(line, f'iter {line["iter"]}: loss {line["loss"]:.4f}, time {line["dt_ms"]:.2f}ms, mfu {mfu}, '
                          f'{line["tokens_per_sec"]:,.0f} tok/s, grad norm {line["grad_norm"]:.3f}, lr {line["lr"]:.2e}, '
                          f'mem {line["mem_gb"]:.2f}GB, eta {hours}:{seconds // 60:02d}:{seconds % 60:02d}{lag}')

    def eval(self, line):
        """An evaluation line: iter train_loss val_loss."""
        self._write(line, f'step {line["iter"]}: train loss {line["train_loss"]:.4f}, val loss {line["val_loss"]:.4f}')

    def checkpoint(self, line, path):
        """A line of a save: iter ckpt_stall_ms, for how long training waited."""
        self._write(line, f'saving {path}, training waited {line["ckpt_stall_ms"]:.0f}ms')

    def dump(self, name, content):
        """Write JSON to a file of its own in out_dir; returns its path."""
        path = os.path.join(self.out_dir, name) if self.file else ''
        if self.file:
            try:
                with open(path, 'w', encoding='utf-8') as file:
                    json.dump(content, file, indent=1)
            except OSError as error:
                return f'no file ({error})'
        return path

    def _write(self, line, text):
        if self.file is None:
            return
        print(text, flush=True)
        # JSON has no NaN or infinity: null, so that any reader can go on
        self.file.write(json.dumps({k: None if v != v or v in (float('inf'), -float('inf')) else v
                                    for k, v in line.items()}) + '\n')
        self._flush()
        if self.wandb:
            self.wandb.log(line, step=line['iter'])

    def _flush(self):
        try:
            self.file.flush()
            self.full = False
        except OSError as error:
            if not self.full:
                print(f'warning: metrics.jsonl could not be written ({error}). Training goes on; its lines wait for room', file=sys.stderr, flush=True)
            self.full = True

    def close(self):
        if self.file is not None:
            self._flush()
        if self.wandb:
            self.wandb.finish()


def peak_memory_gb(device):
    """Most memory this process has held so far, in GB (1e9 bytes): the allocator's on CUDA, else resident memory."""
    if device.type == 'cuda':
        return torch.cuda.max_memory_allocated(device) / 1e9
    unit = 1 if sys.platform == 'darwin' else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e9


def synchronize(device):
    """Wait for the device, so that a clock read next is read after the work."""
    if device.type != 'cpu':
        getattr(torch, device.type).synchronize()


CATEGORIES = ('matmul', 'attention', 'other compute', 'optimizer', 'collectives', 'data', 'idle')
# c10d's names, which all of PyTorch's ways to communicate come down to, and ours
COLLECTIVES = dict(allreduce='all_reduce', allgather='all_gather', reduce_scatter='reduce_scatter', alltoall='all_to_all',
                   broadcast='broadcast', send='send', recv='recv')
ITEM_BYTES = {'double': 8, 'long int': 8, 'long': 8, 'half': 2, 'bfloat16': 2}  # of what is not of 4


class Profiler:
    """Traces iterations 6 to 9 of this process into out_dir/trace.json (Chrome's format) and prints where their time went.

    The same figures go to out_dir/profile.json, with the bytes it communicated. Call step() before each iteration and after
    the last.
    """
    settle, traced = 5, 4

    def __init__(self, out_dir):
        self.out_dir, self.done = out_dir, False
        schedule = torch.profiler.schedule(wait=self.settle - 1, warmup=2, active=self.traced, repeat=1)
        self.profiler = torch.profiler.profile(schedule=schedule, record_shapes=True, on_trace_ready=self._report)
        self.profiler.start()

    def step(self):
        self.profiler.step()

    def _report(self, profiler):
        trace = os.path.join(self.out_dir, 'trace.json')
        profiler.export_chrome_trace(trace)
        events, steps = read_trace(trace)
        milliseconds, moved = breakdown(events, steps), bytes_moved(events, steps)
        total = sum(milliseconds.values())
        with open(os.path.join(self.out_dir, 'profile.json'), 'w', encoding='utf-8') as file:
            json.dump(dict(milliseconds=milliseconds, bytes=moved), file, indent=1)
        print(f'profile of {self.traced} iterations of {total:.1f}ms each, traced in {trace}')
        for category, value in milliseconds.items():
            print(f'  {category:<14}{value:>10.2f}ms {100 * value / total:>6.1f}%', flush=True)
        print('  communicated ', ', '.join(f'{name} {count / 1e6:,.3f}MB' for name, count in moved.items()) or 'nothing',
              flush=True)
        self.done = True

    def close(self):
        self.profiler.stop()
        if not self.done:
            print(f'no profile: it takes {self.settle + self.traced} iterations, set --max_iters to that at least')


def read_trace(path):
    """(events with a duration, those of them that are whole iterations) of a Chrome trace of torch.profiler."""
    with open(path, encoding='utf-8') as file:
        events = [event for event in json.load(file)['traceEvents'] if event.get('ph') == 'X']
    return events, [e for e in events if e['name'].startswith('ProfilerStep') and e['cat'] == 'user_annotation']


def bytes_moved(events, steps):
    """Bytes per iteration by collective, {'all_reduce': 4e6, ...}: the whole tensor of each, as this process sees it.

    That is what all_gather returns and reduce_scatter takes, whatever the algorithm puts on the wire; send and recv count what
    goes out and what comes in. Sums of single numbers are in it, some dozen bytes.
    """
    item_bytes, moved = {}, {}  # of lists the trace keeps no type: the backend's own event of as many elements has it
    for event in events:
        known = event.get('args', {})
        if event['name'].startswith('gloo:'):
            item_bytes[_elements(known['Input Dims'][0])] = _item_bytes(known['Input type'][0])
        elif event['name'] == 'record_param_comms' and 'dtype' in known:  # NCCL's
            item_bytes[known.get('In msg nelems')] = item_bytes[known.get('Out msg nelems')] = _item_bytes(known['dtype'])
    for event in events:
        name = next((ours for key, ours in COLLECTIVES.items() if key in event['name']), None)
        if name and event['name'].startswith('c10d::'):
            tensors = [(_elements(dims), kind) for dims, kind in zip(event['args']['Input Dims'], event['args']['Input type'])
                       if kind not in ('', 'Scalar', 'ScalarList')]
            size = (_item_bytes(tensors[0][1]) if tensors[0][1] != 'TensorList' else
                    next((item_bytes[n] for n, _ in tensors if n in item_bytes), 4))
            moved[name] = moved.get(name, 0) + size * max(n for n, _ in tensors) / len(steps)
    return moved


def _elements(dims):
    """Of a tensor of these dimensions, or of all tensors of a list."""
    return sum(map(_elements, dims)) if dims and isinstance(dims[0], list) else math.prod(dims)


def _item_bytes(type_name):
    return ITEM_BYTES.get(type_name.lower().removeprefix('c10::'), 4)


def breakdown(events, steps):
    """Milliseconds per iteration that a trace gives to each of CATEGORIES.

    On a GPU its kernels are counted, else the operators of the main thread. Collectives are what no computation hides, idle
    is what is left: waiting for the host, for other processes, or for data.
    """
    begin, end = min(e['ts'] for e in steps), max(e['ts'] + e['dur'] for e in steps)
    spans = dict.fromkeys(CATEGORIES, 0.0)
    busy, collectives = [], []  # (start, end) in microseconds
    on_gpu = any(event['cat'] == 'kernel' for event in events)
    if on_gpu:
        work = [e for e in events if e['cat'] in ('kernel', 'gpu_memcpy', 'gpu_memset')]
        timed = [(e, _category(e['name'])) for e in work]
    else:
        work = [e for e in events if e['cat'] in ('cpu_op', 'user_annotation') and e not in steps]
        collectives = [(e['ts'], e['ts'] + e['dur']) for e in work if _category(e['name']) == 'collectives']
        # other annotations enclose waiting: a pipeline's for its neighbours, gloo's for each other
        timed = _self_times([e for e in work if e['tid'] == steps[0]['tid'] and (
            e['cat'] == 'cpu_op' or _category(e['name']) in ('data', 'optimizer'))])
    for event, category in timed:
        start, stop = max(begin, event['ts']), min(end, event['ts'] + event['dur'])
        if start < stop:
            (collectives if category == 'collectives' else busy).append((start, stop))
            spans[category] += event.get('self', event['dur'])
    computing = _length(busy)
    spans['collectives'] = _length(busy + collectives) - computing
    spans['idle'] = end - begin - computing - spans['collectives']
    return {category: span / 1000 / len(steps) for category, span in spans.items()}


def _self_times(events):
    """(event, category) of one thread's nested events, each with its time outside of its children as event['self']."""
    timed, stack = [], []  # stack: the events that enclose the present one, with their categories
    for event in sorted(events, key=lambda e: (e['ts'], -e['dur'])):
        while stack and event['ts'] >= stack[-1][0]['ts'] + stack[-1][0]['dur']:
            stack.pop()
        category = _category(event['name'])
        if stack:
            stack[-1][0]['self'] -= event['dur']
            if category == 'other compute' or stack[-1][1] != 'other compute':
                category = stack[-1][1]  # what an attention or an optimizer step is made of belongs to it
        event['self'] = event['dur']
        stack.append((event, category))
        timed.append(stack[-1])
    return timed


def _category(name):
    for category, pattern in (('data', r'^data$|memcpy htod'), ('optimizer', r'^optimizer$|adam|multi_tensor_apply|lpnorm'),
                              ('collectives', r'nccl|gloo|c10d'), ('attention', r'scaled_?dot_?product|flash|fmha|sdpa'),
                              ('matmul', r'gemm|nvjet|cutlass|xmma|aten::(mm|addmm|bmm|baddbmm|matmul|linear|mkldnn)')):
        if re.search(pattern, name.lower()):
            return category
    return 'other compute'


def _length(intervals):
    """Length of the union of (start, end) intervals."""
    total, reached = 0.0, float('-inf')
    for start, end in sorted(intervals):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total
