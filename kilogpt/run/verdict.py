"""What bounds a run (compute, memory, the network, its input), from measured shares of its time, and what to turn."""
import os
from typing import NamedTuple

from data.storage import is_url
from kilogpt.parallel.layout import Layout
from kilogpt.run import metrics

DOMINATES = 0.3  # the least share of the time that decides
CLEARLY = 1.25  # how many times as much as the next kind of work the largest has to take
# Numbers in an activation of a micro-batch below which an operator takes as long to start as to run: 10 µs on a CPU
# that moves 2e9 numbers a second, 5 µs on a GPU that moves 4e11.
SMALL_ON_CPU, SMALL_ON_GPU = 2e4, 2e6
FULL, HALF_EMPTY = 0.85, 0.6  # shares of the memory
AT_WORK = 0.3  # the least MFU of a GPU that computes most of the time
WAITS = 'input', 'network', 'exchange', 'late', 'overhead'  # what nobody works in
MEANINGS = dict(
    input='waiting for data', network='waiting for communication', late='waiting for a late process',
    exchange='waiting for communication', overhead='in starting small operators', optimizer='in the optimizer',
    products='in matrix products and attention', traffic='in operators that move more than they compute',
    compute='in forward and backward passes', small='in forward and backward passes', pauses='in evaluations and saves')


class Situation(NamedTuple):
    """What the advice depends on, besides the shares."""
    config: dict  # the keys of the run
    layout: Layout
    on_gpu: bool
    dtype: str
    memory: float  # the peak of this machine's or GPU's memory, as a share of what a run can have
    slowest_rank: int | None = None

    @property
    def micro_batch(self):
        """The tokens in a micro-batch of one process."""
        return self.config['batch_size'] * self.config['block_size'] // self.layout.cp

    @property
    def is_small(self):
        """Whether the operators of a micro-batch have little to do."""
        return self.micro_batch * self.config['n_embd'] < (SMALL_ON_GPU if self.on_gpu else SMALL_ON_CPU)

    @property
    def saves_memory(self):
        """What the run does to need less memory, in words; '' if nothing."""
        ways = [f'activation_checkpoint={self.config["activation_checkpoint"]} computes activations twice'
                ] * (self.config['activation_checkpoint'] != 'none')
        ways += ['cpu_offload copies parameters to and fro'] * self.config['cpu_offload']
        return ' and '.join(ways)


def situation_of(run):
    """The Situation of a Run now."""
    meter, processes, config = run.meter, run.processes, run.config
    peak = 1e9 * metrics.peak_memory_gb(processes.device)
    if processes.device.type == 'cpu':  # its processes share the memory
        peak *= int(os.environ.get('LOCAL_WORLD_SIZE', 1))
    return Situation(config, run.cluster.layout, processes.device.type != 'cpu', run.cluster.dtype,
                     peak / metrics.available_memory(processes.device),
                     max(meter.late, key=meter.late.get, default=None))


def verdict_of_run(run):
    """A sentence about a Run that ends, from the times in its log."""
    meter, totals, situation = run.meter, run.meter.totals, situation_of(run)
    shares = {name: totals[key] / totals['dt_ms'] for name, key in dict(
        input='data_ms', network='comm_ms', late='lag_ms', optimizer='optimizer_ms').items()}
    layout = situation.layout
    is_measured = not layout.uses_fsdp and layout.tp * layout.cp * layout.pp == 1
    if layout.world_size == 1 or not is_measured:
        del shares['network'], shares['late']
    rest = max(0.0, 1 - sum(shares.values()))
    pauses = max(0.0, 1 - totals['dt_ms'] / 1000 / meter.seconds)
    if pauses >= DOMINATES:
        return judge(dict(pauses=pauses), situation)
    if not is_measured:
        return judge(shares, situation, f'{rest:.0%} computing and communicating in the model')
    is_at_work = not situation.on_gpu or (meter.last_line.get('mfu') or 0.0) >= AT_WORK
    if situation.is_small and not (situation.on_gpu and is_at_work):
        return judge(shares | dict(small=rest), situation)
    if is_at_work:
        return judge(shares | dict(compute=rest), situation)
    return judge(shares, situation, f'{rest:.0%} in the rest')


