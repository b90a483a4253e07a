"""Compare a part of nanoGPT, or of transformers, with the same part of kiloGPT: milliseconds and their ratio.

    python dev/versus.py ../nanoGPT --theirs="compile=False" --dataset=shakespeare_char --n_layer=4
    python dev/versus.py ../nanoGPT --part=loader
    python dev/versus.py ../nanoGPT --part=tokenize --input=book.txt
    python dev/versus.py ../nanoGPT --part=sample --new_tokens=200 --device=cpu --n_layer=6
    python dev/versus.py ../smollm2 --part=transformers --block_size=512 --batch_size=4 --random_tokens=49152
    python dev/versus.py --part=start config/quickstart.py

The two run in turns. All arguments that are not options listed below are passed to train.py. Parts:

  train     an iteration on the same data and shapes, and the peak memory
  loader    a batch of 64 sequences of 1024 random tokens
  tokenize  the command that converts --input to GPT-2's tokens
  sample    one text of --new_tokens from the same random weights, minus the time of the first token
  transformers  an iteration that finetunes the weights in a Hugging Face folder: of train.py, and of a loop over
            the model of transformers with torch.compile and fused AdamW, as in its documentation; with
            --lora_rank, both train adapters beside the weights, theirs with the library peft
  start     from the command to the end of the first iteration, compared with a process that imports torch
"""
import argparse
import ast
import filecmp
import itertools
import json
import os
import pickle
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from typing import NamedTuple

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
from data.datasets import dataset_folder
from data.make.prepare import write_random_tokens
from kilogpt.configurator import config_of
from kilogpt.launch_train import ROOT, as_arguments, timed, train, train_command


class Comparison(NamedTuple):
    """Two functions that do the same work; each returns a dict with milliseconds `ms` (and memory `gb`)."""
    theirs: Callable
    ours: Callable
    amount: float  # amount of work done in those milliseconds
    unit: str  # unit of the amount
    name: str = 'nanoGPT'


def read(path, advice):
    if not os.path.exists(path):
        sys.exit(f'error: there is no {path}: {advice}')
    with open(path, encoding='utf-8') as file:
        return file.read()


def read_theirs(nanogpt, *path):
    return read(os.path.join(nanogpt, *path), 'give the folder of a nanoGPT checkout')


def compare_train(nanogpt, arguments, options, folder):
    """Compare an iteration. nanoGPT gets the arguments whose keys it has, and those of --theirs.

    Memory is that of tensors on a GPU, and that of the process on a CPU.
    """
    keys = set(re.findall(r'^(\w+) = ', read_theirs(nanogpt, 'train.py'), re.MULTILINE))
    shared = [a for a in arguments if not a.startswith('--') or a[2:].split('=')[0] in keys]
    data = os.path.join(folder, 'data')
    link_data(dataset_of(arguments), data)
    only_train = as_arguments(
        dataset=data, out_dir=os.path.join(folder, 'theirs'), wandb_log=False, log_interval=1, eval_iters=1,
        eval_interval=10 ** 9, always_save_checkpoint=False, max_iters=options.warmup + options.iters - 1)
    command = ['train.py', *shared, *options.theirs, *only_train]
    # Runs a script, then gets the memory from our run/metrics.py. Modules in nanoGPT's folder hide ours.
    script = '''if True:
        import runpy, sys, torch
        sys.argv = sys.argv[1:]
        runpy.run_path(sys.argv[0], run_name="__main__")
        device = torch.device("cuda" if torch.cuda.is_initialized() else "cpu")
        from kilogpt.run import metrics
        print("peak GB", metrics.peak_memory_gb(device))'''

    def theirs():
        _, output = timed(['-c', script, *command], nanogpt, PYTHONPATH=ROOT)
        return their_iterations(output, r'^iter \d+: .* time ([\d.]+)ms', options)

    return Comparison(theirs, lambda: our_iterations(arguments, options), 1, 'iterations')


def their_iterations(output, pattern, options):
    """The median iteration and the peak memory that a peer printed. pattern: of the milliseconds."""
    times = [float(ms) for ms in re.findall(pattern, output, re.MULTILINE)]
    peak = re.search('^peak GB (.*)', output, re.MULTILINE)[1]
    return dict(ms=statistics.median(times[options.warmup:]), gb=float(peak))


def our_iterations(arguments, options, **keys):
    """The same of train.py."""
    n_iters = options.warmup + options.iters
    with tempfile.TemporaryDirectory() as out_dir:
        run = train(arguments, out_dir, options.nproc_per_node, max_iters=n_iters, **keys)
    return dict(ms=run.median('dt_ms', options.warmup), gb=run.median('mem_gb', options.warmup))


