"""What a run says of itself: console lines, metrics.jsonl, wandb, throughput, MFU, and a profile of where time goes."""
import json
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

    A CPU has no figure of its own: a 1024 × 1024 matrix product is timed, as much as the threads at hand can do.
    """
    if device.type == 'cuda':
        name = torch.cuda.get_device_name(device)
        return next((peak[dtype == 'float32'] * 1e12 for key, peak in PEAK_TFLOPS.items()
                     if re.search(rf'\b{key}\b', name)), None)
    if device.type != 'cpu':
        return None
    a = torch.ones(1024, 1024, dtype=getattr(torch, dtype))
    times = []
    for _ in range(4):
        start = time.perf_counter()
        a @ a
        times.append(time.perf_counter() - start)
    return 2 * 1024 ** 3 / min(times)


class Metrics:
    """Writes a run's lines to the console, out_dir/metrics.jsonl and wandb; on every process but the main one, nothing.

    wandb: None, or the arguments of wandb.init (project, name, config, id). Raises ImportError if it is not installed.
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
            self.wandb = client.init(dir=out_dir, resume='allow', **wandb)
        self.file = open(os.path.join(out_dir, 'metrics.jsonl'), 'a', encoding='utf-8')

    @property
    def wandb_id(self):
        return self.wandb.id if self.wandb else None

    def train(self, line, eta_seconds):
        """A training line: iter loss grad_norm lr dt_ms tokens_per_sec mfu mem_gb tokens."""
        mfu = 'n/a' if line['mfu'] is None else f'{100 * line["mfu"]:.2f}%'
        hours, seconds = divmod(int(eta_seconds), 3600)
        self._write(line, f'iter {line["iter"]}: loss {line["loss"]:.4f}, time {line["dt_ms"]:.2f}ms, mfu {mfu}, '
                          f'{line["tokens_per_sec"]:,.0f} tok/s, grad norm {line["grad_norm"]:.3f}, lr {line["lr"]:.2e}, '
                          f'mem {line["mem_gb"]:.2f}GB, eta {hours}:{seconds // 60:02d}:{seconds % 60:02d}')

    def eval(self, line):
        """An evaluation line: iter train_loss val_loss."""
        self._write(line, f'step {line["iter"]}: train loss {line["train_loss"]:.4f}, val loss {line["val_loss"]:.4f}')

    def _write(self, line, text):
        if self.file is None:
            return
        print(text, flush=True)
        # JSON has no NaN or infinity: null, so that any reader can go on
        self.file.write(json.dumps({k: None if v != v or v in (float('inf'), -float('inf')) else v
                                    for k, v in line.items()}) + '\n')
        self.file.flush()
        if self.wandb:
            self.wandb.log(line, step=line['iter'])

    def close(self):
        if self.file is not None:
            self.file.close()
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
