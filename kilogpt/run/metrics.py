"""What a run logs (console, metrics.jsonl, trackers), and the peak FLOP/s that MFU refers to."""
import json
import math
import os
import re
import sys
import time

import torch

from data import storage
from kilogpt.devices.cpus import read_text


def peak_flops(device, dtype):
    """The peak FLOP/s of a GPU in dtype ('float32', ...) by the manufacturer's data sheet; None if it is unknown.

    That of a CPU is not known: what products reach depends on their shape and on other programs.
    """
    if device.type == 'cuda':
        from kilogpt.machines import GPUS
        name = torch.cuda.get_device_name(device)
        for key, figures in GPUS.items():
            if re.search(rf'\b{key}\b', name):
                return 1e12 * figures[dtype == 'float32']
    return None


class Metrics:
    """Writes the log of a run to the console, out_dir/metrics.jsonl and trackers.

    Only the main process writes.
    prints: whether to write to the console too.
    config: the keys of the run. wandb_id, iteration, island: as kilogpt.trackers.trackers.Trackers takes them.
    """

    def __init__(self, out_dir, is_main, config={}, wandb_id=None, iteration=0, island=0, prints=True):
        self.out_dir = out_dir
        self.file = self.trackers = self.wandb_id = None
        self.prints = prints
        self.save = None  # the arguments of save_started, until save_written
        self.seconds_per_iteration = None  # from the last training line
        if not is_main:
            return
        if any(config.get(key) for key in ('wandb_log', 'trackio', 'tensorboard')):
            from kilogpt.trackers.trackers import Trackers
            self.trackers = Trackers(out_dir, config, wandb_id, iteration, island)
            self.wandb_id = self.trackers.wandb_id
        path = os.path.join(out_dir, 'metrics.jsonl')
        if os.path.exists(path):
            with open(path, 'rb+') as file:  # a crash of the machine may have left half a line, to be dropped
                content = file.read()
                file.truncate(content.rfind(b'\n') + 1)
        # While the disk is full, the buffer keeps the lines. The next flush writes them first.
        self.file = open(path, 'a', buffering=2 ** 20, encoding='utf-8')
        self.disk_is_full = False

    def train(self, line, eta_seconds):
        """Write a training line: iter loss grad_norm lr dt_ms tokens_per_sec mfu mem_gb tokens seconds.

        Then data_ms and optimizer_ms. mfu is None where the device's peak is unknown, as on CPUs. With several
        processes the line also has slowest_rank, comm_ms and lag_ms, and with DPO reward_margin and reward_accuracy.
        `seconds`, since the start of the process, is not printed.
        """
        mfu = '' if line.get('mfu') is None else f'mfu {100 * line["mfu"]:.2f}%, '
        lag = f', rank {line["slowest_rank"]} last by {line["lag_ms"]:.1f}ms' if 'lag_ms' in line else ''
        hours, seconds = divmod(int(eta_seconds), 3600)
        self.seconds_per_iteration = line['dt_ms'] / 1000
        self.write(line, (
            f'iter {line["iter"]}: loss {line["loss"]:.4f}, time {line["dt_ms"]:.2f}ms, '
            f'{mfu}{line["tokens_per_sec"]:,.0f} tok/s, grad norm {line["grad_norm"]:.3f}, lr {line["lr"]:.2e}, '
            f'mem {line["mem_gb"]:.2f}GB, eta {hours}:{seconds // 60:02d}:{seconds % 60:02d}{lag}{_rewards(line)}'))

    def eval(self, line):
        """Write an evaluation line: iter tokens seconds train_loss val_loss, and those of a mixture's sources."""
        parts = [f'{key[len("val_loss/"):]} {loss:.4f}' for key, loss in line.items()
                 if key.startswith('val_loss/')]
        sources = f' ({", ".join(parts)})' if parts else ''
        bits = f', val bpb {line["val_bpb"]:.4f}' if 'val_bpb' in line else ''
        self.write(line, (f'step {line["iter"]}: train loss {line["train_loss"]:.4f}, '
                           f'val loss {line["val_loss"]:.4f}{sources}{bits}{_rewards(line, "val_")}'))

    def tasks(self, line, text):
        """Write the line of scores on tasks: iter tokens seconds params flops task/NAME/FIGURE. text: in words."""
        self.write(line, f'tasks at iteration {line["iter"]}: {text}')

    def samples(self, iteration, samples, shown):
        """Write samples of text, dicts of `prompt` and `text`, to samples.jsonl and trackers.

        shown: how many characters of each the console shows.
        """
        if self.file is None:
            return
        lines = [json.dumps(dict(iter=iteration) | sample, ensure_ascii=False) + '\n' for sample in samples]
        try:
            with open(os.path.join(self.out_dir, 'samples.jsonl'), 'a', encoding='utf-8') as file:
                file.writelines(lines)
        except OSError as error:
            print(f'warning: samples.jsonl could not be written ({error})', file=sys.stderr, flush=True)
        for sample in samples if self.prints else ():
            text = sample['prompt'] + sample['text']
            print(f'sample at iteration {iteration}: {text[:shown]!r}', flush=True)
        if self.trackers:
            self.trackers.add_samples(samples, iteration)

    def exchange(self, line):
        """Write the line of an exchange between islands: iter exchange islands bytes_sent wait_s distance."""
        self.write(line, (
            f'exchange {line["exchange"]} at iteration {line["iter"]}: {len(line["islands"])} island(s), '
            f'{line["bytes_sent"] / 1e6:,.3f} MB sent, waited {line["wait_s"]:.3f}s, '
            f'distance {line["distance"]:.2e}'))

    def save_started(self, saver, path, iteration, seconds, clock):
        """Note that a Saver has begun to write a checkpoint.

        seconds: how long training waited in the call. clock: the time of training in seconds, which does not
        advance while the run evaluates and saves.
        """
        self.save = saver, path, iteration, seconds, clock, self.seconds_per_iteration

    def save_written(self, iteration, clock):
        """Write the line of a save that is complete: iter ckpt_stall_ms, the time that training waited.

        A save that failed has no line. The iterations during the save may be slower than those before. The
        difference counts as waiting.
        """
        if self.save is None or self.save[0].under_way:
            return
        saver, path, saved_iteration, seconds, began, seconds_per_iteration = self.save
        self.save = None
        if saver.problem:
            return
        if seconds_per_iteration is not None:
            seconds += max(0.0, clock - began - (iteration - saved_iteration) * seconds_per_iteration)
        self.write(dict(iter=saved_iteration, ckpt_stall_ms=1000 * seconds),
                    f'checkpoint {path}: training waited {1000 * seconds:.0f}ms')

    def dump(self, name, content):
        """Write JSON to out_dir/name; returns its path, or why there is no such file."""
        path = os.path.join(self.out_dir, name) if self.file else ''
        if self.file:
            try:
                with open(path, 'w', encoding='utf-8') as file:
                    json.dump(content, file, indent=1)
            except OSError as error:
                return f'no file ({error})'
        return path

    def write(self, line, text):
        if self.file is None:
            return
        if self.prints:
            print(text, flush=True)
        # JSON has neither NaN nor infinity; every reader accepts null.
        values = {key: None if _is_not_finite(value) else value for key, value in line.items()}
        self.file.write(json.dumps(values) + '\n')
        self._flush()
        if self.trackers:
            self.trackers.log(line)

    def _flush(self):
        try:
            self.file.flush()
            self.disk_is_full = False
        except OSError as error:
            if not self.disk_is_full:
                print(f'warning: metrics.jsonl could not be written ({error}). Training continues, '
                      'and the lines are written when there is room', file=sys.stderr, flush=True)
            self.disk_is_full = True

    def close(self):
        """Write what is left, and close the trackers."""
        if self.file is not None:
            self._flush()
        if self.trackers:
            self.trackers.close()


