"""Compare finetuning on conversations, and on pairs, with transformers, peft and TRL: losses, seconds and memory.

    python data/chatterbot/prepare.py --tokenizer=../smollm2
    OMP_NUM_THREADS=2 python dev/versus_trl.py ../smollm2 --dataset=chatterbot
    OMP_NUM_THREADS=2 python dev/versus_trl.py ../smollm2 --dataset=chatterbot --lora_rank=16

    python data/chatterbot/prepare.py --tokenizer=../smollm2 --pairs --out=chatterbot_pairs
    python -m kilogpt.evaluate ../smollm2 --reference=chatterbot_pairs --dtype=float32
    OMP_NUM_THREADS=2 python dev/versus_trl.py ../smollm2 --dataset=chatterbot_pairs --loss=dpo --block_size=512 \
        --batch_size=1 --learning_rate=1e-5 --conversations=2

Both train the same weights (and begin with the same adapters, which peft draws) on the same conversations or pairs
in the same order, with the same optimizer, in float32. Ours come packed into rows. Theirs are what each row of ours
holds, padded by TRL's collator, --conversations at a time (or pairs), whose gradients are added up. With --loss=dpo,
the loss is that of TRL's DPOTrainer, which computes the reference ahead of time too. All other arguments are keys
of train.py.
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
from kilogpt.configurator import config_of
from kilogpt.launch_train import as_arguments, timed, train
from kilogpt.run import metrics

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


def pairs_of(batch):
    """The pairs of a batch of rows that count, as TRL's collator takes them."""
    for x, y, starts, pairs, _ in zip(*batch):
        for number in np.unique(pairs[pairs > 0]):
            chosen, rejected = np.flatnonzero(pairs == number), np.flatnonzero(pairs == -number)
            prompt = x[starts[chosen[0]]:chosen[0] + 1]
            yield dict(prompt_ids=prompt.tolist(), chosen_ids=y[chosen].tolist(), rejected_ids=y[rejected].tolist())


class Answers:
    """Finetuning on conversations, with TRL's collator."""

    def __init__(self, model, weights, config):
        from trl.trainer.sft_trainer import DataCollatorForLanguageModeling
        self.model, self.examples_of = model, examples_of
        self.collate = DataCollatorForLanguageModeling(pad_token_id=0)

    def count(self, batch):
        return int((batch['labels'] >= 0).sum())

    def loss(self, batch, n_counted):
        return self.model(**batch, num_items_in_batch=n_counted).loss


class Preferences:
    """DPO, with the collator and the loss of TRL's trainer. The model is still the reference when it collates."""

    def __init__(self, model, weights, config):
        from datasets import Dataset
        from transformers import AutoTokenizer
        from trl import DPOConfig, DPOTrainer
        with tempfile.TemporaryDirectory() as folder:
            arguments = DPOConfig(folder, beta=config['dpo_beta'], max_length=None, precompute_ref_log_probs=True,
                                  gradient_checkpointing=False, use_cpu=True, bf16=False, report_to=[])
        unused = Dataset.from_list([dict(prompt='1 + 1 =', chosen=' 2', rejected=' 3')])  # the trainer wants some
        self.model, self.examples_of = model, pairs_of
        self.trainer = DPOTrainer(model, args=arguments, train_dataset=unused,
                                  processing_class=AutoTokenizer.from_pretrained(weights))

    def collate(self, examples):
        batch = self.trainer.data_collator(examples)
        chosen, rejected = self.trainer.compute_ref_log_probs(self.model, batch)
        return batch | dict(ref_chosen_logps=chosen, ref_rejected_logps=rejected)

    def count(self, batch):
        return len(batch['ref_chosen_logps'])

    def loss(self, batch, n_counted):
        return self.trainer.compute_loss(self.model, batch) * self.count(batch) / n_counted


def train_theirs(weights, config, adapter, iterations, conversations):
    """Print a JSON line with loss, seconds and tokens for each iteration, then one with the memory."""
    from transformers import AutoModelForCausalLM
    model = AutoModelForCausalLM.from_pretrained(weights, dtype=torch.float32).train()
    if adapter:
        from peft import PeftModel
        model = PeftModel.from_pretrained(model, adapter, is_trainable=True)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=config['learning_rate'], betas=(config['beta1'], config['beta2']),
                                  weight_decay=0.0, fused=True)
    theirs = (Preferences if config['loss'] == 'dpo' else Answers)(model, weights, config)
    loader = open_training_split(find_sources(config['dataset']), model.config.vocab_size, config)
    rows = config['batch_size'] * config['gradient_accumulation_steps']
    batches_of = []  # each iteration
    for iteration in range(iterations):
        numbers = np.arange(iteration * rows, (iteration + 1) * rows)
        examples = list(theirs.examples_of(loader.train_batch(numbers)))
        batches_of.append([theirs.collate(examples[first:first + conversations])
                           for first in range(0, len(examples), conversations)])
    for batches in batches_of:
        began, total = time.perf_counter(), 0.0
        n_counted = sum(map(theirs.count, batches))
        for batch in batches:
            loss = theirs.loss(batch, n_counted)
            loss.backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        seconds = time.perf_counter() - began
        tokens = sum(int(batch['attention_mask'].sum()) for batch in batches)
        padded = sum(batch['input_ids'].numel() for batch in batches)
        print(json.dumps(dict(loss=total, seconds=seconds, padded=padded, tokens=tokens)), flush=True)
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
    parser.add_argument('--conversations', type=int, default=8, help='or pairs of a batch of theirs, as in TRL (8)')
    parser.add_argument('--lora_rank', type=int, default=0, help='train adapters; 0 = all weights (0)')
    parser.add_argument('--adapter', default='', help=argparse.SUPPRESS)
    parser.add_argument('--theirs', action='store_true', help=argparse.SUPPRESS)  # in a process of its own
    options, more = parser.parse_known_args()
    arguments = [*as_arguments(**KEYS), *more]
    config = config_of(os.path.join(ROOT, 'train.py'), arguments)
    if config['loss'] == 'dpo' and options.lora_rank:
        parser.error('the reference of --loss=dpo is that of all weights: leave --lora_rank out')
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
