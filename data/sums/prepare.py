"""Prepare sums of two numbers below 100, a token for each character: text to begin with, prompts, and held-out prompts.

    python data/sums/prepare.py
    python train.py config/sums.py
    python train.py config/sums_rewards.py

A line of the text is a sum with its units first, such as 47+5=25 for 52: a digit then depends on those before it.
A row of train.jsonl or val.jsonl is a prompt, such as {"prompt": "\\n47+5=", "answer": "25"}. The sums in val.jsonl,
a tenth of all, are not in the text.
"""
import itertools
import json
import os
import random
import sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), '..', '..'))
from data.datasets import places_of
from data.make.prepare import write_dataset
from data.tokens.tokenizer import CharTokenizer
from kilogpt.configurator import configure, exit_on_error

out = 'sums'  # output folder: a name in data/, or a path
units_first = True  # False = write sums as people do, which takes longer to learn
lines = 30000  # sums in the text, drawn with replacement
seed = 1337  # determines which sums are held out, and the order
configure(globals())


def answer(a, b):
    return str(a + b)[::-1] if units_first else str(a + b)


def splits_of(sums, generator):
    """The splits of write_dataset: lines of text, of which one in twenty is for validation."""
    text = [f'{a}+{b}={answer(a, b)}' for a, b in generator.choices(sums, k=lines)]
    parts = dict(val=text[:lines // 20], train=text[lines // 20:])
    return {split: lambda start, part=part: ((line, True) for line in itertools.islice(part, start, None))
            for split, part in parts.items()}


def write_prompts(path, sums):
    with open(path, 'w', encoding='utf-8') as file:
        file.writelines(json.dumps(dict(prompt=f'\n{a}+{b}=', answer=answer(a, b))) + '\n' for a, b in sums)


if __name__ == '__main__':
    with exit_on_error():
        generator = random.Random(seed)
        sums = [(a, b) for a in range(100) for b in range(100)]
        generator.shuffle(sums)
        held_out, others = sums[:1000], sums[1000:]
        tokenizer = CharTokenizer.from_text('\n+=0123456789')
        tokenizer.eot = tokenizer.ids['\n']  # lines are documents, which begin with a line break
        write_dataset(out, tokenizer, splits_of(others, generator), source=[lines, seed, units_first], origin='sums', share='')
        folder = places_of(out)[0]
        write_prompts(os.path.join(folder, 'train.jsonl'), others)
        write_prompts(os.path.join(folder, 'val.jsonl'), held_out)