def _rewards(line, split=''):
    """What a line of DPO says about the rewards of pairs, in words."""
    if f'{split}reward_margin' not in line:
        return ''
    return f', margin {line[f"{split}reward_margin"]:.3f}, accuracy {line[f"{split}reward_accuracy"]:.1%}'


def _is_not_finite(value):
    return isinstance(value, float) and not math.isfinite(value)


def num_active_params(model):
    """Parameters of a GPT that a token meets, which do not include those of experts that it does not go to."""
    if model.config.mlp != 'moe':
        return model.num_params()
    from kilogpt.layers.mixture import Experts
    return model.num_params() - sum(m.num_idle() for m in model.modules() if isinstance(m, Experts))


def describe_size(model):
    """The number of a GPT's parameters, in words."""
    total, active = model.num_params(), num_active_params(model)
    text = f'{total:,} parameters' + (f' ({active:,} active in a token)' if active < total else '')
    if model.config.lora_rank:
        trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
        text += f', of which {trained:,} in adapters are trained'
    return text


def flops_per_token(model, lengths):
    """Floating-point operations per token, forward and backward, in documents of `lengths` tokens. model: a whole GPT.

    Each matrix element takes a multiply and an add forward and twice that backward, or once if frozen: 6 or 4.
    Attention adds two products a layer with H D elements for each position that a token sees, 6 each (the second may
    have another width with kv_latent). PaLM (Chowdhery et al. 2022) and nanoGPT count those that follow too.
    A recurrence adds three products of a vector with each head's state, of K V elements, as step by step; the chunked
    form computes more. lengths: of GPTConfig.mean_seen.
    """
    config = model.config
    layers = [module for module in model.modules() if not isinstance(module, torch.nn.Embedding)]
    parameters = [p for layer in layers for p in layer.parameters(recurse=False) if p.dim() > 1]
    of_matrices = sum(p.numel() * (6 if p.requires_grad else 4) for p in parameters)
    of_matrices -= (model.num_params() - num_active_params(model)) * (4 if config.lora_rank else 6)
    seen = config.n_layer * config.mean_seen(lengths)
    widths = config.head_width + (config.value_width or config.head_width)
    n_states = config.delta_heads * config.n_layer_of('D')
    of_states = 18 * n_states * config.delta_key_width * config.delta_value_width
    return of_matrices + int(6 * seen * config.n_head * widths) + of_states


