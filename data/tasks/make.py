"""Make a task of your own text: which of four continuations does a passage have?

    python data/tasks/make.py --input=book.txt --out=questions.jsonl --count=200
    python -m kilogpt.evaluate out-mybooks --tasks=questions.jsonl

The wrong continuations are those of other passages. Use text that the model was not trained on.
"""
import json
import os
import random
import sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), '..', '..'))
from data.make.readers import find_files, measure, read_texts
from kilogpt.configurator import configure, exit_on_error

input = ''  # files or globs, or folders with .txt, .md, .jsonl or .parquet files; separated by commas
text_field = 'text'  # the field of .jsonl, or column of .parquet, that holds the text of a document
out = 'questions.jsonl'  # the task's file
count = 200  # questions
context_words = 60  # words of a passage
choice_words = 12  # words of a continuation
seed = 0  # of the passages and the order of choices
configure(globals())
CHOICES = 4

if __name__ == '__main__':
    with exit_on_error():
        if not input:
            raise ValueError("no text files given: set --input, such as --input='books/*.txt'")
        if min(count, context_words, choice_words) < 1:
            raise ValueError(f'count is {count}, context_words is {context_words} and choice_words is '
                             f'{choice_words}, but each must be at least 1')
        passages = []  # (passage, its continuation); these do not overlap
        for text in read_texts(measure(find_files(input), text_field), text_field):
            words = text.split()
            size = context_words + choice_words
            for begin in range(0, len(words) - size + 1, size):
                middle = begin + context_words
                passages.append((' '.join(words[begin:middle]), ' '.join(words[middle:begin + size])))
        if len(passages) < max(count, CHOICES):
            raise ValueError(
                f'{input} has {len(passages)} passages of {context_words + choice_words} words, but '
                f'{max(count, CHOICES)} are needed: set count to less, or give more text')
        generator = random.Random(seed)
        with open(out, 'w', encoding='utf-8') as file:
            file.write(json.dumps({'settings': {'prompt': '{question}'}}) + '\n')
            for context, continuation in generator.sample(passages, count):
                others = [other for _, other in generator.sample(passages, CHOICES) if other != continuation]
                choices = [continuation, *others[:CHOICES - 1]]
                generator.shuffle(choices)
                line = dict(question=context, choices=choices, answer=choices.index(continuation))
                file.write(json.dumps(line, ensure_ascii=False) + '\n')
        print(f'wrote {count} questions to {out}')
