"""Measure train.py by launching it: a table of speed and memory for a sweep of settings, a profile, or a plot of runs.

    python bench.py config/train_gpt2.py --random_tokens=50257 --sweep="batch_size=8,16 compile=True,False"
    python bench.py config/train_gpt2.py --random_tokens=50257 --layouts="dp8; zero3 dp8; zero3 dp8 full; tp2 pp2 dp2 zbv"
    python bench.py config/train_gpt2.py --random_tokens=50257 --scaling=1,2,4,8 --zero_stage=2
    python bench.py config/train_gpt2.py --random_tokens=50257 --saves=10
    python bench.py --versus=../nanoGPT --theirs="compile=False" --device=cpu --dataset=shakespeare_char --n_layer=4
    python bench.py --versus=../nanoGPT --part=loader
    python bench.py --versus=../nanoGPT --part=tokenize --input=book.txt
    python bench.py --versus=../nanoGPT --part=sample --new_tokens=200 --device=cpu --n_layer=6
    python bench.py --part=start config/quickstart.py
    python bench.py config/quickstart.py --profile
    python bench.py --plot out-a out-b

Everything that is not an option below goes to train.py as it is.

A layout is words: dpN, tpN, cpN, ppN (processes of each kind), zeroN (zero_stage), repN (dp_replicate), a pp_schedule, full or
selective (activation_checkpoint), offload (cpu_offload), bf16 or powersgd (grad_compress), and key=value for any other key.
With dpN it has dp × tp × cp × pp processes, else --nproc_per_node. Its row has the main process's memory and, beneath, the bytes
it communicates in an iteration: those of the whole tensor of each collective, whatever the algorithm puts on the wire. Bubble
is the idle share of the pipeline: simulated with equal stages / measured on the main process, whose optimizer and data are left
out (on a CPU, Python between operators counts as idle).
"""
import argparse
import ast
import filecmp
import itertools
import json
import math
import os
import pickle
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from types import SimpleNamespace

from data.prepare import write_random_tokens

HERE = os.path.dirname(os.path.abspath(__file__))


def parse_sweep(text):
    """'batch_size=8,16 compile=True,False' -> the four combinations, each a list of train.py arguments."""
    axes = []
    for axis in text.split():
        key, equals, values = axis.partition('=')
        if not key or not equals or not values:
            sys.exit(f'error: --sweep takes key=value,value ... separated by spaces, but has {axis!r}')
        axes.append([f'--{key}={value}' for value in values.split(',')])
    return [list(combination) for combination in itertools.product(*axes)]


def parse_layouts(text, nproc_per_node=1):
    """'zero3 dp2; pp2 zbv' -> [(layout, its number of processes, its train.py arguments), ...]."""
    from kilogpt.parallel import SCHEDULES  # here, since it imports torch
    keys = dict.fromkeys(SCHEDULES, 'pp_schedule') | dict.fromkeys(('full', 'selective'), 'activation_checkpoint')
    keys |= dict.fromkeys(('bf16', 'powersgd'), 'grad_compress') | dict(zero='zero_stage', rep='dp_replicate')
    layouts = []
    for layout in filter(None, (' '.join(part.split()) for part in text.split(';'))):
        arguments, degrees = [], {}
        for word in layout.split():
            degree = re.fullmatch(r'(dp|tp|cp|pp|zero|rep)=?(\d+)', word)
            if degree:
                name, degrees[degree[1]] = degree[1], int(degree[2])
                arguments += [f'--{keys.get(name, name)}={degree[2]}'] * (name != 'dp')
            elif word == 'offload':
                arguments.append('--cpu_offload=True')
            elif word in keys:
                arguments.append(f'--{keys[word]}={word}')
            elif re.fullmatch(r'\w+=.+', word):
                arguments.append(f'--{word}')
            else:
                sys.exit(f'error: --layouts has {word!r}: a layout is words of dpN, tpN, cpN, ppN, zeroN, repN, {", ".join(SCHEDULES)}, '
                         'full, selective, offload, bf16, powersgd and key=value')
        model_parallel = math.prod(degrees.get(name, 1) for name in ('tp', 'cp', 'pp'))
        processes = degrees['dp'] * model_parallel if 'dp' in degrees else nproc_per_node
        if processes < 1 or model_parallel < 1 or processes % model_parallel:
            sys.exit(f'error: layout {layout!r} takes a multiple of tp × cp × pp = {model_parallel} processes, not {processes}: '
                     'set --nproc_per_node, or add dpN to the layout')
        layouts.append((layout, processes, arguments))
    return layouts