def verdict_of_profile(milliseconds, waiting, short, situation):
    """A sentence about traced iterations.

    milliseconds: those of profiler.breakdown. waiting, short: as profiler.losses returns them.
    """
    total = sum(milliseconds.values())
    works = {category: milliseconds[category] - short.get(category, 0.0)
             for category in ('matmul', 'attention', 'other compute')}
    shares = {name: span / total for name, span in dict(
        input=milliseconds['data'] + waiting, exchange=milliseconds['collectives'],
        overhead=milliseconds['idle'] - waiting + sum(short.get(category, 0.0) for category in works),
        optimizer=milliseconds['optimizer'], products=works['matmul'] + works['attention'],
        traffic=works['other compute']).items()}
    if situation.layout.world_size == 1:
        del shares['exchange']
    return judge(shares, situation, is_profile=True)


def judge(shares, situation, unknown='', is_profile=False):
    """The sentence: what bounds a run, by which measure, and two keys to turn.

    shares: {name in MEANINGS: share of the time}. unknown: the time that is not in shares, in words.
    """
    figures = ', '.join(f'{share:.0%} {MEANINGS[name]}' for name, share in shares.items())
    figures += f', {unknown}' * bool(unknown)
    waits = {name: share for name, share in shares.items() if name in WAITS}
    works = {name: share for name, share in shares.items() if name not in WAITS}
    name = max(waits, key=waits.get, default='')
    if not name or waits[name] < DOMINATES:
        first, *others = sorted(works, key=works.get, reverse=True)
        is_clear = works[first] >= DOMINATES and all(works[first] >= CLEARLY * works[other] for other in others)
        name = first if is_clear else ''
        if name not in ('optimizer', 'pauses'):
            name = _by_memory(situation) or name
    if not name:
        ask = '' if is_profile else ': --profile=True tells more'
        return f'bound by: nothing dominates ({figures}){ask}'
    label, advice = KINDS[name]
    keys = advice(situation)
    return f'bound by: {label(situation)} ({figures}). Next: {"; or ".join(keys[:2])}'


def _by_memory(situation):
    """'memory' if its size keeps a run from being faster, 'saving' if the run saves memory in vain, or ''."""
    if situation.saves_memory:
        return 'memory' if situation.memory > HALF_EMPTY else 'saving'
    return 'memory' if situation.memory > FULL and situation.is_small else ''


# --- advice: lists of keys to turn, the best first, as they would be typed ----------------------------------

def _input(situation):
    config = situation.config
    remote = is_url(config['dataset'])
    keys = [f'--data_cache_gb={2 * config["data_cache_gb"] or 100:g} (more of the dataset on this machine)'] * remote
    keys.append('--dataset=PATH of a copy on a disk of this machine')
    keys += ['--documents=stream (its rows need no search for documents)'] * (config['documents'] != 'stream')
    return [*keys, _larger_micro_batch(situation, 'fewer and larger reads')]


def _network(situation):
    config, layout, keys = situation.config, situation.layout, []
    for key in ('tp', 'cp'):
        keys += [f'--{key}={config[key] // 2}'] * (config[key] > 1)
    keys += ['--zero_stage=2 (parameters are gathered once in an iteration)'] * (config['zero_stage'] == 3)
    keys.append(f'--gradient_accumulation_steps={2 * config["gradient_accumulation_steps"]} (half as many exchanges '
                'for a token)')
    if config['zero_stage'] == 0 and not layout.uses_fsdp and config['grad_compress'] == 'none':
        keys.append('--grad_compress=bf16 (half as many bytes)')
    return [*keys, '--islands=2 (groups that exchange rarely, docs/islands.md)']


def _late(situation):
    return [f'look at the machine of rank {situation.slowest_rank} (docs/faults.md)',
            '--events=True (which iterations are slow, on which rank)']


def _overhead(situation):
    config = situation.config
    return [_larger_micro_batch(situation, 'more work in each operator'),
            *['--compile=True (fewer operators)'] * (not config['compile']),
            *['--log_interval=10 (each line waits for the GPU)'] * (situation.on_gpu and config['log_interval'] < 10),
            f'--block_size={2 * config["block_size"]}']


