"""Compare kiloGPT with lm-evaluation-harness's own backend: log-likelihoods, accuracy and seconds.

    python data/tasks/make.py --input=book.txt --out=questions.jsonl --count=200
    OMP_NUM_THREADS=2 python dev/versus_lm_eval.py ../smollm2 questions.jsonl
    python dev/versus_lm_eval.py ../smollm2 --text=book.txt --text_bytes=100000

Both get the same requests in the same process, in turns, in float32 on the CPU. First the backend, which runs
the model of transformers, scores some questions at each batch size, and then it uses the fastest one. --text
compares bits per byte with a plain loop over that model and the same pieces of the text.
"""
import argparse
import math
import os
import sys
import time

import torch

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM

from kilogpt.evaluate.harness import HarnessModel
from kilogpt.evaluate.open_model import open_model
from kilogpt.evaluate.scorer import Scorer
from kilogpt.evaluate.tasks import read_task

TRIED = 10  # questions for each batch size


def score(model, questions):
    """([[log-likelihood of each choice] of each question], wall seconds, CPU seconds)."""
    pairs = [pair for question in questions for pair in question.pairs]
    requests = [Instance('loglikelihood', {}, pair, number) for number, pair in enumerate(pairs)]
    wall, cpu = time.perf_counter(), time.process_time()
    answers = iter(model.loglikelihood(requests, disable_tqdm=True))
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    return [[next(answers)[0] for _ in question.pairs] for question in questions], wall, cpu


def find_batch_size(theirs, questions, sizes):
    """Set the fastest batch size of the backend."""
    seconds = {}
    for size in sizes:
        theirs.batch_size_per_gpu = size
        seconds[size] = score(theirs, questions[:TRIED])[2]
        print(f'batch_size {size}: {seconds[size]:.1f} CPU s for {TRIED} questions', flush=True)
    theirs.batch_size_per_gpu = min(seconds, key=seconds.get)


def accuracy(nats, questions):
    right = 0
    for of_choices, question in zip(nats, questions):
        right += of_choices.index(max(of_choices)) == question.answer
    return right / len(questions)


def compare_questions(theirs, ours, questions, options):
    find_batch_size(theirs, questions, map(int, options.batch_sizes.split(',')))
    print(f'{len(questions)} questions, batch_size {theirs.batch_size}, {torch.get_num_threads()} threads')
    print(f'{"round":>5}  {"lm_eval s":>9}  {"kiloGPT s":>9}  {"ratio":>5}  {"CPU ratio":>9}  '
          f'{"accuracies":>15}  {"largest difference":>18}')
    for number in range(1, options.rounds + 1):
        their_nats, their_wall, their_cpu = score(theirs, questions)
        our_nats, our_wall, our_cpu = score(ours, questions)
        pairs = zip(sum(their_nats, []), sum(our_nats, []))
        difference = max(abs(left - right) for left, right in pairs)
        accuracies = f'{accuracy(their_nats, questions):.4f}, {accuracy(our_nats, questions):.4f}'
        print(f'{number:>5}  {their_wall:>9.1f}  {our_wall:>9.1f}  {their_wall / our_wall:>5.2f}  '
              f'{their_cpu / our_cpu:>9.2f}  {accuracies:>15}  {difference:>18.2e}', flush=True)


@torch.no_grad()
def compare_bits_per_byte(theirs, ours, text):
    tokens = torch.tensor([theirs.prefix_token_id, *theirs.tok_encode(text)])
    nats, done, block_size = 0.0, 1, theirs.max_length
    while done < len(tokens):
        end = min(done + block_size, len(tokens))
        piece = tokens[max(0, end - 1 - block_size):end]
        logits = theirs.model(piece[None, :-1]).logits[0, done - end:]
        nats += torch.nn.functional.cross_entropy(logits, tokens[done:end], reduction='sum').item()
        done = end
    request = Instance('loglikelihood_rolling', {}, (text,), 0)
    n_bytes = len(text.encode())
    for name, total in dict(transformers=nats, kiloGPT=-ours.loglikelihood_rolling([request])[0]).items():
        print(f'{name:<12}  {total / math.log(2) / n_bytes:.7f} bits per byte of {n_bytes:,}')


if __name__ == '__main__':
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('weights', help='a Hugging Face folder with tokenizer.json')
    parser.add_argument('questions', nargs='?', help='a task with choices, as data/tasks/make.py writes them')
    parser.add_argument('--rounds', type=int, default=2)
    parser.add_argument('--batch_sizes', default='1,4,8,16', help='those to try (1,4,8,16)')
    parser.add_argument('--text', help='a file of text')
    parser.add_argument('--text_bytes', type=int, default=100_000)
    options = parser.parse_args()
    theirs = HFLM(pretrained=options.weights, device='cpu', dtype='float32', batch_size=1)
    opened = open_model(options.weights, 'best', '', 'cpu', 'float32')
    scorer = Scorer(opened.parallel, opened.config, opened.dtype, opened.separator)
    ours = HarnessModel(scorer, opened.tokenizer)
    if options.questions:
        compare_questions(theirs, ours, read_task(options.questions).questions, options)
    if options.text:
        with open(options.text, 'rb') as file:
            text = file.read(options.text_bytes).decode(errors='ignore')
        compare_bits_per_byte(theirs, ours, text)