def bubble(pp, micro_steps, pp_schedule):
    """Idle share of a pipeline of `pp` ranks with equal stages, from playing PyTorch's order of its computations.

    Forward takes 1, backward 2: 1 for the input's gradient and 1 for the weights' where they are apart. Sending takes nothing.
    Gives (p - 1) / (m + p - 1) for gpipe and 1f1b (Huang et al. 2019), and with p - 1 over 2 chunks for interleaved1f1b
    (Narayanan et al. 2021, 2.2); what splits the backward (Qi et al. 2024) waits for p - 1 forwards of its first micro-batch alone.
    """
    from torch.distributed.pipelining import schedules

    from kilogpt.parallel import SCHEDULES
    name, chunks = SCHEDULES[pp_schedule]
    n_stages = pp * chunks
    stage = SimpleNamespace(num_stages=n_stages, group_size=pp, group_rank=0, submod=None)
    order = getattr(schedules, name)([stage] * chunks if chunks > 1 else stage, micro_steps).pipeline_order
    queues = [[(part.stage_index, part.computation_type.value) for action in actions if action
               for part in action.sub_actions or [action] if part.is_compute_op] for actions in order.values()]
    ends = {(s, way): [] for s in range(n_stages) for way in 'FB'}  # when a micro-batch leaves a stage; they do so in order
    ends[-1, 'F'] = ends[n_stages, 'B'] = [0] * micro_steps
    clock = [0] * pp
    while any(queues):
        for rank, queue in enumerate(queues):
            while queue:
                s, kind = queue[0]
                came, left = (ends[s - 1, 'F'], ends[s, 'F']) if kind == 'F' else (ends[s + 1, 'B'], ends[s, 'B'])
                if kind == 'W':
                    clock[rank] += 1
                elif len(came) == len(left):
                    break  # what it takes is yet to come
                else:
                    clock[rank] = max(clock[rank], came[len(left)]) + (2 if kind == 'B' else 1)
                    left.append(clock[rank])
                queue.pop(0)
    return 1 - 3 * chunks * micro_steps / max(clock)