class Meter:
    """Builds the training lines of the log, and writes each once its sums over all processes have arrived.

    model: the whole model. lengths: those of documents, as in flops_per_token. cluster: the run's Cluster.
    started: the time.perf_counter() at which the process started.
    """

    def __init__(self, model, lengths, cluster, started):
        self.size, self.n_params = describe_size(model), model.num_params()
        self.flops_per_token = flops_per_token(model, lengths)
        self.loss_copies = cluster.layout.tp  # how many processes compute the same loss, which counts once
        self.started, self.device = started, cluster.processes.device
        # Of all lines but the first: iterations, seconds with pauses, and the sums of the iterations' times
        self.iterations, self.seconds, self.last_line = 0, 0.0, None
        self.late = {}  # {rank: milliseconds for which others have waited for it}
        self.totals = dict.fromkeys(('dt_ms', 'data_ms', 'optimizer_ms', 'comm_ms', 'lag_ms'), 0.0)
        peak = peak_flops(self.device, cluster.dtype)
        self.peak_flops = peak and peak * cluster.processes.world_size

    def stamp(self, run):
        """The first keys of an evaluation line: where the run is, and what it has cost so far.

        seconds: since the process started. flops: by the formula of flops_per_token.
        """
        return dict(iter=run.iteration, tokens=run.tokens, seconds=time.perf_counter() - self.started,
                    params=self.n_params, flops=self.flops_per_token * run.tokens)

    def line(self, run, n_tokens, n_targets, lr, loss_sum, grad_norm, sums, others):
        """The line of the last update. Its times are means over the iterations since the previous line.

        n_tokens, n_targets: the number of tokens in the iteration, and of those that are targets, on all
        processes.
        loss_sum: the sum of the losses of this process's tokens. sums: {name: another such sum}. Before
        `write`, these are to be summed over the processes.
        others: {name: value} of further values of the line.
        """
        iterations, seconds = run.clock.lap(run.iteration)
        tokens_per_sec = n_tokens / seconds
        mfu = self.flops_per_token * tokens_per_sec / self.peak_flops if self.peak_flops else None
        return dict(
            iter=run.iteration, n_targets=n_targets, loss_sum=loss_sum.item(),
            sums={name: float(value) for name, value in sums.items()}, grad_norm=grad_norm.item(), lr=lr,
            dt_ms=1000 * seconds, tokens_per_sec=tokens_per_sec, mfu=mfu,
            mem_gb=peak_memory_gb(self.device), tokens=run.tokens,
            seconds=time.perf_counter() - self.started, iterations=iterations) | others

    def write(self, run, line):
        """Log a line that `line` returned and whose sums have become those over all processes."""
        n_targets, sums = line.pop('n_targets'), dict(loss=line.pop('loss_sum')) | line.pop('sums')
        means = {name: value / self.loss_copies / max(1, n_targets) for name, value in sums.items()}
        iterations = line.pop('iterations')
        for key in ('data_ms', 'optimizer_ms', 'comm_ms', 'lag_ms'):
            if key in line:
                line[key] /= iterations
        if self.last_line:  # the first line has what happens once, such as filling caches
            self.iterations += iterations
            self.seconds += line['seconds'] - self.last_line['seconds']
            for key in self.totals:
                self.totals[key] += iterations * line.get(key, 0.0)
            if 'lag_ms' in line:
                rank = line['slowest_rank']
                self.late[rank] = self.late.get(rank, 0.0) + iterations * line['lag_ms']
        self.last_line = line
        run.log.train(dict(iter=line['iter']) | means | line,
                      eta_seconds=(run.max_iters - line['iter']) * line['dt_ms'] / 1000)