TRANSFORMERS_LOOP = """if True:
    import sys, time
    import torch
    from transformers import AutoModelForCausalLM
    folder, data, dtype = sys.argv[1:4]
    B, T, iters, rank = map(int, sys.argv[4:])
    tokens = torch.from_file(data, size=B * T * iters, dtype=torch.int16).view(torch.uint16).long()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to(device).train()
    if rank:
        from peft import LoraConfig, get_peft_model
        model = get_peft_model(model, LoraConfig(r=rank, target_modules="all-linear"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, weight_decay=0.1, fused=True)
    model.forward = torch.compile(model.forward)
    for batch in tokens.view(iters, B, T).to(device):
        start = time.perf_counter()
        with torch.autocast(device, torch.bfloat16, enabled=dtype == "bfloat16"):
            loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        loss = loss.item()
        print(f"time {1000 * (time.perf_counter() - start):.2f}ms", flush=True)
    from kilogpt.run import metrics
    print("peak GB", metrics.peak_memory_gb(torch.device(device)))"""


def compare_transformers(weights, arguments, options, folder):
    """Compare an iteration that finetunes the weights of a Hugging Face folder on random tokens."""
    import torch

    from kilogpt.parallel.processes import resolve_dtype
    read(os.path.join(weights, 'config.json'), 'give a Hugging Face folder')
    arguments = [*arguments, '--gradient_accumulation_steps=1', '--dropout=0.0', '--learning_rate=1e-5',
                 '--decay_lr=False']
    config = config_of(os.path.join(ROOT, 'train.py'), arguments)
    data = os.path.join(dataset_of(arguments), 'train.bin')
    dtype = resolve_dtype(config['dtype'], torch.device('cuda' if torch.cuda.is_available() else 'cpu'))

    def theirs():
        numbers = (config['batch_size'], config['block_size'], options.warmup + options.iters,
                   config['lora_rank'])
        command = ['-c', TRANSFORMERS_LOOP, os.path.abspath(weights), data, dtype, *map(str, numbers)]
        _, output = timed(command, PYTHONPATH=ROOT)
        return their_iterations(output, r'^time ([\d.]+)ms', options)

    def ours():
        return our_iterations(arguments, options, init_from=os.path.abspath(weights))

    return Comparison(theirs, ours, 1, 'iterations', name='transformers')


def dataset_of(arguments):
    """The folder of the dataset given in train.py's arguments."""
    names = [a.partition('=')[2] for a in arguments if a.startswith('--dataset=')]
    return dataset_folder(names[-1] if names else 'openwebtext')