def measure(arguments, options, folder, processes, trace=None, saves=('--keep_checkpoints=0',)):
    """One run of train.py: its medians over the settled iterations, or {'error': its last line}. trace: where one goes."""
    out_dir = os.path.join(folder, 'run')
    shutil.rmtree(out_dir, ignore_errors=True)
    launcher = [sys.executable]
    if processes > 1:
        launcher += ['-m', 'torch.distributed.run', '--standalone', f'--nproc_per_node={processes}']
    profile = options.profile or bool(options.layouts)
    warmup = max(options.warmup, 9) if profile else options.warmup  # the trace takes iterations 6 to 9, and slows them
    run = subprocess.run(
        [*launcher, os.path.join(HERE, 'train.py'), *arguments, '--wandb_log=False', f'--out_dir={out_dir}', '--log_interval=1',
         f'--max_iters={warmup + options.iters}', '--eval_iters=0', *saves, '--init_from=scratch',
         f'--profile={profile}'], capture_output=True, text=True)
    if run.returncode:
        lines = run.stderr.splitlines() or ['no message']
        said = [line for line in lines if line.startswith('error:')] or [
            line for line in lines if 'Error' in line and 'ChildFailedError' not in line] or lines  # not torchrun's last word
        return dict(error=said[-1])
    with open(os.path.join(out_dir, 'metrics.jsonl')) as file:
        lines = [json.loads(line) for line in file]
    stalls = [line['ckpt_stall_ms'] for line in lines if 'ckpt_stall_ms' in line]
    lines = [line for line in lines if 'loss' in line]
    with open(os.path.join(out_dir, 'config.json')) as file:
        config = json.load(file)
    row = {key: None if lines[0][key] is None else statistics.median(line[key] for line in lines[warmup:])
           for key in ('tokens_per_sec', 'dt_ms', 'mfu', 'mem_gb')}
    row |= dict(gradient_accumulation_steps=config['gradient_accumulation_steps'], stalls_ms=stalls[:-1])  # the last, at the end, blocks
    if profile:
        with open(os.path.join(out_dir, 'profile.json')) as file:
            profiled = json.load(file)
        row |= dict(profile_ms=profiled['milliseconds'], bytes=profiled['bytes'], mem_gb=lines[2]['mem_gb'])  # a trace takes memory
        if config['pp'] > 1:
            ms, micro_steps = row['profile_ms'], int(re.search(r'(\d+) micro-step', run.stdout)[1])
            row['bubble_theory'] = bubble(config['pp'], micro_steps, config['pp_schedule'])
            row['bubble_measured'] = (ms['idle'] + ms['collectives']) / (sum(ms.values()) - ms['optimizer'] - ms['data'])
        if options.profile:
            row['trace'] = shutil.move(os.path.join(out_dir, 'trace.json'), trace)
    return row


def scaling(sizes, run):
    """Rows of weak scaling (the batch per process stays) and strong scaling (the global batch stays) by number of processes.

    Efficiency is tokens per second and process, relative to the smallest size. run(arguments, processes): a row of measure.
    """
    first = None
    for n in sizes:
        strong = weak = run([], n)
        if n > 1 and 'error' not in strong:
            weak = run([f'--gradient_accumulation_steps={n * strong["gradient_accumulation_steps"]}'], n)
        if 'error' in weak:
            yield dict(processes=n, error=weak['error'])
            continue
        speeds = dict(weak=weak['tokens_per_sec'], strong=strong['tokens_per_sec'])
        first = first or {kind: speed / n for kind, speed in speeds.items()}
        yield dict(processes=n, **{f'{kind}_tokens_per_sec': speed for kind, speed in speeds.items()},
                   **{f'{kind}_efficiency': speed / n / first[kind] for kind, speed in speeds.items()})


def saves(interval, run):
    """Rows of what a checkpoint every `interval` iterations costs, blocking and in the background. run(saves): a row of measure."""
    blocking = None
    for background in (False, True):
        row = run(['--keep_checkpoints=1', f'--save_interval={interval}', f'--async_checkpoint={background}'])
        if 'error' not in row and len(row['stalls_ms']) < 2:
            row = dict(error=f'there were {len(row["stalls_ms"])} saves before the last: set --iters to {3 * interval} at least')
        if 'error' not in row:
            first, later = row['stalls_ms'][0], statistics.median(row['stalls_ms'][1:])
            blocking = blocking or (first, later)
            row = dict(first_ms=first, later_ms=later, first_ratio=first / blocking[0], later_ratio=later / blocking[1],
                       dt_ms=row['dt_ms'])
        yield dict(async_checkpoint=background, **row)


def timed(command, cwd=HERE, until=None, **environment):
    """(milliseconds that a Python command takes, or takes until it prints a line that begins so; its output). RuntimeError if it fails."""
    start = time.perf_counter()
    with tempfile.TemporaryFile('w+') as errors:
        with subprocess.Popen([sys.executable, *command], cwd=cwd, env=os.environ | environment | dict(PYTHONUNBUFFERED='1'),
                              stdout=subprocess.PIPE, stderr=errors, text=True) as process:
            lines, end = [], None
            for line in process.stdout:
                lines.append(line)
                if until and line.startswith(until):
                    end = time.perf_counter()
        end = end or time.perf_counter()
        errors.seek(0)
        if process.returncode:
            raise RuntimeError((errors.read().splitlines() or ['no message'])[-1])
    return 1000 * (end - start), ''.join(lines)