def peak_memory_gb(device):
    """The most memory that this process has held so far, in GB (1e9): allocated on CUDA, else resident.

    0.0 if the resident memory is unknown: Windows does not have Unix's module `resource`.
    """
    if device.type == 'cuda':
        from kilogpt.devices.cuda_graph import bytes_of_graphs
        return (torch.cuda.max_memory_allocated(device) + sum(bytes_of_graphs)) / 1e9
    # Not getrusage's figure on Linux, which includes what the parent held when it started this process.
    if found := re.search(r'VmHWM:\s*(\d+) kB', read_text('/proc/self/status')):
        return int(found.group(1)) * 1024 / 1e9
    try:
        import resource
    except ImportError:
        return 0.0
    unit = 1 if sys.platform == 'darwin' else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e9


def available_memory(device):
    """The bytes that this process can use: what others leave of a GPU, or the memory of the machine."""
    if device.type == 'cuda':
        return torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device)
    if not hasattr(os, 'sysconf'):  # Windows
        return math.inf
    return os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES')


def synchronize(device):
    """Wait until the device has finished its work, so that a clock can be read."""
    if device.type != 'cpu':
        getattr(torch, device.type).synchronize()


class HostCopy:
    """A number on its way from a device to the host. `item` waits for it, but not for later work.

    A GPU copies in the order of its stream, so `item` of the tensor would wait for all work in the stream.
    """

    def __init__(self, number):
        self.number, self.copied = number, None
        if number.is_cuda:
            self.number = torch.empty_like(number, device='cpu', pin_memory=True)
            self.number.copy_(number, non_blocking=True)
            self.copied = torch.cuda.current_stream(number.device).record_event()

    def item(self):
        if self.copied:
            self.copied.synchronize()
        return self.number.item()


def read_metrics(out_dir):
    """(training lines, evaluation lines) of a run, each {iter: line}. Of several, the last counts."""
    lines = [json.loads(line) for line in storage.read(os.path.join(out_dir, 'metrics.jsonl')).splitlines()]
    return ({line['iter']: line for line in lines if 'loss' in line},
            {line['iter']: line for line in lines if 'val_loss' in line})