def link_data(dataset, folder):
    """Make a folder with our tokens and a meta.pkl, from which nanoGPT reads the padded vocabulary size."""
    meta = json.loads(read(os.path.join(dataset, 'meta.json'), 'prepare the dataset, or name another'))
    os.makedirs(folder)
    for split in ('train', 'val'):
        os.symlink(os.path.join(dataset, f'{split}.bin'), os.path.join(folder, f'{split}.bin'))
    with open(os.path.join(folder, 'meta.pkl'), 'wb') as file:
        pickle.dump(dict(vocab_size=-(-meta['vocab_size'] // 64) * 64), file)


def compare_loader(nanogpt, arguments, options, folder):
    """Compare a batch. nanoGPT's loader is get_batch in its train.py; nothing else there is executed."""
    import numpy as np
    import torch

    from data.datasets import read_meta
    from data.loader import TokenLoader
    source = read_theirs(nanogpt, 'train.py')
    functions = [node for node in ast.parse(source).body
                 if isinstance(node, ast.FunctionDef) and node.name == 'get_batch']
    if not functions:
        sys.exit(f'error: {os.path.join(nanogpt, "train.py")} has no function get_batch')
    write_random_tokens(folder, 50257, 2 ** 25)
    names = dict(os=os, np=np, torch=torch, data_dir=folder, block_size=1024, batch_size=64, device='cpu',
                 device_type='cpu')
    exec(ast.get_source_segment(source, functions[0]), names)
    loader = TokenLoader(folder, 'train', 1024, 50257, read_meta(folder), seed=0)
    batch_numbers = itertools.count()

    def our_batch():
        return [torch.from_numpy(array) for array in loader.train_batch(64 * next(batch_numbers) + np.arange(64))]

    def time_batches(batch, calls=64):
        """Median over 8 of the mean over many calls, since our loader prepares several batches at once."""
        times = []
        for _ in range(8):
            start = time.perf_counter()
            for _ in range(calls):
                _previous = batch()  # a batch lives until the next exists, as in training
            times.append(1000 * (time.perf_counter() - start) / calls)
        return dict(ms=statistics.median(times))

    def their_batch():
        return names['get_batch']('train')

    return Comparison(lambda: time_batches(their_batch), lambda: time_batches(our_batch), 64 * 1024, 'tokens')


def compare_tokenize(nanogpt, arguments, options, folder):
    """Compare the preparation of a text (nanoGPT's data/shakespeare) or of .jsonl (its data/openwebtext).

    Only our prepare.py gets the arguments, such as --tokenizer=gpt2-gigatoken.
    """
    if not options.input or not os.path.isfile(options.input):
        sys.exit(f'error: there is no file {options.input!r}: '
                 '--part=tokenize needs a text, or a .jsonl file of documents, as --input')
    text = os.path.abspath(options.input)
    theirs = os.path.join(folder, 'theirs')
    os.mkdir(theirs)
    os.symlink(text, os.path.join(theirs, 'input.txt'))
    if text.endswith('.jsonl'):
        script = 'data/openwebtext/prepare.py'
        # Changes: where the documents are, a small number of documents, and the number of processes, for
        # which a comment in nanoGPT recommends half of the cores.
        source = read_theirs(nanogpt, 'data', 'openwebtext', 'prepare.py')
        processes = max(1, os.cpu_count() // 2)
        source = re.sub(r'^num_proc = .*', f'num_proc = {processes}', source, flags=re.MULTILINE)
        source = source.replace('total_batches = 1024', 'total_batches = min(1024, len(dset))')
        load = f'load_dataset("json", data_files={text!r})'
        source = re.sub(r'load_dataset\("openwebtext".*\)', load, source)
    else:
        script = 'data/text/prepare.py'
        source = read_theirs(nanogpt, 'data', 'shakespeare', 'prepare.py')
    with open(os.path.join(theirs, 'prepare.py'), 'w', encoding='utf-8') as file:
        file.write(source)
    our_command = [script, f'--input={text}', f'--out={folder}/ours', '--shard_tokens=0', *arguments]

    def time_with_empty_cache(command, cwd):
        milliseconds, _ = timed(command, cwd, HF_HOME=tempfile.mkdtemp(dir=folder))
        return dict(ms=milliseconds)

    def ours():
        row = time_with_empty_cache(our_command, ROOT)
        if not filecmp.cmp(f'{theirs}/train.bin', f'{folder}/ours/train.bin', shallow=False):
            raise RuntimeError('the two commands have written different tokens')
        return row

    return Comparison(lambda: time_with_empty_cache(['prepare.py'], theirs), ours,
                      os.path.getsize(text) / 1e6, 'MB')


def compare_sample(nanogpt, arguments, options, folder):
    """Compare sample.py. Both read the weights of a run of one iteration, which are exported for nanoGPT."""
    read_theirs(nanogpt, 'sample.py')
    write_random_tokens(folder, 50257, 2 ** 16)
    # A vocabulary of GPT-2's size that both can read without network access.
    chars = [chr(0x100 + i) for i in range(50257)]
    with open(os.path.join(folder, 'meta.json'), 'w') as file:
        json.dump(dict(vocab_size=len(chars), dtype='uint16', tokenizer='char', chars=''.join(chars)), file)
    with open(os.path.join(folder, 'meta.pkl'), 'wb') as file:
        pickle.dump(dict(stoi={char: i for i, char in enumerate(chars)}, itos=dict(enumerate(chars))), file)
    run = os.path.join(folder, 'run')
    exported = os.path.join(folder, 'theirs')
    os.mkdir(exported)
    timed(train_command(arguments, run, dataset=folder, max_iters=1, batch_size=1,
                        gradient_accumulation_steps=1, compile=False, keep_checkpoints=1))
    timed(['-m', 'kilogpt.convert', 'export', run, f'{exported}/ckpt.pt', '--which=latest'])
    devices = [a for a in arguments if a.startswith('--device=')]
    command = ['sample.py', '--num_samples=1', f'--start={chars[0]}', *devices]

    def time_tokens(more, cwd):
        text, _ = timed([*command, *more, f'--max_new_tokens={options.new_tokens}'], cwd)
        one_token, _ = timed([*command, *more, '--max_new_tokens=1'], cwd)
        return dict(ms=text - one_token)

    return Comparison(lambda: time_tokens([f'--out_dir={exported}', *options.theirs], nanogpt),
                      lambda: time_tokens([f'--out_dir={run}', '--which=latest', *options.ours], ROOT),
                      options.new_tokens - 1, 'tokens')


def compare_start(nanogpt, arguments, options, folder):
    """Compare the start with a bare process, which imports torch and makes one step of AdamW."""
    bare = '''if True:
        import torch
        layer = torch.nn.Linear(8, 8)
        optimizer = torch.optim.AdamW(layer.parameters())
        layer(torch.ones(8)).sum().backward()
        optimizer.step()
        print("done")'''
    command = train_command(arguments, os.path.join(folder, 'run'), max_iters=1)
    return Comparison(lambda: dict(ms=timed(['-c', bare], until='done')[0]),
                      lambda: dict(ms=timed(command, until='iter 1:')[0]), 1, 'starts', name='bare')


PARTS = dict(train=compare_train, loader=compare_loader, tokenize=compare_tokenize, sample=compare_sample,
             transformers=compare_transformers, start=compare_start)


def compare_once(comparison):
    row = {f'theirs_{key}': value for key, value in comparison.theirs().items()}
    return row | {f'ours_{key}': value for key, value in comparison.ours().items()}


def as_text(label, row):
    ratio = row['theirs_ms'] / row['ours_ms']
    return f'{label:<7} {row["theirs_ms"]:10.2f} ms   ours {row["ours_ms"]:10.2f} ms   ratio {ratio:.2f}'


def medians_text(rows, comparison):
    medians = {key: statistics.median(row[key] for row in rows) for key in rows[0]}
    theirs, ours = (1000 * comparison.amount / medians[key] for key in ('theirs_ms', 'ours_ms'))
    text = f'{as_text("medians", medians)}   from {theirs:,.1f} to {ours:,.1f} {comparison.unit}/s'
    if 'ours_gb' in medians:
        text += f', memory from {medians["theirs_gb"]:.2f} to {medians["ours_gb"]:.2f} GB'
    return text


def parse_arguments():
    """(folder of nanoGPT or of weights, or None; options; arguments for train.py)."""
    parser = argparse.ArgumentParser(
        'python dev/versus.py', '%(prog)s [DIR] [options] [config_file ...] [--key=value ...]', __doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    add = parser.add_argument
    add('--part', default='train', choices=PARTS, help='the part to compare (train)')
    add('--rounds', type=int, default=3, help='number of runs of each (3)')
    add('--theirs', default='', metavar='"KEY=VALUE ..."',
        help='settings only for nanoGPT, such as compile=False')
    add('--ours', default='', metavar='"KEY=VALUE ..."', help='sample: settings only for our sample.py')
    add('--iters', type=int, default=20, help='train: iterations measured, whose median counts (20)')
    add('--warmup', type=int, default=5, help='train: iterations before these (5)')
    add('--nproc_per_node', type=int, default=1, help='train: number of our processes under torchrun (1)')
    add('--input', metavar='FILE', help='tokenize: a text, or .jsonl documents')
    add('--new_tokens', type=int, default=200, help='sample: tokens drawn (200)')
    add('--random_tokens', type=int, metavar='VOCAB_SIZE',
        help='train on random tokens of a vocabulary of this size instead of a dataset')
    add('--json', action='store_true', help='print one JSON object for each round instead of text')
    options, arguments = parser.parse_known_args()
    if options.iters < 1 or options.warmup < 0:
        sys.exit('error: --iters must be at least 1 and --warmup at least 0')
    if options.rounds < 1 or options.new_tokens < 2:
        sys.exit('error: --rounds must be at least 1 and --new_tokens at least 2')
    if options.ours and options.part != 'sample':
        sys.exit(f'error: --ours is only for --part=sample, not {options.part}, where all other arguments '
                 'are passed to our train.py')
    options.theirs = [f'--{setting}' for setting in options.theirs.split()]
    options.ours = [f'--{setting}' for setting in options.ours.split()]
    nanogpt = None
    if options.part != 'start':
        if not arguments or arguments[0].startswith('--'):
            sys.exit(f'error: --part={options.part} needs a nanoGPT checkout to compare with, or for '
                     'transformers a folder of weights: give it first, python dev/versus.py DIR ...')
        nanogpt = arguments.pop(0)
    return nanogpt, options, arguments


def main():
    nanogpt, options, arguments = parse_arguments()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        if options.random_tokens:
            write_random_tokens(folder, options.random_tokens)
            arguments += [f'--dataset={folder}', '--mixture_phases=', '--max_epochs=0']
        try:
            comparison = PARTS[options.part](nanogpt, arguments, options, folder)
            for _ in range(options.rounds):
                row = compare_once(comparison)
                rows.append(row)
                print(json.dumps(row) if options.json else as_text(comparison.name, row), flush=True)
        except RuntimeError as error:
            print(json.dumps(dict(error=str(error))) if options.json else error)
            sys.exit(1)
    if not options.json:
        print(medians_text(rows, comparison))


if __name__ == '__main__':
    main()