def read(path, need):
    if not os.path.exists(path):
        sys.exit(f'error: there is no {path}: {need}')
    with open(path, encoding='utf-8') as file:
        return file.read()


# What --versus compares: functions theirs() and ours() that give milliseconds, what is done in those, and its unit.

def versus_train(theirs, arguments, extra, options, folder):
    """An iteration of train.py on the same data and shapes, and the peak of its memory (on a GPU, the tensors'; on a CPU, the process's).

    Arguments that nanoGPT has too are given to both, `extra` to it alone.
    """
    dataset = next((a.split('=', 1)[1] for a in reversed(arguments) if a.startswith('--dataset=')), 'openwebtext')
    dataset = os.path.join(HERE, 'data', dataset)
    known = set(re.findall(r'^(\w+) = ', read(os.path.join(theirs, 'train.py'), 'give the folder of a nanoGPT checkout as --versus'), re.M))
    shared = [a for a in arguments if not a.startswith('--') or a[2:].split('=')[0] in known]
    vocab_size = json.loads(read(os.path.join(dataset, 'meta.json'), 'prepare the dataset, or name another'))['vocab_size']
    data = os.path.join(folder, 'data')  # ours, and the meta.pkl that nanoGPT reads the vocabulary's size from
    os.makedirs(data, exist_ok=True)
    for split in ('train', 'val'):
        os.symlink(os.path.join(dataset, f'{split}.bin'), os.path.join(data, f'{split}.bin'))
    with open(os.path.join(data, 'meta.pkl'), 'wb') as file:
        pickle.dump(dict(vocab_size=-(-vocab_size // 64) * 64), file)  # rows, with ours' padding
    command = ['train.py', *shared, *extra, f'--dataset={data}', '--wandb_log=False', '--log_interval=1', '--eval_interval=1000000000',
               '--eval_iters=1', '--always_save_checkpoint=False', f'--max_iters={options.warmup + options.iters - 1}', f'--out_dir={folder}/theirs']

    peak = ('import runpy, sys, torch; from kilogpt import metrics; sys.argv = sys.argv[1:]; runpy.run_path("train.py", run_name="__main__"); '
            'print("peak GB", metrics.peak_memory_gb(torch.device("cuda" if torch.cuda.is_initialized() else "cpu")))')

    def their_time():
        said = timed(['-c', peak, *command], theirs, PYTHONPATH=HERE)[1]  # metrics is ours, all else is found in its folder first
        times = [float(time) for time in re.findall(r'^iter \d+: .* time ([\d.]+)ms', said, re.M)]
        options.gb['theirs_gb'] = float(re.search('^peak GB (.*)', said, re.M)[1])
        return statistics.median(times[options.warmup:])

    def our_time():
        row = measure(arguments, options, folder, options.nproc_per_node)
        if 'error' in row:
            raise RuntimeError(row['error'])
        options.gb['ours_gb'] = row['mem_gb']
        return row['dt_ms']
    return their_time, our_time, 1, 'iterations'


def versus_loader(theirs, arguments, extra, options, folder):
    """A batch of 64 sequences of 1024 random tokens, of 33 million. nanoGPT's is the function in its train.py."""
    import numpy as np
    import torch

    from data.loader import TokenLoader, read_meta
    path = os.path.join(theirs, 'train.py')
    source = read(path, 'give the folder of a nanoGPT checkout as --versus')
    functions = [node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef) and node.name == 'get_batch']
    if not functions:
        sys.exit(f'error: {path} has no function get_batch')
    write_random_tokens(folder, 50257, 2 ** 25)
    names = dict(os=os, np=np, torch=torch, data_dir=folder, block_size=1024, batch_size=64, device='cpu', device_type='cpu')
    exec(ast.get_source_segment(source, functions[0]), names)
    loader, numbers = TokenLoader(folder, 'train', 1024, 50257, read_meta(folder), seed=0), itertools.count()

    def batch_time(batch, calls=64):  # of which ours does one's work ahead for the others
        times = []
        for _ in range(8):
            start = time.perf_counter()
            for _ in range(calls):
                kept = batch()  # until the next is there, as in training
            times.append(1000 * (time.perf_counter() - start) / calls)
        return statistics.median(times)
    return (lambda: batch_time(lambda: names['get_batch']('train')),
            lambda: batch_time(lambda: loader.batch(loader.train_starts(64 * next(numbers) + np.arange(64)))), 64 * 1024, 'tokens')


def versus_tokenize(theirs, arguments, extra, options, folder):
    """The command that turns --input into GPT-2's tokens: a text by nanoGPT's data/shakespeare, documents (.jsonl) by its data/openwebtext."""
    if not options.input or not os.path.isfile(options.input):
        sys.exit(f'error: there is no file {options.input!r}: --part=tokenize takes a text, or a .jsonl file of documents, as --input')
    text, documents = os.path.abspath(options.input), options.input.endswith('.jsonl')
    name = 'openwebtext' if documents else 'shakespeare'
    source = read(os.path.join(theirs, 'data', name, 'prepare.py'), 'give the folder of a nanoGPT checkout as --versus')
    if documents:  # its own words, but for where the documents are, the "cpu cores // 2" that it recommends, and that they may be few
        source = re.sub(r'^num_proc = .*', f'num_proc = {max(1, os.cpu_count() // 2)}', source, flags=re.M)
        source = source.replace('total_batches = 1024', 'total_batches = min(1024, len(dset))')
        source = re.sub(r'load_dataset\("openwebtext".*\)', f'load_dataset("json", data_files={text!r})', source)
    place = os.path.join(folder, 'theirs')
    os.mkdir(place)
    os.symlink(text, os.path.join(place, 'input.txt'))
    with open(os.path.join(place, 'prepare.py'), 'w', encoding='utf-8') as file:
        file.write(source)
    ours = [f'data/{"openwebtext" if documents else "text"}/prepare.py', f'--input={text}', f'--out={folder}/ours', '--shard_tokens=0']

    def their_time():
        return timed(['prepare.py'], place, HF_HOME=tempfile.mkdtemp(dir=folder))[0]  # nothing is in its cache

    def our_time():
        milliseconds = timed(ours, HF_HOME=tempfile.mkdtemp(dir=folder))[0]
        if not filecmp.cmp(f'{place}/train.bin', f'{folder}/ours/train.bin', shallow=False):
            raise RuntimeError('the two have written different tokens')
        return milliseconds
    return their_time, our_time, os.path.getsize(text) / 1e6, 'MB'


def versus_sample(theirs, arguments, extra, options, folder):
    """sample.py drawing one text of --new_tokens from the same random weights, less the time of drawing one token."""
    read(os.path.join(theirs, 'sample.py'), 'give the folder of a nanoGPT checkout as --versus')
    write_random_tokens(folder, 50257, 2 ** 16)
    chars = [chr(0x100 + i) for i in range(50257)]  # a vocabulary of GPT-2's size that both know without going online
    with open(os.path.join(folder, 'meta.json'), 'w') as file:
        json.dump(dict(vocab_size=len(chars), dtype='uint16', tokenizer='char', chars=''.join(chars)), file)
    with open(os.path.join(folder, 'meta.pkl'), 'wb') as file:
        pickle.dump(dict(stoi={char: i for i, char in enumerate(chars)}, itos=dict(enumerate(chars))), file)
    run, exported = os.path.join(folder, 'run'), os.path.join(folder, 'theirs')
    os.mkdir(exported)
    timed(['train.py', *arguments, f'--dataset={folder}', f'--out_dir={run}', '--max_iters=1', '--eval_iters=0', '--batch_size=1',
           '--gradient_accumulation_steps=1', '--compile=False', '--keep_checkpoints=1', '--wandb_log=False'])
    timed(['-m', 'kilogpt.convert', 'export', run, f'{exported}/ckpt.pt', '--which=latest'])
    common = ['sample.py', '--num_samples=1', f'--start={chars[0]}', *(a for a in arguments if a.startswith('--device='))]

    def text_time(command, cwd):
        return timed([*command, f'--max_new_tokens={options.new_tokens}'], cwd)[0] - timed([*command, '--max_new_tokens=1'], cwd)[0]
    return (lambda: text_time([*common, f'--out_dir={exported}', *extra], theirs),
            lambda: text_time([*common, f'--out_dir={run}', '--which=latest'], HERE), options.new_tokens - 1, 'tokens')


def versus_start(theirs, arguments, extra, options, folder):
    """From the command to the end of train.py's first iteration; theirs is a process that imports torch and makes one step of AdamW."""
    bare = ('import torch; layer = torch.nn.Linear(8, 8); optimizer = torch.optim.AdamW(layer.parameters()); '
            'layer(torch.ones(8)).sum().backward(); optimizer.step(); print("done")')
    command = ['train.py', *arguments, f'--out_dir={folder}/run', '--max_iters=1', '--log_interval=1', '--eval_iters=0', '--keep_checkpoints=0',
               '--init_from=scratch', '--wandb_log=False']
    return lambda: timed(['-c', bare], until='done')[0], lambda: timed(command, until='iter 1:')[0], 1, 'starts'


def print_row(label, row, options):
    if 'error' in row:
        print(f'{label:<48} {row["error"]}', flush=True)
        return
    mfu = 'n/a' if row['mfu'] is None else f'{100 * row["mfu"]:.1f}%'
    share = f'{row["bubble_theory"]:.1%} / {row["bubble_measured"]:.1%}' if 'bubble_theory' in row else '-'
    print(f'{label:<48} {row["tokens_per_sec"]:>12,.0f} {row["dt_ms"]:>10.2f} {mfu:>7} {row["mem_gb"]:>8.2f}'
          + f' {share:>15}' * bool(options.layouts), flush=True)
    if 'bytes' in row:
        moved = [f'{name} {count / 1e6:,.2f}MB' for name, count in row['bytes'].items() if count >= 5000]
        print(f'    communicates {", ".join(moved) or "nothing to speak of"}', flush=True)
    if options.profile:
        total = sum(row['profile_ms'].values())
        for category, value in row['profile_ms'].items():
            print(f'    {category:<14}{value:>10.2f}ms {100 * value / total:>6.1f}%')
        print(f'    of {total:.2f}ms an iteration; open {row["trace"]} in https://ui.perfetto.dev or chrome://tracing')


def print_pair(label, row, options, more=''):
    print(json.dumps(row) if options.json else f'{label:<7} {row["theirs_ms"]:10.2f} ms   ours {row["ours_ms"]:10.2f} ms   '
          f'ratio {row["theirs_ms"] / row["ours_ms"]:.2f}{more}', flush=True)


def plot(out_dirs, path):
    """Loss (validation solid, training faint) and throughput of runs over iterations, from their metrics.jsonl, to a PNG."""
    try:
        import matplotlib
    except ImportError:
        sys.exit('error: --plot needs matplotlib: pip install matplotlib')
    matplotlib.use('Agg')
    from matplotlib import pyplot
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4))
    for i, out_dir in enumerate(out_dirs):
        try:
            with open(os.path.join(out_dir, 'metrics.jsonl')) as file:
                lines = [json.loads(line) for line in file]
        except OSError:
            sys.exit(f'error: {out_dir} has no metrics.jsonl: give folders that train.py wrote')
        # a resumed run writes the iterations since its checkpoint again: the last line of each counts
        train = sorted({line['iter']: line for line in lines if 'loss' in line}.items())
        evals = sorted({line['iter']: line for line in lines if 'val_loss' in line}.items())
        name, color = os.path.basename(os.path.normpath(out_dir)), f'C{i}'
        left.plot([n for n, _ in train], [line['loss'] for _, line in train], color=color, alpha=0.3, linewidth=1)
        left.plot([n for n, _ in evals], [line['val_loss'] for _, line in evals], color=color, marker='.', label=f'{name} (val)')
        right.plot([n for n, _ in train], [line['tokens_per_sec'] for _, line in train], color=color, label=name)
    left.set(xlabel='iteration', ylabel='loss (nats per token)')
    right.set(xlabel='iteration', ylabel='tokens per second', ylim=(0, None))
    for axes in (left, right):
        axes.grid(alpha=0.3)
        axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    print(f'wrote {path}')


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
                                     allow_abbrev=False)
    parser.add_argument('--iters', type=int, default=20, help='iterations measured; the table gives their medians (20)')
    parser.add_argument('--warmup', type=int, default=5, help='iterations before those (5; 9 or more with a profile)')
    parser.add_argument('--sweep', default='', metavar='"KEY=A,B ..."', help='train.py keys; every combination is a row')
    parser.add_argument('--layouts', metavar='"LAYOUT; ..."', help='layouts, as above; every one is a row (of each combination)')
    parser.add_argument('--scaling', metavar='N,N...', help='instead: weak (gradient_accumulation_steps times '
                        'processes) and strong scaling by number of processes, of OMP_NUM_THREADS threads each (1)')
    parser.add_argument('--saves', type=int, metavar='N', help='instead: for how long training waits for a checkpoint every N '
                        'iterations, blocking and in the background: the first and the median of the others')
    parser.add_argument('--versus', metavar='DIR', help='instead: a part of a nanoGPT checkout and of ours, in turn')
    parser.add_argument('--part', default='train', choices=('train', 'loader', 'tokenize', 'sample', 'start'), help='--versus: which (train)')
    parser.add_argument('--input', metavar='FILE', help='--part=tokenize: a text, or .jsonl documents')
    parser.add_argument('--new_tokens', type=int, default=200, help='--part=sample: tokens drawn (200)')
    parser.add_argument('--theirs', default='', metavar='"KEY=VALUE ..."', help="--versus: settings for nanoGPT's alone, such as compile=False")
    parser.add_argument('--rounds', type=int, default=3, help='--versus: how often each is run (3)')
    parser.add_argument('--nproc_per_node', type=int, default=1, help='processes under torchrun (1)')
    parser.add_argument('--random_tokens', type=int, metavar='VOCAB_SIZE',
                        help='train on random tokens of a vocabulary of this size rather than on a dataset')
    parser.add_argument('--profile', action='store_true', help='also say where the time of an iteration goes; leaves a trace')
    parser.add_argument('--json', action='store_true', help='print JSON, one object a row, instead of the table')
    parser.add_argument('--plot', nargs='+', metavar='OUT_DIR', help='instead: draw loss and throughput of runs to --out')
    parser.add_argument('--out', default='plot.png', help="--plot's file (plot.png)")
    options, train_arguments = parser.parse_known_args()
    if options.plot:
        plot(options.plot, options.out)
        return
    if options.iters < 1 or options.warmup < 0:
        sys.exit('error: --iters must be at least 1 and --warmup at least 0')
    if options.scaling and (options.layouts or options.sweep or options.profile):
        sys.exit('error: --scaling makes a table of its own: give no --layouts, --sweep or --profile with it')
    if options.scaling and not re.fullmatch(r'[1-9]\d*(,[1-9]\d*)*', options.scaling):
        sys.exit(f'error: --scaling takes numbers of processes such as 1,2,4, but is {options.scaling!r}')
    if options.rounds < 1 or options.new_tokens < 2:
        sys.exit('error: --rounds must be at least 1 and --new_tokens at least 2')
    if options.part not in ('train', 'start') and not options.versus:
        sys.exit(f'error: --part={options.part} needs a nanoGPT checkout to compare with: --versus=DIR')
    layouts = parse_layouts(options.layouts, options.nproc_per_node) if options.layouts else [('', options.nproc_per_node, [])]
    failed = False
    with tempfile.TemporaryDirectory() as folder:
        if options.random_tokens:
            write_random_tokens(folder, options.random_tokens)
            train_arguments.append(f'--dataset={folder}')
        if options.scaling:
            os.environ.setdefault('OMP_NUM_THREADS', '1')  # else one process has the threads of all, and two half of them each
            if not options.json:
                print(f'{"processes":>9}' + f' {"weak":>14} {"efficiency":>11} {"strong":>14} {"efficiency":>11}   (tokens/s)')
            sizes = sorted({int(n) for n in options.scaling.split(',')})
            for row in scaling(sizes, lambda more, n: measure([*train_arguments, *more], options, folder, n)):
                failed |= 'error' in row
                if options.json or 'error' in row:
                    print(json.dumps(row) if options.json else f'{row["processes"]:>9} {row["error"]}', flush=True)
                else:
                    print(f'{row["processes"]:>9}', *(f'{row[f"{kind}_tokens_per_sec"]:>14,.0f} {row[f"{kind}_efficiency"]:>11.1%}'
                                                      for kind in ('weak', 'strong')), flush=True)
            sys.exit(1 if failed else 0)
        if options.versus or options.part != 'train':
            extra = [f'--{setting}' for setting in options.theirs.split()]
            try:
                options.gb = {}
                theirs, ours, amount, unit = globals()[f'versus_{options.part}'](options.versus, train_arguments, extra, options, folder)
                rows = []
                for _ in range(options.rounds):
                    rows.append(dict(theirs_ms=theirs(), ours_ms=ours(), **options.gb))
                    print_pair('nanoGPT' if options.part != 'start' else 'bare', rows[-1], options)
            except RuntimeError as error:
                print(json.dumps(dict(error=str(error))) if options.json else error)
                sys.exit(1)
            medians = {key: statistics.median(row[key] for row in rows) for key in rows[0]}
            if not options.json:
                rates = [f'{1000 * amount / medians[key]:,.1f}' for key in ('theirs_ms', 'ours_ms')]
                memory = f', memory from {medians["theirs_gb"]:.2f} to {medians["ours_gb"]:.2f} GB' if options.gb else ''
                print_pair('medians', medians, options, f'   from {" to ".join(rates)} {unit}/s{memory}')
            sys.exit(0)
        if options.saves:
            if not options.json:
                print(f'{"async_checkpoint":<16} {"first save":>12} {"ratio":>7} {"later saves":>12} {"ratio":>7} {"ms/iter":>10}   (training waits, ms)')
            for row in saves(options.saves, lambda more: measure(train_arguments, options, folder, options.nproc_per_node, saves=more)):
                failed |= 'error' in row
                if options.json or 'error' in row:
                    print(json.dumps(row) if options.json else f'{row["async_checkpoint"]!s:<16} {row["error"]}', flush=True)
                else:
                    print(f'{row["async_checkpoint"]!s:<16} {row["first_ms"]:>12.1f} {row["first_ratio"]:>7.1%} {row["later_ms"]:>12.1f} '
                          f'{row["later_ratio"]:>7.1%} {row["dt_ms"]:>10.2f}', flush=True)
            sys.exit(1 if failed else 0)
        if not options.json:
            print(f'{"":<48} {"tokens/s":>12} {"ms/iter":>10} {"MFU":>7} {"GB":>8}'
                  + f' {"bubble":>15}' * bool(options.layouts))
        rows = itertools.product(layouts, parse_sweep(options.sweep))
        for number, ((layout, processes, arguments), combination) in enumerate(rows):
            row = measure([*train_arguments, *arguments, *combination], options, folder, processes, f'trace-{number}.json')
            failed |= 'error' in row
            if options.json:
                print(json.dumps(dict(layout=layout, processes=processes, arguments=[*arguments, *combination], **row)), flush=True)
            else:
                print_row(f'{layout} {" ".join(combination).replace("--", "")}'.strip() or 'as given', row, options)
    sys.exit(1 if failed else 0)


if __name__ == '__main__':
    main()
