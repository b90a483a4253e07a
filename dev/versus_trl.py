"""Compare finetuning on conversations with transformers, peft and TRL: losses, seconds and memory.

    python data/chatterbot/prepare.py --tokenizer=../smollm2
    OMP_NUM_THREADS=2 python dev/versus_trl.py ../smollm2 --dataset=chatterbot
    OMP_NUM_THREADS=2 python dev/versus_trl.py ../smollm2 --dataset=chatterbot --lora_rank=16

Both train the same weights (and begin with the same adapters, which peft draws) on the same conversations in
the same order, with the same optimizer, in float32. Ours come packed into rows. Theirs are what each row of
ours holds, padded by TRL's collator, --conversations at a time, whose gradients are added up. All other
arguments are keys of train.py.
"""
import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, ROOT)
import numpy as np
import torch

from data.datasets import find_sources
from data.splits import open_training_split
from kilogpt import metrics
from kilogpt.configurator import config_of
from kilogpt.script_runs import as_arguments, timed, train

KEYS = dict(documents='pack', block_size=256, batch_size=4, gradient_accumulation_steps=1, learning_rate=1e-4,
            weight_decay=0.0, dropout=0.0, dtype='float32', device='cpu', eval_iters=0, keep_checkpoints=0,
            decay_lr=False, log_interval=1)


def examples_of(batch):
    """The conversations of a batch of rows, as TRL's collator takes them."""
    for x, y, starts in zip(*batch):
        for start in np.unique(starts):
            places = np.flatnonzero(starts == start)
            targets = y[places]
            if (targets < 0).all():
                continue
            ids, labels = [*x[places].tolist(), int(targets[-1])], [-1, *targets.tolist()]
            length = len(ids) - (ids[-1] < 0)
            yield dict(input_ids=ids[:length], labels=[-100 if label < 0 else label for label in labels[:length]])


def train_theirs(weights, config, adapter, iterations, conversations):
    """Print a JSON line with loss, seconds and tokens for each iteration, then one with the memory."""
    from transformers import AutoModelForCausalLM
    from trl.trainer.sft_trainer import DataCollatorForLanguageModeling
    model = AutoModelForCausalLM.from_pretrained(weights, dtype=torch.float32).train()
    if adapter:
        from peft import PeftModel
        model = PeftModel.from_pretrained(model, adapter, is_trainable=True)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=config['learning_rate'], betas=(config['beta1'], config['beta2']),
                                  weight_decay=0.0, fused=True)
    collate = DataCollatorForLanguageModeling(pad_token_id=0)
    loader = open_training_split(find_sources(config['dataset']), model.config.vocab_size, config)
    rows = config['batch_size'] * config['gradient_accumulation_steps']
    for iteration in range(iterations):
        numbers = np.arange(iteration * rows, (iteration + 1) * rows)
        examples = list(examples_of(loader.train_batch(numbers)))
        began, total, padded = time.perf_counter(), 0.0, 0
        n_targets = sum(label >= 0 for example in examples for label in example['labels'])
        for first in range(0, len(examples), conversations):
            batch = collate(examples[first:first + conversations])
            loss = model(**batch, num_items_in_batch=n_targets).loss
            loss.backward()
            total, padded = total + loss.item(), padded + batch['input_ids'].numel()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        print(json.dumps(dict(loss=total, seconds=time.perf_counter() - began, padded=padded,
                              tokens=sum(len(example['input_ids']) for example in examples))), flush=True)
    print(json.dumps(dict(gb=metrics.peak_memory_gb(torch.device('cpu')))))


def draw_adapter(weights, rank, folder):
    """Write an adapter of all linears in blocks, as peft draws it, and a run of ours that begins with it."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM
    adapter = os.path.join(folder, 'adapter')
    torch.manual_seed(0)
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(weights, dtype=torch.float32),
                           LoraConfig(r=rank, lora_alpha=16, target_modules='all-linear'))
    model.save_pretrained(adapter)
    timed(['-m', 'kilogpt.convert', 'import', adapter, os.path.join(folder, 'begin'), f'--base={weights}'])
    return adapter, os.path.join(folder, 'begin')


def main():
    parser = argparse.ArgumentParser('python dev/versus_trl.py', '%(prog)s WEIGHTS [options] [--key=value ...]',
                                     __doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('weights', help='a Hugging Face folder')
    parser.add_argument('--iters', type=int, default=20, help='iterations (20)')
    parser.add_argument('--conversations', type=int, default=8, help='of a batch of theirs, as in TRL (8)')
    parser.add_argument('--lora_rank', type=int, default=0, help='train adapters; 0 = all weights (0)')
    parser.add_argument('--adapter', default='', help=argparse.SUPPRESS)
    parser.add_argument('--theirs', action='store_true', help=argparse.SUPPRESS)  # in a process of its own
    options, more = parser.parse_known_args()
    arguments = [*as_arguments(**KEYS), *more]
    config = config_of(os.path.join(ROOT, 'train.py'), arguments)
    if options.theirs:
        return train_theirs(options.weights, config, options.adapter, options.iters, options.conversations)
    with tempfile.TemporaryDirectory() as folder:
        adapter, begin = '', os.path.abspath(options.weights)
        if options.lora_rank:
            adapter, begin = draw_adapter(options.weights, options.lora_rank, folder)
        run = train(arguments, os.path.join(folder, 'ours'), 1, max_iters=options.iters, init_from=begin)
        output = subprocess.run([sys.executable, __file__, *sys.argv[1:], '--theirs', f'--adapter={adapter}'],
                                check=True, stdout=subprocess.PIPE, text=True).stdout
    *theirs, memory = map(json.loads, output.strip().split('\n'))
    differences = []
    for iteration, (their_line, our_line) in enumerate(zip(theirs, run.train_lines), 1):
        differences.append(abs(their_line['loss'] - our_line['loss']))
        print(f'{iteration:>3}  loss {their_line["loss"]:.5f} {our_line["loss"]:.5f}   seconds '
              f'{their_line["seconds"]:6.2f} {our_line["dt_ms"] / 1000:6.2f}   tokens {their_line["tokens"]:,} '
              f'({their_line["padded"]:,} with padding)')
    seconds = statistics.median(line['seconds'] for line in theirs[2:])
    ours, gb = run.median('dt_ms', 2) / 1000, run.median('mem_gb', options.iters - 1)
    print(f'losses differ by {max(differences):.1e} at most; medians: {seconds:.2f} s and {ours:.2f} s, ratio '
          f'{seconds / ours:.2f}; memory: {memory["gb"]:.2f} GB and {gb:.2f} GB, ratio {gb / memory["gb"]:.2f}')


if __name__ == '__main__':
    main()