def _optimizer(situation):
    config, layout = situation.config, situation.layout
    return [*['--cpu_offload=False'] * config['cpu_offload'],
            f'--gradient_accumulation_steps={2 * config["gradient_accumulation_steps"]} (more tokens in an update)',
            *['--zero_stage=1 (each process updates a part)'] * (layout.world_size > 1 and config['zero_stage'] == 0),
            *['--optimizer=adamw'] * (config['optimizer'] == 'muon'),
            f'--batch_size={2 * config["batch_size"]}']


def _pauses(situation):
    config = situation.config
    if not config['eval_iters']:
        keys = ['--async_checkpoint=True'] * (not config['async_checkpoint'])
        return [*keys, 'a larger --save_interval or --save_minutes']
    return [f'--eval_interval={2 * config["eval_interval"]}',
            *[f'--eval_iters={config["eval_iters"] // 2}'] * (config['eval_iters'] > 1)]


def _compute(situation):
    config = situation.config
    can_have_fp8 = situation.on_gpu and situation.dtype == 'bfloat16' and situation.layout.tp == 1
    return [*['--compile=True (fewer operators)'] * (not config['compile']),
            *['--dtype=bfloat16'] * (situation.dtype == 'float32'),
            *['--fp8=True (on an H100 and newer)'] * (can_have_fp8 and not config['fp8']),
            'more processes (torchrun --nproc_per_node)',
            f'a smaller model, such as --n_layer={max(1, config["n_layer"] // 2)}']


def _traffic(situation):
    return [key for key in _compute(situation) if 'fp8' not in key]


def _memory(situation):
    config, layout = situation.config, situation.layout
    next_stage, batch_size = max(1, config['zero_stage'] + 1), config['batch_size']
    return [*[f'--zero_stage={next_stage} (each process holds a part)'] * (layout.world_size > 1 and next_stage <= 3),
            *['--activation_checkpoint=selective (computes less twice)'] * (config['activation_checkpoint'] == 'full'),
            *[f'--batch_size={batch_size // 2} --gradient_accumulation_steps={2 * config["gradient_accumulation_steps"]} '
              '(the same batch in less memory)'] * (batch_size % 2 == 0),
            *['--dtype=bfloat16'] * (situation.dtype == 'float32'), 'more GPUs, or GPUs with more memory']


def _saving(situation):
    config = situation.config
    return [*['--cpu_offload=False'] * config['cpu_offload'],
            *['--activation_checkpoint=none'] * (config['activation_checkpoint'] != 'none'),
            _larger_micro_batch(situation, 'uses the memory')]


def _larger_micro_batch(situation, why):
    """Twice the micro-batch: of the same batch if its micro-batches can be halved in number."""
    steps, twice = situation.config['gradient_accumulation_steps'], 2 * situation.config['batch_size']
    if steps % (2 * situation.layout.dp) == 0:
        return f'--batch_size={twice} --gradient_accumulation_steps={steps // 2} (the same batch, {why})'
    return f'--batch_size={twice} ({why})'


def _memory_in_use(situation):
    saves = f', {situation.saves_memory}' if situation.saves_memory else ', small micro-batches'
    return f'{situation.memory:.0%} in use{saves}'


# {name: (what bounds the run, in words; the keys to turn)}
KINDS = dict(
    input=(lambda situation: 'input', _input),
    network=(lambda situation: 'network', _network),
    # A trace of one process does not tell what it waits for.
    exchange=(lambda situation: 'network, or a late process', _network),
    late=(lambda situation: f'a late process, rank {situation.slowest_rank}', _late),
    overhead=(lambda situation: 'overhead of small operators', _overhead),
    small=(lambda situation: f'small micro-batches of {situation.micro_batch} tokens', _overhead),
    optimizer=(lambda situation: 'memory traffic of the optimizer', _optimizer),
    pauses=(lambda situation: 'pauses for evaluation and saving', _pauses),
    traffic=(lambda situation: 'memory traffic', _traffic),
    products=(lambda situation: 'compute', _compute),
    compute=(lambda situation: 'compute', _compute),
    memory=(lambda situation: f'size of the memory, {_memory_in_use(situation)}', _memory),
    saving=(lambda situation: f'saving of memory, {_memory_in_use(situation)}', _saving),
)
